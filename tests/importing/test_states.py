"""Tests of states of ONNX files, inputs that get an output of the previous step.

They check which inputs can be states and which of their axes is the batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto
from onnx_models import FLOAT, save
from small_nets import Net, floats
from state_net import gru_weights, save_gru

from qatkit import models
from qatkit.config.schema import Config, ExportConfig, ModelConfig
from qatkit.data.inputs import ArrayInputs
from qatkit.importing import import_onnx, prove_import
from qatkit.run.export import write_file
from qatkit_verify.errors import ConfigError

WEIGHTS = gru_weights()


def _states(path: Path, **kwargs: Any) -> Any:
    return models.states(ModelConfig(f"onnx/{path}", kwargs=kwargs))


def test_states_are_named_by_their_inputs(tmp_path: Path) -> None:
    path = save_gru(tmp_path / "gru.onnx", WEIGHTS)
    assert _states(path, states={"h": "hN"}).outputs == {"h": "hN"}
    assert _states(path) is None
    assert models.states(ModelConfig("resnet18")) is None


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"states": {"hh": "hN"}},
            r"hh: hN: expected an input of gru.onnx; there is no 'hh' \(did you mean h",
        ),
        (
            {"states": {"h": "hn"}},
            r"h: hn: expected an output of gru.onnx; there is no 'hn' \(did you mean hN",
        ),
        (
            {"states": {"h": "hN"}, "fix": {"h": [[0.0] * 8]}},
            "h: hN: model.kwargs.fix already sets the input 'h'; remove the input from one of the two",
        ),
        ({"states": {"h": "y"}}, r"input 'h' is float32 \[n, 8\], but the output 'y' is float32 \[n, 1\]"),
        (
            {"states": {"h": "hN", "x": "hN"}},
            r"input 'x' is float32 \[n, 6\], but the output 'hN' is float32 \[n, 8\]",
        ),
        ({"states": {"h": "hN"}, "fix": {"x": [[0.0] * 6]}}, "every input of gru.onnx is a state or fixed"),
        ({"states": ["h"]}, r"model.kwargs.states=\[h\]: expected a mapping \{INPUT: OUTPUT\}"),
        ({"states": {}}, r"expected a mapping \{INPUT: OUTPUT\}"),
        ({"states": {"h": 3}}, "expected an output of gru.onnx; there is no '3'"),
    ],
)
def test_what_can_not_be_a_state_is_refused(kwargs: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        _states(save_gru(tmp_path / "gru.onnx", WEIGHTS), **kwargs)


@pytest.mark.parametrize(
    ("shape", "kind", "message"),
    [
        ((2, "n", 8), TensorProto.FLOAT, r"is float32 \[n, 8\], but the output 'hN' is float32 \[2, n, 8\]"),
        (("n", 8), TensorProto.DOUBLE, r"is float32 \[n, 8\], but the output 'hN' is float64 \[n, 8\]"),
    ],
)
def test_a_state_keeps_its_type_and_its_axes(
    shape: tuple[Any, ...], kind: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        _states(save_gru(tmp_path / "gru.onnx", WEIGHTS, shape, kind), states={"h": "hN"})


def test_one_output_is_no_state_of_two_inputs(tmp_path: Path) -> None:
    import onnx

    path = save_gru(tmp_path / "gru.onnx", WEIGHTS)
    model = onnx.load(str(path))
    second = model.graph.input.add()
    second.CopyFrom(model.graph.input[1])
    second.name = "h2"
    onnx.save(model, str(path))
    with pytest.raises(ConfigError, match=r"several inputs \('h', 'h2'\) get the output 'hN'"):
        _states(path, states={"h": "hN", "h2": "hN"})


@pytest.mark.parametrize("layers", [1, 2])
def test_layers_of_a_state_are_no_batch(layers: int, tmp_path: Path) -> None:
    """In a file for one stream, a state is [layers, 1, hidden].

    With one layer, its first axis has size 1 too, but must not be taken for the batch.
    """
    net, steps = Net(), "x"
    parts = net.add("Split", "h", outputs=layers, axis=0) if layers > 1 else "h"
    for index in range(layers):
        given = [net.constant(floats(1, 24, size)) for size in (4 if index == 0 else 8, 8)]
        state = parts + (str(index) if index else "")
        ran = net.add("GRU", steps, *given, "", "", state, hidden_size=8, outputs=2)
        steps = net.add("Squeeze", ran, net.constant(np.array([1])))
    shapes = {"x": (FLOAT, [1, 1, 4]), "h": (FLOAT, [layers, 1, 8])}
    file = save(tmp_path / "gru.onnx", net.nodes, shapes, [steps, f"{ran}1"], net.constants)
    config = ModelConfig(f"onnx/{file}")
    assert [(one.name, one.axis) for one in models.declared(config, None).ports] == [("x", None), ("h", None)]
    feeds = {"x": floats(1, 1, 4), "h": floats(layers, 1, 8)}
    assert min(prove_import(import_onnx(file), feeds).values()) > 100


def test_one_batch_size_needs_first_axes(tmp_path: Path) -> None:
    samples = {"x": torch.zeros(1, 6), "h": torch.zeros(2, 1, 8)}
    inputs = ArrayInputs(samples, {"x": 0, "h": 1})
    config = Config(export=ExportConfig(dynamic_batch=False))
    message = r"export\.dynamic_batch=false: expected true, since the batch axis of 'h' is 1"
    with pytest.raises(ConfigError, match=message):
        write_file(torch.nn.Identity(), config, inputs, tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()
