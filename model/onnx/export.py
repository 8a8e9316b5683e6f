"""From a trained model to ONNX graphs with `bft` nodes, and the proof that they say the same as torch."""

import copy
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import onnxruntime
import torch
from onnxscript.onnx_opset import opset21 as op
from torch import Tensor, nn

from model.backbone import Backbone, Cache, CausalBackbone, last_state
from model.bundle import (
    ENCODER,
    EXPLAINER,
    GRAPHS,
    PARITY_TOLERANCE,
    RANKER,
    STEP,
    BundleError,
    GoldenCase,
    golden_errors,
)
from model.config import BOS, FIRST_ITEM, PAD, UNK, ModelConfig
from model.filtering import Gaussian
from model.layers import Steps
from model.onnx.functions import EmittedSteps, attach_bodies, emit_gaussian_top_k
from model.weights import write_weights

OPSET = 21
BATCH_SIZES = (1, 2, 5)
ROUNDING_ROWS = 64
"""Of each length, on which a model's rounding is looked at."""
ROUNDING_ROOM = 4.0
"""Two executions round independently of one another, and on other rows."""
MAX_TOLERANCE = 1e-2
ADDED_WIDENING = (1.0, 2.0, 4.0)
"""How many times the widest item's variance those items have that a golden case adds to the catalogue."""


class ExportError(BundleError):
    """The exported graph does not say what the torch model says."""


class EncoderGraph(nn.Module):
    """History → state: `encoder.onnx`."""

    def __init__(self, model: Backbone, steps: Steps) -> None:
        super().__init__()
        self.model = model
        self.steps = steps

    def forward(self, items: Tensor, weights: Tensor, timestamps: Tensor) -> tuple[Tensor, Tensor]:
        """mean and precision (B,D) from which the next event is predicted; see `Backbone.encode`."""
        state = self.model.final_state(items, weights, timestamps, self.steps)
        return state.mean, state.precision


class CausalEncoderGraph(nn.Module):
    """History → state and cache: `encoder.onnx` of a causal backbone."""

    def __init__(self, model: CausalBackbone, steps: Steps) -> None:
        super().__init__()
        self.model = model
        self.steps = steps

    def forward(self, items: Tensor, weights: Tensor, timestamps: Tensor) -> tuple[Tensor, ...]:
        """As `EncoderGraph.forward`, and what each position adds to the cache: key, value, log_precision."""
        state, added = self.model.step(None, items, weights, timestamps, self.steps)
        return (*last_state(state, items), added.key, added.value, added.log_precision)


class StepGraph(nn.Module):
    """Cache and further events → state, and what they add to the cache: `step.onnx`."""

    def __init__(self, model: CausalBackbone, steps: Steps) -> None:
        super().__init__()
        self.model = model
        self.steps = steps

    def forward(
        self,
        items: Tensor,
        weights: Tensor,
        timestamps: Tensor,
        past_key: Tensor,
        past_value: Tensor,
        past_log_precision: Tensor,
        past_timestamps: Tensor,
        past_length: Tensor,
    ) -> tuple[Tensor, ...]:
        """As `CausalEncoderGraph.forward`, behind the positions of a `Cache`."""
        cache = Cache(past_key, past_value, past_log_precision, past_timestamps, past_length)
        state, added = self.model.step(cache, items, weights, timestamps, self.steps)
        return (*last_state(state, items), added.key, added.value, added.log_precision)


class ExplainerGraph(nn.Module):
    """History → whom its state heard: `explainer.onnx`."""

    def __init__(self, model: Backbone, steps: Steps) -> None:
        super().__init__()
        self.model = model
        self.steps = steps

    def forward(self, items: Tensor, weights: Tensor, timestamps: Tensor) -> tuple[Tensor, Tensor]:
        """kriging_weight and precision (B,T) of the positions; see `Backbone.reasons`."""
        reasons = self.model.reasons(items, weights, timestamps, self.steps)
        return reasons.kriging_weight, reasons.precision


