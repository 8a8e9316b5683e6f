"""The tolerances of math.md ("What must hold") and the two assertions that apply them.

A value is close when |actual − expected| ≤ tol·(1 + |expected|): absolute near 0, relative when large.
A precision is compared as log λ, so that 1e-6 and 1e6 count alike; a precision of 0 (nothing known) must be
exactly 0 on both sides.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

FLOAT64_TOL = 1e-9
FLOAT32_TOL = 1e-5
FLOAT32_EXTREME_TOL = 1e-4
"""float32 with precisions that span 1e-6 … 1e6."""


def _as_float64(values: Any) -> NDArray[np.float64]:
    """A torch tensor, numpy array or number as a float64 numpy array."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


def assert_close(actual: Any, expected: Any, tol: float, what: str = "value") -> None:
    """Shapes equal, everything finite, and |actual − expected| ≤ tol·(1 + |expected|) everywhere."""
    actual_array, expected_array = _as_float64(actual), _as_float64(expected)
    assert actual_array.shape == expected_array.shape, (
        f"{what}: shape {actual_array.shape}, expected {expected_array.shape}"
    )
    assert np.isfinite(expected_array).all(), f"{what}: the expected value is not finite"
    assert np.isfinite(actual_array).all(), f"{what}: not finite"
    if actual_array.size == 0:
        return
    error = np.abs(actual_array - expected_array) / (1.0 + np.abs(expected_array))
    worst = np.unravel_index(int(error.argmax()), error.shape)
    assert error[worst] <= tol, (
        f"{what}: error {error[worst]:.3g} > {tol:.3g} at {tuple(map(int, worst))}: "
        f"{actual_array[worst]!r}, expected {expected_array[worst]!r}"
    )


def assert_precision_close(actual: Any, expected: Any, tol: float, what: str = "precision") -> None:
    """As `assert_close` on log λ; where the expected precision is 0, the actual one is exactly 0."""
    actual_array, expected_array = _as_float64(actual), _as_float64(expected)
    assert actual_array.shape == expected_array.shape, (
        f"{what}: shape {actual_array.shape}, expected {expected_array.shape}"
    )
    assert (actual_array >= 0).all(), f"{what}: negative or not a number"
    known = expected_array > 0
    assert (actual_array[~known] == 0).all(), f"{what}: not 0 where nothing is known"
    assert (actual_array[known] > 0).all(), f"{what}: 0 where something is known"
    assert_close(np.log(actual_array[known]), np.log(expected_array[known]), tol, f"log {what}")
