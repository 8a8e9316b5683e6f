"""Bad input is refused, and the OpenAPI documents are true: `benchmarks/bad_input.py` in its quick form."""

from pathlib import Path

import pytest

from tests.service.measured import assert_all_met, run_quick


@pytest.mark.timeout(600)
def test_every_bad_input_is_refused_clearly_and_the_documents_are_true(tiny: Path) -> None:
    assert_all_met(run_quick("bad_input.py", tiny))
