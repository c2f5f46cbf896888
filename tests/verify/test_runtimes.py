"""Tests of other runtimes for the same file: made-up ones on ONNX's reference evaluator, and OpenVINO."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from chain import Residual, noise, settle, ship
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from other_runtimes import DELAY, FUSING, REFERENCE, SPOILED, WRONG
from torch import Tensor, nn

from qatkit.config.schema import BackendConfig, Config, VerifyConfig
from qatkit.data.inputs import ImageInputs
from qatkit.export.converted_reference import ConvertedReference
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.simplify import float_baseline
from qatkit.jobs.verify import checks_of
from qatkit.records.fixes import either
from qatkit.records.results import WHOLE, Divergence, InRuntime, Results
from qatkit.report import page, table
from qatkit.verify.checks.base import Shortfall, Subject
from qatkit.verify.checks.runtimes import RuntimesCheck, notes
from qatkit.verify.runtime_divergence import runtime_divergence
from qatkit_verify.errors import ConfigError
from qatkit_verify.records import Comparison, Latency
from qatkit_verify.runtimes.base import Runtime, load_runtimes
from qatkit_verify.runtimes.timing import times_in_turns

OF_A_MODULE = {"schedule": {}, "export": {"mode": "static"}}  # the config of a run with a module
IMAGES = noise(24, 3, 12, 12)
needs_openvino = pytest.mark.skipif(
    find_spec("openvino") is None, reason="the extra openvino is not installed"
)


class Files(NamedTuple):
    """The subject of the check, and the labels of `IMAGES`."""

    subject: Subject
    labels: NDArray[np.int64]

    def check(self, *runtimes: str, **settings: Any) -> Results:
        """Returns what the check measures, as in the run of a PyTorch model."""
        wanted = replace(self.subject.settings, runtimes=["onnxruntime", *runtimes], **settings)
        told = Results("run", "m", "out", config=OF_A_MODULE)
        return RuntimesCheck().measure(replace(self.subject, settings=wanted), told)


@functools.cache
def files() -> Files:
    """Returns a small network in float and INT8; labels are those of float, except for every third image."""
    torch.manual_seed(0)
    model = settle(Residual(), 3, 12, 12)
    with torch.no_grad():  # so that the images have several classes
        model.get_submodule("fc").bias.sub_(model(IMAGES).mean(0))  # type: ignore[operator]
        labels = model(IMAGES).argmax(1)
    labels[::3] = (labels[::3] + 1) % 5
    shipped = ship(model, IMAGES, "runtimes", opset=19)  # the evaluator supports QDQ pairs from 19 on
    path = shipped.path.with_name("runtimes.float.onnx")
    export_onnx(float_baseline(model, IMAGES[:2]), IMAGES[:2], path)
    subject = Subject(
        folder=path.parent,
        files={"float": path, "int8": shipped.path},
        batches=lambda: list(zip(IMAGES.split(10), labels.split(10), strict=True)),
        timed=ImageInputs((3, 12, 12)).timed,
        settings=VerifyConfig(parity_images=24, threads=1, latency_runs=3, min_agreement=0.99),
        reference=ConvertedReference(shipped.converted),
    )
    return Files(subject, labels.numpy())


def _logits(path: Path) -> NDArray[np.float32]:
    return np.asarray(ort.InferenceSession(str(path)).run(None, {"input": IMAGES.numpy()})[0])


def test_a_third_runtime_is_a_record_in_one_file() -> None:
    results = files().check("other_runtimes.REFERENCE")
    found = results.runtimes["reference"]
    int8 = files().subject.files["int8"]
    (expected,) = list(ReferenceEvaluator(str(int8)).run(None, {"input": IMAGES.numpy()}))
    assert isinstance(expected, np.ndarray)
    right = float(100 * (expected.argmax(1) == files().labels).mean())
    assert found.accuracy is not None and found.accuracy.score == pytest.approx(right) and 40 < right < 90
    near, trained = found.with_onnxruntime, found.with_module
    assert near is not None and trained is not None and (near.agreement, found.images) == (1.0, 24)
    assert near.max_abs == pytest.approx(float(np.abs(expected - _logits(int8)).max()), abs=1e-9)
    assert set(found.latency) == {"float", "int8"} and found.latency["int8"].runs == 3
    assert found.versions == {"onnx": onnx.__version__}
    assert RuntimesCheck().shortfalls(files().subject.settings, results) == []


def test_onnx_runtime_alone_takes_no_time() -> None:
    gone = replace(files().subject, files={}, batches=lambda: pytest.fail("no image is needed"))
    results = Results("run", "m", "out")
    assert RuntimesCheck().measure(gone, results) is results
    assert RuntimesCheck().lines(results) == []


def test_each_file_is_timed_in_a_process_of_its_own() -> None:
    given = files().subject.files
    feeds = {name: {"input": np.zeros((2, 3, 12, 12), np.float32)} for name in given}
    slow = times_in_turns(["other_runtimes.SLOW"], given, feeds, threads=1, runs=7)["other_runtimes.SLOW"]
    assert not isinstance(slow, str) and [len(one) for one in slow.values()] == [7, 7]  # in two turns
    assert slow["float"].min() >= 5.0 and slow["int8"].min() >= 5.0 + 1000 * DELAY
    alone = {"int8": given["int8"]}
    found = times_in_turns(["other_runtimes.DYING", "other_runtimes.BROKEN"], alone, feeds, threads=1, runs=7)
    assert found["other_runtimes.DYING"] == "its process ended with status 3"
    assert str(found["other_runtimes.BROKEN"]).startswith("RuntimeError: no kernel for this; ")
    command = ["ps", "--ppid", str(os.getpid()), "-o", "args"]
    left = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "runtimes.timing" not in left


def _divergence(runtime: Runtime) -> Divergence:
    return runtime_divergence(runtime, files().subject.files["int8"], IMAGES[:4].numpy(), threads=1)


def _told(divergence: Divergence) -> Shortfall:
    """Returns the shortfall when nine of ten images agree."""
    near = Comparison(0.9, 1.0, 0.1, 10.0, 1.0)
    one = InRuntime({}, images=24, with_onnxruntime=near, divergence=divergence)
    results = Results("run", "m", "out", config=OF_A_MODULE, runtimes={"other": one})
    (told,) = RuntimesCheck().shortfalls(files().subject.settings, results)
    first = divergence.first
    assert first is not None
    least = "verify.min_agreement=0.99: other agrees with ONNX Runtime on 90.00 % of 24 images"
    assert told.line == f"{least}; the first tensor that differs is '{first.name}'"
    assert any(f"is '{first.name}' of operator '{divergence.operator}'" in line for line in notes(results))
    return told


def test_a_wrong_operator_is_named_with_the_override_to_avoid_it() -> None:
    found, site = _divergence(WRONG), SPOILED.removesuffix(".weight")
    assert found.operator == f"{site}/Conv" and found.first is not None and found.first.max_steps > 1
    assert [one for one in found.tensors if one.max_steps] == [found.first]  # no later tensor is blamed
    assert f"'+backend.overrides={{{site}:{{float:true}}}}'" in either(_told(found).fixes)


def test_rounding_elsewhere_is_told_apart_from_a_wrong_operator() -> None:
    """The runtime skips a QDQ pair only in the whole file, so that each operator alone is right."""
    found = _divergence(FUSING)
    assert (found.reference, found.operator) == (WHOLE, "add/Add")
    fix = either(_told(found).fixes)
    assert "verify.min_agreement=0.9 (the agreement of other)" in fix and "backend.overrides" not in fix


def test_the_evaluator_computes_what_onnx_runtime_does() -> None:
    found = _divergence(REFERENCE)
    assert found.first is None and len(found.tensors) == 1  # the output, which is compared first


def test_a_runtime_that_fails_costs_its_own_figures_alone() -> None:
    results = files().check("other_runtimes.BROKEN")
    assert results.runtimes["broken"].failed.startswith("RuntimeError: no kernel for this; ")
    (told,) = RuntimesCheck().shortfalls(files().subject.settings, results)
    assert told.line.startswith(
        "verify.runtimes=broken: broken cannot run the INT8 file (RuntimeError: no kernel"
    )
    assert any(row.lstrip().startswith("broken") for row in RuntimesCheck().lines(results))


def test_at_the_first_export_each_runs_the_file_once() -> None:
    first = Files(replace(files().subject, batches=lambda: (), files={"int8": files().subject.files["int8"]}),
                  files().labels)  # fmt: skip
    results = first.check("other_runtimes.BROKEN", "other_runtimes.REFERENCE")
    assert results.runtimes["reference"] == InRuntime({"onnx": onnx.__version__})
    assert len(RuntimesCheck().shortfalls(first.subject.settings, results)) == 1


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (
            ["openvno"],
            r"verify.runtimes=openvno: expected one of onnxruntime, openvino, or .*\(did you mean openvino\?\)",
        ),
        (
            ["other_runtimes.SPOILED"],
            "the dotted path of an object of type qatkit_verify.runtimes.base.Runtime",
        ),
        (["other_runtimes.SLOW", "other_runtimes.SLOW"], "two runtimes named 'slow'; remove one"),
        (
            ["other_runtimes.ABSENT"],
            "ABSENT: expected an installed runtime .install it with uv sync --inexact --extra tvm",
        ),
        (["other_runtimes.NONE"], "a name in other_runtimes"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(names: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_runtimes(names)


def test_a_file_for_tensorrt_is_not_measured_elsewhere() -> None:
    verify = VerifyConfig(runtimes=["onnxruntime", "other_runtimes.REFERENCE"])
    config = Config(name="x", backend=BackendConfig("qatkit.quant.backends.TENSORRT"), verify=verify)
    with pytest.raises(ConfigError, match=r"REFERENCE\]: expected \[onnxruntime\] with backend.target="):
        checks_of(config, labelled=True)


def test_the_report_names_the_fastest_runtime() -> None:
    def latency(float_ms: float, int8_ms: float) -> dict[str, Latency]:
        return {
            name: Latency(ms, ms - 0.1, ms + 0.1, float_ms / ms, 1, 1, 1, 2, 50)
            for name, ms in (("float", float_ms), ("int8", int8_ms))
        }

    other = InRuntime({"openvino": "1"}, latency=latency(9.0, 2.0))
    results = Results("run", "m", "out", latency=latency(8.0, 4.0), runtimes={"openvino": other})
    line = "fastest runtime: openvino, 2.00 times as fast as onnxruntime"
    assert line in table.plain_report(results) and line in page.render_page(results)
    assert results.as_dict()["fastest_runtime"] == "openvino"
    near = replace(results, latency=latency(8.0, 2.1))
    told = "fastest runtime: openvino, 1.05 times as fast as onnxruntime (their p10-p90 overlap)"
    assert told in table.plain_report(near)


class Gated(nn.Module):
    """A net whose SiLUs become com.microsoft.QuickGelu in the file."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.silu(self.conv1(x))
        return self.fc(nn.functional.silu(self.conv2(x)).mean((2, 3)))  # type: ignore[no-any-return]


