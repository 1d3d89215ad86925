"""Only tensors are inputs."""

import torch
from propagated import with_facts
from torch import fx

from pure_backend.fx_passes.mutation import functionalize
from pure_backend.fx_passes.tensors import tensors_only


def test_numbers_become_constants():
    gm = with_facts(fx.symbolic_trace(lambda n, x, flag: x * n), 3, torch.ones(2), None)
    functional = tensors_only(functionalize(gm))
    functional.gm.recompile()
    assert functional.inputs.sources == (1,)
    assert functional.gm(torch.ones(2))[0].tolist() == [3, 3]
