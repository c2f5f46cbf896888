"""torchvision without its classifiers: segmentation, video, optical flow, backbones and heads of detectors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torchvision import ops
from torchvision.models import detection, optical_flow, quantization, segmentation, video

from zoo.entry import Entry, Feeds, List, image

vision = List("vision")
SIZE, CLIP = image(3, 64, 64), image(3, 8, 32, 32)


def _add(name: str, build: Callable[[], nn.Module], feeds: Feeds, **more: Any) -> None:
    vision.entries.append(Entry(f"vision/{name}", build, feeds, **more))


def _segmentation(name: str) -> Callable[[], nn.Module]:
    return lambda: torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=5)


def _detection(name: str) -> Callable[[], nn.Module]:
    return lambda: torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=5)


for _name in (
    "fcn_resnet50",
    "deeplabv3_resnet50",
    "deeplabv3_mobilenet_v3_large",
    "lraspp_mobilenet_v3_large",
):
    _add(_name, _segmentation(_name), SIZE, about="segmentation")
_add("fcn_resnet50_aux", lambda: segmentation.fcn_resnet50(weights_backbone=None, aux_loss=True), SIZE)
for _name in ("r3d_18", "mc3_18", "r2plus1d_18"):
    _add(
        _name,
        partial(torchvision.models.get_model, _name, weights=None, num_classes=5),
        CLIP,
        about="video",
    )
_add("s3d", lambda: video.s3d(num_classes=5), image(3, 14, 224, 224), about="video")
_add(
    "swin3d_t", lambda: video.SwinTransformer3d([2, 4, 4], 24, [2, 2], [2, 4], [4, 4, 4], num_classes=5), CLIP
)


@vision(image(3, 4, 32, 32))
def mvit() -> nn.Module:
    """MViT: multiscale attention with relative positions, in two blocks."""
    setting = [
        video.mvit.MSBlockConfig(2, 16, 32, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 2, 2]),
        video.mvit.MSBlockConfig(2, 32, 32, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
    ]
    return video.MViT(
        (32, 32), 4, setting, residual_pool=True, residual_with_cls_embed=False, rel_pos_embed=True,
        proj_after_attn=True, num_classes=5, patch_embed_kernel=(3, 7, 7), patch_embed_stride=(2, 4, 4),
    )  # fmt: skip


@vision((image(3, 128, 128), image(3, 128, 128)), opset=16)
def raft_small() -> nn.Module:
    """Optical flow between two images: correlation volumes read by grid_sample, a GRU, two updates."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.raft = optical_flow.raft_small()

        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            found: Tensor = self.raft(first, second, num_flow_updates=2)[-1]
            return found

    return Two()


@vision(SIZE)
def resnet_fpn() -> nn.Module:
    """ResNet-18 with a feature pyramid and an extra pooled level: a dict of feature maps."""
    return detection.backbone_utils.resnet_fpn_backbone(backbone_name="resnet18", weights=None)


@vision(SIZE)
def resnet_fpn_p6p7() -> nn.Module:
    """ResNet-18 with a feature pyramid and P6 and P7 by convolutions (RetinaNet)."""
    extra = ops.feature_pyramid_network.LastLevelP6P7(256, 256)
    return detection.backbone_utils.resnet_fpn_backbone(
        backbone_name="resnet18", weights=None, returned_layers=[2, 3, 4], extra_blocks=extra
    )


@vision(SIZE)
def mobilenet_backbone() -> nn.Module:
    """MobileNetV3 with a feature pyramid, as the backbone of a detector."""
    return detection.backbone_utils.mobilenet_backbone(
        backbone_name="mobilenet_v3_large", weights=None, fpn=True
    )


class _Parts(nn.Module):
    """Backbone and dense head of a detector, without anchors, thresholds and NMS."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = detector.get_submodule("backbone"), detector.get_submodule("head")

    def forward(self, x: Tensor) -> Any:
        maps = self.backbone(x)
        return self.head(list(maps.values()) if isinstance(maps, dict) else [maps])


class _Proposals(nn.Module):
    """Backbone and region proposal head of Faster R-CNN."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = detector.get_submodule("backbone"), detector.get_submodule("rpn.head")

    def forward(self, x: Tensor) -> Any:
        return self.head(list(self.backbone(x).values()))


