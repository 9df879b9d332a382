"""The planner held against published runs: `python -m benchmarks.planner [--json FILE] [--fit]`.

Prints the error of every case and what holds of what was to be reached. Needs no torch; fits need
scipy, of the extra `test`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict
from importlib.util import find_spec

from benchmarks.arguments import result_file
from benchmarks.planner import deepspeed, foundry, published, rates, replicated, titan
from benchmarks.planner.checks import all_checks
from benchmarks.planner.counted import byte_cases
from benchmarks.planner.tables import decay_cases, fabrics, hops


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__)
    parser.add_argument("--json", type=result_file, help="write everything there")
    parser.add_argument("--fit", action="store_true", help="print what presets take from sources")
    options = parser.parse_args()
    can_fit = find_spec("scipy") is not None
    if options.fit and not can_fit:
        parser.error("--fit needs scipy: pip install '.[test]'")
    if options.fit:
        for name, value in asdict(rates.fitted_on_all()).items():
            print(f"{name}: {value:.3f}")
        for name, cases in rates.groups().items():
            mean = statistics.mean(abs(case.error) for case in cases)
            print(f"left out of the fit, {name}: mean error of {len(cases)} {mean:.1%}")
        print(f"float8: product_gain {titan.float8_gain():.2f}")
        print(f"A800 (AMSP): product_share {published.amsp_fit():.3f}")
        for curve, hop_s in hops().items():
            print(f"{curve}: hop_s {hop_s * 1e6:.1f} us")
        for fabric, (share, hop_s) in fabrics().items():
            print(f"{fabric}: share {share:.3f}, hop_s {hop_s * 1e6:.1f} us")
        for need in (deepspeed.of_one_node(), deepspeed.of_many_nodes()):
            print(f"deepspeed-0.5 on {need.ranks} ranks: {need.seconds * 1e3:.2f} ms a message")
        host = deepspeed.fitted_host()
        print(f"deepspeed-0.5: message_s {host.message_s * 1e6:.1f} us, ", end="")
        print(f"rank_s {host.rank_s * 1e6:.1f} us")
        return 0
    runs = {
        "llm-foundry 16-128": foundry.mpt_cases(),
        "torchtitan 8 -> 128": titan.titan_cases(),
        "torchtitan compiled from eager": titan.compiled_cases(),
        "float8 from one run": titan.float8_cases(),
        "AMSP 64": published.amsp_cases(),
        "InternLM 8-1024": replicated.internlm_cases(),
        "IBM 96 and 128": replicated.ibm_cases(),
    }
    if can_fit:
        runs["llm-foundry 8, 16k and longer from shorter"] = list(rates.long_cases())
    else:
        print("without scipy (pip install '.[test]') long sequences are not held against shorter\n")
    later = {"DeepSpeed 0.6, 52B": deepspeed.later_cases()}
    others = {"busbw by nodes, GB/s": decay_cases(), "bytes out of a node": byte_cases()}
    groups = {f"{name}, tokens/s of a GPU": cases for name, cases in runs.items()}
    groups |= {f"{name}, TFLOP/s of a GPU": cases for name, cases in later.items()} | others
    for name, cases in groups.items():
        print(f"{name}\n{'':<46} {'published':>12} {'ours':>12} {'error':>8}")
        for case in cases:
            print(
                f"{case.name:<46} {case.published:>12,.0f} {case.predicted:>12,.0f} "
                f"{case.error:>+8.1%}"
            )
        print()
    checks = all_checks(runs | later)
    for check in checks:
        value = "" if check.value is None else f"{check.value:.3f}"
        said = {True: "holds", False: "FAILS", None: "not measured here"}[check.holds]
        print(f"{check.name:<84} {value:>8}  {check.bound:<14} {said}")
        if check.reason:
            print(f"    {check.reason}")
    if options.json:
        told = {
            "schema": 1,
            "cases": {
                name: [asdict(case) | {"error": case.error} for case in cases]
                for name, cases in groups.items()
            },
            "checks": [asdict(check) for check in checks],
        }
        options.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
