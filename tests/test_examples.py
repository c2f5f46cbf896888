"""Tests of the models and scripts in examples/: they run, and their files compute in int8."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from chain import noise, run_ort, run_torch, settle, ship
from torch import Tensor, nn

from qatkit.models.ds_cnn import DSCNN
from qatkit.verify.audit import audit

sys.path.insert(0, str(Path(__file__).parent.parent))

from examples.detector_parts import main as detector_parts
from examples.keyword_spotting import KEYWORDS, main, spectrograms
from examples.onnx_file import main as onnx_file
from examples.residual import ScaledResNet
from examples.torchvision_classifier import main as torchvision_classifier
from examples.two_inputs import blobs
from examples.two_inputs import main as two_inputs


def test_the_residual_network_runs_in_int8_to_the_last_operator() -> None:
    torch.manual_seed(0)
    case = ship(settle(ScaledResNet(width=16), 3, 32, 32), noise(8, 3, 32, 32), "scaled_resnet")
    found = audit(case.path)
    assert found.ok and found.int8_share == 1.0, found.problems
    images = noise(16, 3, 32, 32, seed=5)
    expected = run_torch(case.converted, images)
    for optimize in (False, True):
        got = run_ort(case.path, images, optimize=optimize)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * float(np.ptp(expected)))


def test_the_keyword_model_takes_spectrograms_of_any_shape() -> None:
    sounds, labels = spectrograms(8, seed=3)
    assert sounds.shape == (8, 1, 49, 40) and labels.shape == (8,)
    torch.manual_seed(0)
    case = ship(settle(DSCNN(len(KEYWORDS)), 1, 49, 40), sounds, "dscnn")
    assert audit(case.path).int8_share == 1.0
    expected = run_torch(case.converted, sounds)
    np.testing.assert_allclose(
        run_ort(case.path, sounds), expected, rtol=0, atol=1e-5 * float(np.ptp(expected))
    )


def test_two_inputs_and_a_mapping_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    assert two_inputs(tmp_path).agreement == 1
    session = ort.InferenceSession(str(tmp_path / "blobs.int8.onnx"))
    (image, vector), labels, size = blobs(200, seed=3000)
    logits, found = session.run(["logits", "size"], {"image": image.numpy(), "vector": vector.numpy()})
    assert (np.asarray(logits).argmax(1) == labels.numpy()).mean() > 0.95
    assert np.abs(np.asarray(found) - size.numpy()).mean() < 0.15


@pytest.mark.slow
def test_keywords_from_waveforms_to_a_verified_file(tmp_path: Path) -> None:
    found = main(tmp_path)
    assert found["float"] > 95
    assert found["int8"] >= found["float"] - 1
    assert {path.name for path in tmp_path.iterdir()} == {"float.onnx", "int8.onnx"}


def test_a_file_of_ones_own_is_quantized_in_one_call(tmp_path: Path) -> None:
    result = onnx_file(None, str(tmp_path / "run"))
    assert result.met and audit(result.file).int8_share == 1.0


class _Mixed(nn.Module):
    """A model with token ids [n, length], a mask [n, length] and a vector [n, 16] as inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 16), nn.Linear(16, 4)

    def forward(self, ids: Tensor, mask: Tensor, vector: Tensor) -> Tensor:
        kept = self.table(ids) * mask.unsqueeze(2).float()
        logits: Tensor = self.head(kept.mean(1) + vector)
        return logits


@pytest.mark.parametrize("batch", [1, "n"])
def test_shapes_and_types_of_samples_are_those_of_the_file(batch: int | str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    file, length = tmp_path / "mixed.onnx", "length"
    given = torch.ones(1, 6, dtype=torch.int64), torch.ones(1, 6, dtype=torch.bool), torch.ones(1, 16)
    axes = {0: batch} if batch == "n" else {}
    torch.onnx.export(_Mixed().eval(), given, str(file), input_names=["ids", "mask", "vector"], dynamo=False,
                      dynamic_axes={"ids": axes | {1: length}, "mask": axes | {1: length}, "vector": axes})  # fmt: skip
    result = onnx_file(str(file), str(tmp_path / "run"))
    session = ort.InferenceSession(result.file)
    assert {one.name: (one.type, one.shape[1:]) for one in session.get_inputs()} == {
        "ids": ("tensor(int64)", [length]), "mask": ("tensor(bool)", [length]), "vector": ("tensor(float)", [16]),
    }  # fmt: skip
    assert result.met and result.report["audit"]["int8_share"] == 1.0


@pytest.mark.slow
def test_a_classifier_of_torchvision_in_one_call(tmp_path: Path) -> None:
    result = torchvision_classifier(str(tmp_path))
    assert result.met and audit(result.file).int8_share == 1.0


@pytest.mark.slow
def test_an_encoder_of_hugging_face_in_one_call(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from examples.hugging_face_encoder import main as encoder

    assert encoder(str(tmp_path)).met


@pytest.mark.slow
def test_a_detectors_backbone_is_a_part(tmp_path: Path) -> None:
    (file,) = detector_parts(str(tmp_path / "parts"))
    assert audit(file).int8_share == 1.0
