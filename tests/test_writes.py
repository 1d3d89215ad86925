"""In-place operators, item assignment, `out=`: the written tensor is as in eager, and so is the gradient."""

import pytest
import torch
import torch.nn.functional as F
from oracle import agree, both_raise, compiled


def matrix() -> torch.Tensor:
    return torch.linspace(-2, 2, 24).reshape(4, 6)


def put(key, value=None):
    """The assignment `y[key] = value`, or of a computed row where no value is given."""

    def assign(y):
        y[key] = y.sum() if value is None else value

    return assign


def put_rows(key, make_value):
    def assign(y):
        y[key(y)] = make_value(y)

    return assign


def index(y, *values):
    return torch.tensor(values, device=y.device)


SETITEM = {
    "int": put(1, 3.0),
    "negative int": put(-1, 2),
    "slice": put(slice(1, 3), 0.5),
    "step": put((slice(None, None, 2), slice(1, None, 3)), 7.0),
    "ellipsis": put((..., 0), 4.0),
    "all": put(slice(None), 1.0),
    "None": put((None, 2), 1.0),
    "bool": put(True, 9.0),
    "computed": put((1, 2)),
    "zero-size": put(slice(2, 2), 1.0),
    "list": put([0, 2], 1.0),
    "bool mask, scalar": put_rows(lambda y: y > 0, lambda y: -1.0),
    "bool mask of rows": put_rows(lambda y: y.sum(1) > 0, lambda y: y[0] * 2),
    "index tensor": put_rows(lambda y: index(y, 2, 0), lambda y: y[:2] * 3),
    "negative index tensor": put_rows(lambda y: index(y, -1, 0), lambda y: y[:2] * 3),
    "two index tensors": put_rows(lambda y: (index(y, 0, 1), index(y, 3, 5)), lambda y: y[0, :2].clone()),
    "slice and index tensor": put_rows(lambda y: (slice(None), index(y, 4, 1)), lambda y: y[:, :2] * 2),
    "int and index tensor": put_rows(lambda y: (2, index(y, 4, 1)), lambda y: 8.0),
    "0-d index tensor": put_rows(lambda y: index(y, 2)[0], lambda y: y[0] + 1),
    "broadcast row": put_rows(lambda y: slice(1, 3), lambda y: y[0]),
    "broadcast column": put_rows(lambda y: slice(1, 3), lambda y: y[:2, :1].clone()),
    "leading ones": put_rows(lambda y: slice(1, 3), lambda y: y[None, :1]),
    "other dtype": put_rows(lambda y: 1, lambda y: torch.arange(6, device=y.device)),
    "0-d tensor": put_rows(lambda y: 1, lambda y: y.mean()),
    "tensor of ones": put_rows(lambda y: (0, 0), lambda y: y.new_ones(())),
}


@pytest.mark.parametrize("name", SETITEM)
def test_setitem(name, device):
    """Item assignment to a tensor with history."""

    def f(x):
        y = x * 1.5
        SETITEM[name](y)
        return y, y.t() * 2

    agree(f, lambda: (matrix().requires_grad_(),), device=device, grad=True)


@pytest.mark.parametrize("name", ["int", "step", "bool mask, scalar", "index tensor", "other dtype"])
def test_setitem_on_an_argument(name, device):
    """Item assignment to the caller's tensor, through a transpose."""

    def f(x):
        SETITEM[name](x.view(6, 4).t())
        return x * 1

    agree(f, lambda: (matrix(),), device=device)


def in_place(name, *args, **kwargs):
    return lambda y, x: getattr(y, name)(*args, **kwargs)


