"""One table for embedding and head, under tensor parallel: torchtitan cuts it twice and ties again.

FSDP2 then gathers and reduces both, and one parameter is trained.
"""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan")

import torch
import torch.distributed as dist
from harness.counting import count_collectives, sent_bytes
from harness.ranks import ranks
from train import tiny_tied
from train.small_run import configured, ours, torchtitans, trained_by

from mics_dtensor import ReplicaShardedOptimizer
from mics_dtensor.cli import main
from mics_dtensor.errors import ConfigError
from mics_dtensor.plan.presets.units import Policy, traffic_units
from mics_dtensor.plan.traffic import Options, step_traffic

FILE = str(Path(__file__).parents[2] / "train_configs" / "llama3_8b_2x8.toml")
CUT = "--parallelism.tensor_parallel_degree=2"
SMALL = (
    "--training.steps=3",
    "--training.global_batch_size=4",
    "--mics.partition_size=none",
    "--parallelism.data_parallel_replicate_degree=2",
    "--model.name=train.tiny_tied",
    "--model.n_layers=none",
    CUT,
)


@pytest.mark.timeout(400)
def test_it_trains_as_torchtitan_does(tmp_path: Path) -> None:
    expected, got = (trained_by(by, tmp_path, *SMALL, world_size=8) for by in (torchtitans, ours))
    assert len(got.losses) == 3
    assert got.losses == pytest.approx(expected.losses, rel=1e-5)
    assert got.norms == pytest.approx(expected.norms, rel=1e-4)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("degree", [1, 2])
@ranks(8, timeout_s=150)
def test_what_is_sent_is_planned_and_explained(tmp_path: Path, degree: int, chunks: int) -> None:
    """With a loss in chunks the table is reduced for the head, and again for the embedding."""
    its = (f"--loss.num_chunks={chunks}", "--metrics.log_freq=100")
    its += (f"--parallelism.tensor_parallel_degree={degree}",)
    its += (f"--parallelism.data_parallel_replicate_degree={4 // degree}",)
    its += (f"--training.global_batch_size={8 // degree}",)  # one micro-step
    config, layout = configured(tmp_path, *SMALL, *its)
    trainer = ours(config, layout)
    trainer._progress = None
    batches = trainer.batch_generator(trainer.dataloader)
    for trainer.step in (2, 3):
        with count_collectives() as counted:
            trainer.train_step(batches)
    policy = Policy(gather_itemsize=4, chunked_loss=chunks > 1)
    units = traffic_units(tiny_tied.shapes(), layout, policy)
    planned, told = step_traffic(units, Options(backend="gloo")), trainer.explanation
    assert told.collectives == planned.collectives
    assert told.inter_node_bytes == planned.inter_node_bytes
    trained = sum(p.to_local().numel() for p in trainer.model_parts[0].parameters())
    assert told.adam_bytes == 16 * trained  # weights, gradients and two states, all fp32
    # Of the rest, tensor parallel has its own groups; tokens and norm are messages of a number.
    groups = [layout.partition_group(dist.get_rank()), layout.replication_group(dist.get_rank())]
    sent = [c for c in counted.calls if c.ranks in groups and c.message_bytes > 4]
    for kind, calls in planned.collectives.items():
        assert len([call for call in sent if call.kind == kind]) == calls, kind
    counted.calls[:] = sent
    assert sent_bytes(counted, layout.topology)[0] == planned.inter_node_bytes
    trainer.close()


@ranks(8, timeout_s=100)
def test_states_over_the_replicas_are_refused(tmp_path: Path) -> None:
    """Two slices of one parameter would each clear the gradient of the other."""
    with pytest.raises(ConfigError, match="one table for embedding and head, which FSDP2 holds"):
        configured(tmp_path, *SMALL, "--mics.optimizer_over_replicas=true")
    trainer = ours(*configured(tmp_path, *SMALL))
    with pytest.raises(ConfigError, match=r"tok_embeddings.weight is one parameter .* holds twice"):
        ReplicaShardedOptimizer(trainer.model_parts, torch.optim.AdamW, lr=1e-3)
    trainer.close()


def test_explain_refuses_them_as_the_program_does(capsys: pytest.CaptureFixture[str]) -> None:
    its: tuple[Any, ...] = ("--model.name=qwen3", "--model.flavor=0.6B", "--world-size=16")
    over = "--mics.optimizer_over_replicas=true"
    assert main(["explain", FILE, *its, CUT, over]) == 2
    assert "qwen3 0.6B: one table for embedding and head" in capsys.readouterr().err
    assert main(["explain", FILE, *its, over]) == 0
    capsys.readouterr()
    assert main(["explain", FILE, *its, CUT, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    table, rest = 151_936 * 1024, plan["num_parameters"] - 151_936 * 1024
    hop = sum(s["inter_node_bytes"] for s in plan["stages"] if s["name"].startswith("boundary"))
    assert plan["num_replicas"] == 2
    assert hop == pytest.approx(2 * 4 * (2 * table + rest), rel=1e-3)
