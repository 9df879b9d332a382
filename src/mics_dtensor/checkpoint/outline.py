"""The outline of what an `extra` has said of itself: containers and keys, around named values.

DCP stores values under names that are joined by dots: empty containers leave none, and 1 and "1"
are one name. The outline is kept beside them, in `.metadata`, so that what was saved comes back
whatever its owner holds by then. Built of tuples, lists and bytes; pickled, so that others who read
`.metadata` need nothing of ours:

* ("dict", the empty container pickled, or None for a dict, [(key, outline), ...])
* ("list", [outline, ...])
* ("leaf", name, "value" | "tensor" | "distributed", a parameter that lies like it, is it in host
  memory: of a distributed one, where its parameter is not)
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from itertools import zip_longest
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from mics_dtensor.errors import CheckpointError
from mics_dtensor.upstream import Piece

EXTRA = "extra"  # under this name a checkpoint holds what is neither model nor optimizer
OUTLINES = "extra:"  # the outlines of all of them, in a state dict and in `.metadata`
Outline = tuple[Any, ...]
Tensors = Mapping[str, torch.Tensor]


def outline_of(value: Any, name: str, parameters: Tensors) -> Outline:
    """Of the value that DCP will store as `name` and under it. Raises CheckpointError.

    `parameters`: those of the model; a distributed value is known by one that lies like it.
    """
    found = _outline_of(value, name, parameters)
    names = set[str]()
    for leaf in leaves(found):
        if leaf[1] in names:
            raise CheckpointError(
                f"two values of {name} would both be called {leaf[1]} in a checkpoint: their keys "
                'are written alike (1 and "1"), or one has a "." in it: rename one'
            )
        names.add(leaf[1])
    return found


def _outline_of(value: Any, name: str, parameters: Tensors) -> Outline:
    if isinstance(value, Mapping):
        its = [(key, _outline_of(v, f"{name}.{key}", parameters)) for key, v in value.items()]
        return "dict", _emptied(value, name), its
    if isinstance(value, list) and not _is_one_value(value):
        return "list", [_outline_of(v, f"{name}.{i}", parameters) for i, v in enumerate(value)]
    if not isinstance(value, torch.Tensor):
        if _holds_parts(value):
            raise CheckpointError(
                f"{name} is a {type(value).__name__} that holds parts of distributed tensors, of "
                "which one rank's alone would be written: give its state_dict a list or a dict"
            )
        return "leaf", name, "value", None, True
    if isinstance(value, (DTensor, Piece)):
        like = _like(value, name, parameters)
        of_model = value.device if like is None else parameters[like].device
        on_host = value.device.type == "cpu" != of_model.type
        return "leaf", name, "distributed", like, on_host
    return "leaf", name, "tensor", None, value.device.type == "cpu"


def _is_one_value(value: list[Any]) -> bool:
    """Whether DCP stores a list as one; else each of its entries."""
    return not any(
        isinstance(v, (Mapping, torch.Tensor)) or (isinstance(v, list) and not _is_one_value(v))
        for v in value
    )


def _holds_parts(value: Any) -> bool:
    if isinstance(value, (tuple, list, set, frozenset)):
        return any(map(_holds_parts, value))
    if isinstance(value, Mapping):
        return any(map(_holds_parts, value.values()))
    return isinstance(value, (DTensor, Piece))


def _emptied(value: Mapping[Any, Any], name: str) -> bytes | None:
    """A mapping without its entries, pickled; None for a dict, and for what cannot be filled."""
    if type(value) is dict or not isinstance(value, MutableMapping):
        return None
    try:
        empty = copy.copy(value)
        empty.clear()
        return pickle.dumps(empty)
    except Exception as error:
        raise CheckpointError(
            f"{name} is a {type(value).__name__} that cannot be written ({error}): give its "
            "state_dict a dict"
        ) from error


def _like(value: torch.Tensor, name: str, parameters: Tensors) -> str | None:
    """A parameter of its shape that lies as it does; of those the one that it is named after."""

    def lies_alike(parameter: torch.Tensor) -> bool:
        if parameter.shape != value.shape:
            return False
        if isinstance(value, Piece) or not isinstance(parameter, DTensor):
            return isinstance(value, Piece)
        its, mine = cast("Any", value), cast("Any", parameter)
        return bool(its.device_mesh == mine.device_mesh and its.placements == mine.placements)

    alike = [its for its, parameter in parameters.items() if lies_alike(parameter)]
    named_after = [its for its in alike if f".{its}." in f".{name}."]
    return max(named_after, key=len) if named_after else next(iter(alike), None)


def leaves(outline: Outline) -> Iterator[Outline]:
    """All of them, in order."""
    kind, *_, its = outline
    if kind == "leaf":
        yield outline
    else:
        for entry in its:
            yield from leaves(entry[1] if kind == "dict" else entry)


def written(outlines: Mapping[str, Outline]) -> bytes:
    """Outlines by name, as they are kept. Raises CheckpointError for keys that cannot be."""
    try:
        return pickle.dumps({name: pickle.dumps(its) for name, its in outlines.items()})
    except Exception as error:
        raise CheckpointError(
            f"the keys of a state_dict in `extra` cannot be written ({error}): use text, numbers "
            "or tuples of them"
        ) from error


def read_outlines(kept: bytes | None) -> dict[str, bytes] | None:
    """Of each name its outline, still pickled; None for a checkpoint from before there were any."""
    return None if kept is None else cast("dict[str, bytes]", pickle.loads(kept))


def merged(kept: Sequence[bytes | None]) -> bytes | None:
    """The outlines of all ranks as one: what some rank has saved is there. Raises CheckpointError.

    None where no rank has any.
    """
    found: dict[str, bytes] = {}
    for rank, its in enumerate(kept):
        for name, outline in (read_outlines(its) or {}).items():
            if found.setdefault(name, outline) != outline:
                one, other = pickle.loads(found[name]), pickle.loads(outline)
                found[name] = pickle.dumps(_merged(one, other, f"{EXTRA}.{name}", rank))
    return None if all(its is None for its in kept) else pickle.dumps(found)


def _merged(one: Outline, other: Outline, name: str, rank: int) -> Outline:
    if one[0] != other[0] or (one[0] == "leaf" and one[2] != other[2]):
        raise CheckpointError(
            f"{name} is another kind of thing on rank {rank} than on the ranks before it, and a "
            "checkpoint has one of that name: what differs from rank to rank needs names that "
            "differ"
        )
    if one[0] == "leaf":
        return one
    if one[0] == "list":
        pairs = zip_longest(one[1], other[1])
        return "list", [
            _merged(a, b, f"{name}.{i}", rank) if a and b else a or b
            for i, (a, b) in enumerate(pairs)
        ]
    mine = dict(one[2])
    for key, its in other[2]:
        mine[key] = _merged(mine[key], its, f"{name}.{key}", rank) if key in mine else its
    return "dict", one[1], list(mine.items())


def to_fill(
    outline: Outline, own: Any, metadata: Metadata, parameters: Tensors, device: torch.device
) -> dict[str, Any]:
    """By name, what the values of a checkpoint are read into. Raises CheckpointError.

    A tensor of `own`, which its owner holds now, where it has the shape of the saved one; else a
    new one. None stands for what is no tensor. `device`: the model's.
    """
    if outline[0] != "leaf":
        found: dict[str, Any] = {}
        for key, its in outline[-1] if outline[0] == "dict" else enumerate(outline[1]):
            found |= to_fill(its, _entry(own, key), metadata, parameters, device)
        return found
    _, name, kind, like, on_host = outline
    saved = metadata.state_dict_metadata.get(name)  # None: whoever plans the reading names it
    if not isinstance(saved, TensorStorageMetadata):
        return {name: None}
    shape, dtype = saved.size, saved.properties.dtype
    if isinstance(own, torch.Tensor) and own.shape == shape:
        return {name: own}
    if kind == "tensor":
        return {name: torch.empty(shape, dtype=dtype, device="cpu" if on_host else device)}
    if like not in parameters or parameters[like].shape != shape:
        raise CheckpointError(
            f"{name} is a distributed tensor {list(shape)}, which lies like no parameter of the "
            "model, and its `extra` holds none of that shape to load it into: let it have one "
            "before it is resumed"
        )
    place = "cpu" if on_host else parameters[like].device
    return {name: torch.empty_like(parameters[like].detach(), dtype=dtype, device=place)}


def _entry(own: Any, key: Any) -> Any:
    if isinstance(own, Mapping):
        return own.get(key)
    if isinstance(own, list) and isinstance(key, int) and key < len(own):
        return own[key]
    return None


def filled(outline: Outline, values: Mapping[str, Any]) -> Any:
    """What was saved, of values by their names."""
    if outline[0] == "leaf":
        return values[outline[1]]
    if outline[0] == "list":
        return [filled(its, values) for its in outline[1]]
    found = {} if outline[1] is None else pickle.loads(outline[1])
    for key, its in outline[2]:
        found[key] = filled(its, values)
    return found