@vision(SIZE)
def retinanet_parts() -> nn.Module:
    """Backbone and head of RetinaNet."""
    return _Parts(_detection("retinanet_resnet50_fpn")())


@vision(SIZE)
def fcos_parts() -> nn.Module:
    """Backbone and head of FCOS (with GroupNorm)."""
    return _Parts(_detection("fcos_resnet50_fpn")())


@vision(image(3, 300, 300))
def ssd300_parts() -> nn.Module:
    """VGG backbone (with normalized features times a weight) and head of SSD."""
    return _Parts(_detection("ssd300_vgg16")())


@vision(image(3, 320, 320))
def ssdlite_parts() -> nn.Module:
    """MobileNetV3 backbone and head of SSDlite."""
    return _Parts(_detection("ssdlite320_mobilenet_v3_large")())


@vision(SIZE)
def faster_rcnn_parts() -> nn.Module:
    """Backbone and region proposal head of Faster R-CNN: a tuple of lists."""
    return _Proposals(_detection("fasterrcnn_mobilenet_v3_large_320_fpn")())


@vision(image(256, 7, 7))
def box_head() -> nn.Module:
    """The box head of Faster R-CNN, for each region: two Linears, then classes and boxes."""
    return nn.Sequential(
        detection.faster_rcnn.TwoMLPHead(256 * 49, 64), detection.faster_rcnn.FastRCNNPredictor(64, 5)
    )


@vision(image(16, 14, 14))
def mask_head() -> nn.Module:
    """The mask head of Mask R-CNN: convolutions, a transposed convolution, one mask per class."""
    return nn.Sequential(
        detection.mask_rcnn.MaskRCNNHeads(16, (16, 16), 1), detection.mask_rcnn.MaskRCNNPredictor(16, 16, 5)
    )


@vision(image(16, 14, 14))
def keypoint_head() -> nn.Module:
    """The head of Keypoint R-CNN: a transposed convolution, then bilinear upsampling."""
    return nn.Sequential(
        detection.keypoint_rcnn.KeypointRCNNHeads(16, (16, 16)),
        detection.keypoint_rcnn.KeypointRCNNPredictor(16, 4),
    )


def _quantizable(name: str) -> nn.Module:
    options = {"init_weights": False, "aux_logits": False} if name == "googlenet" else {}
    model: nn.Module = getattr(quantization, name)(weights=None, quantize=False, **options)
    return model


for _name in ("resnet18", "mobilenet_v2", "googlenet", "shufflenet_v2_x0_5"):
    _add(
        f"quantizable_{_name}",
        partial(_quantizable, _name),
        SIZE,
        about="written for torch.ao: FloatFunctional",
    )


@vision(SIZE)
def feature_extractor() -> nn.Module:
    """`create_feature_extractor`: a GraphModule that returns two feature maps by name."""
    from torchvision.models.feature_extraction import create_feature_extractor

    return create_feature_extractor(torchvision.models.resnet18(), {"layer1": "low", "layer4": "high"})


@vision(SIZE)
def layer_getter() -> nn.Module:
    """`IntermediateLayerGetter`: a ModuleDict whose modules run in a loop."""
    from torchvision.models._utils import IntermediateLayerGetter

    return IntermediateLayerGetter(torchvision.models.resnet18(), {"layer2": "a", "layer3": "b"})


@vision(SIZE)
def drop_block() -> nn.Module:
    """DropBlock between convolutions, which is random in training."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2),
        nn.ReLU(),
        ops.DropBlock2d(0.2, 3),
        nn.Conv2d(16, 8, 3),
        ops.Permute([0, 2, 3, 1]),
    )


@vision(SIZE, opset=16)
def region_align() -> nn.Module:
    """`roi_align` with one fixed region for each sample."""

    class Align(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 8, 3, 2, 1), nn.Linear(8 * 9, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x).relu()
            index = torch.arange(x.shape[0], dtype=x.dtype)[:, None]
            box = torch.tensor([[2.0, 2.0, 28.0, 28.0]]).expand(x.shape[0], 4)
            return self.head(ops.roi_align(x, torch.cat([index, box], 1), 3, sampling_ratio=2).flatten(1))

    return Align()


ENTRIES = vision.entries
