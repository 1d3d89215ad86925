"""Text generation with a static cache: one program for prompts, one for tokens, however long the answer is.

python examples/recipe_generate.py

A static cache has the same shapes at every step, so the step that makes a token is compiled once. A prompt of another length is
another shape: pad prompts on the left to a few lengths (buckets), and each bucket is compiled once.
A prompt that fills its bucket has nothing to mask, and is one more.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pure_backend

BUCKETS = (8, 16)


def padded(prompt: torch.Tensor, pad: int) -> dict[str, torch.Tensor]:
    """A prompt `int64[1, n]` filled on the left to the next bucket, with its mask."""
    length = next(bucket for bucket in BUCKETS if bucket >= prompt.shape[1])
    missing = length - prompt.shape[1]
    ids = torch.nn.functional.pad(prompt, (missing, 0), value=pad)
    mask = torch.nn.functional.pad(torch.ones_like(prompt), (missing, 0))
    return {"input_ids": ids, "attention_mask": mask}


def main() -> tuple[list[bool], pure_backend.Statistics]:
    """Generate for prompts of three lengths, greedily and by sampling, and compare the greedy ones with eager."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    eager_forward = model.forward
    compiled_forward = torch.compile(model.forward, backend="assume_pure", dynamic=False)
    options = {"max_new_tokens": 12, "cache_implementation": "static", "disable_compile": True, "pad_token_id": 0}

    same = []
    pure_backend.reset_statistics()
    for length in (3, 5, 11):
        prompt = padded(torch.arange(2, 2 + length)[None] * 7 % 128, pad=0)
        model.forward = eager_forward
        expected = model.generate(**prompt, do_sample=False, **options)
        model.forward = compiled_forward
        tokens = model.generate(**prompt, do_sample=False, **options)
        same.append(torch.equal(tokens, expected))
    sampled = model.generate(**prompt, do_sample=True, temperature=0.8, **options)
    counts = pure_backend.statistics()
    print("greedy tokens equal eager's:", same, "a sample:", sampled[0, -12:].tolist())
    print(f"{counts.traces} traces: a prompt of each bucket, and a token after each")
    return same, counts


if __name__ == "__main__":
    main()
