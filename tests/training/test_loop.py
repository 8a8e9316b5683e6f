"""The loop: learns what is there to learn, stops when told, and resumes to the bit."""

import itertools
import json
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.training.golden import make_loss_curve
from tests.training.histories import SMALL, fresh_model, leave_one_out, successor_walks
from training import loop
from training.batches import training_windows
from training.config import ConfigError, OptimizerConfig
from training.evaluate import ranks, score_users
from training.loop import TrainState, fit, going_on, refit
from training.splits import Split

NUM_ITEMS = 25
FILTERING = pytest.mark.parametrize("filtering", [True, False], ids=["filtering", "plain"])


def walks_split(num_users: int = 100, seed: int = 0) -> Split:
    return leave_one_out(successor_walks(num_users, NUM_ITEMS, length=10, seed=seed))


def settings(**changed: object) -> OptimizerConfig:
    return OptimizerConfig.model_validate({"batch_size": 32, "learning_rate": 1e-2, **changed})


def validation_ndcgs(monkeypatch: pytest.MonkeyPatch, ranks_by_epoch: list[float]) -> None:
    """Let validation put every target at a given rank after each epoch."""
    remaining = iter(ranks_by_epoch)
    monkeypatch.setattr(loop, "score_users", lambda *_: None)
    monkeypatch.setattr(loop, "ranks", lambda scored, targets, world: np.full(len(targets), next(remaining)))


@FILTERING
@pytest.mark.parametrize("loss", ["full", "sampled"])
def test_a_deterministic_successor_is_learned_within_300_steps(filtering: bool, loss: str) -> None:
    split = walks_split()
    model = fresh_model(split, NUM_ITEMS, SMALL.model_copy(update={"filtering": filtering, "dropout": 0.1}))
    steps: list[int] = []
    config = settings(epochs=30, patience=30, loss=loss, num_negatives=32, learning_rate=2e-2)

    fit(model, split, "next_item", config, on_step=lambda done, total, mean: steps.append(done))

    test_ranks = ranks(score_users(model, split.test.history, "next_item"), split.test)
    assert len(steps) <= 300
    assert (test_ranks == 1).mean() > 0.9


@pytest.mark.parametrize("name", make_loss_curve.VARIANTS)
def test_twenty_steps_give_the_stored_loss_curve(name: str) -> None:
    stored = json.loads(make_loss_curve.PATH.read_text())

    losses = make_loss_curve.losses_of_twenty_steps(*make_loss_curve.VARIANTS[name])

    assert len(losses) == 20
    # Sums in another order (other cores, other BLAS) differ in the seventh digit; Adam's first steps, whose
    # size hardly depends on the gradient's, carry that on without growing it much.
    assert losses == pytest.approx(stored[name], rel=1e-4)


def test_the_loss_falls_and_the_curve_records_every_epoch() -> None:
    split = walks_split()
    rows: list[dict[str, float]] = []

    state = fit(fresh_model(split, NUM_ITEMS), split, "next_item", settings(epochs=3), on_epoch=rows.append)

    assert rows == state.curve
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert rows[0]["loss"] > rows[1]["loss"] > rows[2]["loss"]
    assert set(rows[0]) == {"epoch", "loss", "val_ndcg@10", "val_hr@10", "seconds"}


def test_a_refit_takes_the_steps_of_the_fit_that_told_it_how_many() -> None:
    split, config = walks_split(), settings(epochs=4, schedule="linear")
    fitted, again = fresh_model(split, NUM_ITEMS), fresh_model(split, NUM_ITEMS)
    kept: list[dict[str, torch.Tensor]] = []

    def keep(row: dict[str, float]) -> None:
        kept.append({name: value.clone() for name, value in fitted.state_dict().items()})

    fit(fitted, split, "next_item", config, on_epoch=keep)
    state = refit(again, split.train, 3, config)

    assert [set(row) for row in state.curve] == [{"epoch", "loss", "seconds"}] * 3
    assert same(again.state_dict(), kept[2])
    assert not same(again.state_dict(), kept[3])


