"""Tests of overrides: by path, glob and class, what they change, and patterns that match nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from chain import Chain, Mlp, Residual, noise, prepared
from torch import fx

from qatkit.config.schema import OverrideConfig
from qatkit.graph.fuse import fuse
from qatkit.graph.prepare import prepare_qat
from qatkit.graph.quantizers import fake_quantizers
from qatkit.quant.backends import FBGEMM
from qatkit.quant.granularity import PerChannel, PerTensor
from qatkit.quant.qat_layers import QATOperator
from qatkit.quant.spec import QuantSpec
from qatkit.quant.weight_fake_quantize import WeightFakeQuantize
from qatkit_verify.errors import ConfigError

IMAGES, ROWS = noise(2, 3, 12, 12), noise(2, 12)
FLOAT = OverrideConfig(float=True)


def weights(graph: fx.GraphModule) -> dict[str, QuantSpec]:
    return {
        n: m.weight_fake_quant.spec
        for n, m in graph.named_modules()
        if isinstance(m, QATOperator) and isinstance(m.weight_fake_quant, WeightFakeQuantize)
    }


@pytest.mark.parametrize(
    ("pattern", "quantized", "points"),
    [
        ("conv2", ["conv1", "conv3"], ["input", "conv1", "relu6", "conv3"]),
        ("conv[23]", ["conv1"], ["input", "conv1"]),
        ("conv*3", ["conv1", "conv2"], ["input", "conv1", "conv2"]),
        ("conv1", ["conv2", "conv3"], ["relu", "conv2", "conv3"]),
    ],
)
def test_float_by_path_and_glob(pattern: str, quantized: list[str], points: list[str]) -> None:
    graph = prepared(Chain(), IMAGES, overrides={pattern: FLOAT})
    assert list(weights(graph)) == quantized
    sites = list(fake_quantizers(graph))
    # A ReLU after a float convolution is absorbed too, and its quantizer is named after the convolution.
    absorbed = {"relu": "conv1", "relu6": "conv2"}
    assert sites == [absorbed.get(p, p) for p in points]


def test_float_by_operator_class() -> None:
    graph = prepared(Residual(), IMAGES, overrides={"op/linear": FLOAT})
    assert list(weights(graph)) == ["stem", "conv1", "conv2"]
    assert "fc" not in weights(graph)


def test_what_was_forced_to_float_is_reported_with_its_pattern() -> None:
    result = prepare_qat(fuse(Chain(), IMAGES).graph, FBGEMM, IMAGES, {"conv[23]": FLOAT})
    assert result.skipped == [(n, "float by override 'conv[23]'") for n in ("conv2", "conv3")]


def test_dtype_and_granularity_of_matched_operators_only() -> None:
    graph = prepared(
        Chain(),
        IMAGES,
        overrides={
            "conv1": OverrideConfig(weight_granularity="per_tensor", activation_dtype="int8"),
            "conv3": OverrideConfig(weight_dtype="int8", activation_symmetric=True),
        },
    )
    default = QuantSpec("int8", symmetric=True, granularity=PerChannel(0), pairs=True)
    assert weights(graph) == {
        "conv1": QuantSpec("int8", symmetric=True, granularity=PerTensor(), pairs=True),
        "conv2": replace(default, pairs=False),  # sums of pairs cannot saturate with int8 activations
        "conv3": default,
    }
    assert {n: m.spec for n, m in fake_quantizers(graph).items()} == {
        "input": QuantSpec("uint8"),
        "conv1": QuantSpec("int8"),
        "conv2": QuantSpec("uint8"),
        "conv3": QuantSpec("uint8", symmetric=True),
    }


@pytest.mark.parametrize("everywhere", [False, True])
def test_reduce_range_of_matched_operators_and_back(everywhere: bool) -> None:
    backend = FBGEMM.reduced(True) if everywhere else FBGEMM
    override = OverrideConfig(reduce_range=not everywhere)
    graph = prepare_qat(fuse(Chain(), IMAGES).graph, backend, IMAGES, {"conv[12]": override}).graph
    assert {n: (s.quant_min, s.quant_max) for n, s in weights(graph).items()} == {
        "conv1": (-127, 127) if everywhere else (-63, 63),
        "conv2": (-127, 127) if everywhere else (-63, 63),
        "conv3": (-63, 63) if everywhere else (-127, 127),
    }


def test_auto_keeps_a_backends_own_bits_and_overrides_win() -> None:
    own = replace(FBGEMM, weight=replace(FBGEMM.weight, reduce_range=True, pairs=False))  # 7 bits by default
    assert own.reduced("auto").weight.quant_max == 63
    override = OverrideConfig(reduce_range="auto")
    graph = prepare_qat(fuse(Chain(), IMAGES).graph, own.reduced("auto"), IMAGES, {"conv1": override}).graph
    assert {n: (s.quant_max, s.guards_pairs) for n, s in weights(graph).items()} == {
        "conv1": (127, True),
        "conv2": (63, False),
        "conv3": (63, False),
    }


def test_reduce_range_needs_a_weight() -> None:
    with pytest.raises(
        ConfigError, match="its weight settings have no effect: the operator has no quantized weight"
    ):
        prepared(Chain(), IMAGES, overrides={"relu": OverrideConfig(reduce_range=True)})


def test_symmetry_never_undoes_an_absorbed_relu() -> None:
    graph = prepared(Chain(), IMAGES, overrides={"op/conv": OverrideConfig(activation_symmetric=True)})
    symmetric = {n: m.spec.symmetric for n, m in fake_quantizers(graph).items()}
    assert symmetric == {
        "input": False,
        "conv1": False,
        "conv2": False,
        "conv3": True,
    }


def test_later_patterns_win() -> None:
    per_tensor = OverrideConfig(weight_granularity="per_tensor")
    graph = prepared(Chain(), IMAGES, overrides={"conv*": per_tensor, "conv2": OverrideConfig()})
    assert [str(s.granularity) for s in weights(graph).values()] == [
        "per_tensor",
        "per_channel",
        "per_tensor",
    ]


@pytest.mark.parametrize(
    ("pattern", "near"),
    [("cnov2", "conv2"), ("op/convv", "op/conv"), ("layer9.*", "relu"), ("op/matmul", "op/")],
)
def test_a_pattern_without_a_match_names_near_ones(pattern: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prepared(Chain(), IMAGES, overrides={pattern: FLOAT})
    text = str(caught.value)
    head, _, names = text.removesuffix(")").removesuffix("?").partition(" (")
    assert head == f"backend.overrides={pattern}: the pattern matches no operator" and "\n" not in text
    assert (
        names.startswith("known: " if pattern in ("layer9.*", "op/matmul") else "did you mean ")
        and near in names
    )


def test_everything_in_float_leaves_nothing_to_quantize() -> None:
    with pytest.raises(ConfigError, match="no Conv, Linear, LSTM, GRU or RNN that could be quantized"):
        prepared(Mlp(), ROWS, overrides={"op/linear": FLOAT})


@pytest.mark.parametrize(
    ("pattern", "override", "message"),
    [
        (
            "relu",
            OverrideConfig(activation_dtype="int8"),
            "the range is that of conv1; name that operator instead",
        ),
        (
            "relu6",
            OverrideConfig(activation_symmetric=True),
            "the range is that of conv2; name that operator instead",
        ),
        (
            "relu*",
            OverrideConfig(activation_dtype="int8"),
            "the range is that of conv1; name that operator instead",
        ),
        ("relu", OverrideConfig(weight_granularity="per_tensor"), "the operator has no quantized weight"),
        (
            "conv1",
            OverrideConfig(activation_symmetric=True),
            "the activation after it makes the range start at zero",
        ),
    ],
)
def test_a_setting_without_effect_is_refused(pattern: str, override: OverrideConfig, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prepared(Chain(), IMAGES, overrides={pattern: override})
    text = str(caught.value)
    assert text.startswith(f"backend.overrides={pattern}: its ") and message in text and "\n" not in text


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("pool", "the range is that of stem; name that operator instead"),
        ("flatten", "the range is that of avgpool; name that operator instead"),
        ("relu_1", "the range is that of conv1; name that operator instead"),
        ("fc", "the output is not quantized"),
    ],
)
def test_what_only_moves_values_names_where_its_range_comes_from(pattern: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepared(Residual(), IMAGES, overrides={pattern: OverrideConfig(activation_dtype="int8")})


def test_the_range_of_the_input_is_nobodys() -> None:
    model = torch.nn.Sequential(torch.nn.MaxPool2d(2), torch.nn.Conv2d(3, 4, 1))
    with pytest.raises(
        ConfigError, match="the range is that of the model's input, which no override can change"
    ):
        prepared(model, IMAGES, overrides={"0": OverrideConfig(activation_dtype="int8")})


def test_a_glob_may_match_operators_without_a_range() -> None:
    graph = prepared(Chain(), IMAGES, overrides={"*": OverrideConfig(activation_dtype="int8")})
    assert {n: q.spec.dtype for n, q in fake_quantizers(graph).items() if n != "input"} == {
        f"conv{i}": "int8" for i in (1, 2, 3)
    }
