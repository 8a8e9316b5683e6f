"""ONNX Runtime: one session a graph, rows in and rows out (service.md, "Engine").

Rows are padded to a few lengths, so that ONNX Runtime meets few shapes. Shapes: D width, T positions, S cached
positions or seen items, X blocked items, M entries of a list, A items added at run time.
"""

import importlib.metadata
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from model.bundle import ENCODER, EXPLAINER, RANKER, STEP, Bundle, BundleError, GoldenCase, golden_errors
from model.config import BOS, PAD
from service.batching import Batcher, BatchLimits
from service.context import RequestContext
from service.errors import InferenceFailed, StartError
from service.filtered import Cache, Floats, State
from service.settings import Provider, Settings
from service.telemetry import Metrics

logger = logging.getLogger(__name__)

OpExecution = Literal["function_body", "native_kernel"]
"""What runs a custom op: its body of standard operators in the graph's file, or a kernel of a library."""

_RAW = "raw:"
"""Before a graph's name in the batcher: rows are whole inputs of the graph, each run by itself."""
_CUDA = "CUDAExecutionProvider"
_CPU = "CPUExecutionProvider"

_DTYPES = {"tensor(int64)": np.int64, "tensor(float)": np.float32, "tensor(double)": np.float64}
"""ONNX Runtime's names of the types that a bundle's graphs read and write."""

Numbers = npt.NDArray[np.int64]
Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class EncoderRow:
    """One history: BOS, then events, oldest first."""

    items: Numbers
    """(T,) item numbers; T ≥ 1."""
    weights: Floats
    """(T,) > 0; 1 on BOS."""
    timestamps: npt.NDArray[np.float64]
    """(T,) seconds; NaN where there is none, as on BOS."""


@dataclass(frozen=True, slots=True, eq=False)
class StepRow:
    """Events to fold into a cached state, oldest first."""

    cache: Cache
    """Of the positions before them; with these at most max_len + 1."""
    items: Numbers
    """(T,) item numbers; T ≥ 1."""
    weights: Floats
    """(T,) > 0"""
    timestamps: npt.NDArray[np.float64]
    """(T,) seconds; NaN where there is none."""


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """What a list is ordered by when it is not the predictive logit of the row's own state: by

        (μ_i − ⟨z,ē⟩)/√(1 + shrinkage·c·v_i) + kappa·√v_i

    of every item i, with the score mean μ_i and variance v_i of the state given here.
    """

    mean: Floats
    """(D,)"""
    precision: Floats
    """(D,) > 0; infinite where nothing of the state is uncertain."""
    shrinkage: float
    """1: by the predictive logit; 0: by the score."""
    kappa: float
    """Standard deviations to add; below 0, to take off."""


@dataclass(frozen=True, slots=True, eq=False)
class AddedRows:
    """Items that the ranker treats as if they stood behind its catalogue, numbered on from there."""

    items: Floats
    """(A,D) embeddings, as the head reads them."""
    variance: Floats
    """(A,) ≥ 0, the candidates' own."""


@dataclass(frozen=True, slots=True, eq=False)
class RankerRow:
    """One list to make."""

    state: State
    seen: Numbers
    """(S,) item numbers that cannot be the next event: the normaliser leaves them out."""
    blocked: Numbers
    """(X,) item numbers that may not be in the list; probabilities do not change."""
    size: int
    """M, entries wanted, ≥ 1."""
    order: Order | None = None
    """None: by the predictive logit of `state`."""
    added: AddedRows | None = None
    """None: the catalogue alone."""


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """The best items of one row by what orders it, best first: each array (M,), M ≤ the size asked for.

    What orders them changes nothing of what is said of an item.
    """

    items: Numbers
    order_key: Floats
    """What they are ordered by: the predictive logit, or the key of the row's `Order`."""
    log_probability: npt.NDArray[np.float64]
    """log p_i over the catalogue less `seen`; of a seen item it means nothing."""
    score_mean: Floats
    score_variance: Floats
    reliability: Floats
    """In [0, 1]; NaN for a plain model."""
    entropy: float
    """Of p, in nats."""
    mean_precision: float
    """Mean over dimensions of the state's precision."""