def test_going_on_begins_at_half_the_rate_which_falls_to_nought() -> None:
    split, rates = walks_split(), []

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        rates.append(optimizer.param_groups[0]["lr"])

    handle = register_optimizer_step_pre_hook(note)
    refit(fresh_model(split, NUM_ITEMS), split.train, 2, going_on(settings(epochs=30, learning_rate=8e-3), 2))
    handle.remove()

    assert rates == pytest.approx([4e-3 * (1 - step / 8) for step in range(8)])


def test_a_refit_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    split, checkpoint, config = walks_split(), tmp_path / "refit.pt", settings(epochs=3)
    unbroken, broken, resumed = (fresh_model(split, NUM_ITEMS, seed=seed) for seed in (0, 0, 5))

    def die_in_the_second_epoch(row: dict[str, float]) -> None:
        if row["epoch"] == 2:
            raise KeyboardInterrupt

    refit(unbroken, split.train, 3, config)
    with pytest.raises(KeyboardInterrupt):
        refit(broken, split.train, 3, config, checkpoint, on_epoch=die_in_the_second_epoch)
    state = refit(resumed, split.train, 3, config, checkpoint)

    assert state.epoch == 3
    assert same(resumed.state_dict(), unbroken.state_dict())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_progress_counts_the_steps_of_each_epoch() -> None:
    split = walks_split()
    seen: list[tuple[int, int]] = []

    fit(
        fresh_model(split, NUM_ITEMS),
        split,
        "next_item",
        settings(epochs=2),
        on_step=lambda done, total, mean: seen.append((done, total)),
    )

    # 100 users of 8 training items, one window each, 32 a batch.
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)] * 2


def test_an_epoch_can_end_early_and_the_next_one_shows_other_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    split = walks_split()
    seen: list[tuple[int, int]] = []
    shown: list[frozenset[int]] = []
    drawn = loop.training_batch

    def remember(model: object, windows: object, rows: torch.Tensor, *rest: object) -> object:
        shown.append(frozenset(rows.tolist()))
        return drawn(model, windows, rows, *rest)

    monkeypatch.setattr(loop, "training_batch", remember)
    config = settings(epochs=2, epoch_steps=2)

    fit(fresh_model(split, NUM_ITEMS), split, "next_item", config, on_step=lambda *step: seen.append(step[:2]))

    # Of the four batches that 100 windows make.
    assert seen == [(1, 2), (2, 2)] * 2
    assert shown[:2] != shown[2:]


def test_the_seed_decides_the_run() -> None:
    split = walks_split()
    config = SMALL.model_copy(update={"dropout": 0.2})

    def losses(seed: int) -> list[float]:
        model = fresh_model(split, NUM_ITEMS, config)
        state = fit(model, split, "next_item", settings(epochs=2, seed=seed, loss="sampled"))
        return [row["loss"] for row in state.curve]

    assert losses(1) == losses(1)
    assert losses(1) != losses(2)


# Resuming


def without_time(state: TrainState) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in state.curve]


def rates_of_each_step(**changed: object) -> list[tuple[float, float]]:
    """The learning rates of the weights and of θ at each step of three epochs of four steps."""
    split = walks_split()
    seen: list[tuple[float, float]] = []
    hook = register_optimizer_step_pre_hook(
        lambda optimizer, *_: seen.append(tuple(group["lr"] for group in optimizer.param_groups))
    )
    try:
        fit(fresh_model(split, NUM_ITEMS), split, "next_item", settings(epochs=3, patience=3, **changed))
    finally:
        hook.remove()
    return seen


def test_the_learning_rate_stays_as_it_is() -> None:
    assert rates_of_each_step(precision_rate_multiple=5.0) == [pytest.approx((1e-2, 5e-2))] * 12


