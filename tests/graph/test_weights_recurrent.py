"""Tests of LSTM, GRU and RNN with int8 weights, against torch with weights rounded by NumPy, and in files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from chain import calibrated, noise, prepared, run_ort, run_torch, ship
from torch import Tensor, nn

from qatkit.config.schema import OverrideConfig
from qatkit.graph.convert.recurrent_modules import QuantizedRecurrent
from qatkit.graph.convert.to_integers import convert
from qatkit.graph.fuse import fuse
from qatkit.graph.phase import set_phase
from qatkit.graph.prepare import prepare_qat
from qatkit.graph.stub import stub
from qatkit.quant.backends import FBGEMM, TENSORRT
from qatkit.verify.audit import audit

INT8 = onnx.TensorProto.INT8
KINDS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {"batch_first": True, "num_layers": 2, "bidirectional": True, "dropout": 0.2}),
    "lstm_plain": (nn.LSTM, {"bias": False}),
    "gru": (nn.GRU, {"num_layers": 2, "batch_first": True}),
    "gru_both": (nn.GRU, {"bidirectional": True, "bias": False}),
    "rnn": (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
    "rnn_tanh": (nn.RNN, {"num_layers": 3, "batch_first": True}),
}


class Sequences(nn.Module):
    """Recurrent layers on [N, steps, 6] and a head on their outputs, plus the mean of the last states.

    Args:
        kind: the class of the layers.
        size: the size of their hidden state.
        states: whether initial states are computed from the input.
        settings: other arguments of the class.
    """

    def __init__(
        self, kind: Callable[..., nn.RNNBase], size: int = 10, *, states: bool = False, **settings: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.states = kind(6, size, **settings), states
        self.fc = nn.Linear(size * (1 + self.rnn.bidirectional), 4)

    def forward(self, x: Tensor) -> Tensor:
        first, rnn = self.rnn.batch_first, self.rnn
        steps = x if first else x.transpose(0, 1)
        rows = rnn.num_layers * (1 + rnn.bidirectional)
        start = x[:, :1, :1].transpose(0, 1).repeat(rows, 1, rnn.hidden_size)
        lstm = isinstance(rnn, nn.LSTM)
        outputs, last = rnn(steps, (start, start / 2) if lstm else start) if self.states else rnn(steps)
        hidden = last[0] + last[1] if lstm else last
        return cast(Tensor, self.fc(outputs if first else outputs.transpose(0, 1)) + hidden.mean())


def rounded(module: nn.RNNBase) -> nn.RNNBase:
    """Returns a plain copy whose weights are rounded to 1/127 of each row's largest absolute value."""
    settings = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "bidirectional")
    given = {name: getattr(module, name) for name in settings}
    if module.mode.startswith("RNN"):
        given["nonlinearity"] = module.mode.removeprefix("RNN_").lower()
    plain = {"LSTM": nn.LSTM, "GRU": nn.GRU}.get(module.mode, nn.RNN)(**given)
    for name, parameter in plain.named_parameters():
        values = getattr(module, name).detach().numpy()
        if name.startswith("weight"):
            scale = np.abs(values).max(1, keepdims=True) / np.float32(127)
            values = np.round(values / scale) * scale
        parameter.data = torch.from_numpy(values.copy())
    return cast(nn.RNNBase, plain)


def tensors(result: Any) -> list[Tensor]:
    outputs, last = result
    return [outputs, *(last if isinstance(last, tuple) else (last,))]


def initial(module: nn.RNNBase, batch: int) -> Any:
    rows = module.num_layers * (1 + module.bidirectional)
    hidden, cell = noise(2, rows, batch, module.hidden_size, seed=5)
    return (hidden, cell) if module.mode == "LSTM" else hidden


