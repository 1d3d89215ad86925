"""`explain`: what it reports, and that it says so where there is nothing to report."""

import dataclasses
import logging

import pytest
import torch
from torch import nn

import pure_backend
from pure_backend.__main__ import main


@pure_backend.impure
def watch(x):
    return x.clone()


def product(x, w):
    return (x @ w).tanh()


def cut(x):
    y = x.sin().cos().exp().tanh() @ x
    z = watch(y)
    return z.sin().cos().exp().tanh() @ x


def broken(x):
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos()


@pytest.fixture(autouse=True)
def quiet(caplog):
    """The reasons that a cut graph logs are looked at in the report."""
    caplog.set_level(logging.CRITICAL, logger="pure_backend")


@pytest.fixture
def training():
    """A report of a product that is differentiated by one factor."""
    return pure_backend.explain(product)(torch.ones(4, 8, requires_grad=True), torch.ones(8, 16))


def test_pure_function_is_one_partition(training):
    (partition,) = training.partitions
    assert (partition.graph, partition.nodes, partition.inputs, partition.outputs) == (0, 2, 2, 1)
    assert (partition.input_bytes, partition.output_bytes) == (4 * 8 * 4 + 8 * 16 * 4, 4 * 16 * 4)
    assert partition.flops >= 2 * 4 * 8 * 16
    assert partition.backward_flops >= 2 * 4 * 8 * 16
    assert partition.platform == "cpu"
    assert (training.impurities, training.breaks) == ((), ())


def test_residuals_are_what_the_forward_keeps(training):
    """Policy `auto` keeps the product; `full` keeps inputs alone, which cost nothing."""
    (partition,) = training.partitions
    assert (partition.residuals, partition.residual_bytes) == (1, 4 * 16 * 4)
    report = pure_backend.explain(product, remat="full")(torch.ones(4, 8, requires_grad=True), torch.ones(8, 16))
    assert (report.partitions[0].residuals, report.partitions[0].residual_bytes) == (0, 0)


def test_result_is_the_functions_and_can_be_differentiated():
    x = torch.randn(3, 3, requires_grad=True)
    report = pure_backend.explain(product)(x, torch.eye(3))
    torch.testing.assert_close(report.result, x.tanh())
    report.result.sum().backward()
    torch.testing.assert_close(x.grad, 1 - x.detach().tanh() ** 2)


def test_counters_are_those_of_the_call():
    pure_backend.explain(product)(torch.ones(2, 2), torch.ones(2, 2))
    before = pure_backend.statistics()
    statistics = pure_backend.explain(product)(torch.ones(4, 4), torch.ones(4, 4)).statistics
    assert (statistics.traces, statistics.lowerings, statistics.calls) == (1, 1, 1)
    assert pure_backend.statistics().lowerings == before.lowerings + 1
    assert statistics.seconds["trace"] > 0


def test_nothing_compiled_is_lost():
    compiled = torch.compile(product, backend="assume_pure")
    args = torch.ones(2, 2), torch.ones(2, 2)
    compiled(*args)
    for _ in range(12):  # more often than Dynamo compiles one function
        assert len(pure_backend.explain(product)(*args).partitions) == 1
    before = pure_backend.statistics()
    compiled(*args)
    after = pure_backend.statistics()
    assert (after.traces, after.lowerings, after.calls) == (before.traces, before.lowerings, before.calls + 1)


def test_compiled_functions_and_modules_are_taken_as_what_they_were_made_of():
    model = nn.Linear(4, 2)
    for fn in (model, torch.compile(model), torch.compile(model, backend="assume_pure"), torch.compile(model.forward)):
        assert len(pure_backend.explain(fn)(torch.ones(3, 4)).partitions) == 1


# ---------------------------------------------------------------------------------------------------- impurities


def test_impure_node_cuts_the_graph():
    report = pure_backend.explain(cut)(torch.ones(3, 3))
    (impurity,) = report.impurities
    assert (impurity.kind, impurity.node) == ("opt-out", "z")
    assert impurity.file.endswith("test_explain.py")
    assert [partition.nodes for partition in report.partitions] == [5, 5]
    (graph,) = report.graphs
    assert graph.operators == 11
    assert {node.name: node.partition for node in graph.nodes if node.operator}["z"] is None
    assert {node.partition for node in graph.nodes if node.operator} == {0, None, 1}
    assert all(node.value == "f32[3, 3]" for node in graph.nodes if node.name != "z")


def test_small_partitions_run_in_eager():
    report = pure_backend.explain(cut, min_partition_size=50)(torch.ones(3, 3))
    assert report.partitions == ()
    assert len(report.impurities) == 1
    with pytest.raises(IndexError, match="there are none"):
        report.hlo(0)


def test_graph_breaks_have_reason_and_place():
    report = pure_backend.explain(broken)(torch.ones(3))
    (found,) = report.breaks
    assert "graph_break" in found.reason
    assert found.file.endswith("test_explain.py") and found.line
    assert "User-inserted" in found.explanation
    assert len(report.graphs) == len(report.partitions) == 2