@dataclass(frozen=True, slots=True, eq=False)
class Heard:
    """Whom a history's state heard in the last layer (math.md, "Reasons"), by the positions of its `EncoderRow`."""

    kriging_weight: Floats
    """(T,) shares in [0, 1], which sum to at most 1."""
    precision: Floats
    """(T,) inverse variance, > 0; infinite for a plain model."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output of a graph."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str, ...]
    """A name: any size, the same wherever the graph has that name."""


class Engine:
    """The graphs of a bundle behind a batcher.

    Args:
        bundle: an opened bundle.
        settings: provider, threads, bounds.
        metrics: for the batcher.

    Raises:
        StartError: the asked provider is not there, or two ONNX Runtimes are installed.
        BundleError: a graph cannot be loaded.
    """

    def __init__(self, bundle: Bundle, settings: Settings, metrics: Metrics) -> None:
        refuse_two_runtimes()
        self.provider = choose_provider(settings.provider, ort.get_available_providers())
        self._bundle = bundle
        self._sessions = {
            graph: _load(bundle, graph, self.provider, settings.threads) for graph in bundle.manifest.graphs
        }
        used = self._sessions[ENCODER].get_providers()[0]
        if used != self.provider and settings.provider == "cuda":
            raise StartError(f"the CUDA provider was asked for and did not start (ONNX Runtime took {used}); see above")
        self.provider = used
        self._temperature = np.array(bundle.calibration.temperature, np.float32)
        self._variance_scale = np.array(bundle.calibration.variance_scale, np.float32)
        self.max_positions = bundle.manifest.model.max_len + 1
        limits = BatchLimits(
            max_batch_rows=settings.max_batch_rows,
            max_batch_cells=settings.max_batch_cells,
            max_queue_cells=settings.max_queue_cells,
        )
        self._max_batch_rows = settings.max_batch_rows
        self._batcher = Batcher(self.run_rows, limits, metrics)
        logger.info(
            "ONNX Runtime chosen",
            extra={
                "provider": self.provider,
                "asked": settings.provider,
                "threads": settings.threads,
                "onnxruntime": ort.__version__,
            },
        )

    def start(self) -> None:
        """Begin to take rows; needs a running event loop."""
        self._batcher.start()

    async def close(self) -> None:
        """Stop, and let go of the graphs; whoever still waits gets EngineStopped."""
        await self._batcher.close()
        self._sessions.clear()

    def discard(self) -> None:
        """Let go of the graphs of an engine that was not started."""
        self._sessions.clear()

    @property
    def alive(self) -> bool:
        """Whether rows will be worked on."""
        return self._batcher.alive

    @property
    def last_success(self) -> float | None:
        """When a batch last succeeded, on the clock of `time.monotonic`."""
        return self._batcher.last_success

    async def encode(self, row: EncoderRow, request: RequestContext) -> State:
        """The state after a history; with its cache, if the model is causal. Raises what `Batcher.submit` does."""
        state: State = await self._batcher.submit(ENCODER, row, len(row.items), request)
        return state

    async def step(self, row: StepRow, request: RequestContext) -> State:
        """The state after further events, with its cache; of a causal model. Raises what `Batcher.submit` does."""
        # Counted as the whole history would be: less to compute, and as many positions to hold.
        length = row.cache.num_positions + len(row.items)
        state: State = await self._batcher.submit(STEP, row, length, request)
        return state

    async def rank(self, row: RankerRow, request: RequestContext) -> Ranking:
        """The best items for a state. Raises as `Batcher.submit`, and InferenceFailed on a NaN score."""
        length = row.size + len(row.seen) + len(row.blocked)
        ranking: Ranking = await self._batcher.submit(RANKER, row, length, request)
        has_nan = any(np.isnan(values).any() for values in (ranking.order_key, ranking.log_probability))
        if has_nan or not np.isfinite(ranking.score_mean).all():
            raise InferenceFailed("the ranker returned scores that are no numbers")
        return ranking

    async def explain(self, row: EncoderRow, request: RequestContext) -> Heard:
        """Whom the state after a history heard. Raises as `Batcher.submit`, and InferenceFailed on a NaN."""
        heard: Heard = await self._batcher.submit(EXPLAINER, row, len(row.items), request)
        if not np.isfinite(heard.kriging_weight).all() or np.isnan(heard.precision).any():
            raise InferenceFailed("the explainer returned weights that are no numbers")
        return heard

    async def infer(self, graph: str, feeds: Arrays, cells: int, request: RequestContext) -> Arrays:
        """A graph's outputs for inputs that a caller made; alone, never in a batch with another's.

        Args:
            graph: one of the bundle's.
            feeds: every input, of the right type and shape.
            cells: what it is counted with in the queue and in a batch.
            request: as everywhere.

        Raises:
            InferenceFailed: the graph does not run on these inputs.
            ServiceError: what else `Batcher.submit` raises.
        """
        outputs: Arrays | InferenceFailed = await self._batcher.submit(_RAW + graph, feeds, cells, request)
        if isinstance(outputs, InferenceFailed):
            raise outputs
        return outputs

    def signature(self, graph: str) -> tuple[list[Tensor], list[Tensor]]:
        """A graph's inputs and outputs."""
        session = self._sessions[graph]
        return [_tensor(node) for node in session.get_inputs()], [_tensor(node) for node in session.get_outputs()]

    @property
    def custom_ops(self) -> dict[str, dict[str, OpExecution]]:
        """Graph → op of the domain `bft` → what runs it here."""
        # No library of kernels is registered with these sessions, so ONNX Runtime inlines every op's body.
        return {graph: dict.fromkeys(ops, "function_body") for graph, ops in self._bundle.manifest.custom_ops.items()}

    def run_rows(self, graph: str, rows: Sequence[Any]) -> Sequence[Any]:
        """One batch, here and now, in the calling thread."""
        if graph.startswith(_RAW):
            return [self._run_raw(graph.removeprefix(_RAW), feeds) for feeds in rows]
        if graph == ENCODER:
            return _split_states(self.run(graph, encoder_inputs(rows, self.max_positions)), rows)
        if graph == STEP:
            return _split_states(self.run(graph, step_inputs(rows, self.max_positions)), rows)
        if graph == EXPLAINER:
            return _split_heard(self.run(graph, encoder_inputs(rows, self.max_positions)), rows)
        return self._rank_rows(rows)

    def _rank_rows(self, rows: Sequence[RankerRow]) -> list[Ranking]:
        """One run for all rows of the same added items: for all of a batch, but for the moment when they change."""
        rankings: dict[int, Ranking] = {}
        for added in {id(row.added): row.added for row in rows}.values():
            own = {place: row for place, row in enumerate(rows) if row.added is added}
            feeds = ranker_inputs(list(own.values()), self._bundle.manifest.num_items, added)
            feeds |= {"temperature": self._temperature, "variance_scale": self._variance_scale}
            found = _split_rankings(self.run(RANKER, feeds), list(own.values()), self._bundle.calibration.temperature)
            rankings |= dict(zip(own, found, strict=True))
        return [rankings[place] for place in range(len(rows))]

    def _run_raw(self, graph: str, feeds: Arrays) -> Arrays | InferenceFailed:
        try:
            return self.run(graph, feeds)
        except Exception as error:
            # Returned, not raised: the others of the batch have nothing to do with it.
            logger.warning("a graph failed on a caller's inputs", extra={"graph": graph, "error": str(error)})
            return InferenceFailed(f"the {graph} does not run on these inputs")

    def run(self, graph: str, feeds: Arrays) -> dict[str, npt.NDArray[Any]]:
        """A graph's outputs by name."""
        session = self._sessions[graph]
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, dict(feeds)), strict=True))

    def warm(self) -> None:
        """Run each length bucket alone and in a full batch, so that no caller pays for first shapes."""
        for length in length_buckets(self.max_positions):
            state = self._warm(ENCODER, EncoderRow(*_blank(length)))
            self._warm(EXPLAINER, EncoderRow(*_blank(length)))
        if STEP in self._sessions:
            self._warm_step()
        nothing = np.empty(0, np.int64)
        for size in (1, 25, 500):
            self.run_rows(RANKER, [RankerRow(state, nothing, nothing, size)])
        ordered = Order(state.mean, state.precision, shrinkage=0.0, kappa=1.0)
        for order in (None, ordered):
            self.run_rows(RANKER, [RankerRow(state, nothing, nothing, 25, order)] * self._max_batch_rows)
        self.run_rows(RANKER, [RankerRow(state, nothing, nothing, 25, ordered)])

    def _warm_step(self) -> None:
        """One event behind each length of cache, then each number of events behind the shortest."""
        longest = self.max_positions - 1
        behind = [(length, 1) for length in length_buckets(longest)]
        after_bos = [(1, num_events) for num_events in length_buckets(longest, shortest=1)]
        for num_cached, num_events in behind + after_bos:
            cache = self.run_rows(ENCODER, [EncoderRow(*_blank(num_cached))])[0].cache
            self._warm(STEP, StepRow(cache, *_blank(num_events)))

    def _warm(self, graph: str, row: Any) -> Any:
        self.run_rows(graph, [row] * self._max_batch_rows)
        return self.run_rows(graph, [row])[0]

    def parity_error(self) -> float:
        """Largest error of the golden cases as a multiple of (1 + |expected|); see `Manifest.parity_tolerance`.

        Raises:
            BundleError: there are no golden cases, or one does not fit its graph.
        """
        cases = self._bundle.golden_cases()
        if missing := self._sessions.keys() - {case.graph for case in cases}:
            raise BundleError(
                f"{self._bundle.folder}: golden.npz has no case of {', '.join(sorted(missing))}.onnx; "
                "export the bundle again"
            )
        return max(self._case_error(case) for case in cases)

    def _case_error(self, case: GoldenCase) -> float:
        try:
            found = self.run(case.graph, case.inputs)
            return max(golden_errors(found, case.outputs).values())
        except Exception as error:
            raise BundleError(
                f"{self._bundle.folder}: {case.graph}.onnx does not run on golden.npz ({error}); "
                "export the bundle again"
            ) from error


