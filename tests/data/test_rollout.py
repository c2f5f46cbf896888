"""Tests of sequence steps as samples whose states the float file computes, compared with a NumPy GRU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from state_net import HIDDEN, gru_run, gru_weights, save_gru, sequence

from qatkit import models
from qatkit.config.schema import DataConfig, ModelConfig
from qatkit.data import rollout
from qatkit.data.arrays import Port, arrays
from qatkit.data.module import DataModule
from qatkit.data.sources import Splits, synthetic
from qatkit.tasks import task_of
from qatkit_verify.errors import ConfigError

WEIGHTS = gru_weights()


def _data(root: Path, source: Any = arrays) -> DataModule:
    """Returns the data of a run of the GRU file, which is written next to the folder."""
    file = save_gru(root.parent / "gru.onnx", WEIGHTS)
    return _made(root, ModelConfig(f"onnx/{file}", kwargs={"states": {"h": "hN"}}), source)


def _made(root: Path, model: ModelConfig, source: Any = arrays, **changes: Any) -> DataModule:
    config = DataConfig(
        source="qatkit.data.arrays.arrays", root=str(root), workers=0, batch_size=2, eval_batch_size=2
    )
    given = {"ports": models.declared(model, None).ports, "states": models.states(model)} | changes
    return DataModule(config, source, 0, task=task_of("outputs"), **given)


def _samples(data: DataModule, part: str) -> tuple[Any, Any]:
    """Returns x [T, 6] and h [T, 8] of all samples of a split."""
    items = getattr(data, f"_{part}_images")
    found = [items[index][0] for index in range(len(items))]
    x, h = (np.concatenate([one[name].numpy() for one in found]) for name in ("x", "h"))
    return x, h


def _saved(root: Path, **named: Any) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, one in named.items():
        np.savez(root / f"{name}.npz", **(one if isinstance(one, dict) else {"x": one}))
    return root


def test_samples_have_the_states_of_their_own_sequence(tmp_path: Path) -> None:
    steps = [sequence(7, 1), sequence(5, 2), sequence(9, 3)]
    data = _data(_saved(tmp_path / "data", a=steps[0], b=steps[1], c=steps[2]))
    x, h = _samples(data, "train")
    np.testing.assert_array_equal(x, np.concatenate([steps[0], steps[2]]))
    wanted = [gru_run(WEIGHTS, one)[1][:-1] for one in steps]
    np.testing.assert_allclose(h, np.concatenate([wanted[0], wanted[2]]), atol=1e-5)
    x, h = _samples(data, "test")
    np.testing.assert_array_equal(x, steps[1])
    np.testing.assert_allclose(h, wanted[1], atol=1e-5)
    assert data.about_inputs()["states"] == {"h": "hN"}
    assert "16 steps of 2 sequences" in data.notes[-1] and "5 steps of 1 sequence" in data.notes[-1]


def test_a_sequence_starts_from_the_array_of_its_file(tmp_path: Path) -> None:
    start = np.linspace(-1, 1, HIDDEN, dtype=np.float32)[None]
    a, b = sequence(6, 1), sequence(6, 2)
    data = _data(_saved(tmp_path / "data", a={"x": a, "h": start}, b=b))
    np.testing.assert_allclose(_samples(data, "train")[1], gru_run(WEIGHTS, a, start)[1][:-1], atol=1e-5)
    np.testing.assert_allclose(_samples(data, "test")[1], gru_run(WEIGHTS, b)[1][:-1], atol=1e-5)


def test_one_sequence_is_halved_and_its_second_half_goes_on(tmp_path: Path) -> None:
    x = sequence(11, 4)
    start = np.full((1, HIDDEN), 0.5, np.float32)
    data = _data(_saved(tmp_path / "data", a={"x": x, "h": start}))
    wanted = gru_run(WEIGHTS, x, start)[1]
    train, test = _samples(data, "train"), _samples(data, "test")
    np.testing.assert_allclose(train[1], wanted[:6], atol=1e-5)
    np.testing.assert_allclose(test[1], wanted[6:11], atol=1e-5)
    (free,) = data.sequences()
    np.testing.assert_allclose(free.start["h"][0], wanted[6], atol=1e-5)
    np.testing.assert_array_equal(np.concatenate([one["x"].numpy() for one in free.steps]), x[6:])


def test_files_of_one_step_go_on_by_the_numbers_in_their_names(tmp_path: Path) -> None:
    x, other = sequence(12, 5), sequence(4, 6)
    frames = {f"step_{i}": x[i : i + 1] for i in range(12)}
    root = _saved(tmp_path / "data" / "a", **frames).parent
    _saved(root / "b", **{f"{i}": other[i : i + 1] for i in range(4)})
    data = _data(root)
    train, test = _samples(data, "train"), _samples(data, "test")
    np.testing.assert_array_equal(train[0], x)
    np.testing.assert_allclose(train[1], gru_run(WEIGHTS, x)[1][:-1], atol=1e-5)
    np.testing.assert_array_equal(test[0], other)
    np.testing.assert_allclose(test[1], gru_run(WEIGHTS, other)[1][:-1], atol=1e-5)


def test_states_beyond_their_memory_are_those_of_every_nth_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "KEPT", 4 * 4 * HIDDEN)  # four steps
    a, b = sequence(10, 1), sequence(9, 2)
    data = _data(_saved(tmp_path / "data", a=a, b=b))
    x, h = _samples(data, "train")
    np.testing.assert_array_equal(x, a[::3])
    np.testing.assert_allclose(h, gru_run(WEIGHTS, a)[1][:-1:3], atol=1e-5)
    assert any("one in 3 steps of train is a sample" in note for note in data.notes)
    assert sum(len([*one.steps]) for one in data.sequences()) == 9  # free runs use all steps


def test_free_runs_end_after_the_test_images(tmp_path: Path) -> None:
    root = tmp_path / "data"
    for part, lengths in (("train", (3, 4)), ("test", (5, 6, 7))):
        _saved(root / part, **{f"s{i}": sequence(length, i) for i, length in enumerate(lengths)})
    data = _data(root)
    assert [len([*one.steps]) for one in data.sequences()] == [5, 6, 7]
    data.config.test_images = 8
    assert [len([*one.steps]) for one in data.sequences()] == [5, 3]


def _open_state(path: Path) -> Path:
    """Writes a file whose state [1, k] may have any width: y = x + 1, hN = h / 2."""
    nodes = [
        helper.make_node("Add", ["x", "one"], ["y"]),
        helper.make_node("Mul", ["h", "half"], ["hN"]),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "open",
        [value("x", TensorProto.FLOAT, ["n", 6]), value("h", TensorProto.FLOAT, [1, "k"])],
        [value("y", TensorProto.FLOAT, ["n", 6]), value("hN", TensorProto.FLOAT, [1, "k"])],
        [
            numpy_helper.from_array(np.array(one, np.float32), name)
            for name, one in (("one", 1.0), ("half", 0.5))
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    return path


def test_a_sequence_that_starts_in_another_shape_is_named(tmp_path: Path) -> None:
    start = np.ones((1, 5), np.float32)
    _saved(tmp_path / "data", a=sequence(3, 1), b=sequence(3, 2), c={"x": sequence(3, 3), "h": start})
    model = ModelConfig(f"onnx/{_open_state(tmp_path / 'open.onnx')}", kwargs={"states": {"h": "hN"}})
    with pytest.raises(
        ConfigError, match=r"'h' has the shape \[1, 1\] in the first sequence and \[1, 5\] in another"
    ):
        _made(tmp_path / "data", model)


def test_a_step_that_the_file_does_not_run_is_one_sentence(tmp_path: Path) -> None:
    model = ModelConfig(f"onnx/{save_gru(tmp_path / 'gru.onnx', WEIGHTS)}", kwargs={"states": {"h": "hN"}})
    root = _saved(tmp_path / "data", a=sequence(3, 1), b=sequence(3, 2))
    ports = (Port("x", "float32", (None, 6), 0), Port("h", "float32", (1, None), None))
    with pytest.raises(
        ConfigError, match=r"ONNX Runtime failed on a step with x \[1, 6\], h \[1, 1\] \(.*invalid dimensions"
    ):
        _made(root, model, ports=ports)


def test_a_state_without_a_batch_axis_is_of_one_sequence(tmp_path: Path) -> None:
    model = ModelConfig(f"onnx/{save_gru(tmp_path / 'gru.onnx', WEIGHTS)}", kwargs={"states": {"h": "hN"}})
    steps = [sequence(4, 1), sequence(3, 2)]
    ports = (Port("x", "float32", (None, 6), 0), Port("h", "float32", (1, HIDDEN), None))
    data = _made(_saved(tmp_path / "data", a=steps[0], b=steps[1]), model, ports=ports)
    batches = [batch for batch, _ in data.image_batches([0, 1, 2, 3], 4)]
    assert [batch["x"].shape for batch in batches] == [(1, 6)] * 4
    h = np.concatenate([batch["h"].numpy() for batch in batches])
    np.testing.assert_allclose(h, gru_run(WEIGHTS, steps[0])[1][:-1], atol=1e-5)


def test_a_state_of_open_sizes_has_to_be_given(tmp_path: Path) -> None:
    ports = (Port("x", "float32", (None, 6), 0), Port("h", "float32", (None, None), 0))
    root = _saved(tmp_path / "data", a=sequence(3, 1), b=sequence(3, 2))
    model = ModelConfig(f"onnx/{save_gru(tmp_path / 'gru.onnx', WEIGHTS)}", kwargs={"states": {"h": "hN"}})
    config = DataConfig(source="qatkit.data.arrays.arrays", root=str(root), workers=0)
    with pytest.raises(
        ConfigError,
        match=r"the size of the state 'h' \[any, any\] is unknown; add an array 'h' to the first step",
    ):
        DataModule(config, arrays, 0, task=task_of("outputs"), ports=ports, states=models.states(model))


class _Steps:
    """A user's dataset of 6 steps; `lengths` should be the number of steps of each sequence."""

    def __init__(self, lengths: Any) -> None:
        self.x, self.targets, self.lengths = sequence(6, 1), [-1] * 6, lengths

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return {"x": self.x[index : index + 1]}, -1


