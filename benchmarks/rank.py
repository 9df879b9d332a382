"""What every rank runs: it waits for the launcher's commands and does its part of each.

torchrun ... -m benchmarks.rank SOCKET WORLD WORKLOAD   (WORKLOAD: a JSON object)
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarks.line import Line
from benchmarks.phases import Phases
from benchmarks.workload import Linears


class Trainable(Protocol):
    """A system that is built: what `benchmarks.systems` and the peers' adapters give."""

    def step(self, phases: Phases) -> float:
        """One optimizer step; the gradient norm before clipping."""

    def count_step(self, phases: Phases) -> None:
        """One step, counted stage by stage."""


class Rank:
    """Builds systems and runs their steps. Systems are told apart by the launcher's `key`."""

    def __init__(self, line: Line, workload: Linears) -> None:
        self._line = line
        self._phases = Phases(line)
        self._workload = workload
        self._built: dict[str, Trainable] = {}

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        """Do one command. Collective: the launcher gives it to every rank."""
        if command["do"] == "build":
            return self._build(command["key"], command["system"], command["partition_nodes"])
        system = self._built[command["key"]]
        if command["do"] == "count":
            system.count_step(self._phases)
            return {}
        self._line.mark("before")
        norms = [system.step(self._phases) for _ in range(command["steps"])]
        self._line.mark("steps")
        return {"norms": norms}

    def _build(self, key: str, name: str, partition_nodes: float) -> dict[str, Any]:
        if name.startswith("deepspeed"):
            from benchmarks.peers import deepspeed_zero3

            peer = deepspeed_zero3.Training(name, self._workload)
            self._built[key] = peer
            return {
                "configuration": peer.configuration,
                "versions": peer.versions,
                "bound_of_stages": peer.bound_of_stages(),
            }
        from benchmarks.systems import RECIPES, Training
        from mics_dtensor import Topology

        recipe = RECIPES[name]
        built = Training(
            recipe, self._workload, partition_nodes=partition_nodes, topology=Topology.detect()
        )
        self._built[key] = built
        return {
            "configuration": recipe.configuration,
            "versions": {"torch": torch.__version__},
            "bound_of_stages": built.bound_of_stages(),
        }


def main() -> None:
    path, world, workload = sys.argv[1:]
    torch.set_num_threads(1)
    line = Line(path, world=world, rank=int(os.environ["RANK"]))
    dist.init_process_group("gloo")
    rank = Rank(line, Linears(**json.loads(workload)))
    while (command := line.receive())["do"] != "leave":
        line.send(**rank.obey(command))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
