"""Tests of cumulative products, maxima, minima and log-sum-exps in ONNX files, against torch.

ONNX Runtime and onnx's evaluator run the files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from chain import noise, run_ort
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from qatkit.export.torch_to_onnx import export_onnx
from qatkit_verify.errors import ConfigError


class Function(nn.Module):
    """A model that applies one function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "cumprod": lambda x: x.cumprod(1),
    "cumprod of integers": lambda x: (x.round().to(torch.int64) + 2).cumprod(-1).float(),
    "cumprod in another type": lambda x: (x > 0).cumprod(2, dtype=torch.float32),
    "cummax": lambda x: x.cummax(2)[0],
    "cummax, places of equal ones": lambda x: x.round().cummax(1)[1].float(),
    "cummax of integers": lambda x: x.round().to(torch.int32).cummax(1)[0].float(),
    "cummin": lambda x: x.cummin(-1)[0],
    "cummin, places": lambda x: x.cummin(-2)[1].float(),
    "logcumsumexp": lambda x: (40 * x).logcumsumexp(1),
    "one value": lambda x: x[:, :1].cumprod(1) + x[:, :1].cummax(1)[0] + x[:, :1].logcumsumexp(1),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_torch_computes(name: str, tmp_path: Path) -> None:
    model, path = Function(CASES[name]).eval(), tmp_path / "model.onnx"
    x = noise(3, 7, 5)
    export_onnx(model, x[:2], path)
    assert onnx.load(str(path)).opset_import[0].version == 13
    if "of" not in name and "cumprod" not in name:
        x[0, 2, 1], x[1, 3, 2], x[2, 0, 0] = float("nan"), -float("inf"), float("inf")
    wanted = model(x).numpy()
    for optimize in (False, True):
        np.testing.assert_allclose(run_ort(path, x, optimize=optimize), wanted, rtol=1e-5, atol=1e-5)
    session = ReferenceEvaluator(str(path))
    (found,) = session.run(None, {session.input_names[0]: x.numpy()})
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-5, atol=1e-5)


def test_along_the_batch_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="need an axis of known size, not"):
        export_onnx(Function(lambda x: x.cumprod(0)).eval(), noise(2, 3), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []
