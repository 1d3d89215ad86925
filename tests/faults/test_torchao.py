"""Models quantized by torchao: one program, with eager's values and eager's gradients."""

import contextlib
import warnings

import pytest
import torch
from oracle import compiled
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import pure_backend
from pure_backend.ir.failures import faults_raised

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecations inside of torchao, and kernels that it does not find
    from torchao import quantization


def llama(width: int = 64, layers: int = 2) -> LlamaForCausalLM:
    """A small Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval()


def quantized(model: nn.Module, config: str, **settings) -> nn.Module:
    """The model with the weights of its linear layers quantized."""
    make = getattr(quantization, config)
    if "set_inductor_config" in make.__dataclass_fields__:  # it would set torch's matmul precision for the process
        settings["set_inductor_config"] = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization.quantize_(model, make(**settings))
    return model


CONFIGS = {
    "Int8WeightOnlyConfig": 1e-5,
    "Float8WeightOnlyConfig": 1e-5,
    "IntxWeightOnlyConfig": 1e-5,
    "Int8DynamicActivationInt8WeightConfig": 2e-2,  # a sum in another order may round an activation to the next integer
}
IDS = torch.arange(12).reshape(2, 6)


@contextlib.contextmanager
def one_program(parts: int = 1):
    """Assert that what is inside makes one graph, one program for each of its `parts`, and leaves nothing to eager."""
    with faults_raised():
        yield
    statistics = pure_backend.statistics()
    assert (statistics.traces, statistics.lowerings) == (1, parts)


@pytest.mark.filterwarnings("ignore:.*torchao.*", "ignore:Deprecation")
@pytest.mark.parametrize("config", CONFIGS)
def test_a_quantized_llama(config):
    model = quantized(llama(), config)
    with torch.no_grad():
        want = model(IDS).logits
        call = compiled(model, options={"on_impure": "error"}, fullgraph=True)
        with one_program():
            for _ in range(2):
                torch.testing.assert_close(call(IDS).logits, want, rtol=CONFIGS[config], atol=CONFIGS[config])


def test_at_width_512():
    model = quantized(llama(512), "Int8WeightOnlyConfig")
    with torch.no_grad(), one_program():
        got = compiled(model, options={"on_impure": "error"})(IDS).logits
        torch.testing.assert_close(got, model(IDS).logits, rtol=1e-4, atol=1e-4)


class LoRA(nn.Module):
    """A frozen linear layer and what is learnt beside it."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen
        self.a = nn.Parameter(torch.randn(frozen.in_features, rank) / 8)
        self.b = nn.Parameter(torch.randn(rank, frozen.out_features) / 8)

    def forward(self, x):
        return self.frozen(x) + x @ self.a @ self.b


def with_lora(model: nn.Module) -> nn.Module:
    """The model with a `LoRA` in the place of its attention's and its MLP's linear layers; all else is frozen."""
    model.requires_grad_(False)
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, LoRA(child))
    return model


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_gradients_of_a_lora(config):
    model = with_lora(quantized(llama(), config))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 28
    found = []
    for call in (model, compiled(model, options={"on_impure": "error"})):
        pure_backend.reset_statistics()
        loss = call(IDS, labels=IDS).loss
        loss.backward()
        found.append({"loss": loss.detach()} | {name: p.grad for name, p in trained.items()})
        model.zero_grad()
    assert pure_backend.statistics().traces == 1
    for name, want in found[0].items():
        torch.testing.assert_close(found[1][name], want, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.xla
def test_on_xla_tensors():
    import torch_xla

    with torch.no_grad():
        model = quantized(llama(layers=1), "Int8WeightOnlyConfig")
        want = model(IDS).logits
        model = model.to(torch_xla.device())
        with one_program():
            got = compiled(model, options={"on_impure": "error"})(IDS.to(torch_xla.device())).logits.cpu()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_training_step_of_a_lora():
    """`TrainStep` holds the frozen weights as they are."""
    losses = []
    for whole in (False, True):
        model = with_lora(quantized(llama(layers=1), "Int8WeightOnlyConfig"))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)
        step = pure_backend.TrainStep(model, optimizer, lambda model, ids: model(ids, labels=ids).loss)
        losses.append([])
        for _ in range(3):
            losses[-1].append(step(IDS) if whole else eager_step(model, optimizer))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)


def eager_step(model, optimizer):
    optimizer.zero_grad()
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    optimizer.step()
    return loss.detach()