def test_a_linear_schedule_ends_at_zero_for_the_weights_and_for_theta() -> None:
    rates = rates_of_each_step(schedule="linear", precision_rate_multiple=5.0)

    weights = np.linspace(1e-2, 0, 12, endpoint=False)
    assert np.array(rates) == pytest.approx(np.stack([weights, 5 * weights], 1))


@pytest.mark.parametrize("loss", ["full", "sampled"])
def test_a_resumed_run_takes_the_steps_of_an_unbroken_one(loss: str, tmp_path: Path) -> None:
    split, checkpoint = walks_split(), tmp_path / "run" / "checkpoint.pt"
    config = SMALL.model_copy(update={"dropout": 0.3, "attention_dropout": 0.1})
    common = {"loss": loss, "unknown_rate": 0.2}
    unbroken = fresh_model(split, NUM_ITEMS, config)
    expected = fit(unbroken, split, "next_item", settings(epochs=4, **common))

    fit(fresh_model(split, NUM_ITEMS, config), split, "next_item", settings(epochs=2, **common), checkpoint)
    # As a new process begins: other weights, another state of the global generator.
    torch.manual_seed(99)
    torch.rand(7)
    resumed = fresh_model(split, NUM_ITEMS, config, seed=5)
    state = fit(resumed, split, "next_item", settings(epochs=4, **common), checkpoint)

    assert without_time(state) == without_time(expected)
    assert (state.best_epoch, state.best_ndcg) == (expected.best_epoch, expected.best_ndcg)
    for name, weight in unbroken.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], weight), name
    assert optimizer_tensors(state) == optimizer_tensors(expected)


def optimizer_tensors(state: TrainState) -> list[list[float]]:
    moments = state.optimizer.state_dict()["state"].values()
    return [tensor.flatten().tolist() for moment in moments for tensor in moment.values()]


def test_a_finished_run_resumes_to_its_best_weights_without_another_step(tmp_path: Path) -> None:
    split, checkpoint = walks_split(), tmp_path / "checkpoint.pt"
    first = fresh_model(split, NUM_ITEMS)
    fit(first, split, "next_item", settings(epochs=2), checkpoint)
    second, steps = fresh_model(split, NUM_ITEMS, seed=5), []

    fit(second, split, "next_item", settings(epochs=2), checkpoint, on_step=lambda *step: steps.append(step))

    assert steps == []
    assert all(torch.equal(second.state_dict()[name], weight) for name, weight in first.state_dict().items())


