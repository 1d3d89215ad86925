"""Writes by index with masks, beside index tensors, slices and integers; and indices out of range."""

import pytest
import torch
import torch.nn.functional as F
from oracle import agree

import pure_backend


def _args(shape=(2, 3, 4)):
    """A tensor, its update, masks of its first, second and first two dimensions, and index tensors."""
    x = torch.arange(24.0).reshape(shape).requires_grad_()
    m = torch.tensor([[True, False, True], [False, True, True]])
    return x, torch.randn(24, generator=torch.Generator().manual_seed(0)).requires_grad_(), m, torch.tensor([1, 0])


def _written(index, value):
    def f(x, v, m, i):
        a = x.clone()
        a[index(m, i)] = value(v)
        return a

    return f


ONE_MASK = {
    "first dimensions": (lambda m, i: m, lambda v: v[0]),
    "row for each": (lambda m, i: m, lambda v: v[:16].view(4, 4)),
    "row for all": (lambda m, i: m, lambda v: v[:4]),
    "leading ones": (lambda m, i: m, lambda v: v[:16].view(1, 4, 4)),
    "one for each": (lambda m, i: m, lambda v: v[:4].view(4, 1)),
    "after a slice": (lambda m, i: (slice(None), m[0]), lambda v: v[:16].view(2, 2, 4)),
    "after a slice, each": (lambda m, i: (slice(None), m[0]), lambda v: v[:2].view(2, 1)),
    "after Ellipsis": (lambda m, i: (..., m[0], slice(None)), lambda v: v[:4]),
    "before a slice": (lambda m, i: (m, slice(1, 3)), lambda v: v[:8].view(4, 2)),
    "before an int": (lambda m, i: (m, 0), lambda v: v[:4]),
    "after an int": (lambda m, i: (1, m[1]), lambda v: v[:8].view(2, 4)),
    "after None": (lambda m, i: (None, m), lambda v: v[:16].view(4, 4)),
    "before None": (lambda m, i: (m, None), lambda v: v[:16].view(4, 1, 4)),
    "beside one index": (lambda m, i: (i[:1], m[0]), lambda v: v[:8].view(2, 4)),
    "beside a column": (lambda m, i: (i[:, None], m[0]), lambda v: v[:16].view(2, 2, 4)),
    "beside a column, scalar": (lambda m, i: (i[:, None], m[0]), lambda v: v[0]),
    "apart from an index": (lambda m, i: (m[:, 0], slice(None), i[:1]), lambda v: v[:3]),
    "all false": (lambda m, i: m & ~m, lambda v: v[0]),
    "none for none": (lambda m, i: m & ~m, lambda v: v[:0].view(0, 4)),
    "True": (lambda m, i: True, lambda v: v[0]),
    "False": (lambda m, i: (False, 0), lambda v: v[0]),
    "int and index apart": (lambda m, i: (0, slice(None), i), lambda v: v[:6].view(3, 2)),
    "runtime int": (lambda m, i: (i[0], slice(None), i), lambda v: v[:6].view(3, 2)),
}


@pytest.mark.parametrize("name", ONE_MASK)
def test_one_mask(name, device):
    """One mask is a selection, or a scatter beside index tensors that do not compare with its number of elements."""
    agree(_written(*ONE_MASK[name]), _args, device=device, grad=True, pure=True)
    assert pure_backend.statistics().calls <= 2, "cut into several programs"


COMPARED = {
    "an index and a mask": (lambda m, i: (i, m[0]), lambda v: v[0]),
    "with a row each": (lambda m, i: (i, m[0]), lambda v: v[:8].view(2, 4)),
    "two masks": (lambda m, i: (m[:, 1] | m[:, 0], m[0]), lambda v: v[0]),
    "two masks, one true": (lambda m, i: (m[:, 1], m[0]), lambda v: v[:8].view(2, 4)),
    "mask, slice, mask": (lambda m, i: (m[:, 2], slice(None), m.view(-1)[:4]), lambda v: v[0]),
}


@pytest.mark.parametrize("name", COMPARED)
def test_sizes_that_only_values_tell(name, device, caplog):
    """Whether the number of true elements fits another size is known in eager only."""
    agree(_written(*COMPARED[name]), _args, device=device, grad=True)
    assert "known only when it runs" in caplog.text


