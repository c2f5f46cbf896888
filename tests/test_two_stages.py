"""Tests of Faster R-CNN as one graph against torchvision's own inference and losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import batched_nms, box_iou
from two_stage_net import HEIGHT, WIDTH, faster_rcnn

from qatkit.config.schema import ModelConfig
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.suppress import DROPPED, suppress
from qatkit.graph.trace import trace
from qatkit.models import build
from qatkit.models.detectors.two_stages import TwoStageDetector
from qatkit.tasks.average_precision import detections
from qatkit_verify.errors import ConfigError


def settled(spread: float) -> Any:
    """Returns torchvision's model with BatchNorm statistics from random images."""
    torch.manual_seed(0)
    model = faster_rcnn(spread=spread)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    TwoStageDetector(model).train()(torch.randn(4, 3, HEIGHT, WIDTH))
    return model.eval()


def targets(proposals: Tensor) -> Tensor:
    """Returns labelled boxes of two images, [2, 3, 6], near their proposals [2, K, 4]; one box is to be ignored."""
    found = torch.full((2, 3, 6), -1.0)
    found[0, 0, 1:5], found[0, 1, 1:5] = proposals[0, 0] + 1, proposals[0, 5] + 1
    found[1, 0, 1:5], found[1, 1, 1:5] = proposals[1, 0] + 1, proposals[1, 5] + 1
    found[..., 0] = torch.tensor([[1, 2, -1], [0, 0, -1]])
    found[..., 5] = torch.tensor([[0, 0, -1], [0, 1, -1]])
    return found


@pytest.mark.parametrize("spread", [0.05, 0.3])
def test_boxes_are_those_of_torchvisions_inference(spread: float) -> None:
    original = settled(spread)
    model = TwoStageDetector(original).eval()
    images = torch.randn(3, 3, HEIGHT, WIDTH)
    heads = original.roi_heads
    heads.score_thresh, heads.nms_thresh, heads.detections_per_img = 0.05, 0.5, 60
    with torch.no_grad():
        found, wanted = model(images), original(list(images))
    for picture, one in enumerate(wanted):
        rows = torch.cat([found["boxes"][picture], found["scores"][picture]], 1)
        own = detections(rows.numpy(), 0.05, 0.5, 60)
        assert own.count == len(one["scores"]) > 5
        torch.testing.assert_close(torch.from_numpy(own.scores).float(), one["scores"], atol=1e-5, rtol=1e-5)
        near = box_iou(torch.from_numpy(own.corners).float(), one["boxes"])
        near[(torch.from_numpy(own.classes) + 1)[:, None] != one["labels"]] = 0
        assert near.amax(0).min() > 0.999 and near.amax(1).min() > 0.999


def test_too_few_proposals_leave_boxes_without_a_score() -> None:
    original = settled(0.05)
    model, images = TwoStageDetector(original).eval(), torch.randn(2, 3, HEIGHT, WIDTH)
    with torch.no_grad():
        tenth = model(images)["objectness"].topk(10).values[:, -1].min()
        original.rpn.score_thresh = float(tenth.sigmoid())
        found = model(images)
    free = (found["proposals"] == 0).all(2)
    assert free.any() and not free.all()
    scores = found["scores"].unflatten(1, (-1, 3))
    assert (scores[free] == 0).all() and (scores[~free].sum((1, 2)) > 0).all()


def test_losses_are_torchvisions(monkeypatch: pytest.MonkeyPatch) -> None:
    original = settled(0.05)
    model = TwoStageDetector(original)  # in eval mode: BatchNorms keep their statistics
    heads = original.roi_heads
    heads.fg_bg_sampler.batch_size_per_image = original.rpn.fg_bg_sampler.batch_size_per_image = 10**6
    images = torch.randn(2, 3, HEIGHT, WIDTH)
    found = list(model(images).values())
    truth = targets(found[-1].detach())
    torch.manual_seed(1)
    loss = model.criterion(found[2:], truth)
    boxes = [
        {"boxes": rows[keep, 1:5], "labels": rows[keep, 0].long() + 1}
        for rows in truth
        for keep in [(rows[:, 0] >= 0) & (rows[:, 5] == 0)]
    ]
    sizes = [(HEIGHT, WIDTH)] * 2
    features = original.backbone(images)
    original.rpn.training = heads.training = True
    monkeypatch.setattr(heads, "add_gt_proposals", lambda proposals, _: proposals)
    torch.manual_seed(1)
    _, first = original.rpn(ImageList(images, sizes), features, boxes)
    places = [one[(one[:, 2:] > one[:, :2]).all(1)] for one in found[-1]]
    _, second = heads(features, places, sizes, boxes)
    torch.testing.assert_close(loss, sum((first | second).values()))
    loss.backward()
    parts = (original.rpn.head, heads.box_head, heads.box_predictor)
    assert all(p.grad is not None and p.grad.any() for part in parts for p in part.parameters())


