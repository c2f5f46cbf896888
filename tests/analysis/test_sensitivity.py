"""Tests of sensitivity and isolation against NumPy metrics of runs with quantizers switched on and off by hand."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from chain import Concat, Mlp, Residual, build, calibrated, noise, prepared, settle, small_vit
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from qatkit.analysis import drawn_images
from qatkit.analysis.estimate import estimate
from qatkit.analysis.isolation import isolation
from qatkit.analysis.partial_sums import Kept, key_of
from qatkit.analysis.sensitivity import ranked, sensitivity
from qatkit.analysis.switches import switches
from qatkit.calibration import calibrate
from qatkit.graph.quantizers import fake_quantizers
from qatkit.quant.fake_quantize import FakeQuantize, Quantizer
from qatkit.records.analysis import ACTIVATION, ALL_BUT, ONLY, WEIGHT, SensitivityRow
from qatkit.train.module import QATModule
from qatkit_verify.errors import ConfigError

CLASSES = 5
Array = NDArray[np.float64]


class Segmenter(nn.Module):
    """A segmentation net from [N, 3, 8, 8] to [N, 5, 8, 8], with a second output."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.aside = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 5, 1),
            nn.Conv2d(8, 1, 1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.stem(x))
        return self.head(x), self.aside(x)


@functools.cache
def subject(name: str) -> tuple[fx.GraphModule, tuple[tuple[Tensor, Tensor], ...]]:
    """Returns a calibrated graph and three labelled batches of unequal size."""
    torch.manual_seed(0)
    shape = {"mlp": (12,), "vit": (3, 32, 32)}.get(name, (3, 8, 8))
    model = {
        "mlp": Mlp,
        "residual": lambda: settle(Residual(), *shape),
        "concat": Concat,
        "segmenter": Segmenter,
        "vit": small_vit,
    }[name]().eval()  # fmt: skip
    graph = calibrated(model, noise(16, *shape))
    images = noise(20, *shape, seed=1)
    places = (8, 8) if name in ("segmenter", "concat") else ()
    labels = torch.randint(
        0, 4 if name == "concat" else CLASSES, (20, *places), generator=torch.Generator().manual_seed(2)
    )
    return graph, tuple(zip(images.split(8), labels.split(8), strict=True))


def by_hand(graph: fx.GraphModule, batches: tuple[tuple[Tensor, Tensor], ...], on: set[int]) -> list[Array]:
    """Returns the graph's first output per batch, with only the quantizers `on` (by `id`) enabled."""
    for module in graph.modules():
        if isinstance(module, Quantizer):
            module.enabled = id(module) in on
    with torch.no_grad():
        found = [graph(images) for images, _ in batches]
    for module in graph.modules():
        if isinstance(module, Quantizer):
            module.enabled = True
    return [(one[0] if isinstance(one, tuple) else one).double().numpy() for one in found]


def rows(outputs: list[Array]) -> Array:
    """Returns the outputs as one array [rows, classes], with a row per image or pixel."""
    return np.concatenate([np.moveaxis(one, 1, -1).reshape(-1, one.shape[1]) for one in outputs])


def figures(
    exact: Array, found: Array, labels: NDArray[np.int64]
) -> tuple[float, float, float, float, float]:
    """Computes top-1, agreement, KL divergence, cross entropy and SQNR from their formulas."""
    p, q = (np.exp(one - one.max(1, keepdims=True)) for one in (exact, found))
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    kl = (p * np.log(p / q)).sum(1).mean()
    noise_power = np.square(exact - found).sum()
    sqnr = 10 * np.log10(np.square(exact).sum() / noise_power) if noise_power else math.inf
    return (
        100 * (found.argmax(1) == labels).mean(),
        (found.argmax(1) == exact.argmax(1)).mean(),
        kl,
        -np.log(q[np.arange(len(q)), labels]).mean(),
        sqnr,
    )


