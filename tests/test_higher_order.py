"""Higher-order operators inside a compiled graph: forward and gradient as in eager."""

import functools
import gc
import logging
import operator
import weakref

import jax
import pytest
import torch
import torch.nn.functional as F
from jax.extend import core
from oracle import agree, compiled, on_lowering, same
from torch import fx, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.hints_wrap import hints_wrapper
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.out_dtype import out_dtype
from torch._higher_order_ops.scan import scan as torch_scan
from torch._higher_order_ops.strict_mode import strict_mode
from torch._higher_order_ops.while_loop import while_loop
from torch._higher_order_ops.wrap import wrap, wrap_with_autocast, wrap_with_set_grad_enabled
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pure_backend import ImpureGraphError
from pure_backend.backend import assume_pure
from pure_backend.jax_bridge.compile import programs

# One program, nothing of it in eager.
PURE = {"pure": True, "options": {"on_impure": "error"}}


def leaf(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@torch.library.custom_op("hop_tests::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    """An operator that has no JAX implementation."""
    return x.sin()


@opaque.register_fake
def _(x):
    return torch.empty_like(x)


def zero(x):
    """An integer to count with, on the device of `x`."""
    return x.new_zeros((), dtype=torch.int64)


def xw():
    return leaf(4, 3), leaf(3, seed=1)


def scan(combine, init, xs, dim=0, reverse=False):
    """Torch's scan where it is compiled, and a Python loop as its oracle: torch 2.9's own gradients of scan are wrong."""
    if torch.compiler.is_compiling():
        return torch_scan(combine, init, xs, dim=dim, reverse=reverse)
    leaves, spec = pytree.tree_flatten(xs)
    steps = range(leaves[0].shape[dim])
    results = []
    for i in reversed(steps) if reverse else steps:
        init, y = combine(init, pytree.tree_unflatten([x.select(dim, i) for x in leaves], spec))
        results.append(y)
    results = results[::-1] if reverse else results
    return init, pytree.tree_map(lambda *ys: torch.stack(ys, dim), *results)


# ---------------------------------------------------------------------------------------------------------------- cond


class Branches(nn.Module):
    """Branches that use parameters, of which each reaches another one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, w):
        return torch.cond(x.sum() > 0, lambda x: self.a(x) * w, lambda x: self.b(x).sin(), (x,))


CONDS = {
    "closure": lambda x, w: torch.cond(x.sum() > 0, lambda x: x * w, lambda x: (x + 1).sin(), (x,)),
    "other branch": lambda x, w: torch.cond(x.sum() > 1e9, lambda x: x * w, lambda x: (x + 1).sin() * w.exp(), (x,)),
    "several results": lambda x, w: torch.cond(
        x.sum() > 0, lambda x: {"a": x * w, "b": (x.sum(), x + 1)}, lambda x: {"a": x + w, "b": (x.max(), x * 2)}, (x,)
    ),
    "one branch needs no grad": lambda x, w: torch.cond(x.sum() > 0, lambda x: x * w, lambda x: torch.zeros_like(x), (x,)),
    "detached": lambda x, w: torch.cond(x.sum() > 0, lambda x: x.detach() * w, lambda x: x.detach() + 1, (x,)),
    "predicate of one element": lambda x, w: torch.cond((x.sum() > 0).reshape(1), lambda x: x * w, lambda x: x - w, (x,)),
    "Python bool": lambda x, w: torch.cond(x.shape[0] > 2, lambda x: x * w, lambda x: x - w, (x,)),
    "nested": lambda x, w: torch.cond(
        x.sum() > 0,
        lambda x: torch.cond(x.max() > 9, lambda x: x * w, lambda x: x.sin() * w, (x,)),
        lambda x: x - w,
        (x,),
    ),
    "in place on a value of its own": lambda x, w: torch.cond(
        x.sum() > 0, lambda x: (x * w).add_(1).mul_(w), lambda x: x.clone().add_(w), (x,)
    ),
    "of a value made before": lambda x, w: (
        torch.cond((x * w).sum() > 0, lambda y: y * w, lambda y: y.cos(), (x.exp() * w,)) + w
    ),
}


@pytest.mark.filterwarnings("ignore:Pred is a Python constant")
@pytest.mark.parametrize("name", CONDS)
def test_cond(name, device):
    agree(CONDS[name], xw, grad=True, device=device, **PURE)


def test_cond_takes_each_branch(device):
    """One program for both: the predicate is a value."""
    f = compiled(lambda x, w: torch.cond(x.sum() > 0, lambda x: x * w, lambda x: x - w, (x,)))
    for sign in (1, -1):
        x, w = (torch.ones(3) * sign).to(device), torch.full((3,), 2.0).to(device)
        same(torch.full((3,), 2.0 if sign > 0 else -3.0), f(x, w).cpu())


def test_cond_on_modules(device):
    agree(Branches(), xw, grad=True, device=device, **PURE)


def test_cond_whose_branches_differ_in_shape(device):
    """No program has such a result: it is left to eager."""
    agree(
        lambda x: torch.cond(x.sum() > 0, lambda x: x[:2].clone(), lambda x: x[:3].clone(), (x,)) * 2, lambda: (torch.ones(4),)
    )


def test_cond_branch_that_draws(device):
    """Random numbers of a branch: another mask at every call, and the gradient has the forward's."""

    def f(x):
        return torch.cond(x.sum() > 0, lambda x: F.dropout(x, 0.5, True), lambda x: F.dropout(x, 0.9, True), (x,))

    c = compiled(f)
    masks = []
    for _ in range(2):
        x = torch.ones(1000).to(device).requires_grad_()
        y = c(x)
        y.sum().backward()
        same(y.detach().cpu(), x.grad.cpu())
        masks.append(y.detach().cpu() != 0)
    assert 0.4 < masks[0].float().mean() < 0.6
    assert not torch.equal(*masks)


# --------------------------------------------------------------------------------------------------------------- loops


def plain_xw():
    return tuple(t.detach() for t in xw())


WHILES = {
    "captured": lambda x, w: while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * w + 1), (zero(x), x)),
    "no step": lambda x, w: while_loop(lambda i, a: i < 0, lambda i, a: (i + 1, a * w + 1), (zero(x), x)),
    "depends on the data": lambda x, w: while_loop(lambda a: a.abs().sum() < 50, lambda a: (a * 2 + w,), (x,)),
    "condition captures": lambda x, w: while_loop(lambda a: a.sum() > w.sum(), lambda a: (a - 1,), (x,)),
}


