"""Graphs with impure nodes: what surrounds these is compiled, and all comes out as in eager."""

import logging

import pytest
import torch
from oracle import agree, compiled
from torch import nn

import pure_backend

ISLANDS = {"min_partition_size": 1}


@torch.library.custom_op("purity::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    """Three times `x`."""
    return x * 3


triple.register_fake(torch.empty_like)
triple.register_autograd(lambda ctx, grad: grad * 3)


@torch.library.custom_op("purity::triple_", mutates_args=("x",))
def triple_(x: torch.Tensor) -> None:
    """Three times `x`, in place."""
    x.mul_(3)


@torch.library.custom_op("purity::halves", mutates_args=())
def halves(x: torch.Tensor) -> list[torch.Tensor]:
    """Two halves of `x`."""
    return [part.clone() for part in x.chunk(2)]


halves.register_fake(lambda x: [torch.empty_like(part) for part in x.chunk(2)])


@torch.library.custom_op("purity::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    """The positive elements of `x`."""
    return x[x > 0]


@positive.register_fake
def _(x):
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


@torch.library.custom_op("purity::relu", mutates_args=())
def relu(x: torch.Tensor) -> torch.Tensor:
    """Not torch's: it doubles."""
    return x * 2


relu.register_fake(torch.empty_like)


@pure_backend.impure
def opaque(x):
    """A function that Dynamo does not look into."""
    return x.sin() + 1


@pure_backend.impure
def opaque_write(x):
    """A function that writes what it is given and says so nowhere."""
    x.add_(5)
    return x.sum()


def numbers(n=6, grad=False):
    torch.manual_seed(1)
    return torch.randn(n, n, requires_grad=grad)


def stages(caplog) -> list[str]:
    """The stages that were logged, as `4 compiled`."""
    text = caplog.records[-1].getMessage()
    return text[text.index("(") + 1 : text.index("):")].split(", ")


def in_the_middle(x):
    y = x.sin().cos() + 1
    return (triple(y) + x.exp()).relu().sum() + y.mean()


def at_both_ends(x):
    return triple(triple(x).cos().sin().exp() * 2)


def written_between(x):
    y = x * 2
    before = y.sum()
    triple_(y)
    return before, y.sum(), y.cos().sin()


def written_through_a_view(x):
    y = x * 2
    row, column = y[1], y[:, 0]
    triple_(row)
    column.add_(1)
    triple_(y.t()[2])
    return y, row, column


def input_written(x):
    before = x.sum()
    triple_(x[1:3])
    x.mul_(2)
    return before, x.sum()


def listed(x):
    a, b = halves(x.sin().cos() + 1)
    return torch.cat(halves(a)), b.exp().sin() * 2


def hidden_write(x):
    y = x * 2
    before = y.cos().sum()
    total = opaque_write(y)
    return before, total, y.cos().sum()


def opted_out(x):
    return opaque(x.exp().cos()).sin().exp() + x


def unexpected_name(x):
    return relu(x.sin().cos()).exp() + 1


def random_around(x):
    mask = torch.nn.functional.dropout(x, 0.0)
    return triple(mask).sin().cos() * 2


def aliases(x):
    y = triple(x.sin() + 1)
    return y, y.view(-1), x, x[0]


WRITING = [written_between, written_through_a_view, input_written]
CASES = [
    in_the_middle,
    at_both_ends,
    listed,
    hidden_write,
    opted_out,
    unexpected_name,
    random_around,
    aliases,
]


@pytest.mark.parametrize("options", [ISLANDS, {}], ids=["islands", "default"])
@pytest.mark.parametrize("f", CASES, ids=lambda f: f.__name__)
def test_equal_to_eager(f, options, device):
    agree(f, lambda: (numbers(),), device=device, options=options)


@pytest.mark.parametrize("options", [ISLANDS, {}], ids=["islands", "default"])
@pytest.mark.parametrize("f", WRITING, ids=lambda f: f.__name__)
def test_custom_operators_that_write(f, options):
    """On CPU tensors; torch_xla itself cannot run a custom operator that writes an `xla` tensor."""
    agree(f, lambda: (numbers(),), options=options)


@pytest.mark.parametrize("f", [in_the_middle, at_both_ends, opted_out, random_around], ids=lambda f: f.__name__)
def test_gradients_cross_borders(f, device):
    agree(f, lambda: (numbers(grad=True),), device=device, grad=True, pure=True, options=ISLANDS)


def test_modules_train_around_an_impure_node(device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm, self.outer = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

        def forward(self, x):
            return self.outer(triple(self.norm(self.inner(x)).relu()).tanh())

    torch.manual_seed(0)
    agree(Model(), lambda: (numbers(),), device=device, grad=True, pure=True)


def test_modes_hold_in_every_stage():
    def f(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ w
            z = triple(y) @ w
        with torch.no_grad():
            a = triple(x).sin().cos() @ w
            with torch.enable_grad():
                b = triple(x).sin().cos() @ w
        return y, z, a, b

    got = agree(f, lambda: (numbers(grad=True), numbers(grad=True)), grad=True, tol=1e-2, options=ISLANDS)
    y, z, a, b = got.outputs
    assert y.dtype is z.dtype is torch.bfloat16
    assert (a.requires_grad, b.requires_grad) == (False, True)


def test_grad_mode_set_by_a_statement_lasts():
    def f(x):
        y = triple(x.sin().cos())
        torch.set_grad_enabled(False)
        return y.exp() * 2

    try:
        out = compiled(f, options=ISLANDS)(numbers(grad=True))
        assert not torch.is_grad_enabled()
        assert not out.requires_grad
    finally:
        torch.set_grad_enabled(True)


def test_reasons_are_logged_once(caplog):
    c = compiled(in_the_middle)
    with caplog.at_level(logging.WARNING, logger="pure_backend"):
        c(numbers())
        c(numbers())
    assert len(caplog.records) == 1
    assert "purity.triple.default (custom op)" in caplog.text
    assert "test_purity.py:" in caplog.text
    assert "1 in eager" in stages(caplog)


def test_error_on_demand():
    def f(x):
        return triple(x) + triple(x.sin()) + opaque(x)

    with pytest.raises(pure_backend.ImpureGraphError) as caught:
        compiled(f, options={"on_impure": "error"})(numbers())
    found = caught.value.impurities
    assert [impurity.kind for impurity in found] == ["custom op", "custom op", "opt-out"]
    assert all(impurity.file == __file__ and impurity.line > 0 and impurity.advice for impurity in found)


def test_independent_impure_nodes_share_a_stage(caplog):
    """Partitions are as large as can be: three impure nodes on inputs leave one partition behind them."""

    def f(x):
        a, b, c = triple(x), triple(x + 1), triple(x * 2)
        return (a.sin() + b.cos()).exp() * c

    agree(f, lambda: (numbers(),), options=ISLANDS)
    assert stages(caplog) == ["2 compiled", "3 in eager", "5 compiled"]


def test_small_partitions_run_in_eager(caplog):
    def f(x):
        return triple(triple(x + 1).sin()).exp().cos().sin().exp()

    agree(f, lambda: (numbers(),))
    assert stages(caplog) == ["4 in eager", "4 compiled"]


def test_a_second_call_costs_nothing(device):
    c = compiled(in_the_middle)
    x = numbers().to(device).requires_grad_()
    c(x).backward()
    before = pure_backend.statistics()
    c(x).backward()
    after = pure_backend.statistics()
    assert (after.traces, after.lowerings) == (before.traces, before.lowerings)


def test_an_impure_node_inside_a_checkpoint(device, caplog):
    """Its region is taken apart: only the impure node leaves the program."""
    from torch.utils.checkpoint import checkpoint

    def f(x):
        y = checkpoint(lambda v: triple(v.sin().cos().exp()).sin().cos().exp() * 2, x, use_reentrant=False)
        return y.sum()

    agree(f, lambda: (numbers(grad=True),), device=device, grad=True, pure=True, options=ISLANDS)
    assert stages(caplog) == ["3 compiled", "1 in eager", "5 compiled"]


@pytest.fixture
def captured():
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def test_new_floats_compile_nothing(captured, device):
    def f(x):
        scale = x.sum().item()
        return (x.sin() * scale).cos() + scale

    c, eager = compiled(f), f
    counts = []
    for i in range(3):
        x = numbers() + i
        torch.testing.assert_close(c(x.to(device)).cpu(), eager(x), rtol=1e-4, atol=1e-4)
        counts.append(pure_backend.statistics().traces)
    assert counts[1:] == [counts[0]] * 2


def test_shapes_that_depend_on_data(captured, device):
    def f(x):
        kept = positive(x)
        return kept.sin().cos().exp() * 2, x[x > 0].sum() + x.masked_select(x < 0).sum()

    for shift in (0, 1, -1):
        agree(f, lambda: (numbers() + shift,), device=device, options=ISLANDS)  # noqa: B023


def test_a_write_after_a_host_read(captured, device):
    """The order of reads and writes is kept where nothing is known of the values."""

    def f(x):
        rows = x.nonzero()[:, 0]
        y = x * 2
        first = y.sum()
        y[rows] = 7
        picked = y[rows]
        y.add_(1)
        picked.mul_(3)
        return first, y, picked, y.sum()

    agree(f, lambda: (numbers(),), device=device, options=ISLANDS)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")  # a method across its graph break
def test_i02_a_masked_batch_norm(device):
    """I02 https://github.com/pytorch/pytorch/issues/194166"""

    class MaskedBatchNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, h, mask):
            return h.masked_scatter(mask[:, None], self.norm(h[mask]))

    make = lambda: (torch.arange(64.0).reshape(8, 8), torch.arange(8) > 2)  # noqa: E731
    agree(MaskedBatchNorm(), make, device=device, dynamic=True)


def test_threads(device):
    from concurrent.futures import ThreadPoolExecutor

    c = compiled(in_the_middle)
    inputs = [numbers(n).to(device) for n in (3, 4, 5, 3)]
    want = [in_the_middle(x.cpu()) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(c, inputs))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.cpu(), b)


@pytest.fixture
def one_process_group():
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_collectives_run_in_eager(one_process_group, caplog):
    def f(x):
        y = torch.distributed._functional_collectives.all_reduce(x.sin().cos() + 1, "sum", torch.distributed.group.WORLD)
        return y.exp().sin() * 2

    agree(f, lambda: (numbers(),), options=ISLANDS)
    assert "(collective)" in caplog.text and "communicates with other processes" in caplog.text
    assert stages(caplog)[0] == "3 compiled" and stages(caplog)[-1].endswith("compiled")