@pytest.mark.parametrize("lengths", [None, (), (3, 2), (6, 0), ("6",)])
def test_a_dataset_has_to_say_where_sequences_end(lengths: Any, tmp_path: Path) -> None:
    def source(root: str | None, download: bool, seed: int) -> Splits:
        return Splits(_Steps(lengths), _Steps((6,)), (), arrays=True)

    with pytest.raises(
        ConfigError, match=r"train\.lengths must list the number of steps of each sequence, 6 in all"
    ):
        _data(_saved(tmp_path / "data"), source)


def test_a_users_dataset_of_sequences_is_taken(tmp_path: Path) -> None:
    def source(root: str | None, download: bool, seed: int) -> Splits:
        return Splits(_Steps((2, 4)), _Steps((6,)), (), arrays=True)

    data = _data(_saved(tmp_path / "data"), source)
    wanted = [gru_run(WEIGHTS, part)[1][:-1] for part in np.split(sequence(6, 1), [2])]
    np.testing.assert_allclose(_samples(data, "train")[1], np.concatenate(wanted), atol=1e-5)


def test_pictures_are_refused_for_a_model_with_states(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model\.kwargs\.states=h: hN: data\.source=.* gives images, but .* needs arrays"
    ):
        _data(_saved(tmp_path / "data"), synthetic)


def test_a_state_that_blows_up_is_named_with_its_step(tmp_path: Path) -> None:
    data = _saved(tmp_path / "data", a=sequence(4, 1), b=sequence(4, 2))
    broken = {**WEIGHTS, "Uz": np.full((HIDDEN, HIDDEN), np.nan, np.float32)}
    model = ModelConfig(f"onnx/{save_gru(tmp_path / 'gru.onnx', broken)}", kwargs={"states": {"h": "hN"}})
    with pytest.raises(ConfigError, match="its state 'hN' is NaN or infinite after step 0"):
        _made(data, model)