class RankerGraph(nn.Module):
    """State → list: `ranker.onnx`. The item table, as the head reads it, is a buffer; T and c stay inputs, as do items
    that were added since."""

    item_table: Tensor
    candidate_variance: Tensor
    catalogue_mean: Tensor
    prior_variance: Tensor
    specials: Tensor

    def __init__(self, model: Backbone) -> None:
        super().__init__()
        self.head = model.head
        table = model.head.items(model.item_embedding.weight.detach())
        log_count = torch.cat([torch.zeros(FIRST_ITEM), model.log_count])
        self.register_buffer("item_table", table)
        self.register_buffer("candidate_variance", model.head.candidate_variance(log_count).detach())
        self.register_buffer("catalogue_mean", table[FIRST_ITEM:].mean(0))
        self.register_buffer("prior_variance", prior_variance(model))
        self.register_buffer("specials", torch.arange(FIRST_ITEM)[None])

    def forward(
        self,
        mean: Tensor,
        precision: Tensor,
        added_items: Tensor,
        added_variance: Tensor,
        seen: Tensor,
        blocked: Tensor,
        k: Tensor,
        temperature: Tensor,
        variance_scale: Tensor,
        order_rows: Tensor,
        order_mean: Tensor,
        order_precision: Tensor,
        order_shrinkage: Tensor,
        order_kappa: Tensor,
    ) -> tuple[Tensor, ...]:
        """See `functions.GaussianTopK`; adds the states' `mean_precision` (B,).

        A drawn state, of which nothing is uncertain, has an infinite `order_precision`.
        """
        state = Gaussian(mean, precision)
        z = self.head.readout(state)
        order_z = self.head.readout(Gaussian(order_mean, order_precision))
        # Special tokens are never in the normaliser nor in a list.
        specials = self.specials.expand(mean.shape[0], -1)
        outputs = emit_gaussian_top_k(
            (
                *z,
                self.head.own_variance(state),
                self.item_table,
                self.candidate_variance,
                self.catalogue_mean,
                self.prior_variance,
                added_items,
                added_variance,
                torch.cat([seen, specials], 1),
                torch.cat([blocked, specials], 1),
                k,
                temperature,
                variance_scale,
                order_rows,
                *order_z,
                order_shrinkage,
                order_kappa,
            ),
            num_listed=2,
        )
        return *outputs, precision.mean(-1)


@torch.no_grad()
def prior_variance(model: Backbone) -> Tensor:
    """`GaussianHead.own_variance` (D,) of a user nobody has seen."""
    state = model.eval().final_state(torch.tensor([[BOS]]), torch.ones(1, 1))
    return model.head.own_variance(state)[0]


@dataclass(frozen=True)
class ExportedGraphs:
    """What `export_graphs` did: each graph's `bft` nodes, the golden cases, the largest deviation found."""

    custom_ops: dict[str, tuple[str, ...]]
    golden: list[GoldenCase]
    tolerance: float
    """Of the golden cases: see `parity_tolerance`."""
    max_error: float


def export_graphs(model: Backbone, folder: Path, temperature: float) -> ExportedGraphs:
    """Write the model's graphs and its weights, and check the graphs against torch.

    Args:
        model: trained; put into eval mode.
        folder: receives encoder.onnx, step.onnx for a causal backbone, ranker.onnx, explainer.onnx and
            model.safetensors.
        temperature: T of the golden cases.

    Raises:
        ExportError: torch and ONNX Runtime differ beyond the tolerance, at any of 3 lengths × 3 batch sizes (names
            graph, output, shape and deviation), or the model's own float32 is too far from its float64.
    """
    model.eval()
    steps, config = EmittedSteps(), model.config
    graphs: dict[str, tuple[nn.Module, Signature]] = {
        RANKER: (RankerGraph(model), _ranker_signature(config.width)),
        EXPLAINER: (ExplainerGraph(model, steps), _explainer_signature()),
    }
    if isinstance(model, CausalBackbone):
        graphs[ENCODER] = CausalEncoderGraph(model, steps), _encoder_signature(causal=True)
        graphs[STEP] = StepGraph(model, steps), _step_signature(config)
    else:
        graphs[ENCODER] = EncoderGraph(model, steps), _encoder_signature(causal=False)
    exported = {name: _export(*graphs[name], name) for name in GRAPHS if name in graphs}
    custom_ops = {name: attach_bodies(graph) for name, graph in exported.items()}
    write_weights(model, exported.values(), folder)
    for name, graph in exported.items():
        onnx.save_model(graph, folder / f"{name}.onnx")
        onnx.checker.check_model(folder / f"{name}.onnx")
    golden, tolerance = golden_cases(model, temperature), parity_tolerance(model)
    return ExportedGraphs(custom_ops, golden, tolerance, check_parity(folder, golden, tolerance))


