"""Tests of one small model of every torchvision family, through all steps, compared with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
import torchvision
from chain import noise, run_ort, run_torch, settle, ship, small_mvit
from torch import nn
from torchvision.models import MaxVit, SwinTransformer, swin_transformer
from torchvision.models.video.s3d import SepInceptionBlock3D, TemporalSeparableConv
from torchvision.models.video.swin_transformer import SwinTransformer3d

from qatkit.verify.audit import audit


def swin(version: int) -> nn.Module:
    parts: dict[str, Any] = {}
    if version == 2:
        parts = {"block": swin_transformer.SwinTransformerBlockV2,
                 "downsample_layer": swin_transformer.PatchMergingV2}  # fmt: skip
    return cast(nn.Module, SwinTransformer([4, 4], 24, [2, 2], [3, 6], [4, 4], num_classes=10, **parts))


def named(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: cast(nn.Module, torchvision.models.get_model(name, num_classes=10, **options))


def maxvit() -> nn.Module:
    return cast(nn.Module, MaxVit((64, 64), 16, 4, [16, 32], [1, 1], 16, 0.0, num_classes=10))


def small_swin3d() -> nn.Module:
    return cast(nn.Module, SwinTransformer3d([2, 4, 4], 48, [2, 2], [3, 6], [2, 2, 2], num_classes=10))


def small_s3d() -> nn.Module:
    """Returns the stem, one block and the head of S3D."""
    norm = partial(nn.BatchNorm3d, eps=0.001)
    return nn.Sequential(
        TemporalSeparableConv(3, 16, 7, 2, 3, norm), nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1)),
        SepInceptionBlock3D(16, 8, 8, 16, 4, 8, 8, norm), nn.AvgPool3d((2, 7, 7), 1), nn.Conv3d(40, 10, 1),
        nn.Flatten(),
    )  # fmt: skip


def short_convnext() -> nn.Module:
    model = torchvision.models.convnext_tiny(num_classes=10)
    for stage in (1, 3, 5, 7):
        model.features[stage] = model.features[stage][:1]
    return cast(nn.Module, model)


# A model, the image size, the minimum share of multiply-accumulates in int8, and whether every quantized
# value must be equal (with a float residual stream, a few values round differently).
FAMILIES: dict[str, tuple[Callable[[], nn.Module], int, float, bool]] = {
    "alexnet": (named("alexnet"), 64, 1.0, True),
    "squeezenet": (named("squeezenet1_1"), 64, 1.0, True),
    "shufflenet": (named("shufflenet_v2_x0_5"), 64, 1.0, True),
    "mnasnet": (named("mnasnet0_5"), 64, 1.0, True),
    "regnet_y": (named("regnet_y_400mf"), 64, 1.0, True),
    "densenet": (lambda: torchvision.models.DenseNet(8, (2, 2), 16, num_classes=10), 32, 1.0, True),
    "googlenet": (named("googlenet", init_weights=False), 64, 1.0, True),
    "convnext": (short_convnext, 64, 0.99, False),
    "swin": (lambda: swin(1), 64, 0.9, False),
    "swin_v2": (lambda: swin(2), 64, 0.9, False),
    "maxvit": (maxvit, 64, 0.9, False),
}
# The same for clips [3, frames, height, width].
CLIPS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float, bool]] = {
    "s3d": (small_s3d, (3, 4, 28, 28), 1.0, True),
    "mvit_v1": (lambda: small_mvit(1), (3, 4, 32, 32), 0.9, False),
    "mvit_v2": (lambda: small_mvit(2), (3, 4, 32, 32), 0.9, False),
    "swin3d": (small_swin3d, (3, 8, 32, 32), 0.9, False),
}


def check(model: nn.Module, shape: tuple[int, ...], share: float, exact: bool, name: str) -> None:
    """Exports `model` and compares ONNX Runtime, optimized and not, with the converted module."""
    case = ship(model, noise(8, *shape), f"family_{name}")
    found = audit(case.path, allow_float=["*.relative"])  # MViT's products with position embeddings
    assert found.ok, found.problems
    assert found.int8_share >= share
    images = noise(16, *shape, seed=3)
    expected = run_torch(case.converted, images)
    span, floating = np.ptp(expected), run_torch(model, images)
    assert span > 0
    # A float residual stream propagates every rounding difference: one output step on average. The random
    # weights of the full Swin V2 amplify it beyond that, but not beyond the quantization error itself.
    limit = np.abs(expected - floating).mean() if name == "swin_v2_t" else span / 255
    for optimize in (False, True):
        got = run_ort(case.path, images, optimize=optimize)
        difference = np.abs(got - expected)
        assert difference.max() <= 1e-5 * span if exact else difference.mean() <= limit
    assert np.abs(run_torch(case.simulated, images) - floating).max() < 0.5 * span


# Models that take longer than all others together, or that have a newer relative in the list.
_LONG = (
    *("regnet_y", "googlenet", "maxvit", "mnasnet", "swin", "swin_v2", "squeezenet", "alexnet", "shufflenet"),
    *("mvit_v1", "mvit_v2"),
)


def _names(models: Collection[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in _LONG else name for name in models]


@pytest.mark.parametrize("name", _names(FAMILIES))
def test_a_small_model_of_the_family(name: str) -> None:
    build, size, share, exact = FAMILIES[name]
    torch.manual_seed(0)
    check(settle(build(), 3, size, size), (3, size, size), share, exact, name)


@pytest.mark.parametrize("name", _names(CLIPS))
def test_a_small_model_of_clips(name: str) -> None:
    build, shape, share, exact = CLIPS[name]
    torch.manual_seed(0)
    check(settle(build(), *shape), shape, share, exact, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inception_v3", "densenet121", "convnext_tiny", "swin_t", "swin_v2_t",
                                  "efficientnet_v2_s", "resnext50_32x4d", "vgg11_bn"])  # fmt: skip
def test_a_whole_model_of_the_family(name: str) -> None:
    torch.manual_seed(0)
    size = 299 if name == "inception_v3" else 64
    options = {"init_weights": False} if name == "inception_v3" else {}
    model = settle(named(name, **options)(), 3, size, size)
    transformer = name.startswith(("swin", "convnext"))
    check(model, (3, size, size), 0.9 if transformer else 1.0, not transformer, name)
