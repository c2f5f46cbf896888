"""Tests of encodings, the scales and zero points of tensors: mode=encodings and calibration.encodings."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from aimet_samples import SAMPLES, network
from command_line import Launch
from float_files import settings
from numpy.typing import NDArray
from onnx import numpy_helper
from tiny_run import calibrate_only, report_of

from qatkit.algorithms import Algorithm, BiasCorrection, Equalize, SmoothQuant
from qatkit.algorithms.awq import AWQ
from qatkit.config.schema import CalibrationConfig, Config, OverrideConfig, PrecisionConfig
from qatkit.jobs import pipeline
from qatkit.jobs.quantize_file import quantize
from qatkit.run.encodings import digest_of_encodings
from qatkit_verify.errors import ConfigError

PAIRS = SAMPLES / "per_channel.qdq.onnx"


def constants(path: Path) -> dict[str, NDArray[np.generic]]:
    return {one.name: numpy_helper.to_array(one) for one in onnx.load(path).graph.initializer}


def test_a_command_writes_the_scales_of_a_file(
    tmp_path: Path, launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(quantize, f"onnx={PAIRS}", "mode=encodings", "output_dir=out", from_checkpoint=True) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["encodings", "of", "type", "scales", "tensors"],
        ["activations", "uint8", "per", "tensor", "6"],
        ["parameters", "int8", "per", "channel", "3"],
    ]
    assert lines[-1] == "out/encodings.json"
    told = json.loads((tmp_path / "out" / "encodings.json").read_text())
    held = constants(PAIRS) | {
        node.output[0]: numpy_helper.to_array(node.attribute[0].t)
        for node in onnx.load(PAIRS).graph.node
        if node.op_type == "Constant"
    }
    assert np.float32(told["activations"]["input"]["scale"]) == held["input_scale"]
    assert told["activations"]["input"]["zero_point"] == held["input_zero_point"]
    assert np.array_equal(np.float32(told["parameters"]["fc.weight"]["scale"]), held["fc.weight_scale"])


def test_aimets_form_says_what_it_leaves_out(
    tmp_path: Path, launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "net.onnx"
    assert quantize_by_hand(source)
    typed = ("mode=encodings", "encodings.format=aimet_1.0.0", "output_dir=out")
    assert launch(quantize, f"onnx={source}", *typed, from_checkpoint=True) == 0
    assert "left out, since aimet_1.0.0 cannot express them: b" in capsys.readouterr().out
    told = json.loads((tmp_path / "out" / "encodings.json").read_text())
    (one,) = told["activation_encodings"]
    assert (told["version"], one["name"], one["offset"], told["param_encodings"]) == (
        "1.0.0",
        "x",
        [-3.0],
        [],
    )


def quantize_by_hand(path: Path) -> Path:
    """Writes the graph x + b with a uint8 QuantizeLinear/DequantizeLinear pair on x and an int32 b."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
    net (float[4] x) => (float[4] y) <float s = {0.5}, uint8 z = {3}, int32[4] b_quantized = {1, 2, 3, 4}> {
      q = QuantizeLinear (x, s, z)
      d = DequantizeLinear (q, s, z)
      b = DequantizeLinear (b_quantized, s)
      y = Add (d, b) }""")
    onnx.save(model, str(path))
    return path


def test_a_float_file_has_no_encodings(tmp_path: Path) -> None:
    source = network(tmp_path / "net.onnx")
    with pytest.raises(ConfigError, match=r"^onnx=.*: the file has no QuantizeLinear"):
        quantize(Config(onnx=f"{source}", mode="encodings", output_dir=f"{tmp_path / 'out'}"))
    assert not (tmp_path / "out").exists()


def given(folder: Path, source: Path, **changes: Any) -> Config:
    """Returns the config of a run that quantizes `source` with AIMET's encodings."""
    calibration = CalibrationConfig(images=32, batch_size=16, encodings=f"{SAMPLES}/per_channel.1.0.0.json")
    config = settings(source, "static", folder, calibration=calibration)
    config.verify.max_drop = None
    return replace(config, **changes)


def test_what_would_move_encodings_is_refused(tmp_path: Path) -> None:
    source, target = network(tmp_path / "net.onnx"), f"{BiasCorrection.__module__}.BiasCorrection"
    config = given(tmp_path / "out", source, algorithm={"bias_correction": {"target": target}})
    with pytest.raises(ConfigError, match=r"^algorithm=bias_correction: expected none with calibration.enc"):
        quantize(config)
    with pytest.raises(
        ConfigError, match=r"^precision.search=auto: expected none with calibration.encodings"
    ):
        quantize(given(tmp_path / "out", source, precision=PrecisionConfig(search="auto")))
    config = given(tmp_path / "out", source)
    config.calibration.encodings = f"{tmp_path / 'no.json'}"
    with pytest.raises(ConfigError, match=r"^calibration.encodings=.*no.json: expected a file that exists"):
        quantize(config)
    assert not (tmp_path / "out").exists()


