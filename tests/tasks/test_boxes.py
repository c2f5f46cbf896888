"""Tests of detectors' boxes in every layout, against torchvision's NMS and IoU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torchvision.ops import batched_nms, box_iou

from qatkit.tasks import Task, task_of
from qatkit.tasks.decisions.matched_boxes import Boxes, overlap, suppressed
from qatkit_verify.errors import ConfigError

DRAW = np.random.default_rng(0)
Array = NDArray[np.float32]
PICTURES, COUNT, CLASSES = 6, 21 * 16, 5  # boxes: the number of cells of a 128 x 128 picture


def drawn(draw: np.random.Generator, pictures: int = PICTURES) -> tuple[Array, Array]:
    """Returns overlapping boxes [N, boxes, 4] in pixels, and scores [N, boxes, classes], mostly low."""
    low = draw.integers(0, 12, (pictures, COUNT, 2)) * 8 + draw.normal(0, 2, (pictures, COUNT, 2))
    size = draw.choice([16.0, 24.0], (pictures, COUNT, 2)) + draw.uniform(0, 4, (pictures, COUNT, 2))
    scores = draw.uniform(0, 1, (pictures, COUNT, CLASSES)) ** 12
    return np.concatenate([low, low + size], 2).astype(np.float32), scores.astype(np.float32)


def centers(corners: Array) -> Array:
    low, high = corners[..., :2], corners[..., 2:]
    return np.concatenate([(low + high) / 2, high - low], -1)


def left(corners: Array, scores: Array, least: float = 0.3, most: float = 0.45) -> list[tuple[Any, Any, Any]]:
    """Returns by picture the corners, scores and classes above `least` that NMS at IoU `most` keeps."""
    found: list[tuple[Any, Any, Any]] = []
    for boxes, by_class in zip(
        torch.from_numpy(corners).double(), torch.from_numpy(scores).double(), strict=True
    ):
        best, classes = by_class.max(1)
        kept = best > least
        some = boxes[kept], best[kept], classes[kept]
        order = batched_nms(*some, most)
        found.append((some[0][order], some[1][order], some[2][order]))
    return found


def f1(exact: list[tuple[Any, Any, Any]], found: list[tuple[Any, Any, Any]], least: float = 0.5) -> float:
    """Returns the F1 score; boxes of `found`, best first, match boxes of their class by torchvision's IoU."""
    matched = both = 0
    for (boxes, _, classes), (others, _, kinds) in zip(exact, found, strict=True):
        near, free = box_iou(others, boxes), set(range(len(boxes)))
        for row, kind in zip(near, kinds, strict=True):
            able = [one for one in free if classes[one] == kind and row[one] >= least]
            if able:
                free.remove(max(able, key=lambda one: float(row[one])))
                matched += 1
        both += len(boxes) + len(others)
    return 2 * matched / both


def layouts(corners: Array, scores: Array) -> dict[str, list[Array]]:
    """Returns a model's outputs for the same boxes in each layout, by the decision that reads it."""
    high = scores.max(2, keepdims=True)
    final = np.concatenate([corners, high, scores.argmax(2)[..., None].astype(np.float32)], 2)
    yolo = np.concatenate([centers(corners), high**0.5, scores / high**0.5], 2)
    later = np.concatenate([centers(corners), scores], 2)
    background = np.concatenate([1 - scores.sum(2, keepdims=True), scores], 2)
    return {
        "boxes(layout=objectness)": [yolo],
        "boxes": [later.transpose(0, 2, 1)],
        "boxes(layout=classes)": [later],
        "boxes()": [scores, corners],
        "boxes(form=center)": [centers(corners), scores],
        "boxes(scores=sigmoid)": [corners, np.log(scores + 1e-30) - np.log1p(-scores)],
        "boxes(background=0)": [corners, background],
        "boxes(scores=softmax)": [corners, np.log(background.clip(1e-30))],
        "boxes(score=0.3,iou=0.5)": [final],
    }


def suited(decision: str, outputs: list[Array], names: tuple[str, ...] = ("a", "b", "c")) -> Task:
    return task_of("outputs", decision).suited(outputs, names[: len(outputs)], len(outputs[0]))


