"""Tests of the demo page's boxes and masks in a real browser, against ONNX Runtime, torchvision and NumPy."""

from __future__ import annotations

import colorsys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boxed_pictures
import labelled_pictures
import numpy as np
import onnxruntime as ort
import pytest
import tiny_detector
import tiny_segmenter
import torch
from numpy.typing import NDArray
from page_browser import chromium, javascript_packages, open_page, wait_for_answer
from torchvision.ops import batched_nms

from qatkit.jobs import pipeline
from qatkit.run.build import data_of

pytestmark = pytest.mark.slow
_PIXELS = """(canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return { pixels: [...data], width: canvas.width, height: canvas.height };
}"""


@pytest.fixture(scope="module")
def npm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with javascript_packages(tmp_path_factory.mktemp("npm")) as folder:
        yield folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture(params=[1280, 400])
def width(request: pytest.FixtureRequest) -> int:
    """Returns the window width in pixels, of a desktop and of a phone."""
    return int(request.param)


def _run(module: Any, npm: Path, root: Path, pictures: str) -> tuple[Path, NDArray[np.float32], Path]:
    """Makes a run with a demo page; returns its folder, the first test picture as model input and as file."""
    folder = npm / module.__name__
    runtime = npm / "node_modules" / "onnxruntime-web"
    told = ("export.bundle=true", "export.demo=true", f"export.demo_runtime={runtime}", "data.augment=none")
    config = module.asked(folder, root, *told)
    assert pipeline.train(config) == 0
    images, _ = next(iter(data_of(config).test_batches()))
    return folder, images[:1].numpy(), sorted(root.glob(pictures))[0]


@pytest.fixture(scope="module")
def detector(npm: Path) -> tuple[Path, NDArray[np.float32], Path]:
    return _run(tiny_detector, npm, boxed_pictures.voc_folder(npm / "boxed", 48, 12), "JPEGImages/test*.png")


@pytest.fixture(scope="module")
def segmenter(npm: Path) -> tuple[Path, NDArray[np.float32], Path]:
    return _run(tiny_segmenter, npm, labelled_pictures.folder(npm / "labelled", 48, 12), "test/*.png")


def _answer(page: Any, picture: Path) -> tuple[list[tuple[str, float]], NDArray[np.uint8]]:
    """Returns (label, percentage) pairs of the INT8 answer, and its picture, uint8 [height, width, 3]."""
    page.set_input_files("#file", picture)
    page.locator("#caption", has_text=picture.name).wait_for()
    wait_for_answer(page)
    items = page.locator(".int8 li")
    shares = [float(text.split("\u00a0")[0]) for text in items.locator(".share").all_text_contents()]
    found = page.locator(".int8 canvas").evaluate(_PIXELS)
    pixels = np.array(found["pixels"], np.uint8).reshape(found["height"], found["width"], 4)
    return list(zip(items.locator(".label").all_text_contents(), shares, strict=True)), pixels[..., :3]


def _colour(label: int) -> NDArray[np.float64]:
    red = colorsys.hls_to_rgb(137.508 * label % 360 / 360, 0.42 if label % 2 else 0.58, 0.75)
    return 255 * np.array(red)


def _fits(page: Any, width: int) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth") <= width)


def test_the_page_draws_the_boxes_of_the_file(
    browser: Any, detector: tuple[Path, NDArray[np.float32], Path], width: int
) -> None:
    folder, images, picture = detector
    page, complaints = open_page(browser, (folder / "bundle" / "demo.html").as_uri(), width)
    said, drawn = _answer(page, picture)
    found = ort.InferenceSession(folder / "model.int8.onnx").run(None, {"input": images})
    boxes, scores = (torch.from_numpy(one[0]) for one in found)
    places, labels = (scores > 0.3).nonzero(as_tuple=True)
    values = scores[places, labels]
    kept = batched_nms(boxes[places], values, labels, 0.6)
    names = ("brick", "leaf")
    assert [name for name, _ in said] == [names[int(one)] for one in labels[kept]] and len(kept) > 1
    np.testing.assert_allclose([share for _, share in said], 100 * values[kept].numpy(), atol=0.06)
    height, wide = drawn.shape[:2]
    for label, (x1, y1, x2, y2) in zip(labels[kept], boxes[places][kept].numpy(), strict=True):
        middle = int(np.clip((y1 + y2) / 2, 0, height - 1)), int(np.clip((x1 + x2) / 2, 0, wide - 1))
        for row, column in ((middle[0], round(x1)), (round(y1), middle[1])):
            near = drawn[max(0, row - 1) : row + 2, max(0, column - 1) : column + 2].reshape(-1, 3)
            assert np.abs(near - _colour(int(label))).sum(1).min() < 120, (label, row, column)
    assert _fits(page, width) and complaints == []
    page.close()


def test_the_page_draws_the_class_of_each_pixel(
    browser: Any, segmenter: tuple[Path, NDArray[np.float32], Path], width: int
) -> None:
    folder, images, picture = segmenter
    page, complaints = open_page(browser, (folder / "bundle" / "demo.html").as_uri(), width)
    said, drawn = _answer(page, picture)
    logits, *_ = ort.InferenceSession(folder / "model.int8.onnx").run(None, {"input": images})
    classes = logits[0].argmax(0)
    names, shares = ("ground", "brick", "leaf"), np.bincount(classes.ravel(), minlength=3) / classes.size
    order = [label for label in np.argsort(-shares, kind="stable") if shares[label]]
    assert [name for name, _ in said] == [names[label] for label in order] and len(order) > 1
    np.testing.assert_allclose([share for _, share in said], 100 * shares[order], atol=0.06)
    seen = page.locator("#seen").evaluate(_PIXELS)
    plain = np.array(seen["pixels"], np.uint8).reshape(seen["height"], seen["width"], 4)[..., :3]
    wanted = 0.4 * plain + 0.6 * np.stack([_colour(label) for label in range(3)])[classes]
    assert drawn.shape == wanted.shape and np.abs(drawn - wanted).max() < 3
    assert _fits(page, width) and complaints == []
    page.close()
