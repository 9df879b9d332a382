"""Run an example script as torchrun would, on forked ranks that share one import of everything."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from harness.counting import Collective, Collectives, count_collectives
from harness.ranks import free_port, run_on_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Run:
    """What rank 0 printed, and what it sent."""

    printed: str
    sent: Collectives

    @property
    def losses(self) -> list[float]:
        """In the order of the steps that the script prints."""
        return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", self.printed)]


def run_example(script: str, *arguments: str, timeout_s: float = 200.0) -> Run:
    """Run `examples/<script>` on the number of ranks that its own first lines name."""
    path = EXAMPLES / script
    said = re.search(rf"torchrun --nproc-per-node (\d+) examples/{script}", path.read_text())
    if said is None:
        raise AssertionError(f"{script}: its docstring does not name its command")
    world_size = int(said[1])
    with tempfile.TemporaryDirectory(prefix="example") as folder:
        printed, sent = Path(folder) / "printed", Path(folder) / "sent"

        def body() -> None:
            rank = int(os.environ["RANK"])
            sys.argv = [str(path), *arguments]
            with (
                printed.open("w") if rank == 0 else contextlib.nullcontext(sys.stdout) as out,
                contextlib.redirect_stdout(out),
                count_collectives() as count,
            ):
                runpy.run_path(str(path), run_name="__main__")
            if rank == 0:
                sent.write_text(
                    json.dumps([[c.kind, c.message_bytes, c.ranks] for c in count.calls])
                )

        run_on_ranks(world_size, body, timeout_s=timeout_s, port=free_port())
        calls = [
            Collective(kind, size, tuple(ranks))
            for kind, size, ranks in json.loads(sent.read_text())
        ]
        return Run(printed.read_text(), Collectives(calls))
