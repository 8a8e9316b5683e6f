"""Runs kept in MLflow: its own client over its own SQLite store, read back by it."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from model import registry as registries
from model.bundle import open_bundle
from tests.training.retrain.test_job import NUM_ITEMS, run, walks
from training.cli import app
from training.retrain import tracking
from training.retrain.report import path_of
from training.retrain.run import Run

# MLflow's store does what SQLAlchemy calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    tracking.require_mlflow()
    # Where the store puts artifacts by default.
    monkeypatch.chdir(tmp_path)
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    folder = tmp_path_factory.mktemp("night")
    walks(folder / "in", "monday.csv", 0, 100, NUM_ITEMS, seed=1)
    return folder, run(folder, "retrain.gate.margin=0.99")


def kept(uri: str, run_id: str) -> Any:
    return MlflowClient(tracking_uri=uri).get_run(run_id)


def test_a_published_run_is_a_run_and_a_version_of_the_model(
    published: tuple[Path, Run], uri: str, tmp_path: Path
) -> None:
    folder, night = published
    assert night.outcome == "published", night.reason

    run_id = tracking.track(uri, night, path_of(night, folder / "work"), folder / "registry")

    client, found = MlflowClient(tracking_uri=uri), kept(uri, run_id)
    assert found.info.status == "FINISHED"
    assert found.data.tags["outcome"] == "published"
    assert found.data.params["model.backbone"] == "sasrec"
    assert found.data.metrics["window.events"] == 1200
    assert found.data.metrics["judged.candidate.ndcg_at_10"] == night.judged["candidate"]["ndcg@10"]
    assert not any(str(folder) in value for value in found.data.params.values())
    version = client.get_model_version_by_alias("bft-sasrec", "current")
    assert (version.run_id, version.tags["bundle"]) == (run_id, night.bundle)
    copied = client.download_artifacts(run_id, "bundle", str(tmp_path))
    assert open_bundle(copied).manifest.version == night.bundle
    assert client.download_artifacts(
        run_id, f"{night.begun.replace(':', '-').replace('+00-00', 'Z')}.md", str(tmp_path)
    )


def test_the_next_version_is_the_current_one_and_a_refused_run_is_none(published: tuple[Path, Run], uri: str) -> None:
    folder, night = published
    refused = replace(night, outcome="refused", reason="for the test", bundle=None)
    path, client = path_of(night, folder / "work"), MlflowClient(tracking_uri=uri)

    ids = [tracking.track(uri, each, path, folder / "registry") for each in (night, night, refused)]

    versions = client.search_model_versions("name = 'bft-sasrec'")
    assert {version.run_id for version in versions} == set(ids[:2])
    assert client.get_model_version_by_alias("bft-sasrec", "current").run_id == ids[1]
    assert kept(uri, ids[2]).data.tags["reason"] == "for the test"
    assert len({kept(uri, run_id).info.experiment_id for run_id in ids}) == 1


def test_the_alias_follows_the_registry(published: tuple[Path, Run], uri: str, tmp_path: Path) -> None:
    folder, night = published
    registry = tmp_path / "registry"
    shutil.copytree(folder / "registry", registry, symlinks=True)
    path, client = path_of(night, folder / "work"), MlflowClient(tracking_uri=uri)
    tracking.track(uri, night, path, registry)
    newer = "0123456789abcdef"
    shutil.copytree(registry / str(night.bundle), registry / newer)
    index = {"current": newer, "previous": night.bundle, "history": [night.bundle, newer]}
    (registry / registries.REGISTRY).write_text(json.dumps(index))
    tracking.track(uri, replace(night, bundle=newer), path, registry)
    assert client.get_model_version_by_alias("bft-sasrec", "current").tags["bundle"] == newer

    registries.roll_back(registry)
    tracking.track(uri, replace(night, outcome="nothing new", bundle=None), path, registry)

    assert client.get_model_version_by_alias("bft-sasrec", "current").tags["bundle"] == night.bundle


def test_the_command_keeps_its_run(uri: str, tmp_path: Path) -> None:
    walks(tmp_path / "in", "monday.csv", 0, 10, NUM_ITEMS, seed=1)
    folders = ["--data", str(tmp_path / "in"), "--work", str(tmp_path / "work"), "--registry", str(tmp_path / "models")]

    result = CliRunner().invoke(app, ["retrain", *folders, "--json", "--mlflow", uri])

    told = json.loads(result.stdout)
    assert result.exit_code == 4
    assert kept(uri, told["mlflow_run"]).data.tags["outcome"] == "nothing new"


def test_a_server_that_is_down_changes_nothing_about_the_night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    walks(tmp_path / "in", "monday.csv", 0, 10, NUM_ITEMS, seed=1)
    folders = ["--data", str(tmp_path / "in"), "--work", str(tmp_path / "work"), "--registry", str(tmp_path / "models")]

    result = CliRunner().invoke(app, ["retrain", *folders, "--json", "--mlflow", "http://user:secret@127.0.0.1:9"])

    assert result.exit_code == 4
    assert "mlflow_run" not in json.loads(result.stdout)
    assert "MLflow did not take the run (MlflowException)" in result.stderr
    assert "secret" not in result.stderr


def test_without_mlflow_the_command_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)

    result = CliRunner().invoke(app, ["retrain", "--data", str(tmp_path), "--mlflow", "http://127.0.0.1:9"])

    assert result.exit_code == 2
    assert "pip install -c constraints.txt '.[train,mlflow]'" in result.stderr