@pytest.mark.parametrize("name", WHILES)
def test_while_loop(name, device):
    agree(WHILES[name], plain_xw, device=device, **PURE)


def test_while_loop_with_parameters_under_no_grad(device):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x):
            return while_loop(lambda i, a: i < 4, lambda i, a: (i + 1, self.lin(a).tanh()), (zero(x), x))

    with torch.no_grad():
        agree(Loop(), lambda: (torch.ones(2, 3),), device=device, **PURE)


def test_while_loop_with_gradients_is_left_to_eager(device):
    """JAX has no backward of a loop whose number of steps is not known."""

    def f(x, w):
        return (while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * w), (zero(x), x))[1] * 2).sin()

    agree(f, xw, grad=True, device=device)
    with pytest.raises(ImpureGraphError, match="use scan, or run it"):
        compiled(f, options=PURE["options"])(*xw())


SCANS = {
    "captured": lambda x, w: scan(lambda c, a: (c * 0.5 + a * w, a.sin() + c), x.new_ones(3), x),
    "reverse": lambda x, w: scan(lambda c, a: (c * 0.5 + a * w, a.sin() + c), x.new_ones(3), x, reverse=True),
    # The carry and a sum: torch 2.9 stacks the results along the first dimension, whatever `dim` says.
    "dim": lambda x, w: [r.sum() for r in scan(lambda c, a: (c + a * w.sum(), a * c), x.new_ones(4), x, dim=1)],
    "pytrees": lambda x, w: scan(
        lambda c, a: ({"n": c["n"] + a["q"].sum(), "s": c["s"] + a["p"] * w}, (a["p"] * 2, a["q"] + c["s"])),
        {"n": x.new_zeros(()), "s": x.new_zeros(3)},
        {"p": x, "q": x.cos()},
    ),
    "carry that requires grad": lambda x, w: scan(lambda c, a: (c * a, c + 1), w * 2, x),
    "one step": lambda x, w: scan(lambda c, a: (c * a, c + w), x.new_ones(3), x[:1]),
    "in place on a value of its own": lambda x, w: scan(lambda c, a: ((c + a).mul_(w), (a * 1).add_(c)), x.new_ones(3), x),
}


@pytest.mark.parametrize("name", SCANS)
def test_scan(name, device):
    agree(SCANS[name], xw, grad=True, device=device, **PURE)


def test_scan_draws_anew_at_every_step(device):
    def f(x):
        return scan(lambda c, a: (c + 1, F.dropout(a, 0.5, True)), x.new_zeros(()), x)[1]

    x = torch.ones(3, 1000).to(device).requires_grad_()
    y = compiled(f)(x)
    y.sum().backward()
    same(y.detach().cpu(), x.grad.cpu())
    rows = y.detach().cpu()
    assert not torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[1], rows[2])


