"""Tests of files for streaming, whose recurrent states are inputs and outputs.

States match those of torch's layers, and after chunks of any length, the output is that for the whole input.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from qatkit.config.schema import VerifyConfig
from qatkit.export.add_states import add_states
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.captured import Captured
from qatkit.models.streaming_gru import StreamingGRU
from qatkit.records.results import Results
from qatkit.tasks.audio_classification import AudioClassification
from qatkit.train.module import QATModule
from qatkit.verify.checks.base import Subject
from qatkit.verify.checks.stream import StreamCheck
from qatkit_verify.chunks import chunks, in_chunks, kept_db
from qatkit_verify.errors import ConfigError
from qatkit_verify.stream import stream_file

BANDS, SIZE, CLASSES = 6, 8, 3
FRAMES = {"input": {1: "frames"}}


class Spotter(nn.Module):
    """Two recurrent layers between Linears.

    The last Linear reads the last frame or, with `mean`, the mean of the frames that are fed at once.
    """

    def __init__(self, kind: str, mean: bool = False, backwards: bool = False) -> None:
        super().__init__()
        layer: Any = getattr(nn, kind)
        self.embed = nn.Linear(BANDS, SIZE)
        self.heard = layer(SIZE, SIZE, 2, batch_first=True, bidirectional=backwards)
        self.classify = nn.Linear(SIZE * (1 + backwards), CLASSES)
        self.mean = mean

    def forward(self, x: Tensor) -> Tensor:
        heard, _ = self.heard(self.embed(x).relu())
        found: Tensor = self.classify(heard.mean(1) if self.mean else heard[:, -1])
        return found


def drawn(count: int = 4, frames: int = 23, seed: int = 0) -> Tensor:
    return torch.randn((count, frames, BANDS), generator=torch.Generator().manual_seed(seed))


def written(model: nn.Module, folder: Path, axes: object = FRAMES) -> Path:
    """Writes the int8 file of a model and returns its path."""
    captured = Captured(model.eval(), drawn(), axes)  # type: ignore[arg-type]
    module = QATModule(captured, drawn())
    module.calibrate([drawn(16), drawn(16, seed=1)])
    export_onnx(module.convert().graph.eval(), drawn(), folder / "model.int8.onnx")
    return folder / "model.int8.onnx"


def judged(file: Path, batches: int = 2) -> tuple[StreamCheck, Results]:
    given = [(drawn(8, seed=one).numpy(), np.zeros(8, np.int64)) for one in range(batches)]
    subject = Subject(file.parent, {"int8": file}, lambda: given, lambda count: (count,), VerifyConfig(threads=1),
                      task=AudioClassification())  # fmt: skip
    check = StreamCheck()
    return check, check.measure(subject, Results("r", "m", str(file.parent)))


@pytest.mark.parametrize(("kind", "states"), [("GRU", 2), ("LSTM", 4), ("RNN", 2)])
def test_int8_chunks_lead_to_the_whole_output(kind: str, states: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    file = written(Spotter(kind), tmp_path)
    how = add_states(file, stream_file(file))
    whole, stream = (ort.InferenceSession(path) for path in (file, stream_file(file)))
    assert how.axis == 1 and len(how.states) == states
    for frames in (1, 2, 23, 100):
        batch = drawn(3, frames, seed=frames).numpy()
        (exact,) = whole.run(None, {"input": batch})
        (found,) = in_chunks(stream, batch)
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-6)
    assert [one.version for one in onnx.load(stream_file(file)).opset_import if not one.domain] == [13]
    check, results = judged(file)
    assert results.measured["stream"]["images"] == 16 and results.measured["stream"]["agreement"] == 1
    assert not check.shortfalls(VerifyConfig(), results) and "100.00 % of 16" in check.lines(results)[0]


@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_float_states_are_those_of_the_module(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Spotter(kind).eval()
    export_onnx(Captured(model, drawn(), FRAMES).graph(), drawn(), tmp_path / "float.onnx")
    add_states(tmp_path / "float.onnx", tmp_path / "stream.onnx")
    session, batch = ort.InferenceSession(tmp_path / "stream.onnx"), drawn()
    names = [one.name for one in session.get_inputs()]
    given = {name: np.zeros((len(batch), SIZE), np.float32) for name in names[1:]}
    with torch.no_grad():
        _, last = model.heard(model.embed(batch).relu())
    wanted = [state[layer] for layer in (0, 1) for state in (last if kind == "LSTM" else (last,))]
    for chunk in chunks(batch.numpy(), 1):
        answer, *states = session.run(None, {"input": chunk, **given})
        given = dict(zip(names[1:], states, strict=True))
    for found, exact in zip(states, wanted, strict=True):
        np.testing.assert_allclose(found, exact.numpy(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(answer, model(batch).detach().numpy(), rtol=0, atol=1e-5)


def test_the_spotter_hears_features_frame_by_frame(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, example = StreamingGRU(4, bands=BANDS, hidden=SIZE).eval(), drawn().unsqueeze(1)
    graph = Captured(model, example, {"input": {2: "frames"}}).graph()
    export_onnx(graph, example, tmp_path / "float.onnx")
    assert add_states(tmp_path / "float.onnx", tmp_path / "stream.onnx").axis == 2
    (found,) = in_chunks(ort.InferenceSession(tmp_path / "stream.onnx"), example)
    np.testing.assert_allclose(found, model(example).detach().numpy(), rtol=0, atol=1e-5)


def test_what_hears_more_than_its_states_falls_short(tmp_path: Path) -> None:
    torch.manual_seed(0)
    file = written(Spotter("GRU", mean=True), tmp_path)
    add_states(file, stream_file(file))
    check, results = judged(file)
    (short,) = check.shortfalls(VerifyConfig(), results)
    assert "the SQNR of model.int8.stream.onnx" in short.line and str(short.fixes[0]).startswith(
        "export.stream=false"
    )


@pytest.mark.parametrize(
    ("make", "axes", "told"),
    [
        (lambda: nn.Sequential(nn.Linear(BANDS, CLASSES)), FRAMES, "the model has no LSTM, GRU or RNN"),
        (lambda: Spotter("GRU", backwards=True), FRAMES, "reads a recording from its end"),
        (lambda: Spotter("GRU"), "none", "exactly one dynamic axis in addition to the batch"),
    ],
)
def test_a_file_without_open_states_is_refused(make, axes, told: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = written(make(), tmp_path, axes)
    with pytest.raises(ConfigError, match=told):
        add_states(file, tmp_path / "stream.onnx")
    assert not (tmp_path / "stream.onnx").exists()


def test_chunks_are_the_whole_in_order() -> None:
    batch = np.arange(2 * 30).reshape(2, 30)
    parts = list(chunks(batch, 1))
    assert [part.shape[1] for part in parts] == [1, 4, 1, 9, 2, 1, 4, 1, 7]
    assert (np.concatenate(parts, 1) == batch).all()
    assert kept_db(batch, batch) == 200 and kept_db(batch, batch * 1.1) == pytest.approx(20)
