"""A diffusers denoising loop: compile the network, leave the scheduler to eager.

python examples/recipe_diffusers.py
"""

from __future__ import annotations

import torch
from diffusers import DDIMScheduler, UNet2DModel

import pure_backend


def denoise(network, steps: int = 5) -> torch.Tensor:
    """An image f32[1, 3, 16, 16] from noise."""
    scheduler = DDIMScheduler(num_train_timesteps=100)
    scheduler.set_timesteps(steps)
    image = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for timestep in scheduler.timesteps:  # a tensor: as a number it would be compiled again at each step
            image = scheduler.step(network(image, timestep).sample, timestep, image).prev_sample
    return image


def main() -> tuple[float, pure_backend.Statistics]:
    """The largest difference of a pixel to eager's."""
    torch.manual_seed(0)
    network = UNet2DModel(
        sample_size=16,
        block_out_channels=(32, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    ).eval()
    pure_backend.reset_statistics()
    image = denoise(torch.compile(network, backend="assume_pure"))
    counts = pure_backend.statistics()
    difference = (image - denoise(network)).abs().max().item()
    print(f"largest difference of a pixel: {difference:.1e}; {counts.traces} trace for 5 steps")
    return difference, counts


if __name__ == "__main__":
    main()