def test_scan_over_layers_is_one_loop():
    """The body is traced once: one product in the forward, whatever the number of layers."""
    weights = torch.randn(6, 4, 4)
    f = lambda x, ws: scan(lambda c, w: ((c @ w).tanh(), c.sum()), x, ws)[0]  # noqa: E731
    text = program_text(f, torch.ones(2, 4), weights)
    assert text.count("dot_general") == 1


MAPS = {
    "captured": lambda x, w: torch_map(lambda a: (a * w, a.sum()), x),
    "arguments": lambda x, w: torch_map(lambda a, w: a.sin() * w, x, w),
    "pytree": lambda x, w: torch_map(lambda a: {"s": a["p"] * a["q"]}, {"p": x, "q": x + w}),
    "nested": lambda x, w: torch_map(lambda a: torch_map(lambda b: b * b * w.sum(), a), x),
}


@pytest.mark.parametrize("name", MAPS)
def test_map(name, device):
    agree(MAPS[name], xw, grad=True, device=device, **PURE)


ASSOCIATIVE = {
    "sum": lambda x, w: associative_scan(lambda a, b: a + b, x * w, 0, combine_mode="generic"),
    "reverse": lambda x, w: associative_scan(lambda a, b: a * b * 0.5, x * w, 0, reverse=True, combine_mode="generic"),
    "pairs": lambda x, w: associative_scan(
        lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (x.sigmoid(), x * w), 0, combine_mode="generic"
    ),
}


@pytest.mark.parametrize("name", ASSOCIATIVE)
def test_associative_scan(name, device):
    agree(ASSOCIATIVE[name], xw, grad=True, device=device, **PURE)


def test_associative_scan_of_single_elements(device):
    """The operator itself, which Dynamo makes for `combine_mode="pointwise"` on accelerators."""

    def f(x, w):
        return torch.ops.higher_order.associative_scan(lambda a, b: [a * b], [x * w], ())[0]

    agree(f, plain_xw, device=device, **PURE)


def test_an_associative_scan_draws_for_each_pair_in_each_call():
    """Dynamo refuses random numbers in a combine function; a graph from elsewhere may have them."""

    def scanned(graph, x):
        results = graph.call_function(torch.ops.higher_order.associative_scan, (graph.get_attr("body"), [x], ()))
        return graph.call_function(operator.getitem, (results, 0))

    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((scanned(graph, x), scanned(graph, x)))
    body = fx.symbolic_trace(lambda a, b: [a + b + torch.rand_like(a)])
    run = assume_pure(fx.GraphModule({"body": body}, graph), [torch.zeros(2, 3)], options={"on_impure": "error"})
    draws = torch.stack([*run(torch.zeros(2, 3)), *run(torch.zeros(2, 3))])[:, 1].flatten().tolist()
    assert len(set(draws)) == 4 * 3
    assert run(torch.zeros(8, 1))[0].diff(dim=0).unique().numel() == 7


# ---------------------------------------------------------------------------------------------------------- checkpoint


class Block(nn.Module):
    def __init__(self, context_fn=None):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.kwargs = {} if context_fn is None else {"context_fn": context_fn}

    def body(self, x):
        return x + self.second(F.gelu(self.first(x)))

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.body, x, use_reentrant=False, **self.kwargs)
        return x


def save_products(ctx, op, *args, **kwargs):
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


POLICIES = {
    "all": None,
    "list": functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]),
    "policy": functools.partial(create_selective_checkpoint_contexts, save_products),
}


@pytest.mark.parametrize("name", POLICIES)
def test_checkpoint(name, device):
    agree(Block(POLICIES[name]), lambda: (leaf(3, 8),), grad=True, device=device, **PURE)


CHECKPOINTS = {
    "captured": lambda x, w: checkpoint(lambda t: t.sin() * w, x, use_reentrant=False),
    "preserve_rng_state": lambda x, w: checkpoint(lambda t: t.exp() * w, x, use_reentrant=False, preserve_rng_state=False),
    "reentrant": lambda x, w: checkpoint(lambda t: t.sin() * w, x, use_reentrant=True),
    "several results": lambda x, w: checkpoint(lambda t: (t * w, t.argmax(), t.sum()), x, use_reentrant=False),
    "view of an input": lambda x, w: checkpoint(lambda t: (t.view(-1), t * w), x, use_reentrant=False),
    "nested": lambda x, w: checkpoint(
        lambda t: checkpoint(lambda u: (u * w).sin(), t, use_reentrant=False) * w, x, use_reentrant=False
    ),
    "cond inside": lambda x, w: checkpoint(
        lambda t: torch.cond(t.sum() > 0, lambda t: t * w, lambda t: t - w, (t,)), x, use_reentrant=False
    ),
    "no_grad inside": lambda x, w: checkpoint(lambda t: no_grad_product(t, w) + t, x, use_reentrant=False),
}


