"""ONNX Runtime: one session a graph, rows in and rows out (service.md, "Engine").

Rows are padded to a few lengths, so that ONNX Runtime meets few shapes. Shapes: T positions, D width, S seen
items, X blocked items, M entries of a list.
"""

import importlib.metadata
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from model.bundle import Bundle, BundleError, GoldenCase, golden_errors
from model.config import BOS, PAD
from service.batching import Batcher, BatchLimits
from service.context import RequestContext
from service.errors import InferenceFailed, StartError
from service.settings import Provider, Settings
from service.telemetry import Metrics

logger = logging.getLogger(__name__)

ENCODER, RANKER = "encoder", "ranker"
GRAPHS = (ENCODER, RANKER)

_SHORTEST_BUCKET = 8
_CUDA = "CUDAExecutionProvider"
_CPU = "CPUExecutionProvider"

Floats = npt.NDArray[np.float32]
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
class State:
    """A user's filtered state."""

    mean: Floats
    """(D,)"""
    precision: Floats
    """(D,) inverse variance, > 0; infinite for a plain model."""


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


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """The best items of one row by predictive logit, best first: each array (M,), M ≤ the size asked for."""

    items: Numbers
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


class Engine:
    """The two graphs of a bundle behind a batcher.

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
        self._sessions = {graph: _load(bundle, graph, self.provider, settings.threads) for graph in GRAPHS}
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
        """Stop; whoever still waits gets EngineStopped."""
        await self._batcher.close()

    @property
    def alive(self) -> bool:
        """Whether rows will be worked on."""
        return self._batcher.alive

    @property
    def last_success(self) -> float | None:
        """When a batch last succeeded, on the clock of `time.monotonic`."""
        return self._batcher.last_success

    async def encode(self, row: EncoderRow, request: RequestContext) -> State:
        """The state after a history. Raises what `Batcher.submit` does."""
        state: State = await self._batcher.submit(ENCODER, row, _length(ENCODER, row), request)
        return state

    async def rank(self, row: RankerRow, request: RequestContext) -> Ranking:
        """The best items for a state. Raises as `Batcher.submit`, and InferenceFailed on a NaN score."""
        ranking: Ranking = await self._batcher.submit(RANKER, row, _length(RANKER, row), request)
        if not np.isfinite(ranking.score_mean).all() or np.isnan(ranking.log_probability).any():
            raise InferenceFailed("the ranker returned scores that are no numbers")
        return ranking

    def run_rows(self, graph: str, rows: Sequence[Any]) -> Sequence[Any]:
        """One batch, here and now, in the calling thread."""
        if graph == ENCODER:
            return _split_states(self.run(graph, encoder_inputs(rows, self.max_positions)))
        feeds = ranker_inputs(rows, self._bundle.manifest.num_items)
        feeds |= {"temperature": self._temperature, "variance_scale": self._variance_scale}
        return _split_rankings(self.run(graph, feeds), rows, self._bundle.calibration.temperature)

    def run(self, graph: str, feeds: Arrays) -> dict[str, npt.NDArray[Any]]:
        """A graph's outputs by name."""
        session = self._sessions[graph]
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, dict(feeds)), strict=True))

    def warm(self) -> None:
        """Run each length bucket alone and in a full batch, so that no caller pays for first shapes."""
        for length in length_buckets(self.max_positions):
            row = EncoderRow(np.full(length, BOS, np.int64), np.ones(length, np.float32), np.full(length, np.nan))
            state = self.run_rows(ENCODER, [row])[0]
            self.run_rows(ENCODER, [row] * self._max_batch_rows)
        nothing = np.empty(0, np.int64)
        for size in (1, 25, 500):
            self.run_rows(RANKER, [RankerRow(state, nothing, nothing, size)])
        self.run_rows(RANKER, [RankerRow(state, nothing, nothing, 25)] * self._max_batch_rows)

    def parity_error(self) -> float:
        """Largest error of the golden cases as a multiple of (1 + |expected|); see PARITY_TOLERANCE.

        Raises:
            BundleError: there are no golden cases, or one does not fit its graph.
        """
        cases = self._bundle.golden_cases()
        if {case.graph for case in cases} != set(GRAPHS):
            raise BundleError(f"{self._bundle.folder}: golden.npz does not cover both graphs; export the bundle again")
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


def length_buckets(longest: int) -> list[int]:
    """Powers of two from 8 up, then the longest length itself."""
    buckets = []
    length = _SHORTEST_BUCKET
    while length < longest:
        buckets.append(length)
        length *= 2
    return [*buckets, longest]


def encoder_inputs(rows: Sequence[EncoderRow], max_positions: int) -> dict[str, npt.NDArray[Any]]:
    """The encoder's inputs, right-padded to the bucket of the longest row."""
    longest = max(len(row.items) for row in rows)
    length = next(bucket for bucket in length_buckets(max_positions) if bucket >= longest)
    items = np.full((len(rows), length), PAD, np.int64)
    weights = np.ones((len(rows), length), np.float32)
    timestamps = np.full((len(rows), length), np.nan)
    for index, row in enumerate(rows):
        items[index, : len(row.items)] = row.items
        weights[index, : len(row.weights)] = row.weights
        timestamps[index, : len(row.timestamps)] = row.timestamps
    return {"items": items, "weights": weights, "timestamps": timestamps}


def ranker_inputs(rows: Sequence[RankerRow], num_items: int) -> dict[str, npt.NDArray[Any]]:
    """The ranker's inputs but for its two scalars; `k` is the largest list wanted, at most the catalogue."""
    return {
        "mean": np.stack([row.state.mean for row in rows]),
        "precision": np.stack([row.state.precision for row in rows]),
        "seen": _padded([row.seen for row in rows]),
        "blocked": _padded([row.blocked for row in rows]),
        "k": np.array([min(max(row.size for row in rows), num_items)], np.int64),
    }


def _padded(rows: Sequence[Numbers]) -> Numbers:
    # Powers of four: seen sets have many lengths, and few shapes are worth some zeros.
    longest = max(len(row) for row in rows)
    width = next(width for width in (1, 4, 16, 64, 256, 1024, 4096, longest) if width >= longest)
    padded = np.zeros((len(rows), width), np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded


def _length(graph: str, row: Any) -> int:
    return len(row.items) if graph == ENCODER else row.size + len(row.seen) + len(row.blocked)


def _split_states(outputs: Arrays) -> list[State]:
    return [State(mean, precision) for mean, precision in zip(outputs["mean"], outputs["precision"], strict=True)]


def _split_rankings(outputs: Arrays, rows: Sequence[RankerRow], temperature: float) -> list[Ranking]:
    return [_ranking(outputs, index, row.size, temperature) for index, row in enumerate(rows)]


def _ranking(outputs: Arrays, index: int, size: int, temperature: float) -> Ranking:
    logit = outputs["logit"][index, :size].astype(np.float64)
    # −inf fills a list for which the catalogue has too few items left.
    kept = slice(0, int((~np.isneginf(logit)).sum()))
    return Ranking(
        items=outputs["items"][index, :size][kept],
        log_probability=logit[kept] / temperature - float(outputs["log_partition"][index]),
        score_mean=outputs["score_mean"][index, :size][kept],
        score_variance=outputs["score_variance"][index, :size][kept],
        reliability=outputs["reliability"][index, :size][kept],
        entropy=float(outputs["entropy"][index]),
        mean_precision=float(outputs["mean_precision"][index]),
    )


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
