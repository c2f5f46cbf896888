"""Tests of samples drawn at random: types, shapes and ranges, and the same values whenever they are read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from state_net import gru_run, gru_weights, save_gru

from qatkit import models
from qatkit.config.schema import DataConfig, ModelConfig
from qatkit.config.schema.model import DRAWN
from qatkit.data.arrays import Port
from qatkit.data.drawn import NOTE, drawn
from qatkit.data.module import DataModule
from qatkit.tasks import task_of
from qatkit_verify.errors import ConfigError

IDS = Port("ids", "int64", (None, None), 0, ("batch", "sequence"), 30)
MASK = Port("mask", "int64", (None, None), 0, ("batch", "sequence"))
PICTURE = Port("picture", "float32", (None, 3, None, None), 0, ("", "", "", ""))


def _config(**settings: Any) -> DataConfig:
    given = {"workers": 0, "batch_size": 2, "eval_batch_size": 2, "count": 8} | settings
    return DataConfig(source=DRAWN, **given)


def _data(*ports: Port, seed: int = 0, **settings: Any) -> DataModule:
    return DataModule(_config(**settings), drawn, seed, task=task_of("outputs"), ports=ports)


def _values(data: DataModule, name: str, part: str = "train") -> np.ndarray[Any, Any]:
    items = getattr(data, f"_{part}_images")
    return np.stack([items[index][0][name].numpy() for index in range(len(items))])


def test_floats_are_standard_normal() -> None:
    found = _values(_data(Port("x", "float32", (None, 2000), 0)), "x")
    assert found.shape == (8, 1, 2000) and found.dtype == np.float32
    assert abs(found.mean()) < 0.05 and abs(found.std() - 1) < 0.05
    assert len(np.unique(found)) > 15_000  # samples differ


@pytest.mark.parametrize(
    ("port", "settings", "low", "high"),
    [
        (IDS, {}, 0, 29),
        (Port("ids", "float32", (None, 64), 0, (), 30), {}, 0, 29),
        (MASK, {}, 0, 1),
        (Port("m", "bool", (None, 64), 0), {}, 0, 1),
        (Port("u", "uint8", (None, 4000), 0), {}, 0, 255),
        (Port("i", "int8", (None, 4000), 0), {}, -128, 127),
        (IDS, {"ranges": {"ids": [5, 6]}}, 5, 6),
        (Port("f", "int32", (None, 64), 0), {"ranges": {"f": [-3, -1]}}, -3, -1),
        (Port("m", "bool", (None, 64), 0), {"ranges": {"m": [1, 1]}}, 1, 1),
    ],
)
def test_whole_numbers_fill_their_range(port: Port, settings: dict[str, Any], low: int, high: int) -> None:
    found = _values(_data(port, **settings), port.name)
    assert found.dtype == np.dtype(port.dtype)
    np.testing.assert_array_equal(np.unique(found), np.arange(low, high + 1))


def test_floats_lie_within_the_range_of_the_settings() -> None:
    found = _values(_data(Port("x", "float32", (None, 2000), 0), ranges={"x": [-1, 3]}), "x")
    assert found.min() >= -1 and found.max() <= 3
    assert abs(found.mean() - 1) < 0.05 and np.ptp(found) > 3.9


def test_numbers_are_those_of_seed_split_and_place() -> None:
    x = Port("x", "float32", (None, 5), 0)
    found = [_values(_data(x, seed=seed), "x", part) for seed in (1, 1, 2) for part in ("train", "test")]
    np.testing.assert_array_equal(found[0], found[2])
    np.testing.assert_array_equal(found[1], found[3])
    everything = np.concatenate([found[0], found[1], found[4], found[5]])
    assert len(np.unique(everything)) == everything.size
    assert _data(x, seed=1).fingerprint == _data(x, seed=1).fingerprint != _data(x, seed=2).fingerprint


@pytest.mark.parametrize(
    ("ports", "settings", "shapes"),
    [
        ((IDS, MASK), {}, [(1, 64), (1, 64)]),
        ((IDS, MASK), {"sizes": {"sequence": 12}}, [(1, 12), (1, 12)]),
        ((IDS, MASK), {"sizes": {"sequence": 12, "mask": 9}}, [(1, 12), (1, 12)]),
        ((IDS, MASK), {"sizes": {"mask": 9}}, [(1, 64), (1, 9)]),
        ((PICTURE,), {}, [(1, 3, 224, 224)]),
        ((PICTURE,), {"sizes": {"picture": 32}}, [(1, 3, 32, 32)]),
        ((PICTURE,), {"sizes": {"picture": [48, 192]}}, [(1, 3, 48, 192)]),
        ((Port("w", "float32", (None, 1, None), 0),), {}, [(1, 1, 16000)]),
        ((Port("w", "float32", (1, None), None),), {}, [(1, 16000)]),
        ((Port("f", "float32", (None, None, 80), 0),), {}, [(1, 64, 80)]),
        ((Port("s", "float32", (2, None, 8), 1),), {}, [(2, 1, 8)]),
    ],
)
def test_open_axes_have_sizes(ports: tuple[Port, ...], settings: dict[str, Any], shapes: list[Any]) -> None:
    data = _data(*ports, **settings)
    item: Any = data.splits.train[0][0]
    assert [item[port.name].shape for port in ports] == shapes


@pytest.mark.parametrize(
    ("ports", "sizes", "assumed"),
    [
        ((IDS, MASK), None, "{ids: 64, mask: 64}"),
        ((IDS, PICTURE), {"sequence": 12}, "{picture: [224, 224]}"),
        ((IDS, MASK), {"mask": 9}, "{ids: 64}"),
        ((PICTURE, Port("f", "float32", (None, 5), 0)), {"picture": 32}, ""),
    ],
)
def test_assumed_sizes_are_told_as_they_are_typed(ports: tuple[Port, ...], sizes: Any, assumed: str) -> None:
    wanted = f"; data.sizes={assumed} was assumed, so set data.sizes to sizes that the model accepts"
    assert _data(*ports, sizes=sizes).splits.advice == (wanted if assumed else "")


def test_a_step_of_an_assumed_size_that_fails_is_told(tmp_path: Path) -> None:
    file = save_gru(tmp_path / "gru.onnx", gru_weights())
    model = ModelConfig(f"onnx/{file}", kwargs={"states": {"h": "hN"}})
    state = next(port for port in models.declared(model, None).ports if port.name == "h")
    ports = (Port("x", "float32", (None, None), 0), state)
    with pytest.raises(
        ConfigError, match=r"failed on a step with x \[1, 16000\].*; data.sizes={x: 16000} was assumed"
    ):
        _data_of_steps(model, ports)
    assert _data_of_steps(model, ports, sizes={"x": 6}).splits.advice == ""


def _data_of_steps(model: ModelConfig, ports: tuple[Port, ...], **settings: Any) -> DataModule:
    told = _config(**settings)
    return DataModule(told, drawn, 0, task=task_of("outputs"), ports=ports, states=models.states(model))


def test_an_input_beside_the_batch_is_the_same_in_all_samples() -> None:
    data = _data(Port("x", "float32", (None, 5), 0), Port("gain", "float32", (3,), None))
    gain = [_values(data, "gain", part) for part in ("train", "test")]
    assert len(np.unique(np.concatenate(gain), axis=0)) == 1
    batch = data.first_batch(4)
    assert batch["x"].shape == (4, 5) and batch["gain"].shape == (3,)


def test_samples_of_a_model_without_a_batch_differ() -> None:
    found = _values(_data(Port("x", "float32", (3,), None)), "x")
    assert len(np.unique(found)) == found.size


def test_the_notes_say_that_nothing_is_real() -> None:
    data = _data(IDS, MASK, Port("x", "float32", (None, 5), 0), ranges={"x": [0, 0.5]})
    assert data.notes[0] == NOTE and "no figure of accuracy or agreement applies to it" in NOTE
    assert data.notes[1] == (
        "samples drawn for each split: 8, with ids int64 [1, 64] 0..29 (rows of the table that it "
        "indexes); mask int64 [1, 64] 0..1 (assumed; data.ranges sets it); x float32 [1, 5] 0..0.5 (data.ranges)"
    )
    assert data.splits.drawn and not data.labelled


def test_a_model_with_states_gets_sequences(tmp_path: Path) -> None:
    weights = gru_weights()
    file = save_gru(tmp_path / "gru.onnx", weights)
    model = ModelConfig(f"onnx/{file}", kwargs={"states": {"h": "hN"}})
    given: dict[str, Any] = {"ports": models.declared(model, None).ports, "states": models.states(model)}
    data = DataModule(_config(count=40), drawn, 0, task=task_of("outputs"), **given)
    x, h = (_values(data, name)[:, 0] for name in ("x", "h"))
    wanted = np.concatenate([gru_run(weights, part)[1][:-1] for part in (x[:32], x[32:])])
    np.testing.assert_allclose(h, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("ports", "settings", "message"),
    [
        ((), {}, f"data.source={DRAWN}: the model does not declare its inputs; use an ONNX file"),
        ((IDS,), {"root": "x"}, "data.root=x: expected null with data=drawn, which reads no files"),
        ((IDS,), {"count": 0}, "data.count=0: expected an integer of at least 1"),
        (
            (IDS,),
            {"rate": 8000},
            f"data.rate=8000: expected null with data.source={DRAWN}; only data=audio, data=spoken_digits, "
            "data=speech_commands, data=tones read this key",
        ),
        ((IDS,), {"bad": "skip"}, "data.bad=skip: expected refuse"),
        ((IDS,), {"ranges": 3}, "data.ranges=3: expected {INPUT: [LOW, HIGH]}"),
        (
            (IDS,),
            {"ranges": {"id": [0, 1]}},
            "data.ranges.id=[0, 1]: the model has no such input (did you mean ids?)",
        ),
        (
            (IDS,),
            {"ranges": {"ids": [1]}},
            "data.ranges.ids=[1]: expected two finite numbers [LOW, HIGH] in ascending order",
        ),
        (
            (IDS,),
            {"ranges": {"ids": [2, 1]}},
            "data.ranges.ids=[2, 1]: expected two finite numbers [LOW, HIGH] in ascending order",
        ),
        (
            (IDS,),
            {"ranges": {"ids": [0, float("inf")]}},
            "expected two finite numbers [LOW, HIGH] in ascending order",
        ),
        (
            (IDS,),
            {"ranges": {"ids": [0, 0.5]}},
            "data.ranges.ids=[0, 0.5]: expected two integers from -9223372",
        ),
        (
            (Port("m", "bool", (None, 4), 0),),
            {"ranges": {"m": [0, 2]}},
            "two integers from 0 to 1 for an input",
        ),
        (
            (IDS,),
            {"sizes": [3]},
            "data.sizes=[3]: expected {AXIS: SIZE}, {INPUT: SIZE} or {INPUT: [SIZE, ...]}",
        ),
        (
            (IDS,),
            {"sizes": {"batch": 3}},
            "data.sizes.batch=3: the model has no such input or dynamic axis (known: ids, sequence)",
        ),
        ((IDS,), {"sizes": {"sequence": 0}}, "data.sizes.sequence=0: expected a positive integer"),
        (
            (IDS,),
            {"sizes": {"sequence": [3]}},
            "data.sizes.sequence=[3]: expected a positive integer as the size of an",
        ),
        (
            (PICTURE,),
            {"sizes": {"picture": [3]}},
            "data.sizes.picture=[3]: expected a list of 2 sizes, one per dynamic axis of the input 'picture' except",
        ),
        (
            (Port("t", "object", (None,), 0),),
            {},
            "the input 't' is object, which cannot be drawn; fix it with model.kwargs.fix",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    ports: tuple[Port, ...], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        _data(*ports, **settings)
