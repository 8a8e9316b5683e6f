"""API keys: who may ask. Keys are random, shown once, and kept only as their SHA-256.

A slow hash, such as scrypt, protects secrets that can be guessed, as passwords can. A key holds 256 random bits:
nobody tries them all, however fast the hash is.

The keys file is TOML:

    [[keys]]
    name = "shop"                  # appears in logs
    sha256 = "2bb80d537b1da3e3…"   # 64 hexadecimal digits; `bft-serve new-key` prints a key with its line
    requests_per_second = 100      # left out: BFT_REQUESTS_PER_SECOND, and without that no limit
    burst = 200                    # left out: BFT_BURST, and without that as many as in a second
"""

import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import Headers

from service.errors import StartError, Unauthorized
from service.settings import Settings

MAX_KEYS = 1000
MAX_KEY_CHARS = 256
SINGLE_KEY_NAME = "default"

# RFC 6750: the scheme in any case, one space or more, and a b64token.
_BEARER = re.compile(rf"bearer +([A-Za-z0-9._~+/-]{{1,{MAX_KEY_CHARS}}}=*)", re.IGNORECASE)
_CHALLENGE = 'Bearer realm="bft"'

KeyName = Annotated[str, Field(pattern="^[A-Za-z0-9._-]{1,64}$")]
Rate = Annotated[int, Field(ge=1, le=1_000_000)]


class KeyEntry(BaseModel):
    """One key, as the file has it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: KeyName
    sha256: Annotated[str, Field(pattern="^[0-9a-fA-F]{64}$")]
    requests_per_second: Rate | None = None
    burst: Rate | None = None


class _KeysFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    keys: Annotated[list[KeyEntry], Field(min_length=1, max_length=MAX_KEYS)]


@dataclass(frozen=True, slots=True)
class Quota:
    """What a key may ask for."""

    requests_per_second: int
    burst: int
    """How many at once after a pause."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Who asks."""

    name: str
    digest: bytes
    """SHA-256 of the key."""
    quota: Quota | None
    """None: no limit."""


class ApiKeys:
    """The keys that are let in; without any, everybody is.

    Args:
        keys: at most MAX_KEYS.
    """

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = tuple(keys)

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(self._keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def of(self, headers: Headers) -> ApiKey:
        """The key of a request.

        Raises:
            Unauthorized: there is none, or it is not known.
        """
        sent = _BEARER.fullmatch(headers.get("authorization", ""))
        if sent is None:
            raise Unauthorized(
                "the request has no header `Authorization: Bearer <key>`", headers={"WWW-Authenticate": _CHALLENGE}
            )
        digest = key_digest(sent[1])
        found = None
        # All of them, each in constant time: how long it takes says nothing about the stored digests.
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None:
            raise Unauthorized(
                "the API key is not known", headers={"WWW-Authenticate": f'{_CHALLENGE}, error="invalid_token"'}
            )
        return found


def admin_keys(settings: Settings) -> ApiKeys:
    """The one key of the admin API; none when it is not set."""
    if settings.admin_key is None:
        return ApiKeys([])
    return ApiKeys([ApiKey("admin", key_digest(settings.admin_key.get_secret_value()), None)])


def key_digest(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8")).digest()


def new_key() -> str:
    """A key of 256 random bits, with a prefix by which people and scanners of leaked secrets know it."""
    return f"bft_{secrets.token_urlsafe(32)}"


def toml_entry(name: str, key: str, requests_per_second: int | None, burst: int | None) -> str:
    """A key's entry of the keys file.

    Raises:
        StartError: the name or a number is refused.
    """
    digest = key_digest(key).hex()
    try:
        entry = KeyEntry(name=name, sha256=digest, requests_per_second=requests_per_second, burst=burst)
    except ValidationError as error:
        raise StartError(_complaints(error)) from error
    quota = (f"{field} = {value}" for field in ("requests_per_second", "burst") if (value := getattr(entry, field)))
    return "\n".join(["[[keys]]", f'name = "{name}"', f'sha256 = "{digest}"', *quota])


def load_api_keys(settings: Settings) -> ApiKeys:
    """The keys of the file and the one of the environment.

    Raises:
        StartError: names the file, the entry and the field.
    """
    entries = [] if settings.api_keys_file is None else _read(settings.api_keys_file)
    if settings.api_key_sha256 is not None:
        entries.append(KeyEntry(name=SINGLE_KEY_NAME, sha256=settings.api_key_sha256))
    for field in ("name", "sha256"):
        values = [getattr(entry, field).lower() for entry in entries]
        for number, value in enumerate(values, start=1):
            if value in values[: number - 1]:
                raise StartError(f"API keys: two have the same {field}; the second is number {number}, remove one")
    return ApiKeys([_api_key(entry, settings) for entry in entries])


def _read(path: Path) -> list[KeyEntry]:
    try:
        return list(_KeysFile.model_validate(tomllib.loads(path.read_text("utf-8"))).keys)
    except OSError as error:
        raise StartError(f"BFT_API_KEYS_FILE: {path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise StartError(f"{path}: {_complaints(error)}; docs/service.md shows the form") from error
    except ValueError as error:
        raise StartError(f"{path}: {error}; accepted is TOML in UTF-8, one [[keys]] for each key") from error


def _complaints(error: ValidationError) -> str:
    # Not pydantic's own text, which quotes the value: it may be a key in clear.
    return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())


def _api_key(entry: KeyEntry, settings: Settings) -> ApiKey:
    rate = entry.requests_per_second or settings.requests_per_second
    quota = None
    if rate is not None:
        own_burst = entry.burst or (None if entry.requests_per_second else settings.burst)
        quota = Quota(requests_per_second=rate, burst=own_burst or rate)
    elif entry.burst is not None:
        raise StartError(f"API key {entry.name}: burst without requests_per_second; give both")
    return ApiKey(entry.name, bytes.fromhex(entry.sha256), quota)
