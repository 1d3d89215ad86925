"""The order of the passes, what they give, and that nobody edits a graph afterwards."""

import pytest
import torch
from oracle import compiled
from torch import fx, nn

import pure_backend
from pure_backend import TrainStep, pipeline
from pure_backend.calls import plan
from pure_backend.calls.call_plan import CallPlan
from pure_backend.calls.eager import EagerPlan, Trial
from pure_backend.calls.staged import Staged
from pure_backend.jax_bridge import compile as compiling
from pure_backend.options import Options
from pure_backend.transforms.step_plan import StepPlan
from pure_backend.verify.verified import Verified


@pytest.fixture
def prepared(monkeypatch):
    """What `prepare` gave, in order, with the text of each functional graph at that time."""
    given, prepare = [], pipeline.prepare

    def spy(*args, **kwargs):
        given.append((found := prepare(*args, **kwargs), str(found.functional.gm.graph)))
        return found

    for module in ("backend", "transforms.train_step", "transforms.optimizer_graph"):
        monkeypatch.setattr(f"pure_backend.{module}.prepare", spy)
    return given


def layers(x, scale, ws):
    for w in ws:
        x = torch.tanh(x @ w).mul(scale).sin().add(x).cos().mul(2).exp().sub(1)
    return x


def weights(grad=True):
    return [torch.randn(4, 4, requires_grad=grad) for _ in range(4)]


def test_nobody_edits_a_graph_after_the_passes(prepared):
    """Neither the first program nor one from the cache changes it, so equal graphs are equal whatever was compiled before."""
    calls = [compiled(f, options={"repeats": "scan"}) for f in (layers, lambda x, scale, ws: layers(x, scale, ws))]
    for call in calls:
        call(torch.ones(3, 4), 3, weights())
    assert len(prepared) == 2 and all(str(found.functional.gm.graph) == text for found, text in prepared)
    assert pure_backend.statistics().cache_hits == 1


def test_only_tensors_are_inputs_and_stacks_are_one(prepared):
    """An int is none, though Dynamo's graph takes it; a loop takes the stack of what its turns have of their own."""
    compiled(layers, options={"repeats": "scan"}, dynamic=True)(torch.ones(3, 4), 3, weights())
    functional = prepared[0][0].functional
    sources, position = functional.inputs.sources, functional.inputs.position
    assert len(functional.gm.graph.find_nodes(op="placeholder")) == len(sources)
    assert len(position) == 5 and max(position) > 4  # x and the weights are arguments behind numbers
    (stack,) = [source for source in sources if isinstance(source, tuple)]
    assert functional.inputs.of(stack) == {sources.index(stack)}
    inputs = functional.inputs.gather({i: torch.ones(4, 4) for i in position}, True)
    assert inputs[sources.index(stack)].shape == (len(stack), 4, 4)


class Frozen(nn.Module):
    """Layers that are not trained before one that is."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.ParameterList([nn.Parameter(w, requires_grad=False) for w in weights(False)])
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(layers(x, 3, list(self.frozen))).square().mean()


def test_a_training_step_runs_the_same_passes(prepared):
    """Of what is not trained, it stacks what the turns of a loop have of their own; the numbers are the loop's in eager."""
    torch.manual_seed(0)
    model, x = Frozen(), torch.ones(3, 4)
    want = model(x).item()
    step = TrainStep(model, torch.optim.SGD(model.head.parameters(), 0.1), options={"repeats": "scan"})
    assert abs(step(x).item() - want) < 1e-5
    (loss, text), (update, _) = prepared
    assert any(isinstance(source, tuple) for source in loss.functional.inputs.sources)
    assert str(loss.functional.gm.graph) == text and update.border is None


def test_each_pass_is_linted(monkeypatch):
    def breaking(draft):
        (*_, output) = draft.functional.gm.graph.nodes
        output.prepend(draft.functional.gm.graph.call_function(torch.sin, (output,)))
        return draft

    monkeypatch.setattr(pipeline, "OF_A_CALL", (*pipeline.OF_A_CALL, breaking))
    gm = pipeline.normalize(fx.symbolic_trace(lambda x: (x.sin(),))).gm
    with pytest.raises(RuntimeError, match="before it has been defined"):
        pipeline.prepare(gm, [torch.ones(3)], Options())


def test_the_key_is_no_input(device):
    """One input is input 0, to gradients, in reports and in messages."""
    x = torch.ones(3, requires_grad=True)
    call = compiled(lambda x: (x * x).sin() + torch.rand_like(x))
    out = call(x)
    (program,) = compiling.programs._programs.values()
    assert program.inputs == (0,) and program.reach == (frozenset({0}),) and program.uses_key
    assert [v.aval.shape for v in program.jaxpr.jaxpr.invars] == [(3,), (2,)]
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="input 0 of a compiled graph"):
        out.sum().backward()


def test_a_plan_is_data():
    with pytest.raises(AttributeError, match="cannot assign"):
        object.__new__(plan.Plan).device = None
    questions = [name for name in vars(CallPlan) if not name.startswith("_")]
    for kind in (plan.Plan, plan.Bordered, EagerPlan, Trial, Staged, StepPlan, Verified):
        assert CallPlan in kind.__mro__ and all(hasattr(kind, name) for name in [*questions, "__call__"])
