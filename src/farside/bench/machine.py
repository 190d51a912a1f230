"""What a machine is, for reports: figures mean nothing without it."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from farside.units import format_size


def describe(directory: Path) -> dict[str, Any]:
    """Processor, cores, memory, kernel, Python, and the file system that holds `directory`."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": format_size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "filesystem": _filesystem(directory),
        "root": os.geteuid() == 0,
    }


def one_line(machine: dict[str, Any]) -> str:
    return (
        f"{machine['cores']} × {machine['cpu']}, {machine['memory']}, kernel {machine['kernel']}, "
        f"Python {machine['python']}, {machine['filesystem']}"
    )


def drop_page_cache() -> bool:
    """Empty the kernel's page, dentry and inode caches; False where that is not allowed."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        return False
    return True


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()


def _filesystem(directory: Path) -> str:
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1]
    return "unknown file system"
