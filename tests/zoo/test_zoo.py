"""Every model of the zoo against eager: two training steps, evaluation; a third of them also on `xla`."""

import pytest
import torch

from .compare import BACKEND, Difference, Pair
from .models import MODELS, ZooModel

LOSS = 1e-5
GRADIENTS = 1e-4
BUFFERS = 1e-5

# The networks' own packages warn (deprecations, advice): not what is tested here.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:::{package}")
    for package in ("transformers", "timm", "torchvision", "diffusers", "torch", "torch_xla", "jax")
]

every_model = pytest.mark.parametrize("entry", MODELS.values(), ids=str)
xla_models = pytest.mark.parametrize("entry", [entry for entry in MODELS.values() if entry.xla], ids=str)


@every_model
def test_training_matches_eager_and_the_second_step_compiles_nothing(entry: ZooModel) -> None:
    _check_training(entry, "cpu")


@every_model
def test_evaluation_matches_eager(entry: ZooModel) -> None:
    _check_evaluation(entry, "cpu")


@pytest.mark.xla
@xla_models
def test_training_matches_eager_on_xla(entry: ZooModel) -> None:
    pytest.importorskip("torch_xla")
    _check_training(entry, "xla")


@pytest.mark.xla
@xla_models
def test_evaluation_matches_eager_on_xla(entry: ZooModel) -> None:
    pytest.importorskip("torch_xla")
    _check_evaluation(entry, "xla")


def _check_training(entry: ZooModel, device: str) -> None:
    pair = Pair(entry, device)
    _check(pair.train(entry.seed))
    pair.step()
    before = _compilations()
    _check(pair.train(entry.seed + 1))
    assert _compilations() == before, "the second step compiled again"


def _check_evaluation(entry: ZooModel, device: str) -> None:
    pair = Pair(entry, device)
    _check(pair.evaluate(entry.seed))
    before = _compilations()
    _check(pair.evaluate(entry.seed + 1))
    assert _compilations() == before, "the second evaluation compiled again"


def _check(difference: Difference) -> None:
    assert not difference.presence, f"gradients on one side only: {', '.join(difference.presence)}"
    assert difference.loss <= LOSS, f"loss: {difference.loss:.1e}"
    assert difference.gradients.size <= GRADIENTS, f"gradient: {difference.gradients}"
    assert difference.buffers.size <= BUFFERS, f"buffer: {difference.buffers}"


def _compilations() -> dict[str, int]:
    """Graphs captured by Dynamo, and what the backend traced and lowered, so far."""
    counts = {"graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}
    if BACKEND == "assume_pure":
        import pure_backend

        statistics = pure_backend.statistics()
        counts |= {"traces": statistics.traces, "lowerings": statistics.lowerings}
    return counts
