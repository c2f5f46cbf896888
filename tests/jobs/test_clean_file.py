"""Tests of `export.py onnx=FILE mode=clean` and of settings of `clean` that apply before another mode."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from clean_nets import Arrays, drawn, kinds, reference, run, save, sizes
from command_line import Launch

from qatkit.config.schema import (
    CalibrationConfig,
    CleanConfig,
    Config,
    DataConfig,
    ExportConfig,
    VerifyConfig,
)
from qatkit.config.schema.model import DRAWN
from qatkit.encryption.cipher import is_encrypted, new_key
from qatkit.jobs.clean_file import cleaned_before
from qatkit.jobs.quantize_file import quantize
from qatkit_verify.errors import ConfigError

_ZIP = Path(__file__).parents[3] / "shared" / "data" / "onnx_models.zip"
# Maximum number of nodes left in each real file.
_LEFT = {
    "dtln_1": 35,
    "dtln_2": 72,
    "magika": 94,
    "rapidocr_cls": 179,
    "rapidocr_det": 227,
    "silero_vad_16k": 43,
    "silero_vad_plain": 36,
    "speech_embedding": 65,
    "ultraface_rfb320": 125,
    "yolox_nano": 367,
}
NET = """<ir_version: 8, opset_import: ["" : 17]> net (float[batch, 3, height, width] x) => (float[batch, 5] y) {
  same = Identity (x)
  c = Conv (same, w)
  n = BatchNormalization (c, one, zero, zero, one)
  r = Relu (n)
  p = GlobalAveragePool (r)
  f = Flatten (p)
  y = MatMul (f, v)
}"""


def weights() -> Arrays:
    return {
        "w": drawn(4, 3, 3, 3),
        "one": np.ones(4, np.float32) * 2,
        "zero": np.zeros(4, np.float32),
        "v": drawn(4, 5),
    }


@pytest.fixture
def net(tmp_path: Path) -> Path:
    return save(tmp_path / "net.onnx", NET, weights())


def test_a_command_cleans_a_file_and_says_what_it_changed(
    net: Path, tmp_path: Path, launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = (
        "clean.fix_shapes={batch:1,x:{2:8,3:9}}",
        "clean.layout={x:nhwc}",
        "clean.names=safe",
        "output_dir=out",
    )
    assert launch(quantize, f"onnx={net}", "mode=clean", *typed, from_checkpoint=True) == 0
    printed = capsys.readouterr().out
    written = tmp_path / "out" / "model.clean.onnx"
    model = onnx.load(written)
    assert sizes(model.graph.input[0]) == [1, 8, 9, 3]
    assert sizes(model.graph.output[0]) == [1, 5]
    assert "BatchNormalization" not in kinds(model)
    lines = printed.splitlines()
    assert lines[0].startswith("net.onnx: 7 nodes")
    assert [line.split()[0] for line in lines[1:] if not line.startswith(" ")][:2] == ["clean", "fix_shapes"]
    told = json.loads((tmp_path / "out" / "clean.json").read_text())
    assert told["nodes"] == {"before": 7, "after": len(model.graph.node)}
    assert told["proof"]["drawn"] and told["proof"]["inputs"][0] == {"x": [1, 3, 8, 9]}
    x = drawn(1, 3, 8, 9)
    (ours,) = run(written, {"x": np.moveaxis(x, 1, -1).copy()})
    np.testing.assert_allclose(ours, reference(net, {"x": x})[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match=r"the folder holds a model.clean.onnx"):
        quantize(run_of(net))


def run_of(net: Path, mode: str = "clean", **settings: Any) -> Config:
    """Returns the config of a run that writes to the folder `out` next to the file."""
    asked = CleanConfig(**settings)
    return Config(onnx=f"{net}", mode=mode, clean=asked, output_dir=f"{net.parent / 'out'}")


def test_a_file_that_gives_other_values_is_not_written(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> net (float[3] x) => (float[3] y) {
      r = RandomNormalLike (x)
      y = Add (x, r) }"""
    net = save(tmp_path / "net.onnx", text)
    with pytest.raises(
        ConfigError, match=r"output 'y' differs from the original file's .*, so nothing was written"
    ):
        quantize(run_of(net))
    assert [path.name for path in tmp_path.rglob("*")] == ["net.onnx"]


