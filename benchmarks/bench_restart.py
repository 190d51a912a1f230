"""One million cached files: time from a restart to the first read, and the memory of the spoke."""

from __future__ import annotations

import time
from pathlib import Path

import click

from benchmarks.harness import WORK, FarMount, Figure, far_mount, record
from benchmarks.probes import make_tree, walk
from farside.bench import machine
from farside.bench.netlink import Shape
from farside.bench.stack import run_farside

_REPEATS = 3
_FILL_S = 3600.0
_FULL = 1_000_000  # with fewer files the names of the results say how many


@click.command()
@click.option("--files", type=int, default=1_000_000, show_default=True)
def main(files: int) -> None:
    """Fill a cache with FILES small files, restart, and measure."""
    tree = make_tree(WORK / f"tree-{files}", files, 1000, 64)
    with far_mount("restart_1m", tree, Shape(rtt=2), cache_size=20 << 30) as far:
        empty = WORK / "empty"
        empty.mkdir(exist_ok=True)
        far.stack.mount(far.cache_size, fresh=True)
        run_farside("warm", str(far.root), timeout=_FILL_S)
        walk(far.root)
        filled_rss = far.rss_bytes()
        far.stack.unmount()
        values = [_restart(far, tree) for _ in range(_REPEATS)]
        far.stack.mount(far.cache_size, fresh=False)
        walk(far.root)
        rss = far.rss_bytes()
        known = int(far.stack.status()["namespace"]["entries"])
        far.stack.unmount()
    with far_mount("restart_empty", empty, Shape(rtt=2)) as bare, bare.mounted():
        base = bare.rss_bytes()
    suffix = "" if files == _FULL else f"_{files}"
    record(
        Figure(f"restart{suffix or '_1m'}", "s", 3, "less"),
        values,
        "`farside mount` and the first read of a cached file, link at 2 ms",
        files=files,
    )
    record(
        Figure(f"memory_per_file{suffix}", "bytes", 600, "less"),
        [(rss - base) / files],
        f"resident memory after a walk, less that of a spoke that knows no file ({base / 1e6:.0f} MB)",
        files=files,
        entries_in_memory=known,
    )
    record(
        Figure(f"memory{suffix or '_1m'}_files", "MB", 700, "less"),
        [max(rss, filled_rss) / 1e6],
        "resident memory of the spoke, the larger of after filling and after a restart and a walk",
        files=files,
    )


def _restart(far: FarMount, tree: Path) -> float:
    """Seconds from the start of `farside mount` until a cached file was read."""
    name = "d00000/f0000007.dat"
    expected = (tree / name).read_bytes()
    machine.drop_page_cache()
    began = time.monotonic()
    far.stack.mount(far.cache_size, fresh=False)
    content = (far.root / name).read_bytes()
    took = time.monotonic() - began
    far.stack.unmount()
    if content != expected:
        raise SystemExit(f"wrong bytes in {name}")
    return took


if __name__ == "__main__":
    main()
