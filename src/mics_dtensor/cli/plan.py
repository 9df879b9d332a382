"""`mics plan`: which partition size, why, and how sure; without a GPU, without ranks."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mics_dtensor.cli.plot import plot_answer, plot_scaling
from mics_dtensor.cli.write import chosen_values, write_choice
from mics_dtensor.errors import PlanError
from mics_dtensor.plan.cluster import presets
from mics_dtensor.plan.cluster_file import cluster
from mics_dtensor.plan.question import Question
from mics_dtensor.plan.report import answer_title, as_json, render
from mics_dtensor.plan.scaling import (
    Scaling,
    parse_nodes,
    render_scaling,
    scaling,
    scaling_json,
    scaling_title,
)
from mics_dtensor.plan.search import answer
from mics_dtensor.train.config import RunConfig
from mics_dtensor.train.degrees import written_partition_size
from mics_dtensor.train.load import Run, load
from mics_dtensor.train.planning import Freedom, contradiction, question
from mics_dtensor.train.values import LISTS

if TYPE_CHECKING:
    from mics_dtensor.train.tracing import Tracer

SUMMARY = "  plan           the partition size to take on a cluster, with memory and time of each"


def parser() -> argparse.ArgumentParser:
    """The arguments of `mics plan`."""
    its = argparse.ArgumentParser(
        prog="mics plan",
        description=f"{SUMMARY.split(maxsplit=1)[1]}. Other arguments are overrides: "
        f"--section.key value, in the file's names; lists are written {LISTS}.",
        allow_abbrev=False,
    )
    its.add_argument("--config-file", required=True, help="TOML file of a run")
    its.add_argument(
        "--cluster", help="a preset, or a file ending in .toml; not given, [mics] cluster"
    )
    its.add_argument(
        "--nodes",
        type=int,
        help="nodes of the cluster to use; with --scale, those that the file's batch is meant for "
        "(default: the first of --scale)",
    )
    its.add_argument("--ranks-per-node", type=int, help="GPUs of a node to use")
    its.add_argument(
        "--as-written", action="store_true", help="keep micro-batch, checkpointing and hierarchy"
    )
    its.add_argument(
        "--optimizer-over-replicas",
        action="store_true",
        help="also where optimizer states are cut over the replicas",
    )
    its.add_argument(
        "--scale", metavar="1,2,4,...,64", help="weak scaling over these numbers of nodes instead"
    )
    its.add_argument(
        "--trace",
        action="store_true",
        help="memory from the run's own model, traced on fake tensors (needs torchtitan, no GPU)",
    )
    its.add_argument(
        "--trace-cache",
        type=Path,
        metavar="FOLDER",
        help="where traces are kept (default: mics_dtensor/traces in the cache of the user)",
    )
    its.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it too")
    its.add_argument("--write", action="store_true", help="put what is recommended into the file")
    its.add_argument("--json", action="store_true", help="everything, for programs")
    return its


def run(argv: Sequence[str]) -> str:
    """What is printed. Raises MicsError."""
    options, overrides = parser().parse_known_args(list(argv))
    run_ = load(["--config-file", options.config_file, *overrides])
    config = run_.config
    scale = None if options.scale is None else parse_nodes(options.scale)
    nodes = scale[0] if options.nodes is None and scale else options.nodes
    if nodes is None:
        raise PlanError("how many nodes? give --nodes, or --scale 1,2,4,...,64 to compare many")
    if nodes < 1:
        raise PlanError(f"--nodes {nodes}; give 1 or more")
    named = options.cluster or config.mics.cluster
    if named is None:
        raise PlanError(
            f"which cluster? give --cluster, or [mics] cluster: a preset "
            f"({', '.join(presets()['cluster'])}) or a file that ends in .toml"
        )
    its = cluster(named)
    if options.ranks_per_node is not None:
        if not 1 <= options.ranks_per_node <= its.ranks_per_node:
            raise PlanError(
                f"--ranks-per-node {options.ranks_per_node}: a node of {its.name} has "
                f"{its.ranks_per_node}; give 1 to {its.ranks_per_node}"
            )
        if its.timings and options.ranks_per_node != its.ranks_per_node:
            raise PlanError(
                f"--ranks-per-node {options.ranks_per_node}: {its.name} was measured with "
                f"{its.ranks_per_node} ranks on a node, which is another cluster; leave it out, or "
                f"measure with {options.ranks_per_node} (mics measure --ranks-per-node)"
            )
        its = replace(its, ranks_per_node=options.ranks_per_node)
    said, has = config.mics.ranks_per_node, its.ranks_per_node
    if said not in (None, has) and options.ranks_per_node is not None:
        raise PlanError(contradiction(said, has))
    if said not in (None, has):
        raise PlanError(
            f"mics.ranks_per_node = {said} contradicts {its.name}, which has {has} ranks on a "
            f"node; give --ranks-per-node, or --mics.ranks_per_node={has}, or delete the line"
        )
    freedom = Freedom(
        variants=not options.as_written, optimizer_over_replicas=options.optimizer_over_replicas
    )
    asked = question(config, its, nodes, freedom)
    if scale is None:
        asked = _with_its_own(asked, run_)
    if options.trace_cache is not None and not options.trace:
        raise PlanError("--trace-cache is where --trace keeps its traces; give --trace too")
    if options.trace:
        asked = replace(asked, tracer=_tracer(config, options.trace_cache))
    if scale is not None:
        return _scaled(asked, scale, config, options)
    return _answered(asked, config, options)


def _with_its_own(asked: Question, run_: Run) -> Question:
    """The question that knows the file's own partition size. Raises ConfigError."""
    size, said = written_partition_size(run_, asked.topology), run_.config.mics.partition_size
    notes = asked.notes
    if size is None and said != "auto":
        notes += (f"mics.partition_size = {said}, as written, is no size on these nodes",)
    return replace(asked, written_partition_size=size, notes=notes)


