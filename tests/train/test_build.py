"""Laws of trainer_config: each mapped key arrives in torchtitan's Trainer.Config, at its path."""

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

pytest.importorskip("torchtitan")
data = pytest.importorskip("mics_dtensor.train.data")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.distributed.activation_checkpoint import (  # noqa: E402
    FullAC,
    MemoryBudgetAC,
    SelectiveAC,
)
from torchtitan.models.common.attention import (  # noqa: E402
    FlexAttention,
)
from torchtitan.trainer import Trainer  # noqa: E402

from mics_dtensor.errors import ConfigError  # noqa: E402
from mics_dtensor.train.block_checkpointing import EveryNthBlockAC  # noqa: E402
from mics_dtensor.train.build import CONVERSIONS, trainer_config, unfrozen  # noqa: E402
from mics_dtensor.train.config import config_keys  # noqa: E402
from mics_dtensor.train.dense_attention import DenseAttention  # noqa: E402
from mics_dtensor.train.key import value_at  # noqa: E402
from mics_dtensor.train.load import load  # noqa: E402
from mics_dtensor.train.rows import Row, rows  # noqa: E402

ROOT = Path(__file__).parents[2]
RELEASED = ROOT.parent / "shared" / "torchtitan_v0_2_configs"
PLAIN = [row for row in rows().values() if row.to is not None and row.by is None]

# Values that torchtitan accepts where "another value of the type" is not one, and what they need.
CHOSEN: dict[str, Any] = {
    "parallelism.context_parallel_load_balancer": "ptrr",
    "checkpoint.folder": "elsewhere",
    "override.imports": ("a.b",),
    "compile.components": ("loss",),
    "checkpoint.exclude_from_loading": ("optimizer",),
    "lr_scheduler.total_steps": 20_000,
    "lr_scheduler.decay_ratio": 0.3,
    "lr_scheduler.min_lr_factor": 0.3,
}
NEEDED = {
    "parallelism.expert_parallel_degree": (
        "[model]\nname = 'qwen3'\nflavor = 'debugmodel_moe'\n",
        "",
    ),
    "parallelism.enable_async_tensor_parallel": (
        "[compile]\nenable = true\n",
        "tensor_parallel_degree = 2\n",
    ),
    "checkpoint.last_save_model_only": ("", ""),
    "checkpoint.initial_load_in_hf_quantized": (
        "",
        "initial_load_in_hf = true\ninitial_load_path = '/x'\n",
    ),
}
IMPOSSIBLE = (
    "parallelism.enable_fsdp_symm_mem",  # asks for NVIDIA's
    "training.mixed_precision_reduce",
    "comm.mode",
)


@pytest.fixture
def build(tmp_path: Path) -> Any:
    def build(
        text: str = "", *arguments: str, device_type: Literal["cpu", "cuda"] = "cuda"
    ) -> Trainer.Config:
        path = tmp_path / "run.toml"
        path.write_text(text)
        run = load(["--config-file", str(path), *arguments])
        return trainer_config(run, device_type=device_type)

    return build


def another(row: Row) -> Any:
    """A value that is not the default."""
    if row.key in CHOSEN:
        return CHOSEN[row.key]
    key = config_keys()[row.key]
    kind = next(each for each in (get_args(key.type) or (key.type,)) if each is not type(None))
    if get_origin(key.type) is Literal:
        return next(choice for choice in get_args(key.type) if choice != key.default)
    if get_origin(kind) is Literal:
        return next(choice for choice in get_args(kind) if choice != key.default)
    if kind is bool:
        return not key.default
    if kind is str:
        return "other"
    return kind(3 if key.default is None else key.default + 3)


def toml(value: Any) -> str:
    from mics_dtensor.train.values import shown

    return shown(value)


@pytest.mark.parametrize("row", PLAIN, ids=lambda row: row.key)
def test_a_plain_key_arrives(build: Any, row: Row) -> None:
    if row.key in IMPOSSIBLE:
        pytest.skip("no other value is possible here")
    value = another(row)
    table, _, last = row.key.rpartition(".")
    before, beside = NEEDED.get(row.key, ("", ""))
    config = build(f"{before}[{table}]\n{beside}{last} = {toml(value)}\n")
    assert value_at(config, row.to or "") == unfrozen(value)


def test_every_conversion_is_named_by_a_row() -> None:
    assert {row.by for row in rows().values()} - {None} == set(CONVERSIONS)


