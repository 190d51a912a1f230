"""Run all benchmarks, or those whose names are given, then write docs/benchmarks.md."""

from __future__ import annotations

import subprocess
import sys

from benchmarks import report
from benchmarks.harness import ROOT


def main(wanted: list[str]) -> int:
    names = sorted(path.stem.removeprefix("bench_") for path in (ROOT / "benchmarks").glob("bench_*.py"))
    unknown = set(wanted) - set(names)
    if unknown:
        print(f"no benchmark is called {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
        return 2
    failed = []
    for name in wanted or names:
        print(f"— {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.bench_{name}"], cwd=ROOT).returncode:
            failed.append(name)
    report.main()
    if failed:
        print(f"these did not run to their end: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
