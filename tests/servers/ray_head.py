"""A Ray of one node that stays up, for the command lines that tests start: each would start one of its own otherwise.

It runs beside the test's process, which does not join it. Workers inherit the environment it was started in, not
that of the command lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

N_CPUS = 16
"""More than there are: workers mostly wait for each other here, and a killed driver's take a moment to go."""
_STORE_BYTES = 128 << 20


@contextmanager
def ray_head() -> Iterator[str]:
    """The address of a fresh Ray, which ends with the block."""
    from ray.cluster_utils import Cluster

    options = {"num_cpus": N_CPUS, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    try:
        yield cluster.address
    finally:
        cluster.shutdown()
