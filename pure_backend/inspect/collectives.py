"""The collectives of a partitioned HLO module: what moves, over which axes of the mesh, and which module asks for it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pure_backend.inspect.hlo import bytes_of

_COLLECTIVE = re.compile(
    r"^\s*(?:ROOT )?%?[\w.\-]+ = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(-start)?\("
)
_CHANNEL = re.compile(r"channel_id=(\d+)")
_NAME = re.compile(r'op_name="([^"]*)"')
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}")
_SCATTERED = 'from-cross-replica-sharding="true"'
_NO_MODULES = {"", "checkpoint", "rematted_computation", "fn", "__closure__", "cell_contents", "while", "body", "closed_call"}


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of a program, as often as it is written there; one in a loop runs in each turn.

    Attributes:
        kind: `"all-reduce"`, `"all-gather"`, `"reduce-scatter"`, `"all-to-all"` or `"collective-permute"`.
        axes: The axes of the mesh whose devices take part together; empty if HLO's text does not tell.
        bytes: The size of its result on a device.
        shapes: Its results, as HLO writes them.
        argument: The argument that is moved as it is, if it is one.
        module: The path of the module that it serves, `"blocks/0/down"`, or an empty text.
        backward: Whether it serves a gradient.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    shapes: tuple[str, ...]
    argument: str
    module: str
    backward: bool


def collectives(text: str, mesh: Mapping[str, int], arguments: Sequence[str]) -> tuple[Collective, ...]:
    """The collectives of a module, each once: XLA:TPU writes one again in every step of a fusion that hides it.

    Args:
        text: Optimized HLO.
        mesh: The axes of the mesh and their sizes, in the order of the devices.
        arguments: The names of the program's arguments.
    """
    found: dict[str, Collective] = {}
    for line in text.splitlines():
        if (match := _COLLECTIVE.match(line)) is not None:
            channel = _CHANNEL.search(line)
            found.setdefault(channel[1] if channel else line, _collective(match, line, mesh, arguments))
    return tuple(found.values())


def gathered_whole(found: Sequence[Collective]) -> tuple[str, ...]:
    """A warning for each value that is no argument and is gathered: every device then has, and computes with, the whole."""
    return tuple(
        f"{c.module or 'a value'}{' (backward)' if c.backward else ''}: an intermediate value is gathered over "
        f"{', '.join(c.axes) or 'the mesh'}, {', '.join(c.shapes)}, {c.bytes:,} bytes on each device"
        for c in found
        if c.kind == "all-gather" and not c.argument
    )


def _collective(match: re.Match, line: str, mesh: Mapping[str, int], arguments: Sequence[str]) -> Collective:
    shapes, kind, start = match.groups()
    known = _NAME.search(line)
    argument, module, backward = _origin(known[1] if known else "", arguments)
    results = _results(shapes, kind, start is not None)
    return Collective(
        kind="reduce-scatter" if _SCATTERED in line else kind,
        axes=_axes(line, mesh),
        bytes=sum(map(bytes_of, results)),
        shapes=tuple(results),
        argument=argument,
        module=module,
        backward=backward,
    )


def _results(shapes: str, kind: str, start: bool) -> list[str]:
    """The results' shapes; those of a start are a tuple whose first half are its operands, but for `all-reduce`."""
    found = re.findall(r"(?:pred|[a-z]+\d+\w*)\[[\d,]*\]", shapes)
    if not start or kind == "all-reduce":
        return found
    found = [shape for shape in found if not shape.startswith(("u32[]", "s32[]"))]
    return found[len(found) // 2 :]


def _origin(name: str, arguments: Sequence[str]) -> tuple[str, str, bool]:
    """The argument, or the module path and the direction, that an `op_name` tells of."""
    if (given := re.fullmatch(r"args\[(\d+)\]", name)) is not None:
        return arguments[int(given[1])], "", False
    plain = (
        re.sub(r"jit\([^/]*\)", "", name).replace("transpose(", "").replace("jvp(", "").replace("vmap(", "").replace(")", "")
    )
    *path, _ = plain.split("/")
    after = [part for i, part in enumerate(path) if part not in _NO_MODULES and not (i and path[i - 1] == "__closure__")]
    return "", "/".join(after), "transpose(" in name


def _axes(line: str, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which the devices of one group differ."""
    groups = list(_groups(line))
    if not groups or not mesh or max(map(max, groups)) >= math.prod(mesh.values()):
        return ()
    places = np.array(np.unravel_index(groups, tuple(mesh.values())))  # [axis, group, member]
    return tuple(name for name, place in zip(mesh, places, strict=True) if (place != place[:, :1]).any())


def _groups(line: str) -> Iterator[list[int]]:
    """The devices that take part together, by number."""
    if (listed := _LISTED.search(line)) is not None:
        yield from ([int(i) for i in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    elif (iota := _IOTA.search(line)) is not None:
        shape, reshaped, order = (tuple(map(int, part.split(","))) if part else None for part in iota.groups())
        yield from np.arange(math.prod(reshaped)).reshape(reshaped).transpose(order).reshape(shape).tolist()  # type: ignore[arg-type]
    elif (named := _NAMED.search(line)) is not None:
        yield from _groups_of_mesh(*named.groups())


def _groups_of_mesh(mesh: str, along: str) -> list[list[int]]:
    """The groups of `mesh['a'=2,'b'=4] {'b'}`; none if only parts of axes are named."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    names = re.findall(r"'(\w+)'", along)
    if "(" in along or not names or not {*names} <= sizes.keys():
        return []
    others = [i for i, name in enumerate(sizes) if name not in names]
    order = [*others, *(list(sizes).index(name) for name in names)]
    members = math.prod(sizes[name] for name in names)
    return np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values())).transpose(order).reshape(-1, members).tolist()
