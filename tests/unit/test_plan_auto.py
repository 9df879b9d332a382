"""`[mics] partition_size = "auto"` is what `mics plan --as-written` recommends."""

import json
from pathlib import Path

import pytest

from mics_dtensor.cli import main
from mics_dtensor.errors import ConfigError
from mics_dtensor.train.config import RunConfig
from mics_dtensor.train.degrees import resolve
from mics_dtensor.train.load import load
from mics_dtensor.train.planning import refuse_other_device

CONFIGS = Path(__file__).parents[2] / "train_configs"
FILE = str(CONFIGS / "llama3_8b_2x8.toml")
LARGE = str(CONFIGS / "llama3_70b_16x8.toml")
CLUSTER = """
schema = 1
[cluster]
name = "here"
device = "{device}"
origin = "{origin}"
ranks_per_node = {ranks_per_node}
peak_flops_per_s = 3e14
product_share = 0.5
memory_bytes = 80e9
memory_bytes_per_s = 1e12
[link.intra_node]
bandwidth_bytes_per_s = 2e11
latency_s = 1e-6
[link.inter_node]
bandwidth_bytes_per_s = 5e10
latency_s = 1e-5
"""
AUTO = ("--config-file", FILE, "--mics.partition_size", "auto", "--mics.cluster", "p4de")
BATCH = ("--training.global_batch_size", "64")


def measured_on(device: str, *, origin: str = "measured", ranks_per_node: int = 8) -> str:
    """The text of a cluster file."""
    return CLUSTER.format(device=device, origin=origin, ranks_per_node=ranks_per_node)


def test_it_is_the_planners_answer(capsys: pytest.CaptureFixture[str]) -> None:
    run, layout = resolve(load([*AUTO, *BATCH]), world_size=32, local_world_size=8)
    assert main(["plan", *AUTO, *BATCH, "--nodes", "4", "--as-written", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["recommendation"]["variant"]
    assert layout.partition_size == best["partition_size"] == run.config.mics.partition_size
    assert run.origin["mics.partition_size"] == "the planner"
    assert f"partition_size = {layout.partition_size} " in run.planned[0]
    again, _ = resolve(run, world_size=32, local_world_size=8)  # as the program does on each rank
    assert again.config == run.config


def test_plain_fsdp_is_no_answer_for_a_run_in_two_stages(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On 64 nodes of p4d plain FSDP is faster: that is said, and not run under its number."""
    asked = ("--config-file", LARGE, "--mics.partition_size", "auto", "--mics.cluster", "p4d")
    run, layout = resolve(load(asked), world_size=512, local_world_size=8)
    assert main(["plan", *asked, "--nodes", "64", "--as-written", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    best, plain = told["recommendation"], told["rows"][-1]
    assert plain["variant"]["plain"]
    assert plain["time"]["step_s"] < best["step_s"]
    assert not best["variant"]["plain"]
    assert best["variant"]["hierarchical"] is run.config.mics.hierarchical is True
    assert best["variant"]["partition_size"] == layout.partition_size
    assert best["margin"] >= 0
    assert str(layout.partition_size) not in best["ties"]
    assert plain["why"].startswith("tie: another run, ")
    words = "\n".join(run.planned)
    assert f"{best['step_s']:.3g} s a step" in words
    assert "plain FSDP (hierarchical = false) would be another run, and take" in words
    assert words.count("plain FSDP (hierarchical = false)") == 2  # there, and among the ties


def test_a_run_that_may_be_plain_fsdp_is_told_so() -> None:
    asked = ("--config-file", LARGE, "--mics.partition_size", "auto", "--mics.cluster", "dgx-h100")
    flat = load([*asked, "--mics.hierarchical", "false"])
    run, layout = resolve(flat, world_size=128, local_world_size=8)
    assert layout.partition_size == 128
    assert "partition_size = 128 (plain FSDP (hierarchical = false), 4 micro-" in run.planned[0]
    assert "plain FSDP" not in "".join(run.planned[1:])  # no tie of itself


def test_explain_says_what_was_planned(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", FILE, "--world-size", "32", *AUTO[2:], *BATCH]
    assert main(arguments) == 0
    assert "planned on p4de: take partition_size = " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "world", "message"),
    [
        (("--mics.ranks_per_node", "4"), 16, "p4de (p4de) has 8 ranks on a node, this run has 4"),
        (("--mics.cluster", "p44d"), 16, "choose from"),
        (("--optimizer.name", "DistMuon"), 16, "not planned yet"),
        (("--parallelism.context_parallel_degree", "2"), 16, "data and tensor parallelism alone"),
        (("--parallelism.tensor_parallel_degree", "16"), 16, "must divide n_kv_heads (8)"),
        (("--model.flavor", "405B"), 16, "does not fit"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    arguments: tuple[str, ...], world: int, message: str
) -> None:
    run = load([*AUTO, *BATCH, *arguments])
    with pytest.raises(ConfigError) as refused:
        resolve(run, world_size=world, local_world_size=8)
    assert message in str(refused.value)
    assert '"auto"' in str(refused.value)


def test_a_cluster_measured_on_other_devices_is_another_cluster(tmp_path: Path) -> None:
    def of(device: str, origin: str) -> RunConfig:
        file = tmp_path / "cluster.toml"
        file.write_text(measured_on(device, origin=origin))
        return load([*AUTO[:4], "--mics.cluster", str(file)]).config

    a100, h100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"
    for here in (h100, "NVIDIA A100-SXM4-40GB", "cpu"):
        with pytest.raises(ConfigError) as refused:
            refuse_other_device(of(a100, "measured"), here)
        assert f"measured on {a100}, and this run is on {here}, which is" in str(refused.value)
    refuse_other_device(of(a100, "measured"), a100)
    refuse_other_device(of("A100-80GB", "measured"), a100)  # as nccl-tests' reports are read
    refuse_other_device(of("what I like to call it", "user"), h100)
    refuse_other_device(load([*AUTO]).config, h100)  # a preset
