"""Tests of the notes on calibration sets that are too small, lack classes or repeat one sample."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from chain import Chain, noise, settle
from torch import Tensor, fx

from qatkit.calibration import calibrate
from qatkit.calibration.checks import Watch, movement
from qatkit.graph.fuse import fuse
from qatkit.graph.prepare import prepare_qat
from qatkit.graph.stub import stub
from qatkit.quant.backends import FBGEMM
from qatkit.quant.observers import MinMaxObserver, MSEObserver, Observer
from qatkit.quant.weight_fake_quantize import Quantizers


def graph(observer: type[Observer]) -> fx.GraphModule:
    torch.manual_seed(0)
    model = settle(Chain(), 3, 12, 12)
    return prepare_qat(
        stub(fuse(model, noise(2, 3, 12, 12)).graph, noise(2, 3, 12, 12)).graph,
        FBGEMM,
        noise(2, 3, 12, 12),
        quantizers=Quantizers(observer=observer),
    ).graph.eval()


def batches(growth: float, labels: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields ten batches of eight images; the values of the last four batches are `growth` times larger."""
    for i in range(10):
        x = noise(8, 3, 12, 12, seed=0 if growth == 1 else i) * (growth if i >= 6 else 1)
        yield x, torch.arange(8) % labels


@pytest.mark.parametrize("observer", [MinMaxObserver, MSEObserver])
def test_ranges_that_still_move_are_named(observer: type[Observer]) -> None:
    prepared = graph(observer)
    watch = Watch(prepared, 80, ["a", "b"])
    calibrate(prepared, watch(batches(3.0, 2)))
    (note,) = watch.notes()
    assert "4 of 4 ranges moved by more than 5 % between 32 and 80 images" in note


@pytest.mark.parametrize("observer", [MinMaxObserver, MSEObserver])
def test_settled_ranges_and_full_classes_need_no_word(observer: type[Observer]) -> None:
    prepared = graph(observer)
    watch = Watch(prepared, 80, ["a", "b"])
    calibrate(prepared, watch(batches(1.0, 2)))
    assert watch.notes() == []


def test_one_batch_alone_cannot_tell_and_says_so() -> None:
    prepared = graph(MinMaxObserver)
    watch = Watch(prepared, 8, ["a", "b"])
    calibrate(prepared, watch([next(batches(1.0, 2))]))
    (note,) = watch.notes()
    assert note.startswith("calibration: all images (8) were in one batch")


def test_classes_without_a_sample_are_named() -> None:
    prepared = graph(MinMaxObserver)
    watch = Watch(prepared, 80, ["a", "b", "c", "d"], "recordings")
    calibrate(prepared, watch(batches(1.0, 2)))
    assert watch.notes() == ["calibration: 2 of 4 classes have no recordings in the calibration set (c, d)"]


@pytest.mark.parametrize("differs", [False, True])
def test_equal_samples_are_reported(differs: bool) -> None:
    prepared = graph(MinMaxObserver)
    given = [(torch.full((8, 3, 12, 12), 0.5), torch.arange(8) % 2) for _ in range(10)]
    given[9][0][7, 2, 11, 11] += differs
    watch = Watch(prepared, 80, ["a", "b"])
    calibrate(prepared, watch(given))
    assert ("calibration: all 80 images are equal; check the data" in watch.notes()) == (not differs)


def test_a_movement_is_a_share_of_the_length() -> None:
    assert movement((-1.0, 1.0), (-1.0, 3.0)) == 0.5
    assert movement((0.0, 0.0), (0.0, 0.0)) == 0.0
