"""Prints the zoo as a markdown table: `python -m tests.zoo.table [names...] [--device cpu|xla|all]`."""

import argparse
import time
from collections.abc import Iterable, Iterator

from .compare import Pair
from .models import MODELS, ZooModel

_COLUMNS = ("model", "device", "loss difference", "gradient difference", "buffer difference", "seconds")


def zoo_table(names: Iterable[str] = (), devices: Iterable[str] = ("cpu",)) -> Iterator[str]:
    """Yields the lines of a markdown table, one as each model is done; a failure is a line too.

    Args:
        names: Models to run; all of them if none is named.
        devices: Some of "cpu" and "xla"; on "xla" run the models that the zoo marks for it.
    """
    yield f"| {' | '.join(_COLUMNS)} |"
    yield f"|---|---|{'---:|' * 4}"
    entries = [MODELS[name] for name in names] or list(MODELS.values())
    for device in devices:
        for entry in entries:
            if device == "cpu" or entry.xla:
                yield f"| {' | '.join(_row(entry, device))} |"


def _row(entry: ZooModel, device: str) -> list[str]:
    start = time.perf_counter()
    try:
        cells = _differences(entry, device)
    except Exception as error:  # the table goes on, and says what happened
        cells = [f"{type(error).__name__}: {_first_line(error)}", "", ""]
    return [entry.name, device, *cells, f"{time.perf_counter() - start:.1f}"]


def _differences(entry: ZooModel, device: str) -> list[str]:
    pair = Pair(entry, device)
    difference = pair.train(entry.seed)
    gradients = "one side only" if difference.presence else f"{difference.gradients.size:.0e}"
    return [f"{difference.loss:.0e}", gradients, f"{difference.buffers.size:.0e}"]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0].replace("|", "\\|")[:100]


def main() -> None:
    """Reads the command line and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(MODELS))
    parser.add_argument("--device", choices=("cpu", "xla", "all"), default="cpu")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(MODELS)
    if unknown:
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    devices = ("cpu", "xla") if arguments.device == "all" else (arguments.device,)
    for line in zoo_table(arguments.names, devices):
        print(line, flush=True)


if __name__ == "__main__":
    main()
