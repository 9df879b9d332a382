"""The examples run as their own first lines say; with MiCS the losses are those without it."""

import pytest
from harness.examples import EXAMPLES, Run, run_example

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
