"""Tests of Contest, which compares alternatives, with made-up verdicts, and of a chooser built on it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from chain import noise
from torch import fx, nn

from qatkit.calibration.candidates import METHODS, apply, candidates
from qatkit.choose.contest import Contest, Entrant, Judged, decided, judged, resumed
from qatkit.choose.judge import Judge, Runtime
from qatkit.choose.verdict import Verdict, aim, chance, keeps, meets, why_not
from qatkit.config.schema import Config, ExportConfig, TargetConfig, VerifyConfig
from qatkit.quant.observers import MSEObserver
from qatkit.quant.weight_fake_quantize import Quantizers
from qatkit.train.module import QATModule


def trial(name: str, verdict: float, seconds: float = 0.0) -> Judged[str, float]:
    return Judged(name, f"{name}.onnx", verdict, seconds)


def by_a_tenth(trial: float, kept: float) -> str:
    return "" if trial > kept + 0.1 else f"{trial:g} is no more than {kept:g} and a tenth"


def test_each_entrant_is_compared_with_what_is_kept_so_far() -> None:
    contest: Contest[str, float] = Contest(by_a_tenth, "pays")
    contest.keep(trial("none", 1.0), "the first")
    for name, verdict in (("a", 1.5), ("b", 1.55), ("c", 1.7)):
        contest.enter(trial(name, verdict))
    contest.leave_out("d", "not tried")
    assert [(one.name, one.verdict, one.kept, one.why) for one in contest.outcomes.values()] == [
        ("none", 1.0, True, "the first"),
        ("a", 1.5, True, "pays"),
        ("b", 1.55, False, "1.55 is no more than 1.5 and a tenth"),
        ("c", 1.7, True, "pays"),
        ("d", None, False, "not tried"),
    ]
    assert contest.kept == trial("c", 1.7)


@pytest.mark.parametrize(("alone", "kept", "why"), [(1.65, False, "superfluous"), (1.4, True, "pays")])
def test_an_entrant_that_pays_nothing_yields_to_a_simpler_one(alone: float, kept: bool, why: str) -> None:
    contest: Contest[str, float] = Contest(by_a_tenth, "pays")
    for name, verdict in (("a", 1.5), ("b", 1.7)):
        contest.enter(trial(name, verdict, seconds=2))
    contest.yield_to(trial("b alone", alone, seconds=3), ["a"], "superfluous")
    a, b = contest.outcomes.values()
    assert (a.kept, a.why, b.kept, b.seconds) == (kept, why, True, 5)
    assert contest.kept is not None and contest.kept.name == "b"
    assert (contest.kept.verdict, contest.kept.made) == ((1.7, "b.onnx") if kept else (alone, "b alone.onnx"))


def test_one_of_all_is_chosen_by_a_rule() -> None:
    found = decided(
        {"a": 3.0, "b": 1.0, "c": 2.0}, lambda all_of: (min(all_of, key=all_of.__getitem__), "least")
    )
    assert [(one.name, one.kept, one.why) for one in found.values()] == [
        ("a", False, ""),
        ("b", True, "least"),
        ("c", False, ""),
    ]


def test_a_judge_gets_what_was_made_and_its_name() -> None:
    found = judged(Entrant("a", lambda: "a.onnx"), lambda made, name: f"{name}: {made}")
    assert (found.name, found.made, found.verdict) == ("a", "a.onnx", "a: a.onnx")


def test_what_a_killed_run_has_found_is_not_found_again(tmp_path: Path) -> None:
    path, calls = tmp_path / "choice.partial", []

    def find() -> list[str]:
        calls.append(1)
        return ["a"]

    for _ in range(2):
        assert resumed(path, find, lambda stored: list(stored["kept"]), lambda kept: {"kept": kept}) == ["a"]
    assert len(calls) == 1 and json.loads(path.read_text()) == {"kept": ["a"]}


def verdict(right: str, errors: list[float] | float = 0.1, same: str | None = None) -> Verdict:
    """Returns a verdict on images.

    Args:
        right: a 1 for each correctly classified image and a 0 for each other one; "" without labels.
        errors: the error of each image, or of all.
        same: a 1 for each image with the class of float and a 0 for each other one; None: all 1.
    """
    images = len(right or same or "")
    flags = [
        None if text == "" else np.array([c == "1" for c in text]) for text in (right, same or "1" * images)
    ]
    assert flags[1] is not None
    return Verdict(flags[0], flags[1], np.broadcast_to(np.array(errors), images).astype(np.float64))


@pytest.mark.parametrize(
    ("trial", "kept", "why"),
    [
        # Five images lost and none won: 5 > 2 sqrt(5) = 4.47. Four: 4 = 2 sqrt(4).
        (verdict("00000111", 0.0), verdict("11111111"), "loses 5 images"),
        (verdict("00001111", 0.0), verdict("11111111"), ""),
        # Seven lost, two won: 5 < 2 sqrt(9).
        (verdict("0000000111", 0.0), verdict("1111111001", 0.2), ""),
        # Gains 1, 1, 1, 2: mean 1.25, standard deviation 0.5, two standard errors 0.5.
        (verdict("1111", [1, 1, 1, 0]), verdict("1111", [2, 2, 2, 2]), ""),
        # Gains 2, 0, 0, 0: mean 0.5, standard deviation 1, two standard errors 1; and the reverse.
        (verdict("1111", [0, 2, 2, 2]), verdict("1111", [2, 2, 2, 2]), "no difference beyond noise"),
        (verdict("1111", [2, 2, 2, 2]), verdict("1111", [0, 2, 2, 2]), "no difference beyond noise"),
        (verdict("1111", [2, 2, 2, 2]), verdict("1111", [1, 1, 1, 0]), "worse"),
        (
            verdict("1", 0.0),
            verdict("1", 1.0),
            "no difference beyond noise",
        ),  # one image gives no estimate of noise
        (verdict("11"), verdict("11"), "finds nothing to change"),
        (verdict("11", math.nan), verdict("11"), "its outputs are not finite"),
        (verdict("11"), verdict("11", math.inf), "nothing to compare with"),
    ],
)
def test_a_trial_pays_beyond_noise_or_not(trial: Verdict, kept: Verdict, why: str) -> None:
    assert why_not(trial, kept) == why


@pytest.mark.parametrize(
    ("found", "exact", "target", "sure", "met"),
    [
        # One of ten images lost, ten points; (1 + 1) images of noise are 100 sqrt(2) / 10 = 14.14 points.
        (verdict("0111111111"), verdict("1111111111"), TargetConfig(max_drop=38.3), 2, True),
        (verdict("0111111111"), verdict("1111111111"), TargetConfig(max_drop=38.2), 2, False),
        (verdict("0111111111"), verdict("1111111111"), TargetConfig(max_drop=0.0), -1, True),
        # One lost, one won: no drop, 100 sqrt(3) / 10 = 17.32 points of noise.
        (verdict("0111111111"), verdict("1111111110"), TargetConfig(max_drop=34.7), 2, True),
        (verdict("0111111111"), verdict("1111111110"), TargetConfig(max_drop=34.6), 2, False),
        # Without labels: one of ten differs, sqrt(0.1 * 0.9 / 10 + 1 / 100) = 0.1378.
        (verdict("", same="0111111111"), verdict("", same="1111111111"), TargetConfig(min_agreement=0.624), 2, True),
        (verdict("", same="0111111111"), verdict("", same="1111111111"), TargetConfig(min_agreement=0.625), 2, False),
    ],
)  # fmt: skip
def test_a_target_is_met_with_so_much_to_spare(
    found: Verdict, exact: Verdict, target: TargetConfig, sure: float, met: bool
) -> None:
    assert meets(found, exact, target, sure) is met


def test_targets_are_met_by_top1_or_without_labels_by_agreement() -> None:
    target = TargetConfig(max_drop=0.3, min_agreement=0.97)
    assert keeps(target, 0.3, 0.0, 5.0) and not keeps(target, 0.31, 1.0, 5.0)
    assert not keeps(target, 0.3 + 1e-10, 1.0, 5.0) and keeps(target, 0.3 + 1e-10, 1.0, 5.0, slack=1e-9)
    assert keeps(target, None, 0.97, 5.0) and not keeps(target, None, 0.96, 5.0)


def test_without_labels_the_target_includes_the_bounds() -> None:
    bounds = VerifyConfig(min_float_agreement=0.995, min_float_sqnr=40.0)
    config = Config(verify=bounds, target=TargetConfig(min_agreement=0.99))
    target = aim(config, labelled=False)
    assert keeps(target, None, 0.996, 41.0) and keeps(target, None, 0.996, None)
    assert not keeps(target, None, 0.994, 41.0) and not keeps(target, None, 0.996, 39.0)
    assert keeps(aim(config, labelled=True), 0.0, 0.5, 5.0)
    more = replace(config, target=TargetConfig(min_sqnr=50.0))
    assert not keeps(aim(more, labelled=False), None, 1.0, 49.0)
    unbound = replace(config, verify=VerifyConfig(min_float_agreement=None, min_float_sqnr=None))
    assert keeps(aim(unbound, labelled=False), None, 0.99, -3.0)


def test_noise_of_a_difference() -> None:
    assert chance(24, 500) == pytest.approx(1.0) and chance(0, 100) == pytest.approx(1.0)


def test_a_verdict_has_its_figures() -> None:
    found = verdict("1101", [0.1, 0.1, 0.1, 0.1], same="1100")
    assert (found.score, found.agreement) == (75.0, 0.5)
    assert found.error == pytest.approx(0.1) and found.sqnr_db == pytest.approx(10.0)
    assert verdict("1", 0.0).sqnr_db is None and verdict("1", math.nan).error is None


PERCENTILES = ("percentile 99.999", "percentile 99.9")


def choose_percentile(graph: fx.GraphModule, judge: Judge) -> tuple[str, dict[str, float | None]]:
    """Applies the wider of two percentiles to a calibrated graph, or the other if it is better beyond noise.

    Returns:
        The chosen percentile, and the SQNR of both in dB.
    """
    offered = candidates(graph, {name: METHODS[name] for name in PERCENTILES})

    def made(name: str) -> fx.GraphModule:
        apply(graph, offered[name])
        return graph

    contest: Contest[fx.GraphModule, Verdict] = Contest(why_not)
    for name in offered:
        contest.enter(judged(Entrant(name, partial(made, name)), judge))
    assert contest.kept is not None
    made(contest.kept.name)
    return contest.kept.name, {
        name: one.verdict.sqnr_db for name, one in contest.outcomes.items() if one.verdict is not None
    }


@pytest.mark.parametrize(("far", "winner"), [(1.0, PERCENTILES[0]), (1000.0, PERCENTILES[1])])
def test_a_new_chooser_is_its_entrants_its_rule_and_its_record(
    far: float, winner: str, tmp_path: Path
) -> None:
    """A rare outlier pixel whose weight is 0 is better left out of the range."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 4)).eval()
    x = noise(96, 3, 8, 8)
    with torch.no_grad():
        net.get_parameter("1.weight")[:, 0] = 0
        x[::32, 0, 0, 0] = far
    module = QATModule(net, x[:2], quantizers=Quantizers(observer=MSEObserver))
    module.calibrate([x[:64]])
    runtime = Runtime(ExportConfig(), {}, 1, False)
    judge = Judge(module.graph, x[:2], [(x[64:], torch.zeros(32, dtype=torch.int64))], tmp_path, runtime, "")
    found, decibels = choose_percentile(module.graph, judge)
    assert found == winner and found == max(decibels, key=lambda name: decibels[name] or 0)
    with torch.no_grad():
        exact, int8 = net(x[64:]).double(), module.convert().graph(x[64:]).double()  # the winner's ranges
    size = (exact - exact.mean(1, keepdim=True)).square().mean()
    assert decibels[found] == pytest.approx(-10 * math.log10((int8 - exact).square().mean() / size), abs=0.01)
