"""Repetitions in sequences, against what a slow search says."""

import random

import pytest

from pure_backend.ir.repetition import repetitions

LAYER = list("abcdefghijklmnop")


def shown(items, shortest=8):
    return [(r.starts, r.length) for r in repetitions(items, shortest)]


def test_a_chain_of_layers():
    assert shown([*"xyz", *LAYER * 5, *"END"]) == [((3, 19, 35, 51, 67), 16)]


def test_a_function_called_in_places():
    assert shown([*"xyz", *LAYER, 1, *LAYER, 2, *LAYER, 3, 4, 5, *LAYER]) == [((3, 20, 37, 56), 16)]


def test_short_layers_are_taken_together():
    ((starts, length),) = shown(["linear", "tanh"] * 60)
    assert length == 8
    assert starts == tuple(range(0, 120, 8))


@pytest.mark.parametrize("items", [[], ["a"], list("abcdefgh"), list(range(200))])
def test_nothing_repeats(items):
    assert shown(items) == []


@pytest.mark.parametrize("seed", range(20))
def test_stretches_are_equal_and_apart(seed):
    generator = random.Random(seed)
    words = [[generator.randrange(4) for _ in range(generator.randrange(1, 30))] for _ in range(4)]
    items = [item for _ in range(30) for item in generator.choice(words)]
    found = repetitions(items, 6)
    taken = [place for r in found for start in r.starts for place in range(start, start + r.length)]
    assert len(taken) == len(set(taken))
    for r in found:
        assert r.length >= 6
        assert len({tuple(items[start : start + r.length]) for start in r.starts}) == 1
        assert len(r.starts) > 1