def refuse_two_runtimes() -> None:
    """onnxruntime and onnxruntime-gpu install the same module, and the last one wins by accident.

    Raises:
        StartError: both are installed.
    """
    installed = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
    if {"onnxruntime", "onnxruntime-gpu"} <= installed:
        raise StartError(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other: "
            "pip uninstall both, then install one"
        )


def choose_provider(asked: Provider, available: Sequence[str]) -> str:
    """ONNX Runtime's name of the provider to use.

    Raises:
        StartError: CUDA is asked for and this ONNX Runtime has none.
    """
    if asked == "cuda" and _CUDA not in available:
        raise StartError(
            f"provider cuda: this ONNX Runtime offers {', '.join(available)}; install onnxruntime-gpu, or choose cpu"
        )
    return _CUDA if asked != "cpu" and _CUDA in available else _CPU


def length_buckets(longest: int, shortest: int = 8) -> list[int]:
    """The shortest length and its doublings, then the longest length itself."""
    buckets = []
    length = shortest
    while length < longest:
        buckets.append(length)
        length *= 2
    return [*buckets, longest]


def encoder_inputs(rows: Sequence[EncoderRow], max_positions: int) -> dict[str, npt.NDArray[Any]]:
    """The encoder's inputs, right-padded to the bucket of the longest row."""
    return _padded_positions(rows, length_buckets(max_positions))


