"""Views: a write through any view reaches its base, a read of any view sees every write before it."""

import pytest
import torch
from oracle import agree, both_raise, compiled


def matrix() -> torch.Tensor:
    return torch.linspace(-2, 2, 24).reshape(4, 6)


VIEWS = {
    "slice": lambda y: y[1:3],
    "slice with step": lambda y: y[::2, 1::3],
    "negative index": lambda y: y[-1],
    "negative slice": lambda y: y[-3:-1, :-2],
    "ellipsis": lambda y: y[..., 2],
    "None": lambda y: y[None, 1:],
    "view": lambda y: y.view(2, 12),
    "reshape": lambda y: y.reshape(-1),
    "flatten": lambda y: y.flatten(),
    "unflatten": lambda y: y.unflatten(1, (2, 3)),
    "view_as": lambda y: y.view_as(torch.empty(6, 4, device=y.device)),
    "t": lambda y: y.t(),
    "T": lambda y: y.T,
    "mT": lambda y: y.mT,
    "transpose": lambda y: y.transpose(0, 1),
    "swapaxes": lambda y: y.swapaxes(0, 1),
    "permute": lambda y: y.view(2, 2, 6).permute(2, 0, 1),
    "select": lambda y: y.select(1, 2),
    "narrow": lambda y: y.narrow(1, 2, 3),
    "diagonal": lambda y: y.diagonal(1),
    "squeeze": lambda y: y[:, 2:3].squeeze(1),
    "squeeze nothing": lambda y: y.squeeze(0),
    "unsqueeze": lambda y: y.unsqueeze(1),
    "movedim": lambda y: y.view(2, 2, 6).movedim(0, 2),
    "as_strided": lambda y: y.as_strided((2, 3), (6, 2), 1),
    "unfold": lambda y: y.unfold(1, 2, 2),
    "detach": lambda y: y.detach(),
    "view of a view": lambda y: y.t()[1:5].view(2, 2, 4)[:, 1],
    "row of a transpose": lambda y: y.t()[2][1:],
    "diagonal of a slice": lambda y: y[1:, 1:4].diagonal().unsqueeze(0),
    "expand of one": lambda y: y.unsqueeze(0).expand(1, 4, 6),
    "real": lambda y: torch.view_as_complex(y.view(4, 3, 2)).real,
    "imag": lambda y: torch.view_as_complex(y.view(4, 3, 2)).imag,
    "view_as_real": lambda y: torch.view_as_real(torch.view_as_complex(y.view(4, 3, 2)))[1:],
    "contiguous": lambda y: y.contiguous(),
    "to the same dtype": lambda y: y.to(torch.float32),
    "positive": lambda y: +y,
    "tensor_split": lambda y: y.tensor_split([1, 4], 1)[1],
    "hsplit": lambda y: torch.hsplit(y, 3)[1],
}

# Their outputs must not be written to while autograd records: eager raises.
PIECES = {
    "chunk": lambda y: y.chunk(2)[1],
    "chunk of columns": lambda y: y.chunk(4, 1)[-1],
    "split": lambda y: y.split(4, 1)[1],
    "split of sizes": lambda y: y.split([1, 2, 3], 1)[2],
    "unbind": lambda y: y.unbind(1)[4],
}

# No gradient: of another dtype, or (iteration) forbidden by eager and allowed by Dynamo, which takes it for indexing.
NO_GRAD = {
    "bits": lambda y: y.view(torch.int32),
    "bytes": lambda y: y.view(torch.uint8)[:, ::4],
    "iteration": lambda y: list(y)[2],
}

ALL = VIEWS | PIECES | NO_GRAD


@pytest.mark.parametrize("name", ALL)
def test_writes_and_reads_meet(name, device):
    """A write through the view, then one to the base; the base, the old view and a new one are read."""
    view = ALL[name]

    def f(x):
        y = x * 1.5
        v = view(y)
        v.mul_(3)
        y.add_(1)
        return v * 2, y.t() * 1, view(y) + 1, y

    grad = name in VIEWS
    agree(f, lambda: (matrix().requires_grad_(grad),), device=device, grad=grad, pure=True)


@pytest.mark.parametrize("name", ALL)
def test_write_reaches_an_argument(name, device):
    """The write goes through the view into the caller's tensor."""

    def f(x):
        ALL[name](x).add_(1)
        return x.sum(), x[1:3, 1:3] * 1

    agree(f, lambda: (matrix(),), device=device, pure=True)


