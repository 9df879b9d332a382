"""[profiling]: the trace of a run names the stages of every unit, as `explain` names them."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from harness.ranks import ranks

pytest.importorskip("torchtitan")
import torch.distributed as dist
from train.small_run import configured, ours

from mics_dtensor import stage

OPTIONS = (
    "--training.steps=3",
    "--training.global_batch_size=16",  # 2 micro-steps on 8 ranks
    "--mics.partition_size=4",  # two nodes of two: two replicas
    "--profiling.enable_profiling=true",
    "--profiling.profile_freq=3",
    "--profiling.profiler_warmup=1",
    "--profiling.profiler_active=1",
)


def spans(trace: Path) -> list[tuple[str, float, float]]:
    """Our ranges in a trace: name, start and end in microseconds."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    ours = [e for e in events if str(e.get("name", "")).startswith("mics::")]
    return [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in ours if e.get("ph") == "X"]


@ranks(8, timeout_s=120)
def test_the_trace_names_the_stages_and_the_units_they_serve(tmp_path: Path) -> None:
    trainer = ours(*configured(tmp_path, *OPTIONS))
    told = trainer.explanation
    trainer.train()
    trainer.close()
    rank = dist.get_rank()
    (trace,) = (tmp_path / "profile_traces").glob(f"*/rank{rank}_trace.json.gz")
    found = spans(trace)
    names = [name for name, _, _ in found]
    across = ("gather between nodes", "reduce between nodes")
    within = ("gather within the node", "reduce within the node")
    for unit in told.units:
        for what in (*across, *within):
            assert f"mics::{what} ({unit.name})" in names, (what, unit.name)
        gathers = names.count(f"mics::gather between nodes ({unit.name})")
        # In each of two micro-steps; on gloo each is sent, and waited for later.
        assert gathers == 2 * 2 * unit.gathers, (unit.name, gathers)
    assert names.count("mics::micro-step (1 of 2)") == names.count("mics::micro-step (2 of 2)") == 1
    messages = [span for span in found if span[0].startswith("mics::boundary (")]
    served = " ".join(name for name, _, _ in messages)
    assert all(unit.name in served for unit in told.units)
    # The boundary comes once, after the backward of the last micro-step, and inside it.
    (last,) = (span for span in found if span[0] == "mics::micro-step (2 of 2)")
    reduced = max(end for name, _, end in found if name.startswith("mics::reduce between"))
    for _, start, end in messages:
        assert reduced <= start
        assert last[1] <= start <= end <= last[2]


def test_without_a_profiler_no_range_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> object:
        raise AssertionError(name)

    monkeypatch.setattr(stage, "record_function", refused)
    with stage.named_range("gather", "layers.0"):
        pass
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.raises(AssertionError, match=r"mics::gather \(layers.0\)"),
    ):
        stage.named_range("gather", "layers.0")
