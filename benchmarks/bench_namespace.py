"""A whole namespace of 100,000 files browsable after attach: from `farside mount` to the end of a walk."""

from __future__ import annotations

import time

from benchmarks.harness import WORK, Figure, far_mount, record
from benchmarks.probes import make_tree, walk
from farside.bench import machine

_FILES = 100_000
_REPEATS = 3


def main() -> None:
    tree = make_tree(WORK / "tree-100k", _FILES, 1000, 64)
    with far_mount("namespace_100k", tree) as far:
        values = []
        for _ in range(_REPEATS):
            machine.drop_page_cache()
            walk(tree)  # the hub's own directory cache is warm: its disk is not what is measured
            began = time.monotonic()
            far.stack.mount(far.cache_size, fresh=True)
            found = walk(far.root)
            values.append(time.monotonic() - began)
            far.stack.unmount()
            if found != _FILES:
                raise SystemExit(f"{found} files are there, not {_FILES}")
        began = time.monotonic()
        walk(tree)
        native_s = time.monotonic() - began
        record(
            Figure("namespace_100k", "s", 5, "less"),
            values,
            f"`farside mount` and a walk with attributes of every file; native walk {native_s:.2f} s",
        )


if __name__ == "__main__":
    main()
