"""LoRA fine-tuning with PEFT: adapt, then compile.

python examples/recipe_lora.py

`get_peft_model` replaces modules, so compile what it returns. Only the adapters have gradients, and frozen weights get none.
"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import pure_backend


def train(compiled: bool) -> list[float]:
    """The losses of five steps."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
    forward = torch.compile(model, backend="assume_pure") if compiled else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    tokens = torch.arange(4 * 16).mul(5).remainder(64).view(4, 16)
    losses = []
    for _ in range(5):
        loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> tuple[list[float], list[float], pure_backend.Statistics]:
    """Train both ways and print the losses."""
    eager = train(compiled=False)
    pure_backend.reset_statistics()
    losses = train(compiled=True)
    counts = pure_backend.statistics()
    print("eager:   ", eager)
    print("compiled:", losses)
    print(f"{counts.traces} trace, {counts.lowerings} lowerings")
    return eager, losses, counts


if __name__ == "__main__":
    main()
