"""Fixtures of the service's tests."""

import pytest

from tests.service.bundles import tiny as tiny
from tests.service.valkey import valkey as valkey
from tests.service.valkey import valkey_cluster as valkey_cluster
from tests.service.valkey import valkey_cluster_url as valkey_cluster_url
from tests.service.valkey import valkey_url as valkey_url


@pytest.fixture
def anyio_backend() -> str:
    """Tests marked `anyio` run on asyncio, as the service does."""
    return "asyncio"
