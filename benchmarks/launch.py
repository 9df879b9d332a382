"""One torchrun in each node, with static rendezvous: a world of ranks that wait for their turns."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cluster import INTERFACE, Cluster, ClusterError

ROOT = Path(__file__).parents[1]


@dataclass
class World:
    """`ranks_per_node` ranks in every node of `cluster`, in the Python environment `python`."""

    name: str
    cluster: Cluster
    ranks_per_node: int
    port: int
    python: str = sys.executable
    module: str = "benchmarks.rank"
    _running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Ranks in all."""
        return len(self.cluster.hosts) * self.ranks_per_node

    @property
    def pids(self) -> list[int]:
        """The processes of torchrun, one a node."""
        return [process.pid for process in self._running]

    def start(self, arguments: Sequence[str]) -> None:
        """Start `python -m MODULE ARGUMENTS` on every rank."""
        paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "TMPDIR": str(self.cluster.folder),  # torchrun leaves a folder there when it is killed
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore::FutureWarning",  # DeepSpeed uses names that torch renames
            "PYTHONUNBUFFERED": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # no warning per rank that addresses have no names
        }
        for node, address in enumerate(self.cluster.addresses):
            torchrun = [
                *(self.python, "-m", "torch.distributed.run"),
                *("--nnodes", str(len(self.cluster.hosts)), "--node-rank", str(node)),
                *("--nproc-per-node", str(self.ranks_per_node), "--local-addr", address),
                *("--master-addr", self.cluster.addresses[0], "--master-port", str(self.port)),
                *("--module", self.module, *arguments),
            ]
            self._running.append(
                subprocess.Popen(
                    self.cluster.command(node, torchrun),
                    env=environment,
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    # Ctrl-C is the launcher's to handle; the cluster ends what it leaves.
                    start_new_session=True,
                )
            )

    def wait(self, timeout_s: float) -> None:
        """Until every node has ended well; ClusterError where one fails, or takes too long."""
        deadline_s = time.monotonic() + timeout_s
        for host, process in zip(self.cluster.hosts, self._running, strict=True):
            try:
                status = process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise ClusterError(
                    f"torchrun of world {self.name} on {host} still runs after {timeout_s:g} s"
                ) from None
            if status:
                raise ClusterError(
                    f"torchrun of world {self.name} on {host} ended with status {status}; its own "
                    "words are above"
                )

    def check(self) -> None:
        """Raise ClusterError if a node has ended."""
        for host, process in zip(self.cluster.hosts, self._running, strict=True):
            if process.poll() is not None:
                raise ClusterError(
                    f"torchrun of world {self.name} on {host} ended with status "
                    f"{process.returncode}; its own words are above"
                )
