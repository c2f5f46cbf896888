"""torchvision's one-stage detectors as graphs: SSD, SSDlite, RetinaNet and FCOS, with their own losses.

torchvision's models normalise and resize pictures and select boxes in Python. Here the network and the arithmetic of
boxes are one graph of tensors. `qatkit.data` prepares the pictures, and boxes are selected by non-maximum
suppression after the graph. Parameters keep torchvision's names, so that its checkpoints load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.fcos import FCOS
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.retinanet import RetinaNet
from torchvision.models.detection.ssd import SSD
from torchvision.ops import box_iou

from qatkit.models.detectors.detector import Detector, boxes_of
from qatkit_verify.errors import ConfigError

_LARGEST_LOG = math.log(
    1000.0 / 16
)  # maximum logarithm of a side relative to its anchor's, as in torchvision's coder
_HEADS = ("cls_logits", "bbox_regression", "bbox_ctrness")


class TorchvisionDetector(Detector):
    """A one-stage detector of torchvision.

    Args:
        model: torchvision's model; this module uses its `backbone`, `head` and `anchor_generator`.
        ratios: for an SSD, the sides of the smallest and the largest anchors as shares of the input's side;
            None keeps the anchors of the model.

    Raises:
        ConfigError: the model is not a one-stage detector.
    """

    def __init__(self, model: nn.Module, ratios: Sequence[float] | None = None) -> None:
        super().__init__()
        if not isinstance(model, (SSD, RetinaNet, FCOS)):
            allowed = "a one-stage detector (ssd..., ssdlite..., retinanet..., fcos...)"
            raise ConfigError("model.name", type(model).__name__, allowed)
        if ratios is not None:
            shapes = model.anchor_generator.aspect_ratios
            model.anchor_generator = DefaultBoxGenerator(shapes, min_ratio=ratios[0], max_ratio=ratios[1])
        self.backbone, self.head, self.anchor_generator = model.backbone, model.head, model.anchor_generator
        self._model: tuple[Any, ...] = (model,)  # in a tuple, since its parameters are registered above
        self._known: dict[
            int, tuple[Tensor, list[int]]
        ] = {}  # (anchors, cells of each level), by the number of anchors

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Returns boxes and scores, followed by the outputs of the heads."""
        found = self.backbone(images)
        features = [found] if isinstance(found, Tensor) else list(found.values())
        heads = self.head(features)
        anchors = self.anchors(images, features)
        (model,) = self._model
        logits, offsets = heads["cls_logits"], heads["bbox_regression"]
        if isinstance(model, FCOS):
            boxes = _from_distances(offsets, anchors)
            scores = (logits.sigmoid() * heads["bbox_ctrness"].sigmoid()).sqrt()
        else:
            boxes = _from_offsets(offsets, anchors, model.box_coder.weights)
            scores = logits.softmax(2)[..., 1:] if isinstance(model, SSD) else logits.sigmoid()
        return {"boxes": boxes, "scores": scores} | {name: heads[name] for name in _HEADS if name in heads}

    def anchors(self, images: Tensor, features: Sequence[Tensor]) -> Tensor:
        """Returns the corners of all anchors, [boxes, 4]; they depend only on the sizes of the tensors."""
        sizes = [(int(one.shape[2]), int(one.shape[3])) for one in (images, *features)]
        like = [torch.empty(1, 1, *size) for size in sizes]
        with torch.no_grad():
            (found,) = self.anchor_generator(ImageList(like[0], [sizes[0]]), like[1:])
        self._known[len(found)] = (found, [height * width for height, width in sizes[1:]])
        anchors: Tensor = found.to(images.device)
        return anchors

    @property
    def criterion(self) -> Callable[[Sequence[Tensor], Tensor], Tensor]:
        return self._loss

    def _loss(self, outputs: Sequence[Tensor], targets: Tensor) -> Tensor:
        """Returns the sum of torchvision's own losses, a scalar."""
        (model,) = self._model
        heads = dict(zip(_HEADS, outputs, strict=False))
        anchors, cells = self._known[outputs[0].shape[1]]
        anchors = anchors.to(outputs[0].device)
        background = int(isinstance(model, SSD))  # its class 0 is background
        wanted = [{"boxes": boxes, "labels": labels + background} for boxes, labels in boxes_of(targets)]
        rows = [anchors] * len(wanted)
        if isinstance(model, RetinaNet):
            parts = model.compute_loss(wanted, heads, rows)
        else:
            matched = (
                cells if isinstance(model, FCOS) else [self._matched(one["boxes"], anchors) for one in wanted]
            )
            parts = model.compute_loss(wanted, heads, rows, matched)
        return torch.stack(list(parts.values())).sum()

    def _matched(self, boxes: Tensor, anchors: Tensor) -> Tensor:
        if not len(boxes):
            return torch.full((len(anchors),), -1, dtype=torch.int64, device=anchors.device)
        found: Tensor = self._model[0].proposal_matcher(box_iou(boxes, anchors))
        return found


def counts_background(name: str) -> bool:
    """Returns whether torchvision's detector of that name counts the background as a class."""
    return name.startswith(("ssd", "fasterrcnn"))


def check_ratios(model: nn.Module, ratios: Sequence[float]) -> None:
    """Raises ConfigError unless the model is an SSD and the ratios are two ascending shares up to 1."""
    if not isinstance(model, SSD):
        allowed = "null, since only an SSD has this argument"
        raise ConfigError("model.kwargs.anchor_ratios", list(ratios), allowed)
    if len(ratios) != 2 or not 0 < ratios[0] < ratios[1] <= 1:
        allowed = "[SMALLEST, LARGEST], the sides of anchors as ascending shares of the input's side, up to 1"
        raise ConfigError("model.kwargs.anchor_ratios", list(ratios), allowed)


def _from_offsets(offsets: Tensor, anchors: Tensor, weights: Sequence[float]) -> Tensor:
    """Returns corners [N, boxes, 4] from centres and logarithms of sides, relative to anchors."""
    sides = anchors[:, 2:] - anchors[:, :2]
    centers = anchors[:, :2] + 0.5 * sides
    places = offsets[..., :2] * (sides / sides.new_tensor(weights[:2])) + centers
    half = (offsets[..., 2:] / sides.new_tensor(weights[2:])).clamp(max=_LARGEST_LOG).exp() * (0.5 * sides)
    return torch.cat([places - half, places + half], 2)


def _from_distances(distances: Tensor, anchors: Tensor) -> Tensor:
    """Returns corners [N, boxes, 4] from the distances of anchors' centres to the boxes' sides, in anchor sides."""
    sides = anchors[:, 2:] - anchors[:, :2]
    centers = anchors[:, :2] + 0.5 * sides
    low, high = (distances[..., start : start + 2] * sides for start in (0, 2))
    return torch.cat([centers - low, centers + high], 2)
