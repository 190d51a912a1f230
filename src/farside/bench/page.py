"""`report.html`: the table and the curves of a demo in one file that opens offline."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from farside.bench.chart import Curve, line_chart
from farside.bench.machine import one_line
from farside.bench.report import PUBLISHED, RUNS, Comparison, rows, verdict
from farside.units import format_size

_CHARTS = (
    ("samples_per_s", "Samples per second", False),
    ("utilisation", "GPU utilisation", False),
    ("read_ms_p99", "Read latency p99, ms", True),
    ("mb_per_s", "Application throughput, MB/s", False),
)

_STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1b1f24; --dim: #667; --rule: #dde1e6;
  --hub: #6b7280; --spoke_cold: #d9660b; --spoke_warm: #1769c4; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171b; --fg: #e6e8eb; --dim: #98a1ab; --rule: #2c333b;
  --hub: #9aa3ad; --spoke_cold: #f0913a; --spoke_warm: #5aa9ff; } }
body { background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, sans-serif; max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
.dim, figcaption, .published { color: var(--dim) }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap }
th:first-child, td:first-child, .published { text-align: left }
.grid-of-charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(21rem, 1fr)); gap: 1rem 2rem }
figure { margin: 0 } figcaption { font-weight: 600; font-size: .9rem }
svg { width: 100%; height: auto } svg text { fill: var(--dim); font-size: 12px }
text.y { text-anchor: end } text.x { text-anchor: middle }
path.grid { stroke: var(--rule); fill: none }
path.line { fill: none; stroke-width: 1.8; stroke-linejoin: round }
.key span { display: inline-block; width: 1.4rem; height: 3px; vertical-align: middle;
  margin: 0 .4rem 0 1rem }
""" + "".join(
    f"path.{name} {{ stroke: var(--{name}) }} .key .{name} {{ background: var(--{name}) }}\n" for name in RUNS
)


def render(comparison: Comparison) -> str:
    """The whole page."""
    body = [
        "<h1>Training in one region on data that stays in another</h1>",
        f'<p class="dim">{escape(comparison.made)} · farside {escape(comparison.version)} · '
        f"{format_size(comparison.dataset_bytes)} of tokens · link: {escape(comparison.link)}<br>"
        f"{escape(one_line(comparison.machine))}</p>",
        "<ul>" + "".join(f"<li>{escape(said)}</li>" for said in verdict(comparison)) + "</ul>",
        '<p class="key">'
        + "".join(f'<span class="{name}"></span>{escape(label)}' for name, label in RUNS.items())
        + "</p>",
    ]
    for io, runs in comparison.runs_by_io.items():
        body += [f"<h2>Shuffled reads by {escape(io)}</h2>", _table(comparison, io), _charts(runs)]
    body.append("<h2>How it was measured</h2>")
    body.append("<ul>" + "".join(f"<li>{escape(note)}</li>" for note in comparison.notes) + "</ul>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>farside: hub and spoke</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def write_page(comparison: Comparison, path: Path) -> None:
    path.write_text(render(comparison), encoding="utf-8")


def _table(comparison: Comparison, io: str) -> str:
    headings = "".join(f"<th>{escape(label)}</th>" for label in RUNS.values())
    lines = []
    for row in rows(comparison.runs_by_io[io], comparison.dataset_bytes):
        cells = "".join(f"<td>{escape(value)}</td>" for value in row.values)
        published = f'<td class="published">{escape(row.published)}</td>'
        lines.append(f"<tr><td>{escape(row.label)}</td>{cells}{published}</tr>")
    return (
        f'<div class="scroll"><table><thead><tr><th></th>{headings}'
        f'<th class="published">{PUBLISHED}</th></tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )


def _charts(runs: dict[str, dict[str, Any]]) -> str:
    figures = []
    for key, title, log in _CHARTS:
        curves = []
        for name, run in runs.items():
            values = run["curves"]
            curves.append(Curve(name, list(zip(values["batch"], values[key], strict=True))))
        figures.append(_figure(title, line_chart(title, "batch", curves, log=log)))
    link = [Curve(name, run["link_curve"]) for name, run in runs.items() if run.get("link_curve")]
    title = "Bytes over the link, MB, by seconds since the first batch was asked for"
    figures.append(_figure(title, line_chart(title, "seconds", link)))
    return f'<div class="grid-of-charts">{"".join(figures)}</div>'


def _figure(title: str, svg: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>" if svg else ""
