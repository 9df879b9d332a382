"""Bytes counted between nodes: those of the bound, stage by stage, for every kind of partition."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.cluster import what_is_missing  # noqa: E402

WHY_NOT = what_is_missing() if sys.platform == "linux" else "network namespaces are Linux's"
FRAMING = 1.002  # gloo's own, and what little the ranks tell each other besides
HEADERS = 1.02  # 0.3 % as a rule; a busy machine's TCP sends some more, smaller packets, and again


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """On 4 nodes of 2 ranks: half a node, a node, two nodes, and all of them."""
    return counted(tmp_path_factory.mktemp("cluster"), "--systems mics --partition-nodes 1/2,1,2,4")


def counted(folder: Path, which: str) -> list[dict[str, Any]]:
    """One step of each system on 4 nodes of 2 ranks."""
    path = folder / "results.json"
    arguments = f"--nodes 4 --ranks-per-node 2 --rate 1gbit --micro-steps 2 {which}"
    once = "--steps 1 --repetitions 1 --max-repetitions 1"
    command = [sys.executable, "-m", "benchmarks.emulated_cluster", *arguments.split()]
    done = subprocess.run(
        [*command, *once.split(), "--json", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return found


pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
    pytest.mark.timeout(450),
]


def test_a_step_sends_what_it_must_and_no_more(rows: list[dict[str, Any]]) -> None:
    assert [row["partition_nodes"] for row in rows] == [0.5, 1, 2, 4]
    for row in rows:
        bound = row["inter_node_bytes_bound"]
        over = row["inter_node_payload_per_step"] / bound
        assert 1 / FRAMING <= over <= FRAMING, (row["partition_nodes"], over)
        assert bound <= row["inter_node_bytes_per_step"] <= HEADERS * bound


def test_so_does_every_stage(rows: list[dict[str, Any]]) -> None:
    model_bytes = 4 * 1024 * 1024 * 4
    # Of a node, in a step of two micro-steps: gathers and reductions among the nodes of a group,
    # and an all-reduce among the replicas.
    each = {0.5: 0, 1: 0, 2: model_bytes // 2, 4: model_bytes * 3 // 4}
    boundary = {0.5: 3 / 4 * 2, 1: 3 / 4 * 2, 2: 1 / 2, 4: 0}
    for row in rows:
        nodes, stages = row["partition_nodes"], row["stages"]
        wanted = dict.fromkeys(("forward", "backward", "reduction"), 2 * each[nodes])
        wanted["boundary"] = round(boundary[nodes] * model_bytes)
        for stage, least in wanted.items():
            small = 20_000  # the agreement, and segments sent again inside a node
            over = stages[stage]["inter_node_payload"] - least
            assert abs(over) <= (FRAMING - 1) * least + small, (nodes, stage, over, least)
            assert least <= stages[stage]["inter_node_bytes"] <= HEADERS * least + small
        assert stages["other"]["inter_node_bytes"] < 20_000


def test_optimizer_states_over_the_replicas_send_an_all_reduce_or_three_quarters(
    tmp_path: Path,
) -> None:
    systems = ("mics", "mics-slices", "mics-bf16", "mics-slices-bf16")
    rows = counted(tmp_path, f"--systems {','.join(systems)} --partition-nodes 1")
    sent = {row["system"]: row["inter_node_payload_per_step"] for row in rows}
    assert sent["mics-slices"] <= 1.005 * sent["mics"], sent
    assert sent["mics-slices-bf16"] <= 0.755 * sent["mics-bf16"], sent
    for row in rows:
        assert row["stages"]["other"]["inter_node_bytes"] < 20_000
