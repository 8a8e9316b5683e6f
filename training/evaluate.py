"""Full-ranking evaluation: what a model says before each user's target event, and how good that is.

The whole catalogue is ranked (never sampled negatives), seen items at −inf when the event is `next_new_item`,
special tokens never, ties as half a place. U users · N catalogue items · K list length
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
import torch

from model.backbone import Backbone
from model.bundle import Bundle, Calibration, Event, confidence_features
from model.config import FIRST_ITEM
from training import metrics
from training.batches import Batch, collate, serving_windows
from training.distributed import ALONE, World
from training.splits import Histories, Targets

CHUNK_USERS = 256
LIST_LENGTH = 10
"""The list on which calibration is judged."""


@dataclass(frozen=True)
class ScoredUsers:
    """Everything a model says of some users: `users` (B,) row numbers, `logit` and `variance` (B,N),
    the logit −inf where the event cannot be that item; `mean_precision` (B,) of the final state; `order_key` (B,N),
    what ranks and lists go by, −inf at the same items. None: the logit."""

    users: np.ndarray
    logit: torch.Tensor
    variance: torch.Tensor
    mean_precision: np.ndarray
    order_key: torch.Tensor | None = None

    @property
    def key(self) -> torch.Tensor:
        """What ranks and lists go by, (B,N)."""
        return self.logit if self.order_key is None else self.order_key


@dataclass(frozen=True)
class Predictions:
    """What a model says before each user's target event. Rank and list go by `ScoredUsers.key`, all else by the logit.

    Per user (U,): `rank` of the target, `log_probability` of the target in nats, `entropy` over the catalogue
    in nats, `mean_precision`, `num_events`. Per listed item (U,K), best first: `items`, item numbers;
    `list_log_probability`; `list_variance`; `hit`, whether it is the target.
    """

    rank: np.ndarray
    log_probability: np.ndarray
    entropy: np.ndarray
    mean_precision: np.ndarray
    num_events: np.ndarray
    items: np.ndarray
    list_log_probability: np.ndarray
    list_variance: np.ndarray
    hit: np.ndarray

    def features(self, training_counts: np.ndarray, k: int) -> dict[str, np.ndarray]:
        """The confidence map's inputs for the first k listed items."""
        return confidence_features(
            self.list_log_probability[:, :k],
            self.list_variance[:, :k],
            training_counts[self.items[:, :k] - FIRST_ITEM],
            self.entropy,
            self.mean_precision,
            self.num_events,
        )


Scorer = Callable[[Batch], tuple[torch.Tensor, torch.Tensor, np.ndarray]]
"""A batch of serving windows → logit and variance of the whole catalogue, each (B,N), and the final state's mean
precision (B,)."""


