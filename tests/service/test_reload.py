"""Models are reloaded, rolled back and refused under load: the quick form of `benchmarks/reload.py`."""

from pathlib import Path

from tests.service.measured import assert_all_met, run_quick


def test_reloads_fail_no_request_and_damaged_bundles_are_refused_by_name(tiny: Path) -> None:
    assert_all_met(run_quick("reload.py", tiny))