def test_an_image_without_proposals_trains_the_first_stage_alone() -> None:
    model = TwoStageDetector(settled(0.05))
    found = list(model(torch.randn(2, 3, HEIGHT, WIDTH)).values())[2:]
    truth = targets(found[-1].detach())
    found[-1] = found[-1].detach() * torch.tensor([0.0, 1.0])[:, None, None]
    both = model.criterion(found, truth)
    both.backward()
    assert both.isfinite() and model.roi_heads.box_predictor.cls_score.weight.grad.any()
    model.zero_grad()
    found = list(model(torch.randn(2, 3, HEIGHT, WIDTH)).values())[2:]
    found[-1] = torch.zeros_like(found[-1])
    alone = model.criterion(found, truth)
    alone.backward()
    assert alone > 0 and not model.roi_heads.box_predictor.cls_score.weight.grad.any()
    assert model.rpn.head.cls_logits.weight.grad.any()


def test_its_opset_13_file_takes_any_batch(tmp_path: Path) -> None:
    model = TwoStageDetector(settled(0.3)).eval()
    graph = trace(model, torch.randn(2, 3, HEIGHT, WIDTH))
    export_onnx(graph, torch.randn(2, 3, HEIGHT, WIDTH), tmp_path / "model.onnx", opset=13)
    onnx.checker.check_model(onnx.load(tmp_path / "model.onnx"), full_check=True)
    session = ort.InferenceSession(tmp_path / "model.onnx")
    for batch in (1, 3):
        images = torch.randn(batch, 3, HEIGHT, WIDTH)
        with torch.no_grad():
            wanted = model(images)
        boxes, scores = session.run(None, {"input": images.numpy()})
        np.testing.assert_allclose(scores, wanted["scores"], atol=1e-5)
        np.testing.assert_allclose(boxes, wanted["boxes"], atol=1e-2)


@pytest.mark.parametrize("groups", [[60], [25, 5, 30]])
def test_suppression_keeps_the_boxes_of_torchvision(groups: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    corners = torch.rand(2, 60, 2, generator=generator) * 50
    boxes = torch.cat([corners, corners + 5 + torch.rand(2, 60, 2, generator=generator) * 40], 2)
    scores = torch.randn(2, 60, generator=generator)
    valid = torch.ones(2, 60, dtype=torch.bool)
    valid[:, ::7] = False
    group = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(groups))
    for most in (60, 3):
        found = suppress(boxes, scores, valid, groups, 0.4, most)
        for picture in range(2):
            there = valid[picture].nonzero()[:, 0]
            kept = there[batched_nms(boxes[picture][there], scores[picture][there], group[there], 0.4)]
            kept = torch.cat([kept[group[kept] == one][:most] for one in range(len(groups))])
            wanted = torch.full((60,), DROPPED)
            wanted[kept] = scores[picture][kept]
            assert torch.equal(found[picture], wanted)


@pytest.mark.parametrize("name", ["fasterrcnn_mobilenet_v3_large_320_fpn", "fasterrcnn_resnet50_fpn_v2"])
def test_models_have_the_parameters_of_torchvision(name: str) -> None:
    import torchvision

    own = build(ModelConfig(name=name), 3, "detection")
    theirs = torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=4)
    assert own.state_dict().keys() == theirs.state_dict().keys()


@pytest.mark.parametrize(
    ("name", "kwargs", "reason"),
    [
        (
            "maskrcnn_resnet50_fpn",
            {},
            "model.name=maskrcnn_resnet50_fpn: expected a detector that only predicts boxes",
        ),
        ("keypointrcnn_resnet50_fpn", {}, "a detector that only predicts boxes"),
        (
            "fasterrcnn_resnet50_fpn",
            {"anchor_ratios": [0.1, 0.6]},
            "null, since only an SSD has this argument",
        ),
    ],
)
def test_what_finds_more_than_boxes_is_refused(name: str, kwargs: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build(ModelConfig(name=name, kwargs=kwargs), 3, "detection")