def test_the_error_of_eager_stays():
    """Sizes that do not fit raise."""
    x, v, m, i = _args()
    f = torch.compile(_written(lambda m, i: (torch.tensor([0, 1]), m[0] | True), lambda v: v[0]), backend="assume_pure")
    with pytest.raises(IndexError, match="could not be broadcast"):
        f(x, v, m, i)


def test_a_value_for_each_of_another_number():
    """A value for each true element, when there are more or fewer of them, writes NaN: in eager it is an error."""

    def f(a, m, v):
        b, c = a.clone(), a.clone()
        b[m] = v
        c[torch.zeros(1, 1, dtype=torch.int64), m] = v[0]
        return b, c

    a, v = torch.zeros(3, 3), torch.ones(3, 3)
    compiled = torch.compile(f, backend="assume_pure")
    b, c = compiled(a, torch.tensor([True, False, True]), v)
    assert b[0].isnan().all() and (b[1] == 0).all() and b[2].isnan().all()
    assert c[0, 0].isnan() and c[0, 1] == 0 and c[0, 2].isnan() and (c[1:] == 0).all()
    b, c = compiled(a, torch.tensor([True, True, True]), v)
    assert (b == 1).all() and (c[0] == 1).all()


UPDATES = {
    "mask": lambda a, b, m: a.__setitem__(m, a[m] + 1.0),
    "mask, in place": lambda a, b, m: a[m].add_(1.0),
    "index and mask": lambda a, b, m: a.__setitem__((b, m[0]), a[b, m[0]] * 2.0),
    "masked by another": lambda a, b, m: a.__setitem__(m, a.flip(0)[m]),
    "put": lambda a, b, m: a.index_put_((m,), a[0, 0, :1]),
    "accumulated": lambda a, b, m: a.index_put_((m,), torch.ones(4, 4), accumulate=True),
    "accumulated beside an index": lambda a, b, m: a.index_put_((b[:, None], m[0]), torch.ones(4), accumulate=True),
    "accumulated twice": lambda a, b, m: a.index_put_((b[:, None] * 0, m[0]), torch.ones(2, 2, 4), accumulate=True),
    "accumulated, sizes compared": lambda a, b, m: a.index_put_((b, m[0]), torch.ones(4), accumulate=True),
}


@pytest.mark.parametrize("name", UPDATES)
def test_updates(name):
    """Reads with sizes that depend on values run in eager; what is written comes back, with gradients."""

    def f(x, v, m, i):
        a = x * 1.0
        UPDATES[name](a, i, m)
        return a, a.sin()

    agree(f, _args, grad=True)


def test_augmented():
    """`a[m] += v`, `a[b, m] += tensor`, `a[:, m] *= tensor`, on an input."""

    def f(a, b, m, v):
        a[m] += 1.0
        a[b, m] += v
        a[:, m] *= v
        return a.sum()

    def make_args():
        a, m = torch.arange(9.0).view(3, 3), torch.tensor([True, False, True])
        return a, torch.tensor([0, 1]), m, torch.tensor([2.0, 3.0])

    agree(f, make_args)


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_masks_of_bytes():
    """The old way to write a mask."""

    def f(a, m):
        a[m] = a[0] * 2
        a[:, m] = a[0, :2] * 2
        return a

    agree(f, lambda: (torch.arange(9.0).view(3, 3), torch.tensor([1, 0, 1], dtype=torch.uint8)))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16], ids=str)
def test_dtypes(dtype, device):
    """Writes by mask in other dtypes; accumulated bools are or'ed."""

    def f(a, m, i):
        one = torch.ones(2, 1, dtype=a.dtype, device=a.device)
        b, c = a.clone(), a.clone()
        b[m] = one
        c[i[:1], m] = one[0]
        return b, c, a.index_put((m,), one, accumulate=True), a.index_put((i,), one, accumulate=True)

    m, i = torch.tensor([True, False, True]), torch.tensor([2, 0])
    agree(f, lambda: (torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 1]]).to(dtype), m, i), device=device)