@pytest.mark.parametrize("name", list(KINDS))
def test_simulation_and_conversion_compute_with_rounded_weights(name: str) -> None:
    kind, settings = KINDS[name]
    x = noise(3, 5, 6)
    graph = prepared(Sequences(kind, **settings), x).eval()
    set_phase(graph, observe=True, quantize=True)
    graph(x)
    simulated = cast(nn.RNNBase, graph.get_submodule("rnn"))
    reference = rounded(simulated)
    converted = convert(graph).graph.get_submodule("rnn")
    assert isinstance(converted, QuantizedRecurrent)
    for state in (None, initial(simulated, 3 if reference.batch_first else 5)):
        wanted = tensors(reference(x, state))
        for module in (simulated, converted):
            found = tensors(module(x, state))
            assert len(found) == len(wanted)
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_one_sequence_without_a_batch() -> None:
    graph = prepared(Sequences(nn.LSTM, bidirectional=True), noise(3, 5, 6)).eval()
    set_phase(graph, observe=True, quantize=True)
    simulated = cast(nn.RNNBase, graph.get_submodule("rnn"))
    graph(noise(3, 5, 6))
    converted, x = convert(graph).graph.get_submodule("rnn"), noise(5, 6)
    for state in (None, tuple(part[:, 0] for part in initial(simulated, 1))):
        for a, b in zip(tensors(converted(x, state)), tensors(simulated(x, state)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["lstm", "gru_both"])
def test_gradients_reach_weights_straight_through(name: str) -> None:
    """Gradients are those at the rounded weights, as if rounding were the identity."""
    kind, settings = KINDS[name]
    model, x = Sequences(kind, **{**settings, "dropout": 0.0}), noise(3, 5, 6)
    graph = prepared(model, x).train()
    assert {n: p.shape for n, p in graph.named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    set_phase(graph, observe=False, quantize=True)
    trained = cast(nn.RNNBase, graph.get_submodule("rnn"))
    reference = rounded(trained)
    for module in (trained, reference):
        sum(part.square().sum() for part in tensors(module(x))).backward()  # type: ignore[union-attr]
    for parameter, wanted in reference.named_parameters():
        found = trained.get_parameter(parameter).grad
        torch.testing.assert_close(found, wanted.grad, rtol=1e-4, atol=1e-5)


def test_training_moves_them_and_the_state_dict_is_complete() -> None:
    x = noise(3, 5, 6)
    graph = prepared(Sequences(nn.LSTM), x).train()
    set_phase(graph, observe=True, quantize=True)
    optimizer = torch.optim.SGD(graph.parameters(), 0.1)
    before = graph(x)
    graph(x).square().mean().backward()
    optimizer.step()
    other = prepared(Sequences(nn.LSTM), x).train()
    other.load_state_dict(graph.state_dict())
    set_phase(other, observe=True, quantize=True)
    found, after = other(x), graph(x)
    assert not torch.equal(before, after)
    torch.testing.assert_close(found, after, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "states"),
    [
        ("lstm", True),
        pytest.param("lstm_plain", False, marks=pytest.mark.slow),
        pytest.param("lstm_plain", True, marks=pytest.mark.slow),
        pytest.param("gru", True, marks=pytest.mark.slow),
        ("gru_both", False),
        ("rnn", False),
        pytest.param("rnn_tanh", True, marks=pytest.mark.slow),
    ],
)
def test_the_file_holds_bytes_and_computes_what_the_module_does(name: str, states: bool) -> None:
    kind, settings = KINDS[name]
    done = ship(Sequences(kind, states=states, **settings).eval(), noise(8, 5, 6), f"{name}_{states}")
    for images in (done.images, noise(3, 5, 6, seed=9)):  # a new batch size
        wanted = run_torch(done.converted, images)
        np.testing.assert_allclose(run_ort(done.path, images, optimize=False), wanted, atol=2e-6)
        np.testing.assert_allclose(run_ort(done.path, images), wanted, atol=2e-6)
    exact, found = (run_torch(module, done.images) for module in (done.model, done.converted))
    assert np.square(found - exact).mean() < 1e-3 * np.square(exact).mean()
    held = {i.name: i.data_type for i in onnx.load(done.path).graph.initializer}
    weights = {n: t for n, t in held.items() if n.startswith("rnn.weight") and not n.endswith("scale")}
    assert set(weights.values()) == {INT8} and len(weights) == 2 * settings.get("num_layers", 1)


def test_a_large_one_is_a_quarter_and_costs_nothing_at_run_time(tmp_path: Any) -> None:
    """ONNX Runtime dequantizes the weights once, when it loads the file, and the audit reports no problem."""
    done = ship(Sequences(nn.LSTM, 160, batch_first=True).eval(), noise(4, 3, 6), "large")
    count = sum(p.numel() for p in done.model.parameters())
    assert done.path.stat().st_size < 0.3 * 4 * count
    options = ort.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "optimized.onnx"), 3
    ort.InferenceSession(str(done.path), options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(options.optimized_model_filepath).graph.node
    (cell,) = [node for node in nodes if node.op_type == "LSTM"]
    assert not {node.op_type for node in nodes} & {"Cast", "Mul"} and cell.name.startswith("rnn/")
    found = audit(done.path)
    assert found.problems == () and found.runtime_dequantize == ()
    (entry,) = [node for node in found.nodes if node.op == "LSTM"]
    assert (entry.precision, entry.reason) == ("float", "ONNX Runtime has no 8-bit LSTM on the CPU")


@pytest.mark.parametrize(
    ("backend", "overrides", "settings", "said"),
    [
        (FBGEMM, {}, {}, "weight-only int8: ONNX Runtime has no int8 kernel for it"),
        (TENSORRT, {}, {}, "LSTM stays float: the backend does not support it"),
        (FBGEMM, {"op/lstm": OverrideConfig(float=True)}, {}, "float by override 'op/lstm'"),
        (FBGEMM, {"rnn": OverrideConfig(float=True)}, {}, "float by override 'rnn'"),
        (FBGEMM, {}, {"proj_size": 4}, "LSTM stays float: the LSTM of ONNX has no projection (proj_size)"),
    ],
)
def test_what_becomes_of_it_is_said(backend: Any, overrides: Any, settings: Any, said: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.fc = nn.LSTM(6, 8, **settings), nn.Linear(settings.get("proj_size", 8), 3)

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.fc(self.rnn(x)[0]))

    x = noise(2, 5, 6)
    graph = stub(fuse(Model(), x).graph, x).graph
    result = prepare_qat(graph, backend, x, overrides)
    assert said in dict(result.skipped)["rnn"]
    assert (type(graph.get_submodule("rnn")) is nn.LSTM) == ("weight-only" not in said)


def test_one_that_is_called_twice_is_in_the_file_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.rnn, self.fc = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.fc(self.rnn(self.rnn(x)[0])[0]))

    x = noise(4, 5, 8)
    done = ship(Twice().eval(), x, "gru_twice")
    wanted = run_torch(done.converted, x)
    np.testing.assert_allclose(run_ort(done.path, x, optimize=False), wanted, atol=2e-6)
    np.testing.assert_allclose(run_ort(done.path, x), wanted, atol=2e-6)
    held = [i for i in onnx.load(done.path).graph.initializer if list(i.dims) == [1, 24, 8]]
    assert [i.data_type for i in held] == [INT8, INT8]  # for the inputs and for the hidden state


def test_calibration_and_inference_leave_its_parameters_alone() -> None:
    model, x = Sequences(nn.GRU, batch_first=True), noise(4, 5, 6)
    graph = calibrated(model, x)
    for name, parameter in model.rnn.named_parameters():
        assert torch.equal(parameter, graph.get_parameter(f"rnn.{name}"))
