"""The figures of the documentation are what the code draws, and say what the code counts."""

import re
from collections import Counter

import pytest

from mics_dtensor.plan.options import Options
from mics_dtensor.plan.traffic import step_traffic
from scripts.figures import stages, timeline, traffic
from scripts.figures.__main__ import FIGURES, FOLDER, LAYOUT

README = (FOLDER.parents[1] / "README.md").read_text()


@pytest.mark.parametrize("name", FIGURES)
def test_the_file_is_current(name: str) -> None:
    assert (FOLDER / f"{name}.svg").read_text() == str(FIGURES[name]()), "python -m scripts.figures"


def test_no_file_is_left_over() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == set(FIGURES)


def test_two_stages_bring_every_shard_to_every_rank() -> None:
    before, staged, after = stages.states(LAYOUT)
    everything = frozenset(range(LAYOUT.partition_size))
    assert frozenset().union(*before.values()) == everything
    assert all(len(held) == LAYOUT.nodes_per_partition_group for held in staged.values())
    assert all(held == everything for held in after.values())


def test_the_timeline_has_a_box_for_every_call_of_a_rank() -> None:
    drawn = Counter(event.collective for event in timeline.events(LAYOUT) if event.collective)
    options = Options(num_micro_steps=timeline.NUM_MICRO_STEPS)
    counted = Counter[str]()
    for stage in step_traffic(timeline.units(LAYOUT), options).stages:
        counted[stage.collective] += stage.calls // stage.blocks  # one launch on NCCL
    assert drawn == counted


def test_the_step_is_that_of_the_table_in_the_readme() -> None:
    said = re.findall(r"([\d.]+ TB)", str(traffic.draw_step()))
    for total in ("8.16 TB", "7.71 TB", "0.96 TB"):
        assert total in said
        assert total in README


def test_columns_of_a_step_sum_to_its_bytes() -> None:
    sent = traffic.sent()
    for its in (sent.traffic, sent.plain_hsdp, sent.plain_fsdp):
        columns = traffic.by_micro_step(its)
        assert len(columns) == its.num_micro_steps + 1
        assert sum(columns) == its.inter_node_bytes
    assert traffic.by_micro_step(sent.traffic)[:-1] == [0] * 8
