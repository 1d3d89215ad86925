"""What a program would cost on a slice of TPUs, as a table: `python -m pure_backend plan FILE:FUNCTION`."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pure_backend.inspect.tables import show_bytes, show_count
from pure_backend.inspect.target import TargetError, call_of

if TYPE_CHECKING:
    from rich.table import Table

    from pure_backend.inspect.tpu import TPUProgram

_TICK_S = 1.0


def plan_target(target: str, topology: str, mesh: Mapping[str, int] | None) -> TPUProgram:
    """The program of what a function in a file returns.

    Args:
        target: `FILE:FUNCTION`. The function takes no arguments and returns `(fn, args)` or `(fn, args, keywords)`, the
            keywords being those of `compile_for_tpu`: `{"mesh": {"dp": 4, "tp": 4}, "rules": {...}}`.
        topology: As `"v5e:4x4"`.
        mesh: Axes and sizes that count instead of the function's.

    Raises:
        TargetError: There is no such file or function, or it returns something else.
    """
    from pure_backend.inspect.tpu import compile_for_tpu

    fn, args, keywords = call_of(target)
    keywords = {**keywords, "topology": topology, **({} if mesh is None else {"mesh": mesh})}
    with progress(f"compiling for {topology}"):
        return compile_for_tpu(fn, *args, **keywords)


def mesh_of(text: str) -> dict[str, int]:
    """The axes of `dp=4,tp=4`.

    Raises:
        TargetError: The text is something else.
    """
    axes = [part.partition("=") for part in text.split(",")]
    if not all(name.strip() and size.strip().isdigit() and int(size) for name, _, size in axes):
        raise TargetError(f"{text!r} is no mesh, such as dp=4,tp=4")
    return {name.strip(): int(size) for name, _, size in axes}


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Say on stderr how long something has taken so far, in one line."""
    start, done = time.monotonic(), threading.Event()

    def tell() -> None:
        while not done.wait(_TICK_S):
            print(f"\r{what}: {time.monotonic() - start:.0f} s", end="", file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
        print(f"\r{what}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def plan_tables(program: TPUProgram) -> list[Table]:
    """Memory and FLOPs of a device, then what devices send each other."""
    return [_costs(program), *([_sent(program)] if program.collectives else [])]


def _costs(program: TPUProgram) -> Table:
    from rich.table import Table

    mesh = " x ".join(f"{name} {size}" for name, size in program.mesh.items()) or "one core"
    table = Table("each device", "", title=f"{program.topology} ({program.device}), {mesh}", title_justify="left")
    memory = program.memory
    rows: list[tuple[str, Any]] = [
        ("arguments", show_bytes(memory.arguments)),
        ("of which updated in place", show_bytes(memory.aliased)),
        ("other results", show_bytes(memory.outputs - memory.aliased)),
        ("temporaries", show_bytes(memory.temporaries)),
        ("together", show_bytes(memory.arguments + memory.outputs - memory.aliased + memory.temporaries)),
        ("FLOPs", show_count(program.cost.get("flops"))),
        ("bytes read and written", show_bytes(program.cost.get("bytes_accessed", 0.0))),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _sent(program: TPUProgram) -> Table:
    """Equal collectives in one row, the largest first."""
    from rich.table import Table

    table = Table("collective", "axes", "times", "bytes each", "of", title_justify="left")
    rows = Counter((c.bytes, c.kind, c.axes, _of(c)) for c in program.collectives)
    for (size, kind, axes, of), times in sorted(rows.items(), key=lambda row: -row[0][0] * row[1]):
        table.add_row(kind, ", ".join(axes) or "?", str(times), show_bytes(size), of)
    return table


def _of(collective: Any) -> str:
    """What is moved; XLA sends several values together, under the name of one of them."""
    name = collective.argument or collective.module + (" (backward)" if collective.backward else "")
    count = len(collective.shapes)
    return name if count == 1 else f"{count} values" + (f", {name} among them" if name else "")