def test_a_checkpoint_holds_no_pickled_code_and_nothing_lies_beside_it(tmp_path: Path) -> None:
    split, checkpoint = walks_split(), tmp_path / "checkpoint.pt"

    fit(fresh_model(split, NUM_ITEMS), split, "next_item", settings(epochs=1), checkpoint)

    assert torch.load(checkpoint, weights_only=True)["progress"]["epoch"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_run_that_dies_in_an_epoch_resumes_from_the_epoch_before(tmp_path: Path) -> None:
    split, checkpoint = walks_split(), tmp_path / "checkpoint.pt"
    expected = fit(fresh_model(split, NUM_ITEMS), split, "next_item", settings(epochs=3))
    calls = itertools.count(1)

    def die_in_the_second_epoch(*_: object) -> None:
        if next(calls) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(fresh_model(split, NUM_ITEMS), split, "next_item", settings(epochs=3), checkpoint, die_in_the_second_epoch)
    state = fit(fresh_model(split, NUM_ITEMS, seed=5), split, "next_item", settings(epochs=3), checkpoint)

    assert without_time(state) == without_time(expected)


# Stopping


def test_training_stops_after_the_epochs_without_a_better_ndcg_that_patience_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    validation_ndcgs(monkeypatch, [9, 3, 2, 5, 2, 4, 1, 1])
    split = walks_split(num_users=10)

    state = fit(fresh_model(split, NUM_ITEMS), split, "next_item", settings(epochs=8, patience=3))

    # Best at epoch 3; epochs 4, 5 (equal, not better) and 6 are the three that patience allows.
    assert state.epoch == 6
    assert state.best_epoch == 3
    assert state.best_ndcg == pytest.approx(1 / np.log2(1 + 2))


def test_patience_as_long_as_the_run_never_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    validation_ndcgs(monkeypatch, [1, 9, 9, 9, 9])
    split = walks_split(num_users=10)

    state = fit(fresh_model(split, NUM_ITEMS), split, "next_item", settings(epochs=5, patience=5))

    assert (state.epoch, state.best_epoch) == (5, 1)


def test_the_model_is_left_with_the_weights_of_its_best_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    validation_ndcgs(monkeypatch, [5, 1, 7, 6])
    split = walks_split(num_users=10)
    after_epoch: list[dict[str, torch.Tensor]] = []
    model = fresh_model(split, NUM_ITEMS)

    fit(
        model,
        split,
        "next_item",
        settings(epochs=4),
        on_epoch=lambda row: after_epoch.append({k: v.clone() for k, v in model.state_dict().items()}),
    )

    assert all(torch.equal(weight, after_epoch[1][name]) for name, weight in model.state_dict().items())
    assert not torch.equal(after_epoch[1]["item_embedding.weight"], after_epoch[3]["item_embedding.weight"])


def test_no_targets_ranked_at_all_still_leaves_a_best_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    validation_ndcgs(monkeypatch, [np.inf, np.inf])
    split = walks_split(num_users=10)

    state = fit(fresh_model(split, NUM_ITEMS), split, "next_item", settings(epochs=2))

    assert (state.best_epoch, state.best_ndcg) == (1, 0.0)


def test_no_epoch_is_begun_after_max_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=10)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    split = walks_split(num_users=10)

    state = fit(fresh_model(split, NUM_ITEMS), split, "next_item", settings(epochs=9, max_seconds=30))

    # Every epoch takes ten seconds of this clock.
    assert [row["seconds"] for row in state.curve] == [10, 20, 30]


def test_the_seconds_before_a_resume_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = itertools.count(step=10)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    split, checkpoint = walks_split(num_users=10), tmp_path / "checkpoint.pt"
    fit(fresh_model(split, NUM_ITEMS), split, "next_item", settings(epochs=2), checkpoint)

    state = fit(fresh_model(split, NUM_ITEMS), split, "next_item", settings(epochs=9, max_seconds=30), checkpoint)

    assert [row["seconds"] for row in state.curve] == [10, 20, 30]


def test_a_loss_that_is_no_longer_finite_stops_with_the_settings_to_lower(tmp_path: Path) -> None:
    split, checkpoint = walks_split(), tmp_path / "checkpoint.pt"
    model = fresh_model(split, NUM_ITEMS)
    with torch.no_grad():
        model.item_embedding.weight[10] = torch.nan

    with pytest.raises(ConfigError, match=r"step 1 of epoch 1.*lower training\.learning_rate"):
        fit(model, split, "next_item", settings(), checkpoint)

    assert not checkpoint.exists()


def test_a_gradient_that_is_not_finite_stops_before_it_reaches_the_weights() -> None:
    split = walks_split()
    model = fresh_model(split, NUM_ITEMS)
    before = model.item_embedding.weight.detach().clone()
    model.item_embedding.weight.register_hook(lambda gradient: gradient * torch.nan)

    with pytest.raises(ConfigError, match=r"its gradient nan.*lower training\.learning_rate"):
        fit(model, split, "next_item", settings())

    assert torch.equal(model.item_embedding.weight, before)


