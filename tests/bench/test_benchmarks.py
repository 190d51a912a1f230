"""The records of `make bench` and the page made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import harness, probes, report
from benchmarks.harness import Figure, record

KEYS = {"name", "value", "unit", "target", "pass", "compared_with", "repeats", "spread", "machine"}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    return tmp_path


def test_a_record_has_what_scripts_are_promised(results: Path) -> None:
    record(Figure("speed", "÷ native", 0.9, "more"), [0.95, 0.91, 0.99], "native in the same run")
    made = json.loads((results / "speed.json").read_text())
    assert made.keys() >= KEYS
    assert (made["value"], made["repeats"], made["pass"]) == (0.95, 3, True)
    assert made["spread"] == pytest.approx(0.08)


def test_less_is_better_where_it_is_said(results: Path) -> None:
    record(Figure("wait", "s", 2, "less"), [2.5], "nothing")
    assert json.loads((results / "wait.json").read_text())["pass"] is False


def test_the_page_shows_every_result_and_what_was_missed(results: Path) -> None:
    record(Figure("speed", "÷ native", 0.9, "more"), [0.95], "native")
    record(Figure("wait", "s", 2, "less"), [2.5], "nothing")
    page = report.render(report.load_results(results))
    assert "| speed | 0.95 ÷ native | ≥ 0.9 | met |" in page
    assert "| wait | 2.5 s | ≤ 2 | **missed** |" in page


def test_probes_read_what_is_there(tmp_path: Path) -> None:
    path = probes.make_file(tmp_path / "data" / "file", 4 << 20)
    assert probes.sequential(path) > 0
    assert probes.mapped(path) > 0
    assert 0 < probes.random_p50(path, 50) < 1
    tree = probes.make_tree(tmp_path / "tree", 25, 10, 16)
    assert probes.walk(tree) == 25