@pytest.mark.xla
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_function_left_to_eager_is_a_break():
    """Dynamo cannot enter torch_xla's scope and compiles nothing of the function around it."""
    import torch_xla.debug.profiler as xp

    def f(x):
        with xp.Trace("blk"):
            return x.sin()

    report = pure_backend.explain(f)(torch.ones(3))
    assert report.graphs == ()
    assert any("skipped" in found.reason for found in report.breaks)
    assert report.result.shape == (3,)


def test_branch_on_a_value_is_a_break_with_advice():
    def f(x):
        y = x.sin()
        return y.cos() if y.sum() > 0 else y

    (found,) = pure_backend.explain(f)(torch.ones(3)).breaks
    assert "torch.cond" in found.explanation


def test_data_is_frozen(training):
    with pytest.raises(dataclasses.FrozenInstanceError):
        training.partitions[0].nodes = 3


# ---------------------------------------------------------------------------------------------------- as text


def test_text_shows_everything():
    text = str(pure_backend.explain(cut)(torch.ones(3, 3, requires_grad=True)))
    for part in (
        "1 graph, 2 partitions, 1 impure node, 0 graph breaks",
        "watch (opt-out) at ",
        "what to do: drop",
        "residuals",
    ):
        assert part in text
    for part in ("traces 2, lowerings 2, calls 2", "seconds: normalize", "compiled, with eager nodes between", "FLOPs forward"):
        assert part in text


def test_text_shows_graph_breaks_with_reasons():
    text = str(pure_backend.explain(broken)(torch.ones(3)))
    assert "2 graphs, 2 partitions, 0 impure nodes, 1 graph break" in text
    assert "User-inserted graph break" in text


def test_no_graph_is_said():
    assert "Dynamo captured no graph" in str(pure_backend.explain(lambda: 3)())


def test_hlo_of_every_stage_and_direction(training):
    assert "tanh" in training.hlo(0, stage="jaxpr")
    assert "stablehlo.dot_general" in training.hlo(0)
    assert "stablehlo.dot_general" in training.hlo(0, "stablehlo", "backward")
    assert "HloModule" in training.hlo(0, stage="optimized")
    assert "HloModule" in training.hlo(0, stage="optimized", direction="backward")
    assert training.hlo(0, "jaxpr", "backward") != training.hlo(0, "jaxpr")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((1,), IndexError, "no partition 1: they are numbered 0 to 0"),
        ((-1,), IndexError, "no partition -1"),
        (("0",), IndexError, "no partition '0'"),
        ((0, "mlir"), ValueError, "stage must be one of 'jaxpr', 'stablehlo', 'optimized', got 'mlir'"),
        ((0, "jaxpr", "sideways"), ValueError, "direction must be one of 'forward', 'backward', got 'sideways'"),
    ],
)
def test_wrong_questions_are_answered(training, arguments, error, text):
    with pytest.raises(error, match=text):
        training.hlo(*arguments)


def test_no_backward_is_said():
    report = pure_backend.explain(product)(torch.ones(2, 2), torch.ones(2, 2))
    assert report.partitions[0].backward_flops is None
    with pytest.raises(ValueError, match="partition 0 has no backward"):
        report.hlo(0, direction="backward")


def test_wrong_options_and_functions_are_refused_at_once():
    with pytest.raises(TypeError, match="unknown option 'remt'"):
        pure_backend.explain(product, remt="full")
    with pytest.raises(TypeError, match="takes a function or a module, got Tensor"):
        pure_backend.explain(torch.ones(3))


@pytest.mark.xla
def test_xla_tensors():
    import torch_xla

    x = torch.ones(2, 2, device=torch_xla.device(), requires_grad=True)
    report = pure_backend.explain(product)(x, x.detach())
    assert report.partitions[0].backward_flops > 0
    assert "stablehlo.dot_general" in report.hlo(0)


# ---------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def file(tmp_path):
    """A file with functions to name."""
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\n"
        "def good():\n    return torch.nn.Linear(4, 2), (torch.ones(3, 4),)\n"
        "def with_keywords():\n    return scaled, [torch.ones(3, 4)], {'by': 2}\n"
        "def scaled(x, by):\n    return x * by\n"
        "def number():\n    return 3\n"
        "def pair():\n    return 3, 4\n"
    )
    return path


@pytest.mark.parametrize("name", ["good", "with_keywords"])
def test_command_prints_the_report(name, file, capsys):
    assert main(["explain", f"{file}:{name}"]) == 0
    assert "1 graph, 1 partition, 0 impure nodes, 0 graph breaks" in capsys.readouterr().out


def test_command_writes_the_page(file, tmp_path, capsys):
    page = tmp_path / "report.html"
    assert main(["explain", f"{file}:good", "--html", str(page)]) == 0
    assert f"page: {page}" in capsys.readouterr().out
    assert "<svg" in page.read_text()


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("FILE:number", "returned int: it is to return a function or module and a tuple of its arguments"),
        ("FILE:pair", "returned a tuple of int, int"),
        ("FILE:absent", "has no function 'absent'; it has good, with_keywords, scaled, number, pair"),
        ("nowhere.py:f", "there is no file 'nowhere.py'"),
        ("model.py", "is not FILE:FUNCTION"),
    ],
)
def test_command_says_what_is_wrong(target, text, file, capsys):
    assert main(["explain", target.replace("FILE", str(file))]) == 2
    assert text in capsys.readouterr().err
