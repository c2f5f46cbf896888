"""Tests of mixed weight types: the allocation of bits against all choices, and uniform bits as a baseline."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from chain import noise
from tied_net import Tied
from torch import Tensor, fx, nn

from qatkit.algorithms import GPTQ
from qatkit.choose.precision.bit_allocation import BITS, allotted
from qatkit.choose.precision.mixed_bits import MixedBits
from qatkit.config.schema import OverrideConfig
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.captured import Captured
from qatkit.graph.convert.to_integers import convert
from qatkit.graph.phase import set_phase
from qatkit.graph.prepare import prepare_qat
from qatkit.graph.quantizers import quantized_operators, quantized_weights
from qatkit.quant.backends import WEIGHT_ONLY, Backend


def total(chosen: tuple[str, ...] | list[str], sizes: list[int]) -> int:
    return sum(BITS[dtype] * size for dtype, size in zip(chosen, sizes, strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_no_choice_of_a_step_fewer_bits_loses_less(seed: int) -> None:
    drawn = np.random.default_rng(seed)
    sizes = [int(size) for size in drawn.integers(10, 100, 6)]
    losses = [dict(zip(BITS, sorted(drawn.exponential(1, 3) ** 2, reverse=True), strict=True)) for _ in sizes]
    losses[0]["int4"] = losses[0]["int2"]  # 4 bits are no gain over 2
    every = [
        (total(chosen, sizes), sum(loss[dtype] for loss, dtype in zip(losses, chosen, strict=True)))
        for chosen in itertools.product(BITS, repeat=len(sizes))
    ]
    for average in (2.0, 2.7, 4.0, 5.5, 8.0):
        chosen = allotted(losses, sizes, average)
        taken, budget = total(chosen, sizes), average * sum(sizes)
        lost = sum(loss[dtype] for loss, dtype in zip(losses, chosen, strict=True))
        assert taken <= budget
        assert lost <= min(
            loss for bits, loss in every if bits <= max(budget - 6 * max(sizes), 2 * sum(sizes))
        )
    assert allotted(losses, sizes, 8.0)[1:] == ["int8"] * 5


class Branches(nn.Module):
    """A net that sums five branches of equal size to logits; most branches matter little."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(64, 10, bias=False) for _ in range(5))
        self.shares = (4.0, 0.02, 1.0, 0.02, 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([s * one(x) for s, one in zip(self.shares, self.branches, strict=True)]).sum(0)


def prepared(
    model: nn.Module,
    x: Tensor,
    backend: Backend = WEIGHT_ONLY,
    overrides: Mapping[str, OverrideConfig] | None = None,
) -> fx.GraphModule:
    graph = Captured(model.eval(), x).graph()
    prepare_qat(graph, backend, x, overrides or {})
    set_phase(graph, observe=False, quantize=True)
    return graph.eval()


def divergence(graph: fx.GraphModule, model: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        found, wanted = graph(x).log_softmax(1), model(x).log_softmax(1)
    return float((wanted.exp() * (wanted - found)).sum(1).mean())


def types(graph: fx.GraphModule) -> list[str]:
    return [fake.spec.dtype for _, _, fake in quantized_operators(graph)]


def test_bits_go_to_the_weights_that_outputs_depend_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, unseen = Branches(), noise(64, 64), noise(200, 64) * 1.1
    graph = prepared(model, x)
    MixedBits(bits=4.0, images=64)(graph, [x])
    found = [BITS[dtype] for dtype in types(graph)]
    assert found[0] == 8 and found[2] >= 4 and sum(found) <= 20
    set_phase(graph, observe=False, quantize=True)
    assert divergence(graph, model, unseen) < 0.2 * divergence(prepared(model, x), model, unseen)
    again = prepared(model, x)
    again.load_state_dict(graph.state_dict())
    assert types(again) == types(graph)
    again.load_state_dict(prepared(model, x).state_dict())
    assert types(again) == ["int4"] * 5
    GPTQ(images=64)(graph, [x])
    path = tmp_path / "file.onnx"
    export_onnx(convert(graph).graph, x, path)
    session = ort.InferenceSession(str(path))
    (outputs,) = session.run(None, {"input": x.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(outputs, graph(x).numpy(), rtol=0, atol=5e-6)


def test_an_override_keeps_its_bits() -> None:
    torch.manual_seed(0)
    model, x = Branches(), noise(64, 64)
    graph = prepared(model, x, overrides={"branches.0": OverrideConfig(weight_dtype="int2")})
    settings = MixedBits(bits=8.0, images=32)
    assert settings.notes(graph) == [("branches.0", "bits not chosen, since an override sets them")]
    assert settings(graph, [x]).skipped == settings.notes(graph)
    assert types(graph) == ["int2", *["int8"] * 4]


def test_a_table_has_the_bits_of_the_head_that_it_is() -> None:
    torch.manual_seed(0)
    words = torch.randint(0, 50, (8, 12), generator=torch.Generator().manual_seed(0))
    graph = prepared(Tied(), words)
    MixedBits(bits=8.0, images=8)(graph, [words])
    assert {fake.spec.dtype for _, _, fake in quantized_weights(graph)} == {"int8"}
