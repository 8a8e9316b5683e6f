"""What service.md promises of events, unknown items, merges and erasures, as `benchmarks/promises.py` looks at it."""

from pathlib import Path

import pytest

from tests.service.measured import assert_all_met, run_quick


@pytest.mark.timeout(300)  # two services start in it
def test_every_promise_about_what_is_kept_of_a_user_holds(tiny: Path) -> None:
    assert_all_met(run_quick("promises.py", tiny))
