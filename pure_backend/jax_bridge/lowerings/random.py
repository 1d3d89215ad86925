"""Random operators. Each takes its own key from the call's key, so sites are independent, forward and backward agree, and
nothing random is baked into a program (pytorch/xla issue 8636)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pure_backend.jax_bridge.lowerings.registry import Site, lowers
from pure_backend.jax_bridge.lowerings.values import as_array


def _shape(site: Site) -> tuple[int, ...]:
    return tuple(site.out.shape)


def _float(dtype):
    """The type random floats are drawn in."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def _uniform(site: Site, shape=None, dtype=None):
    dtype = _float(dtype or site.dtype)
    return jax.random.uniform(site.keys.next(), _shape(site) if shape is None else shape, dtype)


@lowers("rand", "rand_like")
def rand(site: Site, *args, **kwargs):
    """Uniform on [0, 1)."""
    return _uniform(site)


@lowers("randn", "randn_like", "aten::randn")
def randn(site: Site, *args, **kwargs):
    """Standard normal."""
    if jnp.issubdtype(site.dtype, jnp.complexfloating):
        return jax.random.normal(site.keys.next(), _shape(site), site.dtype)
    return jax.random.normal(site.keys.next(), _shape(site), _float(site.dtype))


@lowers("randint")
def randint(site: Site, *args, **kwargs):
    """Integers of [low, high)."""
    args = [*(kwargs[name] for name in ("low", "high") if name in kwargs), *args]
    numbers = [arg for arg in args if isinstance(arg, int) and not isinstance(arg, bool)]
    return _integers(site, *((0, numbers[0]) if len(numbers) == 1 else numbers[:2]))


@lowers("randint_like")
def randint_like(site: Site, x, low, high=None, **kwargs):
    """Integers of [low, high) in the shape of `x`."""
    return _integers(site, *((0, low) if high is None else (low, high)))


def _integers(site: Site, low, high):
    return jax.random.randint(site.keys.next(), _shape(site), low, high, jnp.int64).astype(site.dtype)


@lowers("randperm")
def randperm(site: Site, n, **kwargs):
    """A permutation of range(n)."""
    return jax.random.permutation(site.keys.next(), site.out.shape[0]).astype(site.dtype)


@lowers("bernoulli", "aten::bernoulli")
def bernoulli(site: Site, x, p=None, *, generator=None):
    """Ones with the probabilities `x`, or `p`."""
    probability = x if p is None else p
    return (_uniform(site, x.shape) < probability).astype(site.dtype)


@lowers("bernoulli_")
def bernoulli_(site: Site, x, p=0.5, *, generator=None):
    """In-place form; `p` is a number or a tensor."""
    return (_uniform(site, x.shape, x.dtype) < p).astype(x.dtype)


@lowers("normal_")
def normal_(site: Site, x, mean=0.0, std=1.0, *, generator=None):
    """Normal, in place."""
    return (mean + std * jax.random.normal(site.keys.next(), x.shape, _float(x.dtype))).astype(x.dtype)


@lowers("normal", "aten::normal")
def normal(site: Site, mean, std=1.0, *args, **kwargs):
    """Normal, with mean and deviation a number or a tensor each."""
    noise = jax.random.normal(site.keys.next(), _shape(site), _float(site.dtype))
    return mean + std * noise


@lowers("aten::normal_functional")
def normal_functional(site: Site, x, mean=0.0, std=1.0, *, generator=None):
    """Normal in the shape of `x`."""
    return normal_(site, x, mean, std)


@lowers("uniform_", "aten::uniform")
def uniform_(site: Site, x, *args, generator=None, **bounds):
    """Uniform on [from, to), in place."""
    low = args[0] if args else bounds.get("from", 0.0)
    high = args[1] if len(args) > 1 else bounds.get("to", 1.0)
    return (low + (high - low) * _uniform(site, x.shape, x.dtype)).astype(x.dtype)


@lowers("exponential_", "aten::exponential")
def exponential_(site: Site, x, lambd=1.0, *, generator=None):
    """Exponential, in place."""
    return (jax.random.exponential(site.keys.next(), x.shape, _float(x.dtype)) / lambd).astype(x.dtype)


