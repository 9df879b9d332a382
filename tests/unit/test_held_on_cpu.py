"""What an asynchronous save holds: a copy, in the memory of the one before where that fits."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import torch

from mics_dtensor.checkpoint.states import held_on_cpu
from mics_dtensor.upstream import Piece


def a_state(scale: float = 1.0) -> dict[str, Any]:
    weight = torch.arange(6.0).view(2, 3) * scale
    return {
        "weight": torch.nn.Parameter(weight),
        "optimizer": {"state": [(weight * 2, {"step": torch.tensor(scale)})], "lr": scale},
        "piece": Piece.of(torch.arange(3.0) * scale, (2, 3), (((0, 0), (1, 3)),)),
        "bytes": BytesIO(b"position"),
    }


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    moment, more = state["optimizer"]["state"][0]
    return [state["weight"], moment, more["step"], state["piece"].flat]


def test_nothing_is_shared_with_what_is_trained() -> None:
    state = a_state()
    held = held_on_cpu(state)
    for mine, its in zip(tensors_of(held), tensors_of(state), strict=True):
        assert torch.equal(mine, its)
        assert mine.data_ptr() != its.data_ptr()
        assert not mine.requires_grad
    assert held["bytes"] is not state["bytes"]
    assert held["bytes"].getvalue() == b"position"
    assert isinstance(held["optimizer"]["state"][0], tuple)
    assert held["piece"].boxes == state["piece"].boxes


def test_the_memory_of_the_last_copy_is_written_over() -> None:
    first = held_on_cpu(a_state())
    places = [tensor.data_ptr() for tensor in tensors_of(first)]
    state = a_state(3.0)
    second = held_on_cpu(state, into=first)
    for mine, its, place in zip(tensors_of(second), tensors_of(state), places, strict=True):
        assert torch.equal(mine, its)
        assert mine.data_ptr() == place
    assert second["optimizer"]["lr"] == 3.0


def test_what_does_not_fit_is_new() -> None:
    first = held_on_cpu(a_state())
    other = a_state(5.0)
    other["weight"] = torch.ones(3, 2)
    other["optimizer"] = {"state": [(torch.ones(6, dtype=torch.float64), {"step": 7})], "lr": None}
    other["piece"] = Piece.of(torch.ones(3), (2, 3), (((1, 0), (1, 3)),))
    other["added"] = [torch.ones(2)]
    second = held_on_cpu(other, into=first)
    assert torch.equal(second["weight"], other["weight"])
    assert second["optimizer"]["state"][0][0].dtype == torch.float64
    assert second["optimizer"]["state"][0][1] == {"step": 7}
    assert second["piece"].boxes == other["piece"].boxes
    assert torch.equal(second["added"][0], torch.ones(2))
    assert torch.equal(first["piece"].flat, torch.arange(3.0))  # was not written into
