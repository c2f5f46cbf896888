"""Tests of models in float16, bfloat16 or float64, whole or in part: their files compute in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from captures import Calls
from chain import noise
from torch import Tensor, nn

from qatkit.export.torch_to_onnx import export_onnx
from qatkit.train.module import QATModule

TYPES = [torch.float16, torch.bfloat16, torch.float64]


class OneInput(Calls):
    """A model whose forward is a function of itself and one tensor."""

    def forward(self, input: Tensor) -> Any:  # noqa: A002  the name in the file
        return self.function(self, input)


def layers() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    return body, nn.Sequential(nn.Flatten(), nn.Linear(144, 5))


def whole(kind: torch.dtype) -> nn.Module:
    return nn.Sequential(*layers()).to(kind)


def part(kind: torch.dtype) -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x).to(kind)).to(x.dtype)
        return result

    body, head = layers()
    return OneInput(forward, body=body, head=head.to(kind))


def table(kind: torch.dtype) -> nn.Module:
    """Returns a model with constants in every form.

    A buffer, a tensor attribute, an array of doubles and a tensor that forward creates.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.body(x) * self.scale + self.shift
        result: Tensor = self.head(
            y * torch.from_numpy(self.array).type_as(y) + torch.linspace(0, 1, 6, dtype=kind)
        )
        return result

    body, head = layers()
    model = OneInput(
        forward, body=body, head=head, shift=torch.ones(6, dtype=kind), array=np.linspace(1, 2, 6)
    )
    model.register_buffer("scale", torch.full((6,), 0.5))
    return model.to(kind)


MODELS = {"whole": whole, "part": part, "table": table}


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_files_of_other_types_are_float32(
    kind: torch.dtype, name: str, quantized: bool, tmp_path: Path
) -> None:
    model = MODELS[name](kind).eval()
    taken = torch.float32 if name == "part" else kind
    example, x = noise(2, 3, 8, 8).to(taken), noise(5, 3, 8, 8, seed=1).to(taken)
    with torch.no_grad():
        expected = model(x).double().numpy()
    graph: nn.Module = model
    if quantized:
        module = QATModule(model, example)
        module.calibrate([x])
        assert module.eval()(x).dtype is torch.float32
        graph = module.convert().graph
    export_onnx(graph, example, tmp_path / "model.onnx")
    assert next(model.parameters()).dtype is taken

    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert {one.type for one in (*session.get_inputs(), *session.get_outputs())} == {"tensor(float)"}
    (found,) = session.run(None, {session.get_inputs()[0].name: x.float().numpy()})
    rounded = 0.1 if quantized else {torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.float64: 1e-5}[kind]
    np.testing.assert_allclose(found, expected, atol=rounded * np.abs(expected).max(), rtol=0)