IN_PLACE = {
    "add_ alpha": lambda y, x: y.add_(x, alpha=2),
    "sub_": lambda y, x: y.sub_(x),
    "mul_": lambda y, x: y.mul_(x),
    "div_": lambda y, x: y.div_(x + 10),
    "pow_": in_place("pow_", 2),
    "addcmul_": lambda y, x: y.addcmul_(x, x, value=0.5),
    "addcdiv_": lambda y, x: y.addcdiv_(x, x + 5),
    "addmm_": lambda y, x: y[:, :4].addmm_(x, x.t()),
    "lerp_": lambda y, x: y.lerp_(x, 0.3),
    "clamp_": in_place("clamp_", -1, 1),
    "exp_": in_place("exp_"),
    "sigmoid_": in_place("sigmoid_"),
    "tanh_": in_place("tanh_"),
    "relu_": in_place("relu_"),
    "neg_": in_place("neg_"),
    "zero_": in_place("zero_"),
    "fill_": in_place("fill_", 3.0),
    "fill_ tensor": lambda y, x: y.fill_(x[0, 0]),
    "copy_": lambda y, x: y.copy_(x),
    "copy_ broadcast": lambda y, x: y.copy_(x[0]),
    "masked_fill_": lambda y, x: y.masked_fill_(x > 0, 2.0),
    "masked_scatter_": lambda y, x: y.masked_scatter_(x > 0, x * 2),
    "index_add_": lambda y, x: y.index_add_(0, torch.tensor([2, 0, 2], device=x.device), x[:3]),
    "index_copy_": lambda y, x: y.index_copy_(1, torch.tensor([5, 0], device=x.device), x[:, :2]),
    "index_fill_": lambda y, x: y.index_fill_(1, torch.tensor([5, 0], device=x.device), 2.0),
    "index_put_": lambda y, x: y.index_put_((torch.tensor([1, 1], device=x.device),), x[:2], accumulate=True),
    "scatter_": lambda y, x: y.scatter_(1, x.argsort(1).flip(1), x),
    "scatter_add_": lambda y, x: y.scatter_add_(1, (x > 0).long(), x),
    "scatter_reduce_": lambda y, x: y.scatter_reduce_(1, (x > 0).long(), x, "amax"),
    "put_": lambda y, x: y.put_(torch.tensor([3, 20], device=x.device), x[0, :2]),
    "triu_": in_place("triu_", 1),
    "cumsum_": in_place("cumsum_", 1),
    "F.relu inplace": lambda y, x: F.relu(y, inplace=True),
    "F.silu inplace": lambda y, x: F.silu(y, inplace=True),
    "F.leaky_relu_": lambda y, x: F.leaky_relu_(y, 0.1),
    "F.hardtanh inplace": lambda y, x: F.hardtanh(y, inplace=True),
    "F.elu inplace": lambda y, x: F.elu(y, inplace=True),
    "F.threshold_": lambda y, x: F.threshold_(y, 0.1, 5.0),
    "i-operators": lambda y, x: [y.__iadd__(x), y.__imul__(2), y.__isub__(1), y.__itruediv__(3)],
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name, device):
    """An in-place operator on a tensor with history; the result is the tensor itself."""

    def f(x):
        y = x * 1.5 + 1
        IN_PLACE[name](y, x)
        return y, y.view(-1)

    agree(f, lambda: (matrix().requires_grad_(),), device=device, grad=True, tol=1e-4)


NO_GRAD_IN_PLACE = {
    "gt_": lambda y, x: y.gt_(0.5),
    "eq_": lambda y, x: y.eq_(x),
    "logical_not_": lambda y, x: y.logical_not_(),
    "floor_": lambda y, x: y.floor_(),
    "sign_": lambda y, x: y.sign_(),
    "remainder_": lambda y, x: y.remainder_(0.7),
    "floor_divide_": lambda y, x: y.floor_divide_(0.7),
    "nan_to_num_": lambda y, x: y.log_().nan_to_num_(nan=3.0),
    "arange out": lambda y, x: y[0].copy_(torch.arange(6, device=x.device)),
}


@pytest.mark.parametrize("name", NO_GRAD_IN_PLACE)
def test_in_place_on_an_argument(name, device):
    """An in-place operator on the caller's tensor."""

    def f(y, x):
        NO_GRAD_IN_PLACE[name](y, x)
        return y * 1

    agree(f, lambda: (matrix(), matrix().abs()), device=device, pure=True)


