"""`Topology.detect` asks the ranks, and every rank hears the same answer."""

import socket

import pytest
import torch.distributed as dist
from harness.ranks import ranks

from mics_dtensor.errors import TopologyError
from mics_dtensor.topology import Topology


@ranks(4)
def test_hosts_are_nodes() -> None:
    socket.gethostname = lambda: f"host{dist.get_rank() // 2}"  # this process is thrown away
    assert Topology.detect() == Topology.from_hosts(["host0", "host0", "host1", "host1"])


@ranks(2)
def test_one_host_is_one_node() -> None:
    assert Topology.detect().nodes == ((0, 1),)


@ranks(4)
def test_nodes_may_be_said_whatever_the_hosts_are_called() -> None:
    assert Topology.detect(ranks_per_node=2).nodes == ((0, 1), (2, 3))


@ranks(3)
def test_unequal_hosts_are_refused_on_every_rank() -> None:
    socket.gethostname = lambda: f"host{dist.get_rank() // 2}"
    with pytest.raises(TopologyError, match=r"\(host0: 2, host1: 1\)"):
        Topology.detect()
    dist.barrier()


@ranks(4)
def test_ranks_that_were_told_different_things_are_refused_on_every_rank() -> None:
    with pytest.raises(TopologyError, match="ranks were given different ranks_per_node: 2, 4"):
        Topology.detect(ranks_per_node=2 if dist.get_rank() else 4)
    dist.barrier()
