"""Tests of how algorithms are chosen, ordered and called, and that a new one needs only two files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from command_line import CONF, ROOT
from omegaconf import OmegaConf
from torch import Tensor, fx, nn

from qatkit.algorithms import Algorithm, BiasCorrection, Equalize, algorithms_of
from qatkit.algorithms.base import STAGES
from qatkit.config.compose import compose_config, load_config
from qatkit.config.fields import Range, setting
from qatkit.config.rules import validate
from qatkit.config.schema import Config
from qatkit.graph.pass_result import PassResult
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.train.module import QATModule
from qatkit_verify.errors import ConfigError


@dataclass(frozen=True)
class Spy(Algorithm):
    """An algorithm that records its stage, whether the graph is prepared, and the batch sizes."""

    stage: ClassVar[str]
    seen: list[tuple[str, bool, list[int]]] = field(default_factory=list, compare=False)
    strength: float = setting(0.5, "of nothing", Range(0, 1))
    images: int = setting(6, "of the calibration images")

    def __call__(self, graph_module: fx.GraphModule, inputs: Any) -> PassResult:
        prepared = any(isinstance(module, FakeQuantize) for module in graph_module.modules())
        batches = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        self.seen.append((self.stage, prepared, [len(batch) for batch in batches]))
        return PassResult(graph_module, 1, [(self.stage, "skipped")])

    def notes(self, graph_module: fx.GraphModule) -> list[tuple[str, str]]:
        return [(self.stage, "noted")]


class Fused(Spy):
    """A Spy that runs before prepare_qat."""

    stage = STAGES[0]


class Prepared(Spy):
    """A Spy that runs before calibration."""

    stage = STAGES[1]


class Calibrated(Spy):
    """A Spy that runs after calibration."""

    stage = STAGES[2]


@dataclass(frozen=True)
class Imageless(Algorithm):
    """An algorithm that runs after calibration but has no `images` field."""

    stage: ClassVar[str] = STAGES[2]

    def __call__(self, graph_module: fx.GraphModule, inputs: Any) -> PassResult:
        return PassResult(graph_module)


class Stageless(Spy):
    """A Spy with an unknown stage."""

    stage = "later"


def _entry(owner: type, **settings: Any) -> dict[str, Any]:
    return {"target": f"{owner.__module__}.{owner.__name__}", **settings}


def test_each_runs_at_its_stage_with_what_that_stage_has() -> None:
    torch.manual_seed(0)
    seen: list[tuple[str, bool, list[int]]] = []
    # Listed in reverse: the stages determine the order.
    module = QATModule(
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()),
        torch.randn(2, 3, 4, 4),
        algorithms=[Calibrated(seen), Prepared(seen), Fused(seen), Fused(seen)],
    )
    assert seen == [("fused", False, [1]), ("fused", False, [1]), ("prepared", True, [1])]
    module.calibrate([torch.randn(4, 3, 4, 4)])
    module.correct([torch.randn(4, 3, 4, 4), torch.randn(2, 3, 4, 4)])
    assert seen[3:] == [("calibrated", True, [4, 2])]
    skipped = [("fused", "skipped")] * 2 + [("prepared", "skipped")]
    assert module.notes == skipped + [
        (stage, "noted") for stage in ("calibrated", "prepared", "fused", "fused")
    ]
    # Notes must not make the audit accept float operators.
    assert not set(skipped) & set(module.skipped)


def test_the_order_is_that_of_the_stages_then_as_listed() -> None:
    listed = {
        "a": _entry(Calibrated),
        "b": _entry(Fused),
        "c": _entry(Prepared),
        "d": _entry(Fused, strength=1),
    }
    found = algorithms_of(listed)
    assert list(found) == ["b", "d", "c", "a"]
    assert [type(one) for one in found.values()] == [Fused, Fused, Prepared, Calibrated]
    strength = found["d"].strength  # type: ignore[attr-defined]
    assert (strength, type(strength)) == (1.0, float)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["algorithm=none"], {}),
        (["algorithm=all"], {"equalize": Equalize(), "bias_correction": BiasCorrection()}),
        (
            ["algorithm=[equalize,bias_correction]"],
            {"equalize": Equalize(), "bias_correction": BiasCorrection()},
        ),
        (
            ["algorithm=[bias_correction,equalize]"],
            {"equalize": Equalize(), "bias_correction": BiasCorrection()},
        ),
        (["algorithm=equalize", "algorithm.equalize.relu6=relu"], {"equalize": Equalize(relu6="relu")}),
        (
            ["algorithm=bias_correction", "algorithm.bias_correction.method=analytic"],
            {"bias_correction": BiasCorrection(method="analytic")},
        ),
        (
            [
                "algorithm=bias_correction",
                "algorithm.bias_correction.trim=0",
                "algorithm.bias_correction.images=7",
            ],
            {"bias_correction": BiasCorrection(images=7, trim=0.0)},
        ),
    ],
)
def test_the_command_line_chooses_and_sets(typed: Sequence[str], expected: dict[str, Algorithm]) -> None:
    found = algorithms_of(compose_config(CONF, typed).algorithm)
    assert list(found.items()) == list(expected.items())


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        (_entry(Fused, strength=2.0), "algorithm.mine.strength=2.0: expected a number from 0 to 1"),
        (_entry(Fused, strength="much"), "algorithm.mine.strength=much: expected a value of type float"),
        (
            _entry(Fused, strenght=1.0),
            "algorithm.mine.strenght=1.0: the algorithm has no such setting (did you mean algorithm.mine.strength",
        ),
        (
            _entry(Stageless),
            f"algorithm.mine.target={__name__}.Stageless: expected an algorithm whose stage is fused, prepared",
        ),
        (
            _entry(Calibrated, images=0),
            "algorithm.mine.images=0: expected an integer of at least 1, because the algorithm's stage is calibrated",
        ),
        (
            _entry(Imageless),
            f"algorithm.mine.target={__name__}.Imageless: "
            f"expected an algorithm whose field `images` is at least 1, because its stage is calibrated",
        ),
        (
            _entry(Algorithm),
            "algorithm.mine.target=qatkit.algorithms.base.Algorithm: "
            "expected the dotted path of a dataclass derived from qatkit.algorithms.Algorithm that defines __call__",
        ),
        (
            _entry(Config),
            "algorithm.mine.target=qatkit.config.schema.Config: expected the dotted path of a dataclass derived",
        ),
        ({"target": "nowhere"}, "algorithm.mine.target=nowhere: expected a dotted path, such as"),
    ],
)
def test_a_mistake_names_its_key(entry: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        algorithms_of({"mine": entry})
    assert str(raised.value).startswith(line)


@pytest.mark.parametrize("entry", ["analytic", True, None, {"relu6": "relu"}, {"target": 3}, ["a"]])
def test_an_entry_says_what_it_is(entry: Any) -> None:
    with pytest.raises(ConfigError, match=r"^algorithm\.mine=.*: expected \{target: DOTTED_PATH"):
        validate(Config(algorithm={"mine": entry}))


def test_settings_have_limits_in_python_too() -> None:
    with pytest.raises(
        ConfigError, match=r"BiasCorrection\.method=mean: expected one of analytic, empirical"
    ):
        BiasCorrection(method="mean")
    with pytest.raises(ConfigError, match=r"Equalize\.rounds=0: expected an integer of at least 1"):
        Equalize(rounds=0)


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        ({"equalize": False, "relu6": "keep", "bias_correction": "none", "bias_images": 128}, {}),
        (
            {"equalize": True, "relu6": "relu", "bias_correction": "analytic", "bias_images": 64},
            {
                "equalize": Equalize(relu6="relu"),
                "bias_correction": BiasCorrection(method="analytic", images=64),
            },
        ),
        (
            {"equalize": False, "relu6": "keep", "bias_correction": "empirical", "bias_images": 9},
            {"bias_correction": BiasCorrection(images=9)},
        ),
        ({"equalize": True}, {"equalize": Equalize()}),  # the oldest form, which had no other key
    ],
)
def test_a_configuration_of_before_still_loads(
    tmp_path: Path, old: dict[str, Any], expected: dict[str, Algorithm]
) -> None:
    OmegaConf.save(OmegaConf.create({"name": "old", "algorithm": old}), tmp_path / "config.yaml")
    assert algorithms_of(load_config(tmp_path / "config.yaml").algorithm) == expected


ZERO = '''
"""Every bias of a Linear becomes one value."""
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar
import torch
from qatkit.algorithms import Algorithm
from qatkit.config.fields import COUNT, Range, setting
from qatkit.graph.pass_result import PassResult
from qatkit.quant.qat_layers import QATLinear

@dataclass(frozen=True)
class Level(Algorithm):
    """Levels biases."""
    stage: ClassVar[str] = "calibrated"
    value: float = setting(0.5, "of every bias", Range(0, 1))
    images: int = setting(5, "looked at", COUNT)

    def __call__(self, graph_module, inputs):
        print("images", sum(len(batch) for batch in inputs))
        with torch.no_grad():
            for module in graph_module.modules():
                if isinstance(module, QATLinear):
                    module.bias.fill_(self.value)
        return PassResult(graph_module, 1)

    def notes(self, graph_module):
        return [("everywhere", f"level {self.value}")]
'''


@pytest.mark.slow  # three processes
def test_a_new_algorithm_takes_two_files(tmp_path: Path) -> None:
    """A module and a YAML file outside qatkit add an algorithm to the command line and the help."""
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "level.py").write_text(ZERO)
    (tmp_path / "my_conf" / "algorithm").mkdir(parents=True)
    (tmp_path / "my_conf" / "algorithm" / "level.yaml").write_text(
        "level: {target: my_package.level.Level, value: 0.25}"
    )
    paths = [str(tmp_path), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def train(*typed: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "train.py"), "--config-dir", "my_conf", *typed]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=200
        )

    done = train(
        "algorithm=[equalize,level]", "algorithm.level.images=7", "model.name=tiny_run.Net", "data.image_size=8",
        "data.workers=0", "calibration.images=64", "schedule=calibrate_only", "trainer=cpu", "trainer.progress=false",
        "verify.latency_runs=3", "verify.max_drop=null", "verify.min_agreement=null", "output_dir=out",
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "images 7\n" in done.stdout
    stored = torch.load(tmp_path / "out" / "last.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(stored["graph.fc.bias"], torch.full((10,), 0.25))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert ["everywhere", "level 0.25"] in report["skipped"]
    assert "level" in report["timings"]
    assert load_config(tmp_path / "out" / "config.yaml").algorithm["level"]["images"] == 7

    wrong = train("algorithm=level", "algorithm.level.value=2")
    assert (wrong.returncode, wrong.stderr) == (
        2,
        "error: algorithm.level.value=2: expected a number from 0 to 1\n",
    )
    helped = train("--help")
    assert "  algorithm.level.value: float = 0.5  (0 to 1)\n      of every bias\n" in helped.stdout
