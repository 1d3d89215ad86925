"""The recipes for users' trainers and models: they run as written, equal eager, and compile as often as they say.

Each runs in a process of its own, as a user's script does: the libraries change settings of theirs and of torch for good.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

TORCH_XLA = importlib.util.find_spec("torch_xla") is not None
REFUSED = {  # beside torch_xla 2.9, by the library itself
    "lora": "PEFT refuses the torchao that fits torch 2.9",
    "lightning": "Lightning asks torch_xla for TPU chips, also for accelerator='cpu', and fails where there are none",
}
RUN = """
import json, sys
sys.path.insert(0, {examples!r})
import recipe_{name}
*found, counts = recipe_{name}.main()
print(json.dumps([found, counts.traces, counts.lowerings, counts.calls]))
"""


def run(name: str, library: str) -> tuple[list, int, int, int]:
    """What a recipe found, and its traces, lowerings and calls; skipped where its library is not installed."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    if TORCH_XLA and name in REFUSED:
        pytest.skip(REFUSED[name])
    code = RUN.format(examples=str(Path(__file__).parents[1] / "examples"), name=name)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


# Name, library, tolerance of the losses, traces, lowerings. A program rounds bf16 once where eager rounds after each operator.
TRAININGS = [
    ("trainer", "accelerate", 1e-4, 1, 2),
    ("lora", "peft", 1e-4, 1, 2),
    ("lightning", "lightning", 1e-4, 1, 2),
    ("loop", "torch", 1e-2, 1, 2),
    ("timm", "timm", 1e-3, 2, 3),
]


@pytest.mark.parametrize(("name", "library", "tolerance", "traces", "lowerings"), TRAININGS, ids=[row[0] for row in TRAININGS])
def test_training(name, library, tolerance, traces, lowerings):
    (eager, losses), *counts = run(name, library)
    assert losses == pytest.approx(eager, abs=tolerance)
    assert len(set(eager)) > 1, "the model does not train"
    assert counts[:2] == [traces, lowerings]


def test_generation():
    (same,), traces, *_ = run("generate", "transformers")
    assert all(same)
    assert traces == 4  # two buckets


def test_quantized_inference():
    (difference,), *counts = run("quantized", "torchao")
    assert difference < 1e-5
    assert counts == [1, 1, 1]


def test_denoising():
    (difference,), traces, _, calls = run("diffusers", "diffusers")
    assert difference < 1e-4
    assert (traces, calls) == (1, 5)
