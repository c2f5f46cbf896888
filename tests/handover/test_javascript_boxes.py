"""Tests of boxes.mjs and views.mjs in Node: NMS against torchvision's, and the demo page's views."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.ops import batched_nms

import qatkit_verify

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="no node on the PATH")
PROGRAM = """
import { readFileSync } from "node:fs";
const { view } = await import(process.argv[1]);
const { task, answers, names, how } = JSON.parse(readFileSync(0, "utf8"));
const { top, draw } = view(task, answers, names, how);
const drawn = [];
const note = (kind) => (...numbers) => drawn.push([kind, ...numbers]);
if (draw) draw({ canvas: { width: 40 }, strokeRect: note("box"), fillRect: note("pixels") });
console.log(JSON.stringify({ top, drawn }));
"""


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the modules of the page, which import one another."""
    folder = tmp_path_factory.mktemp("modules")
    for path in (Path(qatkit_verify.__file__).parent / "javascript").glob("*.mjs"):
        shutil.copy(path, folder)
    own = resources.files("qatkit.handover.demo") / "views.mjs"
    (folder / "views.mjs").write_text(own.read_text(encoding="utf-8"))
    return folder


def shown(modules: Path, **given: Any) -> dict[str, Any]:
    command = [str(NODE), "--input-type=module", "-e", PROGRAM, str(modules / "views.mjs")]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_boxes_are_those_of_torchvision(modules: Path) -> None:
    draw = np.random.default_rng(0)
    corners = np.sort(draw.uniform(0, 40, (60, 2, 2)), 1).reshape(60, 4)
    scores = draw.uniform(0, 1, (60, 3)) ** 2
    answers = {"boxes": corners.ravel().tolist(), "scores": scores.ravel().tolist()}
    found = shown(modules, task="detection", answers=answers, names=["boxes", "scores"], how={})
    places, labels = (torch.from_numpy(scores) > 0.3).nonzero(as_tuple=True)
    values, boxes = torch.from_numpy(scores)[places, labels], torch.from_numpy(corners)[places]
    kept = batched_nms(boxes, values, labels, 0.6)
    assert [one["label"] for one in found["top"]] == labels[kept].tolist()
    np.testing.assert_allclose([one["share"] for one in found["top"]], values[kept])
    x, y, width, height = np.array([one[1:] for one in found["drawn"]]).T
    np.testing.assert_allclose(np.stack([x, y, x + width, y + height], 1), boxes[kept], atol=1e-9)
    assert 5 < len(kept) < len(values)


def test_a_map_paints_every_pixel_once(modules: Path) -> None:
    logits = np.random.default_rng(1).normal(size=(3, 4, 5))
    how = {"output": {"shape": [1, 3, 4, 5]}}
    found = shown(modules, task="segmentation", answers={"y": logits.ravel().tolist()}, names=["y"], how=how)
    labels = logits.argmax(0)
    shares = {one["label"]: one["share"] for one in found["top"]}
    assert shares == {int(label): (labels == label).mean() for label in np.unique(labels)}
    painted = np.zeros((32, 40), np.int64)
    for _, x, y, width, height in found["drawn"]:
        painted[y : y + height, x : x + width] += 1
    assert (painted == 1).all()


def test_a_classifier_has_its_likeliest_classes(modules: Path) -> None:
    answers = {"y": [0.0, 2.0, 1.0]}
    found = shown(modules, task="classification", answers=answers, names=["y"], how={"output": {}})
    shares = np.exp([2.0, 1.0, 0.0]) / np.exp([2.0, 1.0, 0.0]).sum()
    assert [one["label"] for one in found["top"]] == [1, 2, 0] and found["drawn"] == []
    np.testing.assert_allclose([one["share"] for one in found["top"]], shares)
