"""A cluster by name: a preset, a `cluster.toml`, or what nccl-tests wrote. No torch."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from mics_dtensor.errors import PlanError
from mics_dtensor.plan.cluster import UNCERTAINTY, Cluster, Link, Origin, preset_of_cluster
from mics_dtensor.plan.nccl_tests import cluster_of_reports
from mics_dtensor.plan.timing import Timing

NUMBERS = ("peak_flops_per_s", "product_share", "memory_bytes", "memory_bytes_per_s")


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
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PlanError(f"{path} cannot be read: {error}") from None
    if "schema" not in read:
        raise PlanError(
            f"{path} has no key schema, so it is not a cluster file: give what `mics measure` "
            "wrote, a file by docs/formats.md, or a preset"
        )
    if read["schema"] != 1:
        raise PlanError(f"{path} has schema {read['schema']}; this version reads schema 1")
    try:
        return _cluster(read, path)
    except KeyError as error:
        raise PlanError(f"{path} lacks the key {error}; docs/formats.md lists them") from None
    except (TypeError, ValueError) as error:
        if isinstance(error, PlanError):
            raise PlanError(f"{path}: {error}") from None
        raise PlanError(f"{path}: a value of the wrong type ({error})") from None


def _cluster(read: Mapping[str, Any], path: Path) -> Cluster:
    its, links = read["cluster"], read["link"]
    numbers = {name: float(its[name]) for name in NUMBERS}
    if min(numbers.values()) <= 0 or its["ranks_per_node"] < 1:
        raise PlanError("every number of [cluster] must be above 0")
    node = its["ranks_per_node"]
    timings = tuple(_timing(each, node) for each in read.get("timing", ()))
    reserved = its.get("reserved_bytes")
    return Cluster(
        name=its["name"],
        gpu=its["device"],
        ranks_per_node=node,
        peak_flops_per_s=numbers["peak_flops_per_s"],
        product_share=numbers["product_share"],
        product_half_width=float(its.get("product_half_width", 0.0)),
        memory_bytes=int(numbers["memory_bytes"]),
        memory_bytes_per_s=numbers["memory_bytes_per_s"],
        inside=_link(links["intra_node"], path, node, 1),
        between=_link(links["inter_node"], path, 2 * node, 2),
        base_latency_s=its.get("base_latency_s", 0.0),
        origin=_origin(its.get("origin", "user")),
        source=str(path),
        timings=timings,
        overlap_slowdown=float(its.get("overlap_slowdown", 0.0)),
        unit_s=_added(its, "unit_s"),
        unit_s_per_byte=_added(its, "unit_s_per_byte"),
        reserved_bytes=None if reserved is None else int(reserved),
        measured_nodes=its.get("num_nodes"),
    )


def _added(read: Mapping[str, Any], key: str) -> float:
    value = float(read.get(key, 0.0))
    if not 0 <= value < math.inf:
        raise PlanError(f"cluster.{key} = {value}; give 0 or more seconds")
    return value


def _timing(read: Mapping[str, Any], ranks_per_node: int) -> Timing:
    if read["ranks_per_node"] > ranks_per_node:
        raise PlanError(
            f"a timing has {read['ranks_per_node']} ranks in a node, but a node of [cluster] has "
            f"{ranks_per_node}: measured on another cluster"
        )
    return Timing(
        collective=read["collective"],
        num_nodes=int(read["num_nodes"]),
        ranks_per_node=int(read["ranks_per_node"]),
        sizes_bytes=tuple(int(size) for size in read["size_bytes"]),
        seconds=tuple(float(seconds) for seconds in read["seconds"]),
    )


def _link(read: Mapping[str, Any], path: Path, ranks: int, nodes: int) -> Link:
    shares = read.get("shares", [[1, 1.0]])
    bandwidth, latency = float(read["bandwidth_bytes_per_s"]), float(read["latency_s"])
    in_order = all(low[0] < high[0] for low, high in pairwise(shares))
    possible = all(size > 0 and 0 < share <= 1 for size, share in shares)
    if bandwidth <= 0 or latency < 0 or not shares or not in_order or not possible:
        raise PlanError(
            "a link has a bandwidth above 0, a latency of 0 or more, and shares "
            "[bytes, share] with ascending sizes and shares above 0 and at most 1"
        )
    return Link(
        bandwidth_bytes_per_s=bandwidth,
        hop_latency_s=latency,
        shares=tuple((float(size), float(share)) for size, share in shares),
        curve_ranks=ranks if "shares" in read else 1,
        curve_nodes=nodes if "shares" in read else 1,
        origin=_origin(read.get("origin", "user")),
        source=str(path),
    )


def _origin(said: str) -> Origin:
    for origin in UNCERTAINTY:
        if said == origin:
            return origin
    raise PlanError(f"origin {said!r}; write one of {', '.join(UNCERTAINTY)}")
