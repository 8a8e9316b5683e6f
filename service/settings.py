"""The service's settings: environment variables `BFT_…`, overridden by the flags of `bft-serve`."""

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from service.errors import StartError
from service.states.interface import CacheForm

PREFIX = "BFT_"

Provider = Literal["auto", "cpu", "cuda"]

# What Kubernetes puts into every pod for a Service called `bft` or `bft-<something>` (Kubernetes
# documentation, "Service", environment variables); `BFT_PORT=tcp://…` is told from the setting by its value.
_SERVICE_LINK = re.compile(
    r"BFT_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")


class Settings(BaseSettings):
    """Everything that an operator can choose. Made once, by the command line, and passed on."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, env_ignore_empty=True)

    bundle: Path
    """A bundle's folder, or a registry with a published one."""
    redis_url: SecretStr | None = None
    """redis://, rediss:// or unix://; without it, state lives in this process and is lost with it."""
    redis_cluster: bool = False
    """The server is a Redis Cluster."""
    state_replicas: int = Field(0, ge=0, le=16)
    """Replicas of the store that must have a write before it is acknowledged."""
    state_cache: CacheForm = "float32"
    """How kept states hold the cache that events are folded into: `float16` takes half the memory, and folds to 2e-3;
    `none` takes next to none, and every new event means that the history is encoded again."""
    outbox_limit: int = Field(10_000, ge=100, le=10_000_000)
    """Entries that each of the 256 streams of the outbox holds at most; beyond it, writes are 503 until retraining has
    taken some."""
    unknown_limit: int = Field(100_000, ge=1, le=100_000_000)
    """Item ids outside the catalogue that are told apart; beyond it, events on further ones are 503."""
    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    """Of the public API; 0 takes any free one and logs it."""
    ops_host: str = "127.0.0.1"
    ops_port: int = Field(9090, ge=0, le=65535)
    """Of /livez, /readyz and /metrics."""
    admin_host: str = "127.0.0.1"
    """Of the admin API; off the loopback address only with an `admin_key`."""
    admin_port: int = Field(9091, ge=0, le=65535)
    admin_key: SecretStr | None = Field(None, min_length=16)
    """What the admin API asks for as `Authorization: Bearer …`."""
    registry_poll_s: float = Field(10.0, ge=0, le=86_400)
    """How often a registry is asked for its current bundle, which is then taken over; 0: never."""
    items_poll_s: float = Field(1.0, gt=0, le=3600)
    """How often the state store is asked whether items were added at run time, or removed."""
    load_timeout_s: float = Field(300.0, gt=0, le=86_400)
    """How long a change of models by the admin API may take."""
    api_keys_file: Path | None = None
    """TOML with the API keys of the public port, see service/security.py; with a key configured, each request needs
    one."""
    api_key_sha256: str | None = Field(None, pattern="^[0-9a-fA-F]{64}$")
    """SHA-256 in hex of one API key, named `default`; beside or instead of the file."""
    requests_per_second: int | None = Field(None, ge=1, le=1_000_000)
    """Quota of each API key that has none of its own in the file; left out: no limit."""
    burst: int | None = Field(None, ge=1, le=1_000_000)
    """What such a key may ask for at once after a pause; left out: as many as in a second."""
    docs: bool = True
    """Serve the API's description at /docs."""
    provider: Provider = "auto"
    """`auto` takes CUDA where ONNX Runtime offers it."""
    threads: int = Field(default_factory=lambda: available_cpus(), ge=1, le=1024)
    """Of one inference; the default is what the cgroup's quota and the CPU affinity allow."""
    max_batch_rows: int = Field(32, ge=1, le=4096)
    """Rows that go through a graph together."""
    max_batch_cells: int = Field(2**18, ge=1)
    """Rows × padded length of one batch; a longer single row goes alone."""
    max_queue_cells: int = Field(2**20, ge=1)
    """Rows × length that may wait for inference; beyond it, 503."""
    max_in_flight: int = Field(1024, ge=1)
    """Requests in the process at a time; beyond it, 503."""
    max_body_bytes: int = Field(2**20, ge=1024)
    body_timeout_s: float = Field(10.0, gt=0)
    """How long a body may take to arrive."""
    request_timeout_ms: int = Field(2000, ge=1, le=60_000)
    """Deadline of a request that does not bring its own in X-Request-Timeout-Ms."""
    state_timeout_ms: int = Field(50, ge=1, le=10_000)
    """Socket timeout of the state store."""
    keep_alive_s: int = Field(75, ge=1, le=3600)
    """How long a connection may lie idle; longer than a proxy in front keeps its own (nginx: 60 s), so that the proxy
    never sends a request on one that is being closed here."""
    drain_grace_s: float = Field(5.0, ge=0, le=600)
    """Between SIGTERM, when /readyz turns red, and the end of accepting."""
    shutdown_timeout_s: float = Field(30.0, gt=0, le=600)
    """How long requests in flight may take to finish after the grace period."""
    ready_max_age_s: float = Field(5.0, gt=0)
    """How old the inference may be that makes /readyz green without another one."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"

    @field_validator("port", "ops_port", "admin_port", mode="before")
    @classmethod
    def _ignore_service_link(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str) and _LINK_VALUE.match(value):
            return cls.model_fields[str(info.field_name)].default
        return value


def load_settings(**flags: Any) -> Settings:
    """The settings from the environment and the flags that were given (None: not given).

    Raises:
        StartError: a value is refused, or an environment variable `BFT_…` is not a setting.
    """
    refuse_unknown_variables(os.environ)
    try:
        return Settings(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        lines = [_complaint(str(item["loc"][0]), str(item["msg"])) for item in error.errors()]
        raise StartError("; ".join(lines)) from error


def refuse_unknown_variables(environment: Mapping[str, str]) -> None:
    """Pydantic passes over an environment variable that is no field; a typo must not pass.

    Raises:
        StartError: names the variable and the setting that is nearest to it.
    """
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    for name, value in environment.items():
        variable = name.upper()
        if not variable.startswith(PREFIX) or variable in known or is_service_link(variable, value):
            continue
        nearest = difflib.get_close_matches(variable, sorted(known), n=1, cutoff=0.0)[0]
        raise StartError(f"{name} is not a setting; did you mean {nearest}? Correct it, or unset it")


def is_service_link(variable: str, value: str) -> bool:
    """Whether Kubernetes, not a person, set this variable."""
    if _SERVICE_LINK.fullmatch(variable):
        return True
    return variable.endswith("PORT") and _LINK_VALUE.match(value) is not None


def available_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Whole CPUs this process may use: the least of affinity and the cgroup's quota, at least 1."""
    cpus = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return cpus
    if quota in ("max", "-1"):
        return cpus
    return max(1, min(cpus, int(quota) // int(period)))


def _complaint(field: str, message: str) -> str:
    if field == "bundle" and message == "Field required":
        return "no bundle: give --bundle or BFT_BUNDLE, a bundle's folder or a registry"
    return f"{PREFIX}{field.upper()}: {message}"
