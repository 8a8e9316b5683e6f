"""A cluster of three primaries and three replicas, one of which dies: the quick form of `benchmarks/cluster.py`."""

from pathlib import Path

from tests.service.measured import assert_all_met, run_quick


def test_everything_works_on_a_cluster_and_a_failover_loses_and_doubles_no_event(tiny: Path) -> None:
    assert_all_met(run_quick("cluster.py", tiny))
