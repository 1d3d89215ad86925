"""Inference with torchao's int8 weights: quantize, then compile. The weights stay int8 in memory, and the model is one program.

python examples/recipe_quantized.py
"""

from __future__ import annotations

import torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import LlamaConfig, LlamaForCausalLM

import pure_backend


def main() -> tuple[float, pure_backend.Statistics]:
    """The largest difference of a logit to eager's, of the quantized model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    quantize_(model, Int8WeightOnlyConfig())
    compiled = torch.compile(model, backend="assume_pure", fullgraph=True)
    tokens = torch.arange(2 * 16).mul(5).remainder(64).view(2, 16)
    pure_backend.reset_statistics()
    with torch.no_grad():
        difference = (compiled(tokens, use_cache=False).logits - model(tokens, use_cache=False).logits).abs().max().item()
    counts = pure_backend.statistics()
    print(f"largest difference of a logit: {difference:.1e}; {counts.traces} trace, {counts.lowerings} lowering")
    return difference, counts


if __name__ == "__main__":
    main()
