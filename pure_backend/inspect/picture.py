"""A graph as a picture: SVG in rows, each node below those whose values it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from pure_backend.inspect.found import Graph, Node

COLOURS = (210, 140, 35, 275, 180, 330, 90, 240)
"""The hues of partitions, in degrees."""

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 236, 44, 16, 30, 12
_LETTERS = 30

Places = dict[str, tuple[int, int]]


def picture(graph: Graph, title: str) -> str:
    """The SVG of a graph.

    Args:
        graph: The graph.
        title: What a screen reader calls it.
    """
    rows = _rows(graph.nodes)
    places = {node.name: (_x(column), _y(row)) for row, nodes in enumerate(rows) for column, node in enumerate(nodes)}
    width = _x(max((len(nodes) for nodes in rows), default=0)) + _MARGIN
    height = _y(len(rows)) + _MARGIN
    drawn = [*_edges(graph.nodes, places), *(_box(node, *places[node.name]) for node in graph.nodes)]
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)}" {size}>{"".join(drawn)}</svg>'


def _x(column: int) -> int:
    return _MARGIN + column * (_WIDTH + _GAP_X)


def _y(row: int) -> int:
    return _MARGIN + row * (_HEIGHT + _GAP_Y)


def _rows(nodes: Sequence[Node]) -> list[list[Node]]:
    """Nodes by level; an input of the graph stands right above its first reader."""
    levels: dict[str, int] = {}
    operators = [node for node in nodes if node.operator]
    for node in operators:
        levels[node.name] = 1 + max((levels.get(name, 0) for name in node.inputs), default=0)
    above: dict[str, int] = {}
    for node in operators:
        for name in node.inputs:
            above[name] = min(above.get(name, levels[node.name]), levels[node.name] - 1)
    placed = {node.name: levels.get(node.name, above.get(node.name, 0)) for node in nodes}
    rows: list[list[Node]] = [[] for _ in range(1 + max(placed.values(), default=0))]
    for node in nodes:
        rows[placed[node.name]].append(node)
    return [sorted(row, key=lambda node: not node.operator) for row in rows]


def _edges(nodes: Sequence[Node], places: Places) -> Iterator[str]:
    for node in nodes:
        x, y = places[node.name]
        for name in node.inputs:
            from_x, from_y = places[name]
            start, end = (from_x + _WIDTH // 2, from_y + _HEIGHT), (x + _WIDTH // 2, y)
            middle = (start[1] + end[1]) // 2
            yield f'<path d="M{start[0]} {start[1]} C{start[0]} {middle} {end[0]} {middle} {end[0]} {end[1]}"/>'


def _box(node: Node, x: int, y: int) -> str:
    first = _cut(f"{node.name} = {node.operator.rpartition('.')[2]}" if node.operator else node.name)
    alarm = f'<tspan class="alarm"> impure: {escape(node.impurity.kind)}</tspan>' if node.impurity else ""
    return (
        f'<g class="{_kind(node)}"><title>{escape(_details(node))}</title>'
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="4"/>'
        f'<text x="{x + 8}" y="{y + 18}">{escape(first)}</text>'
        f'<text class="value" x="{x + 8}" y="{y + 35}">{escape(_cut(node.value, 14 if alarm else _LETTERS))}{alarm}</text></g>'
    )


def _kind(node: Node) -> str:
    if node.impurity:
        return "impure"
    if not node.operator:
        return "input"
    return "eager" if node.partition is None else f"p{node.partition % len(COLOURS)}"


def _details(node: Node) -> str:
    where = f"{node.file}:{node.line}" if node.file else ""
    partition = "" if node.partition is None else f"partition {node.partition}"
    lines = (f"{node.name} = {node.operator}" if node.operator else node.name, node.value, node.scopes, where, partition)
    return "\n".join(line for line in (*lines, str(node.impurity or "")) if line)


def _cut(text: str, letters: int = _LETTERS) -> str:
    return text if len(text) <= letters else text[: letters - 1] + "\N{HORIZONTAL ELLIPSIS}"
