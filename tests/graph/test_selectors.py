"""Tests of selectors on a PyTorch model: what they select, fixed scales, and errors with near names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chain import Chain, Residual, noise
from torch import fx

from qatkit import QATModule
from qatkit.config.override_rules import check_override
from qatkit.config.schema import BackendConfig, OverrideConfig
from qatkit.config.selectors import every_override
from qatkit.graph.fixed_scales import fix_activation
from qatkit.graph.fuse import fuse
from qatkit.graph.overrides import MATCHED
from qatkit.graph.prepare import prepare_qat
from qatkit.graph.quantizers import fake_quantizers, quantized_operators
from qatkit.quant.backends import FBGEMM
from qatkit.quant.formats.quantizers import FormatFakeQuantize
from qatkit.quant.observers import MinMaxObserver
from qatkit.quant.spec import QuantSpec
from qatkit_verify.errors import ConfigError

IMAGES = noise(2, 3, 12, 12)


def prepared(model: torch.nn.Module, **backend: Any) -> fx.GraphModule:
    overrides = {one: OverrideConfig(**given) for one, given in backend.pop("overrides", {}).items()}
    asked = every_override(BackendConfig(overrides=overrides, **backend))
    return prepare_qat(fuse(model, IMAGES).graph, FBGEMM, IMAGES, asked).graph


def weighted(graph: fx.GraphModule) -> list[str]:
    return [str(node.target) for node, _, _ in quantized_operators(graph)]


@pytest.mark.parametrize(
    ("backend", "names", "left"),
    [
        ({"exclude": ["re/conv[13]"]}, ["conv1", "conv3"], ["conv2"]),
        ({"exclude": ["conv1", "op/relu6"]}, ["relu6"], ["conv2", "conv3"]),
        ({"exclude": [{"from": ["conv1"], "to": ["relu6"]}]}, ["conv1", "relu", "conv2", "relu6"], ["conv3"]),
        ({"exclude": ["subgraph/end"], "subgraphs": {"end": {"from": "relu6", "to": "op/conv"}}},
         ["relu6", "conv3"], ["conv1", "conv2"]),
        ({"only": ["conv2"]}, ["conv1", "relu", "conv3"], ["conv2"]),
        ({"only": ["conv*"], "exclude": ["conv3"]}, ["conv3"], ["conv1", "conv2"]),
    ],
)  # fmt: skip
def test_excluded_and_only_these(backend: dict[str, Any], names: list[str], left: list[str]) -> None:
    graph = prepared(Chain(), **backend)
    assert graph.meta[MATCHED][-1]["names"] == names
    assert weighted(graph) == left


def test_a_path_forks_and_joins() -> None:
    graph = prepared(Residual(), exclude=[{"from": ["stem"], "to": ["op/add"]}])
    assert weighted(graph) == ["fc"]


def test_scales_stand_through_calibration_and_training() -> None:
    overrides = {
        "tensor/conv3": OverrideConfig(activation_scale=0.05, activation_zero_point=100),
        "input/0/conv2": OverrideConfig(activation_range=[0.0, 5.1]),
        "tensor/conv2.weight": OverrideConfig(weight_scale=0.03),
    }
    torch.manual_seed(0)
    module = QATModule(Chain(), IMAGES, overrides=overrides)
    module.calibrate([IMAGES])
    optimizer = torch.optim.SGD(module.graph.parameters(), lr=0.1)
    module.graph.train()
    for _ in range(3):
        optimizer.zero_grad()
        module.graph(IMAGES).square().mean().backward()
        optimizer.step()
    found = {name: (float(q.scale), int(q.zero_point)) for name, q in fake_quantizers(module.graph).items()}
    assert found["conv3"][0] == pytest.approx(0.05) and found["conv3"][1] == 100
    assert found["conv1"][0] == pytest.approx(0.02) and found["conv1"][1] == 0
    operators = {
        str(node.target): (operator, fake) for node, operator, fake in quantized_operators(module.graph)
    }
    operator, fake = operators["conv2"]
    assert torch.allclose(fake.scale(operator.effective()[0]), torch.tensor(0.03))
    other = QATModule(Chain(), IMAGES, overrides=overrides)
    other.load_state_dict(module.state_dict())  # as a resumed run does
    assert float(fake_quantizers(other.graph)["conv3"].scale) == found["conv3"][0]


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ({"exclude": ["re/cnov1"]}, r"matches no operator \(did you mean conv1"),
        ({"exclude": ["op/Conv"]}, r"matches no operator \(did you mean op/conv"),
        ({"exclude": ["re/conv("]}, "the regular expression is invalid .*position 4"),
        ({"exclude": [3]}, "expected a name, a glob, .*with quotes"),
        ({"exclude": ["tensor/conv1"]}, "only backend.overrides selects tensors"),
        ({"exclude": ["subgraph/haed"], "subgraphs": {"head": {"from": "a", "to": "b"}}},
         r"backend.subgraphs has no haed \(did you mean subgraph/head"),
        ({"exclude": [{"from": ["conv1"]}]}, r"expected \{from: \[SELECTOR"),
        ({"exclude": [{"from": ["conv3"], "to": ["conv1"]}]}, "no path from conv3 leads here or to any other"),
        ({"exclude": [{"from": ["conv1"], "to": ["conv9"]}]}, r"matches no operator \(did you mean conv"),
        ({"overrides": {"tensor/conv9": {"activation_scale": 1.0}}}, r"no tensor \(did you mean tensor/conv"),
        ({"overrides": {"input/5/conv1": {"activation_dtype": "int8"}}}, "it has inputs 0 to 1"),
        ({"overrides": {"tensor/conv1.weight": {"activation_dtype": "int8"}}}, r"a weight; use keys weight_\*"),
        ({"overrides": {"tensor/conv1": {"weight_dtype": "int8"}}}, r"selects an activation; use keys activation_\*"),
        ({"overrides": {"conv1": {"weight_axis": 4}}}, "weight_axis=4: expected an integer from -4 to 3"),
        ({"overrides": {"conv1": {"weight_axis": 1}}}, "expected 0, the axis of the output channels"),
        ({"overrides": {"conv1": {"weight_scale": [0.1, 0.2]}}}, "expected one number, or a list of 8, one for each"),
        ({"overrides": {"conv1": {"weight_scale": 0.1, "weight_zero_point": 3}}}, "expected null or 0, the zero_point"),
        ({"overrides": {"conv3": {"activation_scale": 0.1}}}, "expected an integer from 0 to 255"),
        ({"overrides": {"conv3": {"activation_scale": 0.1, "activation_zero_point": 256}}}, "an integer from 0 to 255"),
        ({"overrides": {"conv1": {"activation_range": [-1.0, 1.0]}}}, "a range from 0, the range of the activation"),
        ({"overrides": {"conv2": {"activation_range": [0.0, 7.0]}}}, "a range from 0 to at most 6"),
    ],
)  # fmt: skip
def test_what_fits_no_graph_is_refused(backend: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        prepared(Chain(), **backend)


def test_a_number_format_accepts_no_fixed_range() -> None:
    quantizer = FormatFakeQuantize(QuantSpec("mxint8", symmetric=True).along(1), MinMaxObserver())
    with pytest.raises(ConfigError, match=r"conv1\.activation_range=.*expected null with mxint8"):
        fix_activation(quantizer, "conv1", OverrideConfig(activation_range=[-1.0, 1.0]))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"activation_range": [-1, 1], "activation_scale": 0.1}, "activation_range=.*expected null with"),
        ({"activation_range": [2, 1]}, "expected .*LOW < HIGH"),
        ({"activation_range": [1, 2]}, "LOW <= 0 <= HIGH"),
        ({"weight_range": 3}, "two finite numbers"),
        ({"activation_zero_point": 3}, "a zero point needs a scale"),
        (
            {"activation_scale": 0.1, "activation_zero_point": 3, "activation_symmetric": True},
            "expected null with",
        ),
        (
            {"activation_scale": 0.1, "activation_zero_point": 300, "activation_dtype": "uint8"},
            "expected an integer from 0 to 255",
        ),
        (
            {"weight_scale": 0.1, "weight_zero_point": -129, "weight_dtype": "int8"},
            "expected an integer from -128 to 127",
        ),
        ({"weight_scale": 0}, "a normal float32 number above 0, or a list"),
        ({"weight_scale": [0.1, -1]}, "a normal float32 number above 0, or a list"),
        ({"activation_scale": [0.1]}, "a normal float32 number above 0"),
        ({"weight_scale": [0.1, 0.2], "weight_granularity": "per_tensor"}, "expected a single number with"),
        ({"weight_axis": 0, "weight_granularity": "per_tensor"}, "whose scales do not lie along an axis"),
    ],
)
def test_contradictions_are_refused_at_once(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        check_override("backend.overrides.conv1", "conv1", OverrideConfig(**settings))
    assert str(caught.value).startswith("backend.overrides.conv1.")


def test_a_tensor_is_not_left_float() -> None:
    with pytest.raises(ConfigError, match="select the operator that produces it"):
        check_override("backend.overrides.tensor/a", "tensor/a", OverrideConfig(float=True))
