"""What operators move, which kernel is attention, and what a compiled run saves: by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
from harness.questions import question

from mics_dtensor.layout import GroupShape
from mics_dtensor.plan.cluster import presets
from mics_dtensor.plan.cluster_file import cluster
from mics_dtensor.plan.compute import Work, unit_compute_s
from mics_dtensor.plan.cost import added_s
from mics_dtensor.plan.operators import COMPILED, EAGER, AttentionRate, Operators
from mics_dtensor.plan.question import Variant
from mics_dtensor.plan.search import answer
from mics_dtensor.plan.shape import Checkpointing, ModelShape
from mics_dtensor.plan.unit import Unit
from mics_dtensor.train.load import load
from mics_dtensor.train.planning import operators_of
from mics_dtensor.train.planning import question as question_of

FILE = Path(__file__).parents[2] / "train_configs" / "llama3_8b_2x8.toml"
SHAPE = ModelShape(
    num_layers=4,
    hidden=512,
    attention_width=512,
    key_value_width=256,
    ffn=2048,
    vocab=1000,
    head_dim=64,
)
BLOCK = Unit(
    name="layers.*",
    shapes=((1024, 512), (512, 512), (2048, 512), (2048, 512), (512, 2048)),
    shard=GroupShape(1, 8, 1),
    replicate=GroupShape(1, 1, 8),
    gather_itemsize=2,
)


def work(how: Checkpointing = "none", operators: Operators = EAGER) -> Work:
    return Work(shape=SHAPE, seq_len=1024, micro_batch=1, checkpointing=how, operators=operators)


def test_f6_by_hand() -> None:
    """Two norms and two sums of 512, queries and keys of 768, the feed-forward's 2,048."""
    assert SHAPE.block_bytes() == 2 * (4 + 6) * 512 + 20 * 768 + 10 * 2048
    assert SHAPE.block_bytes(COMPILED) == 2 * (2 + 6) * 512 + 4 * 768 + 6 * 2048
    normed = replace(SHAPE, head_norms=True)
    assert normed.block_bytes() - SHAPE.block_bytes() == 4 * 768
    plain = replace(SHAPE, gated=False)
    assert SHAPE.block_bytes() - plain.block_bytes() == (10 - 4) * 2048
    scores = Operators(score_bytes=21)  # of 8 heads, each with every token
    assert SHAPE.block_bytes(scores, seq_len=1024) - SHAPE.block_bytes() == 21 * 8 * 1024


def test_f7_by_hand() -> None:
    """Eager: written 2, cast 6, softmax 8, gradient 4, cast 6. Compiled: 2, read twice, 4."""
    assert SHAPE.head_bytes() == (2 + 6 + 8 + 4 + 6) * 1000
    assert SHAPE.head_bytes(COMPILED) == (2 + 2 * 2 + 4) * 1000


def test_t10_by_hand() -> None:
    """4 x 1,024 x 512 FLOPs a token at half the peak; the backward takes three times as long."""
    rate = AttentionRate(kernel="flash-2", share=0.5, backward=3.0)
    its = replace(
        cluster("p4d"),
        peak_flops_per_s=1e12,
        product_share=1.0,
        product_half_width=0.0,
        memory_bytes_per_s=1e30,
        attention=(rate,),
    )
    products = 1024 * 2 * (512 * 1024 + 512 * 512 + 3 * 512 * 2048) / 1e12
    attention = 1024 * 4 * 1024 * 512 / 5e11
    forward, backward = products + attention, 2 * products + 3 * attention
    assert unit_compute_s(BLOCK, work(), its) == pytest.approx((forward, backward))
    full = unit_compute_s(BLOCK, work("full"), its)
    assert full == pytest.approx((forward, backward + forward))
    every_second = unit_compute_s(BLOCK, work("2"), its)
    assert every_second == pytest.approx((forward, backward + forward / 2))
    by_operator = unit_compute_s(BLOCK, work("op"), its)  # keeps what attention returned
    again = 1024 * 2 * 512 * (512 + 2048) / 1e12
    assert by_operator == pytest.approx((forward, backward + again))


