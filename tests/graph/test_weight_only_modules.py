"""Tests of files with low-bit weights: ONNX Runtime against the simulation, packed bytes against NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from chain import noise
from onnx import numpy_helper
from packed_net import Mixed
from torch import Tensor, fx, nn

from qatkit.config.schema import OverrideConfig
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.captured import Captured
from qatkit.graph.convert.to_integers import convert
from qatkit.graph.convert.weight_only_modules import PackedEmbedding, WeightOnly, packed, unpacked
from qatkit.graph.phase import set_phase
from qatkit.graph.prepare import prepare_qat
from qatkit.graph.quantizers import quantized_operators
from qatkit.quant.backends import FBGEMM, WEIGHT_ONLY, Backend
from qatkit.quant.granularity import Granularity, PerBlock, PerChannel, PerTensor
from qatkit.verify.graph_view import read_model
from qatkit.verify.packed_bits import packed_bits
from qatkit_verify.errors import ConfigError

DTYPES = ("int8", "int4", "int3", "int2")
KINDS: dict[str, tuple[Granularity, bool]] = {
    "blocks": (PerBlock(32), False),
    "symmetric": (PerBlock(16), True),
    "channels": (PerChannel(0), False),
    "tensor": (PerTensor(), True),
}
STORED = [*((one, "float32") for one in DTYPES), ("int4", "float16"), ("int4", "uint8")]
# Each type of weights and scales runs with two of the kinds. The other combinations are slow tests.
COMBINED = [
    pytest.param(dtype, scales, kind, marks=[] if (i + k) % 2 == 0 else [pytest.mark.slow])
    for i, (dtype, scales) in enumerate(STORED)
    for k, kind in enumerate(KINDS)
]


def backend(dtype: str, kind: str = "blocks", scales: str = "float32") -> Backend:
    granularity, symmetric = KINDS[kind]
    weight = replace(WEIGHT_ONLY.weight, dtype=dtype, granularity=granularity, symmetric=symmetric)
    return replace(WEIGHT_ONLY, weight=replace(weight, scale_dtype=scales))


def simulated(model: nn.Module, x: Tensor, chosen: Backend, axes: Any = "none") -> fx.GraphModule:
    graph = Captured(model.eval(), x, axes).graph()
    prepare_qat(graph, chosen, x)
    set_phase(graph, observe=False, quantize=True)
    return graph.eval()


def ran(path: Path, x: Tensor, options: ort.SessionOptions | None = None) -> np.ndarray:
    opened = ort.InferenceSession(str(path), options)
    (found,) = opened.run(None, {opened.get_inputs()[0].name: x.numpy()})
    return np.asarray(found)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_bytes_hold_the_lowest_bits_first(bits: int) -> None:
    integers = torch.arange(3 * 13).reshape(3, 13) * 7 % 2**bits
    held = packed(integers, bits)
    wanted = np.zeros(held.shape, np.int64)
    for row, column in np.ndindex(3, 13):
        at = column * bits
        wanted[row, at // 8] += int(integers[row, column]) << (at % 8)
    np.testing.assert_array_equal(held.numpy(), wanted)
    np.testing.assert_array_equal(unpacked(held, bits)[:, :13].numpy(), integers)


@pytest.mark.parametrize(("dtype", "scales", "kind"), COMBINED)
def test_the_file_computes_what_the_simulation_does(
    dtype: str, scales: str, kind: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    x = noise(4, 3, 10, 12)
    graph = simulated(Mixed(), x, backend(dtype, kind, scales))
    converted = convert(graph).graph
    with torch.no_grad():
        wanted = graph(x)
        torch.testing.assert_close(converted(x), wanted, rtol=0, atol=1e-6)
    path = tmp_path / "file.onnx"
    export_onnx(converted, x, path)
    plain = ort.SessionOptions()
    plain.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    np.testing.assert_allclose(ran(path, x), wanted.numpy(), rtol=0, atol=2e-6)
    np.testing.assert_allclose(ran(path, x, plain), wanted.numpy(), rtol=0, atol=2e-6)
    np.testing.assert_allclose(ran(path, x[:3]), wanted[:3].numpy(), rtol=0, atol=2e-6)


def test_double_quantization_takes_four_and_a_quarter_bits(tmp_path: Path) -> None:
    x = noise(2, 512)
    weight = replace(WEIGHT_ONLY.weight, granularity=PerBlock(64), scale_dtype="uint8")
    graph = simulated(nn.Sequential(nn.Linear(512, 512, bias=False)), x, replace(WEIGHT_ONLY, weight=weight))
    path = tmp_path / "file.onnx"
    export_onnx(convert(graph).graph, x, path)
    held = sum(len(one.raw_data) for one in onnx.load(path).graph.initializer)
    assert 8 * held / 512**2 == pytest.approx(4 + (4 + 8) / 64 + 32 / 512, rel=1e-3)
    counted = packed_bits(read_model(path).graph)
    assert counted == pytest.approx(8 * held / 512**2, rel=1e-3)
    assert counted is not None and counted < 4.3


@pytest.mark.parametrize("opset", [13, 18, 21, 23])
def test_any_opset_holds_them(opset: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = noise(2, 3, 10, 12)
    graph = simulated(Mixed(), x, backend("int4"))
    path = tmp_path / "file.onnx"
    export_onnx(convert(graph).graph, x, path, opset=opset)
    with torch.no_grad():
        np.testing.assert_allclose(ran(path, x), graph(x).numpy(), rtol=0, atol=2e-6)
    model = onnx.load(path)
    versions = {one.domain: one.version for one in model.opset_import}
    assert versions == {"": opset, "com.microsoft": 1}


@pytest.mark.parametrize("dtype", ["int4", "int3", "int2"])
def test_matmulnbits_holds_the_weight_by_its_definition(dtype: str, tmp_path: Path) -> None:
    """Dequantizes in NumPy as ONNX Runtime documents the operator."""
    torch.manual_seed(0)
    x, size = noise(5, 100), 32
    graph = simulated(nn.Sequential(nn.Linear(100, 24)), x, backend(dtype))
    path = tmp_path / "file.onnx"
    export_onnx(convert(graph).graph, x, path)
    model = onnx.load(path)
    (node,) = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    settings = {one.name: one.i for one in node.attribute}
    held = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    data, scale, zero = (held[name] for name in node.input[1:4])
    bits = settings["bits"]
    assert settings == {"K": 100, "N": 24, "bits": 2 if dtype == "int2" else 4, "block_size": size}
    assert data.shape == (24, 4, size * bits // 8) and scale.shape == (24, 4)
    values = np.zeros((24, 100), np.float32)
    for row, column in np.ndindex(24, 100):
        block, place = divmod(column, size)
        shift = place * bits % 8
        code = data[row, block, place * bits // 8] >> shift & (2**bits - 1)
        origin = zero.reshape(24, -1)[row, block * bits // 8] >> (block * bits % 8) & (2**bits - 1)
        values[row, column] = (int(code) - int(origin)) * scale[row, block]
    ((_, operator, fake),) = quantized_operators(graph)
    with torch.no_grad():
        wanted = fake(operator.weight)[0]
    np.testing.assert_allclose(values, wanted.numpy(), rtol=1e-6, atol=1e-8)


def test_four_bits_take_half_a_byte_and_their_scales(tmp_path: Path) -> None:
    x = noise(2, 512)
    graph = simulated(
        nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Conv1d(1, 1, 1)), x[:, None], WEIGHT_ONLY
    )
    path = tmp_path / "file.onnx"
    export_onnx(convert(graph).graph, x[:, None], path)
    weights = 512 * 256
    held = sum(len(one.raw_data) for one in onnx.load(path).graph.initializer)
    assert weights * (4 + 1 + 4 / 32) / 8 <= held < weights * (4 + 1 + 4 / 32) / 8 + 4 * 256 + 4096


class Words(nn.Module):
    """An embedding that is tied to the last Linear, and an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(50, 72), nn.LSTM(72, 16, batch_first=True)
        self.up, self.head = nn.Linear(16, 72), nn.Linear(72, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        found = self.table(words)
        return cast(Tensor, self.head(self.up(self.lstm(found)[0]) + found))


@pytest.mark.parametrize("kind", ["blocks", "symmetric", "channels"])
@pytest.mark.parametrize(
    ("dtype", "scales"), [*((one, "float32") for one in DTYPES), ("int4", "float16"), ("int4", "uint8")]
)
def test_tables_are_looked_up_packed_at_any_length(
    dtype: str, scales: str, kind: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    words = torch.randint(0, 50, (3, 7), generator=torch.Generator().manual_seed(0))
    graph = simulated(Words(), words, backend(dtype, kind, scales), "auto")
    path = tmp_path / "file.onnx"
    export_onnx(convert(graph).graph, words, path)
    for given in (words, words[:1], torch.arange(22).reshape(2, 11)):
        with torch.no_grad():
            np.testing.assert_allclose(ran(path, given), graph(given).numpy(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("scales", ["float32", "uint8"])
@pytest.mark.parametrize("kind", ["blocks", "symmetric"])
def test_a_tied_weight_is_in_the_file_once(kind: str, scales: str, tmp_path: Path) -> None:
    words = torch.randint(0, 50, (3, 7))
    path = tmp_path / "file.onnx"
    export_onnx(convert(simulated(Words(), words, backend("int4", kind, scales))).graph, words, path)
    large = [tuple(one.dims) for one in onnx.load(path).graph.initializer if one.dims and one.dims[0] == 50]
    assert len([dims for dims in large if len(dims) == 3]) == 1


def modules_of(graph: fx.GraphModule) -> Iterator[WeightOnly | PackedEmbedding]:
    yield from (
        one for one in convert(graph).graph.modules() if isinstance(one, (WeightOnly, PackedEmbedding))
    )


def test_an_override_leaves_one_float_and_gives_another_its_bits(tmp_path: Path) -> None:
    x = noise(2, 3, 10, 12)
    graph = Captured(Mixed().eval(), x).graph()
    overrides = {
        "last": OverrideConfig(float=True),
        "linear": OverrideConfig(
            weight_dtype="int2", weight_granularity={"block": 64}, weight_symmetric=True
        ),
        "conv": OverrideConfig(weight_dtype="int8", weight_granularity="per_channel"),
    }
    prepare_qat(graph, WEIGHT_ONLY, x, overrides)
    set_phase(graph, observe=False, quantize=True)
    found = {
        (one.dtype, tuple(one.weight.shape), one.weight_zero_point is None)
        for one in modules_of(graph.eval())
    }
    assert found == {
        ("int8", (20, 1, 27), False),
        ("int4", (20, 1, 5), False),  # a depthwise kernel has nine inputs, less than a block
        ("int2", (72, 2, 16), True),
    }
    path = tmp_path / "file.onnx"
    export_onnx(convert(graph).graph, x, path)
    with torch.no_grad():
        np.testing.assert_allclose(ran(path, x), graph(x).numpy(), rtol=0, atol=2e-6)


def test_weights_are_trained_through_their_rounding(tmp_path: Path) -> None:
    """Gradients reach every weight, and the file computes what was trained."""
    torch.manual_seed(0)
    x = noise(4, 3, 10, 12)
    graph = simulated(Mixed(), x, backend("int3")).train()
    optimizer = torch.optim.SGD(graph.parameters(), lr=0.2)
    before = [p.detach().clone() for p in graph.parameters()]
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = (graph(x) - 0.5).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(not torch.equal(a, b) for a, b in zip(before, graph.parameters(), strict=True))
    graph.eval()
    path = tmp_path / "file.onnx"
    export_onnx(convert(graph).graph, x, path)
    with torch.no_grad():
        np.testing.assert_allclose(ran(path, x), graph(x).numpy(), rtol=0, atol=5e-6)


def test_scales_of_blocks_cannot_be_listed() -> None:
    x = noise(2, 3, 10, 12)
    graph = Captured(Mixed().eval(), x).graph()
    override = OverrideConfig(weight_scale=[0.1, 0.2])
    with pytest.raises(
        ConfigError, match=r"one number, because the weight has \d+ scales, one for each block"
    ):
        prepare_qat(graph, WEIGHT_ONLY, x, {"linear": override})


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        (OverrideConfig(weight_granularity={"block": 32}), r"\{block: 32\}"),
        (OverrideConfig(weight_scale_dtype="uint8"), "weight_scale_dtype=uint8"),
    ],
)
def test_blocks_belong_to_a_backend_of_weights_alone(override: OverrideConfig, shown: str) -> None:
    x = noise(2, 3, 10, 12)
    graph = Captured(Mixed().eval(), x).graph()
    with pytest.raises(ConfigError, match=rf"backend.overrides.*linear.*{shown}.*backend=weight_only"):
        prepare_qat(graph, FBGEMM, x, {"linear": override})
