"""What does filtering cost? Each backbone with filtering on against the same backbone with it off.

    python benchmarks/overhead.py [--json] [--backbones NAME ...] [--lengths T ...] [--output FILE]

For windows of T events (BOS before them), D = 64, B = 128, N = 12,000 items, one thread. Every configuration has a
process of its own; they take turns, and a ratio is the median over the turns of on/off in the same turn, so that the
machine's moods cancel. "Off" attends explicitly (torch's math backend), as filtering must; what torch's fused attention
makes of it is given beside it, without a target. HSTU's attention is explicit in either case.

    param_ratio           trainable parameters, besides θ
    encoder_peak_ratio    bytes that the encoder keeps for backward: every tensor's memory once, without the
                          parameters and the inputs
    step_ratio            time of the encoder forward and backward, from a fixed random gradient of its outputs
    inference_ratio       time of encoder.onnx in ONNX Runtime, with the service's session options, batch 128
    whole_step_peak_ratio the most bytes in tensors at one moment of a training step, on top of parameters and Adam's
    whole_step_ratio      time of a training step: encoder, full cross-entropy, backward, clipping, Adam

Training mode has the default dropout (0.3). The whole step is the training loop's own, on windows of users with 1.5 T
events: the rule shows each of them two windows of full length, of which the second predicts its new half only. Both
heads find the loss and its gradient in one pass.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from _environment import environment
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from model.build import BACKBONES, build_model
from model.config import FIRST_ITEM, ModelConfig
from model.filtering import Gaussian
from model.onnx import export
from model.onnx.functions import EmittedSteps, attach_bodies
from training import loop
from training.batches import collate, training_windows
from training.config import OptimizerConfig
from training.pipeline import keep_freed_memory
from training.splits import Histories

RESULT = Path(__file__).parent / "results" / "overhead.json"
BATCH, NUM_ITEMS, SEED, THREADS = 128, 12_000, 1, 1
TARGETS = {
    "param_ratio": 1.001,
    "encoder_peak_ratio": 1.6,
    "step_ratio": 2.0,
    "inference_ratio": 1.5,
    "whole_step_peak_ratio": 1.6,
    "whole_step_ratio": 2.0,
}
TURNS = {"step": 11, "whole_step": 5, "inference": 15, "inference_batch_1": 60}
"""At T = 50; a longer window takes fewer, down to 3."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the whole result as one JSON object")
    parser.add_argument("--backbones", nargs="+", choices=sorted(BACKBONES), default=list(BACKBONES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[50, 200], metavar="T", help="even")
    parser.add_argument("--output", type=Path, default=RESULT, help="where the result is written")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        backbone, mode, length = arguments.worker
        work(Configuration(backbone, mode, int(length)))
        return

    rows = [compare(backbone, length) for backbone in arguments.backbones for length in arguments.lengths]
    settings = {"width": 64, "batch": BATCH, "num_items": NUM_ITEMS, "seed": SEED, "threads": THREADS, "turns": TURNS}
    result = {"environment": environment(), "settings": settings, "targets": TARGETS, "results": rows}
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result) if arguments.json else as_text(rows))


