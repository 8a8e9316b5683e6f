"""Settings that every test shares. They are made before torch, polars and numpy are imported."""

import os

from hypothesis import settings

# pytest-xdist gives each core its worker; threads inside a worker would only fight over the cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "POLARS_MAX_THREADS"):
        os.environ.setdefault(variable, "1")

# The same examples in every run, and no deadline: a busy machine is not a failure.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")
