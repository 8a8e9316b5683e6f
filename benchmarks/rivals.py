"""Is our plain SASRec as good as RecTools' and RecBole's, and how much faster does it learn? All three in one run.

    python benchmarks/rivals.py --data Beauty.txt [--json] [--epochs N] [--throughput-only] [--environment DIR]

The same log, the same leave-one-out split, one process after the other on this machine, with equal width, depth,
length, dropout, learning rate, threads and loss: the full softmax, which is the default of both rivals. Each library
trains as its users run it:

- RecTools: a row a user, 50 positions, all of which are scored against the catalogue, padding too;
- RecBole: a row for every prefix of a history, 50 positions, of which the last one predicts. As many rows a step as
  the others' batch has events to predict;
- ours: a row a user, as long as the batch's longest history, of which the real positions are scored.

Events/s are the events of the training histories over the seconds of an epoch's training: validation is not counted,
nor is the first epoch, in which memory is fetched and kernels are chosen. A history's first event counts for all,
though only ours learns to predict it. Peak memory is the process's largest resident set by the end of its first epoch's
training.

Unless --throughput-only, the best epoch is chosen by validation: by NDCG@10, RecTools by its loss on 2,048 users, for
want of a cheaper way. Then every test user's ten best items are judged by training/metrics.py: the whole catalogue is
ranked, less what the user has had. Few epochs are no fair test of quality: see that the best is not the last.

The rivals are installed from benchmarks/rivals/requirements.txt into an environment of their own (1.7 GB), made once.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _report import note, parser_of, report, row

from training import metrics
from training.config import ConfigError, load_config
from training.datasets import default_cache_dir
from training.pipeline import prepare
from training.tables import DataError

ROOT = Path(__file__).parent.parent
RUNNERS = Path(__file__).with_name("rivals")
REQUIREMENTS = RUNNERS / "requirements.txt"
RIVALS = {"RecTools": "rectools", "RecBole": "recbole"}
"""Name → package, and the name of its runner."""
MODEL = {"width": 64, "layers": 2, "heads": 2, "max_len": 50}
LIST_LENGTH = 10
HandedSplit = dict[str, list[Any]]
"""`users`, `train`, `validation`, `test`, as rivals/_job.py says."""
Results = dict[str, dict[str, Any]]
"""Library → its runner's result."""
TARGET = 2.0
"""How many times as many events/s as each rival."""


def main() -> None:
    command_line = parser()
    arguments = command_line.parse_args()
    if arguments.epochs < 2 or arguments.patience < 1:
        command_line.error(
            "--epochs must be at least 2, because the first one is not counted, and --patience at least 1"
        )
    try:
        with tempfile.TemporaryDirectory() as folder:
            split = hand_over(arguments.data, Path(folder))
            interpreters = {"ours": Path(sys.executable)} | dict.fromkeys(RIVALS, rivals_python(arguments.environment))
            found = {
                name: train(name, python, job_of(name, arguments, split), Path(folder))
                for name, python in interpreters.items()
            }
    except (ConfigError, DataError, OSError, subprocess.SubprocessError) as error:
        command_line.error(str(error))
    results = [*versions(interpreters["RecTools"]), *throughput(found, split)]
    if not arguments.throughput_only:
        results += quality(found, split)
    report(told(arguments), results)


def parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="a log in lines of `user item item …`")
    parser.add_argument("--epochs", type=int, default=4, help="at most; at least 2 (default: %(default)s)")
    parser.add_argument("--patience", type=int, default=4, help="epochs without a better validation (%(default)s)")
    parser.add_argument("--throughput-only", action="store_true", help="no validation, no test")
    parser.add_argument("--threads", type=int, default=2, help="of each process (default: %(default)s)")
    parser.add_argument("--dropout", type=float, default=0.2, help="RecTools' own by default (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="users a step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument(
        "--environment", type=Path, default=default_cache_dir() / "rivals", help="the rivals' own (%(default)s)"
    )
    return parser


def told(arguments: argparse.Namespace) -> argparse.Namespace:
    """The settings as they are reported: no paths of this machine."""
    settings = {name: value for name, value in vars(arguments).items() if name != "environment"}
    return argparse.Namespace(**settings | {"data": arguments.data.name, "model": MODEL})


def rivals_python(environment: Path) -> Path:
    """The interpreter of the environment that has the rivals; made if it is not there, or of other requirements.

    Raises:
        ConfigError: the environment is the one that runs this.
    """
    environment = environment.resolve()
    if environment == Path(sys.prefix).resolve():
        raise ConfigError(f"{environment} is the project's environment; the rivals need one of their own")
    python, made_of = environment / "bin" / "python", environment / "requirements.sha256"
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    if not (made_of.exists() and made_of.read_text() == wanted):
        note(f"installing the rivals into {environment}")
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--requirement", REQUIREMENTS], check=True)
        made_of.write_text(wanted)
    return python


def hand_over(data: Path, folder: Path) -> HandedSplit:
    """The log's split, ours, as the runners read it; also written to `split.json`.

    Raises:
        DataError: the log cannot be read, or a user has too few events to give up two of them.
    """
    paths = {"data.path": data, "data.rejects": folder / "rejects.jsonl"}
    prepared = prepare(load_config(None, [f"{key}={json.dumps(str(path))}" for key, path in paths.items()]))
    test, item_ids = prepared.split.test, prepared.catalog.ids
    if len(test) != len(prepared.split.train):
        raise DataError(f"{data}: RecBole's split needs at least 3 events of every user; leave out those with fewer")
    histories = [item_ids(part) for part in np.split(test.history.items, test.history.offsets[1:-1])]
    split = {
        "users": test.history.user_ids,
        "train": [history[:-1] for history in histories],
        "validation": [history[-1] for history in histories],
        "test": item_ids(test.target),
    }
    (folder / "split.json").write_text(json.dumps(split))
    return split


def job_of(name: str, arguments: argparse.Namespace, split: HandedSplit) -> dict[str, Any]:
    """What a runner is told, apart from the files (rivals/_job.py)."""
    events_a_user = num_events(split) / len(split["users"])
    return {
        **MODEL,
        "dropout": arguments.dropout,
        "learning_rate": arguments.learning_rate,
        "batch_size": round(arguments.batch_size * (events_a_user if name == "RecBole" else 1)),
        "epochs": arguments.epochs,
        "patience": None if arguments.throughput_only else arguments.patience,
        "list_length": None if arguments.throughput_only else LIST_LENGTH,
        "seed": arguments.seed,
        "threads": arguments.threads,
        "data": str(arguments.data.resolve()),
    }


def train(name: str, python: Path, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run one library's runner in a process of its own; returns its result.

    Raises:
        ChildProcessError: it failed; the message ends with what it said.
    """
    note(f"{name}: {job['epochs']} epochs")
    job_file, result_file, log = (folder / f"{name}.{kind}" for kind in ("job.json", "result.json", "log"))
    job_file.write_text(json.dumps({**job, "split": str(folder / "split.json"), "result": str(result_file)}))
    with log.open("wb") as file:
        ended = subprocess.run(
            [python, RUNNERS / f"{RIVALS.get(name, 'plain')}_runner.py", job_file],
            stdout=file,
            stderr=file,
            cwd=folder,  # RecBole leaves files where it runs
            env=process_environment(job["threads"], project=name == "ours"),
        )
    if ended.returncode:
        raise ChildProcessError(f"{name} ended with status {ended.returncode}: {log.read_text()[-3000:]}")
    result: dict[str, Any] = json.loads(result_file.read_text())
    note(f"{name}: {', '.join(f'{seconds:.1f} s' for seconds in result['epoch_seconds'])}")
    return result


def process_environment(threads: int, project: bool) -> dict[str, str]:
    """The same for all, but that the rivals do not see the project. A waiting thread sleeps, as in `bft-train`."""
    settings = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT) if project else "",
    }
    return {**os.environ, **settings}


def versions(rivals_python: Path) -> list[dict[str, Any]]:
    """What the rivals' environment holds."""
    packages = [*RIVALS.values(), "torch", "pytorch-lightning", "numpy"]
    program = "import importlib.metadata, sys; print(*map(importlib.metadata.version, sys.argv[1:]), sep='\\n')"
    answer = subprocess.run([rivals_python, "-c", program, *packages], capture_output=True, text=True, check=True)
    return [
        row(f"rivals: {package}", version) for package, version in zip(packages, answer.stdout.split(), strict=True)
    ]


def throughput(found: Results, split: HandedSplit) -> list[dict[str, Any]]:
    """Events/s, and ours over each rival's; then what an epoch takes."""
    events = num_events(split)
    seconds = {name: statistics.median(result["epoch_seconds"][1:]) for name, result in found.items()}
    rows = [row(f"{name}: events/s", round(events / seconds[name])) for name in found]
    for name in RIVALS:
        ratio = seconds[name] / seconds["ours"]
        rows.append(row(f"events/s, ours over {name}'s", round(ratio, 2), f">= {TARGET:g}", ratio >= TARGET))
    for name, result in found.items():
        rows += [
            row(f"{name}: seconds of an epoch's training", round(seconds[name], 1)),
            row(f"{name}: its CPU seconds", round(statistics.median(result["epoch_cpu_seconds"][1:]), 1)),
            row(f"{name}: peak memory, MiB", round(result["peak_mib"])),
            row(f"{name}: targets of an epoch", result["targets"]),
        ]
    return [row("events of an epoch", events), *rows]


def quality(found: Results, split: HandedSplit) -> list[dict[str, Any]]:
    """HR@10 and NDCG@10 on the test events; then ours minus each rival's with its interval."""
    ranks = {name: ranks_in_lists(result["lists"], split) for name, result in found.items()}
    measures = {"HR@10": metrics.hit_rate, "NDCG@10": metrics.ndcg}
    rows = [
        row(f"{name}: best of {len(found[name]['epoch_seconds'])} epochs", found[name]["best_epoch"]) for name in found
    ]
    for measure, per_user in measures.items():
        values = {name: per_user(ranks_U, LIST_LENGTH) for name, ranks_U in ranks.items()}
        rows += [row(f"{name}: {measure}", round(float(values_U.mean()), 5)) for name, values_U in values.items()]
        for name in RIVALS:
            low, high = metrics.bootstrap_interval(values["ours"] - values[name])
            rows.append(row(f"{measure}, ours minus {name}'s, 95 %", f"{low:+.4f} … {high:+.4f}"))
    return rows


def ranks_in_lists(lists: Mapping[str, Sequence[str]], split: HandedSplit) -> np.ndarray:
    """(U,) rank of each user's test item in the user's list, from 1; infinite where the list lacks it."""
    ranks = []
    for user, target in zip(split["users"], split["test"], strict=True):
        best = lists.get(user, ())
        ranks.append(1.0 + best.index(target) if target in best else np.inf)
    return np.array(ranks)


def num_events(split: HandedSplit) -> int:
    """Of the training histories."""
    return sum(map(len, split["train"]))


if __name__ == "__main__":
    main()