@pytest.mark.parametrize("name", ["mlp", "residual", "concat", "vit"])
def test_every_row_equals_a_whole_run_with_phases_set_by_hand(name: str) -> None:
    graph, batches = subject(name)
    every = {id(module) for module in graph.modules() if isinstance(module, Quantizer)}
    exact = rows(by_hand(graph, batches, set()))
    labels = torch.cat([one for _, one in batches]).reshape(-1).numpy()
    sites = {(s.site, s.kind): {id(q) for q in s.quantizers} for s in switches(graph)}

    found = sensitivity(graph, batches)

    assert len(found) == 2 * len(sites) and len(set().union(*sites.values())) == len(every)
    for row in found:
        own = sites[row.site, row.kind]
        wanted = figures(
            exact, rows(by_hand(graph, batches, own if row.direction == ONLY else every - own)), labels
        )
        sqnr = math.inf if row.sqnr is None else row.sqnr
        assert (row.score, row.agreement) == pytest.approx(wanted[:2])
        assert (row.loss, row.cross_entropy, sqnr) == pytest.approx(wanted[2:], rel=2e-3, abs=1e-9)


def test_pixels_count_as_rows_and_sqnr_is_of_the_worst_output() -> None:
    graph, batches = subject("segmenter")
    exact, stem = by_hand(graph, batches, set()), next(s for s in switches(graph) if s.key == "weight stem")
    labels = torch.cat([one for _, one in batches]).reshape(-1).numpy()
    wanted = figures(rows(exact), rows(by_hand(graph, batches, {id(q) for q in stem.quantizers})), labels)

    (row,) = sensitivity(graph, batches, at=[stem], directions=[ONLY])

    assert row.cross_entropy is not None and row.sqnr is not None
    assert (row.score, row.agreement) == pytest.approx(wanted[:2])
    assert (row.loss, row.cross_entropy) == pytest.approx(wanted[2:4], rel=1e-3)
    assert row.sqnr <= wanted[4] + 1e-6


def test_without_labels_only_accuracy_figures_are_missing() -> None:
    graph, batches = subject("residual")
    known = sensitivity(graph, batches)
    blind = sensitivity(graph, [(images, [None] * len(images)) for images, _ in batches], labelled=False)
    assert [(r.score, r.cross_entropy) for r in blind] == [(None, None)] * len(known)
    assert [(r.site, r.loss, r.sqnr, r.agreement) for r in blind] == [
        (r.site, r.loss, r.sqnr, r.agreement) for r in known
    ]


def test_modes_and_phases_are_as_before() -> None:
    graph, batches = subject("residual")
    graph.train()
    chosen = next(iter(fake_quantizers(graph).values()))
    chosen.enabled = False
    asked = [p.requires_grad for p in graph.parameters()]
    before = {name: value.clone() for name, value in graph.state_dict().items()}
    sensitivity(graph, batches)
    estimate(graph, batches)
    isolation(graph, batches)
    assert graph.training and not chosen.enabled and not any(images.requires_grad for images, _ in batches)
    assert [q.enabled for q in fake_quantizers(graph).values()].count(False) == 1
    assert [p.requires_grad for p in graph.parameters()] == asked and any(asked)
    assert all(torch.equal(value, before[name]) for name, value in graph.state_dict().items())
    assert all(p.grad is None for p in graph.parameters())
    chosen.enabled = True
    graph.eval()


class KilledError(Exception):
    """An error that simulates a killed process."""


def test_a_killed_measurement_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    graph, batches = subject("residual")
    whole = sensitivity(graph, batches)
    kept = Kept(tmp_path / "sensitivity.json", key_of(graph, "images"))

    def dying() -> Iterator[tuple[Tensor, Tensor]]:
        yield from batches[:2]
        raise KilledError

    with pytest.raises(KilledError):
        sensitivity(graph, dying(), kept=kept)
    assert json.loads(kept.path.read_text())["batches"] == 2
    wrong = [(torch.full_like(images, torch.nan), labels) for images, labels in batches[:2]]
    assert sensitivity(graph, [*wrong, batches[2]], kept=kept) == whole  # finished batches aren't repeated
    assert sensitivity(graph, batches, kept=kept) == whole

    other = Kept(kept.path, key_of(graph, "other images"))
    assert other.read() == (0, {}) and kept.read()[0] == 3
    scale = next(iter(fake_quantizers(graph).values())).scale
    scale.mul_(2)
    assert key_of(graph, "images") != kept.key  # the ranges changed
    scale.div_(2)
    kept.path.write_text("{")
    assert kept.read() == (0, {})


