"""The job killed with -9 before each step that changes something on the disk, in turn: the next run finishes it."""

import json
import multiprocessing
import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import redis

from model import registry as registries
from model.bundle import open_bundle
from tests.training.retrain.test_job import DAY_S, NOW, NUM_ITEMS, config, walks
from tests.training.retrain.test_sources import USER, all_outbox_keys, event, serve
from tests.training.test_pipeline import Recorder
from training.retrain import sources
from training.retrain.job import retrain
from training.retrain.sources import Outbox
from training.retrain.store import NUM_BUCKETS, Store

STEPS = {"os.rename": 1, "os.mkdir": 0, "os.remove": 0, "os.rmdir": 0, "shutil.rmtree": 0}
"""Audit events of the steps → which argument names the path that the step is told by."""
VARYING = re.compile(r"(?<=/\.staging-)\w+|[0-9a-f]{8,}|[0-9]+")
"""Of a path, what another run has otherwise."""
ENDED = 41
"""Exit status of a run that ended by itself."""
FEW = (
    "training={epochs: 2, batch_size: 64, learning_rate: 1e-2, schedule: linear, patience: 2}",
    "retrain={judged_events: 600, limits: {min_events: 200}, gate: {margin: 0.99, calibration_tolerance: 9.0}}",
)
"""Of a model that is trained to be there."""


def night(folder: Path, url: str, done: list[str] | None, told: Path) -> None:
    """One run of the job, in a process of its own, killed before the first step that is not `done`.

    Args:
        folder: of its source, its log and its registry.
        url: of the outbox.
        done: steps that it may take; None: all.
        told: receives the step before which it was killed, or how it ended.
    """

    def before(audited: str, arguments: tuple[Any, ...]) -> None:
        if done is None or audited not in STEPS:
            return
        path = os.fsdecode(arguments[STEPS[audited]])
        step = f"{audited} {VARYING.sub('*', path.removeprefix(f'{folder}/'))}"
        if path.startswith(str(folder)) and step not in done:
            told.write_text(step)
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(before)
    with Outbox(url) as outbox:
        settings = config(folder / "in", *FEW)
        ended = retrain(settings, folder / "work", folder / "registry", outbox, Recorder(), ["bft-train"], now=NOW)
    told.write_text(f"{ended.outcome}: {ended.reason}")
    os._exit(ENDED)


@pytest.mark.timeout(900)  # a process for each step, two dozen
def test_a_job_that_is_killed_anywhere_is_finished_by_the_next(valkey_url: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    folder, told = tmp_path / "job", tmp_path / "told"
    folder.mkdir()

    def run(done: list[str] | None) -> int | None:
        process = context.Process(target=night, args=(folder, valkey_url, done, told))
        process.start()
        process.join()
        return process.exitcode

    walks(folder / "in", "monday.csv", 0, 120, NUM_ITEMS, seed=1)
    assert run(done=None) == ENDED, told.read_text()
    first = registries.read_index(folder / "registry").current
    walks(folder / "in", "tuesday.csv", 20, 120, NUM_ITEMS + 5, seed=2)
    clicks = [event("a", 21 * DAY_S), event("b", 21 * DAY_S + 60), event("a", 21 * DAY_S + 120)]
    serve(valkey_url, False, lambda states: states.append(USER, clicks))

    killed: list[str] = []
    while run(killed) == -signal.SIGKILL:
        killed.append(told.read_text())
        # Opening checks every file's digest.
        open_bundle(folder / "registry" / registries.read_index(folder / "registry").current)

    # Whatever was left to do after the last kill is done: the next day's events are waited for.
    assert told.read_text().startswith("nothing new"), told.read_text()
    assert len(killed) == len(set(killed))
    assert {"log/index.json", "candidate.pt", "everything.pt", "registry/*", "registry/registry.json"} <= {
        end
        for step in killed
        if step.startswith("os.rename")
        for end in (step.split("/")[-1], "/".join(step.removeprefix("os.rename ").split("/")[-2:]))
    }
    files = [(folder / "in" / name).read_text() for name in ("monday.csv", "tuesday.csv")]
    written = [row.split(",")[:2] for text in files for row in text.splitlines()[1:]]
    written += [["u", click.item_id] for click in clicks]
    log = Store(folder / "work" / "log")
    stored = pl.concat([log.bucket(number) for number in range(NUM_BUCKETS)]).select("user_id", "item_id").rows()
    assert sorted(map(list, stored)) == sorted(written)
    bundle = open_bundle(folder / "registry" / registries.read_index(folder / "registry").current)
    assert bundle.manifest.version != first
    reports = folder / "work" / "reports"
    records = [json.loads(path.read_text()) for path in reports.glob("*.json")]
    # Each publication is told of, once, that of a run that was killed right after it too.
    told_of = [record["bundle"] for record in records if record["outcome"] == "published"]
    assert sorted(told_of) == sorted(registries.read_index(folder / "registry").history)
    assert {path.name for path in reports.iterdir()} == {
        f"{begun}{end}"
        for begun, record in zip((path.stem for path in reports.glob("*.json")), records, strict=True)
        for end in (".json", ".md", *([".png"] if record["questions"] else []))
    }
    uses = Counter(item_id for _, item_id in written)
    assert dict(zip(bundle.items.ids, bundle.items.training_counts.tolist(), strict=True)) == uses
    with redis.Redis.from_url(valkey_url) as client:
        streams = [key for key in all_outbox_keys() if client.exists(key)]
        assert streams
        assert [client.xlen(key) for key in streams] == [0] * len(streams)
        assert [client.xpending(key, sources.GROUP)["pending"] for key in streams] == [0] * len(streams)