@pytest.mark.parametrize("decision", layouts(*drawn(DRAW, 1)))
def test_every_layout_gives_the_f1_of_torchvision(decision: str) -> None:
    draw = np.random.default_rng(3)
    corners, scores = drawn(draw)
    scores /= scores.sum(2, keepdims=True).clip(1)  # sums up to 1, as after softmax
    moved = (corners + draw.normal(0, 2.5, corners.shape)).astype(np.float32)
    changed = (scores * draw.uniform(0.8, 1.0, scores.shape)).astype(np.float32)
    exact, found = layouts(corners, scores)[decision], layouts(moved, changed)[decision]
    task = suited(decision, exact)
    wanted = f1(left(corners, scores), left(moved, changed))
    assert 0.5 < wanted < 0.95
    count = task.agreement()
    for part in (slice(0, 4), slice(4, 6)):
        count.add(task.joined([one[part] for one in exact]), task.joined([one[part] for one in found]))
    assert count.share == pytest.approx(wanted) and count.doubt == ""
    assert task.names.decision == "boxes (F1 at IoU 0.5)"
    same = task.joined(exact)
    assert task.agree(same, same).all()
    assert not task.agree(same, task.joined(found)).all()


def test_offsets_from_cells_are_decoded() -> None:
    """Follows YOLOX: (offset + cell) * stride and exp(side) * stride, by stride, then by row."""
    draw, rows, boxes = np.random.default_rng(1), [], []
    for stride in (8, 16, 32):
        for y in range(128 // stride):
            for x in range(128 // stride):
                offset, side = draw.normal(0.5, 0.3, 2), draw.normal(0.5, 0.5, 2)
                rows.append([*offset, *side])
                center, size = (offset + np.array([x, y])) * stride, np.exp(side) * stride
                boxes.append([*(center - size / 2), *(center + size / 2)])
    scores = (draw.uniform(0, 1, (1, COUNT, CLASSES)) ** 8).astype(np.float32)
    raw = np.concatenate([np.array(rows)[None], np.ones((1, COUNT, 1)), scores], 2).astype(np.float32)
    corners = np.array(boxes, np.float32)[None]
    decoded = np.concatenate([centers(corners), np.ones((1, COUNT, 1)), scores], 2).astype(np.float32)
    for decision in ("boxes", "auto", "boxes(strides=8/16/32)", "boxes(size=128,strides=8/16/32)"):
        count = suited(decision, [raw]).agreement()
        count.add(raw, raw)
        task, other = suited(decision, [raw]), suited("boxes(layout=objectness)", [decoded])
        got = task._decision.boxes(raw)[0]  # type: ignore[attr-defined]
        wanted = other._decision.boxes(decoded)[0]  # type: ignore[attr-defined]
        assert got.count == wanted.count > 20 and count.share == 1
        np.testing.assert_allclose(got.corners, wanted.corners, rtol=1e-4, atol=1e-3)
    oblong = np.concatenate([raw, raw], 1)[:, : 21 * 32]
    with pytest.raises(ConfigError, match="size=HEIGHTxWIDTH"):
        suited("boxes(layout=objectness)", [oblong])
    assert suited("boxes(layout=objectness,strides=8/16/32,size=128x256)", [oblong])


def test_overlaps_and_suppression_are_those_of_torchvision() -> None:
    corners, scores = (one[0].astype(np.float64) for one in drawn(np.random.default_rng(7)))
    np.testing.assert_allclose(
        overlap(corners[:50], corners[50:]), box_iou(*map(torch.from_numpy, (corners[:50], corners[50:])))
    )
    best, classes = scores.max(1), scores.argmax(1)
    for most in (0.2, 0.45, 0.9):
        kept = suppressed(Boxes(corners, best, classes), most)
        wanted = batched_nms(*map(torch.from_numpy, (corners, best, classes)), most).numpy()
        np.testing.assert_array_equal(kept.corners, corners[wanted])
    assert overlap(np.zeros((1, 4)), np.zeros((1, 4))) == 0


def test_a_box_matches_once_and_in_its_class() -> None:
    box = np.array([[0, 0, 10, 10]], np.float32)

    def row(kind: int, score: float = 0.9) -> Array:
        return np.concatenate([box, [[score, kind]]], 1).astype(np.float32)

    empty = row(0, 0.1)
    exact = np.stack(
        [np.concatenate([row(1), empty]), np.concatenate([row(1), empty]), np.concatenate([empty, empty])]
    )
    found = np.stack(
        [np.concatenate([row(1), row(2)]), np.concatenate([row(2), empty]), np.concatenate([empty, empty])]
    )
    task = suited("boxes(layout=final)", [exact])
    count = task.agreement()
    count.add(exact, found)
    assert count.share == pytest.approx(2 * 1 / (2 + 3)) and "2 of 5 boxes" in count.remark
    assert task.agree(exact, found).tolist() == [False, False, True]


def test_pictures_without_boxes_say_nothing() -> None:
    corners, scores = drawn(np.random.default_rng(2))
    outputs = [corners, scores * 0.1]
    task = suited("boxes", outputs)
    count, rows = task.agreement(), task.joined(outputs)
    count.add(rows, rows)
    assert count.share == 1 and "no box has a score above 0.3" in count.doubt
    assert task.agree(rows, rows).all()


CORNERS, SCORES = drawn(np.random.default_rng(11))
FINAL = layouts(CORNERS, SCORES)["boxes(score=0.3,iou=0.5)"]
LATER = layouts(CORNERS, SCORES)["boxes"]
SIGNED = DRAW.normal(size=(PICTURES, COUNT, 9)).astype(np.float32)


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        ([SCORES, CORNERS], ("a", "b")),
        ([CORNERS / 128, SCORES], ("a", "b")),
        ([SCORES[..., :4], CORNERS], ("scores", "boxes")),
        ([centers(CORNERS).clip(1), SCORES], ("pred_boxes", "b")),
        (FINAL, ("a",)),
        (LATER, ("a",)),
        ([np.concatenate([LATER[0], LATER[0], LATER[0]], 2)], ("a",)),
    ],
)
def test_detectors_are_guessed(outputs: list[Array], names: tuple[str, ...]) -> None:
    assert suited("auto", outputs, names).names.decision.startswith("boxes")


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        ([SCORES[..., :4], SCORES], ("a", "b")),  # four and five classes per step
        ([np.sort(CORNERS, 2), SCORES], ("quantiles", "b")),  # sorted values
        ([centers(CORNERS), SCORES], ("states", "b")),  # four numbers
        ([SIGNED[..., :4], SCORES], ("boxes", "scores")),
        ([CORNERS, SIGNED], ("boxes", "scores")),  # logits of a sigmoid or a softmax
        ([np.concatenate([FINAL[0][..., :5], FINAL[0][..., 5:] + 0.5], 2)], ("boxes",)),  # no classes
        ([np.zeros_like(FINAL[0])], ("boxes",)),  # empty
        ([np.concatenate([centers(CORNERS), SCORES], 2)], ("boxes",)),  # objectness or a class
        ([LATER[0][:, :, :-1]], ("boxes",)),  # not a number of cells
        ([SIGNED], ("boxes",)),
        ([SCORES], ("boxes",)),
        ([LATER[0].clip(0, 1)], ("boxes",)),  # probabilities of nine classes
        ([CORNERS], ("boxes",)),  # no scores
        ([CORNERS[0], SCORES[0]], ("boxes", "scores")),  # no batch axis
    ],
)  # fmt: skip
def test_what_looks_like_boxes_is_not_taken_for_them(outputs: list[Array], names: tuple[str, ...]) -> None:
    assert suited("auto", outputs, names).names.decision == "outputs (cosine of at least 0.99)"


@pytest.mark.parametrize(
    ("decision", "outputs", "message"),
    [
        ("boxes", [SCORES[..., :2]], r"expected outputs \[N, boxes, 4 .*'a' \[6, 336, 2\] .*, which"),
        ("boxes", [np.concatenate([centers(CORNERS), SCORES], 2)], r"expected boxes\(layout=objectness\) if the"),
        ("boxes", [CORNERS, CORNERS], r"expected one output \[N, boxes, 4\] named like boxes"),
        ("boxes", [CORNERS, SIGNED], r"expected scores within 0..1, or boxes\(scores=sigmoid\) or .*; they are "),
        ("boxes(layout=final)", LATER, "expected outputs with 6 values per box for layout=final"),
        ("boxes(strides=8/16)", LATER, r"expected boxes\(strides=8/16,size=HEIGHTxWIDTH\) with a picture of 336 cells"),
        ("boxes(background=9)", [CORNERS, SCORES], "expected a background from 0 to 4"),
    ],
)  # fmt: skip
def test_what_is_left_open_is_asked_for(decision: str, outputs: list[Array], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        suited(decision, outputs)
