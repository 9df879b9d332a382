"""Parameters of every shape and kind train, save and load as in one process."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from harness.ranks import ranks
from harness.sharded import mesh_of, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from mics_dtensor import apply_mics, gradient_accumulation
from mics_dtensor.topology import Topology

VOCABULARY = 11


class Tied(nn.Module):
    """An embedding that is the head too, a frozen layer, and a parameter of one row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.middle = nn.Linear(width, width)
        self.one = nn.Parameter(torch.ones(1, width))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.one
        return self.head(x + torch.tanh(self.middle(self.frozen(x))))


def tied(width: int, mesh: DeviceMesh | None = None) -> Tied:
    torch.manual_seed(width)
    model = Tied(width)
    if mesh is not None:
        fully_shard([model.embedding, model.head], mesh=mesh)
        fully_shard([model.frozen, model.middle], mesh=mesh)
        fully_shard(model, mesh=mesh)
        apply_mics(model, topology=Topology.uniform(world_size=4, ranks_per_node=2))
    return model


def loss_of(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    tokens = torch.randint(0, VOCABULARY, (6,), generator=generator)
    return F.cross_entropy(model(tokens), (3 * tokens + 1) % VOCABULARY) / 2


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        with gradient_accumulation(model, num_micro_steps=2) as accumulation:
            for micro in range(2):
                with accumulation.micro_step():
                    loss_of(model, step, micro, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_alone(width: int, steps: range) -> dict[str, torch.Tensor]:
    model = tied(width)
    optimizer = optimizer_of(model)
    for step in steps:
        for micro in range(2):
            for rank in range(4):
                (loss_of(model, step, micro, rank) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def expect_state(model: nn.Module, want: dict[str, torch.Tensor], case: object) -> None:
    state = model.state_dict()
    assert state.keys() == want.keys()
    for name, tensor in state.items():
        full = whole(tensor)
        assert torch.allclose(full, want[name], rtol=1e-4, atol=1e-5), (case, name)


@ranks(4, timeout_s=100)
def test_trained_saved_and_loaded_they_equal_one_process(tmp_path: Path) -> None:
    """Two steps, a checkpoint, a fresh model of another cut and seed, two more steps."""
    cuts = ((1, 4), (2, 2), (4, 1))
    for number, width in enumerate((3, 5, 17)):
        want, first = train_alone(width, range(4)), cuts[number]
        model = tied(width, mesh_of(*first))
        assert model.head.weight is model.embedding.weight
        optimizer = optimizer_of(model)
        train(model, optimizer, range(2))
        expect_state(model, train_alone(width, range(2)), (width, first))
        folder = tmp_path / str(width)
        names = ("model", "optimizer")
        dcp.save(
            dict(zip(names, get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder
        )
        for cut in (first, cuts[number - 1]):  # into the same cut, and into another
            fresh = tied(width, mesh_of(*cut))
            with torch.no_grad():
                for parameter in fresh.parameters():
                    parameter.zero_()
            its_optimizer = optimizer_of(fresh)
            states = dict(zip(names, get_state_dict(fresh, its_optimizer), strict=True))
            dcp.load(states, checkpoint_id=folder)
            set_state_dict(
                fresh,
                its_optimizer,
                model_state_dict=states["model"],
                optim_state_dict=states["optimizer"],
            )
            train(fresh, its_optimizer, range(2, 4))
            expect_state(fresh, want, (width, first, cut))
