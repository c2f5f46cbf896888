"""Tests of decoded strings against a plain loop, and of masks against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from qatkit.tasks import Task, task_of
from qatkit.tasks.decisions.strings import similarity
from qatkit_verify.compare import Output
from qatkit_verify.errors import ConfigError

DRAW = np.random.default_rng(0)
Array = NDArray[np.float32]


def read(steps: Array, blank: int) -> list[int]:
    """Returns the decoded string of [steps, classes] by definition: repeats merged, then blanks removed."""
    text, last = [], None
    for step in steps:
        best = max(range(len(step)), key=lambda one: (step[one], -one))
        if best not in (last, blank):
            text.append(best)
        last = best
    return text


def suited(decision: str, outputs: Array, samples: int) -> Task:
    return task_of("outputs", decision).suited([outputs], ["y"], samples)


@pytest.mark.parametrize("blank", [0, 2, -1])
def test_texts_agree_where_a_plain_loop_reads_the_same(blank: int) -> None:
    exact = DRAW.normal(size=(40, 5, 4)).astype(np.float32)
    found = exact + 0.3 * DRAW.normal(size=exact.shape).astype(np.float32)
    task = suited(f"strings({blank})", exact, 40)
    texts = [(read(a, blank % 4), read(b, blank % 4)) for a, b in zip(exact, found, strict=True)]
    same = [a == b for a, b in texts]
    assert 0.2 < np.mean(same) < 0.95
    assert task.agree(exact, found).tolist() == same
    count = task.agreement()
    for part in (slice(0, 30), slice(30, 40)):
        count.add(exact[part], found[part])
    assert count.share == np.mean(same) and count.doubt == ""
    told = np.mean([similarity(a, b) for a, b in texts])
    assert count.remark == f"mean edit similarity {100 * told:.2f} %"


def test_repeats_are_one_character_unless_a_blank_parts_them() -> None:
    steps = np.array([[1, 1, 0, 1, 2, 2], [1, 1, 1, 0, 1, 2], [0, 0, 0, 0, 0, 0]])
    outputs = np.eye(3, dtype=np.float32)[steps]
    task = suited("strings", outputs, 3)
    assert task.agree(outputs[:2], outputs[[1, 2]]).tolist() == [True, False]


def test_edit_similarity_by_hand() -> None:
    assert similarity([], []) == similarity([3], [3]) == 1
    assert similarity([1, 2, 3], []) == 0
    kitten, sitting = [list(map(ord, word)) for word in ("kitten", "sitting")]
    assert similarity(kitten, sitting) == pytest.approx(1 - 3 / 7)


def test_no_character_at_all_says_nothing() -> None:
    silent = np.eye(3, dtype=np.float32)[np.zeros((2, 4), int)]
    count = suited("strings", silent, 2).agreement()
    count.add(silent, silent)
    assert count.share == 1 and "no string has a character" in count.doubt


def test_steps_may_come_before_samples() -> None:
    outputs = DRAW.normal(size=(7, 3, 4)).astype(np.float32)
    task = suited("strings", outputs, 3)
    assert task_of("outputs", "strings").fits((7, 3, 4), 3, None)
    np.testing.assert_array_equal(task.joined([outputs]), outputs.transpose(1, 0, 2))
    one_by_one = np.concatenate(
        [outputs[:, [sample]] for sample in range(3)]
    )  # as from a file with batch size 1
    np.testing.assert_array_equal(task.joined([one_by_one]), outputs.transpose(1, 0, 2))


@pytest.mark.parametrize("decision", ["strings", "strings(3)", "mask", "boxes(layout=objectness)"])
def test_two_runtimes_are_compared_by_every_decision(decision: str) -> None:
    exact = DRAW.uniform(size=(6, 20, 20)).astype(np.float32)
    compared = Output(1, suited(decision, exact, 6).rule)
    compared.add(exact, [exact + 1e-6])
    assert compared.comparisons(1e-3)[0].agreement == 1


def test_masks_of_one_channel_by_their_overlap() -> None:
    exact, found = DRAW.uniform(size=(2, 5, 1, 6, 7)).astype(np.float32)
    exact[0] = found[0] = 0  # both masks empty: no division by 0
    found[1] = exact[1]
    for wanted, other in (
        (exact, found),
        (exact[:, 0], found[:, 0]),
        (exact[:, 0, :, :, None], found[:, 0, :, :, None]),
    ):
        task = suited("mask(0.4)", wanted, 5)
        overlaps = []
        for a, b in zip(exact > 0.4, found > 0.4, strict=True):
            overlaps.append((a & b).sum() / (a | b).sum() if (a | b).any() else 1.0)
        count = task.agreement()
        count.add(wanted[:2], other[:2])
        count.add(wanted[2:], other[2:])
        assert count.share == pytest.approx(np.mean(overlaps)) and count.doubt == ""
        assert task.agree(wanted, other).tolist() == [one >= 0.9 for one in overlaps]
        assert task.names.decision == "masks above 0.4 (mean IoU)"


@pytest.mark.parametrize("axis", [1, -1])
def test_maps_of_classes_by_their_equal_pixels(axis: int) -> None:
    exact, found = DRAW.normal(size=(2, 4, 3, 6, 7)).astype(np.float32)
    if axis == -1:
        exact, found = (one.transpose(0, 2, 3, 1) for one in (exact, found))
    found[0] = exact[0]
    task = suited(f"mask(axis={axis})", exact, 4)
    same = exact.argmax(axis) == found.argmax(axis)
    count = task.agreement()
    count.add(exact, found)
    assert count.share == pytest.approx(same.mean())
    assert task.agree(exact, found).tolist() == [True, False, False, False]


def test_empty_masks_say_nothing() -> None:
    nothing = np.zeros((2, 1, 4, 4), np.float32)
    count = suited("mask", nothing, 2).agreement()
    count.add(nothing, nothing)
    assert count.share == 1 and "all pixels of all samples have the same value" in count.doubt


@pytest.mark.parametrize(
    ("outputs", "mask"),
    [
        (np.where(DRAW.uniform(size=(2, 1, 8, 8)) < 0.3, 0.99, 0.01), True),
        (DRAW.uniform(size=(2, 1, 8, 8)), False),  # a greyscale picture or a depth map
        (np.full((2, 1, 8, 8), 0.01), False),  # an empty mask
        (np.where(DRAW.uniform(size=(2, 3, 8, 8)) < 0.3, 0.99, 0.01), False),  # three masks, or a picture
        (np.where(DRAW.uniform(size=(2, 1, 8, 8)) < 0.3, 9.0, -9.0), False),  # logits
        (np.full((2, 5, 8, 8), 0.2), True),  # probabilities of classes
        (np.full((2, 5, 8, 8), 1 / 8), False),  # probabilities of positions along a row
        (DRAW.normal(size=(2, 5, 8, 8)), False),
    ],
)
def test_masks_are_guessed_where_there_is_no_doubt(outputs: NDArray[np.float64], mask: bool) -> None:
    title = suited("auto", outputs.astype(np.float32), 2).names.decision
    assert title == "outputs (cosine of at least 0.99)" or mask
    assert not mask or title in ("masks above 0.5 (mean IoU)", "classes of pixels")


@pytest.mark.parametrize(
    ("decision", "shape", "message"),
    [
        (
            "strings(9)",
            (2, 5, 4),
            r"expected a blank from 0 to 3 .*'y' \[2, 5, 4\] .*, which suits argmax\(AXIS\)",
        ),
        ("strings", (3, 4), r"expected a first output \[N, steps, classes\]"),
        ("mask(axis=2)", (2, 3, 8, 8), r"expected mask\(axis=1\) or mask\(axis=-1\)"),
        ("mask", (2, 8), r"which suits argmax\(AXIS\), threshold\(VALUE\), cosine\(LEAST\)$"),
    ],
)
def test_shapes_that_do_not_fit_are_named(decision: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        suited(decision, np.zeros(shape, np.float32), shape[0])
