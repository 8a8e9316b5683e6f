"""What does folding one event into a cached state save against encoding the whole history again?

    python benchmarks/incremental.py [--json] [--lengths T ...] [--threads N]

Both by the exported graphs in ONNX Runtime, as the service runs them: step.onnx with one event behind the cache of
BOS and T − 1 others, encoder.onnx with all T. Rounds of the two alternate; `speedup` is the median ratio of the
rounds. `max_error` is the largest |step − encoder|/(1 + |encoder|) over the state's mean and log precision, at every
event of a history that is folded from BOS on.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from _environment import environment

from model.build import build_model
from model.bundle import ENCODER, STEP, golden_errors
from model.config import BOS, FIRST_ITEM, ModelConfig
from model.onnx.export import export_graphs

BACKBONES = ("sasrec", "hstu")
NUM_ITEMS = 1_000
ROUNDS = 21
ROUND_SECONDS = 0.05
POSITION_AXIS = {"key": 3, "value": 3, "log_precision": 2, "timestamps": 1}

Arrays = dict[str, np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--lengths", type=int, nargs="+", default=[50, 200, 1000], help="events in the history, even")
    parser.add_argument("--threads", type=int, default=1, help="of ONNX Runtime")
    arguments = parser.parse_args()

    results = []
    for backbone in BACKBONES:
        for length in arguments.lengths:
            print(f"{backbone}, {length} events", file=sys.stderr)
            results.append(measure(backbone, length, arguments.threads))
    if arguments.json:
        print(json.dumps({"environment": environment(), "threads": arguments.threads, "results": results}))
    else:
        for row in results:
            times = f"encoder {row['encoder_ms']:.2f} ms, step {row['step_ms']:.3f} ms"
            print(
                f"{row['backbone']:7} T = {row['length']:4}: {times}, speedup {row['speedup']:.1f},"
                f" max error {row['max_error']:.1e}, cache {row['cache_bytes'] / 1024:.0f} KiB"
            )


def measure(backbone: str, length: int, threads: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        graphs = export(backbone, length, Path(folder), threads)
    history = random_history(length)
    max_error, cached = fold(graphs, history)
    step_feeds = behind(cached, at(history, slice(-1, None)))
    rounds = [
        (seconds(lambda: graphs[ENCODER].run(None, history)), seconds(lambda: graphs[STEP].run(None, step_feeds)))
        for _ in range(ROUNDS)
    ]
    encoder_s, step_s = zip(*rounds, strict=True)
    return {
        "backbone": backbone,
        "length": length,
        "encoder_ms": 1e3 * statistics.median(encoder_s),
        "step_ms": 1e3 * statistics.median(step_s),
        "speedup": statistics.median(encoder / step for encoder, step in rounds),
        "max_error": max_error,
        "cache_bytes": sum(part.nbytes for part in cached.values()),
    }


def export(backbone: str, length: int, folder: Path, threads: int) -> dict[str, onnxruntime.InferenceSession]:
    """Sessions of a model whose window is as long as the history, with the service's options."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(backbone=backbone, max_len=length), torch.randint(1, 50, (NUM_ITEMS,)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    export_graphs(model, folder, temperature=1.0)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return {
        graph: onnxruntime.InferenceSession(folder / f"{graph}.onnx", options, providers=["CPUExecutionProvider"])
        for graph in (ENCODER, STEP)
    }


def random_history(length: int) -> Arrays:
    """BOS and `length` events, minutes to days apart."""
    rng = np.random.default_rng(0)
    items = rng.integers(FIRST_ITEM, FIRST_ITEM + NUM_ITEMS, (1, length + 1))
    items[:, 0] = BOS
    timestamps = 1.7e9 + np.exp(rng.uniform(4, 12, items.shape)).cumsum(1)
    timestamps[:, 0] = np.nan
    return {"items": items, "weights": np.ones(items.shape, np.float32), "timestamps": timestamps}


def fold(graphs: dict[str, onnxruntime.InferenceSession], history: Arrays) -> tuple[float, Arrays]:
    """The largest error over a history folded event by event, and the cache before its last event."""
    length = history["items"].shape[1]
    first = at(history, slice(0, 1))
    cached = first | run(graphs[ENCODER], first)
    max_error = 0.0
    checked = {*range(1, length, max(1, length // 50)), length - 1}
    for place in range(1, length):
        new = at(history, slice(place, place + 1))
        before = {name: cached[name] for name in POSITION_AXIS}
        found = run(graphs[STEP], behind(before, new))
        if place in checked:
            expected = run(graphs[ENCODER], at(history, slice(0, place + 1)))
            state = {name: expected[name] for name in ("mean", "precision")}
            max_error = max(max_error, *golden_errors(found, state).values())
        added = new | found
        cached = {name: np.concatenate([before[name], added[name]], axis) for name, axis in POSITION_AXIS.items()}
    return max_error, before


def behind(cached: Arrays, new: Arrays) -> Arrays:
    """The inputs of step.onnx."""
    past = {f"past_{name}": part for name, part in cached.items()}
    return new | past | {"past_length": np.array([cached["timestamps"].shape[1]])}


def at(history: Arrays, places: slice) -> Arrays:
    return {name: part[:, places] for name, part in history.items()}


def run(session: onnxruntime.InferenceSession, feeds: Arrays) -> Arrays:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def seconds(call: Callable[[], Any]) -> float:
    """Of one call, the mean over as many as fit into a round."""
    calls, begun = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begun) < ROUND_SECONDS or calls == 0:
        call()
        calls += 1
    return elapsed / calls


if __name__ == "__main__":
    main()