def _tracer(config: RunConfig, folder: Path | None) -> Tracer:
    try:
        from mics_dtensor.train.tracing import Tracer
    except ImportError as error:
        raise PlanError(
            f"--trace runs torchtitan's model on fake tensors, and {error}; pip install "
            "mics-dtensor[train], or leave --trace out: the closed form needs neither"
        ) from None
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Tracer(config, folder or home / "mics_dtensor" / "traces")


def _assumed_for_the_first(curves: Scaling) -> Scaling:
    """With a note of the nodes that the file's batch was taken to be meant for."""
    asked = curves.question
    fits = curves.curves["best"][0].row is not None
    note = (
        f"global_batch_size {asked.global_batch} is taken as meant for {asked.nodes_in_words}, the "
        f"first of --scale{', where the model does not fit' * (not fits)}; if it is meant for "
        "others, give --nodes"
    )
    return replace(curves, question=replace(asked, notes=(*asked.notes, note)))


def _scaled(
    asked: Question, scale: Sequence[int], config: RunConfig, options: argparse.Namespace
) -> str:
    if options.write:
        raise PlanError("--scale compares many clusters; ask for one of them to --write its answer")
    curves = scaling(asked, scale)
    if options.nodes is None and config.training.global_batch_size > 0:
        curves = _assumed_for_the_first(curves)
    done = []
    if options.plot is not None:
        plot_scaling(curves, options.plot, title=scaling_title(curves))
        done.append(f"{options.plot}: drawn")
    if options.json:
        return json.dumps(scaling_json(curves), indent=2, allow_nan=False)
    return "\n".join([render_scaling(curves), *done])


def _answered(asked: Question, config: RunConfig, options: argparse.Namespace) -> str:
    found = answer(asked)
    done = []
    if options.plot is not None:
        plot_answer(found, options.plot, title=answer_title(asked))
        done.append(f"{options.plot}: drawn")
    if options.write:
        values = chosen_values(asked, found.best.variant)
        done += write_choice(Path(options.config_file), config, values)
    if options.json:
        return json.dumps(as_json(asked, found) | {"done": done}, indent=2, allow_nan=False)
    return "\n".join([render(asked, found), *done])
