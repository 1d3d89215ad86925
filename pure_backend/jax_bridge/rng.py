"""One key per call, drawn from torch's own generator, so that `torch.manual_seed` reproduces and every call differs."""

from __future__ import annotations

from typing import Any

import jax
import torch

from pure_backend.ir.layout import MeshOfRanks

KEY_SHAPE = (2,)
"""A key enters a program as `u32[2]`, the raw data of a threefry key. It is the last argument and counted among no inputs."""


KEY = jax.ShapeDtypeStruct(KEY_SHAPE, "uint32")
"""Its abstract value."""

NO_KEY = torch.zeros(KEY_SHAPE, dtype=torch.uint32)
"""What a program that reads no key is given."""


def draw_key(device: torch.device, mesh: MeshOfRanks | None = None) -> torch.Tensor:
    """Fresh key data from torch's default CPU generator, which it advances.

    Args:
        device: Where it is wanted.
        mesh: If the program runs on one, all its ranks get the key of the first.

    Returns:
        `u32[2]` on `device`.
    """
    drawn = torch.randint(0, 2**32, KEY_SHAPE, dtype=torch.int64)
    if mesh is not None:
        torch.distributed.broadcast(drawn, 0)
    high, low = drawn.tolist()
    key = torch.tensor([high, low], dtype=torch.uint32)
    return key if device.type == "cpu" else key.to(device)


class KeyStream:
    """The keys of the random operators of one trace: the n-th one gets the call's key folded with n."""

    def __init__(self, key_data: jax.Array) -> None:
        self._key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
        self.used = 0

    def next(self) -> jax.Array:
        """A key that no other operator of the trace has."""
        self.used += 1
        return jax.random.fold_in(self._key, self.used)

    def data_for_body(self) -> jax.Array:
        """Key data for a nested body that is traced on its own: a stream of its own, which no operator out here shares."""
        return jax.random.key_data(jax.random.fold_in(self._key, self.used + 1))

    def note_body(self, draws: bool) -> None:
        """Count the body that was given `data_for_body`, if it draws keys."""
        self.used += draws


def fold_data(key_data: jax.Array, index: Any) -> jax.Array:
    """Key data for one step of a loop."""
    return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key_data, impl="threefry2x32"), index))
