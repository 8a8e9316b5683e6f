"""`bft-train cold` on a small bundle: its record, its report, and whom it refuses."""

import json
from pathlib import Path

import pytest

from model import registry
from model.bundle import open_bundle
from tests.training.conftest import CONFIG, TrainedRun, bft_train, write_log
from training.cold.records import ColdRecord
from training.cold.report import CURVE, REPORT, markdown
from training.study.records import read


@pytest.fixture(scope="module")
def held_out_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a log and a bundle that was trained with the split `users`."""
    folder = tmp_path_factory.mktemp("cold")
    write_log(folder / "log.csv", num_users=400)
    (folder / "run.yaml").write_text(CONFIG + "split: users\n")
    config, log, out = ("--config", folder / "run.yaml"), ("--data", folder / "log.csv"), ("--out", folder / "out")
    done = bft_train("fit", *config, *log, *out, "training.epochs=2")
    assert done.returncode == 0, done.stderr
    return folder


def test_a_judgement_writes_a_record_and_the_report_that_follows_from_it(held_out_run: Path) -> None:
    bundle, log = held_out_run / "out" / "registry", held_out_run / "log.csv"
    out = held_out_run / "report"

    done = bft_train("cold", "--bundle", bundle, "--plain", bundle, "--data", log, "--report", out, "--json")

    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    found = read(out / "cold-log.json", ColdRecord)
    manifest = open_bundle(registry.resolve(bundle)).manifest
    assert [Path(path).name for path in told["files"]] == [REPORT, CURVE]
    assert told["default"] == found.default
    assert (out / REPORT).read_text() == markdown(found)
    assert (out / CURVE).stat().st_size > 1000
    assert found.models == {"model": manifest.version, "plain": manifest.version}
    assert found.test_users == manifest.data["test_users"]
    # Every user's first event has weight 0: it is none of the n, and no target.
    assert found.questions[0].users == found.test_users
    for question in found.questions:
        (plain,) = (one for one in question.systems if one.system == "plain")
        assert (plain.ndcg_gain.value, plain.ndcg_gain.low, plain.ndcg_gain.high) == (0, 0, 0)


def test_a_bundle_that_knows_every_user_is_refused(trained: TrainedRun, tmp_path: Path) -> None:
    done = bft_train("cold", "--bundle", trained.registry, "--data", trained.log, "--report", tmp_path / "report")

    assert done.returncode == 2
    assert "was trained with split leave_one_out" in done.stderr
    assert "split=users" in done.stderr
    assert not (tmp_path / "report").exists()