def test_t2_products_of_blocks_alone_are_faster_in_float8() -> None:
    """Twice as fast: half their seconds are gone, those of attention and of the head are not."""
    its = replace(cluster("p5"), memory_bytes_per_s=1e30)
    head = replace(BLOCK, name="norm, lm_head")
    gained = replace(EAGER, product_gain=2.0)
    per_s = its.peak_flops_per_s * its.share_of_products(512)
    products = 1024 * 2 * (512 * 1024 + 512 * 512 + 3 * 512 * 2048) / per_s
    for unit, gone in ((BLOCK, (products / 2, products)), (head, (0.0, 0.0))):
        bf16, float8 = (unit_compute_s(unit, work(operators=o), its) for o in (EAGER, gained))
        less = tuple(a - b for a, b in zip(bf16, float8, strict=True))
        assert less == pytest.approx(gone)


def test_t10_a_kernel_without_a_rate_is_as_fast_as_products() -> None:
    p4d = cluster("p4d")
    for its, kernel in ((replace(p4d, attention=()), "flash-2"), (p4d, "as products")):
        rate = its.attention_rate(kernel, 4096)  # type: ignore[arg-type]
        assert (rate.share, rate.backward) == (its.share_of_products(4096), 2.0)


@pytest.mark.parametrize("name", presets()["cluster"])
def test_t10_the_kernel_of_2023_is_the_faster_one(name: str) -> None:
    old, new = (cluster(name).attention_rate(kernel, 4096) for kernel in ("flash-1", "flash-2"))
    if cluster(name).gpu == "V100-32GB":  # which it does not run on
        assert replace(new, kernel="flash-1") == old
    else:
        assert new.share > old.share
        assert new.backward < old.backward


@pytest.mark.parametrize("name", presets()["cluster"])
def test_c10_the_presets_copy_what_was_fitted(name: str) -> None:
    """Of a block that is gathered twice and reduced in fp32: 2, 2 and 4 bytes an element."""
    its = cluster(name)
    passes = presets()["copies"]["passes"]
    for is_fsdp2 in (True, False):
        forward, backward = added_s(BLOCK, its, is_fsdp2=is_fsdp2)
        copied = passes * BLOCK.numel / its.memory_bytes_per_s
        assert forward.copies_s == pytest.approx(2 * copied)
        assert backward.copies_s == pytest.approx((2 + 4) * copied)
        assert forward.host_s == 0.0
    slow = replace(its, unit_s=1.0)
    assert added_s(BLOCK, slow)[0].host_s > added_s(BLOCK, slow, is_fsdp2=False)[0].host_s == 0.0


@pytest.mark.parametrize("how", ["none", "op", "2", "full"])
def test_compiled_blocks_are_never_slower(how: Checkpointing) -> None:
    for name in presets()["cluster"]:
        eager, compiled = (
            unit_compute_s(BLOCK, work(how, operators), cluster(name))
            for operators in (EAGER, COMPILED)
        )
        assert compiled[0] < eager[0]
        assert compiled[1] < eager[1]


def test_a_compiled_run_is_planned_as_one() -> None:
    """`[compile] enable = true`: its operators, a shorter step, and a note on memory."""
    plain = load(["--config-file", str(FILE)]).config
    on = ["--config-file", str(FILE), "--compile.enable", "true"]
    assert operators_of(plain) == EAGER
    assert operators_of(load(on).config) == COMPILED
    blocks = operators_of(load([*on, "--compile.components", "model"]).config)
    assert blocks == replace(COMPILED, loss_bytes=EAGER.loss_bytes)
    loss = operators_of(load([*on, "--compile.components", "loss"]).config)
    assert loss == replace(EAGER, loss_bytes=COMPILED.loss_bytes)
    asked = [question_of(config, cluster("p4de"), 2) for config in (plain, load(on).config)]
    assert [each.operators for each in asked] == [EAGER, COMPILED]
    steps = [answer(each).best.step_s for each in asked]
    assert steps[1] < steps[0]
    assert [any("compile.enable" in note for note in each.notes) for each in asked] == [False, True]


def test_more_bytes_never_make_a_shorter_step() -> None:
    def step_s(operators: Operators) -> float:
        only = question(micro_batches=(2,), checkpointings=("full",), operators=operators)
        rows = answer(only).rows
        wanted = Variant(partition_size=8, micro_batch=2, checkpointing="full", hierarchical=False)
        (row,) = [row for row in rows if replace(row.variant, hierarchical=False) == wanted]
        return row.step_s

    fields = ("norm_bytes", "sum_bytes", "rotation_bytes", "gate_bytes", "loss_bytes")
    for name in (*fields, "score_bytes"):
        more = replace(EAGER, **{name: getattr(EAGER, name) + 4})
        assert step_s(more) > step_s(EAGER)
    assert step_s(COMPILED) < step_s(EAGER)
