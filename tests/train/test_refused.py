"""What `mics explain` refuses of a model, the program refuses in the same words."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchtitan")
from mics_dtensor.cli import main
from mics_dtensor.errors import ConfigError
from mics_dtensor.train.build import trainer_config
from mics_dtensor.train.load import load


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--optimizer.name=Adamw",), "choose from ['Adam', 'AdamW']"),
        (("--optimizer.name=DistMuon",), "choose from ['Adam', 'AdamW']"),
        (("--activation_checkpoint.selective_ac_option=ops",), 'write "op", or a number'),
        (("--model.name=qwen3", "--model.n_layers=9"), "qwen3 debugmodel has 8 blocks"),
        (
            ("--model.name=gpt_oss", "--training.mixed_precision_param=float32"),
            "experts of gpt_oss give what torch._grouped_mm computes",
        ),
        (
            ("--parallelism.tensor_parallel_degree=3", "--training.seq_len=48"),
            "llama3 debugmodel: tensor_parallel_degree (3) must divide n_heads (16)",
        ),
        (
            ("--parallelism.context_parallel_degree=2", "--training.seq_len=64"),
            "training.seq_len 64 is not a multiple of 256",
        ),
        (
            (
                "--model.name=qwen3",
                "--mics.optimizer_over_replicas",
                "--parallelism.tensor_parallel_degree=2",
            ),
            "one table for embedding and head",
        ),
        (
            ("--mics.optimizer_over_replicas", "--optimizer.name=DistMuon"),
            "DistMuon looks at more than one element",
        ),
        (
            (
                "--mics.optimizer_over_replicas",
                "--optimizer.param_groups=[{ pattern = 'w', optimizer_name = 'DistMuon' }]",
            ),
            "choose from ['Adam', 'AdamW']",
        ),
        (
            ("--mics.optimizer_over_replicas", "--optimizer.implementation=fused_opt_states_bf16"),
            "would be ignored with mics.optimizer_over_replicas = true",
        ),
    ],
)
def test_they_say_the_same(
    tmp_path: Path, arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text("")
    assert main(["explain", str(path), "--world-size=12", "--ranks-per-node=6", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err
    with pytest.raises(ConfigError) as refused:
        trainer_config(load(["--config-file", str(path), *arguments]), device_type="cpu")
    assert said.err == f"mics explain: {refused.value}\n"
