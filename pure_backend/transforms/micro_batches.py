"""The micro-batches of gradient accumulation: a step is captured with the first one and runs on all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary


class MicroBatches:
    """Cuts batches, and knows of each first micro-batch what it was cut from, as long as it lives.

    Args:
        count: How many micro-batches each batch is split into, along the first dimension of its tensors.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._whole = WeakTensorKeyDictionary()

    def first(self, leaf: Any) -> Any:
        """The first micro-batch of a leaf of the batch; a 0-d tensor is the same in all.

        Raises:
            ValueError: A tensor cannot be split equally.
        """
        if self.count == 1 or not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.ndim == 0:
            self._whole[leaf] = None  # itself, which an entry must not keep
            return leaf
        if leaf.shape[0] % self.count:
            raise ValueError(
                f"TrainStep: a tensor of shape {tuple(leaf.shape)} cannot be split into grad_accumulation={self.count} equal "
                "micro-batches along its first dimension"
            )
        micro = leaf.narrow(0, 0, leaf.shape[0] // self.count)
        self._whole[micro] = leaf
        return micro

    def knows(self, arg: Any) -> bool:
        """Whether an argument of a graph is of the batch."""
        return isinstance(arg, torch.Tensor) and arg in self._whole

    def whole(self, arg: torch.Tensor) -> torch.Tensor:
        """The tensor that the user gave, of which the graph is given an argument."""
        found = self._whole[arg]
        return arg if found is None else found
