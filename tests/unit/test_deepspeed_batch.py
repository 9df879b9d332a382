"""DeepSpeed's three batch sizes, of which Hugging Face's files leave some to its Trainer."""

from __future__ import annotations

from typing import Any

import pytest

from mics_dtensor.errors import ConfigError
from mics_dtensor.train.deepspeed_config import convert_config

TOTAL, MICRO, STEPS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


@pytest.mark.parametrize(
    ("given", "world_size", "expected"),
    [
        ({TOTAL: 64, MICRO: 2}, None, (2, 64)),
        ({TOTAL: 64}, 8, (8, 64)),
        ({TOTAL: 64, STEPS: 4}, 8, (2, 64)),
        ({MICRO: 2, STEPS: 4}, 8, (2, 64)),
        ({MICRO: 2}, None, (2, -1)),
        ({TOTAL: 64, MICRO: 2, STEPS: 4}, 8, (2, 64)),
        ({TOTAL: "auto", MICRO: 4, STEPS: 8}, 16, (4, 512)),
        ({TOTAL: "auto", MICRO: 4, STEPS: 1}, None, (4, -1)),
        ({TOTAL: 512, MICRO: "auto", STEPS: 8}, 16, (4, 512)),
        ({TOTAL: 512, MICRO: 4, STEPS: "auto"}, None, (4, 512)),
        # What nobody knows yet is not written.
        ({TOTAL: "auto", MICRO: 4}, 16, (4, None)),
        ({TOTAL: 512, MICRO: "auto", STEPS: "auto"}, 16, (None, 512)),
        ({TOTAL: "auto", MICRO: "auto", STEPS: 8}, 16, (None, None)),
        # Ranks that share a sequence have one batch.
        ({MICRO: 4, STEPS: 8, "sequence_parallel_size": 4}, 16, (4, 128)),
        ({TOTAL: 128, STEPS: 8, "sequence_parallel_size": 4}, 16, (4, 128)),
        ({MICRO: 4, STEPS: 8, "sequence_parallel_size": 4, "data_parallel_size": 2}, None, (4, 64)),
    ],
)
def test_batches(
    given: dict[str, Any], world_size: int | None, expected: tuple[int | None, int | None]
) -> None:
    found = convert_config(given, world_size=world_size).values
    names = ("training.local_batch_size", "training.global_batch_size")
    assert tuple(found.get(name) for name in names) == expected


@pytest.mark.parametrize(
    ("given", "world_size", "said"),
    [
        ({TOTAL: 64}, None, "depends on the number of ranks; give --world-size"),
        ({MICRO: 2, STEPS: 4}, None, "the batch of a step depends on the number of ranks; give"),
        ({MICRO: 4, STEPS: 8, TOTAL: "auto"}, None, "depends on the number of ranks; give --world"),
        (
            {TOTAL: 64, STEPS: 8, MICRO: "auto"},
            None,
            "depends on the number of ranks; give --world",
        ),
        ({TOTAL: 64, MICRO: 2}, 7, "x accumulation x data-parallel ranks, of which there are 7"),
        ({TOTAL: 65, MICRO: 2}, None, "must be micro-batch"),
        ({TOTAL: 0}, None, "must be a whole number, 1 or more"),
        ({TOTAL: "64"}, None, "DeepSpeed takes a number there"),
        ({MICRO: 4, "sequence_parallel_size": 3}, 16, "does not divide --world-size 16"),
        (
            {MICRO: 4, "sequence_parallel_size": 4, "data_parallel_size": 2},
            16,
            "data_parallel_size = 2 x sequence_parallel_size = 4 is not --world-size 16",
        ),
    ],
)
def test_batches_that_cannot_be(given: dict[str, Any], world_size: int | None, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        convert_config(given, world_size=world_size)
    assert said in str(raised.value)


def test_accumulation_without_a_batch_is_not_lost_in_silence() -> None:
    found = convert_config({TOTAL: "auto", MICRO: "auto", STEPS: 8})
    assert "training.global_batch_size = 8 x" in found.differs[f"{STEPS} = 8"]
    assert "training.local_batch_size = 8" in found.differs[f'{MICRO} = "auto"']


def test_ranks_that_share_a_sequence_are_context_parallel() -> None:
    found = convert_config({MICRO: 4, "sequence_parallel_size": 4}, world_size=16)
    assert found.values["parallelism.context_parallel_degree"] == 4
    assert found.values["mics.partition_size"] == 4  # stage 0: a replica is those that share
    assert "Ulysses" in found.differs["sequence_parallel_size = 4"]
    alone = convert_config({MICRO: 4, "data_parallel_size": 4})
    assert "does not read it" in alone.differs["data_parallel_size = 4"]


@pytest.mark.parametrize("name", ["autotp_size", "tp_size"])
def test_ranks_that_share_layers_are_a_reason_to_check_the_batch(name: str) -> None:
    found = convert_config({TOTAL: 512, MICRO: 4, "tensor_parallel": {name: 2}})
    assert found.values["parallelism.tensor_parallel_degree"] == 2
    assert "check it" in found.differs[f"tensor_parallel.{name} = 2"]
    assert not convert_config({MICRO: 4, "tensor_parallel": {name: 1}}).differs


def test_auto_says_which_value_holds_and_where_nothing_is_to_be_written() -> None:
    found = convert_config(
        {
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto"}},
            "gradient_clipping": "auto",
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
            },
        }
    )
    said = {line.partition(" = ")[0]: why for line, why in found.differs.items()}
    assert said["optimizer.params.lr"].endswith("until you write it, optimizer.lr = 0.0008")
    assert said["optimizer.params.betas"].endswith(
        "optimizer.beta1 = 0.9 and optimizer.beta2 = 0.95"
    )
    assert said["gradient_clipping"].endswith("training.max_norm = 1.0")
    assert {line.rpartition(".")[2].partition(" ")[0] for line in found.needless} == {
        "warmup_min_lr",
        "reduce_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
    }
    assert not any("size" in key or "warmup_min_lr" in key for key in said)
