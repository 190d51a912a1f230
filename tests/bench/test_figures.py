"""The figures of an epoch, from traces whose right answers are known."""

from __future__ import annotations

import numpy as np
import pytest

from farside.bench.figures import Trace, batches_to_steady, curves, describe, summary

COMPUTE = 0.025
IDEAL = 48 / COMPUTE


def trace(waits: list[float], read_ms: float = 1.0) -> Trace:
    """An epoch whose batches waited that long; each step is its wait and the compute."""
    made = Trace(48, 16384)
    for wait in waits:
        made.wait.append(wait)
        made.compute.append(COMPUTE)
        made.step.append(wait + COMPUTE)
        made.reads_ms.append(np.full(48, read_ms))
    return made


def test_without_waits_it_is_steady_from_the_first_batch_at_full_use() -> None:
    result = describe(trace([0.0] * 200), IDEAL)
    assert result["samples_per_s"] == pytest.approx(IDEAL)
    assert result["gpu_utilisation"] == 1.0
    assert result["batches_to_steady"] == 0
    assert result["application_bytes"] == 200 * 48 * 16384
    assert [result["windows"][name]["batches"] for name in ("0-100", "100-150", ">150")] == [100, 50, 50]


def test_a_cold_start_shows_in_its_window_alone() -> None:
    result = describe(trace([COMPUTE] * 60 + [0.0] * 140), IDEAL)
    assert result["windows"]["0-100"]["gpu_utilisation"] == pytest.approx(100 / 160, abs=1e-3)
    assert result["windows"][">150"]["samples_per_s"] == pytest.approx(IDEAL)
    assert result["batches_to_steady"] == 60
    assert result["steady_samples_per_s"] == pytest.approx(IDEAL)


def test_one_that_is_never_at_the_rate_is_never_steady() -> None:
    assert batches_to_steady(trace([0.002] * 300), IDEAL) is None
    assert batches_to_steady(trace([0.0] * 10), IDEAL) is None  # too short to tell


def test_a_fall_back_later_counts_as_not_steady_yet() -> None:
    waits = [0.0] * 100 + [0.05] * 50 + [0.0] * 150
    steady = batches_to_steady(trace(waits), IDEAL)
    assert steady is not None
    assert steady >= 140


def test_windows_beyond_the_end_are_none() -> None:
    assert summary(trace([0.0] * 50), 100, 150) is None
    assert describe(trace([0.0] * 50), IDEAL)["windows"][">150"] is None
    assert summary(trace([])) is None


def test_fast_share_counts_reads_under_five_ms() -> None:
    made = trace([0.0] * 3, read_ms=60.0)
    made.reads_ms[0] = np.full(48, 0.01)
    values = summary(made)
    assert values is not None
    assert values["fast_share"] == pytest.approx(1 / 3, abs=1e-4)


@pytest.mark.parametrize("count", [1, 399, 400, 401, 5000])
def test_curves_are_thinned_and_cover_everything(count: int) -> None:
    result = curves(trace([0.0] * count))
    assert 1 <= len(result["batch"]) <= 400
    assert result["batch"][-1] == count - 1
    assert result["t"][-1] == pytest.approx(count * COMPUTE, abs=1e-3)
    assert {len(values) for values in result.values()} == {len(result["batch"])}