def no_grad_product(t, w):
    with torch.no_grad():
        return t * w


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint_bodies(name, device):
    agree(CHECKPOINTS[name], xw, grad=True, device=device, **PURE)


def kept_bytes(f, *args):
    """Bytes that the forward of a compiled function keeps for its backward, beside its inputs."""
    from pure_backend.jax_bridge import vjp

    seen = []
    original = vjp.differentiate

    def spy(*a, **k):
        seen.append(original(*a, **k))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pure_backend.jax_bridge.program.differentiate", spy)
        compiled(f)(*args).sum().backward()
    return sum(a.size * a.dtype.itemsize for d in seen for r, a in zip(d.residuals, d.avals, strict=True) if r.input is None)


def deep(x, ws, wrap_block):
    for w in ws:
        x = wrap_block(lambda t, w=w: ((t @ w).tanh() @ w).tanh(), x)
    return x


def test_checkpoint_keeps_less():
    """A user's checkpoint is honoured inside a program: the products within it are computed again."""
    make = lambda: (leaf(64, 8), [leaf(8, 8, seed=i) for i in range(4)])  # noqa: E731
    plain = kept_bytes(lambda x, ws: deep(x, ws, lambda f, x: f(x)), *make())
    within = kept_bytes(lambda x, ws: deep(x, ws, lambda f, x: checkpoint(f, x, use_reentrant=False)), *make())
    context_fn = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    selective = kept_bytes(
        lambda x, ws: deep(x, ws, lambda f, x: checkpoint(f, x, use_reentrant=False, context_fn=context_fn)), *make()
    )
    assert within <= plain * 0.55
    assert within < selective <= plain


class Normalized(nn.Module):
    """A checkpoint, or not, around a layer that counts and keeps statistics."""

    def __init__(self, call):
        super().__init__()
        self.lin, self.norm, self.call = nn.Linear(8, 8), nn.BatchNorm1d(8), call

    def forward(self, x):
        return self.call(lambda t: self.norm(self.lin(t)).relu(), x) + self.norm.running_mean


def test_checkpoint_around_batch_norm(device):
    """Running statistics are written once, as without a checkpoint; eager's recomputation writes them again."""
    torch.manual_seed(0)
    plain = Normalized(lambda f, x: f(x))
    other = Normalized(functools.partial(checkpoint, use_reentrant=False))
    other.load_state_dict(plain.state_dict())
    other.to(device)
    x = leaf(5, 8)
    y = x.detach().to(device).requires_grad_()
    for _ in range(2):
        want = plain(x)
        want.square().sum().backward()
        got = compiled(other, options=PURE["options"])(y)
        got.square().sum().backward()
        same(want.detach(), got.detach().cpu())
    same(x.grad, y.grad.cpu(), tol=1e-4)
    for name, value in plain.state_dict().items():
        same(value, other.state_dict()[name].cpu(), name)


def test_another_context_fn_recomputes_everything(caplog):
    import contextlib

    def context_fn():
        return contextlib.nullcontext(), contextlib.nullcontext()

    def f(x, w):
        return checkpoint(lambda t: t.sin() * w, x, use_reentrant=False, context_fn=context_fn)

    with caplog.at_level(logging.WARNING, "pure_backend"):
        agree(f, xw, grad=True)
    assert "recomputes everything" in caplog.text


# ---------------------------------------------------------------------------------------------------- autograd.Function


class SavesOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return 3 * g * y


class NoneForSecond(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


class NoneAtAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return None


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx, g, h):
        (x,) = ctx.saved_tensors
        return g * 5 + h * x


class NotDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y, z = x * 2, x * 3
        ctx.mark_non_differentiable(z)
        return y, z

    @staticmethod
    def backward(ctx, g, _):
        return g * 7


