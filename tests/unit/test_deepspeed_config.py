"""DeepSpeed's JSON: every key mapped, needless, or named with the reason; and what it means."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mics_dtensor.cli import main
from mics_dtensor.errors import ConfigError
from mics_dtensor.train.config import config_keys
from mics_dtensor.train.deepspeed_config import convert_config, read_deepspeed, row_of, rows
from mics_dtensor.train.deepspeed_mapping import MAPPINGS
from mics_dtensor.train.load import load

MICS = {
    "train_batch_size": 512,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "mics_shard_size": 8,
        "mics_hierarchical_params_gather": True,
        "overlap_comm": True,
        "zero_quantized_weights": True,
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-5, "betas": [0.9, 0.95], "weight_decay": 0.1},
    },
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"warmup_num_steps": 100, "total_num_steps": 1000, "warmup_type": "linear"},
    },
    "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": True},
    "steps_per_print": 20,
}


def test_a_mics_run() -> None:
    assert convert_config(MICS).values == {
        "training.local_batch_size": 4,
        "training.global_batch_size": 512,
        "training.max_norm": 1.0,
        "training.mixed_precision_param": "bfloat16",
        "training.steps": 1000,
        "optimizer.name": "AdamW",
        "optimizer.lr": 3e-5,
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.95,
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.1,
        "lr_scheduler.warmup_steps": 100,
        "lr_scheduler.total_steps": 1000,
        "lr_scheduler.decay_type": "cosine",
        "lr_scheduler.min_lr_factor": 1e-4,
        "mics.partition_size": 8,
        "mics.hierarchical": True,
        "activation_checkpoint.mode": "full",
        "metrics.log_freq": 20,
        "checkpoint.last_save_model_only": False,
    }


def values(**given: Any) -> dict[str, Any]:
    return dict(convert_config({"train_micro_batch_size_per_gpu": 1, **given}).values)


def test_where_the_file_says_nothing_deepspeeds_defaults_hold() -> None:
    assert values() == {
        "training.local_batch_size": 1,
        "training.global_batch_size": -1,
        "training.max_norm": math.inf,  # DeepSpeed does not clip
        "training.mixed_precision_param": "float32",
        "lr_scheduler.warmup_steps": 0,
        "lr_scheduler.decay_ratio": 0.0,
        "mics.partition_size": 1,  # stage 0
        "checkpoint.last_save_model_only": False,  # every checkpoint of DeepSpeed is whole
    }
    adam = values(optimizer={"type": "Adam"})
    assert adam["optimizer.name"] == "AdamW"  # adam_w_mode is true unless it is said
    assert (adam["optimizer.lr"], adam["optimizer.beta2"]) == (1e-3, 0.999)
    coupled = {"type": "Adam", "params": {"adam_w_mode": False}}
    assert values(optimizer=coupled)["optimizer.name"] == "Adam"


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({"stage": 0}, {"partition_size": 1}),
        ({"stage": 1}, {"partition_size": 1, "optimizer_over_replicas": True}),
        ({"stage": 2}, {"partition_size": 1, "optimizer_over_replicas": True}),
        ({"stage": 3}, {}),
        ({"stage": 3, "mics_shard_size": -1}, {}),
        ({"stage": 3, "mics_shard_size": 16}, {"partition_size": 16}),
        (
            {"stage": 3, "mics_shard_size": 16, "mics_hierarchical_params_gather": False},
            {"partition_size": 16, "hierarchical": False},
        ),
        (
            {"stage": 3, "zero_hpz_partition_size": 8},
            {"node_local_backward": True, "ranks_per_node": 8},
        ),
    ],
)
def test_stages_and_groups(zero: dict[str, Any], expected: dict[str, Any]) -> None:
    found = values(zero_optimization=zero)
    assert {k.removeprefix("mics."): v for k, v in found.items() if k[:5] == "mics."} == expected


@pytest.mark.parametrize(
    ("given", "world_size", "said"),
    [
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, None, "are both true"),
        ({"zero_optimization": {"stage": 4}}, None, "DeepSpeed has 0, 1, 2 and 3"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, None, "without total_num_steps"),
        ({"optimizer": {"params": {"lr": 1}}}, None, "without optimizer.type"),
    ],
)
def test_what_deepspeed_refuses_is_refused(
    given: dict[str, Any], world_size: int | None, said: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        convert_config(given, world_size=world_size)
    assert said in str(raised.value)


def test_what_is_not_the_same_is_said() -> None:
    found = convert_config(
        {
            "fp16": {"enabled": True, "loss_scale": 0, "fp16_master_weights_and_grads": True},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/local"},
                "zero_quantized_gradients": True,
            },
            "optimizer": {"type": "Lion", "params": {"lr": 1e-4}},
            "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}},
            "fp61": {"enabled": True},
            "gradient_clipping": "auto",
        }
    )
    told = {line.partition(" = ")[0] for line in found.differs}
    assert told == {
        "fp16.enabled",
        "fp16.fp16_master_weights_and_grads",
        "zero_optimization.stage",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_optimizer.nvme_path",
        "zero_optimization.zero_quantized_gradients",
        "optimizer.type",
        "optimizer.params.lr",
        "scheduler.type",
        "scheduler.params.cycle_min_lr",
        "fp61.enabled",
        "gradient_clipping",
    }
    assert "did you mean fp16.enabled?" in found.differs["fp61.enabled = true"]
    assert "training.max_norm" not in found.values  # left to whoever fills "auto"
    assert {line.partition(" = ")[0] for line in found.needless} == {"fp16.loss_scale"}


def test_offload() -> None:
    found = convert_config({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
    assert found.values["training.enable_cpu_offload"] is True
    assert not found.differs


KEYS = [key for key in rows() if not key.endswith(".*")]


@given(
    st.dictionaries(
        st.sampled_from([*KEYS, "no.such.key"]), st.sampled_from([True, False, 3, "auto"])
    )
)
def test_no_key_is_dropped_in_silence(flat: dict[str, Any]) -> None:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *tables, last = key.split(".")
        at = nested
        for table in tables:
            at = at.setdefault(table, {})
        at[last] = value
    try:
        found = convert_config(nested, world_size=1)
    except ConfigError:
        return  # said outright
    told = {line.partition(" = ")[0] for line in (*found.differs, *found.needless)}
    for key, value in flat.items():
        row = row_of(key)
        assert key in told or (row is not None and "by" in row and value != "auto")


def test_each_row_says_one_thing() -> None:
    for key, row in rows().items():
        assert set(row) <= {"by", "ours", "auto", "same", "needs", "lost"}, key
        assert sum(name in row for name in ("by", "needs", "lost")) == 1, key
        assert row.get("by", "batch") in MAPPINGS
        assert set(row.get("ours", ())) <= set(config_keys()), key
        assert all(row.get(name, "-") for name in ("needs", "lost")), key


def test_every_mapped_key_is_read_by_its_function() -> None:
    source = "".join(
        (Path(__file__).parents[2] / "src/mics_dtensor/train" / name).read_text()
        for name in ("deepspeed_batch.py", "deepspeed_mapping.py", "deepspeed_optimizer.py")
    )
    for key, row in rows().items():
        if "by" in row:
            assert key.rpartition(".")[2] in source, key


def test_the_file_that_is_written_is_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "ds.json", tmp_path / "run.toml"
    source.write_text(json.dumps({**MICS, "gradient_clipping": 0}))
    words = ["convert", "deepspeed-config", str(source)]
    assert main([*words, "-o", str(out)]) == 0
    run = load(["--config-file", str(out)])
    assert run.config.training.max_norm == math.inf
    assert run.config.mics.partition_size == 8
    text = out.read_text()
    tables, _, below = text.partition("# From ds.json")
    assert "#" not in tables  # the comments are out of the way
    assert "zero_quantized_weights = true" in below
    assert tomllib.loads(text) == tomllib.loads(tables)
    capsys.readouterr()
    assert main(words) == 0
    assert capsys.readouterr().out == text
    assert main([*words, "-o", str(out)]) == 2
    assert "exists; name a file that does not" in capsys.readouterr().err


def test_comments_and_trailing_commas_are_read(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        """{
        // DeepSpeed reads these
        "train_batch_size": 8, # and these
        /* and
           these */
        "tensorboard": {"output_path": "http://x#y, }", },
        }"""
    )
    assert read_deepspeed(path) == {
        "train_batch_size": 8,
        "tensorboard": {"output_path": "http://x#y, }"},
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1, "a": 2}', "a stands twice"),
        ("[1]", "holds no JSON object"),
        ('{"a": }', "is not JSON (line 1, column 7"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_deepspeed(path)
    assert said in str(raised.value)
    with pytest.raises(ConfigError, match="there is no file"):
        read_deepspeed(tmp_path / "none.json")


def test_the_example_of_the_page_is_what_the_command_prints() -> None:
    page = (Path(__file__).parents[2] / "docs/migrate_from_deepspeed.md").read_text()
    source, printed = (
        page.partition(f"```{language}\n")[2].partition("```")[0] for language in ("json", "toml")
    )
    assert convert_config(json.loads(source)).to_toml("ds_config.json") == printed
