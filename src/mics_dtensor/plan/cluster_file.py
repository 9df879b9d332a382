"""A cluster by name: a preset, a `cluster.toml`, or what nccl-tests wrote. No torch."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mics_dtensor.errors import PlanError
from mics_dtensor.plan.cluster import Cluster, Link, preset_of_cluster
from mics_dtensor.plan.cluster_keys import TABLES, known, lacking, shown, values
from mics_dtensor.plan.nccl_tests import cluster_of_reports
from mics_dtensor.plan.timing import Timing


def cluster(name: str) -> Cluster:
    """A preset by name, or the cluster of a .toml, or of .json reports of nccl-tests, with commas.

    Raises PlanError.
    """
    if name.endswith(".json"):
        return cluster_of_reports([Path(part) for part in name.split(",")])
    if not name.endswith(".toml"):
        return preset_of_cluster(name)
    return _read(Path(name))


def _read(path: Path) -> Cluster:
    """`cluster.toml` (docs/formats.md): every constant measured or written by the user."""
    try:
        read = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise PlanError(f"there is no file {path}; --cluster wants one, or a preset") from None
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} cannot be read: {error}") from None
    if "schema" not in read:
        raise PlanError(
            f"{path} has no key schema, so it is not a cluster file: give what `mics measure` "
            "wrote, a file by docs/formats.md, or a preset"
        )
    schema = read["schema"]
    if type(schema) is not int or schema != 1:
        raise PlanError(
            f"{path} has schema {shown(schema)}; this version reads schema 1, written schema = 1"
        )
    try:
        return _cluster(read, path)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


def _cluster(read: Mapping[str, Any], path: Path) -> Cluster:
    known(read, ("schema", "cluster", "link", "timing", "product"), "the file")
    links = _inner(read, "link", "the file")
    known(links, ("intra_node", "inter_node"), "[link]")
    its = values(_inner(read, "cluster", "the file"), TABLES["cluster"], "[cluster]")
    node = its["ranks_per_node"]
    inside, between = (
        values(_inner(links, side, "[link]"), TABLES[f"link.{side}"], f"[link.{side}]")
        for side in ("intra_node", "inter_node")
    )
    _listed(read, "product")
    return Cluster(
        name=its["name"],
        gpu=its["device"],
        ranks_per_node=node,
        peak_flops_per_s=its["peak_flops_per_s"],
        product_share=its["product_share"],
        product_half_width=its["product_half_width"],
        memory_bytes=its["memory_bytes"],
        memory_bytes_per_s=its["memory_bytes_per_s"],
        inside=_link(inside, path, node, 1),
        between=_link(between, path, 2 * node, 2),
        base_latency_s=its["base_latency_s"],
        origin=its["origin"],
        source=str(path),
        timings=tuple(_timing(each, node) for each in _listed(read, "timing")),
        overlap_slowdown=its["overlap_slowdown"],
        unit_s=its["unit_s"],
        unit_s_per_byte=its["unit_s_per_byte"],
        reserved_bytes=its["reserved_bytes"],
        measured_nodes=its["num_nodes"],
    )


def _inner(read: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in read:
        raise lacking(name, where)
    return read[name]


def _listed(read: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The tables of a list of tables, each with its values."""
    tables = read.get(name, [])
    if not isinstance(tables, list):
        raise PlanError(f"{name} is {shown(tables)}; write a table [[{name}]] for each")
    return [
        values(each, TABLES[name], f"[[{name}]] no. {number}")
        for number, each in enumerate(tables, start=1)
    ]


def _timing(read: Mapping[str, Any], ranks_per_node: int) -> Timing:
    if read["ranks_per_node"] > ranks_per_node:
        raise PlanError(
            f"a timing has {read['ranks_per_node']} ranks in a node, but a node of [cluster] has "
            f"{ranks_per_node}: measured on another cluster"
        )
    return Timing(
        collective=read["collective"],
        num_nodes=read["num_nodes"],
        ranks_per_node=read["ranks_per_node"],
        sizes_bytes=read["size_bytes"],
        seconds=read["seconds"],
    )


def _link(its: Mapping[str, Any], path: Path, ranks: int, nodes: int) -> Link:
    measured = its["shares"] is not None
    return Link(
        bandwidth_bytes_per_s=its["bandwidth_bytes_per_s"],
        hop_latency_s=its["latency_s"],
        shares=its["shares"] if measured else ((1.0, 1.0),),
        curve_ranks=ranks if measured else 1,
        curve_nodes=nodes if measured else 1,
        origin=its["origin"],
        source=str(path),
    )
