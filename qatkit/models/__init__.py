"""The float model from which a run starts, and the preprocessing of its images.

    build               the choice of the source by `model.name`, and the loading of the checkpoint
    torchvision_models  "resnet18"
    timm_models         "timm/resnet18", the extra timm
    hf_models           "hf/vit", "hf/facebook/dinov2-small", "hf//my/folder", with the head that the task requires; the
                        extra transformers
    lite                "lite/efficientnet-lite0", with its ImageNet weights from a package, the extra lite
    onnx_files          "onnx/FILE", a float ONNX file
    declared            the inputs that a model itself declares
    hub                 advice for users who cannot reach the Hugging Face hub
    checkpoint          a file with a float state_dict

A dotted path names a user's builder, or one of the models here: ds_cnn, streaming_gru, conformer, unet and detectors.
"""

from __future__ import annotations

from qatkit.models.build import (
    build,
    declared,
    has_weights,
    parameters,
    states,
    weights_classes,
    weights_preprocessing,
)
from qatkit.models.checkpoint import read_checkpoint
from qatkit.models.declared import Declared
from qatkit.models.torchvision_models import replace_heads

__all__ = [
    "Declared",
    "build",
    "declared",
    "has_weights",
    "parameters",
    "read_checkpoint",
    "replace_heads",
    "states",
    "weights_classes",
    "weights_preprocessing",
]