@lowers("geometric_", "aten::geometric")
def geometric_(site: Site, x, p, *, generator=None):
    """Geometric, in place."""
    u = jax.random.uniform(site.keys.next(), x.shape, jnp.float64, minval=jnp.finfo(jnp.float64).tiny)
    return jnp.maximum(jnp.ceil(jnp.log(u) / jnp.log1p(-p)), 1).astype(x.dtype)


@lowers("cauchy_", "aten::cauchy")
def cauchy_(site: Site, x, median=0.0, sigma=1.0, *, generator=None):
    """Cauchy, in place."""
    return (median + sigma * jax.random.cauchy(site.keys.next(), x.shape, _float(x.dtype))).astype(x.dtype)


@lowers("log_normal_", "aten::log_normal")
def log_normal_(site: Site, x, mean=1.0, std=2.0, *, generator=None):
    """Log-normal, in place."""
    return jnp.exp(mean + std * jax.random.normal(site.keys.next(), x.shape, _float(x.dtype))).astype(x.dtype)


@lowers("random_", "aten::random")
def random_(site: Site, x, *args, generator=None, **bounds):
    """Integers of [from, to), in place; without bounds all that the dtype can hold exactly."""
    args = [*args, *(bounds[name] for name in ("from", "to") if bounds.get(name) is not None)]
    args = [arg for arg in args if arg is not None]
    low, high = (0, args[0]) if len(args) == 1 else (args if len(args) == 2 else (0, _exact_range(x.dtype)))
    return jax.random.randint(site.keys.next(), x.shape, low, high, jnp.int64).astype(x.dtype)


def _exact_range(dtype) -> int:
    if jnp.issubdtype(dtype, jnp.floating):
        return 2 ** (jnp.finfo(dtype).nmant + 1)
    return 2 if dtype == jnp.bool_ else int(jnp.iinfo(dtype).max)


@lowers("multinomial")
def multinomial(site: Site, x, num_samples, replacement=False, *, generator=None):
    """Indices drawn by weight along the last dimension."""
    logits = jnp.log(x.astype(_float(x.dtype)))
    if replacement:
        drawn = jax.random.categorical(site.keys.next(), logits, axis=-1, shape=(num_samples, *x.shape[:-1]))
        return jnp.moveaxis(drawn, 0, -1)
    gumbel = jax.random.gumbel(site.keys.next(), x.shape, logits.dtype)
    return jnp.argsort(logits + gumbel, axis=-1, descending=True)[..., :num_samples]


@lowers("poisson")
def poisson(site: Site, x, generator=None):
    """Poisson counts of the rates `x`."""
    return jax.random.poisson(site.keys.next(), x).astype(x.dtype)


def dropped(site: Site, x, p: float, shape):
    """`x` with elements dropped, the mask drawn in `shape` and broadcast."""
    if p >= 1:
        return x * jnp.zeros((), x.dtype)
    keep = _uniform(site, shape, jnp.float32) >= p
    return jnp.where(keep, x / as_array(1 - p, x.dtype), 0)


@lowers("F.dropout", "dropout")
def dropout(site: Site, x, p=0.5, training=True, inplace=False):
    """Each element dropped with probability p."""
    return dropped(site, x, p, x.shape) if training and p > 0 else x


@lowers("F.dropout1d", "F.dropout2d", "F.dropout3d", "feature_dropout")
def feature_dropout(site: Site, x, p=0.5, training=True, inplace=False):
    """Whole channels dropped."""
    spatial = {"dropout1d": 1, "dropout2d": 2, "dropout3d": 3}.get(getattr(site.node.target, "__name__", ""), x.ndim - 2)
    lead = x.shape[: x.ndim - spatial]
    return dropped(site, x, p, lead + (1,) * spatial) if training and p > 0 else x


@lowers("aten::native_dropout")
def native_dropout(site: Site, x, p, train):
    """`(out, mask)`."""
    if train is False or p == 0:
        return x, jnp.ones(x.shape, bool)
    keep = _uniform(site, x.shape, jnp.float32) >= p
    return jnp.where(keep, x / as_array(max(1 - p, 1e-30), x.dtype), 0), keep


@lowers("F.rrelu")
def rrelu(site: Site, x, lower=1 / 8, upper=1 / 3, training=False, inplace=False):
    """Leaky ReLU with random slopes in training."""
    slope = lower + (upper - lower) * _uniform(site, x.shape) if training else (lower + upper) / 2
    return jnp.where(x >= 0, x, x * slope)