class Square(torch.autograd.Function):
    """A backward that may be differentiated."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * g * x


class Noisy(torch.autograd.Function):
    """Random numbers in the forward, used again in the backward."""

    @staticmethod
    def forward(ctx, x):
        mask = torch.rand_like(x)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


class NoisyBackward(torch.autograd.Function):
    """Random numbers in both, which have nothing to do with each other."""

    @staticmethod
    def forward(ctx, x):
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx, g):
        return g * torch.rand_like(g)


FUNCTIONS = {
    "saves its output": lambda x, w: SavesOutput.apply(x) * w,
    "None for one input": lambda x, w: NoneForSecond.apply(x, w),
    "None for one input, used elsewhere": lambda x, w: NoneForSecond.apply(x, w) + w.sin(),
    "None at all": lambda x, w: NoneAtAll.apply(x) * w,
    "two outputs": lambda x, w: TwoOutputs.apply(x * w),
    "one of two outputs": lambda x, w: TwoOutputs.apply(x * w)[0],
    "not differentiable": lambda x, w: NotDifferentiable.apply(x * w),
    "in checkpoint": lambda x, w: checkpoint(lambda t: SavesOutput.apply(t) * w, x, use_reentrant=False),
    "in cond": lambda x, w: torch.cond(x.sum() > 0, lambda x: Square.apply(x) * w, lambda x: x * w, (x,)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_autograd_function(name, device):
    agree(FUNCTIONS[name], xw, grad=True, device=device, **PURE)


class BadBackward(torch.autograd.Function):
    """A backward with an operator that has no lowering."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * opaque(ctx.saved_tensors[0])


def test_autograd_function_whose_backward_has_no_lowering(device):
    """It is found out before the first call, and the function is left to eager."""
    f = lambda x, w: BadBackward.apply(x * w).sin()  # noqa: E731
    agree(f, xw, grad=True, device=device)
    with pytest.raises(ImpureGraphError, match="autograd_function_apply"):
        compiled(f, options=PURE["options"])(*xw())


@pytest.mark.parametrize("function", [Square, SavesOutput])
def test_autograd_function_twice_differentiated(function, device):
    """The second derivative goes through the user's backward, and through that of a saved output."""

    def second(f, x):
        (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), x)
        return h.cpu()

    f = lambda x: function.apply(x) * x  # noqa: E731
    x = leaf(5)
    want = second(f, x)
    same(want, second(compiled(f), x.detach().to(device).requires_grad_()))


def test_autograd_function_that_draws(device):
    x = torch.ones(100).to(device).requires_grad_()
    y = compiled(lambda x: Noisy.apply(x) + torch.rand_like(x) * 0)(x)
    y.sum().backward()
    same(y.detach().cpu(), x.grad.cpu())
    assert y.detach().cpu().unique().numel() > 90


def test_autograd_function_whose_backward_draws(device):
    """Numbers of its own, other ones at every call."""
    c = compiled(lambda x: NoisyBackward.apply(x), options=PURE["options"])
    seen = []
    for _ in range(2):
        x = torch.ones(100).to(device).requires_grad_()
        y = c(x)
        y.sum().backward()
        seen += [y.detach().cpu(), x.grad.cpu()]
    assert len({tuple(t.tolist()) for t in seen}) == 4


# ------------------------------------------------------------------------------------------------------------- regions


@torch.compiler.nested_compile_region
def region(x, w):
    return ((x @ w).tanh() @ w).sin()


def square_args():
    return leaf(3, 3), leaf(3, 3, seed=1)


def test_nested_compile_region(device):
    agree(lambda x, w: region(region(x, w), w) * 2, square_args, grad=True, device=device, **PURE)


def program_text(f, *args):
    """The StableHLO that a compiled function lowers to."""
    from pure_backend.jax_bridge import compile as module

    seen = []
    original = module.trace

    def spy(*a, **k):
        seen.append(original(*a, **k))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "trace", spy)
        compiled(f)(*args)
    jaxpr, _ = seen[-1]
    return jax.jit(core.jaxpr_as_fun(jaxpr)).lower(*(v.aval for v in jaxpr.jaxpr.invars)).as_text()


def test_a_region_is_one_function(monkeypatch):
    """Called five times, its body is traced once and is one function of the HLO."""
    from pure_backend.jax_bridge.lowerings import bodies

    traced = []
    original = bodies.Body.leaves
    monkeypatch.setattr(bodies.Body, "leaves", lambda *a: traced.append(1) or original(*a))

    def f(x, w):
        for _ in range(5):
            x = region(x, w)
        return x

    text = program_text(f, *(t.detach() for t in square_args()))
    assert len(traced) == 1
    assert text.count("dot_general") == 2


