"""Laws of the loader: command line > file > default, and nothing is dropped in silence."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mics_dtensor.errors import ConfigError
from mics_dtensor.train.known import refuse_unknown
from mics_dtensor.train.load import Run, load

Write = Callable[[str], str]
MASTERS = "[mics]\noptimizer_over_replicas = true\nmaster_weights = 'sharded'\n"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> str:
        path = tmp_path / "run.toml"
        path.write_text(text)
        return str(path)

    return write


def loaded(file: str, *arguments: str) -> Run:
    return load(["--config-file", file, *arguments])


def refusal(file: str, *arguments: str) -> str:
    with pytest.raises(ConfigError) as refused:
        loaded(file, *arguments)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_the_command_line_goes_before_the_file_and_the_file_before_the_default(
    write: Write,
) -> None:
    run = loaded(write("[training]\nsteps = 5\nseq_len = 64\n"), "--training.steps", "7")
    training = run.config.training
    assert (training.steps, training.seq_len, training.local_batch_size) == (7, 64, 8)
    assert run.origin["training.steps"] == "command line"
    assert run.origin["training.seq_len"].startswith("file ")
    assert run.origin["training.local_batch_size"] == "default"


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--training.max_norm=2"], "max_norm", 2.0),
        (["--training.seq-len", "16"], "seq_len", 16),
        (["--training.enable_cpu_offload"], "enable_cpu_offload", True),
        (["--training.enable_cpu_offload", "true"], "enable_cpu_offload", True),
        (["--training.enable_cpu_offload=false"], "enable_cpu_offload", False),
        (["--training.no-disable-cuda-graphs"], "disable_cuda_graphs", False),
        (["--training.global_batch_size", "-1"], "global_batch_size", -1),
        (["--training.dataset_path", "none"], "dataset_path", None),
        (["--training.dataset", "a=b"], "dataset", "a=b"),
    ],
)
def test_arguments_are_read_in_the_names_of_the_file(
    write: Write, arguments: list[str], key: str, value: Any
) -> None:
    training = loaded(write(""), *arguments).config.training
    assert getattr(training, key) == value
    assert type(getattr(training, key)) is type(value)


def test_lists_are_written_with_commas(write: Write) -> None:
    run = loaded(write(""), "--compile.components", "model,loss")
    assert run.config.compile.components == ("model", "loss")


@pytest.mark.parametrize("word", ["a,b,c", "a, b,c,", '["a", "b", "c"]', " ['a','b', 'c',]"])
@pytest.mark.parametrize("key", ["quantize.linear.float8.filter_fqns", "override.imports"])
def test_a_list_of_the_command_line_is_that_of_a_file(write: Write, key: str, word: str) -> None:
    table, _, last = key.rpartition(".")
    named = loaded(write(f"[{table}]\n{last} = ['a', 'b', 'c']\n"))
    assert loaded(write(""), f"--{key}", word).config == named.config
    assert loaded(write(""), f"--{key}={word}").config == named.config


def test_lists_of_lists_and_of_tables_are_written_as_in_a_file(write: Write) -> None:
    stages, groups = "[['a'], ['b', 'c']]", "[{ pattern = 'norm', lr = 1.0 }]"
    file = f"[parallelism]\nmodule_fqns_per_model_part = {stages}\n"
    file += f"[optimizer]\nparam_groups = {groups}\n"
    given = (
        f"--parallelism.module_fqns_per_model_part={stages}",
        f"--optimizer.param_groups={groups}",
    )
    assert loaded(write(""), *given).config == loaded(write(file)).config
    assert (
        loaded(write(""), "--checkpoint.exclude_from_loading=[]").config == loaded(write("")).config
    )


@pytest.mark.parametrize("word", ['["a"', "[a, b]", "[1, 2]", '["a"]\nb = 1', '[["a"]]'])
def test_a_list_that_is_none_is_refused(write: Write, word: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(write(""), "--checkpoint.exclude_from_loading", word)
    assert str(refused.value).endswith(
        """it takes a list of strings, written a,b,c or '["a", "b", "c"]'"""
    )


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[training]\nstesp = 1\n", ["training.stesp", "training.steps"]),
        ("[trainig]\nsteps = 1\n", ["[trainig]", "[training]"]),
        ("[trainig]\n", ["trainig", "top"]),
        ("[parallelism]\nsteps = 1\n", ["parallelism.steps", "training.steps"]),
        ("[debug]\nprint_config = true\n", ["debug.print_config", "job.print_config"]),
        ("steps = 1\n", ["steps", "training.steps"]),
        ("training = 1\n", ["[training]", "table"]),
        ("[training.steps]\nx = 1\n", ["training.steps", "not a table"]),
        ("[mics]\npartition_sise = 2\n", ["mics.partition_sise", "mics.partition_size"]),
        ("[quantize.linear.float9]\nemulate = true\n", ["float9", "quantize.linear.float8"]),
        ("[training]\nsteps = 'ten'\n", ["training.steps", '"ten"', "whole number"]),
        ("[training]\nsteps = 1.5\n", ["training.steps", "1.5", "whole number"]),
        ("[training]\nsteps = true\n", ["training.steps", "true", "whole number"]),
        ("[training]\ndtype = 'fp8'\n", ["training.dtype", "fp8", "bfloat16", "float32"]),
        ("[compile]\nenable = 1\n", ["compile.enable", "true or false"]),
        ("[training]\nsteps = 0\n", ["training.steps", "1 or more"]),
        ("[parallelism]\ncontext_parallel_degree = 0\n", ["context_parallel_degree", "1 or more"]),
        ("[loss]\nnum_chunks = 3\n", ["num_chunks is 3", "2048", "num_chunks = 1"]),
        ("[mics]\npartition_size = 'auto'\n", ["auto", "mics.cluster", "p4d"]),
        ("[mics]\npartition_size = 'nodes'\n", ["nodes", '"node"']),
        ("[mics]\npartition_size = 0\n", ["mics.partition_size", "1 or more"]),
        ("[model]\nname = 'llama4'\n", ["llama4", "llama3"]),
        ("[model]\nflavor = '8B_flex'\n", ["8B_flex", 'flavor = "8B"', 'attn_backend = "flex"']),
        ("[model]\nconverters = ['float9']\n", ["float9", "quantize.linear.float8"]),
        ("[model]\nconverters = ['float8']\n", ["tensorwise", 'recipe_name = "rowwise"']),
        ("[fault_tolerance]\nenable = true\n", ["fault_tolerance.enable", "torchft"]),
        ("[optimizer]\nearly_step_in_backward = true\n", ["early_step_in_backward", "second hop"]),
        ("[validation]\nenable = true\nseq_len = 4096\n", ["4096", "2048"]),
        ("not toml", ["not TOML"]),
        ("[mics]\nmaster_weights = 'bf16'\n", ["mics.master_weights", "fp32", "sharded"]),
        ("[mics]\nmaster_weights = 'sharded'\n", ["optimizer_over_replicas = true"]),
        ("[mics]\noverlap_update = true\n", ["overlap_update", "optimizer_over_replicas = true"]),
        (MASTERS + "[training]\ndtype = 'bfloat16'\n", ["training.dtype", "float32"]),
        (MASTERS + "[training]\nmixed_precision_param = 'float32'\n", ["mixed_precision_param"]),
        (MASTERS + "[checkpoint]\nlast_save_in_hf = true\n", ["last_save_in_hf", "pieces"]),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    write: Write, text: str, names: list[str]
) -> None:
    said = refusal(write(text))
    assert all(name in said for name in names), said


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--training.steps"], ["--training.steps", "value"]),
        (["--training.steps", "x"], ["x", "whole number"]),
        (["steps"], ["steps", "--section.key"]),
        (["--training.stesp", "1"], ["training.steps"]),
    ],
)
def test_arguments_that_cannot_be_are_refused(
    write: Write, arguments: list[str], names: list[str]
) -> None:
    said = refusal(write(""), *arguments)
    assert all(name in said for name in names), said


def test_no_file_and_a_file_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--config-file"):
        load([])
    assert "nowhere.toml" in refusal(str(tmp_path / "nowhere.toml"))


def test_the_inert_are_listed_where_they_are_written_and_nowhere_else(write: Write) -> None:
    assert loaded(write("")).inert == ()
    run = loaded(
        write("[fault_tolerance]\ngroup_size = 4\n[quantize.linear.float8]\nfilter_fqns = ['x']\n")
    )
    listed = "\n".join(run.inert)
    assert "fault_tolerance.group_size = 4" in listed
    assert 'filter_fqns = ["x"]: off, since model.converters lacks' in listed
    assert len(run.inert) == 2


def test_a_switched_off_key_may_say_anything(write: Write) -> None:
    wish = "[parallelism]\ndisable_loss_parallel = true\ntensor_parallel_degree = {}\n"
    assert len(loaded(write(wish.format(1))).inert) == 1
    assert "disable_loss_parallel" in refusal(write(wish.format(2)))


def test_loading_needs_neither_torch_nor_torchtitan(write: Write) -> None:
    program = (
        "import sys; sys.modules.update(torch=None, torchtitan=None)\n"
        "from mics_dtensor.train.load import load\n"
        f"load(['--config-file', {write('')!r}])"
    )
    source = str(Path(__file__).parents[2] / "src")
    env = {**os.environ, "PYTHONPATH": source}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=env)


def test_a_file_option_that_is_empty_or_misspelt_is_named(write: Write) -> None:
    file = write("")
    assert refusal("") == "--config-file has an empty name; give the TOML file of a run"
    assert refusal(file, "--config-file=").startswith("--config-file has an empty name")
    for wrong in ("--confg", "--config_fil", "--config-files"):
        assert refusal(file, wrong, "3") == f"unknown option {wrong}; did you mean --config-file?"


def test_a_superscript_is_no_number_of_blocks(write: Write) -> None:
    text = "[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = '{}'\n"
    refuse_unknown(loaded(write(text.format("2"))).config)
    with pytest.raises(ConfigError, match="or a number such as"):
        refuse_unknown(loaded(write(text.format("²"))).config)
