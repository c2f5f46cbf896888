"""Tests of placement=measured in whole runs, and of placement files of this and other models and machines.

Times are made up, because a network of this size is too fast for the clock. The depthwise Conv takes 90
microseconds in int8 and 10 in float, a SiLU 60 and 10, any other operator 10 and 20. Quantizing or
dequantizing a tensor takes 1 + values / 1000. Everything else is real.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from tiny_run import calibrate_only, report_of, sha256

from qatkit.choose.placement import measured, tournament
from qatkit.config.rules import validate
from qatkit.config.schema import BackendConfig, Config, ExportConfig, ModelConfig, RescueConfig
from qatkit.jobs import export_checkpoint, pipeline
from qatkit.verify.site_kernels import DEQUANTIZE, QUANTIZE, SiteKernel
from qatkit_verify.errors import ConfigError
from qatkit_verify.latency import Session
from qatkit_verify.placement import record
from qatkit_verify.placement.machine import this_machine
from qatkit_verify.placement.record import read_placement


class Machine(tournament.Tournament):
    """A tournament of placements with the made-up times of the module's docstring."""

    quiet = True

    def microseconds(self) -> dict[str, tuple[float, float]]:
        """Returns the times in int8 and in float of each operator that computes."""
        slow = {"depthwise": (90.0, 10.0)} | dict.fromkeys(self.choices.islands, (60.0, 10.0))
        return {one: slow.get(one, (10.0, 20.0)) for one in self.choices.computing}

    def _kernels(self, path: Path) -> list[SiteKernel]:
        sites = self.files[path.stem].sites
        layout = self.layouts(sites.floats, sites.opened)
        found = [
            SiteKernel(one, "", 1, times[one not in layout.int8])
            for one, times in self.microseconds().items()
        ]
        borders = {QUANTIZE: layout.quantized, DEQUANTIZE: layout.dequantized}
        return found + [
            SiteKernel(None, kind, n, 1 + n / 1000) for kind, sizes in borders.items() for n in sizes
        ]

    def _sessions(self, sessions: int, runs: int, seconds: float) -> Iterator[Session]:
        times = {
            name: sum(kernel.microseconds for kernel in self._kernels(file.path)) / 1e3
            for name, file in self.files.items()
        }
        times |= {name: times[name] / 1.5 for name in times if self.files[name].sites.for_amx}
        return iter([Session(times, 0.0 if self.quiet else 0.25)] * sessions)


def gated(folder: Path, **changes: Any) -> Config:
    """Returns a config without training; the real clock times its finished file, which may be slow."""
    model = ModelConfig(name="gated.Gated")
    config = replace(calibrate_only(folder), model=model, placement="measured", **changes)
    config.calibration.mixed_scales = "report"  # only the placement decides what is float
    return replace(config, verify=replace(config.verify, min_speedup=0.001))


def without_amx(threads: int, batch: int) -> record.Machine:
    """Describes this machine as one without AMX, since with AMX more files would compete."""
    here = this_machine(threads, batch)
    return replace(here, isa=tuple(one for one in here.isa if not one.startswith("amx")))


@pytest.fixture(scope="module", autouse=True)
def no_amx() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (measured, tournament):
            patch.setattr(module, "this_machine", without_amx)
        yield


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("placed") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured, "Tournament", Machine)
        assert pipeline.train(gated(folder)) == 0
    return folder


def float_convs(path: Path) -> set[str]:
    """Returns the sites of the Convs whose weight is not dequantized."""
    graph = onnx.load(path).graph
    made = {name: node.op_type for node in graph.node for name in node.output}
    return {
        node.name.rpartition("/")[0]
        for node in graph.node
        if node.op_type == "Conv" and made.get(node.input[1]) != "DequantizeLinear"
    }


def test_what_is_slow_is_float_in_the_file_and_in_the_report(done: Path) -> None:
    placed, report = read_placement(done / "placement.json"), report_of(done)
    assert "depthwise" in placed.sites.floats and placed.chosen not in ("fixed", "float")
    assert float_convs(done / "model.int8.onnx") == placed.sites.floats & {
        "stem", "expand", "depthwise", "gate", "project"
    }  # fmt: skip
    assert report["placement"] == json.loads((done / "placement.json").read_text())
    assert placed.costs["depthwise"] > 0.05  # in ms; the difference is 80 microseconds
    best, table = placed.of(placed.chosen), placed.of("fixed")
    assert best.predicted_ms == pytest.approx(best.ms, rel=0.1) and best.ms < table.ms
    assert "placement.json" in {one["name"] for one in report["files"]}
    assert report["config"]["backend"]["overrides"] == {} and report["config"]["placement"] == "measured"
    assert report["parity"]["optimized"]["agreement"] == 1 and report["audit"]["ok"]
    page = (done / "report.html").read_text()
    assert "<h2>Placement</h2>" in page and "depthwise" in page


