"""Tests of `qatkit.quantize`, which takes a script's model and batches through all steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from command_line import CONF
from torch import Tensor, nn

from qatkit import one_call, quantize
from qatkit.config.compose import compose_config
from qatkit.one_call import given_data, given_model
from qatkit.warning import QatkitWarning
from qatkit_verify.errors import ConfigError


class Two(nn.Module):
    """A model with an image and a vector as inputs and five logits as the output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(12, 5)

    def forward(self, image: Tensor, vector: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.cat([torch.relu(self.conv(image)).mean((2, 3)), vector], 1))
        return logits


def _pairs(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8, 3, 16, 16), torch.randn(8, 4)) for _ in range(count)]


def test_a_module_and_its_float_file_become_verified_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batches = Two().eval(), _pairs(6)
    before = copy.deepcopy(model.state_dict())
    result = quantize(model, batches[0], batches, [f"output_dir={tmp_path / 'module'}"])
    assert result.met and result.report["name"] == "model"
    image, vector = _pairs(1)[0]
    feeds = {"image": image.numpy(), "vector": vector.numpy()}
    (got,) = ort.InferenceSession(str(result.file)).run(None, feeds)
    with torch.no_grad():
        expected, simulated = model(image, vector).numpy(), result.module(image, vector)
    np.testing.assert_allclose(got, _tensor(simulated).numpy(), atol=1e-5)
    assert 10 * np.log10((expected**2).mean() / ((expected - got) ** 2).mean()) > 20
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())

    mappings = [{"image": image, "vector": vector.numpy()} for image, vector in batches]
    typed = [f"output_dir={tmp_path / 'file'}", "calibration.images=100"]
    with pytest.warns(QatkitWarning, match=r"calibration\.images=100: the train split has only 24") as told:
        again = quantize(result.float_file, None, mappings, typed)
    assert {one.filename for one in told if one.category is QatkitWarning} == {__file__}
    (got,) = ort.InferenceSession(str(again.file)).run(None, feeds)
    assert 10 * np.log10((expected**2).mean() / ((expected - got) ** 2).mean()) > 20


def _tensor(found: Any) -> Tensor:
    return found if isinstance(found, Tensor) else found[0]


MISTAKES = [
    ("example", None, [torch.ones(2, 3)], ()),
    ("batches", torch.ones(1, 3), [], ()),
    ("batches[0]", torch.ones(1, 3), [(torch.ones(1, 3), torch.ones(1, 3))], ()),
    ("batches[1]", torch.ones(1, 3), [torch.ones(2, 3), "text"], ()),
    ("batches[0]", torch.ones(1, 3), [torch.ones(2, 3)], ["task=classification"]),
    ("batches[0]", torch.ones(1, 3), [(torch.ones(2, 3), torch.ones(3))], ["task=classification"]),
    ("schedule.epochs", torch.ones(1, 3), [torch.ones(4, 3)], ["schedule.epochs=-1"]),
    ("backend", torch.ones(1, 3), [torch.ones(4, 3)], ["backend=nothing"]),
    ("trainer", torch.ones(1, 3), [torch.ones(4, 3)], ["trainer=ddp", "rescue=ladder"]),
    ("model", torch.ones(1, 4), [torch.ones(4, 4)], []),
    ("backend.exclude", torch.ones(1, 3), [torch.ones(4, 3)], ["backend.exclude=[op/lineer]"]),
]


@pytest.mark.parametrize(("key", "example", "batches", "config"), MISTAKES)
def test_a_mistake_names_what_is_wrong(
    key: str, example: Any, batches: list[Any], config: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        quantize(nn.Linear(3, 2), example, batches, [*config, f"output_dir={tmp_path / 'run'}"])
    assert raised.value.key == key
    assert not (tmp_path / "run").exists()


def test_model_and_data_belong_to_their_call() -> None:
    with pytest.raises(ConfigError, match="by a script"):
        given_model()
    with pytest.raises(ConfigError, match="by a script"):
        given_data(None, False, 0)


@pytest.mark.parametrize("kind", [torch.tensor, np.array, list])
def test_classes_are_those_of_targets_in_any_container(kind: Callable[[list[int]], Any]) -> None:
    config = compose_config(CONF, ["recipe=onnx_ptq", "onnx=m.onnx", "data.root=x", "task=classification"])
    samples = list(one_call._samples([(torch.zeros(3, 4), kind([0, 2, 1]))], ("x",), True))
    assert one_call._classes(config, samples) == ("0", "1", "2")
