"""What every rank runs: it waits for the launcher's commands and does its part of each.

torchrun ... -m benchmarks.rank SOCKET WORLD WORKLOAD   (WORKLOAD: a JSON object)
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarks.line import Line
from benchmarks.phases import Phases
from benchmarks.workload import Linears

PACKAGES = ("torch", "torchtitan", "deepspeed")


class Trainable(Protocol):
    """A system that is built: what `systems`, `program` and the peers' adapters give."""

    configuration: dict[str, object]

    def bound_of_stages(self) -> dict[str, int]:
        """The least that a step must send between nodes, in bytes out of all nodes."""

    def step(self, phases: Phases) -> float:
        """One optimizer step; the gradient norm before clipping."""

    def count_step(self, phases: Phases) -> None:
        """One step, counted stage by stage."""


class Rank:
    """Builds systems and runs their steps. Systems are told apart by the launcher's `key`."""

    def __init__(self, line: Line, workload: dict[str, Any]) -> None:
        self._line = line
        self._phases = Phases(line)
        self._workload = workload
        self._built: dict[str, Trainable] = {}

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        """Do one command. Collective: the launcher gives it to every rank."""
        if command["do"] == "build":
            built = self._build(command["system"], command["partition_nodes"])
            self._built[command["key"]] = built
            return {
                "configuration": built.configuration,
                "bound_of_stages": built.bound_of_stages(),
                "versions": {name: version(name) for name in PACKAGES if find_spec(name)},
            }
        system = self._built[command["key"]]
        if command["do"] == "count":
            system.count_step(self._phases)
            return {}
        self._line.mark("before")
        norms = [system.step(self._phases) for _ in range(command["steps"])]
        self._line.mark("steps")
        return {"norms": norms}

    def _build(self, system: str, partition_nodes: float) -> Trainable:
        workload = dict(self._workload)
        kind = workload.pop("kind")
        if system.startswith("deepspeed"):
            from benchmarks.peers import deepspeed_zero3

            return deepspeed_zero3.Training(system, Linears(**workload))
        from mics_dtensor import Topology

        place = {"partition_nodes": partition_nodes, "topology": Topology.detect()}
        if kind == "llama":  # torchtitan takes seconds to import
            from benchmarks import program

            return program.Training(system, program.Llama(**workload), **place)
        from benchmarks import systems

        return systems.Training(system, Linears(**workload), **place)


def main() -> None:
    path, world, workload = sys.argv[1:]
    torch.set_num_threads(1)
    line = Line(path, world=world, rank=int(os.environ["RANK"]))
    dist.init_process_group("gloo")
    rank = Rank(line, json.loads(workload))
    while (command := line.receive())["do"] != "leave":
        line.send(**rank.obey(command))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
