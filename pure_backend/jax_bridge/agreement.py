"""Ranks agree on a program before they run it: with different ones they would wait for each other for ever."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pure_backend.errors import RanksDisagreeError
from pure_backend.ir.layout import MeshOfRanks, time_limit


class Agreement:
    """What the ranks of a mesh tell each other through torch's store, one program after the other."""

    def __init__(self, mesh: MeshOfRanks) -> None:
        self.mesh = mesh
        self.programs = 0

    def same(self, text: str, arrays: Sequence[Any]) -> None:
        """Whether all ranks have the same program for the same arguments; those that every rank has are equal.

        Raises:
            RanksDisagreeError: They have not, or a rank does not come; said on every rank.
        """
        self.programs += 1
        seen = self._exchange("program", [_digest(text.encode()), *map(_described, arrays)])
        first = seen[self.mesh.ranks[0]]
        for rank in self.mesh.ranks:
            if seen[rank] != first:
                raise RanksDisagreeError(
                    f"rank {rank} has another program than rank {self.mesh.ranks[0]}: {_difference(first, seen[rank])}"
                )

    def wait(self, what: str) -> None:
        """Wait until all ranks have come here.

        Raises:
            RanksDisagreeError: A rank does not come in time.
        """
        self._exchange("ready", [what])

    def _exchange(self, topic: str, told: list[str]) -> dict[int, list[str]]:
        store = torch.distributed.distributed_c10d._get_default_store()
        own = torch.distributed.get_rank()
        name = f"pure_backend/{self.mesh.shape}/{self.mesh.ranks}/{topic}/{self.programs}"
        store.set(f"{name}/{own}", json.dumps(told))
        return {rank: self._read(store, f"{name}/{rank}", rank) for rank in self.mesh.ranks}

    def _read(self, store: Any, key: str, rank: int) -> list[str]:
        limit = time_limit()
        try:
            store.wait([key], datetime.timedelta(seconds=limit))
        except RuntimeError as error:
            raise RanksDisagreeError(
                f"rank {rank} has not come to program {self.programs} over {self.mesh} within {limit:g} s: it "
                "died, runs in eager, or calls another program"
            ) from error
        return json.loads(store.get(key))


def _digest(content: Any) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _described(array: Any) -> str:
    """Shape, dtype and placement of an argument, and the values of one that every rank has."""
    text = f"{array.dtype}{list(array.shape)} {array.sharding.spec}"
    if not array.sharding.is_fully_replicated:
        return text
    return f"{text} {_digest(np.ascontiguousarray(np.asarray(array.addressable_data(0))).view(np.uint8))}"


def _difference(first: Sequence[str], other: Sequence[str]) -> str:
    if len(first) != len(other):
        return f"{len(first) - 1} inputs, and {len(other) - 1}"
    for position, (a, b) in enumerate(zip(first[1:], other[1:], strict=True)):
        if a != b:
            values = a.rsplit(" ", 1)[0] == b.rsplit(" ", 1)[0]
            return f"input {position} is {a}, and {b}" + (": every rank has it whole, with other values" if values else "")
    return "the same inputs, and another computation"
