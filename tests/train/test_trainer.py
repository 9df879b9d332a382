import json
import math
from pathlib import Path

import pytest
from harness.counting import count_collectives, sent_bytes
from harness.ranks import ranks

from mics_dtensor.errors import ConfigError

pytest.importorskip("torchtitan")
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from train.small_run import configured, ours, torchtitans, train, trained_by

from mics_dtensor.layout import Layout
from mics_dtensor.topology import Topology
from mics_dtensor.train.trainer import _clip, audit_groups
from mics_dtensor.upstream import units_of


@pytest.mark.parametrize(
    ("partition_size", "num_micro_steps"), [(2, 4), (1, 2), (4, 1)], ids=["2x2", "4x1", "1x4"]
)
@pytest.mark.timeout(600)
def test_the_program_equals_torchtitans_own_trainer(
    tmp_path: Path, partition_size: int, num_micro_steps: int
) -> None:
    options = (
        f"--mics.partition_size={partition_size}",
        f"--training.global_batch_size={4 * num_micro_steps}",
    )
    expected, got = (
        # In worlds of their own: torchtitan keeps the meshes of spmd_types for the whole process.
        trained_by(make, tmp_path, *options)
        for make in (torchtitans, ours)
    )
    assert len(got.losses) == 20
    assert got.losses == pytest.approx(expected.losses, rel=1e-5)
    assert got.norms == pytest.approx(expected.norms, rel=1e-4)


@ranks(4, timeout_s=100)
def test_the_loss_falls_and_each_logged_step_is_a_line(tmp_path: Path) -> None:
    trained = train(ours, tmp_path, "--training.steps=12", "--metrics.log_freq=4")
    assert trained.losses[-1] < trained.losses[0] - 0.5
    dist.barrier()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 4, 8, 12]
    assert [line["loss"] for line in lines] == trained.losses
    for line in lines:
        assert list(line) == [
            "schema",
            "run_id",
            "step",
            "loss",
            "grad_norm",
            "lr",
            "tokens_per_s",
            "tokens_per_s_per_rank",
            "step_s",
            "exposed_communication_s",
            "mfu",
            "inter_node_bytes",
            "intra_node_bytes",
            "collectives",
        ]
        assert (line["schema"], line["run_id"], line["mfu"]) == (1, "test", None)
        assert line["tokens_per_s"] == pytest.approx(4 * line["tokens_per_s_per_rank"])
        assert line["inter_node_bytes"] > 0
        assert 0 < line["exposed_communication_s"] < line["step_s"]
        assert line["lr"] > 0


@ranks(4, timeout_s=100)
@pytest.mark.parametrize("chunks", [1, 4])
def test_what_is_explained_is_what_is_sent(tmp_path: Path, chunks: int) -> None:
    its = ("--training.steps=3", "--metrics.log_freq=100", f"--loss.num_chunks={chunks}")
    config, layout = configured(tmp_path, *its)
    trainer = ours(config, layout)
    batches = trainer.batch_generator(trainer.dataloader)
    told = trainer.explanation.collectives
    trainer._progress = None
    for trainer.step in (2, 3, 4):  # a logged step, as the first is, also sums the losses
        with count_collectives() as counted:
            trainer.train_step(batches)
        for kind in ("all_gather", "reduce_scatter"):
            assert counted.num(kind) == told[kind], (trainer.step, kind)
        # Beside the second hop: tokens of the step, and the norm over shards.
        assert counted.all_reduces == told["all_reduce"] + 2
    counted.calls = [call for call in counted.calls if call.message_bytes > 8]  # without those
    sent = sent_bytes(counted, layout.topology)
    assert sent == (trainer.explanation.inter_node_bytes, trainer.explanation.intra_node_bytes)
    trainer.close()


@ranks(4, timeout_s=100)
def test_no_micro_step_crosses_the_replicas(tmp_path: Path) -> None:
    config, layout = configured(tmp_path, "--metrics.log_freq=100")
    trainer = ours(config, layout)
    trainer._progress = None
    replicas = layout.replication_group(dist.get_rank())
    crossed = []
    forward_backward = trainer.forward_backward_step

    def counted_step(**batch: object) -> object:
        with count_collectives() as counted:
            loss = forward_backward(**batch)
        crossed.append(len([call for call in counted.calls if call.ranks == replicas]))
        return loss

    trainer.forward_backward_step = counted_step
    for trainer.step in (1, 2):
        trainer.train_step(trainer.batch_generator(trainer.dataloader))
    assert crossed[0:3] == crossed[4:7] == [0, 0, 0]
    assert crossed[3] == crossed[7] > 0
    trainer.close()


@ranks(4, timeout_s=100)
def test_groups_unlike_the_layout_are_refused(tmp_path: Path) -> None:
    config, layout = configured(tmp_path)
    trainer = torchtitans(config, layout)
    units, rank = units_of(trainer.model_parts), dist.get_rank()
    audit_groups(units, layout, rank=rank)
    other = Layout(topology=Topology.uniform(world_size=4, ranks_per_node=2), partition_size=4)
    with pytest.raises(ConfigError, match=rf"partition group of rank {rank} is .* it is \[0, 1"):
        audit_groups(units, other, rank=rank)
    trainer.close()


@ranks(2, timeout_s=100)
def test_cuda_graphs_are_refused_where_there_is_no_gpu(tmp_path: Path) -> None:
    config, layout = configured(
        tmp_path, "--training.disable_cuda_graphs=false", "--training.global_batch_size=4"
    )
    with pytest.raises(ConfigError, match="without a GPU; write disable_cuda_graphs = true"):
        ours(config, layout)


@ranks(2)
def test_a_norm_over_stages_that_is_not_finite() -> None:
    """A pipeline's stages have one norm; one that cannot be clipped by is refused on all."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert _clip([parameter], 1e6, pp_mesh=mesh) == pytest.approx(50**0.5)
    bad = torch.tensor([3.0, math.nan if dist.get_rank() else 4.0])
    for norm_type in (2.0, math.inf):
        parameter.grad = bad.clone()
        with pytest.raises(RuntimeError, match=f"total norm of order {norm_type} of the gradients"):
            _clip([parameter], 1.0, norm_type, True, pp_mesh=mesh)
        assert torch.equal(parameter.grad.nan_to_num(), bad.nan_to_num())  # unchanged
        assert not torch.isfinite(_clip([parameter], 1.0, norm_type, pp_mesh=mesh))