@pytest.mark.parametrize("name", ["residual", "vit", "concat"])
def test_the_estimate_is_near_the_exact_loss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The median ratio of both losses must be near 1, and their ranks alike, with one random vector per image."""
    # All 256 images are used; a sixth is too few for these bounds (test_drawn_images.py tests the drawing).
    monkeypatch.setattr(drawn_images, "SHARE", 1)
    graph, _ = subject(name)
    shape = (3, 32, 32) if name == "vit" else (3, 8, 8)
    images = noise(256, *shape, seed=5)
    batches = [(part, part) for part in images.split(64)]
    exact = {(r.site, r.kind): r.loss for r in sensitivity(graph, batches, labelled=False, directions=[ONLY])}
    found = estimate(graph, batches)
    assert [(r.site, r.kind) for r in found] == list(exact)
    assert not any(r.exact for r in found)
    ratios = np.array([row.loss / exact[row.site, row.kind] for row in found])
    assert 0.8 < np.median(ratios) < 1.25
    ranks = [np.argsort(np.argsort(values)) for values in (list(exact.values()), [row.loss for row in found])]
    assert np.asarray(np.corrcoef(np.stack(ranks)))[0, 1] > 0.8


@pytest.mark.parametrize(
    ("kind", "place"), [(WEIGHT, 0), (WEIGHT, 1), (WEIGHT, 2), (ACTIVATION, 1), (ACTIVATION, 3)]
)
def test_a_scale_far_too_large_ranks_first(kind: str, place: int) -> None:
    torch.manual_seed(0)
    model = settle(Residual(), 3, 8, 8)
    graph = prepared(model, noise(2, 3, 8, 8)).eval()
    calibrate(graph, [noise(16, 3, 8, 8)])
    switch = [s for s in switches(graph) if s.kind == kind][place]
    (quantizer,) = switch.quantizers
    if isinstance(quantizer, FakeQuantize):
        quantizer.fix(quantizer.scale * 16, quantizer.zero_point)
    else:
        assert switch.operator is not None
        quantizer.fix(quantizer.scale(switch.operator.weight) * 16)  # type: ignore[operator]
    images = noise(32, 3, 8, 8, seed=3)
    batches = [(images, torch.zeros(32, dtype=torch.int64))]
    found = sensitivity(graph, batches)
    for chosen in (*(ranked(found, by) for by in ("loss", "sqnr")), ranked(found, direction=ALL_BUT)):
        assert (chosen[0].site, chosen[0].kind) == (switch.site, switch.kind)
    assert ranked(estimate(graph, batches))[0].site == switch.site


def test_a_ranking_is_by_the_figure_that_is_asked_for() -> None:
    made = [
        SensitivityRow("a", WEIGHT, ONLY, 70.0, 0.1, 30.0, 0.9),
        SensitivityRow("b", WEIGHT, ONLY, 60.0, 0.2, 40.0, 0.95),
        SensitivityRow("c", WEIGHT, ONLY, 80.0, 0.3, None, 0.8),
        SensitivityRow("d", WEIGHT, ALL_BUT, 80.0, 0.3, 20.0, 0.8),
        SensitivityRow("e", WEIGHT, ALL_BUT, 80.0, 0.1, 20.0, 0.8),
    ]
    names = {by: "".join(r.site for r in ranked(made, by)) for by in ("loss", "top1", "sqnr", "agreement")}
    assert names == {"loss": "cba", "top1": "bac", "sqnr": "abc", "agreement": "cab"}
    assert [r.site for r in ranked(made, direction=ALL_BUT)] == [
        "e",
        "d",
    ]  # with e in float, the loss is the smallest
    with pytest.raises(ConfigError, match=r"by=accuracy: expected one of top1, agreement, loss, sqnr"):
        ranked(made, "accuracy")


def test_a_layer_that_is_not_there_gets_near_names() -> None:
    graph, batches = subject("residual")
    with pytest.raises(
        ConfigError, match=r"analysis\.layers=conv11: the pattern matches no .*did you mean conv1"
    ):
        switches(graph, ["conv11"])
    assert {s.key for s in switches(graph, ["conv?", "fc"])} == {
        "weight conv1", "activation conv1", "weight conv2", "activation conv2", "weight fc"
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"directions=upwards: expected one of only, all but"):
        sensitivity(graph, batches, directions=["upwards"])
    with pytest.raises(ConfigError, match=r"analysis\.images=0"):
        sensitivity(graph, [])


@pytest.mark.parametrize("name", ["residual", "vit"])
def test_isolation_is_the_graph_with_one_kind_of_quantizers(name: str) -> None:
    graph, batches = subject(name)
    labels = torch.cat([one for _, one in batches]).numpy()
    activations = {id(q) for q in fake_quantizers(graph).values()}
    every = {id(module) for module in graph.modules() if isinstance(module, Quantizer)}
    exact = rows(by_hand(graph, batches, set()))
    found = isolation(
        graph, batches, runtime=lambda images: np.zeros((len(images), exact.shape[1]), np.float32)
    )
    for side, on in {"weights": every - activations, "activations": activations, "both": every}.items():
        wanted, got = figures(exact, rows(by_hand(graph, batches, on)), labels), found.outcomes[side]
        assert (got.score, got.agreement) == pytest.approx(wanted[:2])
        assert (got.loss, got.cross_entropy, got.sqnr) == pytest.approx(wanted[2:], rel=2e-3)
    assert found.outcomes["float"].sqnr is None and found.outcomes["float"].loss == 0
    assert found.outcomes["int8"].score == pytest.approx(100 * (labels == 0).mean())
    assert found.outcomes["int8"].sqnr == pytest.approx(0)
    by_class = {row.name: row for row in found.classes}
    for label in range(CLASSES):
        here, row = labels == label, by_class[str(label)]
        assert row.images == here.sum() and row.score == (100 if label == 0 else 0)
        assert row.float_score == pytest.approx(100 * (exact.argmax(1) == label)[here].mean())
    assert [row.lost for row in found.classes] == sorted((row.lost for row in found.classes), reverse=True)


class LastState(nn.Module):
    """An LSTM that maps [6, N, 4] to [N, 5] by its last state; the outputs of its steps are unused."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.lstm, self.head = nn.Linear(4, 8), nn.LSTM(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.stem(x))[1][0][-1])  # type: ignore[no-any-return]


