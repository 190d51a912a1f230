"""What is worked out from one epoch of the training-like load. Pure functions over its trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

FAST_MS = 5.0  # a read below this cannot have crossed a link of tens of ms
WINDOWS: dict[str, tuple[int, int | None]] = {"0-100": (0, 100), "100-150": (100, 150), ">150": (150, None)}
_ROLLING = 20  # batches
_TOLERANCE = 0.02  # steady: no more than this below the ideal rate
_OUTLIERS = 0.02  # share of later means that may miss it (noise of the machine)
_CURVE_POINTS = 400

Floats = npt.NDArray[np.float64]


@dataclass
class Trace:
    """One entry a batch. Times in seconds: `wait` until its data were there, `compute`, `step` from the end
    of the batch before to its own end. `reads_ms` are the latencies of its windows."""

    batch: int
    window_bytes: int
    wait: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    reads_ms: list[Floats] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.step)

    @property
    def application_bytes(self) -> int:
        return len(self) * self.batch * self.window_bytes


def percentile(values: Floats, q: float) -> float | None:
    return round(float(np.percentile(values, q)), 3) if len(values) else None


def summary(trace: Trace, first: int = 0, end: int | None = None) -> dict[str, Any] | None:
    """Figures of batches `first` to `end`, or None if there is no such batch."""
    step = np.array(trace.step[first:end])
    if not len(step):
        return None
    wait, compute = sum(trace.wait[first:end]), sum(trace.compute[first:end])
    reads = np.concatenate(trace.reads_ms[first:end])
    samples, seconds = len(step) * trace.batch, float(step.sum())
    return {
        "batches": len(step),
        "seconds": round(seconds, 3),
        "samples_per_s": round(samples / seconds, 1),
        "mb_per_s": round(samples * trace.window_bytes / seconds / 1e6, 2),
        "gpu_utilisation": round(compute / (compute + wait), 4) if compute else 0.0,
        "read_ms_p50": percentile(reads, 50),
        "read_ms_p99": percentile(reads, 99),
        "read_ms_max": percentile(reads, 100),
        "fast_share": round(float((reads < FAST_MS).mean()), 5),
    }


def batches_to_steady(trace: Trace, ideal_samples_per_s: float) -> int | None:
    """The batch from which the mean over 20 batches is, and stays, at the ideal rate; None if it never is.

    "At" allows 2 % less, and "stays" lets 2 % of the later means miss it.
    """
    if len(trace) < _ROLLING:
        return None
    sums = np.convolve(trace.step, np.ones(_ROLLING), "valid")
    good = _ROLLING * trace.batch / sums >= ideal_samples_per_s * (1 - _TOLERANCE)
    bad_later = np.cumsum(~good[::-1])[::-1] / np.arange(len(good), 0, -1)
    stays = good & (bad_later <= _OUTLIERS)
    return int(np.argmax(stays)) if stays.any() else None


def curves(trace: Trace) -> dict[str, list[float]]:
    """Curves over the batches, thinned to about 400 points: each point covers the batches around it.

    `batch` is the number of the last batch of a point, `t` its end in seconds since the start.
    """
    count = len(trace)
    size = max(1, -(-count // _CURVE_POINTS))
    result: dict[str, list[float]] = {
        name: []
        for name in ("batch", "t", "samples_per_s", "mb_per_s", "utilisation", "read_ms_p50", "read_ms_p99")
    }
    ends = np.cumsum(trace.step)
    for first in range(0, count, size):
        values = summary(trace, first, first + size)
        assert values is not None
        last = min(count, first + size) - 1
        result["batch"].append(last)
        result["t"].append(round(float(ends[last]), 3))
        for name in ("samples_per_s", "mb_per_s", "read_ms_p50", "read_ms_p99"):
            result[name].append(values[name])
        result["utilisation"].append(values["gpu_utilisation"])
    return result


def describe(trace: Trace, ideal_samples_per_s: float) -> dict[str, Any]:
    """Everything that a report says of one epoch."""
    return {
        **(summary(trace) or {}),
        "steady_samples_per_s": (summary(trace, len(trace) // 2) or {}).get("samples_per_s"),
        "batches_to_steady": batches_to_steady(trace, ideal_samples_per_s),
        "application_bytes": trace.application_bytes,
        "reads": len(trace) * trace.batch,
        "windows": {name: summary(trace, first, end) for name, (first, end) in WINDOWS.items()},
        "curves": curves(trace),
    }
