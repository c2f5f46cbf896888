"""torchvision's Faster R-CNN as one graph of fixed sizes, with its own losses.

    features ── rpn.head ──> boxes of all anchors ── best of each level ── suppression ── TopK ──> K proposals
    features, proposals ── RoIAlign ──> [N * K, C, 7, 7] ── roi_heads ──> K * classes boxes, each with one score

The length of torchvision's lists of proposals depends on values. Here there are always K proposals, torchvision's
`rpn_post_nms_top_n_test`; unused rows contain a box without area and scores of 0. Parameters keep torchvision's names,
so that its checkpoints load.

Source: Ren et al., "Faster R-CNN: Towards Real-Time Object Detection with Region Proposal Networks", 2015; Lin et al.,
"Feature Pyramid Networks for Object Detection", 2017.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torchvision.models.detection.faster_rcnn import FasterRCNN
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import fastrcnn_loss
from torchvision.ops import roi_align

from qatkit.graph.suppress import DROPPED, suppress
from qatkit.models.detectors.detector import Detector, boxes_of
from qatkit_verify.errors import ConfigError

_LARGEST_LOG = math.log(
    1000.0 / 16
)  # maximum logarithm of a side relative to its proposal's, as in torchvision's coder
_SMALLEST = 1e-2  # minimum side of a box, in pixels
_ABOVE = 1e-6  # added before a level is rounded down, as torchvision's mapper does


class TwoStageDetector(Detector):
    """A Faster R-CNN of torchvision.

    K proposals with C classes make K * C boxes; row k * C + c has a score only in class c. In training, the
    second stage samples from the same K proposals, while torchvision adds the labelled boxes to its proposals.

    Args:
        model: torchvision's model; this module uses its `backbone`, `rpn` and `roi_heads`.

    Raises:
        ConfigError: the model also predicts masks or keypoints.
    """

    unordered = True

    def __init__(self, model: FasterRCNN) -> None:
        super().__init__()
        if model.roi_heads.has_mask() or model.roi_heads.has_keypoint():
            allowed = "a detector that only predicts boxes (ssd..., ssdlite..., retinanet..., fcos..., fasterrcnn...)"
            raise ConfigError("model.name", type(model).__name__, allowed)
        self.backbone, self.rpn, self.roi_heads = model.backbone, model.rpn, model.roi_heads
        self._known: dict[int, Tensor] = {}  # anchors, by the number of anchors

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Returns boxes and scores, followed by the inputs of both stages' losses."""
        found = self.backbone(images)
        features = {"0": found} if isinstance(found, Tensor) else dict(found)
        objectness, offsets, sizes = self._first_stage(list(features.values()))
        anchors = self._anchors(images, list(features.values()))
        proposals, there = self._proposals(objectness, offsets, anchors, sizes, images)
        logits, shifts = self._second_stage(features, proposals, images)
        boxes, scores = self._decoded(logits, shifts, proposals, there, images)
        return {
            "boxes": boxes,
            "scores": scores,
            "objectness": objectness,
            "offsets": offsets,
            "logits": logits,
            "shifts": shifts,
            "proposals": proposals,
        }

    def _first_stage(self, features: list[Tensor]) -> tuple[Tensor, Tensor, list[int]]:
        """Returns objectness [N, anchors], offsets [N, anchors, 4], and the number of anchors of each level."""
        rows: tuple[list[Tensor], list[Tensor]] = ([], [])
        for values, found in zip(rows, self.rpn.head(features), strict=True):
            values += [one.permute(0, 2, 3, 1).flatten(1) for one in found]
        offsets = torch.cat(rows[1], 1).unflatten(1, (-1, 4))
        return torch.cat(rows[0], 1), offsets, [int(one.shape[1]) for one in rows[0]]

    def _anchors(self, images: Tensor, features: Sequence[Tensor]) -> Tensor:
        """Returns the corners of all anchors, [anchors, 4]; they depend only on the sizes of the tensors."""
        sizes = [(int(one.shape[2]), int(one.shape[3])) for one in (images, *features)]
        like = [torch.empty(1, 1, *size) for size in sizes]
        with torch.no_grad():
            (found,) = self.rpn.anchor_generator(ImageList(like[0], [sizes[0]]), like[1:])
        self._known[len(found)] = found
        anchors: Tensor = found.to(images.device)
        return anchors

    def _proposals(
        self, objectness: Tensor, offsets: Tensor, anchors: Tensor, sizes: list[int], images: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns corners [N, K, 4] of the first stage's best boxes, and a mask [N, K]: 1 for used rows, else 0."""
        rpn = self.rpn
        objectness, offsets = objectness.detach().float(), offsets.detach().float()
        boxes = _within(_moved(offsets, anchors, rpn.box_coder.weights), images)
        sides = boxes[..., 2:] - boxes[..., :2]
        fine = (sides.amin(2) >= rpn.min_size) & (objectness >= _logit(rpn.score_thresh))
        most, start, places, groups = rpn._pre_nms_top_n["testing"], 0, list[Tensor](), list[int]()
        for level, size in zip(objectness.split(sizes, 1), sizes, strict=True):
            groups.append(min(most, size))
            places.append(level.topk(groups[-1], 1).indices + start)
            start += size
        chosen = torch.cat(places, 1)
        boxes, scores, fine = _picked(boxes, chosen), objectness.gather(1, chosen), fine.gather(1, chosen)
        kept = min(rpn._post_nms_top_n["testing"], sum(groups))
        scores, best = suppress(boxes, scores, fine, groups, rpn.nms_thresh, kept).topk(kept, 1)
        there = (scores > DROPPED / 2).to(boxes.dtype)
        return _picked(boxes, best) * there.unsqueeze(2), there

    def _second_stage(
        self, features: dict[str, Tensor], proposals: Tensor, images: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns logits [N, K, 1 + classes] and offsets [N, K, 1 + classes, 4] of the proposals."""
        pool, heads, count = self.roi_heads.box_roi_pool, self.roi_heads, int(proposals.shape[1])
        used = [one for name, one in features.items() if name in pool.featmap_names]
        halved = [_halved(one, images) for one in used]
        picture = torch.ones_like(proposals[:, :, :1]).cumsum(0) - 1
        regions = torch.cat([picture, proposals], 2).flatten(0, 1)
        area = (proposals[..., 2:] - proposals[..., :2]).prod(2).clamp(min=_SMALLEST**2)
        level = (pool.canonical_level + (area.sqrt() / pool.canonical_scale).log2() + _ABOVE).floor()
        level = level.clamp(halved[0], halved[-1]).flatten()[:, None, None, None]
        pooled: Tensor | None = None
        for number, one in list(enumerate(used, halved[0]))[: halved[-1] - halved[0] + 1]:
            scale = 0.5 ** halved[number - halved[0]]
            own = roi_align(one, regions, pool.output_size, scale, pool.sampling_ratio)
            pooled = own if pooled is None else torch.where(level < number, pooled, own)
        logits, shifts = heads.box_predictor(heads.box_head(pooled))
        return logits.unflatten(0, (-1, count)), shifts.unflatten(1, (-1, 4)).unflatten(0, (-1, count))

    def _decoded(
        self, logits: Tensor, shifts: Tensor, proposals: Tensor, there: Tensor, images: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns corners [N, K * classes, 4] and scores [N, K * classes, classes], nonzero only in a row's class."""
        boxes = _moved(shifts[:, :, 1:].float(), proposals.unsqueeze(2), self.roi_heads.box_coder.weights)
        boxes = _within(boxes, images)
        large = ((boxes[..., 2:] - boxes[..., :2]).amin(3) >= _SMALLEST).to(boxes.dtype)
        scores = logits.softmax(2)[..., 1:] * large * there.unsqueeze(2)
        own = torch.eye(scores.shape[2], dtype=scores.dtype, device=scores.device)
        return boxes.flatten(1, 2), (scores.unsqueeze(3) * own).flatten(1, 2)

    @property
    def criterion(self) -> Callable[[Sequence[Tensor], Tensor], Tensor]:
        return self._loss

    def _loss(self, outputs: Sequence[Tensor], targets: Tensor) -> Tensor:
        """Returns the sum of torchvision's losses of both stages, a scalar."""
        objectness, offsets, logits, shifts, proposals = outputs
        found = boxes_of(targets)
        first = self._loss_of_anchors(objectness, offsets, [boxes for boxes, _ in found])
        return first + self._loss_of_proposals(logits, shifts, proposals, found)

    def _loss_of_anchors(self, objectness: Tensor, offsets: Tensor, boxes: list[Tensor]) -> Tensor:
        rpn, anchors = self.rpn, [self._known[objectness.shape[1]].to(objectness.device)] * len(boxes)
        labels, matched = rpn.assign_targets_to_anchors(anchors, [{"boxes": one} for one in boxes])
        wanted = rpn.box_coder.encode(matched, anchors)
        parts = rpn.compute_loss(objectness.flatten(), offsets.flatten(0, 1), labels, wanted)
        return torch.stack(parts).sum()

    def _loss_of_proposals(
        self, logits: Tensor, shifts: Tensor, proposals: Tensor, found: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        heads = self.roi_heads
        valid = (proposals[..., 2:] > proposals[..., :2]).all(2)
        used = valid.any(1)  # torchvision cannot match boxes in an image without proposals
        logits, shifts, proposals = logits[used], shifts[used], proposals[used]
        found = [one for one, any_valid in zip(found, used.tolist(), strict=True) if any_valid]
        boxes, there = [one for one, _ in found], list(valid[used])
        rows = [one[own] for one, own in zip(proposals, there, strict=True)]
        places, labels = heads.assign_targets_to_proposals(rows, boxes, [one + 1 for _, one in found])
        chosen = heads.subsample(labels)
        if not sum(map(len, chosen)):
            return 0.0 * (logits.sum() + shifts.sum())
        nothing = proposals.new_zeros(1, 4)
        matched = [
            (one if len(one) else nothing)[place[own]]
            for one, place, own in zip(boxes, places, chosen, strict=True)
        ]
        wanted = heads.box_coder.encode(matched, [one[own] for one, own in zip(rows, chosen, strict=True)])
        triples = list(zip(logits, there, chosen, strict=True))
        scored = torch.cat([one[own][those] for one, own, those in triples])
        moved = torch.cat([one[own][those] for one, (_, own, those) in zip(shifts, triples, strict=True)])
        classes = [one[own] for one, own in zip(labels, chosen, strict=True)]
        return torch.stack(fastrcnn_loss(scored, moved.flatten(1), classes, wanted)).sum()


def _picked(boxes: Tensor, places: Tensor) -> Tensor:
    """Returns the corners [N, k, 4] of the boxes with the indices `places` [N, k]."""
    return boxes.gather(1, places.unsqueeze(2).expand(-1, -1, 4))


def _moved(offsets: Tensor, boxes: Tensor, weights: Sequence[float]) -> Tensor:
    """Returns the corners [..., 4] of `boxes` moved by offsets of centres and sides, as torchvision's coder does."""
    sides = boxes[..., 2:] - boxes[..., :2]
    centers = boxes[..., :2] + 0.5 * sides
    moved = offsets[..., :2] / offsets.new_tensor(weights[:2]) * sides + centers
    half = (offsets[..., 2:] / offsets.new_tensor(weights[2:])).clamp(max=_LARGEST_LOG).exp() * sides * 0.5
    return torch.cat([moved - half, moved + half], -1)


def _within(boxes: Tensor, images: Tensor) -> Tensor:
    """Returns the corners [..., 4], clipped to the images."""
    height, width = int(images.shape[2]), int(images.shape[3])
    return torch.minimum(boxes.clamp(min=0), boxes.new_tensor([width, height, width, height]))


def _logit(share: float) -> float:
    """Returns the logit of a score; `DROPPED` / 2 for a score of 0, infinity for a score of 1."""
    return math.log(share / (1 - share)) if 0 < share < 1 else DROPPED / 2 if share <= 0 else math.inf


def _halved(feature: Tensor, images: Tensor) -> int:
    """Returns how often the image height is halved to that of a feature map, as torchvision infers it."""
    return round(math.log2(int(images.shape[2]) / int(feature.shape[2])))
