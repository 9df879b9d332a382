"""Write the checkpoints of tests/convert/deepspeed/, by DeepSpeed itself, on CPU ranks over gloo.

    python tests/convert/make_deepspeed_fixtures.py [CASE ...]

In an environment with torch and deepspeed (0.19.8 for all cases but the old ones; an unpacked
older source tree on PYTHONPATH makes those). Beside each checkpoint lies `expected.pt`: what
DeepSpeed's own safe_get_full_* functions say that every parameter and every moment is.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed_models import LlamaByName, Odd
from torch import nn
from torch.multiprocessing import get_context

HERE = Path(__file__).parent / "deepspeed"
NUM_STEPS = 3


@dataclass(frozen=True)
class Case:
    """A checkpoint to be written."""

    world_size: int
    config: Mapping[str, Any]
    model: Callable[[], nn.Module] = Odd
    groups: bool = False
    client_state: Mapping[str, Any] = field(default_factory=dict)


def zero(stage: int = 3, **options: Any) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 4, **options}
    }


BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}
WARM_UP = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}}
CASES = {
    "zero3_bf16_2": Case(2, {**zero(sub_group_size=30), **BF16}, groups=True),
    "zero3_fp16_3": Case(3, {**zero(), **FP16, "scheduler": WARM_UP}, lambda: Odd(frozen=True)),
    "zero3_fp32_4": Case(4, zero(), groups=True, client_state={"epoch": 2}),
    "zero3_offload_2": Case(
        2,
        {
            **zero(offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}),
            **BF16,
            "zero_force_ds_cpu_optimizer": False,
        },
        lambda: Odd(tied=False),
    ),
    "zero3_llama_2": Case(2, {**zero(), **BF16}, LlamaByName),
    "zero2_bf16_2": Case(2, {**zero(2), **BF16}, lambda: Odd(frozen=True), groups=True),
    "zero1_fp16_3": Case(3, {**zero(1), **FP16}),
    "zero1_bf16_2": Case(  # by DeepSpeed's BF16_Optimizer
        2, {**zero(1), **BF16, "data_types": {"grad_accum_dtype": "fp32"}}, groups=True
    ),
}
OLD = {  # deepspeed 0.18.3, the last to know MiCS, and 0.16.9
    "mics_bf16_4": Case(4, {**zero(mics_shard_size=2), **BF16}, groups=True),
    "zero3_016_bf16_2": Case(2, {**zero(sub_group_size=30), **BF16}, groups=True),
}


def gather_one_by_one() -> None:
    """MiCS gathers with torch's coalescing, which gloo does not have."""

    def all_gather_coalesced(into: Any, of: Any, group: Any = None, async_op: bool = False) -> Any:
        for whole, part in zip(into, of, strict=True):
            work = dist.all_gather_into_tensor(whole, part, group=group, async_op=True)
            work.wait()
        return work if async_op else None

    backend = deepspeed.comm.comm.cdb
    backend.all_gather_coalesced = all_gather_coalesced
    backend.has_all_reduce_coalesced = False


def train_and_save(rank: int, name: str, folder: str) -> None:
    """One rank of one case."""
    faulthandler.dump_traceback_later(80, exit=True)  # a hang says where
    case = {**CASES, **OLD}[name]
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(case.world_size),
        "LOCAL_WORLD_SIZE": str(case.world_size),
    }
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=case.world_size
    )
    # Nothing is compiled: gloo carries it. (As an attribute, deepspeed.comm.torch is torch itself.)
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed("gloo", dist_init_required=False)
    if name.startswith("mics"):
        gather_one_by_one()
    torch.manual_seed(0)
    zero_config = case.config["zero_optimization"]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        **case.config,
    }
    if "mics_shard_size" in zero_config:
        with deepspeed.zero.MiCS_Init(config_dict_or_path=config):
            model = case.model()
    else:
        model = case.model()
    given = model.groups() if case.groups else [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(given, lr=1e-2, betas=(0.8, 0.95), eps=1e-7)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(NUM_STEPS * 2):
        torch.manual_seed(100 * step + rank)
        tokens = torch.randint(0, 11, (2, 5))
        loss = nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(f"{folder}/checkpoint", client_state=dict(case.client_state))
    if zero_config["stage"] < 3:  # safe_get_full_* find the moments that the first step made
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    expected = {"parameters": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for key, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            expected["parameters"][key] = safe_get_full_fp32_param(parameter)
            for moment in ("exp_avg", "exp_avg_sq"):
                expected[moment][key] = safe_get_full_optimizer_state(parameter, moment)
        else:
            whole = [parameter] if hasattr(parameter, "ds_id") else []
            with deepspeed.zero.GatheredParameters(whole):
                expected["parameters"][key] = parameter.detach().clone()
    expected = {
        kind: {key: value.detach().clone() for key, value in found.items()}
        for kind, found in expected.items()
    }
    if rank == 0:
        torch.save(expected, f"{folder}/expected.pt")
    dist.barrier()
    dist.destroy_process_group()


def make(name: str) -> None:
    """Write one case anew."""
    case = {**CASES, **OLD}[name]
    with tempfile.TemporaryDirectory() as folder:
        context = get_context("fork")
        ranks = [
            context.Process(target=train_and_save, args=(rank, name, folder))
            for rank in range(case.world_size)
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(timeout=100)
            each.kill()
        if any(each.exitcode != 0 for each in ranks):
            raise SystemExit(f"{name}: exit statuses {[each.exitcode for each in ranks]}")
        to = HERE / name
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(f"{folder}/checkpoint", to)
        for script in to.glob("zero_to_*.py"):  # DeepSpeed puts its own beside every checkpoint
            script.unlink()
        shutil.copy(f"{folder}/expected.pt", to / "expected.pt")
    size = sum(file.stat().st_size for file in to.rglob("*") if file.is_file())
    print(f"{name}: {size} bytes, deepspeed {deepspeed.__version__}", flush=True)


if __name__ == "__main__":
    for wanted in sys.argv[1:] or CASES:
        make(wanted)