@torch.no_grad()
def golden_cases(model: Backbone, temperature: float) -> list[GoldenCase]:
    """Torch's own answers at 3 lengths × 3 batch sizes, short rows, unknown items and weights among them."""
    generator = torch.Generator().manual_seed(0)
    cases = []
    for length in sorted({1, model.config.max_len // 2 + 1, model.config.max_len + 1}):
        for batch in BATCH_SIZES:
            rows = _random_rows(model, batch, length, generator)
            state = model.final_state(*rows)
            encoded = state._asdict()
            if isinstance(model, CausalBackbone):
                encoded |= _shown(model.step(None, *rows)[1])
            cases.append(_case(ENCODER, rows._asdict(), encoded))
            if isinstance(model, CausalBackbone):
                cases.append(_step_case(model, rows, state))
            cases.append(_ranker_case(model, state, rows.items, temperature, generator))
            cases.append(_case(EXPLAINER, rows._asdict(), model.reasons(*rows)._asdict()))
    return cases


@torch.no_grad()
def parity_tolerance(model: Backbone) -> float:
    """How far two float32 executions of a model may be apart, as `golden_errors` measures it.

    `PARITY_TOLERANCE`, or `ROUNDING_ROOM` times as far as the model's float32 states are from its float64 ones, where
    that is more: of a model whose weights magnify rounding, no execution comes nearer.

    Raises:
        ExportError: that is more than `MAX_TOLERANCE`: the model's states are no numbers to rank by.
    """
    exact = copy.deepcopy(model).double()
    generator = torch.Generator().manual_seed(0)
    largest = 0.0
    for length in sorted({1, model.config.max_len // 2 + 1, model.config.max_len + 1}):
        rows = _random_rows(model, ROUNDING_ROWS, length, generator)
        found, wanted = (
            _case(ENCODER, {}, one.final_state(rows.items, rows.weights.to(dtype), rows.timestamps)._asdict()).outputs
            for one, dtype in ((model, torch.float32), (exact, torch.float64))
        )
        largest = max(largest, *golden_errors(found, wanted).values())
    tolerance = max(PARITY_TOLERANCE, ROUNDING_ROOM * largest)
    if tolerance > MAX_TOLERANCE:
        raise ExportError(
            f"the model's states in float32 are off by {largest:.2g}, rounding alone; the bundle was not written. Train"
            " with a lower training.learning_rate, or with training.weight_decay"
        )
    return tolerance


def check_parity(folder: Path, cases: Sequence[GoldenCase], tolerance: float = PARITY_TOLERANCE) -> float:
    """Run the graphs in ONNX Runtime and compare with the recorded outputs.

    Returns:
        the largest |a−b|/(1+|b|) over all outputs, precisions as log λ.

    Raises:
        ExportError: it exceeds the tolerance.
    """
    sessions = {
        graph: onnxruntime.InferenceSession(folder / f"{graph}.onnx", providers=["CPUExecutionProvider"])
        for graph in sorted({case.graph for case in cases})
    }
    largest = 0.0
    for case in cases:
        found = sessions[case.graph].run(list(case.outputs), case.inputs)
        errors = golden_errors(dict(zip(case.outputs, found, strict=True)), case.outputs)
        for name, error in errors.items():
            if not error <= tolerance:
                raise ExportError(
                    f"{case.graph}.onnx: output {name} of shape {case.outputs[name].shape} differs from torch by "
                    f"{error:.2g} (allowed {tolerance:.2g}); the bundle was not written"
                )
            largest = max(largest, error)
    return largest


@dataclass(frozen=True)
class Signature:
    """A graph's contract: example inputs, and the name of each axis (None: fixed) of inputs and outputs."""

    examples: tuple[Tensor, ...]
    inputs: dict[str, tuple[str | None, ...]]
    outputs: dict[str, tuple[str | None, ...]]


def _export(graph: nn.Module, signature: Signature, name: str) -> onnx.ModelProto:
    """Export one graph, its weights inside."""
    dynamic = tuple(
        {axis: torch.export.Dim(label) for axis, label in enumerate(labels) if label} or None
        for labels in signature.inputs.values()
    )
    with _quiet_exporter():
        program = torch.onnx.export(
            graph.eval(),
            signature.examples,
            input_names=list(signature.inputs),
            dynamic_shapes=dynamic,
            opset_version=OPSET,
            custom_translation_table={torch.ops.aten.view.dtype: _truths_as_bytes},
            dynamo=True,
            verbose=False,
        )
    if program is None:
        raise ExportError(f"{name}.onnx: the exporter of torch {torch.__version__} returned nothing")
    model = program.model_proto
    _name_values(model.graph, signature.outputs)
    _strip_build_traces(model)
    return model


def _truths_as_bytes(self: Any, dtype: int) -> Any:
    """`visible.view(torch.uint8)` (see `filtering`), which the exporter does not know, as a Cast."""
    if (self.dtype, dtype) != (onnx.TensorProto.BOOL, onnx.TensorProto.UINT8):
        raise ExportError(f"a view of {self.dtype} as type {dtype} would read bytes anew; ONNX has no such operator")
    return op.Cast(self, to=dtype)


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Hide the exporter's remarks on optional packages and its own deprecations: no user can act on them."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("ignore", message="# The axis name", category=UserWarning)
            yield
    finally:
        logger.setLevel(level)


def _name_values(graph: onnx.GraphProto, outputs: dict[str, tuple[str | None, ...]]) -> None:
    """Give the outputs their public names and axes, and number all other values.

    The exporter names values after torch functions, and one called `mean` would clash with such an output.
    """
    produced = [name for node in graph.node for name in node.output if name]
    names = {name: f"value_{index}" for index, name in enumerate(produced)}
    names |= {value.name: public for value, public in zip(graph.output, outputs, strict=True)}
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for value, labels in zip(graph.output, outputs.values(), strict=True):
        value.name = names[value.name]
        for axis, label in zip(value.type.tensor_type.shape.dim, labels, strict=True):
            if label:
                axis.dim_param = label
    del graph.value_info[:]


def _strip_build_traces(model: onnx.ModelProto) -> None:
    """Drop the exporter's metadata: stack traces carry the paths of the machine that exported."""
    del model.metadata_props[:]
    del model.graph.metadata_props[:]
    for node in model.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for value in (*model.graph.input, *model.graph.output):
        del value.metadata_props[:]


def _encoder_signature(causal: bool) -> Signature:
    outputs: dict[str, tuple[str | None, ...]] = {"mean": ("batch", None), "precision": ("batch", None)}
    return Signature(
        examples=(
            torch.tensor([[BOS, UNK, PAD], [BOS, UNK, UNK]]),
            torch.ones(2, 3),
            torch.ones(2, 3, dtype=torch.float64),
        ),
        inputs={"items": ("batch", "time"), "weights": ("batch", "time"), "timestamps": ("batch", "time")},
        outputs=outputs | _shown_axes("", "time") if causal else outputs,
    )


def _explainer_signature() -> Signature:
    encoder = _encoder_signature(causal=False)
    return Signature(
        examples=encoder.examples,
        inputs=encoder.inputs,
        outputs={"kriging_weight": ("batch", "time"), "precision": ("batch", "time")},
    )


def _step_signature(config: ModelConfig) -> Signature:
    encoder = _encoder_signature(causal=True)
    past = 4
    heads = (2, config.num_layers, config.num_heads, past, config.width // config.num_heads)
    return Signature(
        examples=(
            *encoder.examples,
            torch.randn(heads),
            torch.randn(heads),
            torch.zeros(2, config.num_layers, past),
            torch.ones(2, past, dtype=torch.float64),
            torch.tensor([past, past - 1]),
        ),
        inputs={
            **encoder.inputs,
            **_shown_axes("past_", "past"),
            "past_timestamps": ("batch", "past"),
            "past_length": ("batch",),
        },
        outputs=encoder.outputs,
    )


def _shown_axes(prefix: str, positions: str) -> dict[str, tuple[str | None, ...]]:
    """The axes of a cache's key, value and log_precision."""
    per_head, per_layer = ("batch", None, None, positions, None), ("batch", None, positions)
    return {f"{prefix}key": per_head, f"{prefix}value": per_head, f"{prefix}log_precision": per_layer}


def _ranker_signature(width: int) -> Signature:
    per_user, listed = ("batch",), ("batch", "k")
    return Signature(
        examples=(
            torch.randn(4, width),
            torch.ones(4, width),
            torch.randn(5, width),
            torch.ones(5),
            torch.zeros(4, 3, dtype=torch.int64),
            torch.zeros(4, 4, dtype=torch.int64),
            torch.tensor([2]),
            torch.tensor(1.0),
            torch.tensor(1.0),
            torch.tensor([0, 2, 1]),
            torch.randn(3, width),
            torch.ones(3, width),
            torch.ones(3),
            torch.zeros(3),
        ),
        inputs={
            "mean": ("batch", None),
            "precision": ("batch", None),
            "added_items": ("num_added", None),
            "added_variance": ("num_added",),
            "seen": ("batch", "num_seen"),
            "blocked": ("batch", "num_blocked"),
            "k": (None,),
            "temperature": (),
            "variance_scale": (),
            "order_rows": ("num_ordered",),
            "order_mean": ("num_ordered", None),
            "order_precision": ("num_ordered", None),
            "order_shrinkage": ("num_ordered",),
            "order_kappa": ("num_ordered",),
        },
        outputs={
            "items": listed,
            "order_key": listed,
            "logit": listed,
            "score_mean": listed,
            "score_variance": listed,
            "reliability": listed,
            "log_partition": per_user,
            "entropy": per_user,
            "mean_precision": per_user,
        },
    )


class Rows(NamedTuple):
    """What an encoder reads, each (B,T); by the names of a graph's inputs."""

    items: Tensor
    weights: Tensor
    timestamps: Tensor


def _random_rows(model: Backbone, batch: int, length: int, generator: torch.Generator) -> Rows:
    """Rows of BOS and random events, UNK and events without a time among them; all but the first cut short."""
    items = torch.randint(FIRST_ITEM - 1, FIRST_ITEM + model.num_items, (batch, length), generator=generator)
    items[items < FIRST_ITEM] = UNK
    items[:, 0] = BOS
    lengths = torch.randint(1, length + 1, (batch,), generator=generator)
    lengths[0] = length
    items[torch.arange(length) >= lengths[:, None]] = PAD
    weights = 0.25 + 2 * torch.rand(batch, length, generator=generator)
    weights[:, 0] = 1
    gaps_s = torch.rand(batch, length, generator=generator, dtype=torch.float64).mul(14).exp()
    timestamps = 1.7e9 + gaps_s.cumsum(1).round()
    timestamps[torch.rand(batch, length, generator=generator) < 0.1] = torch.nan
    timestamps[:, 0] = torch.nan
    return Rows(items, weights, timestamps)


def _shown(cache: Cache, prefix: str = "") -> dict[str, Tensor]:
    """A cache's key, value and log_precision by the names of a graph's values."""
    return {f"{prefix}{name}": getattr(cache, name) for name in ("key", "value", "log_precision")}


def _step_case(model: CausalBackbone, rows: Rows, state: Gaussian) -> GoldenCase:
    """Each row's last positions behind a cache of its first ones: the state must be that of the whole row."""
    length = (rows.items != PAD).sum(1)
    num_past = length // 2
    past, new = _cut(rows, torch.zeros_like(length), num_past), _cut(rows, num_past, length - num_past)
    _, cache = model.step(None, *past)
    _, added = model.step(cache, *new)
    inputs = {
        **new._asdict(),
        **_shown(cache, "past_"),
        "past_timestamps": cache.timestamps,
        "past_length": cache.length,
    }
    return _case(STEP, inputs, {**state._asdict(), **_shown(added)})


def _cut(rows: Rows, start_B: Tensor, length_B: Tensor) -> Rows:
    """From each row `length` positions from `start` on, with padding behind them."""
    place = torch.arange(int(length_B.max()))
    source = (start_B[:, None] + place).clamp_max(rows.items.shape[1] - 1)
    cut = Rows(*(part.gather(1, source) for part in rows))
    return cut._replace(items=cut.items.where(place < length_B[:, None], PAD))


def _ranker_case(
    model: Backbone, state: Gaussian, history: Tensor, temperature: float, generator: torch.Generator
) -> GoldenCase:
    """The list of the two graphs' contract, by torch alone: the history is seen, others are blocked, a few were added.

    The first row is ordered by its own logit; those behind it by a drawn state, by μ + 1.5·√v, by μ − √v, and again.
    """
    # Fewer items left than k would fill the list with ties at −inf, whose order says nothing.
    k = min(10, (model.num_items + 1) // 2)
    history = history[:, : model.num_items - k]
    catalogue, variance = model.catalogue(), model.head.candidate_variance(model.log_count)
    average = catalogue.mean(0)
    # Near items of the catalogue, so that some of them are listed and some are not.
    near = catalogue[: len(ADDED_WIDENING)]
    added_items = near + 0.1 * catalogue.std() * torch.randn(near.shape, generator=generator)
    added_variance = variance.max() * torch.tensor(ADDED_WIDENING[: len(near)])
    items, variance = torch.cat([catalogue, added_items]), torch.cat([variance, added_variance])
    scores = model.head(state, items, variance, average)

    place = torch.arange(len(state.mean))
    is_drawn = (place % 3 == 1)[:, None]
    kappa = torch.tensor([-1.0, 0.0, 1.5])[place % 3]
    drawn = state.mean + torch.randn(state.mean.shape, generator=generator) / state.precision.sqrt()
    order_by = Gaussian(drawn.where(is_drawn, state.mean), state.precision.masked_fill(is_drawn, torch.inf))
    order = model.head(order_by, items, variance, average)
    order_average = model.head.readout(order_by).mean @ average
    key = order.logit.where(is_drawn, order.mean - order_average[:, None] + kappa[:, None] * order.variance.sqrt())
    key[0] = scores.logit[0]
    # Backwards, so that taking the first rows instead of the named ones cannot pass.
    ordered = place[1:].flip(0)

    # The two best items are blocked, so that mixing up the two inputs cannot pass.
    blocked = key.topk(min(2, model.num_items - k)).indices + FIRST_ITEM
    possible, listable = _without(scores.logit, history), _without(key, blocked)
    top = listable.topk(k)

    log_probability = (possible / temperature).log_softmax(-1)
    probability = log_probability.exp()
    squares = items[top.indices].square()
    prior = (squares * prior_variance(model)).sum(-1)
    left = (squares * model.head.own_variance(state)[:, None]).sum(-1)
    inputs = {
        "mean": state.mean,
        "precision": state.precision,
        "added_items": added_items,
        "added_variance": added_variance,
        "seen": history,
        "blocked": blocked,
        "k": torch.tensor([k]),
        "temperature": torch.tensor(temperature),
        "variance_scale": model.head.shrinkage(),
        "order_rows": ordered,
        "order_mean": order_by.mean[ordered],
        "order_precision": order_by.precision[ordered],
        "order_shrinkage": is_drawn[ordered, 0].float(),
        "order_kappa": kappa[ordered],
    }
    outputs = {
        "items": top.indices + FIRST_ITEM,
        "order_key": top.values,
        "logit": scores.logit.gather(1, top.indices),
        "score_mean": scores.mean.gather(1, top.indices),
        "score_variance": scores.variance.gather(1, top.indices),
        "reliability": (1 - left / prior).clamp(0, 1),
        "log_partition": (possible / temperature).logsumexp(-1),
        "entropy": -torch.where(probability > 0, probability * log_probability, 0).sum(-1),
        "mean_precision": state.precision.mean(-1),
    }
    return _case(RANKER, inputs, outputs)


def _without(logit: Tensor, numbers: Tensor) -> Tensor:
    """Logits or keys (B,N) with −inf at item numbers (B,X); special tokens among them are skipped."""
    result = logit.clone()
    for row, named in enumerate(numbers):
        result[row, named[named >= FIRST_ITEM] - FIRST_ITEM] = -torch.inf
    return result


def _case(graph: str, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> GoldenCase:
    return GoldenCase(
        graph,
        {name: tensor.numpy() for name, tensor in inputs.items()},
        {name: tensor.numpy() for name, tensor in outputs.items()},
    )
