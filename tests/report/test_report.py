"""Tests of the three renderings of `Results`: exact text, JSON that reads back, a self-contained page."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from torchvision.transforms import functional as F

from qatkit.records.ladder import Ladder, RungResult
from qatkit.records.results import (
    Audit,
    Divergence,
    NodeAudit,
    Parity,
    Results,
    RuntimeDequantize,
    TensorParity,
)
from qatkit.records.tried import Candidate, Curve, Epoch, Tried
from qatkit.report import (
    file_records,
    installed_versions,
    plain_report,
    print_report,
    render_page,
    this_hardware,
    write_page,
    write_report,
)
from qatkit_verify.classification import NAMES, classified
from qatkit_verify.records import Comparison, Latency

NODES = (
    NodeAudit("conv", "QLinearConv", "com.microsoft", "int8", "features.0", "", False, 900, 30.0),
    NodeAudit("fc", "FusedGemm", "com.microsoft", "float", "fc", "float bias <no output Q>", True, 100, 10.0),
)
TENSORS = (TensorParity("a_q", 100, 0.0, 0), TensorParity("b_q", 200, 0.05, 3))
RESULTS = Results(
    name="demo",
    model="resnet18",
    output_dir="outputs/demo",
    accuracy={
        "float": classified(78.6, 98.25, 1000),
        "simulated": classified(78.4, 98.1, 1000),
        "int8": classified(78.3, None, 1000),
    },
    latency={
        "float": Latency(10.0, 9.5, 11.0, 1.0, 1.0, 1.0, 1, 2, 50),
        "int8": Latency(4.0, 3.9, 4.4, 2.5, 2.4, 2.6, 1, 2, 50),
    },
    sizes={"float": 40_000_000, "int8": 10_500_000},
    parity=Parity(
        512,
        0.05,
        "the output's quantization scale",
        Comparison(1, 0, 0, 0, 0),
        Comparison(0.998, 0.1, 0.01, 2, 0.2),
    ),
    divergence=Divergence(1, TENSORS[1], TENSORS),
    audit=Audit(
        NODES,
        {},
        1,
        2,
        3,
        (RuntimeDequantize("fc.weight", "weight", 4_000_000, "fc"),),
        1000,
        900,
        ("float FusedGemm 'fc': why",),
    ),
    skipped=[("layer4.add", "no range")],
    shortfalls=["verify.audit=true: float FusedGemm 'fc': why"],
    preprocessing={
        "image_size": 32,
        "resize": 36,
        "mean": [0.49, 0.48, 0.44],
        "std": [0.24, 0.24, 0.26],
        "interpolation": "bilinear",
    },
    config={"seed": 0, "model": {"name": "resnet18", "weights": None}},
)

TEXT = """\
demo: resnet18

                            top-1 %  top-5 %  latency ms [p10-p90]  speed-up  size MB  size ratio
