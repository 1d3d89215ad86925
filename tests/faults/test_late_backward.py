"""A backward that cannot be made: known at the first backward only, when the forward has run."""

import jax
import pytest
import torch
from jax.extend import core
from oracle import compiled

from pure_backend import LoweringError
from pure_backend.jax_bridge.lowerings import registry

unknown = core.Primitive("unknown")
unknown.def_abstract_eval(lambda x: x)


@jax.custom_vjp
def odd(x):
    return x * 2


odd.defvjp(lambda x: (odd(x), x), lambda x, ct: (unknown.bind(ct) * x,))


def test_the_error_names_the_operator_and_the_line(monkeypatch):
    monkeypatch.setitem(registry._LOWERINGS, "sin", lambda site, x: odd(x))
    x = torch.ones(3, requires_grad=True)
    y = compiled(lambda x: x.sin() + 1)(x)
    with pytest.raises(LoweringError, match="backward of a compiled graph cannot be made") as raised:
        y.sum().backward()
    assert "- unknown(float32[3])" in str(raised.value)
    assert "test_late_backward.py" in str(raised.value)
    assert isinstance(raised.value.__cause__, NotImplementedError)
