"""Scripts run one after the other, and the files that their results become."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _record
from _page import page
from _plots import draw


def run(script: Path, arguments: list[str], limit: float) -> dict[str, Any]:
    """Run a script in a session of its own, so that a script that is stopped takes its peers with it.

    Args:
        script: The file.
        arguments: Its command line.
        limit: Seconds after which it is stopped.

    Returns:
        `script`, `arguments`, `status` ("done", or what went wrong), `seconds`, `entries` (what it recorded).
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record"
        command = [sys.executable, str(script), *arguments]
        process = subprocess.Popen(command, env=os.environ | {_record.VARIABLE: str(record)}, start_new_session=True)
        try:
            code = process.wait(limit)
            status = "done" if code == 0 else f"failed with exit status {code}"
        except subprocess.TimeoutExpired:
            status = f"was stopped after {limit:g} s"
        finally:  # also when the suite is interrupted
            _stop(process)
        entries = _record.read(record)
    seconds = time.perf_counter() - started
    return {"script": script.stem, "arguments": arguments, "status": status, "seconds": seconds, "entries": entries}


def _stop(process: subprocess.Popen) -> None:
    """End what still runs of a script."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def write(out: Path, about: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """Write one JSON file a script, the plots and the page `README.md`.

    Args:
        out: The folder.
        about: See `_page.page`.
        results: What `run` returned.
    """
    out.mkdir(parents=True, exist_ok=True)
    for result in results:
        (out / f"{result['script']}.json").write_text(json.dumps({"suite": about, **result}, indent=1) + "\n")
    plots = draw((entry for result in results for entry in result["entries"]), out)
    (out / "README.md").write_text(page(about, results, plots))
