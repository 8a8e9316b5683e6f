"""What does filtering cost, in parameters, memory and time, against the plain backbone of the same code?

    python benchmarks/overhead.py [--json] [--backbones NAME ...] [--lengths T ...] [--rounds R]

D = 64, B = 128, two layers, dropout as by default, histories of full length. Each configuration (backbone, length, and
filtering `on`, `off`, or `fused`: off with torch's fused attention) is measured in a process of its own, with one
thread; rounds of the configurations alternate, and a ratio is the median over the rounds. `off` computes its attention
explicitly, as `on` must: softmax(q·k)·v by torch's MATH backend; HSTU has no other form, so it has no `fused`.

- `param_ratio`: parameters, θ left out (one number an item).
- `encoder_peak_ratio`: bytes kept for backward by the encoder: every tensor that autograd saves, each storage once,
  parameters and the batch left out.
- `step_ratio`: encoder forward and backward.
- `inference_ratio`: encoder.onnx in ONNX Runtime with the service's options, B = 128; `inference_ratio_one`: B = 1.
- `whole_peak_ratio`, `whole_ratio`: a whole training step on a catalogue of 12,000 items: encoder, full cross-entropy
  at every position, backward, Adam. Its peak is the growth of the process's resident memory during its first step.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from _environment import environment
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.backbone import Backbone
from model.build import BACKBONES, build_model
from model.config import BOS, FIRST_ITEM, MASK, ModelConfig
from model.filtering import Gaussian
from training import losses
from training.pipeline import keep_freed_memory

BATCH, NUM_ITEMS = 128, 12_000
CONFIGURATIONS = ("on", "off", "fused")
TARGETS = {
    "param_ratio": 1.001,
    "encoder_peak_ratio": 1.6,
    "step_ratio": 2.0,
    "inference_ratio": 1.5,
    "whole_peak_ratio": 1.6,
    "whole_ratio": 2.0,
}
MEASURED_SECONDS = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--backbones", nargs="+", default=list(BACKBONES), choices=list(BACKBONES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[50, 200], help="events in a history, even")
    parser.add_argument("--rounds", type=int, default=3, help="processes per configuration")
    parser.add_argument("--child", nargs=4, metavar=("BACKBONE", "LENGTH", "CONFIGURATION", "FOLDER"), help="internal")
    arguments = parser.parse_args()
    if arguments.child:
        backbone, length, configuration, folder = arguments.child
        print(json.dumps(measure(backbone, int(length), configuration, Path(folder))))
        return
    results = [
        compare(backbone, length, arguments.rounds) for backbone in arguments.backbones for length in arguments.lengths
    ]
    if arguments.json:
        print(json.dumps({"environment": environment(), "targets": TARGETS, "results": results}))
        return
    for row in results:
        print(f"{row['backbone']}, T = {row['length']}")
        for name, target in TARGETS.items():
            print(f"  {name:20} {row[name]:7.4f}  ≤ {target:<6} {'met' if row['met'][name] else 'NOT MET'}")
        for name in row.keys() - TARGETS.keys() - {"backbone", "length", "met"}:
            print(f"  {name:20} {row[name]}")


def compare(backbone: str, length: int, rounds: int) -> dict[str, Any]:
    """The ratios of one backbone at one length."""
    configurations = [c for c in CONFIGURATIONS if c != "fused" or backbone != "hstu"]
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in configurations}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for configuration in configurations:
                print(f"{backbone}, T = {length}: {configuration}, round {number + 1}", file=sys.stderr, flush=True)
                figures[configuration].append(run_child(backbone, length, configuration, Path(folder)))

    def ratio(name: str, of: str = "on", to: str = "off") -> float:
        pairs = zip(figures[of], figures[to], strict=True)
        return round(statistics.median(one[name] / other[name] for one, other in pairs), 4)

    ratios = {
        "param_ratio": ratio("parameters"),
        "encoder_peak_ratio": ratio("encoder_bytes"),
        "step_ratio": ratio("encoder_ms"),
        "inference_ratio": ratio("inference_ms"),
        "whole_peak_ratio": ratio("whole_bytes"),
        "whole_ratio": ratio("whole_ms"),
    }
    row = {"backbone": backbone, "length": length, **ratios, "inference_ratio_one": ratio("inference_one_ms")}
    if "fused" in figures:
        row |= {"fused_step_ratio": ratio("encoder_ms", "on", "fused")}
    medians = {
        configuration: {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}
        for configuration, runs in figures.items()
    }
    return row | {"measured": medians, "met": {name: ratios[name] <= target for name, target in TARGETS.items()}}


def run_child(backbone: str, length: int, configuration: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", backbone, str(length), configuration, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure(backbone: str, length: int, configuration: str, folder: Path) -> dict[str, float]:
    """Everything about one configuration, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_freed_memory()
    config = ModelConfig(backbone=backbone, filtering=configuration == "on", max_len=length)
    model = build_model(config, torch.randint(1, 500, (NUM_ITEMS,)))
    batch = random_batch(length, model.causal)
    attention: AbstractContextManager[Any] = nullcontext() if configuration == "fused" else sdpa_kernel(SDPBackend.MATH)
    with attention:
        # First, while nothing has been freed that it could use again.
        whole_bytes = resident_growth(WholeStep(model, batch))
        figures = {
            "parameters": float(
                sum(p.numel() for name, p in model.named_parameters() if not name.endswith(".deviation"))
            ),
            "whole_bytes": float(whole_bytes),
            "encoder_bytes": float(saved_bytes(model, batch)),
            "encoder_ms": milliseconds(lambda: encoder_step(model, batch)),
            "whole_ms": milliseconds(WholeStep(model, batch)),
        }
    return figures | inference(model, batch, folder / f"{configuration}")


