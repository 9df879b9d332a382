"""DeepSpeed's optimizer and scheduler in the keys of a run."""

from __future__ import annotations

from mics_dtensor.errors import ConfigError
from mics_dtensor.train.deepspeed_sought import Sought
from mics_dtensor.train.values import shown

ADAMS = ("adam", "adamw", "fusedadam", "cpuadam", "deepspeedcpuadam")
ADAM_DEFAULTS = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.0}
BETAS = (0.9, 0.999)
"""DeepSpeed's own (`ops/adam/fused_adam.py`), which hold where the file says nothing."""

SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


def optimizer(its: Sought) -> None:
    """Adam is AdamW unless adam_w_mode is false; DeepSpeed's defaults are written out."""
    kind = its.get("optimizer.type")
    if kind is None:
        if any(key.startswith("optimizer.params.") for key in its.given):
            raise ConfigError("optimizer.params without optimizer.type; name the optimizer")
        return
    if str(kind).lower() not in ADAMS:
        its.differs["optimizer.type"] = (
            "the program trains with Adam or AdamW: [optimizer] is left to you"
        )
        for name in (*ADAM_DEFAULTS, "betas"):
            if f"optimizer.params.{name}" in its.given:
                its.differs[f"optimizer.params.{name}"] = f"it was chosen for {kind}"
        return
    coupled = (
        str(kind).lower() != "adamw" and its.get("optimizer.params.adam_w_mode", True) is False
    )
    its.values["optimizer.name"] = "Adam" if coupled else "AdamW"
    for name, default in ADAM_DEFAULTS.items():
        key = f"optimizer.params.{name}"
        its.set(f"optimizer.{name}", float(its.number(key, default)), unless_auto=key)
    betas = its.get("optimizer.params.betas", BETAS)
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise ConfigError(f"optimizer.params.betas = {shown(betas)}; it takes two numbers")
    for name, value in zip(("beta1", "beta2"), betas, strict=True):
        its.set(f"optimizer.{name}", float(value), unless_auto="optimizer.params.betas")


def schedule(its: Sought) -> None:
    """Without a schedule the rate is constant."""
    kind = its.get("scheduler.type")
    params = "scheduler.params."
    if kind is not None and kind not in SCHEDULES:
        reason = "[lr_scheduler] has linear warm-up, a plateau, and linear, sqrt or cosine decay"
        its.differs["scheduler.type"] = f"{reason}: it is left to you"
        its.differs |= {key: f"it belongs to {kind}" for key in its.given if key.startswith(params)}
        return
    key = f"{params}warmup_num_steps"
    warmup = int(its.number(key, 1000 if kind else 0))
    its.set("lr_scheduler.warmup_steps", warmup, unless_auto=key)
    if kind in (None, "WarmupLR"):
        its.values["lr_scheduler.decay_ratio"] = 0.0  # a plateau to the end
    if kind is None:
        return
    if kind != "WarmupLR":
        key = f"{params}total_num_steps"
        if (total := its.number(key, 0 if key in its.auto else None)) is None:
            raise ConfigError(f"scheduler {kind} without total_num_steps; DeepSpeed refuses it too")
        its.set("lr_scheduler.total_steps", int(total), unless_auto=key)
        its.set("training.steps", int(total), unless_auto=key)
        its.values["lr_scheduler.decay_type"] = "linear" if kind == "WarmupDecayLR" else "cosine"
    if kind == "WarmupCosineLR":
        least = its.number(f"{params}cos_min_ratio", 1e-4)
        its.values["lr_scheduler.min_lr_factor"] = float(least)
    else:
        key = f"{params}warmup_max_lr"
        highest = its.number(key, 1e-3 if kind == "WarmupDecayLR" else None)
        if highest is not None:
            if its.get("optimizer.params.lr", highest) != highest:
                words = f"the schedule's warmup_max_lr, {highest}, decides, as it does in DeepSpeed"
                its.differs["optimizer.params.lr"] = words
            its.set("optimizer.lr", float(highest), unless_auto=key)
    if its.get(f"{params}warmup_type", "log") != "linear":
        key = f"{params}warmup_type" if f"{params}warmup_type" in its.given else "scheduler.type"
        its.differs[key] = "the warm-up is linear; DeepSpeed's default is logarithmic"
    for key in (f"{params}warmup_min_lr", f"{params}warmup_min_ratio"):
        if its.number(key, 0):
            its.differs[key] = "the warm-up starts at the first step's share of the highest rate"