@needs_openvino
def test_openvino_is_timed_and_agrees() -> None:
    results = files().check("openvino")
    found = results.runtimes["openvino"]
    assert not found.failed and found.with_onnxruntime is not None and found.accuracy is not None
    assert found.with_onnxruntime.agreement == 1.0 and found.with_onnxruntime.mean_steps < 1.5
    assert all(one.median_ms > 0 for one in found.latency.values())
    assert results.runtime_latency.keys() == {"openvino"}


@needs_openvino
def test_openvino_reads_the_functions_of_a_file_at_any_batch() -> None:
    torch.manual_seed(0)
    path = ship(Gated().eval(), IMAGES, "gated").path
    assert "QuickGelu" in {node.op_type for node in onnx.load(str(path)).graph.node}
    execute = load_runtimes(["openvino"]).popitem()[1].open(path, 1)
    expected = _logits(path)
    for count in (1, 24, 5):
        (found,) = execute({"input": IMAGES.numpy()[:count]})
        assert np.abs(found - expected[:count]).max() < 2 * np.ptp(expected) / 255


def test_no_other_runtime_is_imported_before_it_is_opened() -> None:
    code = (
        "import sys\nfrom qatkit_verify.runtimes.base import load_runtimes\nload_runtimes(['onnxruntime'])\n"
    )
    code += "import qatkit_verify.runtimes.openvino, qatkit.verify.checks.runtimes\n"
    code += "print({'openvino', 'onnxruntime', 'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
