"""A Llama in transformers' Trainer, and in TRL's, trains as one process does on all of the data."""

import os
import runpy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.examples import EXAMPLES, run_example
from harness.ranks import ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig, is_fsdp_managed_module

import mics_dtensor as mics
from mics_dtensor.errors import ConfigError
from mics_dtensor.integrations.transformers import MicsTrainer, blocks_of, shard_pretrained

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

REPLICAS = (0, 2)  # the replication group of rank 0
NUM_STEPS = 10


def example(script: str) -> dict[str, Any]:
    """The names that a script defines, without running it."""
    return runpy.run_path(str(EXAMPLES / "integrations" / script))


def one_process(names: dict[str, Any]) -> tuple[nn.Module, list[float]]:
    """A loop over whole batches in plain PyTorch, nothing of which is sharded."""
    model = names["build"]()
    texts = names["Counting"]().texts
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    losses = []
    for batch in texts.chunk(NUM_STEPS):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def test_losses_messages_and_saved_weights_are_those_of_one_process(tmp_path: Path) -> None:
    alone, losses = one_process(example("with_transformers.py"))
    ran = run_example("integrations/with_transformers.py", str(tmp_path))
    assert ran.losses == pytest.approx(losses, rel=1e-5)

    shard_bytes = 4 * sum(p.numel() for p in alone.parameters()) // 2
    hops = ran.sent.of("all_reduce", ranks=REPLICAS)
    assert [call.message_bytes for call in hops if call.message_bytes > 1000] == (
        [shard_bytes] * NUM_STEPS
    )
    assert len(hops) == 2 * NUM_STEPS  # one more each, which agrees on what takes part

    saved = LlamaForCausalLM.from_pretrained(tmp_path)
    assert saved.lm_head.weight is saved.model.embed_tokens.weight
    for (name, parameter), (_, right) in zip(
        saved.named_parameters(), alone.named_parameters(), strict=True
    ):
        torch.testing.assert_close(parameter, right, rtol=2e-3, atol=2e-5, msg=name)


@pytest.mark.parametrize("tie", [True, False])
@ranks(2)
def test_units_are_the_blocks_of_the_model_and_tied_embeddings_one(tie: bool) -> None:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=tie))
    topology = mics.Topology.uniform(world_size=2, ranks_per_node=1)
    mesh = mics.init_mesh(mics.Layout(topology=topology, partition_size=1), device_type="cpu")
    with pytest.raises(ConfigError, match=r"the axes of the mesh are \('shard',\)"):
        shard_pretrained(model, mesh=mesh["shard"])
    shard_pretrained(model, mesh=mesh)
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    own = [] if tie else ["transformer.wte"]
    assert units == ["", *own, "transformer.h.0", "transformer.h.1"]
    assert (model.lm_head.weight is model.transformer.wte.weight) == tie


def test_a_model_that_names_no_blocks_is_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=8))
    model._no_split_modules = ["LlamaDecoderLayer"]
    with pytest.raises(ConfigError, match="has no such module: call fully_shard on its blocks"):
        blocks_of(model)


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
def test_the_trainer_of_trl_has_the_losses_of_one_process(tmp_path: Path) -> None:
    _, losses = one_process(example("with_transformers.py"))
    ran = run_example("integrations/with_trl.py", str(tmp_path))
    assert ran.losses == pytest.approx(losses, rel=1e-5)
    hops = ran.sent.of("all_reduce", ranks=REPLICAS)
    assert len(hops) == 2 * NUM_STEPS


def test_the_private_names_of_transformers_that_we_lean_on() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=8))
    assert model._no_split_modules
    assert {"_clip_grad_norm", "_defer_fsdp_gradient_reduction"} <= set(vars(Trainer))
    assert is_fsdp_managed_module(model) is False
    model._is_fsdp_managed_module = model._is_distributed_loading_by_transformers = True
    assert is_fsdp_managed_module(model)
    assert model.is_distributed_loading_by_transformers


@pytest.mark.parametrize(("replicas", "tie"), [(1, False), (2, False), (2, True)])
@ranks(4, timeout_s=200, torchrun=True)
def test_a_model_that_transformers_has_sharded_while_loading(
    replicas: int, tie: bool, folder: Path
) -> None:
    """It has put other parameters in the place of those that fully_shard saw."""
    names = example("with_transformers.py")
    names["build"] = partial(names["build"], tie=tie)
    if int(os.environ["RANK"]) == 0:
        names["build"]().save_pretrained(folder / "small")
    dist.init_process_group("gloo")
    dist.barrier()
    sizes = DistributedConfig(dp_replicate_size=replicas, fsdp_size=4 // replicas)
    model = LlamaForCausalLM.from_pretrained(folder / "small", distributed_config=sizes)
    mics.apply_mics(model, topology=mics.Topology.uniform(world_size=4, ranks_per_node=2))
    mics.synchronize_replicas(model)
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_steps=NUM_STEPS,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = MicsTrainer(model=model, args=arguments, train_dataset=names["Counting"]())
    trainer.train()
    seen = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert seen == pytest.approx(one_process(names)[1], rel=1e-5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