def test_where_float_leads_a_placement_near_it_is_still_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FloatLeads(Machine):
        def microseconds(self) -> dict[str, tuple[float, float]]:
            return {one: (10.0 if one == "fc" else 14.0, 10.0) for one in self.choices.computing}

    monkeypatch.setattr(measured, "Tournament", FloatLeads)
    assert pipeline.train(gated(tmp_path / "run")) == 0
    placed = read_placement(tmp_path / "run" / "placement.json")
    best, table, floats = (placed.of(name) for name in (placed.chosen, "fixed", "float"))
    assert placed.chosen not in ("fixed", "float")
    assert floats.ms < best.ms < 1.1 * floats.ms < table.ms


def test_export_makes_the_same_bytes_of_the_checkpoint(done: Path, tmp_path: Path) -> None:
    config = gated(tmp_path, checkpoint=str(done / "last.ckpt"))
    assert export_checkpoint.export(config) == 0
    assert sha256(tmp_path / "model.int8.onnx") == sha256(done / "model.int8.onnx")


def test_a_placement_file_gives_the_same_file_without_measuring(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(measured, "Tournament")
    config = replace(gated(tmp_path / "run"), placement=str(done / "placement.json"))
    assert pipeline.train(config) == 0
    assert sha256(tmp_path / "run" / "model.int8.onnx") == sha256(done / "model.int8.onnx")
    assert sha256(tmp_path / "run" / "placement.json") == sha256(done / "placement.json")


def test_another_machine_is_a_note(done: Path, tmp_path: Path) -> None:
    stored = json.loads((done / "placement.json").read_text())
    stored["machine"] |= {"cpu": "Another CPU", "onnxruntime": "1.99.0"}
    (tmp_path / "placement.json").write_text(json.dumps(stored))
    config = replace(gated(tmp_path / "run"), placement=str(tmp_path / "placement.json"))
    assert pipeline.train(config) == 0
    note = next(one for one in report_of(tmp_path / "run")["notes"] if "placement" in one)
    assert "cpu Another CPU (here " in note and "onnxruntime 1.99.0 (here " in note


def changed(done: Path, path: Path, **changes: Any) -> Path:
    stored = json.loads((done / "placement.json").read_text())
    path.write_text(json.dumps({**stored, **changes}))
    return path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "resnet18"}, "model.name resnet18 (here gated.Gated)"),
        ({"backend": "qnnpack"}, "backend qnnpack (here fbgemm)"),
        ({"input_shape": [3, 32, 32]}, "input 3x32x32 (here 3x8x8)"),
        (
            {"graph": "0", "sites": {"float": ["depthwisf"], "int8": []}},
            "there is no depthwisf here (did you mean depthwise",
        ),
        ({"graph": "0"}, "other shapes or neighbours"),
        ({"format": 2}, "format 2; this version reads format 1"),
        ({"chosen": "9"}, "'9' is not among its files"),
        ({"sites": {"float": [1], "int8": []}}, "sites are names"),
        ({"noise": {}, "files": [{}]}, "a placement.json of a run with placement=measured"),
    ],
)
def test_a_file_of_something_else_is_refused(
    changes: dict[str, Any], said: str, done: Path, tmp_path: Path
) -> None:
    path = changed(done, tmp_path / "placement.json", **changes)
    with pytest.raises(ConfigError) as refused:
        pipeline.train(replace(gated(tmp_path / "run"), placement=str(path)))
    assert said in str(refused.value) and str(refused.value).startswith(f"placement={path}: ")
    assert not (tmp_path / "run").exists()


