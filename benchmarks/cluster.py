"""Network namespaces that stand in for nodes: a link of limited rate between them, none inside."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

INTERFACE = "eth0"  # of every node, on the slow link; traffic inside a node goes over lo

# Ends what still runs in the namespaces, by process id, and removes all that `Cluster` may have
# made. It waits for the end of its input, which comes when the launcher closes it or dies in any
# way, SIGKILL included; a session of its own keeps Ctrl-C from it.
_REMOVE = """
folder="$1" bridge="$2"; shift 2
while read -r _; do :; done
for _ in 1 2 3 4 5 6 7 8 9 10; do
    pids="$(for node in "$@"; do ip netns pids "$node" 2>/dev/null; done)"
    [ -n "$pids" ] || break
    kill -KILL $pids 2>/dev/null
    sleep 0.1
done
for node in "$@"; do
    ip link del "${node}v" 2>/dev/null
    ip netns del "$node" 2>/dev/null
done
ip link del "$bridge" 2>/dev/null
rm -rf "$folder"
exit 0
"""

# A host name of its own makes Topology.detect() see a node.
_IN_NODE = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'


class ClusterError(Exception):
    """The emulated cluster cannot be made here, or stopped working; the message says why."""


class Cluster:
    """`num_nodes` namespaces on a bridge, each with `rate` in and out ("400mbit"; None: no limit).

    A context manager, with a `folder` for files. Names hold the process id, so that several
    clusters live side by side; whatever ends the block or the process, everything is removed.
    Raises ClusterError.
    """

    def __init__(self, num_nodes: int, *, rate: str | None) -> None:
        self.rate = rate
        self.hosts = [f"node{i}" for i in range(num_nodes)]
        self.addresses = [f"10.77.0.{i + 1}" for i in range(num_nodes)]
        self._bridge = f"mics{os.getpid()}"
        self._namespaces = [f"{self._bridge}n{i}" for i in range(num_nodes)]
        # The remover knows its name before it is made; nobody else does.
        self.folder = Path(tempfile.gettempdir()) / f"{self._bridge}-{secrets.token_hex(8)}"
        self._remover: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Cluster:
        if missing := what_is_missing():
            raise ClusterError(missing)
        if not 1 <= len(self.hosts) <= 99:
            raise ClusterError(f"{len(self.hosts)} nodes; give 1 to 99")
        self._remover = subprocess.Popen(
            ["sh", "-c", _REMOVE, "remover", str(self.folder), self._bridge, *self._namespaces],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self.folder.mkdir(mode=0o700)
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what runs in the namespaces and remove them. Safe to call twice."""
        if self._remover is not None and self._remover.stdin is not None:
            self._remover.stdin.close()
            self._remover.wait()
            self._remover = None

    def command(self, node: int, arguments: Sequence[str]) -> list[str]:
        """`arguments` as a command line that runs in `node`, under that node's host name."""
        enter = ["ip", "netns", "exec", self._namespaces[node], "unshare", "--uts"]
        return [*enter, "sh", "-c", _IN_NODE, self.hosts[node], *arguments]

    def _make(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("link", "set", self._bridge, "up")
        for namespace, address in zip(self._namespaces, self.addresses, strict=True):
            far_end = f"{namespace}v"
            _ip("netns", "add", namespace)
            peer = ["peer", "name", INTERFACE, "netns", namespace]
            _ip("link", "add", far_end, "type", "veth", *peer)
            _ip("link", "set", far_end, "master", self._bridge)
            _ip("link", "set", far_end, "up")
            _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", namespace, "link", "set", INTERFACE, "up")
            _ip("-n", namespace, "link", "set", "lo", "up")
            if self.rate is not None:
                limit = ["root", "tbf", "rate", self.rate, "burst", "256kb", "latency", "100ms"]
                _run("tc", "-n", namespace, "qdisc", "add", "dev", INTERFACE, *limit)
                _run("tc", "qdisc", "add", "dev", far_end, *limit)


def what_is_missing() -> str | None:
    """Why no cluster can be made here, in one sentence; None where one can."""
    if not hasattr(os, "geteuid") or os.uname().sysname != "Linux":
        return "the emulated cluster needs Linux: it is made of network namespaces"
    if os.geteuid() != 0:
        return "the emulated cluster needs root, to make network namespaces: run it with sudo"
    packages = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux"}
    for program, package in packages.items():
        if shutil.which(program) is None:
            return f"the program {program} is missing: install it (Debian: {package})"
    probe = f"mics{os.getpid()}probe"
    try:
        _ip("netns", "add", probe)
        try:
            _ip("-n", probe, "link", "add", "one", "type", "veth", "peer", "name", "two")
            limit = ["root", "tbf", "rate", "1gbit", "burst", "256kb", "latency", "100ms"]
            _run("tc", "-n", probe, "qdisc", "add", "dev", "one", *limit)
        finally:
            subprocess.run(["ip", "netns", "del", probe], stderr=subprocess.DEVNULL, check=False)
    except ClusterError as error:
        return f"network namespaces, veth or tbf cannot be made here ({error})"
    return None


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
