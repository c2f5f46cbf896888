"""Models of several inputs and outputs through the whole chain, to a file that ONNX Runtime runs by their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from signatures import SIGNATURES, graph_of
from torch import Tensor, nn

from qatkit.errors import ConfigError
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.signature import Example, call, flatten, output_leaves
from qatkit.module import QATModule
from qatkit.verify import parity


def float_outputs(model: nn.Module, batch: Example) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return output_leaves(call(model, batch))[1]


def calibrated(name: str, **options: Any) -> tuple[nn.Module, QATModule]:
    torch.manual_seed(0)
    model, batch, *_ = SIGNATURES[name]
    made = model().eval()
    module = QATModule(graph_of(made, batch(2, 0)), batch(2, 0), **options)
    assert module.calibrate([batch(12, 1), batch(3, 2)]) == 15
    return made, module


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature_from_module_to_file(name: str, tmp_path: Path) -> None:
    _, batch, inputs, outputs = SIGNATURES[name]
    model, module = calibrated(name)
    other = batch(5, 9)
    converted = module.convert().graph
    path = tmp_path / "m.onnx"
    export_onnx(converted, module.example, path)
    session = ort.InferenceSession(str(path))
    assert tuple(one.name for one in session.get_inputs()) == inputs
    assert tuple(one.name for one in session.get_outputs()) == outputs

    feeds = {k: v.numpy() for k, v in zip(inputs, flatten(other), strict=True)}
    with torch.no_grad():
        found = converted(*flatten(other))
    references = found if isinstance(found, tuple) else (found,)
    floats = float_outputs(model, other)
    for got, reference, exact in zip(session.run(None, feeds), references, floats, strict=True):
        assert got.shape == tuple(exact.shape) and got.dtype == exact.numpy().dtype
        scale = max(1.0, float(np.ptp(reference.numpy())))
        np.testing.assert_allclose(got, reference.numpy(), rtol=0, atol=1e-5 * scale)
        if exact.is_floating_point():  # int8, but the same function
            assert np.abs(got - exact.numpy()).mean() < 0.03 * np.ptp(exact.numpy())
    measured = parity(converted, path, [other, (other, torch.zeros(5))], threads=1)
    assert measured.images == 10 and measured.agreement == 1 and measured.optimized.max_steps < 0.1


@pytest.mark.parametrize("name", [name for name in SIGNATURES if name != "an integer"])
def test_a_signature_in_a_training_loop_of_ones_own(name: str) -> None:
    _, batch, _, _ = SIGNATURES[name]
    _, module = calibrated(name)
    result = module.train()(batch(3, 5))
    outputs = result if isinstance(result, tuple) else (result,)
    assert len(outputs) == len(SIGNATURES[name].outputs)
    torch.stack([out.pow(2).mean() for out in outputs if out.is_floating_point()]).sum().backward()
    gradients = [p.grad for p in module.graph.parameters() if p.requires_grad]
    assert gradients and all(g is not None and g.any() for g in gradients)


def test_a_module_is_called_as_the_model_is() -> None:
    module = calibrated("tokens")[1].eval()
    batch: Any = SIGNATURES["tokens"].batch(3, 4)
    swapped = {"ids": batch["ids"], "mask": batch["mask"]}
    expected = module(batch)
    for found in (
        module(swapped),
        module(**swapped),
        module(swapped | {"labels": 1}),
        module(*batch.values()),
    ):
        torch.testing.assert_close(found, expected)
    pair = calibrated("nested inputs")[1].eval()
    sides: Any = SIGNATURES["nested inputs"].batch(3, 4)[0]
    turned = {side: sides[side] for side in ("right", "left")}
    torch.testing.assert_close(pair(turned), pair((sides,)))
    with pytest.raises(ConfigError, match="left"):
        pair(batch["ids"])


def test_other_forms_are_refused_in_one_line() -> None:
    module = calibrated("image and vector")[1]
    image, vector = SIGNATURES["image and vector"].batch(2, 0)
    for wrong in ((image,), image, (image, vector, vector), {"image": image}):
        with pytest.raises(ConfigError, match="batch") as error:
            module.calibrate([wrong])
        assert "\n" not in str(error.value)