def backward_text(f, *args):
    """The StableHLO of a compiled function's backward."""
    lowered = []
    with pytest.MonkeyPatch.context() as patch:
        on_lowering(patch, lambda jaxpr, _: lowered.append(jaxpr))
        compiled(f)(*args).sum().backward()
    jaxpr = lowered[-1]
    return jax.jit(core.jaxpr_as_fun(jaxpr)).lower(*(v.aval for v in jaxpr.jaxpr.invars)).as_text()


def test_a_region_is_shared_in_the_backward():
    """However often it is called, the backward has as many products."""

    def repeated(count):
        def f(x, w):
            for _ in range(count):
                x = region(x, w)
            return x

        torch._dynamo.reset()
        return backward_text(f, *square_args()).count("dot_general")

    assert repeated(9) == repeated(5)


def test_a_region_draws_anew_at_every_call(device):
    @torch.compiler.nested_compile_region
    def drop(x):
        return F.dropout(x, 0.5, True)

    x = torch.ones(1000).to(device)
    results = [r.cpu() for r in compiled(lambda x: (drop(x), drop(x), drop(x), F.dropout(x, 0.5, True)))(x)]
    assert len({tuple(r.tolist()) for r in results}) == 4


def writes_captured(x, w):
    """The value that the body wrote is used afterwards, through a view that was made before."""
    y = x * 1
    row = y[0]

    def body(t):
        y.add_(t * w)
        return y * 2

    return wrap(body, x) + row


WRAPS = {
    "wrap": lambda x, w: wrap(lambda x: (x * w).sin(), x),
    "wrap of a view": lambda x, w: wrap(lambda x: x.t(), x * w),
    "hints_wrapper": lambda x, w: hints_wrapper(lambda x, w: x * w, (x.detach(), w.detach()), {}, hints={"a": True}) * x,
    "strict_mode": lambda x, w: strict_mode(lambda x, w: (x + w,), (x.detach(), w.detach()))[0] * x,
    "no grad": lambda x, w: wrap_with_set_grad_enabled(False, lambda x: (x + w,), x)[0] * x,
    "grad": lambda x, w: wrap_with_set_grad_enabled(True, lambda x: (x * w,), x)[0] * x,
    "autocast": lambda x, w: wrap_with_autocast("cpu", torch.bfloat16, True, False, lambda x: (x @ w,), x)[0].float(),
    "writes a captured value": writes_captured,
    "writes its input": lambda x, w: wrap(lambda t: t.mul_(w).sum(), x * 2) + x,
    "autocast in cond": lambda x, w: torch.cond(x.sum() > 0, lambda x: in_autocast(x, w), lambda x: (x * w).sum(-1), (x,)),
    "autocast in checkpoint": lambda x, w: checkpoint(lambda t: in_autocast(t, w), x, use_reentrant=False),
}


def in_autocast(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ w).float()


@pytest.mark.parametrize("name", WRAPS)
def test_wraps(name, device):
    agree(WRAPS[name], xw, grad=True, device=device, **PURE, tol=1e-2 if "autocast" in name else 1e-5)


def test_out_dtype(device):
    def f(x, w):
        return out_dtype(torch.ops.aten.mm.default, torch.int32, x, w)

    args = lambda: (torch.full((4, 5), 100, dtype=torch.int8), torch.full((5, 3), 100, dtype=torch.int8))  # noqa: E731
    agree(f, args, device=device, **PURE)


# ----------------------------------------------------------------------------------------- what holds for all of them


@torch.compiler.nested_compile_region
def elementwise_region(x, w):
    return (x * w).sin() * x


TWICE = {
    "cond": (
        lambda x, w: torch.cond(x.sum() > -1e9, lambda x: (x * w).sin(), lambda x: x - w, (x,)),
        lambda x, w: (x * w).sin(),
    ),
    "scan": (lambda x, w: scan(lambda c, a: (c * 0.5 + a * w, a.sin() * c), x.new_ones(3), x),) * 2,
    "map": (lambda x, w: torch_map(lambda a: a * a * w, x), lambda x, w: x * x * w),
    "checkpoint": (
        lambda x, w: checkpoint(lambda a: (a * a * w).sin(), x, use_reentrant=False),
        lambda x, w: (x * x * w).sin(),
    ),
    "region": (
        lambda x, w: elementwise_region(x, w) * elementwise_region(x, w * 2),
        lambda x, w: (x * w).sin() * x * (x * w * 2).sin() * x,
    ),
}


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives(name, device):
    """Eager has none of most of these operators: the oracle is the function written out."""

    def derivatives(f, x, w):
        heads = [t for t in pytree.tree_leaves(f(x, w)) if t.requires_grad]
        first = torch.autograd.grad(sum((t * t).sum() for t in heads), (x, w), create_graph=True)
        return [t.detach().cpu() for t in (*first, *torch.autograd.grad(sum(t.sum() for t in first), (x, w)))]

    f, oracle = TWICE[name]
    want = derivatives(oracle, *xw())
    got = derivatives(compiled(f, options=PURE["options"]), *(t.detach().to(device).requires_grad_() for t in xw()))
    for a, b in zip(want, got, strict=True):
        same(a, b, tol=1e-4)


