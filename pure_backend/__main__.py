"""The command line: `python -m pure_backend COMMAND`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pure_backend.inspect import report_environment


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
    return parser


def _env(args: argparse.Namespace) -> int:
    import rich

    environment = report_environment()
    rich.print(environment)
    for problem in environment.problems:  # not through rich, which would break a command over two lines
        print(f"problem: {problem.what}\n   mend: {problem.mend}")
    return 1 if environment.problems else 0


if __name__ == "__main__":
    sys.exit(main())
