"""Lightning: compile the network inside of the `LightningModule`, so that hooks, logging and checkpoints stay Lightning's.

python examples/recipe_lightning.py
"""

from __future__ import annotations

import lightning
import torch
from torch import nn

import pure_backend


class Network(nn.Module):
    """f32[batch, 32] -> f32[batch, 4]. A class, since torch compiles nothing where `nn.Sequential` is compiled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Classifier(lightning.LightningModule):
    """Trains a `Network`."""

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self.network = Network()
        if compiled:
            self.network.compile(backend="assume_pure")  # in place: the names of the parameters stay
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], batch_index: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(compiled: bool) -> list[float]:
    """The losses of two epochs of four batches."""
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(64, 32)
    data = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
    model = Classifier(compiled)
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=16))
    return model.losses


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
