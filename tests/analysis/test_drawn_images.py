"""Tests of the images drawn for the sensitivity estimate: those clipped most, and random others with larger weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chain import Mlp, calibrated, noise
from torch import Tensor, fx, nn

from qatkit.analysis import drawn_images
from qatkit.analysis.drawn_images import DrawnImages, reach_beyond
from qatkit.analysis.estimate import estimate
from qatkit.analysis.switches import switches
from qatkit.graph.phase import inference, set_phase
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.observers import MinMaxObserver
from qatkit.quant.spec import QuantSpec
from qatkit.records.analysis import ACTIVATION


def subject() -> tuple[fx.GraphModule, Tensor]:
    """Returns a graph and 128 images that fit its ranges, except the one at index 77 (ten times larger)."""
    torch.manual_seed(0)
    images = noise(128, 12, seed=1)
    graph = calibrated(Mlp(), images)
    images[77] *= 10
    return graph, images


def drawn(graph: fx.GraphModule, images: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Returns the images and weights drawn from `images`, after a first batch of 64 others."""
    with inference(graph):
        set_phase(graph, observe=False, quantize=False)
        drawing = DrawnImages(graph, switches(graph))
        generator = torch.Generator().manual_seed(seed)
        drawing.draw((noise(64, 12, seed=2),), generator)
        (chosen,), weights = drawing.draw((images,), generator)
    return chosen, weights


def test_the_reach_is_what_lies_beyond_the_range_of_the_integers() -> None:
    quantizer = FakeQuantize(QuantSpec("uint8", symmetric=False), MinMaxObserver())
    quantizer.fix(torch.tensor(0.5), torch.tensor(55, dtype=torch.int32))  # -27.5 to 100
    values = torch.tensor([[0.0, 101.0, 3.0], [-30.0, 0.0, 101.0], [-27.5, 100.0, 99.0]])
    assert reach_beyond(quantizer, values).tolist() == [1.0, 2.5, 0.0]
    positive = FakeQuantize(QuantSpec("uint8", symmetric=False), MinMaxObserver(), (0.0, None))
    positive.fix(torch.tensor(0.5), torch.tensor(0, dtype=torch.int32))
    assert reach_beyond(positive, torch.tensor([[0.0, 130.0], [1.0, 2.0]])).tolist() == [2.5, 0.0]


def test_a_sixth_of_images_is_drawn_and_the_clipped_one_weighs_1() -> None:
    graph, images = subject()
    for seed in range(5):
        chosen, weights = drawn(graph, images, seed)
        assert len(chosen) == len(weights) == 22 and float(weights.sum()) == pytest.approx(128)
        (place,) = (chosen == images[77]).all(1).nonzero()
        assert float(weights[place]) == 1


def test_every_image_counts_once_on_the_average() -> None:
    graph, images = subject()
    counts = np.zeros(128)
    for seed in range(400):
        chosen, weights = drawn(graph, images, seed)
        found = (chosen[:, None] == images[None]).all(2).nonzero()[:, 1]
        assert len(set(found.tolist())) == 22  # no image twice
        counts[found.numpy()] += weights.numpy() / 400
    # An image weighs 0 or about 7 (standard deviation 2.5): a mean of 400 is within 5 standard errors.
    np.testing.assert_allclose(counts, 1, atol=5 * 2.5 / 20)


def test_first_images_and_fixed_batches_are_used_whole() -> None:
    graph, images = subject()
    with inference(graph):
        drawing = DrawnImages(graph, switches(graph))
        generator = torch.Generator().manual_seed(0)
        assert [len(drawing.draw((images[:20],), generator)[1]) for _ in range(3)] == [20, 12, 4]
        graph.meta["batch_axes"] = (None,)
        (chosen,), weights = drawing.draw((images,), generator)
    assert torch.equal(chosen, images) and bool((weights == 1).all())


def test_the_estimate_of_some_images_is_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Includes the input's quantizer, for which one image in 640 causes nearly all of the loss.

    From one random vector, this loss is estimated with a standard deviation of 1.4 times the mean. Means over
    20 seeds therefore differ by less than a factor of 2.
    """
    graph, images = subject()
    more = torch.cat([images, noise(512, 12, seed=3)])
    batches = [(part, part) for part in more[torch.randperm(640)].split(64)]

    def losses() -> dict[str, float]:
        rows = [estimate(graph, batches, seed=seed) for seed in range(20)]
        return {
            f"{r.kind} {r.site}": float(np.mean([one[i].loss for one in rows])) for i, r in enumerate(rows[0])
        }

    some = losses()
    monkeypatch.setattr(drawn_images, "SHARE", 1)
    every = losses()
    site = next(s for s in switches(graph) if s.kind == ACTIVATION)
    monkeypatch.setattr(drawn_images, "ALL_OF_THE_FIRST", 0)
    calm = estimate(graph, [(noise(512, 12, seed=3), [])])
    usual = next(row.loss for row in calm if (row.site, row.kind) == (site.site, site.kind))
    assert every[site.key] > 10 * usual
    for key, loss in every.items():
        assert 0.5 < some[key] / loss < 2, key


def test_images_are_drawn_without_activation_switches() -> None:
    torch.manual_seed(0)
    graph = calibrated(nn.Sequential(nn.Linear(12, 5)).eval(), noise(32, 12))
    weights_alone = [s for s in switches(graph) if s.kind != ACTIVATION]
    rows = estimate(graph, [(noise(64, 12, seed=4), [])], at=weights_alone)
    assert len(rows) == len(weights_alone) > 0 and all(row.loss > 0 for row in rows)
