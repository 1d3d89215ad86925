"""A small decoder with the shipped kernels in it, compiled for TPU: every kernel is inline in the one program."""

import importlib.util
import pathlib
import sys

import pytest
import torch
from torch import nn

from pure_backend.custom_ops import kernels
from pure_backend.inspect import compile_for_tpu

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "seed_decoder.py"
LAYERS = 1


def seed_decoder():
    spec = importlib.util.spec_from_file_location("seed_decoder_of_tests", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass asks for it
    spec.loader.exec_module(module)
    return module


class Norm(nn.Module):
    """RMS normalization by the kernel, with the parameters of another."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, x):
        return kernels.rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Causal attention by the kernel, with the parameters of another."""

    def __init__(self, attention):
        super().__init__()
        self.inner = attention

    def forward(self, x):
        inner = self.inner
        query, key, value = (inner._split(project(x)) for project in (inner.query, inner.key, inner.value))
        return inner.output(kernels.flash_attention(query, key, value).transpose(1, 2).flatten(2))


@pytest.fixture(scope="module")
def decoder():
    """The seed decoder, and the same with kernels."""
    module = seed_decoder()
    plain = module.SeedDecoder(module.DecoderConfig(layers=LAYERS, hidden=64, intermediate=128, heads=2, vocab=32))
    with_kernels = module.SeedDecoder(module.DecoderConfig(layers=LAYERS, hidden=64, intermediate=128, heads=2, vocab=32))
    with_kernels.load_state_dict(plain.state_dict())
    for block in with_kernels.blocks:
        block.attention_norm, block.mlp_norm = Norm(block.attention_norm), Norm(block.mlp_norm)
        block.attention = Attention(block.attention)
    with_kernels.norm = Norm(with_kernels.norm)
    return plain, with_kernels


@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_kernels_are_inline(decoder, topology):
    """Forward: three kernels a block and the last norm. Backward: one a norm, two an attention, and no forward again."""
    tokens = torch.zeros(2, 9, dtype=torch.long)
    forward = compile_for_tpu(decoder[1], tokens, topology=topology)
    assert len(forward.kernels) == 3 * LAYERS + 1
    backward = compile_for_tpu(decoder[1], tokens, topology=topology, backward=True)
    assert len(backward.kernels) == 4 * LAYERS + 1
    assert len(backward.outputs) == len(list(decoder[1].parameters()))
    assert forward.memory.code and backward.cost["flops"] > forward.cost["flops"]


def test_the_same_logits_and_gradients(decoder):
    tokens = torch.randint(32, (2, 9))
    compiled = torch.compile(decoder[1], backend="assume_pure", fullgraph=True)
    want, got = decoder[0](tokens), compiled(tokens)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    want.square().mean().backward()
    got.square().mean().backward()
    grads = (p.grad for p in decoder[0].parameters())
    for (name, parameter), grad in zip(decoder[1].named_parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-3, atol=1e-5, msg=name)