def test_an_empty_file_means_what_it_meant(build: Any) -> None:
    """Plain rows with a 0.2.2 default hold that default in torchtitan 0.3's configuration."""
    config = build()
    for row in PLAIN:
        if row.since is None:
            assert value_at(config, row.to or "") == unfrozen(row.default), row.key
    assert config.training.disable_cuda_graphs
    assert isinstance(config.activation_checkpoint, EveryNthBlockAC.Config)


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v3_16b",
        "gpt_oss_debug_model",
        "llama3_8b",
        "llama3_debug_model",
        "qwen3_0.6b",
        "qwen3_moe_debug",
    ],
)
def test_files_of_torchtitan_0_2_build(name: str, device_type: Any) -> None:
    if not RELEASED.is_dir():
        pytest.skip("torchtitan 0.2.2's files are not beside this repository")
    run = load(["--config-file", str(RELEASED / f"{name}.toml")])
    config = trainer_config(run, device_type=device_type)
    assert config.model_spec is not None
    assert config.model_spec.flavor == run.config.model.flavor
    assert config.dataloader.dataset == run.config.training.dataset


@pytest.mark.parametrize(
    "path", sorted((ROOT / "train_configs").glob("*.toml")), ids=lambda p: p.stem
)
def test_our_files_build(path: Path) -> None:
    config = trainer_config(load(["--config-file", str(path)]), device_type="cpu")
    assert config.model_spec is not None
    kinds = {type(block.attention.inner_attention) for block in config.model_spec.model.layers}
    assert kinds == {DenseAttention.Config}


def test_attention_stays_on_a_gpu(build: Any) -> None:
    config = build()
    inner = config.model_spec.model.layers[0].attention.inner_attention
    assert isinstance(inner, FlexAttention.Config)


@pytest.mark.parametrize(
    ("text", "kind", "values"),
    [
        ("mode = 'none'", type(None), {}),
        ("mode = 'full'\npreserve_rng_state = false", FullAC.Config, {"preserve_rng_state": False}),
        ("selective_ac_option = '3'\ndebug = true", EveryNthBlockAC.Config, {"every": 3}),
        (
            "selective_ac_option = 'op'\nper_op_sac_force_recompute_mm_shapes_by_fqns = ['x']",
            SelectiveAC.Config,
            {"force_recompute_mm_shapes_by_fqns": ["x"]},
        ),
        (
            "mode = 'memory_budget'\nmemory_budget = 0.25\n[compile]\nenable = true",
            MemoryBudgetAC.Config,
            {"memory_budget": 0.25},
        ),
    ],
)
def test_activation_checkpointing(
    build: Any, text: str, kind: type, values: dict[str, Any]
) -> None:
    made = build(f"[activation_checkpoint]\n{text}\n").activation_checkpoint
    assert type(made) is kind
    assert {name: getattr(made, name) for name in values} == values


@pytest.mark.parametrize(("every", "wrapped"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4]), (3, [3])])
def test_every_nth_block_is_checkpointed(every: int, wrapped: list[int]) -> None:
    model = nn.Module()
    model.layers = nn.ModuleDict({str(i): nn.Linear(2, 2) for i in range(5)})
    policy = EveryNthBlockAC.Config(every=every).build()
    policy.apply(model)
    found = [int(i) + 1 for i, b in model.layers.items() if not isinstance(b, nn.Linear)]
    assert found == wrapped


def test_the_optimizer_and_its_groups(build: Any) -> None:
    text = "[optimizer]\nname = 'Adam'\nlr = 1e-3\nbeta2 = 0.99\nimplementation = 'foreach'\n"
    text += "[[optimizer.param_groups]]\npattern = 'norm'\nweight_decay = 0.0\n"
    made = build(text).optimizer
    assert made.implementation == "foreach"
    norm, rest = made.param_groups
    assert (norm.pattern, rest.pattern) == ("norm", ".*")
    assert rest.optimizer_name == "Adam"
    every = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8}
    assert rest.optimizer_kwargs == {**every, "weight_decay": 0.1}
    assert norm.optimizer_kwargs == {**every, "weight_decay": 0.0}


def test_a_group_says_betas_as_the_optimizer_does(build: Any) -> None:
    text = "[[optimizer.param_groups]]\npattern = 'norm'\nbeta2 = 0.5\n"
    norm, rest = build(text).optimizer.param_groups
    assert norm.optimizer_kwargs == {**rest.optimizer_kwargs, "betas": (0.9, 0.5)}


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (
            ["bias$"],
            r'"bias\$" .* finds no parameter of llama3 debugmodel; write a part of tok_emb',
        ),
        (["norm", "^norm"], "only parameters that an earlier table has taken"),
    ],
)
def test_a_pattern_without_a_parameter_is_refused(
    build: Any, patterns: list[str], words: str
) -> None:
    text = "".join(f"[[optimizer.param_groups]]\npattern = '{each}'\n" for each in patterns)
    with pytest.raises(ConfigError, match=words):
        build(text)
    build("[[optimizer.param_groups]]\npattern = '.*'\n")  # and nothing is left for the others


