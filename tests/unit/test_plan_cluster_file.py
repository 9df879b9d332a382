"""A cluster file says only what a cluster can be; all else is refused by file, key and value."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from harness.timings import timed

from mics_dtensor.cli import main
from mics_dtensor.errors import PlanError
from mics_dtensor.plan.cluster_file import cluster
from mics_dtensor.plan.cluster_keys import LINK, REQUIRED, TABLES

ROOT = Path(__file__).parents[2]
FILE = ROOT / "train_configs" / "llama3_8b_2x8.toml"
VALUES = {
    "cluster": {
        "name": '"ours"',
        "device": '"H100"',
        "ranks_per_node": "8",
        "peak_flops_per_s": "989e12",
        "product_share": "0.6",
        "product_half_width": "400",
        "memory_bytes": "80e9",
        "memory_bytes_per_s": "3.35e12",
        "base_latency_s": "8.4e-6",
        "reserved_bytes": "2e9",
        "overlap_slowdown": "0.2",
        "unit_s": "1e-4",
        "unit_s_per_byte": "1e-12",
        "num_nodes": "2",
        "hosts": '["a", "b"]',
        "backend": '"nccl"',
        "origin": '"measured"',
    },
    "link.intra_node": {
        "bandwidth_bytes_per_s": "360e9",
        "latency_s": "4e-6",
        "shares": "[[1e6, 0.2], [1e9, 1.0]]",
        "origin": '"measured"',
    },
    "link.inter_node": {
        "bandwidth_bytes_per_s": "340e9",
        "latency_s": "54e-6",
        "shares": "[[1e6, 0.2], [1e9, 1.0]]",
        "origin": '"measured"',
    },
    "timing": {
        "collective": '"all_gather"',
        "num_nodes": "2",
        "ranks_per_node": "8",
        "size_bytes": "[65536, 131072]",
        "seconds": "[1e-3, 2e-3]",
    },
    "product": {"name": '"w1"', "shape": "[8, 4, 2]", "flops_per_s": "6e14"},
}
EVERY = [(table, name) for table, keys in TABLES.items() for name in keys]
NUMBERS = [(table, name) for table, name in EVERY if VALUES[table][name][0] in "[0123456789"]
NUMBERS.remove(("cluster", "hosts"))


Changes = Mapping[tuple[str, str], str | None]


def tables(changes: Changes | None = None) -> list[str]:
    """The text of each; None leaves a key out, and a new one is added."""
    found = []
    for table, values in VALUES.items():
        its = {**values, **{n: v for (t, n), v in (changes or {}).items() if t == table}}
        head = f"[[{table}]]" if table in ("timing", "product") else f"[{table}]"
        found.append("\n".join([head, *(f"{n} = {v}" for n, v in its.items() if v is not None)]))
    return found


def text(changes: Changes | None = None) -> str:
    """A file with every key."""
    return "\n".join(["schema = 1", *tables(changes)])


CLUSTER, INSIDE, BETWEEN, *_ = tables()


def refused(folder: Path, written: str) -> str:
    path = folder / "cluster.toml"
    path.write_text(written, encoding="utf-8")
    with pytest.raises(PlanError) as error:
        cluster(str(path))
    said = str(error.value)
    assert said.startswith(str(path))
    assert "\n" not in said
    return said.removeprefix(str(path)).lstrip(": ")


def test_every_key_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text())
    its = cluster(str(path))
    assert (its.ranks_per_node, its.memory_bytes, its.reserved_bytes) == (8, 80 * 10**9, 2 * 10**9)
    assert (its.product_half_width, its.base_latency_s, its.measured_nodes) == (400, 8.4e-6, 2)
    assert (its.overlap_slowdown, its.unit_s, its.unit_s_per_byte) == (0.2, 1e-4, 1e-12)
    assert its.between.shares == ((1e6, 0.2), (1e9, 1.0))
    assert (its.between.curve_ranks, its.between.curve_nodes) == (16, 2)
    assert its.timings[0].sizes_bytes == (65536, 131072)
    assert {its.origin, its.inside.origin, its.between.origin} == {"measured"}


def test_what_has_a_default_may_be_left_out(tmp_path: Path) -> None:
    left_out: Changes = {
        (table, name): None for table, name in EVERY if TABLES[table][name].default is not REQUIRED
    }
    path = tmp_path / "cluster.toml"
    path.write_text(text(left_out))
    its = cluster(str(path))
    assert (its.origin, its.inside.origin, its.reserved_bytes) == ("user", "user", None)
    assert its.between.shares == ((1.0, 1.0),)
    for table, name in EVERY:
        if (table, name) not in left_out:
            said = refused(tmp_path, text({(table, name): None}))
            assert f"lacks the key {name}; docs/formats.md" in said


@pytest.mark.parametrize("rate", ["10e6", "5e7"])
def test_a_slow_network_is_a_cluster(tmp_path: Path, rate: str) -> None:
    """80 and 400 Mbit/s, and gloo's milliseconds."""
    link = "link.inter_node"
    path = tmp_path / "cluster.toml"
    path.write_text(text({(link, "bandwidth_bytes_per_s"): rate, (link, "latency_s"): "3e-2"}))
    assert cluster(str(path)).between.bandwidth_bytes_per_s == float(rate)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "true", '"8"', "[]", "{ a = 1 }"])
