"""Checks that help and errors import no library they do not need, since some take seconds to load."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_line import CONF, ROOT
from float_files import by_hand, with_branches
from onnx import TensorProto, helper

TRAINING = {"torch", "torchvision", "lightning"}
FILES = {"onnx", "onnx_ir", "onnxruntime"}
# type of the fixture `started`: started(script, *typed, cwd=folder)
Started = Callable[..., tuple[int, str, set[str]]]


def refused(path: Path) -> None:
    """Writes a file in which only ONNX Runtime finds an error."""
    nodes = [
        helper.make_node("Conv", ["input", "w", "b"], ["y"]),
        helper.make_node("Mystery", ["y"], ["output"], domain="acme"),
    ]
    by_hand(path, nodes=nodes)


def truncated(path: Path) -> None:
    by_hand(path)
    path.write_bytes(path.read_bytes()[:-1000])


def quantized(path: Path) -> None:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["input"], ["q", "s", "z"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("Conv", ["d", "w", "b"], ["output"]),
    ]
    by_hand(path, nodes=nodes)


@pytest.fixture(scope="module")
def started() -> Iterator[Started]:
    """Yields a function that runs a script and returns its status, stderr and imported packages."""
    command = [sys.executable, str(Path(__file__).with_name("light_start.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as forks:
        asked, answers = forks.stdin, forks.stdout
        assert asked is not None and answers is not None

        def run(script: str, *typed: str, cwd: Path) -> tuple[int, str, set[str]]:
            line = json.dumps({"script": str(ROOT / script), "typed": typed, "folder": str(cwd)})
            print(line, file=asked, flush=True)
            answer = json.loads(answers.readline())
            imported = set(answer["imported"])
            assert {"qatkit", "hydra"} <= imported
            return answer["status"], answer["said"].rstrip("\n"), imported

        yield run


@pytest.mark.parametrize(
    ("script", "typed", "says"),
    [
        ("train.py", ["--help"], ""),
        ("export.py", ["--help"], ""),
        ("train.py", ["--cfg", "job"], ""),
        ("train.py", ["recipe=quickstart", "schedule.lrr=1"], "schedule.lrr=1: the key does not exist"),
        ("train.py", ["schedule.lr=-1"], "schedule.lr=-1.0: expected a number above 0"),
        ("train.py", ["schedule.lr=fast"], "schedule.lr=fast: expected a value of type float"),
        ("train.py", ["recipe=nothing"], "recipe=nothing: expected one of "),
        ("train.py", ["calibration=nothing"], "calibration=nothing: expected one of "),
        (
            "train.py",
            ["algorithm=all", "algorithm.equalize.relu6=drop"],
            "algorithm.equalize.relu6=drop: expected one of keep, ",
        ),
        (
            "train.py",
            ["algorithm=auto", "algorithm.equalize.round=1"],
            "algorithm.equalize.round=1: the algorithm has no such set",
        ),
        (
            "train.py",
            ["calibration.observer=qatkit.quant.observers.MinMaxs"],
            "calibration.observer=qatkit.quant.observers.MinM",
        ),
        (
            "train.py",
            ["data.source=qatkit.data.digitz"],
            "data.source=qatkit.data.digitz: expected a name in qatkit.data (did you mean ",
        ),
        ("train.py", ["verify.threads=100000"], "verify.threads=100000: expected at most "),
        (
            "train.py",
            ["placement=variants"],
            "placement=variants: expected fixed, measured or a placement.json",
        ),
        ("train.py", ["-m", "schedule.lr=1,-1"], "schedule.lr=-1.0: expected a number above 0"),
        (
            "export.py",
            ["checkpoint=nothing.ckpt"],
            "checkpoint=nothing.ckpt: expected a checkpoint written by train.py",
        ),
        ("export.py", ["onnx=x.onnx", "mode=int4"], "mode=int4: expected one of dynamic, static"),
        (
            "export.py",
            ["onnx=x.onnx", "mode=static", "calibration.imagess=3"],
            "calibration.imagess=3: the key does not exist",
        ),
        (
            "export.py",
            ["onnx=x.onnx", "mode=float16", "schedule.lr=1"],
            "schedule.lr=1: the key cannot be set",
        ),
    ],
)
def test_what_the_command_line_says_needs_no_torch(
    script: str, typed: list[str], says: str, started: Started, tmp_path: Path
) -> None:
    status, said, imported = started(script, *typed, cwd=tmp_path)
    assert status == (2 if says else 0)
    assert said.startswith(f"error: {says}" if says else "")
    assert not imported & (TRAINING | FILES | {"numpy", "rich"})


@pytest.mark.parametrize(
    ("write", "says", "unwanted"),
    [
        (lambda path: None, "a float ONNX file that exists", {"onnx_ir", "onnxruntime"}),
        (
            lambda path: path.write_text("no model"),
            "the file can't be read as ONNX (",
            {"onnx_ir", "onnxruntime"},
        ),
        (truncated, "the file can't be read as ONNX (", {"onnx_ir", "onnxruntime"}),
        (quantized, "a float model; this one is quantized already", {"onnx_ir", "onnxruntime"}),
        (
            lambda path: by_hand(path, kind=TensorProto.UINT8),
            "a model with one input, float32 images [N, C, H, W] of 1 or 3 channels; the input 'input' is uint8 [",
            {"onnxruntime"},
        ),
        (with_branches, "a model with its Conv, Gemm and MatMul nodes in the main graph", set()),
        (refused, "ONNX Runtime ", set()),
    ],
    ids=["missing", "damaged", "truncated", "quantized", "bytes", "branches", "refused"],
)
def test_what_is_wrong_with_a_file_is_said_without_torch(
    write: Callable[[Path], object], says: str, unwanted: set[str], started: Started, tmp_path: Path
) -> None:
    """Uses mode=static, which also imports the file; the file with branches, which it accepts, needs mode=dynamic."""
    write(tmp_path / "file.onnx")
    mode = "dynamic" if write is with_branches else "static"
    status, said, imported = started(
        "export.py", "onnx=file.onnx", f"mode={mode}", "data.image_size=8", cwd=tmp_path
    )
    assert status == 2
    assert said.removeprefix("error: onnx=file.onnx: ").removeprefix("expected ").startswith(says)
    assert not imported & (TRAINING | unwanted)


@pytest.mark.parametrize("mode", ["dynamic", "static"])
@pytest.mark.parametrize("data", ["arrays", "pictures", "imagenet"])
def test_a_missing_folder_of_data_is_said_without_torch(
    data: str, mode: str, started: Started, tmp_path: Path
) -> None:
    by_hand(tmp_path / "file.onnx")
    typed = ["onnx=file.onnx", f"mode={mode}", f"data={data}", "data.root=nowhere"]
    status, said, imported = started("export.py", *typed, cwd=tmp_path)
    assert status == 2 and said.startswith("error: data.root=nowhere: expected a folder ")
    assert "there is no such folder" in said
    assert not imported & (TRAINING | FILES)


JOB = """
import gc, sys
from qatkit.cli import scripts