def test_the_loss_is_cut_where_the_sequence_can_be(build: Any) -> None:
    chunked = build().loss
    assert isinstance(chunked, ChunkedLossWrapper.Config)
    assert (chunked.num_chunks, chunked.loss_fn.global_vocab_size) == (8, 2048)
    assert isinstance(build("[training]\nseq_len = 100\n").loss, CrossEntropyLoss.Config)
    assert build("[loss]\nnum_chunks = 4\n").loss.num_chunks == 4


def test_data_and_validation_keep_their_own_sizes(build: Any) -> None:
    text = "[training]\ndataset = 'c4'\n[training.dataloader]\nnum_workers = 2\n"
    text += "[validation]\nenable = true\ndataset_path = '/x'\nlocal_batch_size = 3\nseq_len = 64\n"
    text += "steps = 5\n[validation.dataloader]\npin_memory = true\n"
    config = build(text)
    assert (config.dataloader.dataset, config.dataloader.num_workers) == ("c4", 2)
    validator = config.validator
    assert (validator.enable, validator.steps, validator.freq) == (True, 5, 10)
    # As torchtitan's trainer builds it, with the training's sizes.
    names = "parallelism dp_world_size dp_rank tokenizer parallel_dims loss_fn metrics_processor"
    names += " validation_context pp_schedule pp_has_first_stage pp_has_last_stage"
    built = validator.build(**dict.fromkeys(names.split()), seq_len=2048, local_batch_size=8)
    assert (built.local_batch_size, built.seq_len) == (3, 64)
    assert (validator.dataloader.dataset, validator.dataloader.pin_memory) == (
        "c4_validation",
        True,
    )


def test_names_that_changed(build: Any) -> None:
    stages = "[['tok_embeddings', 'layers.0'], ['layers.1', 'norm', 'output']]"
    config = build(f"[parallelism]\nmodule_fqns_per_model_part = {stages}\n")
    assert config.parallelism.module_fqns_per_model_part[1] == ["layers.1", "norm", "lm_head"]
    config = build("[model]\ntokenizer_path = './old'\n")
    assert config.hf_assets_path == "./old"
    config = build("[checkpoint]\ninitial_load_path = 'there'\n")
    assert Path(config.checkpoint.initial_load_path) == Path("there").absolute()


def test_the_number_of_blocks_can_be_said(build: Any) -> None:
    layers = build("[model]\nn_layers = 9\n").model_spec.model.layers
    assert len(layers) == 9
    spread = [block.attention.wo.param_init["weight"].keywords["std"] for block in layers]
    assert spread == sorted(spread, reverse=True)
    assert len(set(spread)) == 9
    assert len(build("[model]\nn_layers = 2\n").model_spec.model.layers) == 2
    assert len(build("[model]\nname = 'qwen3'\nn_layers = 2\n").model_spec.model.layers) == 2
    with pytest.raises(ConfigError, match="8 blocks, and only llama3"):
        build("[model]\nname = 'qwen3'\nn_layers = 9\n")


