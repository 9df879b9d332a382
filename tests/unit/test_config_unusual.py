"""Files that torchtitan 0.2.2 accepts and that look like none of its own: what they mean here."""

from pathlib import Path
from typing import Any

import pytest

from mics_dtensor.errors import ConfigError
from mics_dtensor.train.degrees import resolve
from mics_dtensor.train.key import value_at
from mics_dtensor.train.load import Run, load


def loaded(folder: Path, text: str, *arguments: str) -> Run:
    path = folder / "run.toml"
    path.write_bytes(text.encode())
    run = load([f"--job.config-file={path}", *arguments])
    return resolve(run, world_size=16, local_world_size=8)[0]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", {"training.steps": 10000, "parallelism.data_parallel_shard_degree": 16}),
        (
            "training.steps = 5\nmodel.name = 'qwen3'\n",
            {"training.steps": 5, "model.name": "qwen3"},
        ),
        (
            "parallelism = { tensor_parallel_degree = 2 }\n",
            {"parallelism.tensor_parallel_degree": 2},
        ),
        ("[training]\r\nsteps = 5\r\n", {"training.steps": 5}),
        ("[training]\n[model]\n[training.dataloader]\n", {"training.seq_len": 2048}),
        ("[training]\nmax_norm = 1\n[optimizer]\nlr = 1\n", {"training.max_norm": 1.0}),
        ("[quantize.grouped_mm.float8]\nfqns = 'experts'\n", {"model.converters": ()}),
        (
            "[parallelism]\n"
            "module_fqns_per_model_part = [['tok_embeddings'], ['norm', 'output']]\n",
            {"parallelism.module_fqns_per_model_part": (("tok_embeddings",), ("norm", "output"))},
        ),
        ("[parallelism]\ncontext_parallel_load_balancer = ''\n", {"model.name": "llama3"}),
        ("[job]\nconfig_file = 'elsewhere.toml'\n", {"job.config_file": "elsewhere.toml"}),
        ("[experimental]\n[memory_estimation]\nenable = false\n", {"training.steps": 10000}),
        ("[activation_checkpoint]\nmode = 'none'\nearly_stop = true\n", {"training.steps": 10000}),
        ("[comm]\nmode = 'default'\ntrace_buf_size = 0\n", {"comm.trace_buf_size": 0}),
    ],
)
def test_unusual_files_mean_what_they_meant(
    tmp_path: Path, text: str, values: dict[str, Any]
) -> None:
    config = loaded(tmp_path, text).config
    assert {name: value_at(config, name) for name in values} == values


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--training.max-norm", "2"], "training.max_norm", 2.0),
        (["--model.converters", "quantize.linear.mx,quantize.grouped_mm.mx",
          "--quantize.grouped_mm.mx.recipe_name=mxfp8_rceil"],
         "model.converters", ("quantize.linear.mx", "quantize.grouped_mm.mx")),
        (["--compile.enable"], "compile.enable", True),
        (["--profiling.no-enable-profiling"], "profiling.enable_profiling", False),
        (["--parallelism.context-parallel-load-balancer", "None"],
         "parallelism.context_parallel_load_balancer", None),
        (["--debug.seed=None"], "debug.seed", None),
        (["--checkpoint.exclude-from-loading", "optimizer,dataloader"],
         "checkpoint.exclude_from_loading", ("optimizer", "dataloader")),
    ],
)  # fmt: skip
def test_the_command_line_is_that_of_the_release(
    tmp_path: Path, arguments: list[str], name: str, value: Any
) -> None:
    assert value_at(loaded(tmp_path, "", *arguments).config, name) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[model]\nname = 'simple_fsdp.llama3'\n",
            "torchtitan 0.3 has no simple_fsdp; write llama3",
        ),
        ("[model]\nname = 'flux'\n", "Flux is an image model"),
        ("[comm]\nmode = 'fake_backend'\n", "mics explain FILE"),
        (
            "[parallelism]\nexpert_tensor_parallel_degree = 2\nexpert_parallel_degree = 2\n",
            "write 1",
        ),
        (
            "[parallelism]\ndata_parallel_replicate_degree = -1\n",
            "only .mics. partition_size fills",
        ),
        ("[experimental]\ncustom_import = 'a.b'\n", r'\[model\] name = "your.module"'),
        ("[job]\ncustom_config_module = 'a.b'\n", "has no JobConfig to extend"),
        ("[quantize.linear]\nfloat8 = true\n", "is a table, not a value"),
        ("[training]\nsteps = '5'\n", 'training.steps = "5" .* takes a whole number'),
        ("[training]\nenable_cpu_offload = 1\n", "it takes true or false"),
    ],
)
def test_what_has_no_meaning_any_more_is_refused_by_name(
    tmp_path: Path, text: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        loaded(tmp_path, text)
