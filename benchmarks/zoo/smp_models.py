"""segmentation_models_pytorch: every decoder, several encoders, and one model with a classification head."""

from __future__ import annotations

from typing import Any

import segmentation_models_pytorch as smp
from torch import nn

from zoo.entry import Entry, image

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "unet_resnet18": ("Unet", "resnet18", {}),
    "unet_mobilenet_v2": ("Unet", "mobilenet_v2", {"decoder_attention_type": "scse"}),
    "unet_efficientnet_b0": ("Unet", "efficientnet-b0", {"aux_params": {"classes": 4, "pooling": "avg"}}),
    "unet_timm_mobilenetv3": ("Unet", "tu-mobilenetv3_small_050", {}),
    "unetplusplus_resnet18": ("UnetPlusPlus", "resnet18", {}),
    "manet_resnet18": ("MAnet", "resnet18", {}),
    "linknet_resnet18": ("Linknet", "resnet18", {}),
    "fpn_resnet18": ("FPN", "resnet18", {}),
    "fpn_mobileone_s0": ("FPN", "mobileone_s0", {}),
    "pspnet_resnet18": ("PSPNet", "resnet18", {}),
    "pan_resnet18": ("PAN", "resnet18", {}),
    "deeplabv3_resnet18": ("DeepLabV3", "resnet18", {}),
    "deeplabv3plus_mobilenet_v2": ("DeepLabV3Plus", "mobilenet_v2", {}),
    "upernet_resnet18": ("UPerNet", "resnet18", {}),
    "segformer_mit_b0": ("Segformer", "mit_b0", {}),
    "dpt_vit": (
        "DPT",
        "tu-vit_tiny_patch16_224",
        {"decoder_intermediate_channels": (16, 24, 32, 48), "decoder_fusion_channels": 16, "img_size": 64},
    ),
}


def _entry(name: str, decoder: str, encoder: str, more: dict[str, Any]) -> Entry:
    def build() -> nn.Module:
        model: nn.Module = getattr(smp, decoder)(
            encoder_name=encoder, encoder_weights=None, classes=4, **more
        )
        return model

    size = {"PAN": 128}.get(decoder, 64)
    return Entry(f"smp/{name}", build, image(3, size, size), about=f"{decoder} on {encoder}")


ENTRIES = [_entry(name, *row) for name, row in MODELS.items()]
