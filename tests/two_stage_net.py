"""A small Faster R-CNN made of torchvision's classes, with three feature maps and random weights that find boxes."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign

from qatkit.models.detectors.two_stages import TwoStageDetector

HEIGHT, WIDTH, PROPOSALS = 128, 160, 24


class Pyramid(nn.Module):
    """Features with strides 4, 8 and 16."""

    out_channels = 16

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.steps = self._step(3, 2), nn.ModuleList(self._step(16, 2) for _ in range(3))
        self.fpn = FeaturePyramidNetwork([16, 16, 16], 16)

    def _step(self, inputs: int, stride: int) -> nn.Sequential:
        conv = nn.Conv2d(inputs, 16, 3, stride, 1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(16), nn.ReLU())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x, found = self.stem(x), OrderedDict[str, Tensor]()
        for number, step in enumerate(self.steps):
            found[str(number)] = x = step(x)
        features: dict[str, Tensor] = self.fpn(found)
        return features


def faster_rcnn(classes: int = 3, spread: float = 0.02, size: int = HEIGHT) -> FasterRCNN:
    """Returns torchvision's model without input normalization.

    Its anchors are 1/8 to 1/2 of `size`, the height of the images.
    """
    shares = size / HEIGHT
    anchors = AnchorGenerator(
        tuple((int(16 * shares * 2**level),) for level in range(3)), ((0.5, 1.0, 2.0),) * 3
    )
    model = FasterRCNN(
        Pyramid(), rpn_anchor_generator=anchors, box_head=TwoMLPHead(16 * 49, 32),
        box_roi_pool=MultiScaleRoIAlign(["0", "1", "2"], 7, 2, canonical_scale=int(64 * shares)),
        box_predictor=FastRCNNPredictor(32, classes + 1), image_mean=[0, 0, 0], image_std=[1, 1, 1],
        rpn_pre_nms_top_n_test=40, rpn_post_nms_top_n_test=PROPOSALS, min_size=HEIGHT, max_size=WIDTH,
        rpn_batch_size_per_image=512, box_batch_size_per_image=64,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    for part in (model.rpn.head, model.roi_heads.box_predictor):
        for parameter in part.parameters():
            parameter.data += spread * torch.randn(parameter.shape, generator=generator)
    return model


class TinyTwoStages(TwoStageDetector):
    """The two-stage detector for runs with `task=detection`."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__(faster_rcnn(num_classes, 0.0, 64))