@torch.no_grad()
def score_users(
    model: Backbone, histories: Histories, event: Event, world: World = ALONE, seen: Histories | None = None
) -> Iterator[ScoredUsers]:
    """Score the whole catalogue for this process's users, a chunk of users of similar length at a time.

    Args:
        model: is put into eval mode.
        histories: what the model reads.
        event: what a score is of.
        world: the processes that share the users.
        seen: the same users' events that `next_new_item` rules out; None: those that the model reads.
    """
    model.eval()

    def score(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
        batch = batch.to(model.log_count.device)
        final = model.final_state(batch.items, batch.weights, batch.timestamps)
        scores = model.score(final)
        logit, variance, precision = (tensor.cpu() for tensor in (scores.logit, scores.variance, final.precision))
        return logit, variance, precision.mean(-1).numpy()

    yield from score_users_by(score, histories, event, model.config.max_len, world, seen)


@torch.no_grad()
def score_users_by(
    score: Scorer,
    histories: Histories,
    event: Event,
    max_len: int,
    world: World = ALONE,
    seen: Histories | None = None,
) -> Iterator[ScoredUsers]:
    """`score_users` by anything that scores a batch.

    Args:
        score: what scores; of windows of at most `max_len` events.
        histories, event, world, seen: see `score_users`.
        max_len: L.
    """
    ruled_out = histories if seen is None else seen
    windows = serving_windows(histories, max_len)
    for users in world.share(windows.num_inputs.argsort(stable=True).split(CHUNK_USERS)):
        logit, variance, mean_precision = score(collate(windows, users))
        rule_out_seen(logit, ruled_out, users, event)
        yield ScoredUsers(users.numpy(), logit, variance, mean_precision)


def score_users_by_bundle(bundle: Bundle, histories: Histories) -> Iterator[ScoredUsers]:
    """The same by the bundle's own graphs in ONNX Runtime: what the service will say."""
    encoder, ranker = (
        onnxruntime.InferenceSession(bundle.graph_path(graph), providers=["CPUExecutionProvider"])
        for graph in ("encoder", "ranker")
    )
    num_items = bundle.manifest.num_items

    def score(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
        mean, precision = encoder.run(
            ["mean", "precision"],
            {
                "items": batch.items.numpy(),
                "weights": batch.weights.numpy(),
                "timestamps": batch.timestamps.numpy(),
            },
        )
        none = np.zeros((len(mean), 1), np.int64)
        numbers, logit, variance, mean_precision = ranker.run(
            ["items", "logit", "score_variance", "mean_precision"],
            {
                "mean": mean,
                "precision": precision,
                "added_items": mean[:0],
                "added_variance": np.empty(0, np.float32),
                "seen": none,
                "blocked": none,
                # The whole catalogue, so that the target is found wherever it stands.
                "k": np.array([num_items]),
                "temperature": np.array(bundle.calibration.temperature, np.float32),
                "variance_scale": np.array(bundle.calibration.variance_scale, np.float32),
                "order_rows": np.empty(0, np.int64),
                "order_mean": mean[:0],
                "order_precision": precision[:0],
                "order_shrinkage": np.empty(0, np.float32),
                "order_kappa": np.empty(0, np.float32),
            },
        )
        by_row = np.argsort(numbers, axis=1)
        logit, variance = (torch.from_numpy(np.take_along_axis(values, by_row, 1)) for values in (logit, variance))
        return logit, variance, mean_precision

    return score_users_by(score, histories, bundle.calibration.event, bundle.manifest.model.max_len)


def rule_out_seen(logit: torch.Tensor, histories: Histories, users: torch.Tensor, event: Event) -> None:
    """Set to −inf, in place, what the event cannot be."""
    if event == "next_new_item":
        for row, user in enumerate(users.tolist()):
            logit[row, seen_rows(histories, user)] = -torch.inf


def seen_rows(histories: Histories, user: int) -> np.ndarray:
    """Catalogue rows the user has had, events of weight 0 included."""
    items = histories.items[histories.offsets[user] : histories.offsets[user + 1]]
    return items[items >= FIRST_ITEM] - FIRST_ITEM


def ranks(scored_users: Iterable[ScoredUsers], targets: Targets, world: World = ALONE) -> np.ndarray:
    """Rank of each user's target, (U,); of all users, where the processes scored a share each."""
    mine = [
        (scored.users, metrics.target_ranks(scored.key.numpy(), targets.target[scored.users] - FIRST_ITEM))
        for scored in scored_users
    ]
    result = np.empty(len(targets))
    for users, ranks_of_chunk in world.gathered(mine):
        result[users] = ranks_of_chunk
    return result


def predict(
    scored_users: Iterable[ScoredUsers],
    targets: Targets,
    temperature: float,
    k: int,
    world: World = ALONE,
    beside: np.ndarray | None = None,
) -> Predictions:
    """Everything evaluation and calibration need, with lists of k items.

    Args:
        scored_users: of `targets.history`, by `score_users` or `score_users_by_bundle`.
        targets: whose targets to look for.
        temperature: T of the raw probabilities softmax(logit/T).
        k: list length, cut to the catalogue's size.
        world: the processes that scored a share of the users each.
        beside: (U,K) numbers of items to tell of too, somebody else's lists; they stand behind the k best.
    """

    def of_chunk(scored: ScoredUsers) -> dict[str, np.ndarray]:
        listed = scored.key.topk(min(k, scored.logit.shape[1])).indices
        if beside is not None:
            listed = torch.cat([listed, torch.from_numpy(beside[scored.users] - FIRST_ITEM)], 1)
        return _predict_chunk(scored, targets, temperature, listed)

    mine = [(scored.users, of_chunk(scored)) for scored in scored_users]
    parts = world.gathered(mine)
    users = np.concatenate([chunk for chunk, _ in parts])
    order = np.argsort(users)
    columns = {name: np.concatenate([part[name] for _, part in parts])[order] for name in parts[0][1]}
    return Predictions(**columns, num_events=num_events(targets.history))


def num_events(histories: Histories) -> np.ndarray:
    """Events with weight > 0 of each user, (U,)."""
    return np.diff(np.concatenate([[0], np.cumsum(histories.weights > 0)])[histories.offsets])


def popularity_ranks(training_counts: np.ndarray, targets: Targets, event: Event) -> np.ndarray:
    """Ranks under the popularity baseline: training uses, seen items removed as for the model."""
    result = np.empty(len(targets.target))
    for user, target in enumerate(targets.target - FIRST_ITEM):
        scores = training_counts.astype(np.float64)
        if event == "next_new_item":
            scores[seen_rows(targets.history, user)] = -np.inf
        result[user] = metrics.target_ranks(scores[None], np.array([target]))[0]
    return result


def report(
    predictions: Predictions, calibration: Calibration, popularity: np.ndarray, training_counts: np.ndarray
) -> dict[str, Any]:
    """All test figures: ranking beside popularity with intervals, NLL, ECE, Brier skill.

    Args:
        predictions: of the users judged, lists of at least `LIST_LENGTH`.
        popularity: (U,) ranks of the same targets under popularity.
        training_counts: (N,).

    Returns:
        `hr@10`, `ndcg@10`, … of the model; the same under `popularity`; `intervals` of the model's means
        and of the paired gain over popularity; `nll` of the target, mean over users whose target the event
        allows, beside `uniform_nll` over the catalogue; `ece@10`, its `ece_null_interval`,
        `mean_confidence`, `brier_skill@10`; `users`, and `impossible_targets`: users whose target the event
        rules out, counted as misses.
    """
    confidence = confidences(predictions, calibration, training_counts)
    hit = predictions.hit[:, :LIST_LENGTH].astype(np.float64)
    possible = np.isfinite(predictions.log_probability)
    return {
        **metrics.ranking_metrics(predictions.rank),
        "popularity": metrics.ranking_metrics(popularity),
        "intervals": _intervals(predictions.rank, popularity),
        "nll": float(-predictions.log_probability[possible].mean()),
        "uniform_nll": float(np.log(len(training_counts))),
        "ece@10": metrics.expected_calibration_error(confidence.ravel(), hit.ravel()),
        "ece_null_interval": metrics.ece_null_interval(confidence),
        "mean_confidence": float(confidence.mean()),
        "hit_rate_per_item": float(hit.mean()),
        "brier_skill@10": metrics.brier_skill(confidence.ravel(), hit.ravel()),
        "users": len(predictions.rank),
        "impossible_targets": int((~possible).sum()),
    }


def confidences(
    predictions: Predictions, calibration: Calibration, training_counts: np.ndarray, k: int = LIST_LENGTH
) -> np.ndarray:
    """The confidence (U,K) of the first k listed items, in [0, 1)."""
    with np.errstate(invalid="ignore"):  # −inf·0 where the map gives the probability no weight
        confidence = calibration.confidence(predictions.features(training_counts, k))
    # A list longer than what is left of the catalogue ends in items that the event rules out.
    return np.where(np.isfinite(predictions.list_log_probability[:, :k]), confidence, 0.0)


def stated(confidence_UK: np.ndarray) -> np.ndarray:
    """The list confidence that the service states, (U,): min(1, Σ confidence)."""
    return np.minimum(confidence_UK.sum(1), 1.0)


def _predict_chunk(
    scored: ScoredUsers, targets: Targets, temperature: float, listed: torch.Tensor
) -> dict[str, np.ndarray]:
    target_rows = targets.target[scored.users] - FIRST_ITEM
    log_probability = (scored.logit / temperature).log_softmax(-1)
    probability = log_probability.exp()
    entropy = -torch.where(probability > 0, probability * log_probability, 0).sum(-1)
    return {
        "rank": metrics.target_ranks(scored.key.numpy(), target_rows),
        "log_probability": np.take_along_axis(log_probability.numpy(), target_rows[:, None], 1)[:, 0],
        "entropy": entropy.numpy(),
        "mean_precision": scored.mean_precision,
        "items": listed.numpy() + FIRST_ITEM,
        "list_log_probability": log_probability.gather(1, listed).numpy(),
        "list_variance": scored.variance.gather(1, listed).numpy(),
        "hit": listed.numpy() == target_rows[:, None],
    }


def _intervals(ranks_U: np.ndarray, popularity_U: np.ndarray) -> dict[str, tuple[float, float]]:
    result = {}
    baseline = metrics.per_user_metrics(popularity_U)
    for name, values in metrics.per_user_metrics(ranks_U).items():
        result[name] = metrics.bootstrap_interval(values)
        result[f"{name} minus popularity"] = metrics.bootstrap_interval(values - baseline[name])
    return result