@pytest.mark.parametrize("backbone", ["sasrec", "hstu"])
@FILTERING
def test_prefixes_have_the_loss_and_gradient_of_the_same_predictions_from_whole_rows(
    backbone: str, filtering: bool
) -> None:
    split = walks_split(num_users=12)
    config = SMALL.model_copy(update={"backbone": backbone, "filtering": filtering})
    model = fresh_model(split, 20, config).eval()

    def loss_and_gradient(prefixes: bool) -> tuple[float, torch.Tensor]:
        windows = training_windows(split.train, config.max_len, prefixes)
        chosen = settings(prefixes=prefixes, unknown_rate=0.0)
        generator = torch.Generator().manual_seed(0)
        batch = loop.training_batch(model, windows, torch.arange(len(windows)), chosen, generator)
        model.zero_grad()
        loss = loop.BatchLoss(model, chosen)(batch, generator)
        loss.backward()
        return loss.item(), model.item_embedding.weight.grad.clone()

    (from_rows, row_gradient), (from_prefixes, prefix_gradient) = loss_and_gradient(False), loss_and_gradient(True)
    assert from_prefixes == pytest.approx(from_rows, rel=1e-5)
    torch.testing.assert_close(prefix_gradient, row_gradient, rtol=1e-3, atol=1e-6)


# The device


@pytest.mark.parametrize("loss", ["full", "sampled"])
@pytest.mark.parametrize("backbone", ["sasrec", "hstu", "bert4rec"])
@FILTERING
def test_a_step_touches_no_tensor_on_another_device(
    backbone: str, filtering: bool, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tensors on `meta` have no values; like those on a GPU they refuse to meet the CPU's. It knows no autocast.
    device = torch.device("meta")
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    split = walks_split(num_users=10)
    changes = {"backbone": backbone, "filtering": filtering, "dropout": 0.1, "attention_dropout": 0.1}
    model = fresh_model(split, NUM_ITEMS, SMALL.model_copy(update=changes))
    generator = torch.Generator().manual_seed(0)
    config = settings(loss=loss, num_negatives=8)
    windows = training_windows(split.train, model.config.max_len)
    batch = loop.training_batch(model, windows, torch.arange(len(windows)), config, generator)

    value = loop.BatchLoss(model.to(device), config)(batch.to(device), generator)
    value.backward()

    assert value.device == device
    assert model.item_embedding.weight.grad.device == device


# The optimiser


def test_item_precisions_learn_at_a_multiple_of_the_base_rate() -> None:
    split = walks_split(num_users=10)

    def first_step(multiple: float) -> tuple[torch.Tensor, torch.Tensor]:
        model = fresh_model(split, NUM_ITEMS)
        before = model.item_embedding.weight.detach().clone()
        fit(model, split, "next_item", settings(epochs=1, precision_rate_multiple=multiple))
        moved = (model.item_embedding.weight.detach() - before).abs().max()
        return moved, model.initial_precision.level.detach().abs()

    (embedding_1, level_1), (embedding_20, level_20) = first_step(1.0), first_step(20.0)

    # Adam's first step is as long as the learning rate, whatever the gradient.
    assert embedding_1 == pytest.approx(embedding_20) == pytest.approx(0.01, rel=1e-3)
    assert level_1.item() == pytest.approx(0.01, rel=1e-3)
    assert level_20.item() == pytest.approx(0.2, rel=1e-3)


def test_weight_decay_spares_the_item_precisions() -> None:
    split = walks_split(num_users=10)
    model = fresh_model(split, NUM_ITEMS)

    state = fit(model, split, "next_item", settings(epochs=1, weight_decay=0.1))

    decayed = {id(p) for group in state.optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    spared = {name for name, parameter in model.named_parameters() if id(parameter) not in decayed}
    assert spared == {name for name, _ in model.named_parameters() if name.startswith("initial_precision.")}


def test_gradients_are_clipped_to_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[float] = []
    step = torch.optim.Adam.step

    def recording(self: torch.optim.Adam, *arguments: object) -> object:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms.append(torch.cat([grad.flatten() for grad in grads]).norm().item())
        return step(self, *arguments)

    monkeypatch.setattr(torch.optim.Adam, "step", recording)
    split = walks_split()

    fit(fresh_model(split, NUM_ITEMS), split, "next_item", settings(epochs=1, clip_norm=1e-3))

    # The clip divides by norm + 1e-6.
    assert norms == pytest.approx([1e-3] * 4, rel=2e-3)
