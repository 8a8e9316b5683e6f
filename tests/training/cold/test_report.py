"""`bft-train cold` on the small bundle: its record, its report, and whom it refuses."""

import json
from pathlib import Path

import pytest

from benchmarks._bundles import add_copy
from model import registry
from model.bundle import open_bundle
from tests.training.conftest import TrainedRun, bft_train
from training.cold.records import ColdRecord
from training.cold.report import CURVE, REPORT, markdown
from training.study.records import read


@pytest.fixture
def held_out(trained: TrainedRun, tmp_path: Path) -> Path:
    """The small bundle, which says that it held users out. It did not; how good it is, is not asked here."""
    data = open_bundle(registry.resolve(trained.registry)).manifest.data
    return tmp_path / add_copy(trained.registry, tmp_path, data={**data, "split": "users"})


@pytest.fixture(scope="module")
def plain(trained: TrainedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry with a model without filtering, trained on the same log with users held out."""
    out = tmp_path_factory.mktemp("plain")
    told = ("--config", trained.config, "--data", trained.log, "--out", out)
    done = bft_train("fit", *told, "split=users", "model.filtering=off", "training.epochs=1")
    assert done.returncode == 0, done.stderr
    return out / "registry"


def test_a_judgement_writes_a_record_and_the_report_that_follows_from_it(
    held_out: Path, plain: Path, trained: TrainedRun, tmp_path: Path
) -> None:
    out, bundles = tmp_path / "report", ("--bundle", held_out, "--plain", plain)

    done = bft_train("cold", *bundles, "--data", trained.log, "--report", out, "--json")

    assert done.returncode == 0, done.stderr
    told, found = json.loads(done.stdout), read(out / "cold-log.json", ColdRecord)
    assert [Path(path).name for path in told["files"]] == [REPORT, CURVE]
    assert told["default"] == found.default
    assert (out / REPORT).read_text() == markdown(found)
    assert (out / CURVE).stat().st_size > 1000
    told_of = {"model": open_bundle(held_out), "plain": open_bundle(registry.resolve(plain))}
    assert {name: one["version"] for name, one in found.models.items()} == {
        name: bundle.manifest.version for name, bundle in told_of.items()
    }
    assert found.models["plain"]["config"]["model"]["filtering"] is False
    # Every user's first event has weight 0: it is none of the n, and no target.
    assert found.questions[0].users == found.test_users
    for question in found.questions:
        ndcg = {one.system: one.ndcg.value for one in question.systems}
        (gain,) = (one.ndcg_gain.value for one in question.systems if one.system == "plain")
        assert gain == pytest.approx(ndcg["model"] - ndcg["plain"])


def test_what_does_not_compare_is_refused(held_out: Path, trained: TrainedRun, tmp_path: Path) -> None:
    rekeyed = tmp_path / "rekeyed.csv"
    rekeyed.write_text(trained.log.read_text().replace("user ", "customer "))

    for options, told in (
        (("--data", trained.log, "--plain", held_out), "filters; --plain is a model that was trained with"),
        (("--data", rekeyed), "not the log that"),
    ):
        done = bft_train("cold", "--bundle", held_out, *options, "--report", tmp_path / "report")
        assert (done.returncode, told in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "report").exists()


def test_a_bundle_that_knows_every_user_is_refused(trained: TrainedRun, tmp_path: Path) -> None:
    done = bft_train("cold", "--bundle", trained.registry, "--data", trained.log, "--report", tmp_path / "report")

    assert done.returncode == 2
    assert "was trained with split leave_one_out" in done.stderr
    assert "split=users" in done.stderr
    assert not (tmp_path / "report").exists()
