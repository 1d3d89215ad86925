"""The program of a torch function, captured and not run."""

import torch
from wrappers import Pair

from pure_backend.inspect.torch_program import capture


def test_names_of_the_tensors_inside_of_subclasses():
    """Each is an input, and the random key is the last."""
    pair, y = Pair.of(torch.ones(4, 3), torch.ones(4, 3) * 2), torch.ones(4, 3)
    program = capture(lambda p, y: (p * y).a.sin(), (pair, y), {}, (), False)
    first, second, third, key = program.inputs
    assert first.startswith("l_p") and second.startswith("l_p") and (third, key) == ("l_y", "key")
    assert [v.aval.shape for v in program.jaxpr.jaxpr.invars] == [(4, 3), (4, 3), (4, 3), (2,)]
