"""A step in time, not to scale: gathers, compute and reductions, and the boundary."""

from __future__ import annotations

from dataclasses import dataclass

from mics_dtensor.layout import Layout
from mics_dtensor.plan.stage import Stage
from mics_dtensor.plan.traffic import Options, Unit, step_traffic
from scripts.figures.drawing import FAST, INK, PALE, REPLICAS, SLOW, Drawing

WIDTH, SLOT, LEFT = 560, 23.4, 78
NUM_MICRO_STEPS, NUM_UNITS, STRIDE = 2, 3, 8.3
LANES = {"between nodes": 64, "inside a node": 128, "compute": 192}


@dataclass(frozen=True)
class Event:
    """One box: `start` and `length` in slots, of one micro-step or of the boundary."""

    lane: str
    label: str
    start: float
    length: float
    row: int = 0
    collective: str = ""


def units(layout: Layout) -> list[Unit]:
    """Three units in forward order; as torchtitan does, the last is not gathered again."""
    return [
        Unit(
            name=str(number),
            shapes=((layout.partition_size,),),
            shard=layout.shard_shape,
            replicate=layout.replicate_shape,
            gathers=2 if number < NUM_UNITS - 1 else 1,
        )
        for number in range(NUM_UNITS)
    ]


def events(layout: Layout) -> list[Event]:
    """Every box of the figure: as many of each kind as `step_traffic` counts calls of one rank."""
    traffic = step_traffic(units(layout), Options(num_micro_steps=NUM_MICRO_STEPS))
    found = list[Event]()
    for micro_step in range(NUM_MICRO_STEPS):
        start = micro_step * STRIDE
        for number in range(NUM_UNITS):
            stages = [s for s in traffic.stages if s.unit == str(number) and s.every_micro_step]
            gathers = [s for s in stages if s.name.startswith("gather")]
            reductions = [s for s in stages if s.name.startswith("reduce")]
            found.append(Event("compute", f"F{number}", start + 1 + number, 1))
            found.append(Event("compute", f"B{number}", start + 6 - number, 1))
            found += _in_turn(gathers, start + number, row=0)
            if number < NUM_UNITS - 1:
                found += _in_turn(gathers, start + 5 - number, row=0)
            found += _in_turn(reductions, start + 7 - number, row=1)
    end = NUM_MICRO_STEPS * STRIDE
    boundary = [s for s in traffic.stages if not s.every_micro_step]
    agreement = [s for s in boundary if s.name == "agreement"]
    hops = [s for s in boundary if s.name != "agreement" and s.calls]
    for place, stage in enumerate(agreement):
        at = end + 0.3 + 0.3 * place  # the first message of the hop is on its way
        found.append(Event(_lane(stage), "", at, 0.25, row=1, collective=stage.collective))
    for stage in hops:
        found += [
            Event(_lane(stage), "hop 2", end + 0.2 + 1.9 * call, 1.8, collective=stage.collective)
            for call in range(stage.calls)
        ]
    return [*found, Event("compute", "step", end + 2.1, 1.2)]


def draw(layout: Layout) -> Drawing:
    """Lanes for the two links and compute; gathers above reductions in each link."""
    drawing = Drawing(WIDTH, 302, "An optimizer step of two micro-steps and its boundary")
    titles = [(STRIDE * n, 8.0, f"micro-step {n + 1}") for n in range(NUM_MICRO_STEPS)]
    for start, length, said in [*titles, (STRIDE * NUM_MICRO_STEPS, 3.4, "boundary")]:
        drawing.box((_x(start) - 2, 34), (length * SLOT + 3, 186), fill=PALE)
        drawing.words((_x(start) + length * SLOT / 2, 24), said, anchor="middle", size=14)
    for lane, y in LANES.items():
        for row, word in enumerate(lane.split(" ", 1)):
            drawing.words((4, y + 10 + 16 * row), word)
    for event in events(layout):
        at = (_x(event.start), LANES[event.lane] - 12 + 24 * event.row)
        drawing.bar(at, (event.length * SLOT - 1.5, 20), fill=_colour(event))
        if event.label:
            middle = at[0] + event.length * SLOT / 2
            size, fill = (11, INK) if event.lane == "compute" else (11, "#ffffff")
            drawing.words((middle, at[1] + 14), event.label, anchor="middle", size=size, fill=fill)
    said = (
        "F, B: forward, backward of units 0, 1, 2. Upper row of a link: gathers; lower:",
        "reductions. A gather goes between nodes first, a reduction inside the node first.",
        "Orange: the second hop, once. The marks under it are the agreement.",
    )
    for row, words in enumerate(said):
        drawing.words((4, 246 + 20 * row), words)
    return drawing


def _x(slot: float) -> float:
    return LEFT + slot * SLOT


def _in_turn(stages: list[Stage], start: float, *, row: int) -> list[Event]:
    """The stages of one gather or reduction, one after the other in one slot.

    The calls of a stage inside the node are one launch on NCCL, and one box here.
    """
    length = 1 / len(stages)
    return [
        Event(_lane(stage), "", start + place * length, length, row, stage.collective)
        for place, stage in enumerate(stages)
    ]


def _lane(stage: Stage) -> str:
    return "between nodes" if stage.inter_node_bytes else "inside a node"


def _colour(event: Event) -> str:
    if event.lane == "compute":
        return "#d7dbe2"
    if event.collective == "all_reduce":
        return REPLICAS
    return SLOW if event.lane == "between nodes" else FAST