def test_the_estimate_passes_a_layer_whose_steps_nobody_reads() -> None:
    torch.manual_seed(0)
    batches = [(noise(6, 4, 4, seed=i), torch.zeros(4, dtype=torch.long)) for i in range(2)]
    module = QATModule(LastState().eval(), batches[0][0])
    module.calibrate([x for x, _ in batches])
    losses = {row.site: row.loss or 0.0 for row in estimate(module.graph, batches) if row.kind == WEIGHT}
    assert losses["stem"] > 0 and losses["head"] > 0


def test_the_advice_names_the_side_that_loses() -> None:
    graph, batches = subject("mlp")
    fine = {id(q): q.scale.clone() for q in fake_quantizers(graph).values()}
    for quantizer in fake_quantizers(graph).values():
        quantizer.scale.mul_(16)
    blind = isolation(graph, batches, labelled=False)
    assert blind.advice.endswith("comes from the activations") and "of float's top-1" in blind.advice
    assert blind.classes == [] and blind.outcomes["both"].score is None
    for quantizer in fake_quantizers(graph).values():
        quantizer.scale.copy_(fine[id(quantizer)])
    weights = [s for s in switches(graph) if s.kind == WEIGHT]
    for switch in weights:
        assert switch.operator is not None
        switch.quantizers[0].fix(switch.operator.weight.abs().max() / 4)  # type: ignore[operator]
    assert isolation(graph, batches).advice.endswith("comes from the weights")


def test_sampled_rows_of_a_real_network_match_runs_by_hand() -> None:
    graph = calibrated(build("mobilenet_v3_small", 32), noise(4, 3, 32, 32))
    images = noise(4, 3, 32, 32, seed=3)
    at = switches(graph)[::25]
    every = {id(module) for module in graph.modules() if isinstance(module, Quantizer)}
    batches = ((images, torch.zeros(4, dtype=torch.int64)),)
    exact = rows(by_hand(graph, batches, set()))
    for row in sensitivity(graph, batches, at=at):
        own = {id(q) for s in at if (s.site, s.kind) == (row.site, row.kind) for q in s.quantizers}
        other = rows(by_hand(graph, batches, own if row.direction == ONLY else every - own))
        assert row.loss == pytest.approx(figures(exact, other, np.zeros(4, np.int64))[2], rel=1e-2, abs=1e-9)
