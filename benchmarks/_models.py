"""The models that several scripts measure: the seed decoder of the examples, and a GPT-2 with random weights."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from seed_decoder import DecoderConfig as DecoderConfig
from seed_decoder import SeedDecoder as SeedDecoder
from seed_decoder import counting_batches as counting_batches
from seed_decoder import next_token_loss as next_token_loss


class DecoderLoss(nn.Module):
    """A seed decoder with its loss: tokens `i64[batch, seq + 1]` -> `f32[]`."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.decoder = SeedDecoder(DecoderConfig(layers=layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of the next tokens."""
        return next_token_loss(self.decoder(tokens[:, :-1]), tokens[:, 1:])


class GPT2Loss(nn.Module):
    """GPT-2 of transformers, as wide as GPT-2 small by default, with its loss: tokens `i64[batch, seq]` -> `f32[]`.

    Dropout is off: eager and compiled code would draw other numbers.
    """

    def __init__(self, layers: int, width: int = 768, heads: int = 12, vocab: int = 8192) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=vocab,
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.model = GPT2LMHeadModel(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of the next tokens."""
        logits = self.model(input_ids=tokens).logits
        return next_token_loss(logits[:, :-1], tokens[:, 1:])