def step_inputs(rows: Sequence[StepRow], max_positions: int) -> dict[str, npt.NDArray[Any]]:
    """The step's inputs: events right-padded to the bucket of the most, caches to that of the longest."""
    longest = max_positions - 1  # a cached position is BOS, and one at least is new
    lengths = np.array([row.cache.num_positions for row in rows], np.int64)
    length = _bucket(int(lengths.max()), length_buckets(longest))
    num_layers, num_heads, _, head_width = rows[0].cache.key.shape
    key, value = np.zeros((2, len(rows), num_layers, num_heads, length, head_width), np.float32)
    log_precision = np.zeros((len(rows), num_layers, length), np.float32)
    timestamps = np.full((len(rows), length), np.nan)
    for index, row in enumerate(rows):
        cached = slice(row.cache.num_positions)
        key[index, :, :, cached] = row.cache.key
        value[index, :, :, cached] = row.cache.value
        log_precision[index, :, cached] = row.cache.log_precision
        timestamps[index, cached] = row.cache.timestamps
    return _padded_positions(rows, length_buckets(longest, shortest=1)) | {
        "past_key": key,
        "past_value": value,
        "past_log_precision": log_precision,
        "past_timestamps": timestamps,
        "past_length": lengths,
    }


def ranker_inputs(
    rows: Sequence[RankerRow], num_items: int, added: AddedRows | None = None
) -> dict[str, npt.NDArray[Any]]:
    """The ranker's inputs but for its two scalars; `k` is the largest list wanted, at most all there is."""
    orders = {index: row.order for index, row in enumerate(rows) if row.order is not None}
    width = rows[0].state.mean.shape
    if added is None:
        added = AddedRows(np.empty((0, *width), np.float32), np.empty(0, np.float32))
    return {
        "mean": np.stack([row.state.mean for row in rows]),
        "precision": np.stack([row.state.precision for row in rows]),
        "added_items": added.items,
        "added_variance": added.variance,
        "seen": _padded([row.seen for row in rows]),
        "blocked": _padded([row.blocked for row in rows]),
        "k": np.array([min(max(row.size for row in rows), num_items + len(added.items))], np.int64),
        "order_rows": np.array(list(orders), np.int64),
        "order_mean": np.array([order.mean for order in orders.values()], np.float32).reshape(-1, *width),
        "order_precision": np.array([order.precision for order in orders.values()], np.float32).reshape(-1, *width),
        "order_shrinkage": np.array([order.shrinkage for order in orders.values()], np.float32),
        "order_kappa": np.array([order.kappa for order in orders.values()], np.float32),
    }