def test_external_data_stay_beside_the_file(net: Path, tmp_path: Path) -> None:
    apart = tmp_path / "apart" / "net.onnx"
    apart.parent.mkdir()
    onnx.save(onnx.load(net), apart, save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert quantize(run_of(apart)) == 0
    out = apart.parent / "out"
    assert sorted(path.name for path in out.iterdir()) == [
        "clean.json",
        "model.clean.onnx",
        "model.clean.onnx.data",
    ]
    feeds = {"x": drawn(2, 3, 8, 8)}
    (ours,) = run(out / "model.clean.onnx", feeds)
    np.testing.assert_allclose(ours, run(net, feeds)[0], rtol=1e-5, atol=1e-5)


def test_given_inputs_are_compared(net: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "given.npz", x=drawn(3, 3, 9, 11))
    quantize(run_of(net, inputs=f"{tmp_path / 'given.npz'}", fold="exact"))
    told = json.loads((tmp_path / "out" / "clean.json").read_text())["proof"]
    assert (told["inputs"], told["drawn"]) == ([{"x": [3, 3, 9, 11]}], False)
    assert told["outputs_db"] == {"y": None}  # all values are equal
    np.savez(tmp_path / "given.npz", x=drawn(3, 4, 9, 11))
    with pytest.raises(
        ConfigError,
        match=r"clean.inputs=.*: expected an .npz file whose array 'x' is float32 \[batch, 3, height, width\]",
    ):
        quantize(replace(run_of(net, inputs=f"{tmp_path / 'given.npz'}"), output_dir=f"{tmp_path / 'other'}"))


@pytest.mark.parametrize("mode", ["dynamic", pytest.param("static", marks=pytest.mark.slow)])
def test_a_service_comes_before_another_mode(mode: str, net: Path, tmp_path: Path) -> None:
    config = run_of(net, mode, fix_shapes={"height": 8, "width": 8})
    data = DataConfig(source=DRAWN, count=32, batch_size=16, eval_batch_size=16, workers=0)
    bounds = VerifyConfig(latency_runs=2, threads=1, min_float_agreement=None, min_float_sqnr=None, audit=False,
                          max_float_kl=None, min_agreement=0.5)  # fmt: skip
    calibration = CalibrationConfig(images=16, batch_size=8)
    run = replace(config, data=data, verify=bounds, task="outputs", calibration=calibration)
    assert quantize(run) == 0
    for name in ("model.clean.onnx", f"model.{mode}.onnx"):
        model = onnx.load(tmp_path / "out" / name)
        assert sizes(model.graph.input[0])[1:] == [3, 8, 8]


def test_a_run_begun_again_takes_its_cleaned_file(net: Path, tmp_path: Path) -> None:
    out, config = tmp_path / "out", run_of(net, "static", fix_shapes={"height": 8, "width": 8})
    first = cleaned_before(config, out)
    written = (out / "model.clean.onnx").stat().st_ino
    assert cleaned_before(config, out) == first
    assert (out / "model.clean.onnx").stat().st_ino == written
    cleaned_before(run_of(net, "static", fix_shapes={"height": 9}), out)
    assert (out / "model.clean.onnx").stat().st_ino != written
    assert (first.onnx, first.clean) == (f"{out / 'model.clean.onnx'}", CleanConfig())


def test_a_key_encrypts_the_cleaned_file(net: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    new_key(tmp_path / "my.key")
    quantize(replace(run_of(net), export=ExportConfig(encrypt=f"{tmp_path / 'my.key'}")))
    assert is_encrypted(tmp_path / "out" / "model.clean.onnx")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"layout": "nhwc"}, "clean.layout=nhwc: expected layouts by name"),
        ({"fix_shapes": 3}, "clean.fix_shapes=3: expected sizes by name"),
        (
            {"fix_shapes": {"bach": 1}},
            r"clean.fix_shapes.bach=1: the file has no size and no input of this name, .*\(did you mean batch",
        ),
        ({"custom_ops": ["none.so"]}, r"clean.custom_ops\[0\]=none.so: expected an existing library"),
        ({"inputs": "none.npz"}, "clean.inputs=none.npz: expected an .npz file that exists"),
    ],
)
def test_a_mistake_is_one_line(asked: dict[str, Any], message: str, net: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        quantize(run_of(net, **asked))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no model", "the file can't be read as ONNX|has no operators"),
        (None, "expected an ONNX file that exists"),
    ],
)
def test_a_damaged_file_is_one_line(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "net.onnx").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        quantize(run_of(tmp_path / "net.onnx"))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(not _ZIP.is_file(), reason="no shared/data/onnx_models.zip beside the checkout")
@pytest.mark.parametrize("name", _LEFT)
def test_real_files_are_cleaned(name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(_ZIP) as held:
        held.extract(f"onnx_models/{name}.onnx", tmp_path)
    source = tmp_path / "onnx_models" / f"{name}.onnx"
    quantize(run_of(source))
    out = source.parent / "out"
    assert len(onnx.load(out / "model.clean.onnx").graph.node) <= _LEFT[name]
    proof = json.loads((out / "clean.json").read_text())["proof"]
    assert all(ratio is None or ratio > 100 for ratio in proof["outputs_db"].values())


@pytest.mark.slow
@pytest.mark.skipif(not _ZIP.is_file(), reason="no shared/data/onnx_models.zip beside the checkout")
@pytest.mark.parametrize(
    ("name", "replaced"),
    [("dtln_2", {"mean_to_pool": 1, "split_to_slice": 2}), ("magika", {"relu": 2})],
)
def test_real_files_are_rewritten(name: str, replaced: dict[str, int], tmp_path: Path) -> None:
    with zipfile.ZipFile(_ZIP) as held:
        held.extract(f"onnx_models/{name}.onnx", tmp_path)
    source = tmp_path / "onnx_models" / f"{name}.onnx"
    quantize(run_of(source, rewrite=[*replaced]))
    told = json.loads((source.parent / "out" / "clean.json").read_text())
    lines = [row["what"] for row in told["changed"] if row["service"] == "rewrite"]
    assert lines == [f"{what}: {count} replaced" for what, count in sorted(replaced.items())]
    assert all(ratio is None or ratio > 100 for ratio in told["proof"]["outputs_db"].values())
