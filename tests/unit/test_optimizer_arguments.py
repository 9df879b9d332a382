"""ReplicaShardedOptimizer refuses what it cannot cut, in a sentence, before anything is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mics_dtensor import ReplicaShardedOptimizer
from mics_dtensor.errors import ConfigError
from mics_dtensor.optimizer_arguments import groups_of

PLAIN = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("model", "optimizer_cls", "options", "words"),
    [
        (
            PLAIN,
            torch.optim.AdamW,
            {},
            "no FSDP units, so no states .* call .*fully_shard",
        ),
        (PLAIN.parameters(), torch.optim.AdamW, {}, "a Parameter is no model: give the model"),
        (PLAIN, torch.optim.AdamW(PLAIN.parameters()), {}, "an instance of AdamW: give a"),
        (PLAIN, nn.Linear, {}, "optimizer_cls is Linear: give a class"),
        (PLAIN, torch.optim.LBFGS, {}, "LBFGS looks at more than one element at a time, so"),
        (PLAIN, torch.optim.AdamW, {"elementwise": False}, "as elementwise=False says"),
        (PLAIN, torch.optim.RMSprop, {}, "RMSprop is not known .* or say elementwise=True"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    model: Any, optimizer_cls: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        ReplicaShardedOptimizer(model, optimizer_cls, **options)


def test_groups_are_those_that_torch_takes() -> None:
    weight, bias = PLAIN.weight, PLAIN.bias
    assert groups_of([], [], [weight, bias]) == [{"params": [weight, bias]}]
    assert groups_of([], [], iter([{"params": weight, "lr": 1.0}])) == [
        {"params": [weight], "lr": 1.0}
    ]
    with pytest.raises(ConfigError, match="param_groups holds a str: give dicts"):
        groups_of([], [], ["weight"])
    for nothing in ([], [{"params": []}]):
        with pytest.raises(ConfigError, match="there is no parameter to train"):
            groups_of([], [], nothing)