def test_a_model_of_ones_own_is_named_by_its_module(build: Any) -> None:
    assert build("[model]\nname = 'torchtitan.models.qwen3'\n").model_spec.name == "qwen3"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[model]\nname = 'llama5'\n", ["llama5", "llama3"]),
        ("[model]\nname = 'no.such'\n", ["no.such", "model_registry"]),
        ("[model]\nname = 'os.path'\n", ["os.path", "model_registry"]),
        ("[model]\nflavor = '9B'\n", ["9B", "8B", "70B"]),
        ("[model]\nnum_mtp_layers = 2\n", ["num_mtp_layers", "llama3"]),
        ("[model]\nattn_backend = 'sdpa'\n", ["sdpa", "flex"]),
        ("[checkpoint]\nkeep_latest_k = 1\n", ["keep_latest_k = 1", "2 or more"]),
        ("[optimizer]\nname = 'SGD'\n", ["SGD", "AdamW"]),
        (
            "[parallelism]\ncontext_parallel_degree = 2\n[training]\nseq_len = 640\n",
            ["seq_len 640 is not a multiple of 256", "blocks of 128 tokens", "seq_len = 512"],
        ),
        (
            "[parallelism]\ntensor_parallel_degree = 4\n[training]\nseq_len = 250\n",
            ["seq_len 250 is not a multiple of 4", "seq_len = 248"],
        ),
        ("[parallelism]\ntensor_parallel_degree = 32\n", ["llama3", "must divide n_heads (16)"]),
        ("[parallelism]\nexpert_parallel_degree = 2\n", ["llama3 debugmodel has no experts"]),
        (
            "[model]\nname = 'gpt_oss'\n[parallelism]\nexpert_parallel_degree = 3\n",
            ["3 does not divide the 8 experts of gpt_oss", "[1, 2, 4, 8]"],
        ),
        (
            "[model]\nname = 'gpt_oss'\n[training]\nmixed_precision_param = 'float32'\n",
            ["gpt_oss", "torch._grouped_mm", 'write "bfloat16"'],
        ),
        (
            "[model]\nname = 'gpt_oss'\n[checkpoint]\nenable = true\nlast_save_in_hf = true\n",
            ["no Hugging Face name for", "mlp1_weight_EGD", "16 parameters"],
        ),
        (
            "[parallelism]\npipeline_parallel_degree = 16\n",
            ["16", "cannot be greater than effective layers (8)"],
        ),
        (
            "[parallelism]\npipeline_parallel_degree = 2\nmodule_fqns_per_model_part = "
            "[['tok_embeddings', 'layers.0', 'layers.1'], ['layers.2', 'norm', 'output']]\n",
            ["leaves out layers.3, layers.4, layers.5"],
        ),
        (
            "[parallelism]\npipeline_parallel_degree = 2\n"
            "module_fqns_per_model_part = [['norm']]\n",
            ["names 1 stages for 2 ranks of 1F1B; name 2"],
        ),
        (
            "[model]\nname = 'qwen3'\nflavor = '0.6B'\n"
            "[parallelism]\npipeline_parallel_degree = 2\n",
            ["qwen3: Weight tying is not supported with Pipeline Parallel"],
        ),
        (
            "[parallelism]\ncontext_parallel_degree = 2\n"
            "[validation]\nenable = true\nseq_len = 64\n",
            ["validation.seq_len 64", "multiple of 256", "seq_len = 256"],
        ),
        ("[activation_checkpoint]\nselective_ac_option = 'x'\n", ["op", "every second"]),
    ],
)
def test_what_torchtitan_cannot_do_is_refused(build: Any, text: str, names: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        build(text)
    assert all(name in str(refused.value) for name in names), refused.value


FLOAT8 = "[model]\nname = '{}'\nflavor = '{}'\nconverters = ['float8']\n[quantize.linear.float8]\n"
FLOAT8 += "emulate = true\nfilter_fqns = ['{}']\n"


@pytest.mark.parametrize(
    ("model", "flavor", "name"),
    [
        ("llama3", "debugmodel", "output"),
        ("llama3", "debugmodel", "feed_forward.w1"),
        ("llama3", "debugmodel", "layers.5."),
        ("llama3", "debugmodel", "auto_filter_small_kn"),
        ("llama3", "debugmodel", "wq', 'wk', 'wv"),
        ("qwen3", "debugmodel_moe", "router.gate"),
        ("qwen3", "0.6B", "output"),
        ("deepseek_v3", "debugmodel", "output', 'router.gate"),
        ("gpt_oss", "debugmodel", "output', 'router.gate"),
    ],
)
def test_a_filter_of_float8_is_in_the_name_of_a_module(
    build: Any, model: str, flavor: str, name: str
) -> None:
    build(FLOAT8.format(model, flavor, name))
    for missing in ("attention_wo", "layers.77.", '["output"]'):
        with pytest.raises(ConfigError) as refused:
            build(FLOAT8.format(model, flavor, f"{name}', '{missing}"))
        said = str(refused.value)
        assert "which is in the name of no linear module of" in said
        assert "attention.wo" in said


def test_the_spmd_backend_is_one_that_this_torch_can_do(build: Any) -> None:
    new = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)
    assert build().parallelism.spmd_backend == ("spmd_types" if new else "partial_dtensor")
    wish = "[parallelism]\nspmd_backend = 'full_dtensor'\n"
    if new:
        assert build(wish).parallelism.spmd_backend == "full_dtensor"
    else:
        with pytest.raises(ConfigError, match=r"2\.14"):
            build(wish)


def test_blocks_beyond_the_flavor_start_as_torchtitans_would() -> None:
    """8B has 32 blocks of which we keep 2 and make 2: the same as its first 4."""
    from torchtitan.models.llama3 import model_registry

    from mics_dtensor.train.model import set_num_layers

    whole = model_registry("8B").model.layers[:4]
    spec = model_registry("8B")
    set_num_layers(spec, 2)
    set_num_layers(spec, 4)
    for ours, theirs in zip(spec.model.layers, whole, strict=True):
        assert residual_init(ours) == residual_init(theirs)


def residual_init(block: Any) -> list[Any]:
    """How the weights that write into the residual stream start."""
    parts = (block.attention.wo, block.feed_forward.w2, block.feed_forward.w3)
    weights = [part.param_init["weight"] for part in parts]
    return [(each.func, each.keywords) for each in weights]
