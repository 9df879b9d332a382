"""Every example runs as its own first lines say, and its loss falls."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.timeout(180)  # the ranks import torch beside whatever else runs
@pytest.mark.parametrize("example", EXAMPLES, ids=[example.stem for example in EXAMPLES])
def test_an_example_runs_and_its_loss_falls(example: Path) -> None:
    text = example.read_text()
    assert len(text.splitlines()) < 60
    said = re.search(r"torchrun (--nproc-per-node \d+) examples/", text)
    assert said is not None, "its docstring names its command"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *said[1].split()]
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    ran = subprocess.run(
        [*command, str(example)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", ran.stdout)]
    assert len(losses) >= 4, ran.stdout
    assert losses[-1] < 0.75 * losses[0], losses
    assert "plain FSDP over all ranks" in ran.stdout
