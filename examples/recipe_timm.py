"""An image classifier of timm, trained and evaluated: BatchNorm's statistics are written inside of the program.

python examples/recipe_timm.py
"""

from __future__ import annotations

import timm
import torch

import pure_backend


def train(compiled: bool) -> list[float]:
    """The losses of three steps, and the mean logit in evaluation."""
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=10)
    forward = torch.compile(model, backend="assume_pure") if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(4, 3, 64, 64), torch.tensor([1, 5, 3, 7])
    losses = []
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(forward(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        return [*losses, forward(images).mean().item()]


def main() -> tuple[list[float], list[float], pure_backend.Statistics]:
    """Train both ways and print the losses."""
    eager = train(compiled=False)
    pure_backend.reset_statistics()
    losses = train(compiled=True)
    counts = pure_backend.statistics()
    print("eager:   ", eager)
    print("compiled:", losses)
    print(f"{counts.traces} traces: training and evaluation; {counts.lowerings} lowerings")
    return eager, losses, counts


if __name__ == "__main__":
    main()
