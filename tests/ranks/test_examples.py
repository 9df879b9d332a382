"""The examples run as their own first lines say; with MiCS the losses are those without it."""

import pytest
import torch
from harness.examples import EXAMPLES, Run, run_example
from torch import nn

REPLICAS = (0, 2)  # the replication group of rank 0
NUM_STEPS, NUM_MICRO_STEPS, NUM_UNITS = 20, 4, 6
NUM_PARAMETERS = 256 * 64 + 4 * (64 + 64 + 64 * 64 + 64) + 64 * 256 + 256


@pytest.fixture(scope="module")
def plain() -> Run:
    return run_example("00_fsdp2.py")


@pytest.fixture(scope="module")
def mics() -> Run:
    return run_example("01_add_to_fsdp2.py")


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(script: object) -> None:
    assert len(script.read_text().splitlines()) < 60


@pytest.mark.timeout(420)  # both scripts, beside whatever else runs
def test_the_losses_are_those_without_mics_and_fall(plain: Run, mics: Run) -> None:
    assert len(mics.losses) == 8
    assert mics.losses == pytest.approx(plain.losses, rel=1e-5)
    assert mics.losses[-1] < 0.75 * mics.losses[0]


@pytest.mark.timeout(420)  # both scripts, beside whatever else runs
def test_gradients_cross_the_replicas_once_a_step(plain: Run, mics: Run) -> None:
    """Without MiCS, once a micro-step and unit; in both cases all of the shard of rank 0."""
    shard_bytes = 4 * NUM_PARAMETERS // 2
    every = plain.sent.of("all_reduce", ranks=REPLICAS)
    assert len(every) == NUM_STEPS * NUM_MICRO_STEPS * NUM_UNITS
    assert sum(call.message_bytes for call in every) == NUM_STEPS * NUM_MICRO_STEPS * shard_bytes
    ours = mics.sent.of("all_reduce", ranks=REPLICAS)
    gradients = [call for call in ours if call.message_bytes == shard_bytes]
    agreements = [call for call in ours if call.message_bytes < 1000]
    assert (len(gradients), len(agreements)) == (NUM_STEPS, NUM_STEPS)
    assert len(ours) == 2 * NUM_STEPS


@pytest.mark.timeout(300)
def test_with_tensor_parallel_the_losses_are_those_of_one_process() -> None:
    run = run_example("02_with_tensor_parallel.py")
    assert len(run.losses) == 20
    assert run.losses[:10] == pytest.approx(in_one_process(num_steps=10), rel=1e-5)
    assert run.losses[-1] < 0.75 * run.losses[0]


def in_one_process(num_steps: int) -> list[float]:
    """What example 02 trains, by torch alone: the text of its 4 readers, 2 micro-steps each."""
    torch.manual_seed(0)
    mlps = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(256, 64), *mlps, nn.Linear(64, 256))
    for mlp in mlps:
        mlp.append(nn.LayerNorm(64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    readers = [torch.Generator().manual_seed(reader) for reader in range(4)]
    losses, clipped = [], 0
    for _ in range(num_steps):
        drawn = [torch.randint(0, 256, (32,), generator=it) for it in readers for _ in range(2)]
        parts = [nn.functional.cross_entropy(model(t), (t * 7 + 3) % 256) for t in drawn]
        loss = torch.stack(parts).mean()
        loss.backward()
        clipped += int(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5) > 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert clipped > 0
    return losses
