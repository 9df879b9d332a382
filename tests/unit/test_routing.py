"""Who reads what, and where it goes: laws that hold for every route."""

from __future__ import annotations

from collections import Counter

import pytest

from mics_dtensor.checkpoint import routing
from mics_dtensor.checkpoint.routing import Part, Ranks, Route, cover, routes


def part(name: str, file: str, *, size: int = 8, start: int = 0) -> Part:
    return Part(name, file, start, size, (0,), (size,), size, True)


def held_after(all_routes: list[Route]) -> list[set[Part]]:
    """What every rank has in the end; each step is possible, and alike on all that take part."""
    held: list[set[Part]] = [set() for _ in all_routes]
    by_file: dict[str, int] = {}
    for rank, route in enumerate(all_routes):
        for file in route.files:
            assert file not in by_file, "read twice"
            by_file[file] = rank
    for number in range(len(all_routes[0].rounds)):
        moves = Counter(move for route in all_routes for move in route.rounds[number])
        assert set(moves.values()) <= {2}, "one end does not know of it"
        for move in moves:
            assert by_file[move.part.file] == move.source
            held[move.target].add(move.part)
    queues = [list(route.broadcasts) for route in all_routes]
    while any(queues):
        for queue in queues:
            if queue and all(
                queues[rank] and queues[rank][0] == queue[0]
                for rank in queue[0].group or range(len(queues))
            ):
                said = queue[0]
                for its in said.parts:
                    assert its in held[said.lead] or by_file[its.file] == said.lead
                for rank in said.group or range(len(queues)):
                    queues[rank].pop(0)
                    held[rank].update(said.parts)
                break
        else:
            raise AssertionError("ranks wait for each other")
    return held


GROUPS_2X2: list[list[Ranks]] = [[(0, 2)], [(1, 3)], [(0, 2)], [(1, 3)]]


def test_the_same_layout_needs_broadcasts_alone() -> None:
    needs = {part(f"w{number}", f"f{number}"): [(0, 2), (1, 3)][number % 2] for number in range(4)}
    found = routes(
        needs, sizes=dict.fromkeys(("f0", "f1", "f2", "f3"), 9), readers=range(4), groups=GROUPS_2X2
    )
    assert [len(route.files) for route in found] == [1, 1, 1, 1]
    assert all(route.rounds == [] for route in found)
    held = held_after(found)
    for its, ranks in needs.items():
        assert [rank for rank in range(4) if its in held[rank]] == list(ranks)


@pytest.mark.parametrize("readers", [range(4), range(2), [3]])
def test_every_need_is_met(readers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MESSAGE_BYTES", 20)
    wanted = [(0, 2), (1, 3), (0, 1, 2, 3), (1,), (0, 1, 2), (0, 3), (2, 3)]
    needs = {
        part(f"w{number}", f"f{number % 3}", start=number): list(wanted[number % len(wanted)])
        for number in range(40)
    }
    found = routes(needs, sizes={"f0": 30, "f1": 20, "f2": 10}, readers=readers, groups=GROUPS_2X2)
    assert {rank for rank in range(4) if found[rank].files} <= set(readers)
    assert len({len(route.rounds) for route in found}) == 1
    held = held_after(found)
    for its, ranks in needs.items():
        for rank in ranks:
            assert its in held[rank] or its.file in found[rank].files


def test_ranks_as_groups_that_can_broadcast() -> None:
    assert cover([0, 1, 2, 3], GROUPS_2X2) == [(0, 1, 2, 3)]
    assert cover([0, 2], GROUPS_2X2) == [(0, 2)]
    assert cover([0, 1, 2], GROUPS_2X2) == [(0, 2), (1,)]
    assert cover([3], GROUPS_2X2) == [(3,)]
