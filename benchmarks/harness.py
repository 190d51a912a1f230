"""What all benchmarks share: the record of a figure, and a hub with a mount across a link."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from farside.bench import machine
from farside.bench.link import NamespaceLink
from farside.bench.netlink import Shape
from farside.bench.stack import Stack

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
WORK = ROOT / "out" / "bench"
GIBIT = Shape(rtt=60, rate=1000)
LINK_BYTES_PER_S = 125e6  # 1 Gbit/s


@dataclass(frozen=True)
class Figure:
    """One figure and its target. `better`: whether more or less of it is wanted."""

    name: str
    unit: str
    target: float
    better: Literal["more", "less"]

    def met(self, value: float) -> bool:
        return value >= self.target if self.better == "more" else value <= self.target


def record(figure: Figure, values: Sequence[float], compared_with: str, **details: Any) -> None:
    """Write benchmarks/results/NAME.json with the median of `values`, and print one line.

    `spread` is the largest value minus the smallest. `details` are kept beside it for people.
    """
    value = statistics.median(values)
    result = {
        "name": figure.name,
        "value": _round(value),
        "unit": figure.unit,
        "target": figure.target,
        "better": figure.better,
        "pass": figure.met(value),
        "compared_with": compared_with,
        "repeats": len(values),
        "spread": _round(max(values) - min(values)),
        "values": [_round(one) for one in values],
        "machine": machine.describe(ROOT),
        **({"details": details} if details else {}),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{figure.name}.json"
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    sign = "≥" if figure.better == "more" else "≤"
    word = "met" if result["pass"] else "MISSED"
    print(
        f"{figure.name}: {result['value']:g} {figure.unit} (target {sign} {figure.target:g}, {word}; "
        f"{len(values)} runs, spread {result['spread']:g}; {compared_with})",
        flush=True,
    )


@contextmanager
def far_mount(
    name: str, data: Path, shape: Shape = GIBIT, *, tls: bool = True, cache_size: int = 8 << 30
) -> Iterator[FarMount]:
    """A hub of `data` and a link to it, in namespaces; nothing is mounted yet.

    Leaves the program (exit status 0, said on stderr) where this machine has no such link.
    """
    obstacle = NamespaceLink.obstacle()
    if obstacle:
        print(f"{name}: skipped, this needs a link between network namespaces: {obstacle}", file=sys.stderr)
        sys.exit(0)
    work = WORK / name
    work.mkdir(parents=True, exist_ok=True)
    link = NamespaceLink(shape, work)
    try:
        with Stack(work, data, link, tls=tls) as stack:
            yield FarMount(stack, link, cache_size)
    finally:
        link.close()
        shutil.rmtree(work, ignore_errors=True)


@dataclass(frozen=True)
class FarMount:
    """A stack whose mount comes and goes."""

    stack: Stack
    link: NamespaceLink
    cache_size: int

    @property
    def root(self) -> Path:
        return self.stack.mountpoint

    @contextmanager
    def mounted(self, *options: str, fresh: bool = True) -> Iterator[Path]:
        """Mount it (with an empty cache unless `fresh` is False), page cache dropped; yields the root."""
        machine.drop_page_cache()
        self.stack.mount(self.cache_size, *options, fresh=fresh)
        try:
            yield self.root
        finally:
            self.stack.unmount()

    def rss_bytes(self) -> int:
        """Resident memory of the spoke, bytes."""
        pid = self.stack.status()["pid"]
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"process {pid} has no VmRSS")


def _round(value: float) -> float:
    return float(f"{value:.4g}")
