"""Who reads which file, and how its parts come to the ranks that need them. Pure, no torch.

Every file is read once, whole, by one rank. What another rank needs of it moves to one rank of that
one's replication group, and is broadcast there. Where a run goes on with the layout that it was
saved with, readers need what they read, and there are broadcasts alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

Ranks = tuple[int, ...]
MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True)
class Part:
    """A box of a saved value: what some ranks need of it. `offsets` and `lengths` are inside it."""

    name: str  # of the value in the checkpoint
    file: str
    start: int  # of the value, in the file
    length: int  # of the value, in the file
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    size_bytes: int  # of this box
    is_tensor: bool


@dataclass(frozen=True)
class Move:
    """A part from the rank that has read it to one that needs it."""

    part: Part
    source: int
    target: int


@dataclass(frozen=True)
class Broadcast:
    """Parts from `lead` to all of `group`, in one message; the group of all ranks is ()."""

    group: Ranks
    lead: int
    parts: tuple[Part, ...]


@dataclass
class Route:
    """What one rank does, in this order. Lists that others take part in are alike on all of them.

    `rounds`: of each all-to-all, the moves from and to this rank; all ranks have equally many.
    """

    files: list[str] = field(default_factory=list)
    rounds: list[list[Move]] = field(default_factory=list)
    broadcasts: list[Broadcast] = field(default_factory=list)


def routes(
    needs: Mapping[Part, Sequence[int]],
    *,
    sizes: Mapping[str, int],
    readers: Sequence[int],
    groups: Sequence[Sequence[Ranks]],
) -> list[Route]:
    """Of every rank. `needs`: the ranks that need a part. `sizes`: bytes of the files.

    `readers`: the ranks that see the files. `groups`: of each rank, the replication groups that it
    is in. Files of which nothing is needed are not read.
    """
    world_size = len(groups)
    reader_of = assigned(needs, sizes=sizes, readers=readers)
    moves = list[Move]()
    to_broadcast = dict[tuple[Ranks, int], list[Part]]()
    received = [0] * world_size
    for part in sorted(needs, key=attrgetter("file", "start", "offsets")):
        reader = reader_of[part.file]
        for group in cover(needs[part], groups):
            lead = reader if reader in group else min(group, key=lambda rank: received[rank])
            if lead != reader:
                moves.append(Move(part, reader, lead))
                received[lead] += part.size_bytes
            if len(group) > 1:
                said = () if len(group) == world_size else group
                to_broadcast.setdefault((said, lead), []).append(part)
    found = [Route() for _ in range(world_size)]
    for file, reader in sorted(reader_of.items()):
        found[reader].files.append(file)
    for moved in rounds(moves):
        for route in found:
            route.rounds.append([])
        for move in moved:
            for rank in (move.source, move.target):
                found[rank].rounds[-1].append(move)
    for (group, lead), parts in sorted(to_broadcast.items()):  # one order for all: no deadlock
        for message in messages(parts):
            for rank in group or range(world_size):
                found[rank].broadcasts.append(Broadcast(group, lead, message))
    return found


def assigned(
    needs: Mapping[Part, Sequence[int]], *, sizes: Mapping[str, int], readers: Sequence[int]
) -> dict[str, int]:
    """The reader of each file: one that needs much of it and has little to read."""
    wanted: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for part, ranks in needs.items():
        for rank in ranks:
            wanted[part.file][rank] += part.size_bytes
    load = dict.fromkeys(readers, 0)
    found = dict[str, int]()
    for file in sorted(wanted, key=lambda name: (-sizes[name], name)):
        needed = wanted[file]
        reader = min(readers, key=lambda rank: (load[rank] - needed.get(rank, 0), rank))
        found[file] = reader
        load[reader] += sizes[file]
    return found


def cover(needed_by: Iterable[int], groups: Sequence[Sequence[Ranks]]) -> list[Ranks]:
    """The ranks as groups that can broadcast: all at once, whole replication groups, or alone."""
    left = set(needed_by)
    if len(left) == len(groups):
        return [tuple(range(len(groups)))]
    found = list[Ranks]()
    for rank in sorted(left):
        if rank in left:
            whole = (group for group in groups[rank] if left.issuperset(group))
            chosen = max(whole, key=len, default=(rank,))
            found.append(chosen)
            left.difference_update(chosen)
    return found


def rounds(moves: Iterable[Move]) -> list[list[Move]]:
    """Moves such that in a round no rank sends or receives more than a message, or one part."""
    found = list[list[Move]]()
    sent = list[dict[tuple[str, int], int]]()
    for move in moves:
        ends = (("out", move.source), ("in", move.target))
        size = move.part.size_bytes
        at = 0
        while at < len(sent) and any(
            sent[at][end] and sent[at][end] + size > MESSAGE_BYTES for end in ends
        ):
            at += 1
        if at == len(sent):
            found.append([])
            sent.append(defaultdict(int))
        found[at].append(move)
        for end in ends:
            sent[at][end] += size
    return found


def messages(parts: Iterable[Part]) -> list[tuple[Part, ...]]:
    """The parts in order, together up to the size of a message, or one alone."""
    found = list[list[Part]]()
    size = 0
    for part in parts:
        if not found or size + part.size_bytes > MESSAGE_BYTES:
            found.append([])
            size = 0
        found[-1].append(part)
        size += part.size_bytes
    return [tuple(message) for message in found]