def random_batch(length: int, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Full histories: BOS and `length` events; of a model that is not causal a MASK stands last."""
    items = torch.randint(FIRST_ITEM, FIRST_ITEM + NUM_ITEMS, (BATCH, length + 1))
    items[:, 0] = BOS
    if not causal:
        items[:, -1] = MASK
    timestamps = 1.7e9 + torch.rand(BATCH, length + 1, dtype=torch.float64).mul(12).exp().cumsum(1)
    return items, torch.ones(BATCH, length + 1), timestamps


def encoder_step(model: Backbone, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    model.train()
    outputs(model.encode(*batch)).backward()
    model.zero_grad(set_to_none=True)


def outputs(state: Gaussian) -> Tensor:
    """A scalar of everything that the encoder says; a plain encoder's precision is infinite and says nothing."""
    total = state.mean.sum()
    return total + state.precision.log().sum() if torch.isfinite(state.precision).all() else total


class WholeStep:
    """One training step: encoder, full cross-entropy at every position, backward, Adam."""

    def __init__(self, model: Backbone, batch: tuple[Tensor, Tensor, Tensor]) -> None:
        self.model, self.batch = model, batch
        self.optimizer = torch.optim.Adam(model.parameters())
        self.targets = torch.randint(FIRST_ITEM, FIRST_ITEM + NUM_ITEMS, (batch[0].numel(),))

    def __call__(self) -> None:
        self.model.train()
        state = self.model.encode(*self.batch)
        flat = Gaussian(*(part.flatten(0, 1) for part in state))
        losses.full_cross_entropy(self.model, flat, self.targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def saved_bytes(model: Backbone, batch: tuple[Tensor, Tensor, Tensor]) -> int:
    """Bytes that the encoder keeps for backward, each storage once, parameters and the batch left out."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), *batch)}
    storages: dict[int, int] = {}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor.detach())  # alive, so that no other storage gets its address
        return tensor

    model.train()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        state = model.encode(*batch)
    return sum(storages.values()) if state.mean.requires_grad else 0


def resident_growth(step: Callable[[], None]) -> int:
    """How far above the resident memory before it a call's highest lies, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew (Linux, proc(5))
    before = status_bytes("VmRSS")
    step()
    return status_bytes("VmHWM") - before


def status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}; this benchmark needs Linux")


def inference(model: Backbone, batch: tuple[Tensor, Tensor, Tensor], folder: Path) -> dict[str, float]:
    """encoder.onnx in ONNX Runtime; exported by the first round."""
    import onnxruntime

    from model.onnx.export import export_graphs

    if not (folder / "encoder.onnx").exists():
        folder.mkdir(parents=True)
        small = build_model(model.config, torch.randint(1, 500, (100,)))
        export_graphs(small, folder, temperature=1.0)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(folder / "encoder.onnx", options, providers=["CPUExecutionProvider"])
    items, weights, timestamps = batch
    items = torch.where(items < FIRST_ITEM, BOS, FIRST_ITEM + items % 100)
    # A history of BERT4Rec's ends with its last event: the graph appends the MASK.
    feeds = {
        "items": items[:, : model.config.max_len + 1].numpy(),
        "weights": weights.numpy(),
        "timestamps": timestamps.numpy(),
    }
    one = {name: part[:1] for name, part in feeds.items()}
    return {
        "inference_ms": milliseconds(lambda: session.run(["mean", "precision"], feeds)),
        "inference_one_ms": milliseconds(lambda: session.run(["mean", "precision"], one)),
    }


def milliseconds(call: Callable[[], Any]) -> float:
    """The median of as many calls as fit into the time, after one that does not count."""
    call()
    seconds, begun = [], time.perf_counter()
    while len(seconds) < 3 or time.perf_counter() - begun < MEASURED_SECONDS:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)


if __name__ == "__main__":
    main()