CASTS = {
    "half += float tensor": (torch.float16, lambda y, x: y.add_(x)),
    "half *= float": (torch.float16, lambda y, x: y.mul_(2.5)),
    "bf16 copy_ float": (torch.bfloat16, lambda y, x: y.copy_(x)),
    "int copy_ float": (torch.int64, lambda y, x: y.copy_(x * 3)),
    "int8 add_ wraps": (torch.int8, lambda y, x: y.add_(100).add_(100)),
    "uint8 sub_ wraps": (torch.uint8, lambda y, x: y.fill_(3).sub_(5)),
    "int += bool": (torch.int32, lambda y, x: y.add_(x > 0)),
    "int32 += int64": (torch.int32, lambda y, x: y.add_(x.long())),
    "int div_ floor": (torch.int64, lambda y, x: y.div_(2, rounding_mode="floor")),
    "int floor_divide_": (torch.int64, lambda y, x: y.floor_divide_(-2)),
    "bool logical_or_": (torch.bool, lambda y, x: y.logical_or_(x)),
    "bool &= ": (torch.bool, lambda y, x: y.bitwise_and_(x > 0)),
    "bool copy_": (torch.bool, lambda y, x: y.copy_(x)),
    "bool setitem float": (torch.bool, lambda y, x: y.__setitem__(0, 2.0)),
    "int setitem float tensor": (torch.int64, lambda y, x: y.__setitem__(0, x[0] * 2)),
    "double += float": (torch.float64, lambda y, x: y.add_(x)),
    "float += 0-d double": (torch.float32, lambda y, x: y.add_(x.double().sum())),
    "half masked_fill_": (torch.float16, lambda y, x: y.masked_fill_(x > 0, 0.1)),
}


@pytest.mark.parametrize("name", CASTS)
def test_in_place_casts_to_the_written_dtype(name, device):
    """The dtype of the written tensor stays, whatever is written."""
    dtype, write = CASTS[name]

    def f(y, x):
        z = y.clone()
        write(z, x)
        write(y, x)
        return z

    def make_args():
        return (torch.tensor([[1.0, 0.0, 3.0]]).to(dtype), torch.tensor([[0.5, -1.25, 2.0]]))

    assert agree(f, make_args, device=device, tol=1e-2).args[0].dtype == dtype


RAISES = {
    "int += float": lambda y: y.long().add_(1.5),
    "bool += int": lambda y: (y > 0).add_(1),
    "int div_": lambda y: y.long().div_(2),
    "shape": lambda y: y.add_(torch.ones(5, 4, 6, device=y.device)),
    "setitem shape": lambda y: y.__setitem__(0, torch.ones(5, device=y.device)),
    "setitem out of range": lambda y: y.__setitem__(9, 1.0),
    "view of a transpose": lambda y: y.t().view(-1),
    "matmul": lambda y: y @ y,
}


@pytest.mark.parametrize("name", RAISES)
def test_raises_where_eager_raises(name, device):
    """What eager refuses is refused."""
    both_raise(lambda x: RAISES[name](x * 1), lambda: (matrix(),), device=device)


def out_into_intermediate(x):
    y = torch.empty(4, 6, device=x.device)
    torch.add(x, 1, out=y)
    return y, y * 2


def out_into_argument(x):
    return torch.sin(x, out=x) * 2


def out_twice(x):
    y = torch.zeros_like(x)
    torch.mul(x, 2, out=y)
    z = torch.cos(y, out=y)
    return y, z


def out_pair(x):
    values, indices = torch.empty(4, device=x.device), torch.empty(4, dtype=torch.int64, device=x.device)
    torch.max(x, 1, out=(values, indices))
    return values, indices


def out_into_a_view(x):
    y = torch.zeros(5, 6, device=x.device)
    torch.mul(x, 3, out=y[1:])
    return y


@pytest.mark.parametrize(
    "f", [out_into_intermediate, out_into_argument, out_twice, out_pair, out_into_a_view], ids=lambda f: f.__name__
)
def test_out(f, device):
    """`out=` writes into the tensor it is given."""
    agree(f, lambda: (matrix(),), device=device)


def mutate_and_return(a, b):
    return a.add_(b), a.view(-1), b


def mutate_with_gradient(a, b):
    a.mul_(b)
    return a.sum()


def mutate_by_select(a, b):
    for i in range(2):
        a[i].add_(b[i], alpha=i + 1)
    return a.sum() + b.sum()


