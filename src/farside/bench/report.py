"""The comparison of a demo: its rows for people, and `report.json` for scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

RUNS = {"hub": "hub", "spoke_cold": "spoke, cold", "spoke_warm": "spoke, warm"}
PUBLISHED = "published, cloud"
Run = Mapping[str, Any]


@dataclass
class Comparison:
    """All that one demo measured. `runs_by_io`: "pread" or "mmap" → run → figures. `without_mount`: why the
    spoke was read through the library and not through a mount; "" for a mount."""

    machine: dict[str, Any]
    link: str
    load: dict[str, Any]
    dataset_bytes: int
    made: str
    version: str
    runs_by_io: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    without_mount: str = ""

    @property
    def wrong_windows(self) -> int:
        return sum(run["wrong_windows"] for runs in self.runs_by_io.values() for run in runs.values())

    @property
    def failed_reads(self) -> int:
        return sum(run["errors"] for runs in self.runs_by_io.values() for run in runs.values())


@dataclass(frozen=True)
class Row:
    """One line of the table: a value per run, then what was published for the cloud test."""

    label: str
    values: tuple[str, ...]
    published: str = "–"


def rows(runs: Mapping[str, Run], dataset_bytes: int) -> list[Row]:
    """The comparison of one way of reading; a run that is missing shows as "–"."""

    def row(label: str, published: str, pick: Any) -> Row:
        return Row(label, tuple(pick(runs[name]) if name in runs else "–" for name in RUNS), published)

    def window(name: str, key: str) -> Any:
        return lambda run: _number((run["windows"][name] or {}).get(key))

    hub_rate = runs["hub"]["samples_per_s"] if "hub" in runs else None
    return [
        row("samples/s, 0–100", "95–115, warm 115–116", window("0-100", "samples_per_s")),
        row("samples/s, 100–150", "115", window("100-150", "samples_per_s")),
        row("samples/s, >150", "116, hub 116–117", window(">150", "samples_per_s")),
        row("samples/s, all", "–", lambda run: _number(run["samples_per_s"])),
        row(
            "samples/s ÷ hub",
            "0.82–0.98, then 0.99",
            lambda run: f"{run['samples_per_s'] / hub_rate:.3f}" if hub_rate else "–",
        ),
        row(
            "read p50 / p99, ms",
            "60, then 5–10; hub 2–3",
            lambda run: f"{_number(run['read_ms_p50'])} / {_number(run['read_ms_p99'])}",
        ),
        row("MB/s", "500–800, hub to 1,300", lambda run: _number(run["mb_per_s"])),
        row(
            "GPU busy, 0–100",
            "80–90 %",
            lambda run: _share((run["windows"]["0-100"] or {}).get("gpu_utilisation")),
        ),
        row("GPU busy, all", "98–100 %", lambda run: _share(run["gpu_utilisation"])),
        row("reads local", "–", lambda run: _share(run["local_share"])),
        row("reads under 5 ms", "–", lambda run: _share(run["fast_share"])),
        row("link ÷ data set", "–", lambda run: f"{run['link_bytes'] / dataset_bytes:.3f}"),
        row("batches to steady", "100–150", lambda run: _count(run["batches_to_steady"])),
    ]


def print_tables(comparison: Comparison, console: Console) -> None:
    for io, runs in comparison.runs_by_io.items():
        title = f"Shuffled reads by {io}"
        title += "; no mount, the spoke is read through the library" if comparison.without_mount else ""
        table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", title_style="bold")
        table.add_column("")
        for heading in RUNS.values():
            table.add_column(heading, justify="right")
        table.add_column(PUBLISHED, style="dim")
        for row in rows(runs, comparison.dataset_bytes):
            table.add_row(row.label, *row.values, row.published)
        console.print(table)
    for note in comparison.notes:
        console.print(Text(f"· {note}", style="dim"))


def as_json(comparison: Comparison) -> dict[str, Any]:
    """What `report.json` holds. `runs` are those of the first way of reading; curves are left out."""
    by_io = {
        io: {name: _without(run, "curves", "link_curve") for name, run in runs.items()}
        for io, runs in comparison.runs_by_io.items()
    }
    return {
        "farside": comparison.version,
        "made": comparison.made,
        "machine": comparison.machine,
        "link": comparison.link,
        "load": comparison.load,
        "dataset_bytes": comparison.dataset_bytes,
        "spoke_read_through": "library" if comparison.without_mount else "mount",
        "without_mount": comparison.without_mount or None,
        "runs": next(iter(by_io.values()), {}),
        "runs_by_io": by_io,
        "wrong_windows": comparison.wrong_windows,
        "failed_reads": comparison.failed_reads,
        "notes": comparison.notes,
    }


def write_json(comparison: Comparison, path: Path) -> None:
    path.write_text(json.dumps(as_json(comparison), indent=2, ensure_ascii=False) + "\n")


def local_share(reads: int, before: Mapping[str, Any], after: Mapping[str, Any]) -> float:
    """Share of `reads` by the job that were answered without the link.

    From the spoke's counter of requests that had to wait for the link, before and after the run. Reads that
    the kernel answered by itself (page cache, passthrough) never reach that counter, and are local.
    """
    remote = int(after["reads"]["remote"]) - int(before["reads"]["remote"])
    return round(min(1.0, max(0.0, 1 - remote / reads)), 5) if reads else 1.0


def bytes_by_reason(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, int]:
    """Bytes that crossed the link between two statuses, by the reason of the fetch."""
    return {name: int(count) - int(before["link_bytes"][name]) for name, count in after["link_bytes"].items()}


def _without(run: Run, *names: str) -> dict[str, Any]:
    return {name: value for name, value in run.items() if name not in names}


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _count(value: int | None) -> str:
    return "never" if value is None else str(value)


def verdict(comparison: Comparison) -> Sequence[str]:
    """What the figures say, one sentence each."""
    said = []
    for io, runs in comparison.runs_by_io.items():
        if "spoke_warm" in runs and "hub" in runs:
            ratio = runs["spoke_warm"]["samples_per_s"] / runs["hub"]["samples_per_s"]
            said.append(f"{io}: the warm spoke trains at {ratio:.3f} of the hub's rate")
    if comparison.wrong_windows or comparison.failed_reads:
        said.append(
            f"FAILED: {comparison.wrong_windows} windows had wrong bytes, "
            f"{comparison.failed_reads} reads failed"
        )
    else:
        said.append("every window of every run had the right bytes")
    return said
