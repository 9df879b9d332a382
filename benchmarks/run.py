"""One run of the emulated cluster: all systems in one launch, taking turns."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.cluster import Cluster, ClusterError
from benchmarks.counters import Snapshot, busy_s
from benchmarks.launch import World
from benchmarks.referee import Referee

SYSTEMS = (
    *("fsdp2", "hsdp", "mics", "mics-node-local", "mics-overlap"),
    *("hsdp-no-reshard", "mics-overlap-no-reshard"),
    *(
        "mics-own-messages",
        "mics-one-message",
        "mics-at-once",
        "mics-block-by-block",
        "mics-no-hierarchy",
        "mics-no-2hop",
    ),
    *("mics-slices", "mics-bf16", "mics-slices-bf16"),
)
PEERS = ("deepspeed-zero3", "deepspeed-zero3-reuse0")
OF_PROGRAM = ("fsdp2", "hsdp", "mics", "mics-no-hierarchy")
OVER_ALL_NODES = ("fsdp2", *PEERS)

FOREIGN_CORES = 0.1
"""A repetition counts if other processes used less than this."""

_START_S, _QUIET_S, _LEAVE_S = 180.0, 10.0, 60.0
_LAST_WORDS_S = 5.0
_BUILD_S = 900.0  # DeepSpeed compiles an extension when it is built for the first time
_NORM_TOLERANCE = 1e-4  # relative; fp32, and every system sums in another order


@dataclass(frozen=True)
class Case:
    """A system with its partition groups of `partition_nodes` nodes (below 1: part of a node)."""

    system: str
    partition_nodes: float

    @property
    def key(self) -> str:
        """Its name in messages."""
        return f"{self.system} over {self.partition_nodes:g} nodes"

    @property
    def world(self) -> str:
        """Which environment runs it."""
        return "peer" if self.system in PEERS else "ours"

    @classmethod
    def all_of(
        cls, names: Iterable[str], partition_nodes: Sequence[float], *, num_nodes: int
    ) -> tuple[Case, ...]:
        """Every system with every partition; those that shard over all nodes once."""
        cases = [
            cls(name, nodes)
            for name in names
            for nodes in ([float(num_nodes)] if name in OVER_ALL_NODES else partition_nodes)
        ]
        return tuple(dict.fromkeys(cases))


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is asked for. `workload` holds its kind, and the arguments of its class."""

    num_nodes: int
    ranks_per_node: int
    rate: str | None
    cases: tuple[Case, ...]
    workload: Mapping[str, Any]
    repetitions: int = 5
    max_repetitions: int = 10
    steps: int = 2
    count_stages: bool = True
    timeout_s: float = 300.0
    peer_python: str | None = None


@dataclass
class Record:
    """What was seen of one case."""

    case: Case
    built: dict[str, Any]
    repetitions: list[Snapshot] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # of every optimizer step, from the first
    stages: list[tuple[str, Snapshot]] = field(default_factory=list)

    @property
    def num_quiet(self) -> int:
        """Repetitions that count."""
        return sum(r.foreign_cores < FOREIGN_CORES for r in self.repetitions)


def run(wanted: Run) -> list[Record]:
    """Make the cluster, rotate the systems, take all of it down. Raises ClusterError."""
    with Cluster(wanted.num_nodes, rate=wanted.rate) as cluster:
        pythons = {"ours": sys.executable, "peer": wanted.peer_python or sys.executable}
        worlds = [
            World(name, cluster, wanted.ranks_per_node, port=29500 + i, python=pythons[name])
            for i, name in enumerate(dict.fromkeys(case.world for case in wanted.cases))
        ]

        def check() -> None:
            for world in worlds:
                world.check()

        path = cluster.folder / "socket"
        sizes = {world.name: world.size for world in worlds}
        referee = Referee(path, sizes, ranks_per_node=wanted.ranks_per_node, check=check)
        for world in worlds:
            workload = dict(wanted.workload)
            if workload["kind"] == "llama":
                workload["folder"] = str(cluster.folder)
            world.start([str(path), world.name, json.dumps(workload)])
        pids = [pid for world in worlds for pid in world.pids]
        try:
            referee.wait_for_ranks(timeout_s=_START_S, more_pids=pids)
            records = _measure(wanted, referee)
        except ClusterError:
            time.sleep(_LAST_WORDS_S)  # torchrun says which rank failed, and by which signal
            raise
        referee.dismiss(timeout_s=_LEAVE_S)
    return records


def _measure(wanted: Run, referee: Referee) -> list[Record]:
    records = []
    for case in wanted.cases:
        asked = {"do": "build", "system": case.system, "partition_nodes": case.partition_nodes}
        turn = referee.turn(case.world, {**asked, "key": case.key}, timeout_s=_BUILD_S)
        records.append(Record(case, turn.answers[0]))
        _steps(referee, records[-1], 1, wanted.timeout_s)  # connections, buffers, lazy set-up
    if wanted.count_stages:
        for record in records:
            command = {"do": "count", "key": record.case.key}
            turn = referee.turn(record.case.world, command, timeout_s=wanted.timeout_s)
            record.stages = turn.between()
    for repetition in range(wanted.max_repetitions):
        if all(record.num_quiet >= wanted.repetitions for record in records):
            break
        for record in records:
            _wait_for_quiet()
            snapshot = _steps(referee, record, wanted.steps, wanted.timeout_s)
            record.repetitions.append(snapshot)
            _tell(repetition, record, wanted.steps)
    assert_equal_norms(records)
    return records


def _steps(referee: Referee, record: Record, steps: int, timeout_s: float) -> Snapshot:
    command = {"do": "steps", "key": record.case.key, "steps": steps}
    turn = referee.turn(record.case.world, command, timeout_s=timeout_s)
    record.norms += turn.answers[0]["norms"]
    [(_, between)] = turn.between()
    return between


def _wait_for_quiet() -> None:
    """Until other processes rest, or for a while: the repetition is then recorded as it is."""
    deadline_s = time.monotonic() + _QUIET_S
    while time.monotonic() < deadline_s:
        before, at_s = busy_s(), time.monotonic()
        time.sleep(0.25)
        if (busy_s() - before) / (time.monotonic() - at_s) < FOREIGN_CORES:
            return


def _tell(repetition: int, record: Record, steps: int) -> None:
    last = record.repetitions[-1]
    sent = statistics.mean(last.inter_node) / steps
    print(
        f"repetition {repetition + 1}: {record.case.key}: {last.at_s / steps:.3f} s, "
        f"{sent / 1e6:.2f} MB out of a node, foreign cores {last.foreign_cores:.2f}",
        file=sys.stderr,
        flush=True,
    )


def assert_equal_norms(records: Sequence[Record]) -> None:
    """Raise ClusterError unless all systems saw the same gradient norms: they train the same.

    Those that gather bf16 are compared among themselves.
    """
    firsts: dict[object, Record] = {}
    for record in records:
        first = firsts.setdefault(record.built["configuration"].get("param_dtype"), record)
        for step, (one, other) in enumerate(zip(first.norms, record.norms, strict=False)):
            if abs(one - other) > _NORM_TOLERANCE * abs(one):
                raise ClusterError(
                    f"in step {step + 1} the gradient norm of {first.case.key} is {one:.7g}, that "
                    f"of {record.case.key} {other:.7g}: they do not train the same, and their "
                    "times cannot be compared"
                )
