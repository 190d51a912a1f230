"""`make demo`: train at the hub, then 60 ms away with a cold and with a warm cache, and compare.

It drives the product by its command line alone: a hub, an emulated link, a mount, and a job that knows
nothing of any of them. Where nothing can be mounted, the job reads through the library instead, and that is
said. Everything lies in one work directory; what runs is taken down at the end, also at ^C.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from farside import __version__
from farside.bench import dataset, machine
from farside.bench.child import Child, tail
from farside.bench.link import Link, open_link
from farside.bench.load import Load
from farside.bench.netlink import Shape
from farside.bench.page import write_page
from farside.bench.report import (
    RUNS,
    Comparison,
    bytes_by_reason,
    local_share,
    print_tables,
    verdict,
    write_json,
)
from farside.bench.spokes import LibrarySpoke, MountedSpoke, Spoke, native_job
from farside.bench.stack import Stack, mount_obstacle
from farside.errors import FarsideError
from farside.units import format_size, parse_size

_TICK_S = 0.25
_MIN_SIZE = 16 * 2**20
_NOTES = (
    "load: 48 windows of 16 KiB a batch in shuffled order, 25 ms of compute a batch, four workers, "
    "two batches ahead each; utilisation = compute ÷ (compute + wait); every window's CRC-32 is checked",
    "steady state: from that batch on, means over 20 batches stay within 2 % of the hub's own rate "
    "in the second half of its run",
    "rows 0–100, 100–150 and >150 are numbers of batches",
    "reads local: 1 − requests that the spoke had to fetch for ÷ reads of the job; "
    "reads under 5 ms are shown beside it because that share alone flatters",
    "link: counted by the emulator towards the spoke, attaching, metadata and prefetching "
    "until the link is quiet included",
    "published: another vendor's test on a cloud (4-node hub, 10 Gbit/s a client, 60 ms, another loader and "
    "model), quoted for its shape; the absolute figures are not comparable",
)
_WITHOUT_MOUNT = (
    "no mount: {}; at the spoke the four workers are threads of one process, which read through "
    "farside.client.Library; at the hub they are processes, which read ordinary files"
)


@dataclass(frozen=True)
class Options:
    """What to run: data set size in bytes, link in ms and Mbit/s, ways of reading, work directory.

    `no_fuse`: do without a mount even where there could be one.
    """

    size: int
    work: Path
    rtt: float = 60.0
    rate: float = 1000.0
    ios: tuple[str, ...] = ("pread", "mmap")
    no_fuse: bool = False


class Demo:
    """One demo. `console` is where progress goes."""

    def __init__(self, options: Options, console: Console) -> None:
        self.options = options
        self._console = console
        self._data = options.work / "data"
        self._can_drop = False

    def run(self) -> Comparison:
        """Build, measure, take down. Raises FarsideError if a part does not work."""
        options, work = self.options, self.options.work
        without_mount = "--no-fuse was given" if options.no_fuse else mount_obstacle() or ""
        ios = options.ios
        if without_mount:
            ios = tuple(io for io in ios if io == "pread")
            if not ios:
                raise FarsideError(f"mmap needs a mount, and there is none: {without_mount}")
            self._say(f"NO MOUNT HERE: {without_mount}.")
            self._say("The spoke is read through farside's library instead, by pread only.")
        work.mkdir(parents=True, exist_ok=True)
        self._check_space()
        manifest = self._make_dataset()
        load = Load()
        comparison = Comparison(
            machine.describe(work),
            "",
            {
                "batch": load.batch,
                "window_bytes": manifest.window_bytes,
                "compute_ms": load.compute_s * 1e3,
                "workers": load.workers,
                "order": load.order,
            },
            manifest.bytes,
            datetime.now(UTC).isoformat(timespec="seconds"),
            __version__,
            without_mount=without_mount,
        )
        self._can_drop = machine.drop_page_cache()
        with ExitStack() as cleanup:
            link, obstacle = open_link(Shape(rtt=options.rtt, rate=options.rate), work)
            cleanup.callback(link.close)
            comparison.link = link.description
            stack = cleanup.enter_context(Stack(work, self._data, link))
            self._say(f"link: {link.description}" + (f" ({obstacle})" if obstacle else ""))
            late_ms = 0.0
            for io in ios:
                runs = comparison.runs_by_io[io] = {}
                runs["hub"] = self._measure(io, "hub", native_job(self._data, io, None, self._log), link)
                runs["hub"].update(local_share=1.0, link_bytes=0, link_bytes_by_reason={})
                ideal = min(load.ideal_samples_per_s, runs["hub"]["steady_samples_per_s"])
                self._spoke_runs(io, runs, stack, ideal, manifest.bytes, bool(without_mount))
                late_ms = max([late_ms, *(run["link_late_ms"] for run in runs.values())])
            comparison.notes = self._notes(obstacle, late_ms, without_mount)
        return comparison

    def _spoke_runs(
        self,
        io: str,
        runs: dict[str, dict[str, Any]],
        stack: Stack,
        ideal: float,
        size: int,
        without_mount: bool,
    ) -> None:
        """The cold run right after attaching with an empty cache, then the warm one on the same spoke."""
        carried = stack.link.traffic().to_spoke
        make = LibrarySpoke if without_mount else MountedSpoke
        spoke: Spoke = make(stack, cache_size=2 * size + 64 * 2**20)
        for name in ("spoke_cold", "spoke_warm"):
            before = spoke.status()
            run = self._measure(io, name, spoke.job(io, ideal, self._log), stack.link)
            after = spoke.status()
            if name == "spoke_cold":
                run["ready_s"] = round(spoke.ready_s, 3)
                stack.wait_quiet()
            now = stack.link.traffic().to_spoke
            run["link_bytes"], carried = now - carried, now
            run["link_bytes_by_reason"] = bytes_by_reason(before, spoke.status())
            run["local_share"] = local_share(run["reads"], before, after)
            run["passthrough"] = not without_mount and bool(after["mount"]["passthrough"])
            runs[name] = run
        spoke.close()

    def _measure(self, io: str, name: str, job: AbstractContextManager[Child], link: Link) -> dict[str, Any]:
        """One epoch of the load; returns what it reported, with the curve of the link."""
        if self._can_drop:
            machine.drop_page_cache()
        began, carried = time.monotonic(), link.traffic().to_spoke
        curve: list[tuple[float, float]] = []
        late_ms = 0.0
        with job as child, self._progress(f"{io}, {RUNS[name]}") as (progress, task):
            for line in child.lines(_TICK_S):
                traffic = link.traffic()
                late_ms = max(late_ms, traffic.late_ms)
                curve.append((time.monotonic() - began, (traffic.to_spoke - carried) / 1e6))
                message = json.loads(line) if line else {}
                if "progress" in message:
                    _show(progress, task, message["progress"])
                elif "error" in message:
                    raise FarsideError(f"the {RUNS[name]} run failed: {message['error']['message']}")
                elif "result" in message:
                    result: dict[str, Any] = message["result"]
                    _finish(progress, task, result)
                    return {**result, "io": io, "link_curve": curve, "link_late_ms": late_ms}
        raise FarsideError(f"the {RUNS[name]} run ended without a result: {tail(child.log)}")

    @property
    def _log(self) -> Path:
        return self.options.work / "load.log"

    def _make_dataset(self) -> dataset.Manifest:
        manifest = dataset.plan(self.options.size)
        if dataset.load_manifest(self._data) == manifest:
            self._say(f"data set: {format_size(manifest.bytes)} in {self._data} (kept from an earlier run)")
            return manifest
        shutil.rmtree(self._data, ignore_errors=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("writing the data set", total=manifest.bytes)
            dataset.make(self._data, manifest, lambda count: progress.advance(task, count))
        self._say(
            f"data set: {format_size(manifest.bytes)}, {manifest.windows:,} windows in "
            f"{len(manifest.shards)} shards, in {self._data}"
        )
        return manifest

    def _check_space(self) -> None:
        manifest = dataset.load_manifest(self._data)
        have = manifest.bytes if manifest else 0
        shutil.rmtree(self.options.work / "cache", ignore_errors=True)
        usage = shutil.disk_usage(self.options.work)
        need = int(2 * self.options.size - have + 0.06 * usage.total)  # the cache leaves 5 % of the disk free
        if usage.free < need:
            raise FarsideError(
                f"the demo needs {format_size(need)} free and there are {format_size(usage.free)}",
                path=str(self.options.work),
                hint="say make demo SIZE=128M, or --work DIR on another disk",
            )

    def _notes(self, obstacle: str, late_ms: float, without_mount: str) -> list[str]:
        notes = list(_NOTES)
        if without_mount:
            notes.insert(0, _WITHOUT_MOUNT.format(without_mount))
        if obstacle:
            notes.append(f"the link is a delay proxy without loss or congestion control: {obstacle}")
        if self._can_drop:
            notes.append("the kernel's page cache was dropped before every run")
        else:
            notes.append("the kernel's page cache was not dropped between runs: that needs root")
        if late_ms > 10:
            notes.append(f"this machine delivered some packets up to {late_ms:.0f} ms late: take care")
        return notes

    @contextmanager
    def _progress(self, label: str) -> Iterator[tuple[Progress, TaskID]]:
        columns = (
            TextColumn("{task.description:<18}"),
            BarColumn(bar_width=30),
            TextColumn("{task.completed:.0f}/{task.total:.0f} batches"),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console) as progress:
            yield progress, progress.add_task(label, total=1, figures="")

    def _say(self, text: str) -> None:
        self._console.print(Text(text))


def _show(progress: Progress, task: TaskID, value: Mapping[str, Any]) -> None:
    figures = (
        f"{value['samples_per_s']:,.0f} samples/s, GPU {100 * value['utilisation']:.0f} %, "
        f"p50 {value['read_ms_p50']:g} ms"
    )
    progress.update(task, total=value["of"], completed=value["batches"], figures=figures)


def _finish(progress: Progress, task: TaskID, result: Mapping[str, Any]) -> None:
    figures = f"{result['samples_per_s']:,.0f} samples/s, GPU {100 * result['gpu_utilisation']:.1f} %"
    batches = result["batches"]
    progress.update(task, total=result["batches_planned"], completed=batches, figures=figures)


def _on_terminate(number: int, _frame: object) -> None:
    raise KeyboardInterrupt(number)


@click.command(context_settings={"max_content_width": 110})
@click.option("--size", default="1G", show_default=True, help="Bytes of the data set: 128M, 1G.")
@click.option("--work", type=click.Path(path_type=Path), default=Path("out/demo"), show_default=True)
@click.option("--rtt", type=click.FloatRange(min=0), default=60.0, show_default=True, help="ms")
@click.option("--rate", type=click.FloatRange(min=0), default=1000.0, show_default=True, help="Mbit/s")
@click.option("--io", "ios", multiple=True, type=click.Choice(["pread", "mmap"]), help="[default: both]")
@click.option("--no-fuse", is_flag=True, help="Mount nothing: read through the library at the spoke.")
def main(size: str, work: Path, rtt: float, rate: float, ios: tuple[str, ...], no_fuse: bool) -> None:
    """Train at the hub, then far away with a cold and a warm cache; print the comparison.

    Where nothing can be mounted, the spoke is read through farside's library, and the report says so.
    Writes report.html and report.json into the work directory.
    """
    console = Console(width=None if sys.stdout.isatty() else 110)
    signal.signal(signal.SIGTERM, _on_terminate)
    try:
        options = Options(
            max(_MIN_SIZE, parse_size(size)), work.absolute(), rtt, rate, ios or ("pread", "mmap"), no_fuse
        )
        comparison = Demo(options, console).run()
    except FarsideError as error:
        console.print(Text(f"demo failed: {error}", style="red"))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        console.print("stopped; everything is taken down")
        sys.exit(130)
    print_tables(comparison, console)
    write_json(comparison, options.work / "report.json")
    write_page(comparison, options.work / "report.html")
    for said in verdict(comparison):
        console.print(Text(said, style="bold"))
    console.print(Text(f"curves: {options.work / 'report.html'}"))
    console.print(Text(f"for scripts: {options.work / 'report.json'}"))
    sys.exit(1 if comparison.wrong_windows or comparison.failed_reads else 0)


if __name__ == "__main__":
    main()
