"""Plants outlier channels in a torchvision VisionTransformer without changing its function.

    uv run benchmarks/planted_outliers.py vit_cifar10.pt planted.pt

In each LayerNorm before an attention or an MLP, `--channels` output channels become `--factor` times as large, and the
weights of the next layer that multiply them are divided by the factor. If it is a power of two, every product of the
float model stays exactly the same. The channels with the largest of these weights are chosen, so that 8-bit weights can
still represent them after the division.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

_READERS = {"ln_1": "self_attention.in_proj_weight", "ln_2": "mlp.0.weight"}


def plant(state: dict[str, Tensor], factor: float, channels: int) -> int:
    """Plants the outliers in `state`, in place; returns the number of LayerNorms that have them."""
    norms = [key.removesuffix(".weight") for key in state if key.endswith((".ln_1.weight", ".ln_2.weight"))]
    for norm in norms:
        layer, _, name = norm.rpartition(".")
        weight = state[f"{layer}.{_READERS[name]}"]
        chosen = weight.abs().amax(0).topk(channels).indices
        state[f"{norm}.weight"][chosen] *= factor
        state[f"{norm}.bias"][chosen] *= factor
        weight[:, chosen] /= factor
    return len(norms)


def main() -> None:
    """Reads a state_dict, plants the outliers and writes the new state_dict."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="state_dict of a torchvision VisionTransformer")
    parser.add_argument("target", type=Path, help="file for the changed state_dict")
    parser.add_argument(
        "--factor", type=float, default=32.0, help="factor of the chosen channels, a power of two"
    )
    parser.add_argument("--channels", type=int, default=1, help="number of channels per LayerNorm")
    given = parser.parse_args()
    state = torch.load(given.source, map_location="cpu", weights_only=True)
    norms = plant(state, given.factor, given.channels)
    torch.save(state, given.target)
    print(
        f"{norms} LayerNorms with {given.channels} channels {given.factor:g} times as large: {given.target}"
    )


if __name__ == "__main__":
    main()