def mutate_unused(a, b):
    a.zero_()
    return b * 2


def mutate_nothing_returned(a, b):
    a.copy_(b * 3)


def mutate_two(a, b):
    a.mul_(2)
    b.copy_(a + 1)
    return a + b


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "f", [mutate_and_return, mutate_with_gradient, mutate_by_select, mutate_unused], ids=lambda f: f.__name__
)
def test_mutated_arguments(f, grad, device):
    """Arguments written by the function; what is written carries a gradient where eager's does."""

    def make_args():
        return (matrix()[:2].clone(), torch.ones(2, 6, requires_grad=grad))

    agree(f, make_args, device=device, grad=grad, pure=True)


def test_two_mutated_arguments(device):
    """Both arguments written."""
    agree(mutate_two, lambda: (matrix()[:2].clone(), torch.ones(2, 6)), device=device, pure=True)


def test_write_to_a_leaf_that_requires_grad_raises(device):
    """Eager forbids it while autograd records."""
    both_raise(mutate_two, lambda: (torch.ones(2), torch.ones(2, requires_grad=True)), device=device)


def test_only_effect_is_a_write(device):
    """A function that returns nothing."""
    got = agree(mutate_nothing_returned, lambda: (torch.zeros(3), torch.ones(3)), device=device)
    assert got.args[0].tolist() == [3, 3, 3]


LAYOUTS = {
    "transposed": lambda b: b.t(),
    "strided": lambda b: b[:, ::2],
    "offset": lambda b: b[1:, 3:],
    "0-d": lambda b: b[1, 2],
    "diagonal": lambda b: b.diagonal(),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_mutated_argument_of_any_layout(name):
    """The write lands in the caller's storage, and only in the elements of the argument."""

    def f(x, base):
        x.mul_(10)
        return x + 1

    def make_args():
        base = matrix()
        return LAYOUTS[name](base), base

    agree(f, make_args)


OVERLAPS = {
    "same twice": lambda b: (b, b),
    "base and row": lambda b: (b, b[1]),
    "base and transpose": lambda b: (b, b.t()),
    "shifted slices": lambda b: (b.view(-1)[:6], b.view(-1)[3:9]),
    "disjoint slices": lambda b: (b.view(-1)[:6], b.view(-1)[6:12]),
    "interleaved": lambda b: (b.view(-1)[::2], b.view(-1)[1::2]),
    "same region, other shape": lambda b: (b.view(-1), b.view(6, 4)),
    "detached": lambda b: (b, b.detach()),
}


def write_first(a, b):
    a.mul_(2)
    return a.sum(), b.sum(), b * 1


def write_second(a, b):
    b.add_(5)
    return a * 1


def write_both(a, b):
    a.add_(1)
    b.mul_(10)
    a.sub_(b.sum())
    return a * 1, b * 1


@pytest.mark.parametrize("f", [write_first, write_second, write_both], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", OVERLAPS)
def test_overlapping_mutated_arguments(f, name):
    """Arguments that share memory: a write to one is seen through the other."""
    agree(f, lambda: OVERLAPS[name](matrix()))


@pytest.mark.parametrize("name", OVERLAPS)
def test_overlap_is_judged_at_every_call(name):
    """First compiled for separate arguments, then called with arguments that share memory."""
    c = compiled(write_both)
    c(*(x.clone() for x in OVERLAPS[name](matrix())))
    want, got = OVERLAPS[name](matrix()), OVERLAPS[name](matrix())
    torch.testing.assert_close(c(*got), write_both(*want))
    torch.testing.assert_close(got, want)


def test_operators_on_lists(device):
    """`torch._foreach_add_` and its like, which change no version of fake tensors."""

    def f(x, y):
        torch._foreach_add_([x, y], [y.clone(), x.clone()], alpha=0.5)
        torch._foreach_mul_([x, y], 2)
        torch._foreach_addcdiv_([x], [y], [y.exp()], 3.0)
        roots = torch._foreach_sqrt([x.abs(), y.abs()])
        return roots, x + 1

    agree(f, lambda: (torch.arange(3.0), torch.ones(3)), device=device, pure=True)