def as_text(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        lines.append(f"{row['backbone']}, T = {row['length']}")
        for name, target in TARGETS.items():
            fused = row["against_fused"].get(name)
            beside = "" if fused is None else f"   against fused attention {fused:.2f}"
            met = "met" if row[name] <= target else "MISSED"
            lines.append(f"    {name:22} {row[name]:.5g}  (target {target:g}: {met}){beside}")
        lines.append(f"    {'inference_batch_1':22} {row['inference_batch_1_ratio']:.5g}")
    return "\n".join(lines)


# --- one backbone at one length, its configurations in turn -------------------------------------------------


def compare(backbone: str, length: int) -> dict[str, Any]:
    """The ratios of one backbone at one length, with the medians behind them."""
    modes = ("on", "off") if backbone == "hstu" else ("on", "off", "fused")
    workers = {mode: Worker(backbone, mode, length) for mode in modes}
    try:
        sizes = {mode: worker.ask("sizes") for mode, worker in workers.items()}
        seconds: dict[str, dict[str, list[float]]] = {}
        for what, turns in TURNS.items():
            asked = {mode: w for mode, w in workers.items() if mode != "fused" or not what.startswith("inference")}
            seconds[what] = {mode: [] for mode in asked}
            for _ in range(max(3, turns * 50 // length)):
                for mode, worker in asked.items():
                    seconds[what][mode].append(worker.ask(what))
            progress(f"{backbone}, T = {length}: {what} {ratio(seconds[what], 'off'):.2f}")
    finally:
        for worker in workers.values():
            worker.close()

    def against(mode: str) -> dict[str, float]:
        of_bytes = {"encoder_peak_ratio": "saved_bytes", "whole_step_peak_ratio": "whole_step_bytes"}
        of_times = {f"{what}_ratio": ratio(by_mode, mode) for what, by_mode in seconds.items() if mode in by_mode}
        return {name: sizes["on"][key] / sizes[mode][key] for name, key in of_bytes.items()} | of_times

    medians = {what: {m: 1e3 * statistics.median(s) for m, s in by.items()} for what, by in seconds.items()}
    return {
        "backbone": backbone,
        "length": length,
        "param_ratio": sizes["on"]["parameters"] / sizes["off"]["parameters"],
        **against("off"),
        "against_fused": against("fused") if "fused" in modes else {},
        "median_ms": medians,
        "bytes": {mode: {k: v for k, v in of_mode.items() if k != "parameters"} for mode, of_mode in sizes.items()},
    }


def ratio(seconds: dict[str, list[float]], mode: str) -> float:
    return statistics.median(on / off for on, off in zip(seconds["on"], seconds[mode], strict=True))


def progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


class Worker:
    """A process for one configuration; it answers one question after the other, a line of JSON each."""

    def __init__(self, *configuration: str | int) -> None:
        command = [sys.executable, __file__, "--worker", *map(str, configuration)]
        quiet = os.environ | {"KINETO_LOG_LEVEL": "99"}  # the profiler's remarks on its own start and stop
        self.process = subprocess.Popen(command, env=quiet, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, what: str) -> Any:
        print(what, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process of {self.process.args} ended; its error is above")
        return json.loads(answer)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


# --- inside a worker ----------------------------------------------------------------------------------------


def work(configuration: "Configuration") -> None:
    """Answer questions from standard input until it ends."""
    for line in sys.stdin:
        explicit = sdpa_kernel(SDPBackend.MATH) if configuration.mode == "off" else contextlib.nullcontext()
        with explicit:
            answer = getattr(configuration, line.strip())()
        print(json.dumps(answer), flush=True)


class Configuration:
    """A model with its batch, and the questions that are asked of it."""

    def __init__(self, backbone: str, mode: str, length: int) -> None:
        torch.set_num_threads(THREADS)
        torch.manual_seed(SEED)
        keep_freed_memory()
        self.mode = mode
        histories = random_histories(length)
        counts = torch.from_numpy(np.bincount(histories.items - FIRST_ITEM, minlength=NUM_ITEMS))
        config = ModelConfig(backbone=backbone, filtering=mode == "on", max_len=length)
        self.model = build_model(config, counts)
        self.training = OptimizerConfig(batch_size=BATCH, seed=SEED)
        self.windows = training_windows(histories, length)
        self.state = loop.TrainState(
            self.model, loop._optimizer(self.model, self.training), torch.Generator().manual_seed(SEED)
        )
        self.batch = collate(self.windows, torch.arange(BATCH))
        self.step()
        self.whole_step()

    def sizes(self) -> dict[str, int]:
        """Parameters besides θ, and the two counts of bytes."""
        named = dict(self.model.named_parameters())
        named.pop("initial_precision.deviation", None)
        return {
            "parameters": sum(parameter.numel() for parameter in named.values()),
            "saved_bytes": self.saved_bytes(),
            "whole_step_bytes": self.whole_step_bytes(),
        }

    def saved_bytes(self) -> int:
        """Of the memory behind every tensor that autograd is given to keep, custom functions' included."""
        given = [*self.model.parameters(), *self.model.buffers(), self.batch.items, self.batch.weights]
        left_out = {tensor.untyped_storage().data_ptr() for tensor in (*given, self.batch.timestamps)}
        # The tensors are held until all are counted, so that no address is used twice.
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda x: x):
            self.encode()
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
        return sum(size for address, size in storages.items() if address not in left_out)

    def whole_step_bytes(self) -> int:
        """The highest sum of all allocations less all releases in two steps, as torch's allocator reports them.

        Exact and the same in every run, which the process's resident memory is not: that counts what the C library
        has not handed back.
        """
        self.model.zero_grad()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            self.whole_step()
            self.whole_step()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profiled.export_chrome_trace(file.name)
            events = json.loads(Path(file.name).read_text())["traceEvents"]
        changes = [(event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"]
        return int(np.cumsum([size for _, size in sorted(changes)]).max())

    def encode(self) -> Gaussian:
        return self.model.train().encode(self.batch.items, self.batch.weights, self.batch.timestamps)

    def step(self) -> float:
        """Seconds of the encoder forward and backward."""
        self.model.zero_grad()
        generator = torch.Generator().manual_seed(SEED)
        gradient = torch.randn(*self.batch.items.shape, self.model.config.width, generator=generator)
        begun = time.perf_counter()
        outputs = [part for part in self.encode() if part.requires_grad]
        torch.autograd.backward(outputs, [gradient] * len(outputs))
        return time.perf_counter() - begun

    def whole_step(self) -> float:
        """Seconds of the training loop's own step: all windows are one batch."""
        begun = time.perf_counter()
        loop.train_epoch(self.state, self.windows, self.training, lambda *_: None)
        return time.perf_counter() - begun

    def inference(self) -> float:
        return self.run_session(BATCH)

    def inference_batch_1(self) -> float:
        return self.run_session(1)

    def run_session(self, batch: int) -> float:
        """Seconds of the exported encoder."""
        names = ("items", "weights", "timestamps")
        inputs = {name: getattr(self.batch, name)[:batch].numpy() for name in names}
        begun = time.perf_counter()
        self.session.run(None, inputs)
        return time.perf_counter() - begun

    @cached_property
    def session(self) -> onnxruntime.InferenceSession:
        """The exported encoder with the service's options, warm."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = THREADS, 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        graph = (export.CausalEncoderGraph if self.model.causal else export.EncoderGraph)(self.model, EmittedSteps())
        exported = export._export(graph, export._encoder_signature(self.model.causal), "encoder")
        attach_bodies(exported)
        return onnxruntime.InferenceSession(exported.SerializeToString(), options, providers=["CPUExecutionProvider"])


def random_histories(length: int) -> Histories:
    """Users whose training windows are one batch: 1.5 T + 1 events each, which is two windows."""
    rng = np.random.default_rng(SEED)
    users, events = BATCH // 2, length + length // 2 + 1
    gaps_s = np.exp(rng.uniform(0, 14, size=(users, events)))
    return Histories(
        user_ids=[str(user) for user in range(users)],
        offsets=np.arange(users + 1) * events,
        items=rng.integers(FIRST_ITEM, FIRST_ITEM + NUM_ITEMS, size=users * events),
        weights=np.ones(users * events, np.float32),
        timestamps=(1.7e9 + gaps_s.cumsum(1)).ravel(),
    )


if __name__ == "__main__":
    main()
