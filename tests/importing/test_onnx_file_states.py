"""Tests of train.py with a stateful float ONNX file.

Calibration uses the float file's states; in a free run, a file is fed the states that it computes itself.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from command_line import run_script
from onnx_models import sqnr
from state_net import HIDDEN, gru_run, gru_weights, save_gru, sequence

WEIGHTS = gru_weights()
_ZIP = Path(__file__).parents[3] / "shared" / "data" / "onnx_models.zip"


def _command(file: Path, root: Path, states: str, *more: str) -> list[str]:
    return ["train.py", f"onnx={file}", f"data.root={root}", f"+model.kwargs={{states:{{{states}}}}}",
            "data.workers=0", f"output_dir={root.parent / 'run'}", "calibration=moving_average",
            "verify.latency_runs=3", "verify.threads=1", "trainer.progress=false", "trainer.accelerator=cpu",
            *more]  # fmt: skip


def _free_run(file: Path, x: Any, state: tuple[str, str], start: Any) -> list[Any]:
    """Runs a file step by step, feeds its state back, and returns each output stacked over the steps.

    state: the input and the output of the state.
    """
    session, found = ort.InferenceSession(str(file)), []
    names = [one.name for one in session.get_outputs()]
    given = [one.name for one in session.get_inputs() if one.name != state[0]]
    for row in x:
        made = session.run(None, {given[0]: row[None], state[0]: start})
        found.append(made)
        start = made[names.index(state[1])]
    return [np.stack(one) for one in zip(*found, strict=True)]


@pytest.mark.parametrize("recipe", [pytest.param("onnx_ptq", marks=pytest.mark.slow), "onnx_qat"])
def test_a_file_with_a_state_is_quantized_along_sequences(recipe: str, tmp_path: Path) -> None:
    file, root = save_gru(tmp_path / "gru.onnx", WEIGHTS), tmp_path / "data"
    root.mkdir()
    for index in range(4):
        np.savez(root / f"{index}.npz", x=sequence(60, index))
    done = run_script(*_command(file, root, "h: hN", f"recipe={recipe}", "verify.audit=false"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "120 steps of 2 sequences" in done.stdout
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    found, int8 = report["measured"]["drift"]["horizons"][-1], tmp_path / "run" / "model.int8.onnx"
    assert (found["steps"], found["counted"]) == (60, 120)
    exact = [gru_run(WEIGHTS, sequence(60, index)) for index in (1, 3)]
    start = np.zeros((1, HIDDEN), np.float32)
    free = [_free_run(int8, sequence(60, index), ("h", "hN"), start) for index in (1, 3)]
    y, h = (np.concatenate([one[i].reshape(60, -1) for one in free]) for i in (0, 1))
    wanted, states = np.concatenate([one[0] for one in exact]), np.concatenate([one[1][1:] for one in exact])
    assert found["agreement"] == pytest.approx(((y > 0.5) == (wanted > 0.5)).mean())
    assert found["outputs"][0]["sqnr_db"] == pytest.approx(sqnr(wanted, y), abs=0.05)
    assert found["outputs"][1]["sqnr_db"] == pytest.approx(sqnr(states, h), abs=0.05)
    assert report["fidelity"]["free"]["agreement"] == found["agreement"]
    about = json.loads((tmp_path / "run" / "model.json").read_text())
    assert about["preprocessing"]["states"] == {"h": "hN"}


def test_precision_is_chosen_by_free_runs(tmp_path: Path) -> None:
    """Each file has to use its own states: with the float file's, accumulated errors would not show."""
    file, root = save_gru(tmp_path / "gru.onnx", WEIGHTS), tmp_path / "data"
    root.mkdir()
    for index in range(4):
        np.savez(root / f"{index}.npz", x=sequence(60, index))
    done = run_script(*_command(file, root, "h: hN", "recipe=onnx_ptq", "verify.audit=false", "precision=auto",
                                "precision.points=2", "precision.images=32", "verify.min_float_agreement=0",
                                "verify.min_float_sqnr=0", "target.min_agreement=0.5"))  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "120 calibration steps, each file with its own states" in done.stdout
    found = json.loads((tmp_path / "run" / "report.json").read_text())["precision"]
    (chosen,) = [one for one in found["points"] if one["chosen"]]
    assert found["steps"] == 120 and chosen["floats"] is not None
    start, wanted, got = np.zeros((1, HIDDEN), np.float32), [], []
    for index in (0, 2):
        wanted.append(_free_run(file, sequence(60, index), ("h", "hN"), start)[0])
        got.append(
            _free_run(tmp_path / "run" / "model.int8.onnx", sequence(60, index), ("h", "hN"), start)[0]
        )
    y, exact = np.concatenate(got), np.concatenate(wanted)
    assert chosen["sqnr_db"] == pytest.approx(sqnr(exact, y), abs=0.05)
    assert chosen["agreement"] == pytest.approx(((y > 0.5) == (exact > 0.5)).mean())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("{h: hN, h: y}",),
            "model.kwargs.states=h: hN, h: y: expected each input once; 'h' is listed twice",
        ),
        (("{h: y}",), "the input 'h' is float32 [n, 8], but the output 'y' is float32 [n, 1]"),
        (("{hh: hN}",), "there is no 'hh' (did you mean h"),
        (("{h: hN}", "data=synthetic"), "gives images, but a model with states needs arrays"),
    ],
)
def test_states_are_refused_before_anything_long(
    settings: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    file, root = save_gru(tmp_path / "gru.onnx", WEIGHTS), tmp_path / "data"
    root.mkdir()
    np.savez(root / "a.npz", x=sequence(70, 0))
    states, *more = settings
    done = run_script("train.py", "recipe=onnx_ptq", f"onnx={file}", f"data.root={root}",
                 f"+model.kwargs={{states:{states}}}", f"output_dir={tmp_path / 'run'}", *more)  # fmt: skip
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.skipif(not _ZIP.is_file(), reason="no shared/data/onnx_models.zip beside the checkout")
@pytest.mark.parametrize(
    ("name", "states", "shape"),
    [
        ("silero_vad_plain", ("state", "stateN"), (576,)),
        ("dtln_1", ("input_3", "tf_op_layer_stack_2"), (1, 257)),
    ],
)
def test_files_of_others_run_with_their_own_states(
    name: str, states: tuple[str, str], shape: tuple[int, ...], tmp_path: Path
) -> None:
    with zipfile.ZipFile(_ZIP) as archive:
        archive.extract(f"onnx_models/{name}.onnx", tmp_path)
    file, root = tmp_path / "onnx_models" / f"{name}.onnx", tmp_path / "data"
    session = ort.InferenceSession(str(file))
    given = next(one.name for one in session.get_inputs() if one.name != states[0])
    x = np.abs(np.random.default_rng(0).normal(0, 0.1, (80, *shape))).astype(np.float32)
    root.mkdir()
    np.savez(root / "a.npz", **{given: x})  # type: ignore[arg-type]
    bounds = ("verify.min_float_agreement=0", "verify.min_float_sqnr=-100", "verify.audit=false")
    done = run_script(*_command(file, root, ": ".join(states), "recipe=onnx_ptq", "calibration.images=16",
                         "calibration.batch_size=1", "verify.images=8", "verify.parity_images=4", *bounds))  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    found = report["measured"]["drift"]["horizons"][-1]
    assert found["steps"] == 40
    start = np.zeros(next(one.shape for one in session.get_inputs() if one.name == states[0]), np.float32)
    whole = _free_run(file, x, states, start)
    state = whole[[one.name for one in session.get_outputs()].index(states[1])][39]
    int8 = _free_run(tmp_path / "run" / "model.int8.onnx", x[40:], states, state)
    for output, a, b in zip(found["outputs"], whole, int8, strict=True):
        assert output["sqnr_db"] == pytest.approx(sqnr(a[40:], b), abs=0.5), output["name"]
