"""Tests of detectors: boxes and losses equal to torchvision's, YOLOX against its paper and file, and errors."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest
import torch
from command_line import ROOT
from onnx import numpy_helper
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList

from qatkit.config.schema import ModelConfig
from qatkit.graph.trace import trace
from qatkit.models import build
from qatkit.models.detectors.yolox import decoded, yolox_nano, yolox_tiny
from qatkit.models.detectors.yolox_loss import YoloxLoss
from qatkit.tasks.average_precision import detections
from qatkit_verify.errors import ConfigError

NAMES = ("ssdlite320_mobilenet_v3_large", "retinanet_resnet50_fpn", "fcos_resnet50_fpn")
HEIGHT, WIDTH = 128, 160
ARCHIVE = ROOT.parent / "shared" / "data" / "onnx_models.zip"


def made(name: str, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return build(ModelConfig(name=name, kwargs=kwargs), 3, "detection")


def targets() -> Tensor:
    """Returns the labelled boxes of two images, [2, 3, 6]: class, x1, y1, x2, y2 and whether to ignore the box.

    Unused rows contain -1. One box of the second image is ignored.
    """
    found = torch.full((2, 3, 6), -1.0)
    found[0, 0] = torch.tensor([1, 20, 30, 90, 100, 0])
    found[0, 1] = torch.tensor([2, 60, 20, 150, 120, 0])
    found[1, 0] = torch.tensor([0, 10, 10, 60, 70, 0])
    found[1, 1] = torch.tensor([0, 80, 10, 120, 70, 1])
    return found


@pytest.mark.parametrize(("name", "spread"), list(zip(NAMES, (0.05, 0.01, 0.01), strict=True)))
def test_boxes_are_those_of_torchvisions_postprocessing(name: str, spread: float) -> None:
    model = made(name)
    (original,) = model._model
    generator = torch.Generator().manual_seed(1)
    for parameter in original.head.parameters():  # spreads boxes and scores
        parameter.data += spread * torch.randn(parameter.shape, generator=generator)
    images = torch.randn(2, 3, HEIGHT, WIDTH, generator=generator)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    model.train()(images)  # otherwise the features of a random backbone grow without bound
    model.eval()
    original.nms_thresh, original.topk_candidates, original.detections_per_img = 0.5, 400, 60
    with torch.no_grad():
        found = model(images)
        original.score_thresh = least = float(found["scores"].flatten().sort(descending=True).values[200])
        features = list(original.backbone(images).values())
        heads, listed = original.head(features), ImageList(images, [(HEIGHT, WIDTH)] * 2)
        anchors = original.anchor_generator(listed, features)
        if "ssd" not in name:
            cells = [one.shape[2] * one.shape[3] for one in features]
            counts = [heads["cls_logits"].shape[1] // sum(cells) * one for one in cells]
            heads = {key: list(value.split(counts, 1)) for key, value in heads.items()}
            anchors = [list(one.split(counts)) for one in anchors]
        wanted = original.postprocess_detections(heads, anchors, listed.image_sizes)
    for picture, one in enumerate(wanted):
        boxes = found["boxes"][picture].clone()
        boxes[:, 0::2], boxes[:, 1::2] = boxes[:, 0::2].clamp(0, WIDTH), boxes[:, 1::2].clamp(0, HEIGHT)
        own = detections(torch.cat([boxes, found["scores"][picture]], 1).numpy(), least, 0.5, 60)
        assert own.count == len(one["scores"]) > 5
        torch.testing.assert_close(torch.from_numpy(own.scores).float(), one["scores"], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.from_numpy(own.corners).float(), one["boxes"], atol=1e-2, rtol=1e-4)
        assert torch.equal(torch.from_numpy(own.classes) + int("ssd" in name), one["labels"])


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_torchvisions(name: str) -> None:
    model = made(name).train()
    (original,) = model._model
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    images, truth = torch.randn(2, 3, HEIGHT, WIDTH), targets()
    loss = model.criterion(list(model(images).values())[2:], truth)
    boxes = [
        {"boxes": rows[keep, 1:5], "labels": rows[keep, 0].long() + int("ssd" in name)}
        for rows in truth
        for keep in [(rows[:, 0] >= 0) & (rows[:, 5] == 0)]
    ]
    original.training = True
    original.transform.forward = lambda given, known: (
        ImageList(torch.stack(given), [(HEIGHT, WIDTH)] * 2),
        known,
    )
    wanted = sum(original(list(images), boxes).values())
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    assert all(p.grad is not None for p in model.head.parameters())


def test_yolox_has_the_parameters_of_its_paper() -> None:
    counts = [sum(p.numel() for p in make(80).parameters()) / 1e6 for make in (yolox_nano, yolox_tiny)]
    assert counts == pytest.approx([0.91, 5.06], abs=0.01)


@pytest.mark.skipif(not ARCHIVE.is_file(), reason="no ../shared/data/onnx_models.zip")
def test_yolox_computes_what_its_published_file_does(tmp_path: Path) -> None:
    with zipfile.ZipFile(ARCHIVE) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith("yolox_nano.onnx"))
        path = archive.extract(name, tmp_path)
    file = onnx.load(path)
    values = {one.name: torch.tensor(numpy_helper.to_array(one)) for one in file.graph.initializer}
    convs = [[values[one] for one in node.input[1:]] for node in file.graph.node if node.op_type == "Conv"]
    model, order = yolox_nano().eval(), list[str]()
    for path_, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda *_, path_=path_: order.append(path_))
    images = torch.rand(1, 3, 416, 416, generator=torch.Generator().manual_seed(0)) * 255
    with torch.no_grad():
        model(images)
        for path_, (weight, bias) in zip(order, convs, strict=True):
            conv: Any = model.get_submodule(path_)
            conv.weight.copy_(weight)
            if conv.bias is not None:
                conv.bias.copy_(bias)
                continue
            norm: Any = model.get_submodule(path_.removesuffix("conv") + "bn")  # folded in the file
            norm.bias.copy_(bias)
            norm.running_var.fill_(1 - norm.eps)
        found = model(images)
    (wanted,) = ort.InferenceSession(path).run(None, {"images": images.numpy()})
    parts = (found["offsets"], found["objectness"].sigmoid(), found["logits"].sigmoid())
    torch.testing.assert_close(torch.cat(parts, 2), torch.from_numpy(wanted), atol=2e-4, rtol=1e-4)


def test_a_graph_gives_boxes_and_scores_alone() -> None:
    torch.manual_seed(0)
    model = yolox_nano(3, "relu").eval()
    graph = trace(model, torch.randn(2, 3, 64, 96))
    x = torch.randn(3, 3, 64, 96)
    with torch.no_grad():
        found, wanted = graph.eval()(x), model(x)
        torch.testing.assert_close(found, (wanted["boxes"], wanted["scores"]))
        assert len(graph.train()(x)) == 5
    assert graph.meta["outputs"] == ("boxes", "scores")


def test_yolox_assigns_boxes_to_cells_around_centres() -> None:
    torch.manual_seed(0)
    model = yolox_nano(3, "relu")
    outputs = model(torch.randn(2, 3, HEIGHT, WIDTH))
    cells, strides = model._known[outputs["boxes"].shape[1]]
    truth = targets()[0, :2]
    logits, objectness, boxes = (outputs[part][0] for part in ("logits", "objectness", "boxes"))
    loss = YoloxLoss(cells, strides)
    chosen, owner = loss._assigned(logits, objectness, boxes, truth[:, 1:5], truth[:, 0].long())
    assert set(owner.tolist()) == {0, 1} and len(set(chosen.tolist())) == len(chosen)
    middles = (truth[owner, 1:3] + truth[owner, 3:5]) / 2
    near = (cells[chosen] + strides[chosen] / 2 - middles).abs() / strides[chosen]
    assert float(near.max()) < 1.5


@pytest.mark.slow
def test_yolox_learns_a_picture_by_heart() -> None:
    torch.manual_seed(0)
    model = yolox_nano(3, "relu").train()
    images, truth = torch.randn(2, 3, 64, 96), targets()
    truth[..., 1:5] *= 0.6
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(60):
        outputs = list(model(images).values())
        loss = model.criterion(outputs[2:], truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = detections(torch.cat(outputs[:2], 2)[0].detach().numpy(), 0.3)
    for label, *corners, _ in truth[0, :2].tolist():
        best = found.corners[found.classes == int(label)][0]
        torch.testing.assert_close(torch.from_numpy(best).float(), torch.tensor(corners), atol=4, rtol=0)


def test_cells_are_decoded_as_yolox_says() -> None:
    offsets = torch.tensor([[[0.5, 0.25, 0.0, 1.0]]])
    boxes = decoded(offsets, torch.tensor([[16.0, 8.0]]), torch.tensor([[8.0]]))
    height = 8 * 2.718281828
    torch.testing.assert_close(boxes[0, 0], torch.tensor([16.0, 10 - height / 2, 24.0, 10 + height / 2]))


def test_mistakes_are_told_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"data.image_size=\[72, 96\]: expected a multiple of 32"):
        yolox_nano(3)(torch.zeros(1, 3, 72, 96))
    with pytest.raises(
        ConfigError, match=r"model\.kwargs\.activation=gelu: expected one of silu, relu, relu6, hardswish"
    ):
        yolox_nano(3, "gelu")
    with pytest.raises(ConfigError, match="the sides of anchors as ascending shares"):
        made(NAMES[0], anchor_ratios=[0.9, 0.1])
