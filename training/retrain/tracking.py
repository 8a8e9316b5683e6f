"""A run of the job in MLflow, for those who keep their runs there (the extra `mlflow`).

The experiment and the registered model have the model's name. A run has the job's configuration as parameters, what was
found and judged as metrics, and the report as an artifact; a published bundle is an artifact too, and a version of the
model. After each run the alias `current` is the version of the registry's current bundle, where MLflow has that.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model import registry as registries
from training.config import PATHS, ConfigError, leaves
from training.retrain.run import Run

QUIET = {
    # MLflow would tell its makers about its use.
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # By default a server that is down is waited for for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
"""Of MLflow's settings, where the environment says nothing."""
CURRENT = "current"
MAX_PARAMS = 100
"""That MLflow takes at a time."""


def require_mlflow() -> None:
    """Fail before a night's work rather than after it.

    Raises:
        ConfigError: MLflow is not installed.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import mlflow  # noqa: F401  # it takes seconds, and few have it
    except ImportError:
        raise ConfigError(
            "a run is to be kept in MLflow, which is not installed: pip install -c constraints.txt '.[train,mlflow]',"
            " or leave out --mlflow and MLFLOW_TRACKING_URI"
        ) from None


def track(uri: str, run: Run, report: Path, registry: Path) -> str:
    """Keep a run that has ended; returns MLflow's id of it.

    Args:
        uri: of MLflow's tracking server, as MLFLOW_TRACKING_URI.
        run: of the job; paths of its configuration stay out.
        report: its Markdown; JSON and figure lie beside it.
        registry: where the published bundle lies.

    Raises:
        MlflowException: the server cannot be reached, or does not take the run.
    """
    from mlflow import MlflowClient
    from mlflow.entities import Param

    client, name = MlflowClient(tracking_uri=uri, registry_uri=uri), run.config.model_name
    experiment = client.get_experiment_by_name(name)
    experiment_id = client.create_experiment(name) if experiment is None else experiment.experiment_id
    tags = {"outcome": run.outcome, "reason": run.reason, "bundle": run.bundle or "", "previous": run.current or ""}
    kept = client.create_run(experiment_id, run_name=run.begun, tags=tags)
    run_id: str = kept.info.run_id
    params = [Param(key, str(value)) for key, value in leaves(run.config.model_dump(mode="json", exclude=PATHS))]
    for begin in range(0, len(params), MAX_PARAMS):
        client.log_batch(run_id, params=params[begin : begin + MAX_PARAMS])
    for key, value in metrics_of(run).items():
        client.log_metric(run_id, key, value)
    for path in sorted(report.parent.glob(f"{report.stem}.*")):
        client.log_artifact(run_id, str(path))
    if run.bundle is not None:
        client.log_artifacts(run_id, str(registry / run.bundle), "bundle")
        if not client.search_registered_models(f"name = '{name}'"):
            client.create_registered_model(name)
        source = f"{kept.info.artifact_uri}/bundle"
        client.create_model_version(name, source, run_id, tags={"bundle": run.bundle})
    index = registries.read_index(registry)
    if index is not None:
        # Somebody may have rolled back.
        versions = client.search_model_versions(f"name = '{name}' and tags.bundle = '{index.current}'")
        if versions:
            client.set_registered_model_alias(name, CURRENT, str(max(int(one.version) for one in versions)))
    client.set_terminated(run_id)
    return run_id


def metrics_of(run: Run) -> dict[str, float]:
    """What a run found in numbers, by names that MLflow takes."""
    window = run.window.to_json() if run.window else {}
    found: Mapping[str, Any] = {
        "window": window,
        "judged": {key: value for key, value in run.judged.items() if key != "report"},
        "training": {key: value for key, value in run.training.items() if key != "curve"},
        "seconds": run.seconds,
    }
    return {
        key.replace("@", "_at_").replace(" ", "_"): float(value)
        for key, value in leaves(found)
        if isinstance(value, int | float) and math.isfinite(value)
    }
