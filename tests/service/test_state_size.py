"""What a user takes in the state store, by `benchmarks/state_size.py` in its quick form."""

from pathlib import Path

from tests.service.measured import assert_all_met, run_quick


def test_a_history_of_fifty_events_keeps_within_its_share_of_memory(tiny: Path) -> None:
    assert_all_met(run_quick("state_size.py", tiny))
