"""The report of the environment: what it reads, what it finds, and how the command tells it."""

import os
import subprocess
import sys

import pytest

from pure_backend.__main__ import main
from pure_backend.inspect import report_environment
from pure_backend.inspect.environment import OPTIONAL, REQUIRED, find_problems

SOUND = {
    "torch": "2.9.0+cu128",
    "torch_xla": "2.9.0",
    "jax": "0.10.2",
    "jaxlib": "0.10.2",
    "torchax": "0.0.13",
    "libtpu": "0.0.52",
    "transformers": None,
}


def run_python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def mixed_torchax(tmp_path):
    """A folder with the metadata of torchax 0.0.13 and files of 0.0.6 that must not be imported."""
    package, metadata = tmp_path / "torchax", tmp_path / "torchax-0.0.13.dist-info"
    package.mkdir()
    package.joinpath("__init__.py").write_text('__version__ = "0.0.6"\nraise RuntimeError("imported")\n')
    metadata.mkdir()
    metadata.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: torchax\nVersion: 0.0.13\n")
    return tmp_path


def test_this_environment_is_sound():
    report = report_environment()
    assert report.problems == ()
    assert set(report.versions) == {"python", *REQUIRED, *OPTIONAL}
    assert "cpu" in report.runtimes["jax"]
    assert ("xla" in report.runtimes) == (report.versions["torch_xla"] is not None)


def test_sound_versions_have_no_problem():
    assert list(find_problems(SOUND, torchax_files="0.0.13", libtpu_of_jax="0.0.42")) == []


def test_optional_packages_may_be_missing():
    assert list(find_problems(SOUND | dict.fromkeys(OPTIONAL), torchax_files="0.0.13")) == []


@pytest.mark.parametrize(
    ("changed", "torchax_files", "what", "fix"),
    [
        ({"jax": None}, "0.0.13", "jax is not installed", "pip install jax"),
        ({}, "0.0.6", "0.0.6", "pip install --force-reinstall --no-deps torchax==0.0.13"),
        ({}, None, "unknown", "pip install --force-reinstall --no-deps torchax==0.0.13"),
        (
            {"torch": "2.13.0"},
            "0.0.13",
            "torch 2.13.0 does not fit torch_xla 2.9.0",
            "pip install 'torch==2.9.*'",
        ),
        (
            {"jax": "0.8.1", "jaxlib": "0.8.1"},
            "0.0.13",
            "jaxlib 0.8.1 keeps weights of matrix products by address",
            "pip install 'jax>=0.8.2,<0.11' 'jaxlib>=0.8.2,<0.11'",
        ),
        (
            {"libtpu": "0.0.24"},
            "0.0.13",
            "libtpu 0.0.24 is older than the one that jax 0.10.2 is made for, 0.0.42",
            "pip install 'libtpu>=0.0.42'",
        ),
    ],
)
def test_each_mismatch_is_one_problem_with_its_fix(changed, torchax_files, what, fix):
    (problem,) = find_problems(SOUND | changed, torchax_files, libtpu_of_jax="0.0.42")
    assert what in problem.what
    assert problem.fix == fix


def test_missing_torchax_is_not_also_called_mixed():
    (problem,) = find_problems(SOUND | {"torchax": None}, torchax_files="0.0.6")
    assert problem.fix == "pip install torchax"


def test_command_prints_versions_and_succeeds_where_all_is_well(capsys):
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    assert report_environment().versions["jax"] in printed
    assert "jax runtime" in printed
    assert "problem" not in printed


def test_command_finds_mixed_torchax_without_importing_it(mixed_torchax):
    done = run_python("-m", "pure_backend", "env", PYTHONPATH=str(mixed_torchax))
    assert done.returncode == 1, done.stderr
    assert "problem: torchax's files are version 0.0.6 but its distribution is 0.0.13" in done.stdout
    assert "   fix: pip install --force-reinstall --no-deps torchax==0.0.13\n" in done.stdout


def test_command_reports_a_runtime_that_does_not_start():
    done = run_python("-m", "pure_backend", "env", JAX_PLATFORMS="abacus")
    assert done.returncode == 1, done.stderr
    assert f"problem: jax {report_environment().versions['jax']} does not start" in done.stdout
    assert "   fix: unset JAX_PLATFORMS\n" in done.stdout


def test_command_must_be_named():
    done = run_python("-m", "pure_backend")
    assert done.returncode == 2
    assert "COMMAND" in done.stderr


def test_importing_the_report_imports_neither_jax_nor_torch_xla():
    done = run_python("-c", "import sys, pure_backend.inspect; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    assert not {"jax", "torch_xla", "torchax"} & set(done.stdout.split())