@pytest.mark.parametrize(("table", "name"), NUMBERS)
def test_no_number_is_what_it_cannot_be(tmp_path: Path, table: str, name: str, value: str) -> None:
    listed = TABLES[table][name].listed
    for written in (value, f"[{value}]", f"[[1e6, {value}]]"):
        assert f"{name} " in refused(tmp_path, text({(table, name): written}))
    said = refused(tmp_path, text({(table, name): f"[{value}]" if listed else value}))
    assert f"give {TABLES[table][name].words}" in said
    assert f"[{table}]" in said


@pytest.mark.parametrize(("table", "name"), [key for key in EVERY if key not in NUMBERS])
def test_no_text_is_a_number(tmp_path: Path, table: str, name: str) -> None:
    assert f"{name} = 3 in [" in refused(tmp_path, text({(table, name): "3"}))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("cluster.product_share", "60", "a share from 1e-6 to 1: 60 % are 0.6"),
        ("cluster.product_share", "1.5", "product_share = 1.5 in [cluster]"),
        ("cluster.product_half_width", "-4096", "a width, from 0 to 1e6"),
        ("cluster.overlap_slowdown", "-1", "from 0 to 1000"),
        ("cluster.reserved_bytes", "-1e9", "from 0"),
        ("cluster.base_latency_s", '"a"', 'base_latency_s = "a" in [cluster]'),
        ("cluster.memory_bytes", "80", "80 GB are 80e9"),
        ("cluster.memory_bytes_per_s", "3.35", "give bytes a second"),
        ("cluster.peak_flops_per_s", "989", "989 TFLOP/s are 989e12"),
        ("cluster.ranks_per_node", "8.5", "a whole number from 1"),
        ("cluster.unit_s", "100", "seconds, from 0 to 10"),
        ("cluster.unit_s_per_byte", "1.1", "1 s for 1 GB is 1e-9"),
        ("cluster.origin", '"guessed"', "give one of preset, measured, user"),
        ("link.inter_node.bandwidth_bytes_per_s", "340", "340 GB/s are 340e9"),
        ("link.inter_node.latency_s", "54", "latency_s = 54 in [link.inter_node]"),
        ("link.intra_node.latency_s", "1.0", "54 us are 54e-6"),
        ("link.intra_node.shares", "[[1e6, 0.2, 3]]", "a list of [bytes, share]"),
        ("link.intra_node.shares", "[[1e9, 0.2], [1e6, 1]]", "ascending"),
        ("link.intra_node.shares", "[[1e6, 1.5]]", "shares from 1e-12 to 1"),
        ("timing.num_nodes", "1.5", "num_nodes = 1.5 in [[timing]] no. 1 cannot be; give a whole"),
        ("timing.ranks_per_node", "9", "measured on another cluster"),
        ("timing.collective", '"gather"', "give one of all_gather"),
        ("timing.size_bytes", "[65536, 65536.5]", "size_bytes holds 65536.5"),
        ("timing.size_bytes", "[131072, 65536]", "ascending sizes above 0"),
        ("timing.seconds", "[1e-3]", "a time above 0 for each"),
        ("timing.seconds", "[1e-3, 0]", "seconds holds 0 in [[timing]] no. 1"),
        ("cluster.hosts", '["a", 3]', "hosts holds 3"),
    ],
)
def test_a_value_of_another_unit_or_kind_is_refused(
    tmp_path: Path, key: str, value: str, said: str
) -> None:
    table, _, name = key.rpartition(".")
    assert said in refused(tmp_path, text({(table, name): value}))