-------------------------------------------------------------------------------------------------
float                         78.60    98.25    10.00 [9.50-11.00]     1.00x    40.00       1.000
INT8, simulated in PyTorch    78.40    98.10                     -         -        -           -
INT8, ONNX Runtime            78.30        -      4.00 [3.90-4.40]     2.50x    10.50       0.263
-------------------------------------------------------------------------------------------------
accuracy on 1,000 images; latency: batch 1, 2 threads, median of 50 interleaved rounds
parity on 512 images against the converted module (step 0.05: the output's quantization scale)
  ONNX Runtime, no optimizations:  same top-1 class 100.00 %, difference max 0 (0.00 steps), mean 0 (0.000 steps)
  ONNX Runtime, all optimizations: same top-1 class 99.80 %, difference max 0.1 (2.00 steps), mean 0.01 (0.200 steps)
tensor by tensor: the first that differs by more than 1 step is 'b_q': 5 % of 200 elements, by up to 3 steps
audit: 1 of 2 Conv/Gemm/MatMul run in int8 (90.0 % of multiply-accumulates); 1 QuantizeLinear, 2 DequantizeLinear, \
3 Transpose left; 1 weight (4.0 MB) dequantized at run time
  problem: float FusedGemm 'fc': why
  skipped: layer4.add: no range
SHORTFALL verify.audit=true: float FusedGemm 'fc': why
output folder: outputs/demo
"""


def test_plain_text_to_the_letter() -> None:
    assert plain_report(RESULTS) == TEXT


def test_pipes_get_plain_text_and_terminals_the_same_figures() -> None:
    piped, terminal = io.StringIO(), io.StringIO()
    print_report(RESULTS, Console(file=piped))
    assert piped.getvalue() == TEXT
    print_report(RESULTS, Console(file=terminal, force_terminal=True, width=160))
    drawn = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    for figure in (
        "latency ms [p10-p90]",
        "4.00 [3.90-4.40]",
        "2.50x",
        "0.263",
        "SHORTFALL verify.audit=true",
    ):
        assert figure in drawn


def test_a_run_that_measured_little_still_reports() -> None:
    text = plain_report(Results("bare", "m", "out", sizes={"int8": 1_000_000}))
    assert "INT8, ONNX Runtime        -        -" in text
    assert "SHORTFALL" not in text
    assert text.endswith("output folder: out\n")


def test_many_problems_are_capped() -> None:
    assert RESULTS.audit is not None
    audit = dataclasses.replace(RESULTS.audit, problems=tuple(f"p{index}" for index in range(25)))
    text = plain_report(dataclasses.replace(RESULTS, audit=audit))
    assert text.count("problem:") == 10
    assert "... and 15 more, see report.json" in text


def test_json_reads_back(tmp_path: Path) -> None:
    write_report(tmp_path / "report.json", RESULTS)
    record = json.loads((tmp_path / "report.json").read_text())
    assert record["schema"] == 1
    assert record["accuracy"]["int8"] == {
        "top1": 78.3, "top5": None, "images": 1000, "class_images": [], "class_right": [],
    }  # fmt: skip
    assert record["size_ratio"] == pytest.approx(0.2625)
    assert record["audit"]["int8_share"] == pytest.approx(0.9)
    assert record["audit"]["ok"] is False
    assert record["audit"]["nodes"][1]["source"] == "fc"
    assert record["divergence"]["first"]["name"] == "b_q"
    assert record["skipped"] == [["layer4.add", "no range"]]
    assert record["config"]["model"] == {"name": "resnet18", "weights": None}


def test_json_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_report(path, RESULTS)
    before = path.read_bytes()
    broken = dataclasses.replace(RESULTS, timings={"train": float("nan")})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_report(path, broken)
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["report.json"]


def test_files_versions_and_hardware(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"abc")
    record = file_records(tmp_path, ["a.bin"])[0]
    assert (record.name, record.bytes) == ("a.bin", 3)
    # FIPS 180-2, appendix B.1
    assert record.sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert installed_versions()["numpy"] == np.__version__
    hardware = this_hardware(3)
    assert hardware.threads == 3
    assert hardware.cpu


class _Page(HTMLParser):
    """Collects text and loaded URLs, and checks that tags close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.loads: list[str] = []
        self.pre = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        self.loads += [str(value) for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)
        if "pre" in self.open and "import onnxruntime" in data:
            self.pre += data


def _parse(page: str) -> _Page:
    parser = _Page()
    parser.feed(page)
    assert parser.open == []
    return parser


def test_the_page_stands_alone_and_says_everything(tmp_path: Path) -> None:
    write_page(tmp_path / "report.html", RESULTS)
    page = (tmp_path / "report.html").read_text()
    parsed = _parse(page)
    assert parsed.loads == []
    assert "url(" not in page
    assert "<script" not in page
    text = " ".join(parsed.text)
    for said in (
        "1 bound not met",
        "78.30 % top-1, INT8 in ONNX Runtime (-0.30 points against float)",
        "4.00 [3.90-4.40]",
        "99.80 %",
        "float bias <no output Q>",
        "model.weights=null",
        "layer4.add",
        "b_q",
        "90.0 %",
    ):
        assert said in text, said
    assert page == render_page(RESULTS)


def test_names_cannot_break_the_page() -> None:
    page = render_page(dataclasses.replace(RESULTS, name="<script>alert(1)</script>", skipped=[("<b>", "&")]))
    assert "<script>" not in page
    assert "<script>alert(1)</script>" in " ".join(_parse(page).text)


def test_a_bare_page_is_well_formed() -> None:
    assert "all bounds met" in " ".join(_parse(render_page(Results("bare", "m", "out"))).text)


def test_code_on_the_page_runs_and_preprocesses_as_torchvision(tmp_path: Path) -> None:
    """Runs the page's program on an odd-sized image; its input must match torchvision's transforms."""
    pixels = np.random.default_rng(0).integers(0, 255, (50, 69, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.jpg", quality=95)
    code = _parse(render_page(RESULTS)).pre
    (tmp_path / "model.json").write_text(json.dumps({"classes": [f"class {number}" for number in range(10)]}))
    # Replaces the session by one that stores its input; the program's own lines stay unchanged.
    stub = (
        "import numpy, types, sys\n"
        "class Session:\n"
        "    def __init__(self, *a, **k): assert a[0] == 'model.int8.onnx'\n"
        "    def get_inputs(self): return [types.SimpleNamespace(name='input')]\n"
        "    def run(self, _, feed): numpy.save('fed.npy', feed['input']); return [numpy.eye(10)[[7]]]\n"
        "sys.modules['onnxruntime'] = types.SimpleNamespace(\n"
        "    InferenceSession=Session, SessionOptions=types.SimpleNamespace)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", stub + code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[0] == "class 7 1.0"
    image = Image.open(tmp_path / "image.jpg").convert("RGB")
    prepared = F.center_crop(F.resize(image, 36), [32, 32])
    expected = F.normalize(F.to_tensor(prepared), [0.49, 0.48, 0.44], [0.24, 0.24, 0.26])
    fed = np.load(tmp_path / "fed.npy")
    assert fed.dtype == np.float32
    np.testing.assert_allclose(fed[0], expected.numpy(), atol=1e-5)


def test_session_options_are_in_the_code() -> None:
    page = render_page(dataclasses.replace(RESULTS, session_options={"session.qdqisint8allowed": "1"}))
    assert 'options.add_session_config_entry("session.qdqisint8allowed", "1")' in _parse(page).pre


def test_report_needs_neither_onnx_nor_torch() -> None:
    code = (
        "import sys, qatkit.report\n"
        "print(sorted({'onnx', 'onnxruntime', 'torch', 'hydra'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("ratio", "low", "high", "speed"),
    [
        (1.4, 0.8, 2.1, "1.40x, noisy: 0.80 to 2.10"),
        (3.4, 1.7, 4.0, "3.40x, noisy: 1.70 to 4.00"),
        (0.9, 0.85, 1.02, "0.90x, noisy: 0.85 to 1.02"),
        (2.5, 2.4, 2.6, "2.50x"),
        (0.9, 0.85, 0.95, "0.90x"),
    ],
)
def test_an_uncertain_speedup_is_marked(ratio: float, low: float, high: float, speed: str) -> None:
    timed = dataclasses.replace(RESULTS.latency["int8"], ratio=ratio, ratio_p10=low, ratio_p90=high)
    results = dataclasses.replace(RESULTS, latency={**RESULTS.latency, "int8": timed})
    row = next(line for line in plain_report(results).splitlines() if line.startswith("INT8, ONNX"))
    assert f"  {speed}  " in row
    page = render_page(results)
    assert f"<td>{speed}</td>" in page
    tile = page.partition(f"<b>{ratio:.2f}&times;")[2].partition("</b>")[0]
    assert ("noisy" in tile) == ("noisy" in speed)


def test_samples_of_another_kind_are_not_called_images() -> None:
    """Renders every kind of row whose samples are counted, for a task whose samples are recordings."""
    task = dataclasses.replace(NAMES, samples="recordings")
    result = RungResult(name="a", title="a", agreement=0.97, images=40, ratio=1.1)
    results = dataclasses.replace(
        RESULTS,
        task=task,
        calibration=[Candidate("mse", 0.1, 90.0, 0.1, chosen=True, images=30)],
        algorithms=[Tried("none", 90.0, 1.0, 20.0, 1.0, 30, kept=True)],
        curves=[Curve("QAT", False, 20, [Epoch(1, 5, 90.0)]), Curve("x", True, 1, [Epoch(1, 5, 90.0)])],
        ladder=Ladder((result, result), target="top-1", chosen="a", task=task),
    )
    text, page = plain_report(results), render_page(results).partition("</style>")[2]
    assert "on 30 recordings that none" in text and "on 20 test recordings" in text
    assert "1 held-out training recording" in page and "in ONNX Runtime, on 40 recordings" in text
    assert "image" not in text and not re.search(r"\bimages?\b", page.partition("How to run it")[0])
