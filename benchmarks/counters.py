"""What the kernel counts: bytes on each node's interfaces, and the CPU time of ours and others."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.cluster import INTERFACE

HEADER_BYTES = 14 + 20 + 32
"""Of a packet: Ethernet, IPv4, TCP with timestamps. Packets are as TCP hands them to the interface,
of up to 64 KiB, and of one segment each while TCP is careful after a loss."""

SEGMENT_BYTES = 1500 - 20 - 32
"""Payload of what TCP counts as a segment."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Snapshot:
    """The counters at one moment, while every rank stands still; `b - a` is what lies between.

    Bytes are those sent, one number a node: `inter_node` out of the node (with the headers of
    Ethernet, IP and TCP), `intra_node` over its lo. Packets are those out of the node, segments
    those that its TCP sent again. `own_cpu_s` is of the processes given to
    `take`; `foreign_cpu_s` is user and system time of all others, without soft interrupts, which
    are the emulated wire at work.
    """

    at_s: float
    inter_node: tuple[int, ...]
    inter_node_packets: tuple[int, ...]
    intra_node: tuple[int, ...]
    retransmitted_segments: tuple[int, ...]
    own_cpu_s: float
    foreign_cpu_s: float

    def __sub__(self, other: Snapshot) -> Snapshot:
        return Snapshot(
            at_s=self.at_s - other.at_s,
            inter_node=_minus(self.inter_node, other.inter_node),
            inter_node_packets=_minus(self.inter_node_packets, other.inter_node_packets),
            intra_node=_minus(self.intra_node, other.intra_node),
            retransmitted_segments=_minus(
                self.retransmitted_segments, other.retransmitted_segments
            ),
            own_cpu_s=self.own_cpu_s - other.own_cpu_s,
            foreign_cpu_s=self.foreign_cpu_s - other.foreign_cpu_s,
        )

    @property
    def inter_node_payload(self) -> tuple[int, ...]:
        """Bytes out of each node without headers and without what was sent again.

        This is what a busy machine does not change: it makes TCP send more, smaller packets. A
        segment that was sent again inside the node cannot be told apart and is left out once too
        often.
        """
        counts = zip(
            self.inter_node, self.inter_node_packets, self.retransmitted_segments, strict=True
        )
        return tuple(
            sent - HEADER_BYTES * packets - SEGMENT_BYTES * again for sent, packets, again in counts
        )

    @property
    def foreign_cores(self) -> float:
        """Cores that other processes used, on average over an interval."""
        return max(0.0, self.foreign_cpu_s / self.at_s)


def take(a_pid_of_node: Sequence[int], own_pids: Sequence[int]) -> Snapshot:
    """Read all counters. A process of each node shows that node's network in /proc."""
    own = sum(_cpu_s(pid) for pid in own_pids)
    sent = [_sent(pid) for pid in a_pid_of_node]
    return Snapshot(
        at_s=time.perf_counter(),
        inter_node=tuple(interfaces[INTERFACE].bytes for interfaces in sent),
        inter_node_packets=tuple(interfaces[INTERFACE].packets for interfaces in sent),
        intra_node=tuple(interfaces["lo"].bytes for interfaces in sent),
        retransmitted_segments=tuple(_retransmitted(pid) for pid in a_pid_of_node),
        own_cpu_s=own,
        foreign_cpu_s=busy_s() - own,
    )


def busy_s() -> float:
    """User and system seconds of all processes of the machine, all cores together."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system = (int(field) for field in fields[:3])
    return (user + nice + system) / _TICKS_PER_S


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S  # utime, stime of all threads


class _Sent(NamedTuple):
    bytes: int
    packets: int


def _sent(pid: int) -> Mapping[str, _Sent]:
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
    table = (
        (name.strip(), fields.split()) for name, _, fields in (x.partition(":") for x in lines)
    )
    return {name: _Sent(int(fields[8]), int(fields[9])) for name, fields in table}


def _retransmitted(pid: int) -> int:
    names, values = (
        line.split()
        for line in Path(f"/proc/{pid}/net/snmp").read_text().splitlines()
        if line.startswith("Tcp:")
    )
    return int(values[names.index("RetransSegs")])


def _minus(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))