FIXED = [
    {"weight_scale": 0.01},
    {"weight_range": [-1.0, 1.0]},
    {"activation_scale": 0.01, "activation_zero_point": 0},
    {"activation_range": [0.0, 4.0]},
]


@pytest.mark.parametrize("fixed", FIXED, ids=lambda fixed: next(iter(fixed)))
@pytest.mark.parametrize("algorithm", [AWQ, Equalize, SmoothQuant])
def test_no_algorithm_rescales_beside_a_fixed_scale(
    algorithm: type[Algorithm], fixed: dict[str, Any], tmp_path: Path
) -> None:
    config = calibrate_only(tmp_path / "out")
    config.algorithm = {"it": {"target": f"{algorithm.__module__}.{algorithm.__name__}"}}
    config.backend.overrides = {"conv1": OverrideConfig(**fixed)}
    said = f"^algorithm=it: expected none with backend.overrides.conv1.{next(iter(fixed))} \\(it rescales channels"
    with pytest.raises(ConfigError, match=said):
        pipeline.train(config)
    assert not (tmp_path / "out").exists()


def test_a_contest_may_have_them_beside_a_fixed_scale(tmp_path: Path) -> None:
    config = calibrate_only(tmp_path / "out")
    config.algorithm_choice = "auto"
    config.algorithm = {"equalize": {"target": f"{Equalize.__module__}.Equalize"}}
    config.backend.overrides = {"conv1": OverrideConfig(activation_range=[0.0, 4.0])}
    assert pipeline.train(config) == 0
    assert [row["name"] for row in report_of(tmp_path / "out")["algorithms"]][-1:] == ["equalize"]


def test_a_typo_ends_a_run_before_it_writes_anything(tmp_path: Path) -> None:
    listed = tmp_path / "encodings.json"
    listed.write_text((SAMPLES / "per_channel.1.0.0.json").read_text().replace("fc.weight", "fc.wieght"))
    config = given(tmp_path / "out", network(tmp_path / "net.onnx"))
    config.calibration.encodings = f"{listed}"
    told = r"^calibration.encodings=.*: the model has no tensor 'fc.wieght' \(did you mean fc.weight"
    with pytest.raises(ConfigError, match=told):
        quantize(config)
    assert not (tmp_path / "out").exists()


def test_a_cache_depends_on_what_the_encodings_say(tmp_path: Path) -> None:
    listed = tmp_path / "encodings.json"
    config = Config(calibration=CalibrationConfig(encodings=f"{listed}"))
    listed.write_text("1")
    before = digest_of_encodings(config)
    listed.write_text("2")
    assert digest_of_encodings(config).keys() == before.keys()
    assert digest_of_encodings(config) != before
    assert digest_of_encodings(Config()) == {}


@pytest.mark.slow
def test_a_run_takes_over_the_scales_of_another_tool(tmp_path: Path) -> None:
    source = network(tmp_path / "net.onnx")
    assert quantize(given(tmp_path / "out", source)) == 0
    notes = " ".join(report_of(tmp_path / "out")["notes"])
    assert " sets the scales of 4 activations and 3 weights" in notes
    assert "encodings not used, because the tensor has no quantizer: output" in notes
    listed = json.loads((SAMPLES / "per_channel.1.0.0.json").read_text())
    wanted = {one["name"]: np.float32(one["scale"]) for one in listed["param_encodings"]}
    held = constants(tmp_path / "out" / "model.static.onnx")
    for name, scale in wanted.items():
        assert held[f"{name}_scale"].tobytes() == scale.tobytes()


@pytest.mark.slow
def test_a_pytorch_run_comes_back_and_so_does_its_cache(tmp_path: Path) -> None:
    """Checks that two runs calibrated on fewer images take over a file's encodings and share a cache."""
    first = calibrate_only(tmp_path / "first")
    assert pipeline.train(first) == 0
    file = tmp_path / "first" / "model.int8.onnx"
    listed, cache = tmp_path / "encodings.onnx", tmp_path / "cache"
    shutil.copyfile(file, listed)
    for name in ("second", "third"):
        config = calibrate_only(tmp_path / name)
        config.calibration = CalibrationConfig(
            images=32, batch_size=16, encodings=f"{listed}", cache=f"{cache}"
        )
        assert pipeline.train(config) == 0
        again = constants(tmp_path / name / "model.int8.onnx")
        assert again.keys() == constants(file).keys()
        assert [n for n, one in constants(file).items() if one.tobytes() != again[n].tobytes()] == []
        assert "sets the scales of" in " ".join(report_of(tmp_path / name)["notes"])
    config.calibration.encodings = f"{PAIRS}"
    config = replace(config, output_dir=f"{tmp_path / 'fourth'}")
    with pytest.raises(ConfigError, match=r"^calibration.(cache|encodings)="):
        pipeline.train(config)