DYNAMIC = {
    "cond": lambda x, w: torch.cond(x.sum() > 0, lambda x: x * w * x.shape[0], lambda x: x - w, (x,)) + x.shape[0],
    "checkpoint": lambda x, w: checkpoint(lambda t: (t * w * t.shape[0]).reshape(-1), x, use_reentrant=False),
    "scan": lambda x, w: scan(lambda c, a: (c + a, a * w), x.new_zeros(3), x)[1],
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_shapes(name, device):
    f = DYNAMIC[name]
    c = compiled(f, dynamic=True, options=PURE["options"])
    for n in (2, 3, 5, 7):
        x, w = leaf(n, 3).detach(), leaf(3, seed=1).detach()
        same(f(x, w), c(x.to(device), w.to(device)).cpu())


def test_a_float_that_changes(device):
    """A body never takes the sample of a runtime scalar for its value."""
    c = compiled(lambda x, s: checkpoint(lambda t: t * s, x, use_reentrant=False))
    for s in (2.0, 3.0, 4.5, 5.5):
        same(torch.full((3,), s), c(torch.ones(3, device=device), s).cpu())


def test_a_body_without_lowering_is_left_to_eager(device):
    """The operator that has the body is impure, and names what in it is."""

    def f(x, w):
        return torch.cond(x.sum() > 0, lambda x: opaque(x) * w, lambda x: x * w, (x,)) * 3

    agree(f, plain_xw, device=device)
    with pytest.raises(ImpureGraphError, match=r"(?s)cond.*opaque"):
        compiled(f, options=PURE["options"])(*plain_xw())


def test_a_checkpoint_without_lowering_is_taken_apart(device):
    """What is impure in it runs in eager, on xla too, where torch's own checkpoint does not know the device."""

    def f(x, w):
        return checkpoint(lambda x: opaque(x) * w, x, use_reentrant=False) * 3

    agree(f, plain_xw, device=device)
    with pytest.raises(ImpureGraphError, match="opaque"):
        compiled(f, options=PURE["options"])(*plain_xw())


NESTED = {
    "vmap of cond": lambda x, w: torch.vmap(lambda a: torch.cond(a.sum() > 0, lambda a: a * w, lambda a: a - w, (a,)))(x),
    "scan in cond": lambda x, w: torch.cond(
        x.sum() > 0, lambda x: scan(lambda c, a: (c + a * w, c * a), x[0] * 1, x)[1], lambda x: x * w, (x,)
    ),
    "cond in scan": lambda x, w: scan(
        lambda c, a: (torch.cond(a.sum() > 0, lambda a: a * w, lambda a: a - w, (a,)) + c, c * a), x[0] * 1, x
    ),
    "map in checkpoint": lambda x, w: checkpoint(lambda t: torch_map(lambda a: a * w, t), x, use_reentrant=False),
    "checkpoint in map": lambda x, w: torch_map(lambda a: checkpoint(lambda t: (t * w).sin(), a, use_reentrant=False), x),
    "function in scan": lambda x, w: scan(lambda c, a: (c + SavesOutput.apply(a) * w, c * a), x[0] * 1, x),
}


@pytest.mark.parametrize("name", NESTED)
def test_nested(name, device):
    agree(NESTED[name], xw, grad=True, device=device, **PURE)


PLAIN = {
    "cond": CONDS["closure"],
    "checkpoint": CHECKPOINTS["captured"],
    "scan": SCANS["captured"],
    "function": FUNCTIONS["saves its output"],
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", [*PLAIN, "while"])
def test_without_gradients(name, mode, device):
    def f(x, w):
        with mode():
            return (WHILES["captured"] if name == "while" else PLAIN[name])(x, w)

    agree(f, xw, device=device, **PURE)


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("name", PLAIN)
def test_under_another_residual_policy(name, remat):
    agree(PLAIN[name], xw, grad=True, pure=True, options={"remat": remat, "on_impure": "error"})


def test_in_autocast(device):
    """Torch's policy holds in the bodies. (Dynamo itself fails on `torch.cond` and `map` in an autocast for xla.)"""

    def f(x, w):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            y = checkpoint(lambda t: t @ w, x, use_reentrant=False)
            return y if device.type == "xla" else (y, torch_map(lambda t: t @ w, x))

    agree(f, lambda: (leaf(4, 3), leaf(3, 3, seed=1)), grad=True, device=device, tol=3e-2, **PURE)


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.w = nn.Linear(3, 3), nn.Parameter(torch.ones(3))

    def forward(self, x):
        x = checkpoint(self.lin, x, use_reentrant=False)
        x = elementwise_region(elementwise_region(x, self.w), self.w)
        x = CONDS["closure"](x, self.w)
        return Square.apply(SCANS["captured"](x, self.w)[1])


def test_programs_with_bodies_are_freed():
    model = Everything()
    compiled(model, options=PURE["options"])(torch.ones(2, 3)).sum().backward()
    alive = weakref.ref(model.lin.weight)
    assert len(programs) == 1
    del model
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None
    assert len(programs) == 0


# ------------------------------------------------------------------------------------------------------ flex attention


def qkv(heads=2, kv_heads=2, length=16, dim=8, batch=2):
    return tuple(leaf(batch, h, length, dim, seed=i) for i, h in enumerate((heads, kv_heads, kv_heads)))


def causal(b, h, i, j):
    return i >= j


def alibi(score, b, h, i, j):
    return score + (j - i) * (h + 1) * 0.1


def soft_cap(score, b, h, i, j):
    return 5 * torch.tanh(score / 5)


@pytest.fixture
def flex_anywhere(monkeypatch):
    """Let flex_attention take gradients, and xla tensors: torch has kernels for neither and says so before Dynamo sees it."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


FLEX = {
    "plain": ({}, {}),
    "score_mod": ({"score_mod": alibi}, {}),
    "soft cap": ({"score_mod": soft_cap, "scale": 0.3}, {}),
    "gqa": ({"enable_gqa": True}, {"heads": 4}),
    "one kv head": ({"enable_gqa": True, "score_mod": alibi}, {"heads": 4, "kv_heads": 1}),
}


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize("name", FLEX)
def test_flex_attention(name, device, flex_anywhere):
    kwargs, shape = FLEX[name]
    agree(lambda q, k, v: flex_attention(q, k, v, **kwargs), lambda: qkv(**shape), grad=True, device=device, **PURE)


class Biased(nn.Module):
    """A score_mod and a mask that capture tensors, of which one is learned."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.tensor([0.5, -0.25]))
        self.register_buffer("limit", torch.tensor(9))

    def forward(self, q, k, v):
        def score_mod(score, b, h, i, j):
            return score + self.bias[h] * (i - j)

        return flex_attention(q, k, v, score_mod=score_mod)


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_flex_attention_captures(device, flex_anywhere):
    """The gradient of a captured parameter."""
    agree(Biased(), lambda: qkv(length=8), grad=True, device=device, tol=1e-4, **PURE)


def masked(mask_mod, length):
    def f(q, k, v):
        mask = create_block_mask(mask_mod, None, None, length, length, device=q.device)
        return flex_attention(q, k, v, block_mask=mask)

    return f


MASKS = {
    "causal": causal,
    "window": lambda b, h, i, j: (i - j).abs() <= 3,
    "empty rows": lambda b, h, i, j: (i >= j) & (i % 3 != 0),
    "by head": lambda b, h, i, j: (i >= j) | (h == 1),
}


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize("name", MASKS)
def test_flex_attention_masks(name, device, flex_anywhere):
    """A mask that is made inside of the compiled function; a row without any score gives zeros and no gradient."""
    agree(masked(MASKS[name], 16), qkv, grad=True, device=device)


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_flex_attention_with_a_mask_made_before(flex_anywhere):
    mask = create_block_mask(causal, None, None, 16, 16, device="cpu")
    agree(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), qkv, grad=True, **PURE)


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_flex_attention_gives_its_log_sum_exp(device, flex_anywhere):
    def f(q, k, v):
        out, aux = flex_attention(q, k, v, score_mod=alibi, return_aux=AuxRequest(lse=True))
        return out, aux.lse

    agree(f, qkv, grad=True, device=device, **PURE)


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_flex_attention_dtypes(dtype, device, flex_anywhere):
    make = lambda: tuple(t.detach().to(dtype).requires_grad_() for t in qkv())  # noqa: E731
    tol = 1e-5 if dtype is torch.float64 else 4e-2
    agree(lambda q, k, v: flex_attention(q, k, v, score_mod=alibi), make, grad=True, device=device, tol=tol, **PURE)
