"""The registry: one truth, replaced whole; a publisher that dies or collides never leaves it unreadable."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from model.bundle import MANIFEST, BundleError, open_bundle
from model.registry import (
    CURRENT,
    REGISTRY,
    RegistryChanged,
    RegistryIndex,
    publish,
    publish_after,
    read_index,
    resolve,
    roll_back,
)
from tests.model import stand_ins

DEADLINE_S = 60


def bundles(registry: Path, count: int) -> list[str]:
    """Write this many different bundles; returns their versions."""
    return [stand_ins.write(registry, seed=seed).name for seed in range(count)]


def leftovers(registry: Path, versions: list[str]) -> set[str]:
    """What lies in the registry beside bundles, index, link and lock file."""
    return {path.name for path in registry.iterdir()} - {*versions, REGISTRY, CURRENT, ".lock"}


# --- one publisher ------------------------------------------------------------------------------------------


def test_the_first_bundle_becomes_current(tmp_path: Path) -> None:
    (version,) = bundles(tmp_path, 1)
    assert read_index(tmp_path) is None
    index = publish(tmp_path, version)
    assert index == RegistryIndex(current=version, previous=None, history=(version,))
    assert read_index(tmp_path) == index
    assert leftovers(tmp_path, [version]) == set()


def test_a_second_bundle_keeps_the_first_as_previous(tmp_path: Path) -> None:
    first, second = bundles(tmp_path, 2)
    publish(tmp_path, first)
    assert publish(tmp_path, second) == RegistryIndex(current=second, previous=first, history=(first, second))


def test_a_bundle_is_published_after_the_one_it_was_judged_beside_or_not_at_all(tmp_path: Path) -> None:
    first, second, third = bundles(tmp_path, 3)
    publish_after(tmp_path, first, None)
    publish_after(tmp_path, second, first)
    roll_back(tmp_path)

    with pytest.raises(RegistryChanged, match=f"{first} is current, no longer {second}; {third} is not published"):
        publish_after(tmp_path, third, second)

    assert read_index(tmp_path) == RegistryIndex(
        current=first, previous=second, history=(first, second, first), rolled_back=second
    )
    assert publish(tmp_path, third).rolled_back is None


def test_publishing_the_current_bundle_again_changes_nothing(tmp_path: Path) -> None:
    first, second = bundles(tmp_path, 2)
    publish(tmp_path, first)
    before = publish(tmp_path, second)
    assert publish(tmp_path, second) == before == read_index(tmp_path)


def test_current_is_a_link_that_moves_with_the_registry(tmp_path: Path) -> None:
    registry = tmp_path / "here"
    first, second = bundles(registry, 2)
    for version in (first, second, first):
        publish(registry, version)
        assert os.readlink(registry / CURRENT) == version
    moved = registry.rename(tmp_path / "there")
    assert open_bundle(moved / CURRENT).manifest.version == first


def test_publishing_again_repairs_the_link_of_a_publisher_that_died_before_it(tmp_path: Path) -> None:
    first, second = bundles(tmp_path, 2)
    publish(tmp_path, first)
    publish(tmp_path, second)
    (tmp_path / CURRENT).unlink()
    (tmp_path / CURRENT).symlink_to(first)
    publish(tmp_path, second)
    assert os.readlink(tmp_path / CURRENT) == second


def test_roll_back_returns_to_the_previous_bundle_and_says_so_in_the_history(tmp_path: Path) -> None:
    first, second = bundles(tmp_path, 2)
    publish(tmp_path, first)
    publish(tmp_path, second)
    index = roll_back(tmp_path)
    assert index == RegistryIndex(current=first, previous=second, history=(first, second, first), rolled_back=second)
    assert resolve(tmp_path).name == first
    assert os.readlink(tmp_path / CURRENT) == first


def test_roll_back_without_an_earlier_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no earlier bundle"):
        roll_back(tmp_path)
    (version,) = bundles(tmp_path, 1)
    publish(tmp_path, version)
    with pytest.raises(BundleError, match="no earlier bundle"):
        roll_back(tmp_path)
    assert resolve(tmp_path).name == version


# --- a damaged bundle ---------------------------------------------------------------------------------------


def damage(bundle: Path) -> None:
    (bundle / "model.safetensors").write_bytes(b"half")


def test_a_damaged_bundle_is_refused_and_the_old_one_stays(tmp_path: Path) -> None:
    good, bad = bundles(tmp_path, 2)
    before = publish(tmp_path, good)
    damage(tmp_path / bad)
    with pytest.raises(BundleError, match=r"model\.safetensors does not match"):
        publish(tmp_path, bad)
    assert read_index(tmp_path) == before
    assert os.readlink(tmp_path / CURRENT) == good


def test_roll_back_to_a_damaged_bundle_is_refused_and_the_current_one_stays(tmp_path: Path) -> None:
    bad, good = bundles(tmp_path, 2)
    publish(tmp_path, bad)
    before = publish(tmp_path, good)
    damage(tmp_path / bad)
    with pytest.raises(BundleError, match=r"model\.safetensors does not match"):
        roll_back(tmp_path)
    assert read_index(tmp_path) == before


def test_a_bundle_that_is_not_in_the_registry_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=f"no {MANIFEST}"):
        publish(tmp_path, "0123456789abcdef")
    assert list(tmp_path.iterdir()) == []


# --- finding a bundle ---------------------------------------------------------------------------------------


def test_resolve_takes_a_bundle_a_link_to_one_or_a_registry(tmp_path: Path) -> None:
    first, second = bundles(tmp_path, 2)
    publish(tmp_path, first)
    publish(tmp_path, second)
    assert resolve(tmp_path / first) == tmp_path / first
    assert resolve(tmp_path / CURRENT) == tmp_path / second
    assert resolve(str(tmp_path)) == tmp_path / second


@pytest.mark.parametrize("name", ["empty", "nowhere"])
def test_resolve_of_neither_says_what_was_looked_for(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(BundleError, match=rf"{name}: neither a bundle .* nor a registry .*bft-train"):
        resolve(tmp_path / name)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", "{}", '{"current": 7}', '{"current": "a", "colour": "red"}', "\udcff"],
)
def test_an_index_that_cannot_be_read_is_named_and_never_overwritten(tmp_path: Path, content: str) -> None:
    (version,) = bundles(tmp_path, 1)
    raw = content.encode(errors="surrogateescape")
    (tmp_path / REGISTRY).write_bytes(raw)
    for use in (read_index, resolve, roll_back, lambda registry: publish(registry, version)):
        with pytest.raises(BundleError, match=rf"{REGISTRY}: not a registry index"):
            use(tmp_path)
    assert (tmp_path / REGISTRY).read_bytes() == raw


def test_the_index_is_the_json_that_architecture_md_names(tmp_path: Path) -> None:
    first, second = bundles(tmp_path, 2)
    publish(tmp_path, first)
    publish(tmp_path, second)
    document = json.loads((tmp_path / REGISTRY).read_text())
    assert document == {"current": second, "previous": first, "history": [first, second]}


# --- publishers that die ------------------------------------------------------------------------------------

HOLD_THE_LOCK = """
import fcntl, sys, time
file = open(sys.argv[1] + "/.lock", "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


@contextmanager
def python(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process with pipes, killed at the end."""
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def test_a_killed_publisher_s_lock_frees_the_next_one(tmp_path: Path) -> None:
    first, second = bundles(tmp_path, 2)
    before = publish(tmp_path, first)
    next_publisher = threading.Thread(target=publish, args=(tmp_path, second), daemon=True)
    with python(HOLD_THE_LOCK, str(tmp_path)) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        next_publisher.start()
        next_publisher.join(0.2)
        waited = next_publisher.is_alive() and read_index(tmp_path) == before
        holder.send_signal(signal.SIGKILL)
        next_publisher.join(DEADLINE_S)
    assert waited
    assert not next_publisher.is_alive()
    assert read_index(tmp_path) == RegistryIndex(current=second, previous=first, history=(first, second))


def test_what_a_killed_publisher_left_half_written_is_not_read_and_not_in_the_way(tmp_path: Path) -> None:
    first, second = bundles(tmp_path, 2)
    publish(tmp_path, first)
    # In a container every publisher has the same process number, and so the same staging names.
    (tmp_path / f".{REGISTRY}.{os.getpid()}").write_text('{"current": "hal')
    (tmp_path / f".{CURRENT}.{os.getpid()}").symlink_to("nowhere")
    (tmp_path / f".{REGISTRY}.1").write_text("")
    (tmp_path / ".staging-abc").mkdir()
    assert resolve(tmp_path).name == first
    publish(tmp_path, second)
    assert resolve(tmp_path).name == second
    assert os.readlink(tmp_path / CURRENT) == second
    assert open_bundle(tmp_path / CURRENT).manifest.version == second


# --- publishers that collide --------------------------------------------------------------------------------

PUBLISH_ON_DEMAND = """
import sys
from pathlib import Path
from model.registry import publish
registry, *versions = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
for version in versions:
    publish(Path(registry), version)
"""


def test_two_processes_that_publish_at_once_lose_nothing_and_no_reader_sees_half_an_index(
    tmp_path: Path,
) -> None:
    versions = bundles(tmp_path, 20)
    publish(tmp_path, versions[0])
    mine, theirs = versions[1::2], versions[2::2]
    root = str(tmp_path)
    with python(PUBLISH_ON_DEMAND, root, *mine) as one, python(PUBLISH_ON_DEMAND, root, *theirs) as other:
        for process in (one, other):
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in (one, other):
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        seen = 0
        while one.poll() is None or other.poll() is None:
            index = read_index(tmp_path)
            assert index is not None
            assert index.history[-1] == index.current
            assert len(index.history) >= seen
            seen = len(index.history)
        assert (one.returncode, other.returncode) == (0, 0)

    index = read_index(tmp_path)
    assert index is not None
    assert sorted(index.history) == sorted(versions)
    assert [version for version in index.history if version in mine] == mine
    assert [version for version in index.history if version in theirs] == theirs
    assert (index.previous, index.current) == index.history[-2:]
    assert os.readlink(tmp_path / CURRENT) == index.current
    assert leftovers(tmp_path, versions) == set()
