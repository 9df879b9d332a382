"""Laws of resolve: degrees are numbers whose product is the world, or refused with the way out."""

from pathlib import Path
from typing import Any

import pytest

from mics_dtensor.errors import ConfigError, MicsError
from mics_dtensor.layout import Layout
from mics_dtensor.train.degrees import num_micro_steps, resolve
from mics_dtensor.train.load import Run, load


def resolved(tmp_path: Path, text: str, world: int, **known: Any) -> tuple[Run, Layout]:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return resolve(load(["--config-file", str(path)]), world_size=world, **known)


def degrees(run: Run) -> tuple[int, int]:
    parallelism = run.config.parallelism
    return parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree


@pytest.mark.parametrize(
    ("text", "replicate", "shard", "partition_size"),
    [
        ("", 1, 16, 16),
        ("[parallelism]\ndata_parallel_replicate_degree = 2\n", 2, 8, 8),
        ("[parallelism]\ndata_parallel_shard_degree = 16\n", 1, 16, 16),
        ("[parallelism]\ntensor_parallel_degree = 2\n", 1, 8, 8),
        ("[parallelism]\ncontext_parallel_degree = 2\n", 1, 8, 16),
        ("[mics]\npartition_size = 4\n", 4, 4, 4),
        ("[mics]\npartition_size = 'node'\n", 2, 8, 8),
        ("[mics]\npartition_size = 'node'\nranks_per_node = 4\n", 4, 4, 4),
        ("[mics]\npartition_size = 16\n", 1, 16, 16),
        ("[mics]\npartition_size = 4\n[parallelism]\ncontext_parallel_degree = 2\n", 4, 2, 4),
        ("[mics]\npartition_size = 'node'\n[parallelism]\ntensor_parallel_degree = 2\n", 2, 4, 4),
        (
            "[mics]\npartition_size = 4\n[parallelism]\ndata_parallel_replicate_degree = -1\n"
            "data_parallel_shard_degree = 4\n",
            *(4, 4, 4),
        ),
    ],
)
def test_degrees_are_filled(
    tmp_path: Path, text: str, replicate: int, shard: int, partition_size: int
) -> None:
    run, layout = resolved(tmp_path, text, 16, local_world_size=8)
    assert degrees(run) == (replicate, shard)
    assert layout.partition_size == partition_size
    assert layout.num_replicas == replicate


def test_where_a_degree_came_from_is_told(tmp_path: Path) -> None:
    run, _ = resolved(tmp_path, "[mics]\npartition_size = 4\n", 16, local_world_size=8)
    filled = run.origin["parallelism.data_parallel_replicate_degree"]
    assert filled == "[mics] partition_size"
    run, _ = resolved(tmp_path, "", 16, local_world_size=8)
    assert run.origin["parallelism.data_parallel_shard_degree"] == "the number of ranks"


def test_a_pipeline_stage_has_a_layout_of_its_own(tmp_path: Path) -> None:
    text = "[mics]\npartition_size = 4\n[parallelism]\npipeline_parallel_degree = 2\n"
    run, layout = resolved(tmp_path, text, 16, local_world_size=8)
    assert layout.topology.world_size == 8
    assert degrees(run) == (2, 4)
    run, layout = resolved(tmp_path, text, 8, local_world_size=8)
    assert (layout.topology.num_nodes, layout.topology.ranks_per_node) == (1, 4)


@pytest.mark.parametrize(
    ("text", "world", "names"),
    [
        ("[mics]\npartition_size = 3\n", 16, ["partition_size 3", "16", "[1, 2, 4, 8, 16]"]),
        ("[mics]\npartition_size = 12\n", 24, ["partition_size 12", "unevenly"]),
        ("", 12, ["8", "12"]),
        ("[parallelism]\ndata_parallel_shard_degree = 4\n", 16, ["shard_degree 4", "16", "-1"]),
        ("[parallelism]\ndata_parallel_replicate_degree = 3\n", 16, ["replicate_degree 3", "[1,"]),
        ("[parallelism]\ndata_parallel_replicate_degree = -1\n", 16, ["partition_size"]),
        ("[parallelism]\ntensor_parallel_degree = 3\n", 16, ["3", "16"]),
        ("[parallelism]\nexpert_parallel_degree = 3\n", 16, ["expert_parallel_degree 3", "16"]),
        (
            "[parallelism]\ndata_parallel_replicate_degree = 1\n[mics]\npartition_size = 4\n",
            16,
            ["data_parallel_replicate_degree = 1", "run.toml", "makes it 4", "delete the line"],
        ),
        (
            "[parallelism]\ncontext_parallel_degree = 8\n[mics]\npartition_size = 4\n",
            16,
            ["partition_size = 4", "context_parallel_degree 8"],
        ),
        ("[training]\nglobal_batch_size = 100\n", 16, ["100", "8 x 16 = 128"]),
        ("[parallelism]\npipeline_parallel_degree = 2\n", 24, ["12", "8", "unevenly"]),
    ],
)
def test_degrees_that_cannot_be_are_refused(
    tmp_path: Path, text: str, world: int, names: list[str]
) -> None:
    with pytest.raises(MicsError) as refused:
        resolved(tmp_path, text, world, local_world_size=8)
    assert all(name in str(refused.value) for name in names), refused.value


def test_the_nodes_are_said_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ranks_per_node"):
        resolved(tmp_path, "", 4)
    hosts = ["a", "a", "b", "b"]
    assert resolved(tmp_path, "", 4, hosts=hosts)[1].topology.ranks_per_node == 2
    with pytest.raises(ConfigError, match="launcher says 4"):
        resolved(tmp_path, "", 4, local_world_size=4, hosts=hosts)
    said = "[mics]\nranks_per_node = 2\n"
    assert resolved(tmp_path, said, 4, local_world_size=4)[1].topology.ranks_per_node == 2


def test_micro_steps_follow_from_the_batch(tmp_path: Path) -> None:
    text = "[training]\nlocal_batch_size = 2\nglobal_batch_size = 64\n"
    assert num_micro_steps(resolved(tmp_path, text, 8, local_world_size=8)[0]) == 4
    assert num_micro_steps(resolved(tmp_path, "", 8, local_world_size=8)[0]) == 1
