"""The least that an optimizer step must send between nodes, by what it is sent for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mics_dtensor.plan.options import Options
from mics_dtensor.plan.traffic import step_traffic
from mics_dtensor.plan.unit import Unit


def bound_of_stages(units: Sequence[Unit], *, micro_steps: int) -> dict[str, int]:
    """Bytes out of all nodes in a step with this sharding, whoever runs it.

    In two stages wherever a group spans nodes, and with one boundary a step. Keys are those of
    "stages" in results.json.
    """
    options = Options(num_micro_steps=micro_steps)
    once = [replace(unit, gathers=1, regather=None) for unit in units]
    forward = _sent(once, options, "gather")
    return {
        "forward": forward,
        "backward": _sent(units, options, "gather") - forward,
        "reduction": _sent(units, options, "reduce"),
        "boundary": _sent(units, options, "boundary") + _sent(units, options, "agreement"),
    }


def _sent(units: Sequence[Unit], options: Options, prefix: str) -> int:
    sent: Counter[str] = Counter()
    for stage in step_traffic(units, options).stages:
        is_update = stage.name.startswith("gather of slices")  # the other half of the boundary
        first = "boundary" if is_update else stage.name.split()[0].rstrip(":")
        sent[first] += stage.inter_node_bytes
    return sent[prefix]
