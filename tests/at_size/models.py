"""Five networks of width 512 on at least 256 rows, as scalar losses: `model(**batch)`.

Each has two equal layers in a `ModuleList`, which `with_scanned_layers` puts into one loop.
"""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from pure_backend import scan_layers

WIDTH = 512
VOCABULARY = 256
CLASSES = 16

Batch = dict[str, torch.Tensor]
Make = Callable[[], tuple[nn.Module, Callable[[], Batch]]]


class _Layered(nn.Module):
    """Layers one after the other between a first and a last one; the loss is a cross entropy."""

    def __init__(self, before: nn.Module, layers: list[nn.Module], after: nn.Module) -> None:
        super().__init__()
        self.before = before
        self.layers = nn.ModuleList(layers)
        self.after = after

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.before(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.after(hidden).flatten(0, -2), labels.flatten())


class _OwnLoss(nn.Module):
    """The loss that a Hugging Face model computes of its labels."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.net(**batch).loss


def mlp() -> tuple[nn.Module, Callable[[], Batch]]:
    """Linear layers of 2 x 128 rows."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(2)]
    net = _Layered(nn.Linear(WIDTH, WIDTH), layers, nn.Linear(WIDTH, CLASSES))
    return net, lambda: {"inputs": torch.randn(2, 128, WIDTH), "labels": torch.randint(CLASSES, (2, 128))}


def convolutions() -> tuple[nn.Module, Callable[[], Batch]]:
    """Convolutions with batch statistics between them, on 2 x 12 x 12 pixels."""

    def layer() -> nn.Module:
        return nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 1, bias=False), nn.BatchNorm2d(WIDTH), nn.GELU())

    after = nn.Sequential(nn.Flatten(2), _Transposed(), nn.Linear(WIDTH, CLASSES))
    before = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), nn.GELU(), nn.Conv2d(WIDTH, WIDTH, 3, padding=1))
    net = _Layered(before, [layer(), layer()], after)
    return net, lambda: {"inputs": torch.randn(2, 3, 12, 12), "labels": torch.randint(CLASSES, (2, 144))}


class _Transposed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)


_TRANSFORMER: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}
_LANGUAGE = {"vocab_size": VOCABULARY, "max_position_embeddings": 128, "pad_token_id": 0}


def _tokens() -> Batch:
    tokens = torch.randint(4, VOCABULARY, (2, 128))
    return {"input_ids": tokens, "labels": tokens.clone()}


def llama() -> tuple[nn.Module, Callable[[], Batch]]:
    """Rotary embeddings, grouped queries, gated feed-forward."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _OwnLoss(LlamaForCausalLM(LlamaConfig(**_TRANSFORMER, **_LANGUAGE, num_key_value_heads=4))), _tokens


def bert() -> tuple[nn.Module, Callable[[], Batch]]:
    """A masked language model, its embedding tied to its head."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(**_TRANSFORMER, **_LANGUAGE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return _OwnLoss(BertForMaskedLM(config)), _tokens


def vit() -> tuple[nn.Module, Callable[[], Batch]]:
    """Patches through a convolution, 4 x 65 rows."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        **_TRANSFORMER,
        image_size=32,
        patch_size=4,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    net = _OwnLoss(ViTForImageClassification(config))
    return net, lambda: {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(CLASSES, (4,))}


_OWN: list[Make] = [mlp, convolutions]
_TRANSFORMERS: list[Make] = [llama, bert, vit]
MODELS = _OWN + (_TRANSFORMERS if importlib.util.find_spec("transformers") else [])


def with_scanned_layers(model: nn.Module) -> nn.Module:
    """The model, changed so that its layers are called as one loop."""
    owner, name, layers = next(_lists_of_layers(model))
    setattr(owner, name, nn.ModuleList([_Scanned(layers)]))
    return model


def _lists_of_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.ModuleList]]:
    for owner in model.modules():
        for name, child in owner.named_children():
            if isinstance(child, nn.ModuleList):
                yield owner, name, child


class _Scanned(nn.Module):
    """Layers as one: what they are all given besides the first argument is spread into tensors for `scan_layers`."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(_Spread, layers))

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for layer in self.layers:
            layer.spread = leaves, spec
        return scan_layers(self.layers, hidden, *tensors)


class _Spread(nn.Module):
    """A layer that is given only tensors."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        for module in layer.modules():
            module.__dict__.pop("layer_idx", None)  # the place in a cache that training does not have; layers differ in it
            if type(module).__module__.startswith("transformers."):
                module.layer_idx = 0

    def forward(self, hidden: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        leaves, spec = self.spread
        given = iter(tensors)
        args, kwargs = pytree.tree_unflatten([next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)
        return self.layer(hidden, *args, **kwargs)
