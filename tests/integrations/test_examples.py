"""Each framework trains to the losses of plain PyTorch, with the same messages between replicas."""

import pytest
from harness.examples import EXAMPLES, Run, run_example

REPLICAS = (0, 2)  # the replication group of rank 0
SCRIPTS = sorted(path.name for path in (EXAMPLES / "integrations").glob("*.py"))
THE_MODEL_OF_01 = ["with_accelerate.py", "with_fabric.py", "with_lightning_trainer.py"]

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' own


@pytest.fixture(scope="module")
def plain() -> Run:
    return run_example("01_add_to_fsdp2.py")


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_is_short(script: str) -> None:
    assert len((EXAMPLES / "integrations" / script).read_text().splitlines()) < 80


@pytest.mark.timeout(420)
@pytest.mark.parametrize("script", THE_MODEL_OF_01)
def test_losses_and_messages_are_those_of_plain_pytorch(script: str, plain: Run) -> None:
    ran = run_example(f"integrations/{script}")
    assert len(plain.losses) == 8
    assert ran.losses == pytest.approx(plain.losses, rel=1e-5)
    assert [call for call in ran.sent.calls if call.ranks == REPLICAS] == [
        call for call in plain.sent.calls if call.ranks == REPLICAS
    ]