READS = {
    "int and index apart": lambda x, i: x[0, :, i],
    "runtime int and index apart": lambda x, i: x[i[0], :, i],
    "two apart": lambda x, i: x[i, :, i],
    "two around None": lambda x, i: x[i, None, i],
    "lists": lambda x, i: x[[0, 1], [1, 2]],
    "negative": lambda x, i: x[-i, -1, i - 3],
    "matrix": lambda x, i: x[:, i[:, None], i],
}


@pytest.mark.parametrize("name", READS)
def test_reads(name, device):
    """An integer in a subscript makes a view first, unlike in NumPy."""
    agree(lambda x, v, m, i: READS[name](x, i), _args, device=device, grad=True, pure=True)


OUT_OF_RANGE = {
    "embedding": (lambda w, i: F.embedding(i, w), (-1, 3)),
    "embedding_bag": (lambda w, i: F.embedding_bag(i[None], w, mode="sum"), (-1, 3)),
    "subscript": (lambda w, i: w[i], (-4, 3)),
    "second subscript": (lambda w, i: w[:, i % 7], (4, 3)),
    "index_select": (lambda w, i: w.index_select(0, i), (-1, 3)),
    "gather": (lambda w, i: w.gather(0, i[:, None]), (-1, 3)),
    "take": (lambda w, i: w.take(i), (-7, 6)),
    "take_along_dim": (lambda w, i: torch.take_along_dim(w, i[:, None], 0), (-1, 3)),
    "nll_loss": (lambda w, i: F.nll_loss(w[:1], i, reduction="none"), (-1, 2)),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_an_index_out_of_range_reads_nan(name, device):
    """In eager it is an error, which a program cannot raise; docs/differences.md says so."""
    f, places = OUT_OF_RANGE[name]
    compiled = torch.compile(lambda w, i: f(w * 1.0, i), backend="assume_pure")
    for place in places:
        w = torch.arange(6.0).reshape(3, 2).to(device).requires_grad_()
        out = compiled(w, torch.tensor([place]).to(device))
        out.nan_to_num().sum().backward()
        assert out.isnan().all().item(), (place, out)
        assert not w.grad.any().item(), (place, w.grad)


WRITES = {
    "scatter": (lambda w, i: w.scatter(0, i[:, None], 9.0), (-1, 3)),
    "scatter_add": (lambda w, i: w.scatter_add(0, i[:, None], w[:1, :1] + 1), (-1, 3)),
    "scatter_reduce": (lambda w, i: w.scatter_reduce(0, i[:, None], w[:1, :1] + 9, "amax"), (-1, 3)),
    "index_add": (lambda w, i: w.index_add(0, i, w[:1] + 1), (-1, 3)),
    "index_copy": (lambda w, i: w.index_copy(0, i, w[:1] + 9), (-1, 3)),
    "index_reduce": (lambda w, i: w.index_reduce(0, i, w[:1] + 9, "amax"), (-1, 3)),
    "index_fill": (lambda w, i: w.index_fill(0, i, 9.0), (-4, 3)),
    "index_put": (lambda w, i: w.index_put((i,), w[0, 0] + 9), (-4, 3)),
    "put": (lambda w, i: w.put(i, w[0, :1] + 9), (-7, 6)),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", WRITES)
def test_an_index_out_of_range_writes_nothing(name, device):
    """Negative indices are out of range where they are in eager."""
    f, places = WRITES[name]
    compiled = torch.compile(f, backend="assume_pure")
    w = torch.arange(6.0).reshape(3, 2).to(device)
    for place in places:
        assert torch.equal(compiled(w, torch.tensor([place]).to(device)).cpu(), w.cpu()), place


NEGATIVE = {
    "subscript": lambda w, i: w[i],
    "take": lambda w, i: w.take(i),
    "put": lambda w, i: w.put(i, w[0, :1] + 9),
    "index_fill": lambda w, i: w.index_fill(0, i, 9.0),
    "index_put": lambda w, i: w.index_put((i,), w[0, 0] + 9),
}


@pytest.mark.parametrize("name", NEGATIVE)
def test_negative_indices(name, device):
    """They count from the end where they do in eager."""
    agree(NEGATIVE[name], lambda: (torch.arange(6.0).reshape(3, 2), torch.tensor([-1])), device=device, pure=True)