def _padded_positions(rows: Sequence[EncoderRow | StepRow], buckets: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
    length = _bucket(max(len(row.items) for row in rows), buckets)
    items = np.full((len(rows), length), PAD, np.int64)
    weights = np.ones((len(rows), length), np.float32)
    timestamps = np.full((len(rows), length), np.nan)
    for index, row in enumerate(rows):
        items[index, : len(row.items)] = row.items
        weights[index, : len(row.weights)] = row.weights
        timestamps[index, : len(row.timestamps)] = row.timestamps
    return {"items": items, "weights": weights, "timestamps": timestamps}


def _bucket(length: int, buckets: Sequence[int]) -> int:
    return next(bucket for bucket in buckets if bucket >= length)


def _padded(rows: Sequence[Numbers]) -> Numbers:
    # Powers of four: seen sets have many lengths, and few shapes are worth some zeros.
    longest = max(len(row) for row in rows)
    width = next(width for width in (1, 4, 16, 64, 256, 1024, 4096, longest) if width >= longest)
    padded = np.zeros((len(rows), width), np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded


def _blank(length: int) -> tuple[Numbers, Floats, npt.NDArray[np.float64]]:
    """Items, weights and timestamps of so many positions, to warm with."""
    return np.full(length, BOS, np.int64), np.ones(length, np.float32), np.full(length, np.nan)


def _split_states(outputs: Arrays, rows: Sequence[EncoderRow | StepRow]) -> list[State]:
    return [
        State(outputs["mean"][index], outputs["precision"][index], _cache(outputs, index, row))
        for index, row in enumerate(rows)
    ]


def _cache(outputs: Arrays, index: int, row: EncoderRow | StepRow) -> Cache | None:
    """What there is after a row; None when the graph keeps nothing. Its arrays are its own, not parts of the batch."""
    if "key" not in outputs:
        return None
    own = slice(len(row.items))
    added = Cache(
        outputs["key"][index, :, :, own].copy(),
        outputs["value"][index, :, :, own].copy(),
        outputs["log_precision"][index, :, own].copy(),
        row.timestamps,
    )
    return row.cache.extended(added) if isinstance(row, StepRow) else added


def _split_heard(outputs: Arrays, rows: Sequence[EncoderRow]) -> list[Heard]:
    return [
        Heard(outputs["kriging_weight"][index, : len(row.items)], outputs["precision"][index, : len(row.items)])
        for index, row in enumerate(rows)
    ]


def _split_rankings(outputs: Arrays, rows: Sequence[RankerRow], temperature: float) -> list[Ranking]:
    return [_ranking(outputs, index, row.size, temperature) for index, row in enumerate(rows)]


def _ranking(outputs: Arrays, index: int, size: int, temperature: float) -> Ranking:
    logit = outputs["logit"][index, :size].astype(np.float64)
    # −inf fills a list for which the catalogue has too few items left.
    kept = slice(0, int((~np.isneginf(logit)).sum()))
    return Ranking(
        items=outputs["items"][index, :size][kept],
        order_key=outputs["order_key"][index, :size][kept],
        log_probability=logit[kept] / temperature - float(outputs["log_partition"][index]),
        score_mean=outputs["score_mean"][index, :size][kept],
        score_variance=outputs["score_variance"][index, :size][kept],
        reliability=outputs["reliability"][index, :size][kept],
        entropy=float(outputs["entropy"][index]),
        mean_precision=float(outputs["mean_precision"][index]),
    )


def _tensor(node: Any) -> Tensor:
    return Tensor(node.name, np.dtype(_DTYPES[node.type]), tuple(node.shape))


def _load(bundle: Bundle, graph: str, provider: str, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # A spinning thread pool burns the CPUs between two requests.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    # TF32 has 10 bits of mantissa: far from the tolerance of the parity check.
    providers = [_CPU] if provider == _CPU else [(_CUDA, {"use_tf32": "0"}), _CPU]
    try:
        return ort.InferenceSession(bundle.graph_path(graph), options, providers=providers)
    except Exception as error:
        raise BundleError(
            f"{bundle.folder}: {graph}.onnx cannot be loaded ({error}); export the bundle again"
        ) from error
