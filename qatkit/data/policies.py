"""torchvision's augmentation policies, drawn image by image from sources of random numbers given by the caller."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2

# TrivialAugment: Müller and Hutter, ICCV 2021, https://arxiv.org/abs/2103.10158. RandAugment: Cubuk et al., 2019,
# https://arxiv.org/abs/1909.13719. AutoAugment: Cubuk et al., CVPR 2019, https://arxiv.org/abs/1805.09501 (the
# policy found on ImageNet). AugMix: Hendrycks et al., ICLR 2020, https://arxiv.org/abs/1912.02781.
_POLICIES: dict[str, Any] = {
    "trivial_augment": v2.TrivialAugmentWide,
    "rand_augment": v2.RandAugment,
    "auto_augment": v2.AutoAugment,
    "aug_mix": v2.AugMix,
}


def apply_policy(batch: Tensor, policy: str, draws: Sequence[random.Random]) -> Tensor:
    """Applies a policy to each image of a batch.

    torchvision draws from torch's global generator. It is seeded from each image's own source and restored after
    the batch, so the change of an image depends only on its own source, and later random numbers in training
    are not affected.

    Args:
        batch: float32 (N, 1 or 3, height, width) in 0..255; it is rounded to integers, since policies work on
            uint8.
        policy: one of the choices of `data.policy` except `none`.
        draws: one source of random numbers per image.

    Returns:
        float32 (N, channels, height, width) in 0..255.
    """
    change = _POLICIES[policy]()
    with torch.random.fork_rng(devices=[]):
        changed = list[Tensor]()
        for image, draw in zip(batch.round().to(torch.uint8), draws, strict=True):
            torch.default_generator.manual_seed(draw.getrandbits(63))
            changed.append(change(image))
    return torch.stack(changed).float()
