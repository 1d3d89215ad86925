"""The recipes for users' trainers and models: they run as written, equal eager, and compile as often as they say."""

import importlib
import importlib.util
from pathlib import Path

import pytest

TORCH_XLA = importlib.util.find_spec("torch_xla") is not None
REFUSED = {  # beside torch_xla 2.9, by the library itself
    "lora": "PEFT refuses the torchao that fits torch 2.9",
    "lightning": "Lightning asks torch_xla for TPU chips, also for accelerator='cpu', and fails where there are none",
}
EXAMPLES = Path(__file__).parents[1] / "examples"
# The libraries' own: deprecations, advice about workers and loggers, native code for other machines.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("as_users_see_it"),
]


@pytest.fixture
def recipe(monkeypatch):
    """A recipe's `main`, by name; skipped where its library is not installed."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name: str, library: str):
        pytest.importorskip(library)
        if TORCH_XLA and name in REFUSED:
            pytest.skip(REFUSED[name])
        return importlib.import_module(f"recipe_{name}").main

    return load


# Name, library, tolerance of the losses, traces, lowerings. A program rounds bf16 once where eager rounds after each operator.
TRAININGS = [
    ("trainer", "accelerate", 1e-4, 1, 2),
    ("lora", "peft", 1e-4, 1, 2),
    ("lightning", "lightning", 1e-4, 1, 2),
    ("loop", "torch", 1e-2, 1, 2),
    ("timm", "timm", 1e-3, 2, 3),
]


@pytest.mark.parametrize(("name", "library", "tolerance", "traces", "lowerings"), TRAININGS, ids=[row[0] for row in TRAININGS])
def test_training(name, library, tolerance, traces, lowerings, recipe):
    eager, losses, counts = recipe(name, library)()
    assert losses == pytest.approx(eager, abs=tolerance)
    assert len(set(eager)) > 1, "the model does not train"
    assert (counts.traces, counts.lowerings) == (traces, lowerings)


def test_generation(recipe):
    same, counts = recipe("generate", "transformers")()
    assert all(same)
    assert counts.traces == 4  # two buckets


def test_quantized_inference(recipe):
    difference, counts = recipe("quantized", "torchao")()
    assert difference < 1e-5
    assert (counts.traces, counts.lowerings, counts.calls) == (1, 1, 1)


def test_denoising(recipe):
    difference, counts = recipe("diffusers", "diffusers")()
    assert difference < 1e-4
    assert (counts.traces, counts.calls) == (1, 5)
