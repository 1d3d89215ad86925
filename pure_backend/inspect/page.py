"""A report as one self-contained page: no scripts, no network, readable in light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from pure_backend.inspect.found import Break, Found, Graph
from pure_backend.inspect.picture import COLOURS, picture
from pure_backend.inspect.tables import NO_GRAPH, PARTITION_COLUMNS, counter_line, partition_rows, seconds_line

_STYLE = """
:root {
  --text: #1f2328; --faint: #535c66; --back: #ffffff; --line: #c6ccd3; --box: #eef0f2; --alarm: #b3261e; --alarm-box: #fdecea;
  --saturation: 65%; --lightness: 91%; --edge: 40%;
}
@media (prefers-color-scheme: dark) {
  :root {
    --text: #e6e8eb; --faint: #b9c0c8; --back: #16191d; --line: #464c53; --box: #272b30; --alarm: #ff8a80; --alarm-box: #45201d;
    --saturation: 35%; --lightness: 20%; --edge: 65%;
  }
}
body { margin: 2rem; font: 15px/1.45 system-ui, sans-serif; color: var(--text); background: var(--back) }
table { border-collapse: collapse }
th, td { border: 1px solid var(--line); padding: .3rem .6rem; text-align: left }
h1, h2 { font-weight: 600 }
pre, svg text { font-family: ui-monospace, monospace }
pre { white-space: pre-wrap; margin: 0; color: var(--faint) }
.alarm { color: var(--alarm) }
.picture { overflow-x: auto; border: 1px solid var(--line); margin: .5rem 0 }
svg { display: block }
svg text { font-size: 12px; fill: var(--text) }
svg .value { fill: var(--faint) }
svg .alarm { fill: var(--alarm) }
svg path { fill: none; stroke: var(--faint); opacity: .7 }
svg rect { fill: var(--box); stroke: var(--line) }
.input rect { fill: var(--back); stroke-dasharray: 2 3 }
.impure rect, .swatch.impure { fill: var(--alarm-box); background: var(--alarm-box); stroke: var(--alarm); stroke-width: 2 }
.swatch {
  display: inline-block; width: 1em; height: 1em; border: 1px solid var(--line); vertical-align: -.15em; margin: 0 .3em 0 1em;
}
.swatch.eager { background: var(--box) }
.swatch.input { border-style: dashed }
"""


def page(report: Found) -> str:
    """The page of a report."""
    return "\n".join(
        (
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8"><title>pure_backend report</title>',
            '<meta name="color-scheme" content="light dark">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">""",
            f"<style>{_STYLE}{_colours()}</style></head><body>",
            f"<h1>pure_backend report</h1><p>{escape(report.summary())}</p>",
            *_sections(report),
            "</body></html>",
        )
    )


def _colours() -> str:
    """A hue for each of the first partitions; more partitions begin again."""
    return "".join(
        f".p{i} rect, .swatch.p{i} {{ fill: {fill}; background: {fill}; stroke: {edge} }}\n"
        for i, (fill, edge) in enumerate(
            (f"hsl({hue} var(--saturation) var(--lightness))", f"hsl({hue} var(--saturation) var(--edge))") for hue in COLOURS
        )
    )


def _sections(report: Found) -> Iterator[str]:
    if not report.graphs:
        yield f"<p>{escape(NO_GRAPH)}</p>"
    if report.partitions:
        yield "<h2>Partitions</h2>" + _table(PARTITION_COLUMNS, partition_rows(report.partitions))
    if report.impurities:
        columns = ("node", "operator", "kind", "what was seen", "where", "what to do")
        yield "<h2>Impure nodes, which run in eager</h2>"
        yield _table(columns, ((i.node, i.op, i.kind, i.detail, _place(i.file, i.line), i.advice) for i in report.impurities))
    if report.breaks:
        yield "<h2>Graph breaks</h2>" + "".join(map(_break, report.breaks))
    yield f"<h2>Work</h2><p>{escape(counter_line(report.statistics))}<br>{escape(seconds_line(report.statistics.seconds))}</p>"
    yield from (_graph(number, graph, report) for number, graph in enumerate(report.graphs))


def _graph(number: int, graph: Graph, report: Found) -> str:
    partitions = [i for i, partition in enumerate(report.partitions) if partition.graph == number]
    legend = [_swatch(f"p{i % len(COLOURS)}", f"partition {i}") for i in partitions]
    legend += [_swatch("impure", "impure")] if graph.impurities else []
    legend += [_swatch("eager", "eager"), _swatch("input", "input")]
    reason = f'<p class="alarm">Runs in eager: {escape(graph.eager)}</p>' if graph.eager else ""
    title = f"Graph {number}: {graph.operators} nodes"
    return f'<h2>{title}</h2>{reason}<p>{"".join(legend)}</p><div class="picture">{picture(graph, title)}</div>'


def _swatch(kind: str, text: str) -> str:
    return f'<span class="swatch {kind}"></span>{escape(text)}'


def _break(found: Break) -> str:
    return f"<p>{escape(str(found))}</p><pre>{escape(found.explanation)}</pre>"


def _place(file: str, line: int) -> str:
    return f"{file}:{line}" if file else ""


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
