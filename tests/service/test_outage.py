"""The state store is killed and frozen under traffic: the quick form of `benchmarks/outage.py`."""

from pathlib import Path

from tests.service.measured import assert_all_met, run_quick


def test_a_dead_or_frozen_store_fails_no_read_and_loses_and_doubles_no_event(tiny: Path) -> None:
    assert_all_met(run_quick("outage.py", tiny))