@pytest.mark.parametrize(
    ("table", "name", "said"),
    [
        ("cluster", "reserved_byte", "in [cluster]; did you mean reserved_bytes?"),
        ("link.intra_node", "rate", "there are bandwidth_bytes_per_s, latency_s, shares, origin"),
        ("timing", "second", "in [[timing]] no. 1; did you mean seconds?"),
        ("product", "shapes", "in [[product]] no. 1; did you mean shape?"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(
    tmp_path: Path, table: str, name: str, said: str
) -> None:
    found = refused(tmp_path, text({(table, name): "5"}))
    assert found.startswith(f"unknown key {name} in [")
    assert said in found


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("schema = 1", 'schema = "1"', 'has schema "1"; this version reads schema 1, written'),
        ("schema = 1", "schema = true", "has schema true; this version reads schema 1"),
        ("schema = 1", "schema = 1.0", "has schema 1.0; this version reads schema 1"),
        ("schema = 1", "schema = 1\ntimings = 3", "unknown key timings in the file; did you mean"),
        ("schema = 1", f"schema = {'1' * 5000}", "cannot be read: "),
        ("[cluster]", "[[cluster]]", "not a table; write its keys under [cluster]"),
        ("[link.inter_node]", "[other]", "unknown key other in the file"),
        ("[[timing]]", "[timing]", "write a table [[timing]] for each"),
        ("[link.intra_node]", "[link.inside]", "unknown key inside in [link]"),
    ],
)
def test_a_file_of_another_shape_is_refused(
    tmp_path: Path, before: str, after: str, said: str
) -> None:
    assert said in refused(tmp_path, text().replace(before, after))


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("", "the file lacks the key link"),
        ("link = 3", "[link] is 3, not a table; write its keys under [link]"),
        ("link = {}", "the file lacks the key cluster"),
        ("link = {}\ncluster = 3", "[cluster] is 3, not a table"),
        (f"{CLUSTER}\n[link]\ninter_node = 3", "[link] lacks the key intra_node"),
        (f"{CLUSTER}\n{INSIDE}\n[link]\ninter_node = 3", "[link.inter_node] is 3, not a table"),
        (f"product = [3]\n{CLUSTER}\n{INSIDE}\n{BETWEEN}", "[[product]] no. 1 is 3, not a table"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, written: str, said: str) -> None:
    assert said in refused(tmp_path, f"schema = 1\n{written}")


def test_a_time_that_is_no_number_is_no_timing() -> None:
    """As a report of nccl-tests may hold: its JSON has NaN."""
    its = timed("all_gather", 1, 2)
    for no_time in (math.nan, math.inf):
        with pytest.raises(PlanError, match="a time above 0"):
            replace(its, seconds=(*its.seconds[:-1], no_time))


def test_the_plan_is_json_and_a_bad_file_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"
    ask = ["plan", "--config-file", str(FILE), "--cluster", str(path), "--nodes", "2", "--json"]
    path.write_text(text())
    assert main(ask) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["rows"]
    path.write_text(text({("cluster", "product_half_width"): "nan"}))
    assert main(ask) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert f"{path}: product_half_width = nan in [cluster] cannot be; give a width" in said.err


@pytest.mark.parametrize(
    ("ends", "of_links"),
    [
        (("1e6", "1e-6", "1e6", "1e6", "1000"), ("1e6", "0.99", "[[1e15, 1e-12]]")),
        (("1e18", "1", "0", "1e15", "0"), ("1e15", "0", "[[1, 1]]")),
    ],
)
def test_every_plan_of_what_is_in_range_is_finite(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    ends: tuple[str, ...],
    of_links: tuple[str, ...],
) -> None:
    """The worst and the best cluster that a file may tell, all at once."""
    rate = ("peak_flops_per_s", "product_share", "product_half_width", "memory_bytes_per_s")
    link = ("bandwidth_bytes_per_s", "latency_s", "shares")
    changes = dict(zip([("cluster", n) for n in (*rate, "overlap_slowdown")], ends, strict=True))
    for side in ("link.intra_node", "link.inter_node"):
        changes |= dict(zip([(side, name) for name in link], of_links, strict=True))
    path = tmp_path / "cluster.toml"
    path.write_text(text(changes).partition("[[timing]]")[0])
    ask = ["plan", "--config-file", str(FILE), "--cluster", str(path)]
    for nodes in (["--nodes", "4"], ["--scale", "2,4"]):
        assert main([*ask, *nodes, "--training.global_batch_size", "64", "--json"]) == 0
        json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def test_the_page_has_every_key() -> None:
    page = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    section = page.partition("## cluster.toml")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    told = {name for row in rows for name in re.findall(r"`([a-z_.*]+)`", row)}
    links = {f"link.*.{name}" for name in LINK}
    keys = {f"{table}.{name}" for table, name in EVERY if not table.startswith("link")}
    assert told == keys | links | {"link.intra_node", "link.inter_node", "timing", "product"}