@pytest.mark.parametrize("name", PIECES)
def test_writes_to_pieces_raise_while_autograd_records(name):
    """Eager forbids in-place writes to one of several views made by one call."""

    def f(x):
        y = x * 1.5
        PIECES[name](y).mul_(3)
        return y

    both_raise(f, lambda: (matrix().requires_grad_(),))


def test_write_to_overlapping_elements_is_for_eager_to_judge(device):
    """Eager forbids in-place writes to an expanded tensor on the CPU; torch_xla does not."""

    def f(x):
        return (x * 1)[:1].expand(3, 6).add_(1)

    if device.type == "cpu":
        both_raise(f, lambda: (matrix(),))
    else:
        torch.testing.assert_close(compiled(f)(matrix().to(device)).cpu(), f(matrix().to(device)).cpu())


def overlapping_views(x):
    y = x * 1
    a, b = y.view(-1)[3:15], y[1:3]
    a.mul_(2)
    b.add_(a.view(2, 6)[1].clone())
    return a, b, a * b.view(-1), y


def ping_pong(x):
    y = x.clone()
    rows, columns = y[1], y[:, 1]
    rows += 1
    columns *= 2
    rows -= columns.sum()
    return rows, columns, y


def swap(x):
    y = x * 1
    y[0], y[1] = y[1].clone(), y[0].clone()
    y[2:] = y[:2]
    return y


def shift(x):
    y = x * 1
    y[:, 1:] = y[:, :-1].clone()
    y[:, 0] = y[:, -1]
    return y


def detached_twice(x):
    y = x * 2
    d = y.detach()
    d.view(-1)[::5].zero_()
    return y * 1, d * 1, y.detach()


def clone_is_no_view(x):
    y = x * 1
    c, r = y.clone(), y.t().reshape(-1)
    c.zero_()
    r.zero_()
    return y, c, r


def flip_is_no_view(x):
    y = x * 1
    for z in (
        y.flip(0),
        y.roll(1, 0),
        y[[0, 1]],
        y[y > 0],
        y.repeat(1, 1),
        y.tile(1),
        y.take_along_dim(y.argsort(1), 1),
    ):
        z.zero_()
    return y


def many_writes(x):
    y = x * 1
    for i in range(4):
        y[i, i:].add_(i)
        y.t()[i].mul_(1 + i)
    return y


def metadata_in_place(x):
    y = x * 1
    y.t_()
    y.unsqueeze_(0)
    y.squeeze_(0)
    y.transpose_(0, 1)
    y[1] = 3
    return y, y.shape[0]


def write_between_reads(x):
    y = x * 1
    v = y[1]
    before = v + 0
    y[1] = 5
    middle = v + 0
    v.fill_(7)
    return before, middle, v + 0, y


def set_value_keeps_graph(x):
    y = torch.zeros(4, 6, device=x.device)
    for i in range(4):
        y[i] = x[i] * (i + 1)
    return y.cumsum(0)


PROGRAMS = [
    *(overlapping_views, ping_pong, swap, shift, detached_twice, clone_is_no_view, flip_is_no_view),
    *(many_writes, metadata_in_place, write_between_reads, set_value_keeps_graph),
]


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_programs(f, device):
    """Longer interleavings of reads and writes."""
    agree(f, lambda: (matrix().requires_grad_(),), device=device, grad=True)


COMPLEX = {
    "view_as_real": lambda z: torch.view_as_real(z)[1],
    "real": lambda z: z.real,
    "imag": lambda z: z.imag,
    "real of a slice": lambda z: z[1:, 1].real,
    "imag of a transpose": lambda z: z.t().imag[0],
}


@pytest.mark.parametrize("name", COMPLEX)
def test_writes_through_views_of_complex_tensors(name, device):
    """Real and imaginary parts are views."""

    def f(z):
        y = z * (1 + 1j)
        COMPLEX[name](y).mul_(3)
        return y, COMPLEX[name](y) + 1, y.abs()

    def make_args():
        return (torch.complex(matrix(), matrix().flip(0)).requires_grad_(),)

    agree(f, make_args, device=device, grad=True, tol=1e-4)


def test_conj_view_reads_the_written_base(device):
    """`conj` is a lazy view in eager."""

    def f(z):
        y = z * 1
        c = y.conj()
        y.mul_(2j)
        return c * 1, c.imag + 0, y

    agree(f, lambda: (torch.complex(matrix(), matrix().flip(1)),), device=device)
