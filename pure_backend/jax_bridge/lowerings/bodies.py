"""The body of a higher-order operator as a JAX function, for lowerings that trace it apart from the graph around it.

What JAX traces apart (a branch, a loop's step, a nested jit, a custom derivative) must not use values of the trace around it
other than its arguments. A body's tensors are its arguments anyway; its random key is made one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch
from torch import fx
from torch.utils import _pytree as pytree

from pure_backend.ir.describe import tensor_leaves
from pure_backend.ir.positions import with_values
from pure_backend.jax_bridge.lowerings.registry import Site
from pure_backend.jax_bridge.rng import KeyStream


class Body:
    """A body as a function of `(key data, *arrays)`.

    Attributes:
        draws: Whether a trace of it drew a random key.
    """

    def __init__(self, site: Site, gm: fx.GraphModule, operands: Sequence[Any]) -> None:
        """Take the body of `site`'s operator that is called with such operands; those that are no arrays are constants."""
        self._run = site.body
        self._gm = gm
        self._constants = [None if isinstance(operand, jax.Array) else operand for operand in operands]
        self._places = [i for i, operand in enumerate(operands) if isinstance(operand, jax.Array)]
        self.draws = False

    def arrays(self, operands: Sequence[Any]) -> list[jax.Array]:
        """The arrays among operands like those that the body was made for."""
        return [operands[i] for i in self._places]

    def leaves(self, key: jax.Array, *arrays: jax.Array) -> list[Any]:
        """All results, those that are no arrays too."""
        keys = KeyStream(key)
        results = self._run(self._gm, with_values(self._constants, self._places, arrays), keys)
        self.draws = self.draws or keys.used > 0
        return results

    def __call__(self, key: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """The results that are arrays."""
        return tuple(leaf for leaf in self.leaves(key, *arrays) if isinstance(leaf, jax.Array))


def results(site: Site, arrays: Sequence[jax.Array]) -> Any:
    """What the lowering of an operator that is its body returns, for all results of the body.

    A body gives its results, and then the new values of the inputs that it writes, in the order of the inputs.
    """
    count = len(tensor_leaves(site.out))
    result = structured(site.out, arrays[:count])
    if not site.writes:
        return result
    new = dict(zip(sorted(site.writes), arrays[count:], strict=True))
    return (result, *(new[write] for write in site.writes))


def structured(out: Any, arrays: Sequence[jax.Array]) -> Any:
    """Arrays in the places of the tensors of torch's own result."""
    leaves, spec = pytree.tree_flatten(out)
    remaining = iter(arrays)
    return pytree.tree_unflatten([next(remaining) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)
