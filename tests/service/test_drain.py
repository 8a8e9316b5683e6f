"""Restarts behind a proxy fail no request, and a kill loses and doubles no event (benchmarks/drain.py)."""

from pathlib import Path

import pytest

from tests.service.measured import assert_all_met, run_quick


@pytest.mark.timeout(300)
def test_a_rolling_restart_fails_no_request_and_a_kill_loses_no_event(tiny: Path) -> None:
    assert_all_met(run_quick("drain.py", tiny))
