"""The model test for an hour: how many reads were wrong, under edits and faults.

    python -m benchmarks.soak_model [--minutes 60] [--seed N]

Needs root and /dev/fuse. Writes benchmarks/results/wrong_bytes.json; what it found goes to
out/soak/SEED/report.txt, and the logs of hub and mount stay beside it when something was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time

from tests.mount.model import Model, Report

from benchmarks.harness import RESULTS, ROOT
from farside.bench import machine

NAME = "wrong_bytes"
PEERS = "every peer tried mixed old and new bytes after an overwrite"

FULL_S = 3600.0
"""The figure asks for an hour; a shorter run is recorded as what it is, and does not meet it."""

SHORT = "only %.1f minutes of the hour that the figure asks for"


def record(report: Report) -> None:
    """Write the figure; it passes only when nothing else failed either."""
    result = {
        "name": NAME,
        "value": len(report.wrong),
        "unit": "wrong reads",
        "target": 0,
        "better": "less",
        "pass": not (report.wrong or report.failures) and report.seconds >= FULL_S,
        "compared_with": PEERS if report.seconds >= FULL_S else f"{SHORT % (report.seconds / 60)}; {PEERS}",
        "repeats": 1,
        "spread": 0,
        "values": [len(report.wrong)],
        "machine": machine.describe(ROOT),
        "details": {
            "seed": report.seed,
            "minutes": round(report.seconds / 60, 1),
            "reads_judged": report.reads,
            "bytes_judged": report.read_bytes,
            "operations": dict(report.operations),
            "edits": dict(report.edits),
            "events": dict(report.events),
            "errors_told": dict(report.errors),
            "needless_errors": len(report.needless),
            "failures": len(report.failures),
            "corrupt_chunks_found": report.corrupt_chunks,
            "evicted_bytes": report.evicted_bytes,
            "link_bytes": report.link_bytes,
        },
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{NAME}.json"
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    print(f"{NAME}: {len(report.wrong)} in {report.seconds / 60:.1f} minutes, written to {path}", flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak_model", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument(
        "--hard-links",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also link files while they are served",
    )
    options = parser.parse_args(arguments)
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        print(f"{NAME}: skipped, this needs root and /dev/fuse", file=sys.stderr)
        return 0
    work = ROOT / "out" / "soak" / str(options.seed)
    shutil.rmtree(work, ignore_errors=True)
    print(f"seed {options.seed}, {options.minutes:g} minutes, in {work}", flush=True)
    model = Model(work, options.seed, readers=options.readers, calm_s=4.0, hard_links=options.hard_links)
    try:
        report = model.run(options.minutes * 60, lambda report: print(report.line(), flush=True))
    finally:
        model.close()
    (work / "report.txt").write_text(f"{time.ctime()}\n{report.text(1000)}\n")
    print(report.text(), flush=True)
    record(report)
    if report.wrong or report.failures:
        return 1
    for left in ("data", "staging", "cache", "hub", "spoke", "mnt"):
        shutil.rmtree(work / left, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