def test_another_width_is_another_graph(done: Path, tmp_path: Path) -> None:
    path = changed(done, tmp_path / "placement.json", model="gated.narrow")
    config = replace(gated(tmp_path / "run"), model=ModelConfig(name="gated.narrow"), placement=str(path))
    with pytest.raises(ConfigError, match="have the same names, but other shapes or neighbours"):
        pipeline.train(config)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"export": ExportConfig(mode="dynamic")}, "export.mode"),
        ({"backend": BackendConfig(every_operator=True)}, "backend.every_operator"),
        ({"backend": BackendConfig(target="qatkit.quant.backends.TENSORRT")}, "placement"),
        (
            {"placement": "variants", "backend": BackendConfig(target="qatkit.quant.backends.TENSORRT")},
            "placement",
        ),
        ({"placement": "variants", "export": ExportConfig(mode="float16")}, "export.mode"),
        ({"rescue": RescueConfig(climb=True)}, "placement"),
        ({"placement": "nowhere.json"}, "placement"),
    ],
)
def test_what_has_nothing_to_choose_is_refused(changes: dict[str, Any], key: str, tmp_path: Path) -> None:
    config = replace(gated(tmp_path / "run"), **changes)
    validate(config)
    with pytest.raises(ConfigError) as refused:
        pipeline.train(config)
    assert refused.value.key == key and not (tmp_path / "run").exists()


def test_the_allowed_value_is_written_as_it_is_typed(tmp_path: Path) -> None:
    config = replace(gated(tmp_path / "run"), backend=BackendConfig(every_operator=True))
    with pytest.raises(ConfigError, match="every_operator=true: expected false with placement=measured"):
        measured.check_placement(config)


def test_a_run_that_goes_on_measures_nothing_anew(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(done, folder)
    for name in ("report.json", "model.int8.onnx"):
        (folder / name).unlink()
    monkeypatch.delattr(measured, "Tournament")
    assert pipeline.train(replace(gated(folder), resume=str(folder / "last.ckpt"))) == 0
    assert sha256(folder / "model.int8.onnx") == sha256(done / "model.int8.onnx")


@pytest.mark.slow
def test_a_busy_machine_is_noted_and_keeps_the_fixed_placement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Busy(Machine):
        quiet = False

    monkeypatch.setattr(measured, "Tournament", Busy)
    config = gated(tmp_path / "run")
    assert pipeline.train(replace(config, verify=replace(config.verify, threads=4))) == 0
    placed, report = read_placement(tmp_path / "run" / "placement.json"), report_of(tmp_path / "run")
    assert placed.chosen == "fixed" and not placed.quiet and placed.waited == 0.25
    note = next(one for one in report["notes"] if one.startswith("placement: the machine was busy"))
    assert "waited 25 %" in note and "the backend's table is kept" in note and "measures again" in note
    assert note in capsys.readouterr().out


def test_amx_weights_compete_on_amx_and_follow_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isa = ("avx2", "avx512_vnni", "amx_int8")
    here = replace(this_machine(2, 1), isa=isa)
    monkeypatch.setattr(measured, "Tournament", Machine)
    for module in (measured, tournament):
        monkeypatch.setattr(module, "this_machine", lambda threads, batch: here)
    assert pipeline.train(gated(tmp_path / "run")) == 0
    placed = read_placement(tmp_path / "run" / "placement.json")
    assert placed.sites.for_amx and placed.chosen.endswith(", for AMX") and "depthwise" in placed.sites.floats
    made = onnx.load(tmp_path / "run" / "model.int8.onnx").graph
    held = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in made.initializer}
    zeros = {
        n.input[0]: held[n.input[2]]
        for n in made.node
        if n.op_type == "DequantizeLinear" and n.input[0] in held and held[n.input[0]].dtype == "int8"
    }
    shifted = {name for name, zero in zeros.items() if (zero == -1).all()}
    assert "expand.weight" in shifted and "depthwise.weight" not in shifted
    report = report_of(tmp_path / "run")
    assert report["parity"]["optimized"]["agreement"] == 1 and report["audit"]["ok"]
    assert report["config"]["export"]["weights_for_amx"] is False  # the setting as given
    config = gated(tmp_path / "again", checkpoint=str(tmp_path / "run" / "last.ckpt"))
    assert export_checkpoint.export(config) == 0
    assert sha256(tmp_path / "again" / "model.int8.onnx") == sha256(tmp_path / "run" / "model.int8.onnx")


def test_weights_for_amx_are_for_cpus_that_may_have_it(tmp_path: Path) -> None:
    config = gated(tmp_path / "run", backend=BackendConfig(target="qatkit.quant.backends.QNNPACK"),
                   export=ExportConfig(weights_for_amx=True))  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"export\.weights_for_amx=true: expected false with backend=qnnpack"
    ):
        pipeline.train(replace(config, placement="fixed"))
