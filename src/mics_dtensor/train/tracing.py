"""The memory of a run's own model, traced on fake tensors: `mics plan --trace`.

Two shallow models of a few blocks are built with torchtitan, sharded and run once a micro-batch and
checkpointing, in a fake world of a few ranks; `plan/extrapolate.py` does the rest.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mics_dtensor.errors import PlanError
from mics_dtensor.layout import Layout
from mics_dtensor.mesh import init_mesh
from mics_dtensor.plan.compute import Work
from mics_dtensor.plan.extrapolate import Depths, Trace, depths_for
from mics_dtensor.plan.held import memory_of
from mics_dtensor.plan.memory import CPU, Holding, Memory, peak_memory
from mics_dtensor.plan.presets.units import Policy, traffic_units
from mics_dtensor.plan.question import Question, Variant
from mics_dtensor.plan.shape import shape_of
from mics_dtensor.plan.trace import traced_moments
from mics_dtensor.topology import Topology
from mics_dtensor.train.config import RunConfig
from mics_dtensor.train.key import replace_at
from mics_dtensor.train.model import model_spec, use_attention_of_traces
from mics_dtensor.train.traced_cut import cut, loss_of, plan_cut
from mics_dtensor.upstream import local_of
from mics_dtensor.upstream.tracing import fake_store, forget_layouts

SHARDS = 64
"""Of the traced model: so many that the loss, which no unit shows, is the peak where it matters."""

DTYPES = {2: torch.bfloat16, 4: torch.float32}


class Tracer:
    """Memory by trace, each (micro-batch, checkpointing, accumulation) once; on disk if asked.

    Called with a question, a layout and a variant. Raises PlanError for a model whose blocks
    torchtitan cannot cut to another number.
    """

    def __init__(self, config: RunConfig, folder: Path | None = None) -> None:
        self._config = config
        self._folder = folder
        self._known: dict[str, Depths] = {}

    def __call__(self, question: Question, layout: Layout, variant: Variant) -> Memory:
        """What the trace says, and what it does not run in closed form (M8)."""
        shape = shape_of(question.model)
        depths = self._depths(question, variant)
        units = traffic_units(question.model, layout, replace(question.policy, chunked_loss=False))
        numel = sum(unit.count * unit.shard_numel() for unit in units)
        kinds = depths.peak(shape.num_layers, layout.partition_size, numel)
        traced = memory_of_kinds(kinds)
        its = memory_of(question, shape, layout, variant)
        plain = peak_memory(
            units,
            Work(
                shape=shape,
                seq_len=question.seq_len,
                micro_batch=variant.micro_batch,
                checkpointing=variant.checkpointing,
                tensor_parallel=question.tensor_parallel,
            ),
            Holding(
                param_itemsize=question.param_itemsize,
                num_micro_steps=_micro_steps(question, variant),
                hierarchical=False,
                fp32_sums=False,
                max_seq_len=max_seq_len(self._config),
            ),
            CPU,
        )
        return _sum(traced, its, plain)

    def _depths(self, question: Question, variant: Variant) -> Depths:
        asked = {
            "model": [self._config.model.name, self._config.model.flavor],
            "depths": depths_for(shape_of(question.model).num_layers),
            "shards": SHARDS,
            "batch": [variant.micro_batch, question.seq_len],
            "micro_steps": _micro_steps(question, variant),
            "checkpointing": variant.checkpointing,
            "itemsizes": [question.policy.gather_itemsize, question.policy.reduce_itemsize],
            "param_itemsize": question.param_itemsize,
            "versions": [version("torch"), version("torchtitan")],
        }
        if question.tensor_parallel > 1:
            asked["tensor_parallel"] = question.tensor_parallel
        key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
        if key not in self._known:
            self._known[key] = self._read(key) or self._trace(question, variant, asked, key)
        return self._known[key]

    def _trace(
        self, question: Question, variant: Variant, asked: dict[str, Any], key: str
    ) -> Depths:
        with fake_world(SHARDS * question.tensor_parallel):
            traces = [
                trace(self._config, question, variant, num_layers=depth)
                for depth in asked["depths"]
            ]
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            fresh = self._folder / f"{key}.new"
            told = {"schema": 1, "asked": asked, "traces": [asdict(each) for each in traces]}
            fresh.write_text(json.dumps(told), encoding="utf-8")
            fresh.replace(self._folder / f"{key}.json")
        return Depths(*traces)

    def _read(self, key: str) -> Depths | None:
        if self._folder is None or not (path := self._folder / f"{key}.json").exists():
            return None
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            return Depths(*(Trace(**each) for each in told["traces"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PlanError(f"{path} is no trace of ours ({error}); delete it") from None


def _sum(traced: Memory, its: Memory, plain: Memory) -> Memory:
    """The trace, and kind by kind what the run holds beyond the plain CPU step that was traced."""
    sizes = {
        field.name: max(
            0,
            getattr(traced, field.name) + getattr(its, field.name) - getattr(plain, field.name),
        )
        for field in fields(Memory)
    }
    return Memory(**sizes | {"reserved": its.reserved})


def memory_of_kinds(kinds: dict[str, int]) -> Memory:
    """The tracker's kinds as the planner's."""
    gathered = ("Unsharded Param", "Unsharded Grad", "All Gather", "Reduce Scatter")
    return Memory(
        parameters=kinds.get("Sharded Param", 0),
        gradients=kinds.get("Sharded Grad", 0),
        states=kinds.get("OptState", 0),
        gathered=sum(kinds.get(kind, 0) for kind in gathered),
        activations=sum(kinds.get(kind, 0) for kind in ("Activation", "Temp", "Inputs")),
        buffers=kinds.get("Buffer", 0),
        reserved=0,
    )


def _micro_steps(question: Question, variant: Variant) -> int:
    """One, or two for all more: from the second on the gradients of the first are there."""
    return min(2, question.sequences_of_a_rank // variant.micro_batch)


@contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """A world of which this process is rank 0, and nobody else is there: torch's "fake" backend."""
    if dist.is_initialized():
        raise PlanError("a trace needs a world of its own; trace outside of a run")
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_layouts()


