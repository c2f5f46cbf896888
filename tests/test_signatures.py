"""Tests of models with several inputs and outputs, from the module to an ONNX file with their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from signatures import SIGNATURES, graph_of
from torch import Tensor, nn

from qatkit.algorithms import BiasCorrection, Equalize
from qatkit.config.schema import ScheduleConfig
from qatkit.export.add_integer_ends import to_integer_io
from qatkit.export.converted_reference import ConvertedReference
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.signature import Example, arguments_of, call, flatten, output_leaves
from qatkit.train.module import QATModule
from qatkit.verify.audit import audit
from qatkit.verify.divergence import first_divergence
from qatkit.verify.parity import parity
from qatkit_verify.errors import ConfigError
from qatkit_verify.latency import latency


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
        if exact.is_floating_point():  # equal up to the quantization error
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
    with pytest.raises(ConfigError, match="labels"):
        module(swapped | {"labels": torch.zeros(3)})  # the tensor could be a mask that the graph lacks
    pair = calibrated("nested inputs")[1].eval()
    sides: Any = arguments_of(SIGNATURES["nested inputs"].batch(3, 4))[0][0]
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


def test_corrections_run_on_batches_of_any_form() -> None:
    algorithms = [Equalize(), BiasCorrection(images=14, trim=0.0)]
    model, module = calibrated("image and vector", algorithms=algorithms)
    batches = [SIGNATURES["image and vector"].batch(8, seed) for seed in (3, 4)]
    module.eval()

    def mean_error() -> float:
        """Returns the largest error of a logit's mean over 14 images, which bias correction reduces to zero."""
        with torch.no_grad():
            errors = [module(batch)[0] - float_outputs(model, batch)[0] for batch in batches]
        return float(torch.cat(errors)[:14].mean(0).abs().max())

    before = mean_error()
    module.correct(iter(batches))
    assert before > 1e-3
    assert mean_error() < 1e-4


def test_a_training_step_takes_what_the_model_takes() -> None:
    schedule = ScheduleConfig(distill=0.25, distill_temperature=1.0)
    model, module = calibrated("image and vector", schedule=schedule)
    module.teacher, module.log = (model,), lambda *_, **__: None  # type: ignore[method-assign]
    batch, labels = SIGNATURES["image and vector"].batch(6, 3), torch.arange(6) % 4
    logits, target = module(batch)[0], float_outputs(model, batch)[0]
    hard = nn.functional.cross_entropy(logits, labels)
    soft = (target.softmax(1) * (target.log_softmax(1) - logits.log_softmax(1))).sum(1).mean()
    loss = module.training_step((batch, labels), 0)
    torch.testing.assert_close(loss, 0.75 * hard + 0.25 * soft)
    loss.backward()
    module.validation_step((batch, labels), 0)


class OneSize(nn.Module):
    """A model that only accepts batches of three."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(24, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = self.head(torch.relu(self.body(x + y)).reshape(1, 24))
        return result


def test_a_model_of_one_batch_size_has_a_file_of_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    examples = [(torch.randn(3, 6), torch.randn(3, 6)) for _ in range(4)]
    graph = graph_of(OneSize().eval(), examples[0])
    graph.meta["batch_axes"] = (None, None)
    module = QATModule(graph, examples[0], algorithms=[BiasCorrection(images=6)])
    assert [len(tensor) for tensor in flatten(module.example)] == [3, 3]
    assert module.calibrate(examples) == 12
    module.correct(examples)
    converted, path = module.convert().graph, tmp_path / "m.onnx"
    export_onnx(converted, module.example, path)
    session = ort.InferenceSession(str(path))
    assert [one.shape for one in session.get_inputs()] == [[3, 6], [3, 6]]
    assert parity(converted, path, examples, threads=1).optimized.max_steps < 0.1


def test_a_file_of_several_inputs_is_judged_as_others_are(tmp_path: Path) -> None:
    _, module = calibrated("image and vector")
    batch, path = SIGNATURES["image and vector"].batch(4, 3), tmp_path / "m.onnx"
    reference = ConvertedReference(module.convert().graph)
    export_onnx(module.convert().graph, module.example, path)
    named = dict(zip(("vector", "image"), reversed(flatten(batch)), strict=True))
    assert audit(path).int8_share == audit(path, input_shape=named).int8_share == 1.0
    assert set(latency({"a": path}, None, runs=1)) == {"a"}
    assert set(latency({"a": path}, named, batch=4, runs=1)) == {"a"}
    with pytest.raises(ConfigError, match="image, vector"):
        latency({"a": path}, (3, 12, 12), runs=1)
    found = first_divergence(path, batch, reference.integers(batch, path), threads=1)
    assert found.first is None and len(found.tensors) >= 4
    assert parity(reference, path, [named]).agreement == 1
    with pytest.raises(ConfigError, match="several inputs"):
        to_integer_io(path, path, [0.0] * 3, [1.0] * 3, (-1.0, 1.0))
