"""One row of the plan worked by hand: speed, MFU, HFU and every kind of memory."""

from dataclasses import replace

import pytest

from mics_dtensor.plan.cluster_file import cluster
from mics_dtensor.plan.overlap import PROFILES
from mics_dtensor.plan.presets.units import Policy
from mics_dtensor.plan.question import Question
from mics_dtensor.plan.search import Row, answer
from mics_dtensor.plan.shape import ModelShape, preset_of

SHAPE = ModelShape(
    num_layers=4, hidden=512, attention_width=512, key_value_width=512, ffn=2048, vocab=1000
)


def row() -> Row:
    """Two GPUs of 1 TFLOP/s, all of it in products, behind links and memory without an end."""
    p4d = cluster("p4d").scaled(inside=1e30, between=1e30)
    its = replace(
        p4d,
        ranks_per_node=2,
        peak_flops_per_s=1e12,
        product_share=1.0,
        product_half_width=0.0,
        memory_bytes_per_s=1e30,
        inside=replace(p4d.inside, hop_latency_s=0.0),
        base_latency_s=0.0,
        overlap_slowdown=0.0,
        unit_s_per_byte=0.0,
        attention=(),
    )
    asked = Question(
        model=preset_of(SHAPE, name="by hand"),
        cluster=its,
        num_nodes=1,
        seq_len=1024,
        global_batch=2,
        policy=Policy(chunked_loss=False),
        overlap=PROFILES["fsdp2"],
        checkpointings=("full",),
    )
    return next(row for row in answer(asked).rows if row.variant.partition_size == 2)


def test_speed_mfu_and_hfu() -> None:
    # A block: 512 x 1536 + 512 x 512 + 3 x 512 x 2048 = 4,194,304 weights, and attention.
    block = 2 * 4_194_304 + 4 * 1024 * 512
    assert block == 10_485_760
    model = 3 * (4 * block + 2 * 512 * 1000)
    hardware = model + 4 * block  # every block's forward once more
    assert (model, hardware) == (128_901_120, 170_844_160)
    found = row()
    assert found.tokens_per_s == pytest.approx(2 * 1e12 / hardware)
    assert found.step_s == pytest.approx(1024 * hardware / 1e12)
    assert found.mfu == pytest.approx(128_901_120 / 170_844_160)
    assert found.hfu == pytest.approx(1.0)


def test_memory() -> None:
    memory = row().memory
    # 4 blocks of 4,194,304 + 2 norms, two tables of 512,000, a norm; half of each on a rank.
    shard = (4 * (4_194_304 + 1024) + 2 * 512_000 + 512) // 2
    assert shard == 8_902_912
    assert memory.parameters == 4 * shard
    assert memory.states == 8 * shard
    # The most is held in the feed-forward of the second block's backward. Gradients: those of the
    # head and of two blocks, fp32.
    block = 4_195_328
    assert memory.gradients == 4 * (512_512 // 2 + 2 * block // 2) == 17_806_336
    # Messages: its parameters and the first block's in bf16, the third's gradients in fp32.
    assert memory.gathered == 2 * block + 2 * block + 4 * block == 33_562_624
    # Activations of 1,024 tokens: the inputs of two blocks; all that it computes again, 25,112
    # bytes a token; the gradients that pass, and that of w2.
    again = 2 * (4 * 512 + 4) + 2 * 3 * 512 + 2 * 512 + 4 * 128 + 4 * 4 + 8 * 2048
    assert again == 25_112
    passing = 2 * 1024 * (2 * 2048 + 512) + 2 * 2048 * 512
    assert memory.activations == 1024 * (2 * 2 * 512 + again) + passing == 39_346_176
    assert memory.buffers == 4 * 1024 * 128 * 4  # rotary tables, fp32
    used = 12 * shard + 17_806_336 + 33_562_624 + 39_346_176 + 2_097_152
    assert memory.reserved == 2_000_000_000 + int(0.03 * used)
    assert memory.total == used + memory.reserved
