"""The shipped kernels: their results against the references, what they cost on TPU, and their time.

    python benchmarks/kernels.py [--quick] [--topology v5e:2x2]

Without a TPU a kernel is interpreted, and its time says nothing of the kernel: only the reference is timed. What XLA and Mosaic
made of both for the topology is compared: kernels, aliases, bytes of temporaries and copies. With a TPU in JAX both are timed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from _measure import arguments, measure, median, print_machine, print_table, warm

from pure_backend.custom_ops import kernels
from pure_backend.custom_ops.flash_attention import flash_attention_reference
from pure_backend.custom_ops.kv_cache_update import kv_cache_update_reference
from pure_backend.custom_ops.quantized_matmul import quantize_reference, quantized_matmul_reference
from pure_backend.custom_ops.rms_norm import rms_norm_reference
from pure_backend.inspect import compile_for_tpu

DTYPE = jnp.bfloat16
HAS_TPU = jax.default_backend() == "tpu"


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel with arguments.

    Attributes:
        operator: The torch operator.
        kernel: Its JAX function.
        reference: The reference.
        args: Arrays.
        backward: Whether the gradient is compiled too.
        donate: Positions of the arguments that are given away.
    """

    operator: Any
    kernel: Callable[..., jax.Array]
    reference: Callable[..., jax.Array]
    args: tuple[jax.Array, ...]
    backward: bool = True
    donate: tuple[int, ...] = ()


def cases(quick: bool) -> dict[str, Case]:
    """Sizes of a layer of a small language model."""
    batch, heads, kv_heads, seq, dim = (1, 2, 1, 256, 64) if quick else (1, 16, 4, 2048, 128)
    hidden = heads * dim
    keys = iter(jax.random.split(jax.random.key(0), 16))
    normal = lambda *shape: jax.random.normal(next(keys), shape, DTYPE)  # noqa: E731
    weight, scale = quantize_reference(jax.random.normal(next(keys), (hidden, hidden)))
    x, kv = normal(batch * seq, hidden), (batch, kv_heads, seq, dim)
    made = {
        "kv_cache_update_": (
            kernels.kv_cache_update_,
            kv_cache_update_reference,
            (normal(*kv), normal(*kv[:2], 1, dim), jnp.int32(100)),
        ),
        "rms_norm": (kernels.rms_norm, rms_norm_reference, (x, normal(hidden))),
        "flash_attention": (
            kernels.flash_attention,
            flash_attention_reference,
            (normal(batch, heads, seq, dim), normal(*kv), normal(*kv)),
        ),
        "quantized_matmul": (kernels.quantized_matmul, quantized_matmul_reference, (x, weight, scale)),
    }
    in_place = {"kv_cache_update_": {"backward": False, "donate": (0,)}}
    return {
        name: Case(op, getattr(op, "functional", op)._fn, reference, args, **in_place.get(name, {}))
        for name, (op, reference, args) in made.items()
    }


def compiled_rows(name: str, case: Case, topology: str) -> list[tuple[str, ...]]:
    """What the TPU compiler made of a kernel and of its reference."""
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in case.args]
    rows = []
    for backward in (False, True) if case.backward else (False,):
        for peer, fn in (("kernel", case.operator), ("reference", case.reference)):
            program = compile_for_tpu(fn, *shapes, topology=topology, donate=case.donate, backward=backward)
            megabytes = [f"{size / 2**20:.2f}" for size in (program.memory.temporaries, sum(c.bytes for c in program.copies))]
            direction = "backward" if backward else "forward"
            rows.append((name, direction, peer, str(len(program.kernels)), str(len(program.aliases)), *megabytes))
    return rows


def timed_row(name: str, case: Case, rounds: int) -> tuple[str, ...]:
    """Milliseconds of the reference, and of the kernel where there is a TPU."""
    peers = {"reference": case.reference} | ({"kernel": case.kernel} if HAS_TPU else {})
    calls = {n: functools.partial(_finished, jax.jit(fn), case.args) for n, fn in peers.items()}
    warm(calls)
    samples = measure(calls, rounds)
    times = {n: 1e3 * median(samples[n]) for n in calls}
    kernel = f"{times['kernel']:.3f}" if HAS_TPU else "no TPU"
    return name, f"{times['reference']:.3f}", kernel


def _finished(fn: Callable[..., Any], args: tuple) -> None:
    jax.block_until_ready(fn(*args))


def main() -> None:
    """Compile, measure and print."""
    parser = arguments(__doc__, rounds=10)
    parser.add_argument("--topology", default="v5e:2x2", help="what is compiled for (default: %(default)s)")
    args = parser.parse_args()
    print_machine()
    chosen = cases(args.quick)
    headings = ("kernel", "direction", "peer", "Mosaic kernels", "aliases", "temporaries MiB", "copies MiB")
    rows = [row for name, case in chosen.items() for row in compiled_rows(name, case, args.topology)]
    print_table(f"compiled for {args.topology}", headings, rows)
    times = [timed_row(name, case, 2 if args.quick else args.rounds) for name, case in chosen.items()]
    print_table(f"forward on {jax.default_backend()}, ms", ("kernel", "reference", "kernel on TPU"), times)


if __name__ == "__main__":
    main()
