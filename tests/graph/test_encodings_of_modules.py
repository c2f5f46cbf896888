"""Tests of applying the encodings of an exported file to a module of the same PyTorch model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from chain import Chain, noise, prepared, settle, ship
from onnx import numpy_helper

from qatkit.calibration import calibrate
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.to_integers import convert
from qatkit.graph.fixed_encodings import fix, matched
from qatkit.graph.quantizers import fake_quantizers, quantized_weights
from qatkit.graph.tensor_names import names_of_graph
from qatkit.importing.encodings import encodings_of
from qatkit.records.encodings import Encoding
from qatkit_verify.errors import ConfigError


def test_an_exported_model_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """The module is calibrated on other images, and takes all scales from the file, by name."""
    torch.manual_seed(0)
    model = settle(Chain(), 3, 16, 16)
    shipped = ship(model, noise(8, 3, 16, 16), "encoded_chain")
    graph = prepared(model, noise(2, 3, 16, 16)).eval()

    found = matched(graph, names_of_graph(graph), encodings_of(shipped.path).all, "model.int8.onnx")
    fix(graph, found)
    calibrate(graph, [3 * noise(8, 3, 16, 16, seed=7)])
    target = tmp_path / "again.onnx"
    export_onnx(convert(graph).graph, noise(2, 3, 16, 16), target)

    assert found.unused == {}
    assert found.activations.keys() == fake_quantizers(graph).keys()
    assert found.weights.keys() == {path for path, _, _ in quantized_weights(graph)}
    before, after = (
        {one.name: numpy_helper.to_array(one) for one in onnx.load(path).graph.initializer}
        for path in (shipped.path, target)
    )
    assert before.keys() == after.keys()
    assert [name for name in before if before[name].tobytes() != after[name].tobytes()] == []


def test_names_of_operators_and_weights_are_taken() -> None:
    """Encodings written by hand name an activation by its operator's path and a weight by its own path."""
    graph = prepared(settle(Chain(), 3, 16, 16), noise(2, 3, 16, 16)).eval()
    (place, *_), ((path, operator, fake), *_) = fake_quantizers(graph), quantized_weights(graph)
    scales = np.full(fake.clip.numel(), 0.25, np.float32)
    given = {
        place: Encoding("uint8", np.asarray(0.5, np.float32), np.asarray(9, np.int64)),
        f"{path}.weight": Encoding("int8", scales, np.zeros(len(scales), np.int64), 0),
    }
    fix(graph, matched(graph, names_of_graph(graph), given, "by hand"))
    calibrate(graph, [noise(8, 3, 16, 16)])
    scale, zero = fake_quantizers(graph)[place].shipped()
    assert (float(scale), int(zero)) == (0.5, 9)
    weight = operator.effective()[0]  # type: ignore[operator]
    assert torch.equal(fake.scale(weight), torch.from_numpy(scales))


def test_a_typo_is_refused_with_the_name_that_was_meant() -> None:
    graph = prepared(settle(Chain(), 3, 16, 16), noise(2, 3, 16, 16)).eval()
    one = Encoding("uint8", np.asarray(0.5, np.float32), np.asarray(9, np.int64))
    (path, _, _), *_ = quantized_weights(graph)
    with pytest.raises(ConfigError, match=rf"no tensor '{path}.weigth' \(did you mean {path}.weight"):
        matched(graph, names_of_graph(graph), {"input": one, f"{path}.weigth": one}, "by hand")