scripts._train = lambda config: print(gc.isenabled(), gc.get_freeze_count() > 0)
sys.exit(scripts.train())
"""


def test_garbage_is_collected_while_a_job_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", JOB, "output_dir=run"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True True\n", "")


COMPONENTS = """
import importlib, sys
from qatkit_verify.dotted import check_path, resolve
from qatkit_verify.errors import ConfigError

def said(check, path):
    try:
        check(path, "key")
    except ConfigError as error:
        return str(error)
    return ""

found = {path: said(check_path, path) for path in sys.argv[1:]}
assert "torch" not in sys.modules
for path, message in found.items():
    assert message == said(resolve, path), (message, said(resolve, path))
    print(path, message)
"""


@pytest.mark.slow
def test_a_component_of_ours_is_looked_up_as_importing_it_would() -> None:
    """Checks paths in conf, with and without a typo, in a process that has imported none of them.

    Algorithms are left out: they are imported to check their settings.
    """
    texts = [path.read_text() for path in CONF.glob("*/*.yaml")]
    named = {path for text in texts for path in re.findall(r"\bqatkit(?:_verify)?(?:\.\w+)+", text)}
    paths = sorted(path for path in named if not path.startswith("qatkit.algorithms."))  # these are imported
    assert len(paths) > 20
    mistyped = [f"{path}s" for path in paths]
    done = subprocess.run(
        [sys.executable, "-c", COMPONENTS, *paths, *mistyped],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.strip() for line in lines[: len(paths)]] == paths
    assert all(": expected a name in " in line for line in lines[len(paths) :])
