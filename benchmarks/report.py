"""docs/benchmarks.md from the results that are there."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, ROOT
from farside.bench.machine import one_line

_HEAD = """# Benchmarks

Made by `make bench` from `benchmarks/results/`; do not edit by hand. Each figure is the median of its runs;
the spread is the largest less the smallest. What it is compared with was measured in the same run unless it
says otherwise. Links are emulated on the machine that also runs both ends, so figures near the limit of its
processors are lower bounds.
"""


def load_results(directory: Path = RESULTS) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]


def render(results: Sequence[dict[str, Any]]) -> str:
    """The page: one table a machine."""
    by_machine: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        by_machine[one_line(result["machine"])].append(result)
    parts = [_HEAD]
    for machine, own in by_machine.items():
        parts.append(f"\n## {machine}\n")
        parts.append("| figure | value | target | | runs | spread | compared with |")
        parts.append("| --- | --- | --- | --- | --- | --- | --- |")
        parts += [_row(result) for result in own]
    return "\n".join(parts) + "\n"


def _row(result: dict[str, Any]) -> str:
    sign = "≥" if result["better"] == "more" else "≤"
    outcome = "met" if result["pass"] else "**missed**"
    return (
        f"| {result['name']} | {result['value']:g} {result['unit']} | {sign} {result['target']:g} "
        f"| {outcome} | {result['repeats']} | {result['spread']:g} | {result['compared_with']} |"
    )


def main() -> None:
    page = ROOT / "docs" / "benchmarks.md"
    page.write_text(render(load_results()), encoding="utf-8")
    print(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
