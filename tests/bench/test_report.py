"""The comparison: its table, its JSON for scripts, its page."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any
from xml.dom import minidom

import numpy as np
import pytest
from rich.console import Console

from farside.bench import machine
from farside.bench.figures import Trace, describe
from farside.bench.page import render, write_page
from farside.bench.report import (
    RUNS,
    Comparison,
    bytes_by_reason,
    local_share,
    print_tables,
    rows,
    verdict,
    write_json,
)

RUN_KEYS = {
    *("samples_per_s", "batches_to_steady", "gpu_utilisation", "read_ms_p50", "read_ms_p99"),
    *("local_share", "application_bytes", "link_bytes", "windows"),
}


def run(wait: float, batches: int = 200, **other: Any) -> dict[str, Any]:
    trace = Trace(48, 16384)
    for number in range(batches):
        trace.wait.append(wait if number < 50 else 0.0)
        trace.compute.append(0.025)
        trace.step.append(trace.wait[-1] + 0.025)
        trace.reads_ms.append(np.full(48, 0.1))
    counts = {"wrong_windows": 0, "errors": 0, "local_share": 1.0, "link_bytes": 0}
    return {**describe(trace, 1920.0), **counts, "link_curve": [(0.0, 0.0), (1.0, 120.0)], **other}


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    made = Comparison(
        machine.describe(tmp_path), "60 ms, 1 Gbit/s", {"batch": 48}, 1 << 30, "2026-12-01", "1.0"
    )
    made.runs_by_io["pread"] = {
        "hub": run(0.0),
        "spoke_cold": run(0.05, link_bytes=1 << 30, local_share=0.9),
        "spoke_warm": run(0.0),
    }
    made.notes.append("a <note> & more")
    return made


def test_the_json_has_what_scripts_are_promised(comparison: Comparison, tmp_path: Path) -> None:
    write_json(comparison, tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report["runs"]) == {"hub", "spoke_cold", "spoke_warm"}
    for values in report["runs"].values():
        assert values.keys() >= RUN_KEYS
        assert set(values["windows"]) == {"0-100", "100-150", ">150"}
    assert report["runs"]["spoke_cold"]["batches_to_steady"] == 50
    assert report["runs"] == report["runs_by_io"]["pread"]


def test_the_table_has_a_value_per_run(comparison: Comparison) -> None:
    made = rows(comparison.runs_by_io["pread"], comparison.dataset_bytes)
    assert all(len(row.values) == len(RUNS) for row in made)
    by_label = {row.label: row.values for row in made}
    assert by_label["link ÷ data set"] == ("0.000", "1.000", "0.000")
    assert by_label["samples/s ÷ hub"][2] == "1.000"


def test_short_and_missing_runs_show_as_dashes(comparison: Comparison) -> None:
    made = rows({"hub": run(0.0, batches=30)}, 1 << 20)
    by_label = {row.label: row.values for row in made}
    assert by_label["samples/s, >150"] == ("–", "–", "–")
    assert by_label["samples/s, 0–100"][1:] == ("–", "–")


def test_the_table_fits_into_eighty_columns(comparison: Comparison) -> None:
    out = io.StringIO()
    print_tables(comparison, Console(file=out, width=100))
    table = [line for line in out.getvalue().splitlines() if "samples/s" in line]
    assert len(table) == 5  # no line is wrapped


def test_the_page_stands_alone(comparison: Comparison, tmp_path: Path) -> None:
    write_page(comparison, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r"https?://|<script|<link|@import|url\(", page)
    assert "a &lt;note&gt; &amp; more" in page
    pictures = re.findall(r"<svg.*?</svg>", page)
    assert len(pictures) == 5
    for picture in pictures:
        minidom.parseString(picture.encode())


def test_wrong_bytes_are_the_verdict(comparison: Comparison) -> None:
    assert "right bytes" in verdict(comparison)[-1]
    comparison.runs_by_io["pread"]["spoke_cold"]["wrong_windows"] = 2
    assert verdict(comparison)[-1].startswith("FAILED: 2 windows")
    assert "FAILED" in render(comparison)


def test_local_share_counts_requests_that_waited_for_the_link() -> None:
    before = {"reads": {"remote": 10}, "link_bytes": {"demand": 5, "total": 5}}
    after = {"reads": {"remote": 35}, "link_bytes": {"demand": 105, "total": 125}}
    assert local_share(100, before, after) == 0.75
    assert local_share(10, before, after) == 0.0
    assert local_share(0, before, before) == 1.0
    assert bytes_by_reason(before, after) == {"demand": 100, "total": 120}
