"""The suite of benchmarks: a script that fails does not stop it, and what scripts record becomes a page, plots and JSON."""

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the suite draws plots")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def suite(monkeypatch):
    """The suite's module; scripts find their neighbours beside themselves, those of a test on the path."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("PYTHONPATH", f"{BENCHMARKS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    import _suite

    yield _suite
    for name in {"_suite", "_record", "_page", "_plots"} - before:
        sys.modules.pop(name, None)


def script(tmp_path, text):
    """A script with that text."""
    path = tmp_path / "script.py"
    path.write_text(text)
    return path


def test_a_script_that_fails_leaves_what_it_found(suite, tmp_path):
    found = suite.run(script(tmp_path, "import _record\n_record.note('so far')\nraise SystemExit(3)"), [], limit=60)
    assert found["status"] == "failed with exit status 3"
    assert found["entries"] == [{"kind": "note", "text": "so far"}]


def test_a_script_that_hangs_is_stopped_with_its_peers(suite, tmp_path):
    """The peer holds a lock on a file as long as it lives."""
    import fcntl

    lock = tmp_path / "lock"
    text = f"""
import subprocess, sys
peer = "import fcntl, sys, time; f = open({str(lock)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); time.sleep(600)"
subprocess.run([sys.executable, "-c", peer])
"""
    found = suite.run(script(tmp_path, text), [], limit=5)
    assert found["status"] == "was stopped after 5 s"
    with lock.open() as file:  # the peer had begun, or there were no file
        fcntl.flock(file, fcntl.LOCK_EX)


def test_results_become_a_page_plots_and_json(suite, tmp_path):
    text = """
import _record
_record.table("times", ["peer", "ms"], [["eager", "1.0"]])
_record.verdict("it is 2 times", 2.0, 1.0, "times", False)
_record.point("first-step", "lazy", 10, 2.0)
_record.point("first-step", "lazy", 40, 8.0)
_record.point("residuals", "remat=auto", "decoder", 2.0)
"""
    found = suite.run(script(tmp_path, text), ["--quick"], limit=60)
    about = {"date": "today", "command": "make bench", "seconds": 60.0, "machine": {"cores": "2"}, "versions": {"torch": "2"}}
    suite.write(tmp_path / "out", about, [found, {**found, "script": "broken", "status": "failed with exit status 1"}])

    page = (tmp_path / "out" / "README.md").read_text()
    for line in (
        "| cores | 2 |",
        "| script | it is 2 times | **missed** |",
        "| eager | 1.0 |",
        "**This script failed with exit status 1**; what follows it had found by then.",
    ):
        assert line in page.splitlines()
    for name in ("first-step.svg", "residuals.svg"):
        assert f"({name})" in page
        assert "<svg" in (tmp_path / "out" / name).read_text()
    stored = json.loads((tmp_path / "out" / "script.json").read_text())
    assert (stored["status"], stored["arguments"], len(stored["entries"])) == ("done", ["--quick"], 5)
