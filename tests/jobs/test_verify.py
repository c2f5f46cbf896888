"""Tests of the verification of a run: custom checks, bounds, and the first tensor with an export fault."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from float_files import settings, trained
from onnx import numpy_helper
from tiny_run import calibrate_only, report_of, tiny
from torch import nn

from qatkit.config.schema import Config, ScheduleConfig, VerifyConfig
from qatkit.data.inputs import Inputs
from qatkit.jobs import pipeline, quantize_file
from qatkit.jobs.verify import checks_of
from qatkit.run import export
from qatkit.run.export import write_file
from qatkit_verify.errors import ConfigError

WORST_CLASS = '''
"""The class with the worst accuracy."""

from qatkit.records.fixes import Fix
from qatkit.verify.checks.base import Check, Shortfall
from qatkit_verify.session import open_session, run_images

LEAST = 101.0  # percent


class WorstClass(Check):
    name = "worst_class"

    def measure(self, subject, results):
        session = open_session(subject.files["int8"], threads=1, options=subject.options)
        hits = {}
        for images, labels in subject.batches():
            for guess, label in zip(run_images(session, images).argmax(1), labels):
                hits.setdefault(int(label), []).append(int(guess) == int(label))
        shares = {str(label): 100 * sum(found) / len(found) for label, found in sorted(hits.items())}
        worst = min(shares, key=shares.get)
        return results.with_measured(self.name, {"class": worst, "top1": shares[worst], "classes": len(shares)})

    def shortfalls(self, bounds, results):
        found = results.measured[self.name]
        if found["top1"] >= LEAST:
            return []
        line = f"worst_class={LEAST}: class {found['class']} has {found['top1']:.2f} %"
        return [Shortfall(line, [Fix(("data.train_images=null",))])]

    def lines(self, results):
        found = results.measured[self.name]
        return [f"worst class: {found['class']} with {found['top1']:.2f} %, of {found['classes']}"]
'''


def test_a_new_check_is_one_file_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "worst_class.py").write_text(WORST_CLASS)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = calibrate_only(tmp_path / "run")
    config.verify.checks.insert(2, "package.worst_class.WorstClass")

    assert pipeline.train(config) == 1

    report = report_of(tmp_path / "run")
    figures = report["measured"]["worst_class"]
    assert figures["classes"] == 10 and 0 <= figures["top1"] <= report["accuracy"]["int8"]["top1"]
    line = f"worst_class=101.0: class {figures['class']} has {figures['top1']:.2f} %"
    assert (report["shortfalls"], report["mends"]) == ([line], ["data.train_images=null"])
    said = f"worst class: {figures['class']} with {figures['top1']:.2f} %, of 10"
    printed = capfd.readouterr().out
    page = (tmp_path / "run" / "report.html").read_text()
    assert all(text in printed and text in page for text in (said, line, "data.train_images=null"))
    assert f"SHORTFALL {line}\n  to fix it: data.train_images=null\n" in printed
    assert "<h2>Worst class</h2>" in page
    del sys.modules["package.worst_class"], sys.modules["package"]


def _spoiled(graph: nn.Module, config: Config, inputs: Inputs, path: Path) -> list[str]:
    """Exports the INT8 file with a fault: the sign of conv2's weight is flipped."""
    notes = write_file(graph, config, inputs, path)
    model = onnx.load(str(path))
    for tensor in model.graph.initializer:
        if tensor.name == "conv2.weight" and tensor.data_type == onnx.TensorProto.INT8:
            tensor.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(tensor), tensor.name))
    onnx.save(model, str(path))
    return notes


def test_an_export_fault_is_named_with_the_override_to_avoid_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export, "write_file", _spoiled)
    config = tiny(tmp_path / "run", schedule=ScheduleConfig(epochs=0, float_epochs=4))
    config.verify.max_drop = None

    assert pipeline.train(config) == 1

    report = report_of(tmp_path / "run")
    found = report["divergence"]
    name = found["first"]["name"]
    assert name == "conv2_quant/QuantizeLinear_output" and found["operator"] == "conv2/Conv"
    assert [t["max_steps"] for t in found["tensors"][:2]] == [0, 0]  # of the input and of conv1
    (line,) = report["shortfalls"]
    assert line.endswith(f"; the first tensor that differs is '{name}'")
    (fix,) = report["mends"]
    assert fix == "'+backend.overrides={conv2:{float:true}}' (keeps 'conv2/Conv' in float)"
    page = (tmp_path / "run" / "report.html").read_text()
    printed = capfd.readouterr().out
    assert (
        name in page
        and f"tensor by tensor: the first that differs by more than 1 step is '{name}'" in printed
    )
    assert f"to fix it: {fix}" in printed


def test_a_file_without_a_module_is_held_against_itself(tmp_path: Path) -> None:
    """Checks a static file of ONNX Runtime's tool with bounds that it cannot meet."""
    config = settings(trained(), "static", tmp_path / "run")
    config.verify = VerifyConfig(latency_runs=3, threads=1, audit=False, min_agreement=1.0, max_drop=-50)
    status = quantize_file.by_tools(config)
    report = report_of(tmp_path / "run")
    assert status == 1 and report["shortfalls"][0].startswith("verify.max_drop=-50")
    assert report["mends"][0] == "mode=weight_only, or mode=float16"
    if report["parity"]["optimized"]["agreement"] < 1:
        assert report["divergence"]["reference"] == "the same file without optimizations"


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["qatkit.verify.checks.sise.SizeCheck"], r"verify\.checks=qatkit\.verify\.checks\.sise\.Size.*imported"),
        (["qatkit.verify.checks.size.Size"], r"verify\.checks=qatkit\.verify\.checks\.size\.Size: expected a name in"),
        (["qatkit.records.results.Results"], r"verify\.checks=qatkit\.records\.results\.Results: expected .* class"),
        (["qatkit.verify.checks.base.Check"], r"verify\.checks=qatkit\.verify\.checks\.base\.Check: expected .* class"),
        (["qatkit.verify.checks.size.SizeCheck"] * 2, r"two checks named 'size'; remove one"),
        (["qatkit.verify.checks.size.SizeCheck"],
         r"verify\.checks=.*with the check of each bound \(verify\.max_drop=1\.0: accuracy was not"),
    ],
)  # fmt: skip
def test_a_wrong_list_is_one_line_before_anything(paths: list[str], message: str, tmp_path: Path) -> None:
    wanted: dict[str, Any] = {"min_agreement": None, "audit": False}
    config = Config(output_dir=str(tmp_path / "run"), verify=VerifyConfig(checks=paths, **wanted))
    with pytest.raises(ConfigError, match=message) as error:
        pipeline.train(config)
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_bounds_that_are_off_need_no_check() -> None:
    verify = VerifyConfig(
        checks=["qatkit.verify.checks.size.SizeCheck"], max_drop=None, min_agreement=None, audit=False
    )
    assert [check.name for check in checks_of(Config(verify=verify), labelled=True)] == ["size"]
    assert [check.name for check in checks_of(Config(), labelled=True)] == [
        "latency",
        "runtimes",
        "accuracy",
        "fidelity",
        "outputs",
        "bias",
        "examples",
        "drift",
        "validation",
        "size",
        "parity",
        "sizes",
        "decoder",
        "detections",
        "stream",
        "audit",
        "saturation",
    ]
