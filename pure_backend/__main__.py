"""The command line: `python -m pure_backend COMMAND`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pure_backend.errors import PureBackendError
from pure_backend.inspect import report_environment
from pure_backend.inspect.plan import mesh_of, plan_tables, plan_target
from pure_backend.inspect.target import TargetError, explain_target
from pure_backend.jax_bridge.disk_cache import disk_cache

_EXPLAIN = (
    "FUNCTION is called without arguments and returns what to explain: a function or module and a tuple of its arguments, "
    "`return model, (x,)`, or `return model, (x,), {'mask': mask}`. It is compiled and called once."
)
_PLAN = (
    "FUNCTION is called without arguments and returns what to compile and its arguments, `return step, (x, y)`, or also "
    "keywords of compile_for_tpu, `return step, (x, y), {'mesh': {'dp': 4, 'tp': 4}, 'rules': {...}}`. Nothing is run."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words after `python -m pure_backend`; those of the process by default.

    Returns:
        The exit code.
    """
    args = _parser().parse_args(argv)
    return args.run(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pure_backend")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    env = commands.add_parser("env", help="show versions, runtimes and problems; exit code 1 if there are problems")
    env.set_defaults(run=_env)
    check = commands.add_parser(
        "check", help="compile small programs on every device that is there; exit code 1 if one is wrong"
    )
    check.add_argument("--device", choices=["cpu", "cuda", "xla"], help="only on this device")
    check.set_defaults(run=_check)
    explain = commands.add_parser("explain", help="show what the compiler makes of a function", description=_EXPLAIN)
    explain.add_argument("target", metavar="FILE:FUNCTION")
    explain.add_argument("--html", metavar="PATH", help="also write the report as a page, with a picture of each graph")
    explain.set_defaults(run=_explain)
    plan = commands.add_parser("plan", help="show what a function or step would cost on a TPU slice", description=_PLAN)
    plan.add_argument("target", metavar="FILE:FUNCTION")
    plan.add_argument("--topology", default="v5e:2x2", help="a generation and the extent of a slice, v5e:8x8")
    plan.add_argument("--mesh", type=str, help="axes and their sizes, dp=8,tp=8, instead of the function's")
    plan.set_defaults(run=_plan)
    cache = commands.add_parser("cache", help="show the disk cache: its folder, entries and bytes")
    cache.add_argument("--clear", action="store_true", help="remove all entries")
    cache.set_defaults(run=_cache)
    return parser


def _cache(args: argparse.Namespace) -> int:
    cache = disk_cache()
    if cache is None:
        print("the disk cache is switched off: PURE_BACKEND_CACHE_DIR is empty or 0")
        return 0
    if args.clear:
        print(f"{cache.folder}: removed {_entries(cache.clear())}")
        return 0
    entries = cache.entries()
    print(f"{cache.folder}: {_entries(len(entries))}, {sum(e.size for e in entries):,} of at most {cache.limit:,} bytes")
    return 0


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"


def _env(args: argparse.Namespace) -> int:
    import rich

    environment = report_environment()
    rich.print(environment)
    for problem in environment.problems:  # not through rich, which would break a command over two lines
        print(f"problem: {problem.what}\n   fix: {problem.fix}")
    return 1 if environment.problems else 0


def _check(args: argparse.Namespace) -> int:
    import rich

    from pure_backend.check import devices, report, run_checks

    chosen = [device for device in devices() if args.device in (None, device.type)]
    if not chosen:
        print(f"no {args.device} device that both torch and JAX can use: python -m pure_backend env", file=sys.stderr)
        return 2
    outcomes = [outcome for device in chosen for outcome in run_checks(device)]
    rich.print(report(outcomes))
    return 1 if any(outcome.problem for outcome in outcomes) else 0


def _explain(args: argparse.Namespace) -> int:
    try:
        report = explain_target(args.target)
    except TargetError as error:
        print(error, file=sys.stderr)
        return 2
    print(report)
    if args.html:
        print(f"page: {report.save_html(args.html)}")
    return 0


def _plan(args: argparse.Namespace) -> int:
    import rich

    try:
        program = plan_target(args.target, args.topology, mesh_of(args.mesh) if args.mesh else None)
    except (TargetError, PureBackendError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for table in plan_tables(program):
        rich.print(table)
    for warning in program.warnings:
        print(f"warning: {warning}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
