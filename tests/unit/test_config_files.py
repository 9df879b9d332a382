"""Every file of train_configs, and torchtitan 0.2.2's where they lie."""

from pathlib import Path

import pytest

from mics_dtensor.errors import ConfigError
from mics_dtensor.train.config import config_keys
from mics_dtensor.train.degrees import num_micro_steps, resolve
from mics_dtensor.train.key import value_at
from mics_dtensor.train.load import load

ROOT = Path(__file__).parents[2]
OURS = sorted((ROOT / "train_configs").glob("*.toml"))
WORLDS = {"debug": 4, "llama3_8b_2x8": 16, "llama3_70b_16x8": 128, "llama3_100b_64x8": 512}
RELEASED = ROOT.parent / "shared" / "torchtitan_v0_2_configs"
needs_released = pytest.mark.skipif(
    not RELEASED.is_dir(), reason="torchtitan 0.2.2's files are not beside this repository"
)
LOADS = [
    "deepseek_v3_16b",
    "gpt_oss_debug_model",
    "llama3_8b",
    "llama3_debug_model",
    "qwen3_0.6b",
    "qwen3_moe_debug",
]


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_our_files_are_runs_of_the_world_in_their_name(path: Path) -> None:
    run, layout = resolve(load(["--config-file", str(path)]), world_size=WORLDS[path.stem])
    assert run.inert == ()
    assert layout.num_replicas > 1
    assert num_micro_steps(run) > 1


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_our_files_state_only_what_differs_from_the_defaults(path: Path) -> None:
    run = load(["--config-file", str(path)])
    # [model] name and flavor say what the run is, default or not.
    repeated = [
        name
        for name, key in config_keys().items()
        if run.origin[name] != "default"
        and value_at(run.config, name) == key.default
        and name not in ("model.name", "model.flavor")
    ]
    assert repeated == []


@needs_released
@pytest.mark.parametrize("name", LOADS)
def test_files_of_torchtitan_0_2_load(name: str) -> None:
    run = load(["--config-file", str(RELEASED / f"{name}.toml")])
    assert run.config.training.disable_cuda_graphs
    assert any("label" in line for line in run.inert)


@needs_released
def test_the_405b_file_is_refused_for_its_float8_gather() -> None:
    with pytest.raises(ConfigError) as refused:
        load(["--config-file", str(RELEASED / "llama3_405b.toml")])
    said = str(refused.value)
    assert "enable_fsdp_float8_all_gather" in said
    assert "precompute_float8_dynamic_scale_for_fsdp" in said
    assert "rowwise" in said
    # Only what is written: that recipe_name is not given would be a second way to say the same.
    assert "recipe_name = none" not in said


@needs_released
def test_the_405b_file_loads_with_what_the_refusal_says() -> None:
    load(
        [
            f"--config-file={RELEASED / 'llama3_405b.toml'}",
            "--quantize.linear.float8.no-enable_fsdp_float8_all_gather",
            "--quantize.linear.float8.no-precompute_float8_dynamic_scale_for_fsdp",
            "--quantize.linear.float8.recipe_name=rowwise",
        ]
    )
