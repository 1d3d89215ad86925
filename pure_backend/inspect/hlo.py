"""What the text of an optimized HLO module says about memory: aliases, copies and kernels."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

_SHAPE = re.compile(r"(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\(([^)]*)\)(.*)$")
_INPUT_OUTPUT = re.compile(r"\{([\d, ]*)\}: \((\d+), \{[\d, ]*\}, (?:may|must)-alias\)")
_OUTPUT_OPERAND = re.compile(r"\{([\d, ]*)\}: \((\d+), \{[\d, ]*\}\)")
_SPACE = re.compile(r"S\((\d+)\)")
_SAME_VALUE = ("bitcast", "get-tuple-element")


@dataclasses.dataclass(frozen=True)
class Alias:
    """An output that lies in the memory of an input.

    Attributes:
        output: The output's position.
        input: The input's position: of a program among its arguments, of a kernel among its operands.
    """

    output: int
    input: int


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy that the program makes, on its own or as the root of a fusion.

    Attributes:
        name: The instruction.
        shape: What is copied, as HLO writes it: `f32[8,128]`.
        bytes: Its size, without the padding of tiles.
        space: The memory space it goes to; 0 is HBM, 1 is VMEM.
        input: The program's argument that is copied, or None if it is an intermediate value.
    """

    name: str
    shape: str
    bytes: int
    space: int
    input: int | None


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A Pallas kernel, compiled by Mosaic.

    Attributes:
        name: The instruction.
        aliases: Which results lie in the memory of which operands.
    """

    name: str
    aliases: tuple[Alias, ...]


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str


def aliases(text: str) -> tuple[Alias, ...]:
    """Outputs of a module that lie in the memory of its arguments."""
    header = text.split("\n", 1)[0]
    return tuple(Alias(_index(output), int(given)) for output, given in _INPUT_OUTPUT.findall(header))


def copies(text: str) -> tuple[Copy, ...]:
    """Copies of a module; a copy between two layouts inside of a fusion counts only if it is the fusion's result."""
    return tuple(found for body in _bodies(text) for found in _copies(body))


def kernels(text: str) -> tuple[Kernel, ...]:
    """Mosaic kernels of a module."""
    calls = [i for body in _bodies(text) for i, _ in body.values() if i.opcode == "custom-call"]
    calls = [i for i in calls if 'custom_call_target="tpu_custom_call"' in i.rest]
    return tuple(Kernel(i.name, _kernel_aliases(i.rest)) for i in calls)


def _kernel_aliases(rest: str) -> tuple[Alias, ...]:
    _, found, tail = rest.partition("output_to_operand_aliasing={")
    listed = tail.split(")}")[0] + ")" if found else ""
    return tuple(Alias(_index(output), int(operand)) for output, operand in _OUTPUT_OPERAND.findall(listed))


def _copies(body: Mapping[str, tuple[_Instruction, bool]]) -> Iterator[Copy]:
    entry = any(root_of_entry for _, root_of_entry in body.values())
    for instruction, _ in body.values():
        if instruction.opcode not in ("copy", "copy-start"):
            continue
        moved = _SHAPE.search(instruction.shape)
        if moved is None:
            continue
        layout = instruction.shape[moved.end() :].split("}")[0]
        space = _SPACE.search(layout)
        source = _input(body, instruction.operands[0]) if entry else None
        yield Copy(instruction.name, moved[0], _bytes(moved), int(space[1]) if space else 0, source)


def _input(body: Mapping[str, tuple[_Instruction, bool]], name: str) -> int | None:
    """The argument that a value is, seen through instructions that move nothing."""
    while (known := body.get(name)) is not None:
        instruction, _ = known
        if instruction.opcode == "parameter":
            return int(instruction.operands[0])
        if instruction.opcode not in _SAME_VALUE:
            return None
        name = instruction.operands[0]
    return None


def _bodies(text: str) -> Iterator[dict[str, tuple[_Instruction, bool]]]:
    """The computations of a module: instructions by name, each with whether its computation is the entry.

    Of a fused computation only the root is kept: the others have no memory of their own.
    """
    for part in text.split("\n\n"):
        head, *lines = part.strip().splitlines() or [""]
        if not head.endswith("{"):
            continue
        entry, fused = head.startswith("ENTRY"), "fused_computation" in head or "fusion" in head.split(" ")[0]
        if fused:
            lines = [line for line in lines if line.lstrip().startswith("ROOT")]
        found = filter(None, map(_instruction, lines))
        yield {instruction.name: (instruction, entry) for instruction in found}


def _instruction(line: str) -> _Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    name, shape, opcode, operands, rest = match.groups()
    return _Instruction(name, shape, opcode, tuple(o.strip().split("%")[-1] for o in operands.split(",")), rest)


def _index(text: str) -> int:
    return int(text.split(",")[0]) if text.strip() else 0


def bytes_of(shape: str) -> int:
    """The size of a value, `f32[8,128]`, without the padding of tiles."""
    found = _SHAPE.match(shape)
    return _bytes(found) if found else 0


def _bytes(shape: re.Match) -> int:
    dtype, dims = shape.groups()
    bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])  # type: ignore[index]
    return math.prod(map(int, filter(None, dims.split(",")))) * bits // 8


def cost(analysis: Any) -> dict[str, float]:
    """XLA's estimate: the totals without the ones of single operands, as `bytes accessed0{}` is."""
    analysis = analysis[0] if isinstance(analysis, (list, tuple)) else analysis or {}
    return {name.replace(" ", "_"): value for name, value in sorted(analysis.items()) if "{" not in name}
