"""Hugging Face `Trainer` with the backend: compile `model.forward`, and leave the trainer's own option alone.

python examples/recipe_trainer.py

`TrainingArguments(torch_compile_backend=...)` hands the name to accelerate, whose list of backends is closed ("'ASSUME_PURE' is
not a valid DynamoBackend"). Compiling the method before the trainer sees the model needs no list. The model keeps its class, so
saving, generating and PEFT see what they expect.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import pure_backend


class Sentences(torch.utils.data.Dataset):
    """32 sentences of 17 counting tokens."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(17) * (i % 5 + 1) + i) % 64
        return {"input_ids": tokens, "labels": tokens}


def train(compiled: bool) -> list[float]:
    """The losses of six optimizer steps, two batches each."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    model = LlamaForCausalLM(config)
    if compiled:
        model.forward = torch.compile(model.forward, backend="assume_pure")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=6,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_grad_norm=1.0,
            learning_rate=1e-2,
            lr_scheduler_type="cosine",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            optim="adamw_torch",
            use_cpu=True,
            disable_tqdm=True,
            seed=0,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Sentences())
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


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