def trace(config: RunConfig, question: Question, variant: Variant, *, num_layers: int) -> Trace:
    """The moments of a step of `num_layers` blocks, over all ranks of the fake world."""
    policy, degree = question.policy, question.tensor_parallel
    shards = dist.get_world_size() // degree
    model = sharded(
        config,
        num_layers=num_layers,
        partition_size=shards,
        checkpointing=variant.checkpointing,
        policy=policy,
    )
    if question.param_itemsize == 2:
        model.to(torch.bfloat16)
    numel = sum(local_of(parameter).numel() for parameter in model.parameters())
    moments = traced_moments(
        model,
        lambda its: torch.optim.AdamW(its.parameters()),
        loss_of(model, degree),
        [(variant.micro_batch, question.seq_len)] * 2,
        num_micro_steps=_micro_steps(question, variant),
    )
    return Trace(num_layers, shards, numel, moments)


def sharded(
    config: RunConfig,
    *,
    num_layers: int,
    partition_size: int,
    checkpointing: str,
    policy: Policy,
    vocab: int | None = None,
) -> nn.Module:
    """The model of torchtitan on meta, cut as its `parallelize` cuts, but one module a unit.

    The rest of the world are replicas; tensor parallel is as the file says. `vocab` entries instead
    of the model's own, if given.
    """
    spec = model_spec(replace_at(config, "model.n_layers", None))
    layers = spec.model.layers
    del layers[num_layers:]
    layers += [copy.deepcopy(layers[-1]) for _ in range(num_layers - len(layers))]
    if vocab is not None:
        spec.model.vocab_size = vocab
        spec.model.tok_embeddings.num_embeddings = vocab
        spec.model.lm_head.out_features = vocab
    use_attention_of_traces(spec)
    if (degree := config.parallelism.tensor_parallel_degree) > 1:
        plan_cut(spec, degree)
    with torch.device("meta"):
        model: Any = spec.model.build()
    copy_ = partition_size * degree
    layout = Layout(
        topology=Topology.uniform(world_size=dist.get_world_size(), ranks_per_node=copy_),
        partition_size=partition_size,
        tensor_parallel_size=degree,
    )
    mesh = init_mesh(layout, device_type="cpu")
    if degree > 1:
        cut(model, mesh)
        mesh = mesh["replicate", "shard"]
    if checkpointing != "none":
        _checkpointing(checkpointing).build().apply(model)
    mixed = MixedPrecisionPolicy(DTYPES[policy.gather_itemsize], DTYPES[policy.reduce_itemsize])
    tied = getattr(model, "tok_embeddings", None) is not None and (
        model.tok_embeddings.weight is model.lm_head.weight
    )
    for part in (*(() if tied else (model.tok_embeddings,)), *model.layers.values()):
        fully_shard(part, mesh=mesh, mp_policy=mixed)
    if not tied:
        fully_shard(model.lm_head, mesh=mesh, mp_policy=mixed, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=mixed)
    return model  # type: ignore[no-any-return]


def max_seq_len(config: RunConfig) -> int:
    """Positions of the rotary tables of torchtitan's model."""
    return int(model_spec(config).model.max_seq_len)


def _checkpointing(said: str) -> Any:
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    from mics_dtensor.train.block_checkpointing import EveryNthBlockAC

    return {
        "full": FullAC.Config(),
        "op": SelectiveAC.Config(),
        "2": EveryNthBlockAC.Config(every=2),
    }[said]
