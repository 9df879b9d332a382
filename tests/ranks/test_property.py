"""Whatever the mesh, micro-steps, use of parameters and dtypes: the gradients of one process.

MICS_NUM_CASES sets how many cases are drawn (200 by default).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from harness.cases import Case, run_case
from harness.living import LivingRanks
from harness.models import Sharding
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

NUM_CASES = int(os.environ.get("MICS_NUM_CASES", "200"))
MESHES = {4: ((1, 4), (2, 2), (4, 1)), 6: ((3, 2), (2, 3), (6, 1))}
SHAPES = st.sampled_from([(1,), (2,), (3,), (5,), (4, 4), (3, 2), (5, 3), (2, 1, 3), (17,), (8, 2)])


@st.composite
def shardings(draw: st.DrawFn, world_size: int) -> Sharding:
    replicate, shard = draw(st.sampled_from(MESHES[world_size]))
    factor = draw(st.sampled_from([None, None, 1.0, 2.0, 4.0, 300.0]))
    return Sharding(
        replicate=replicate,
        shard=shard,
        param_dtype=draw(st.sampled_from([None, torch.bfloat16])),
        reduce_dtype=draw(st.sampled_from([None, torch.float32, torch.bfloat16])),
        divide_factor=factor,
        force_sum=factor is not None or draw(st.booleans()),  # gloo has no PREMUL_SUM
        reshard=draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn, world_size: int) -> Case:
    sharding = draw(shardings(world_size))
    units = {
        unit: {name: draw(SHAPES) for name in "abc"[: draw(st.integers(1, 3))]}
        for unit in "uvw"[: draw(st.integers(1, 3))]
    }
    values = st.sampled_from([0, 0, world_size, 2 * world_size])

    def micro_step() -> list[dict[str, float]]:
        """What each rank uses: the units are those of its replica, the parameters its own."""
        uses: list[dict[str, float]] = []
        for _ in range(sharding.replicate):
            run = [unit for unit in units if draw(st.booleans())]
            uses += [
                {f"{unit}.{name}": draw(values) for unit in run for name in units[unit]}
                for _ in range(sharding.shard)
            ]
        return uses

    names = [f"{unit}.{name}" for unit, its in units.items() for name in its]
    return Case(
        sharding=sharding,
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        units=units,
        steps=[
            [micro_step() for _ in range(draw(st.integers(1, 4)))]
            for _ in range(draw(st.integers(1, 2)))
        ],
        entry={name: 4 for name in names if draw(st.booleans())} if draw(st.booleans()) else {},
        backwards=draw(st.sampled_from([1, 1, 2])),
        overlap=draw(st.booleans()),
        bucket_size_bytes=draw(st.sampled_from([1, 60, 25 * 2**20])),
        announced=draw(st.booleans()),
    )


@pytest.fixture(params=[4, 6])
def living(request: pytest.FixtureRequest) -> Iterator[LivingRanks]:
    with LivingRanks(request.param, run_case) as ranks:
        yield ranks


@pytest.mark.timeout(3600)
def test_every_gradient_is_that_of_one_process(living: LivingRanks) -> None:
    share = NUM_CASES * 3 // 4 if living.world_size == 4 else NUM_CASES - NUM_CASES * 3 // 4

    @settings(
        max_examples=share,
        deadline=None,
        derandomize=NUM_CASES == 200,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(living.world_size))
    def every_case(case: Case) -> None:
        living.run(case)

    every_case()
