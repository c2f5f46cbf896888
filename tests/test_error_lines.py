"""Tests of the causes and proposals in error messages.

Causes of errors of ONNX Runtime and onnx_ir are printed without error codes, temporary paths and positions in the
libraries' source.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import float_files
import numpy as np
import pytest
from onnx import helper

from qatkit_verify.errors import ConfigError, did_you_mean, one_line
from qatkit_verify.session import open_session

FOLDER = f"{tempfile.gettempdir()}/tmp12/a folder"
SAID = {
    f"[ONNXRuntimeError] : 1 : FAIL : Load model from {FOLDER}/m.onnx failed:Type Error: no": "Type Error: no",
    "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running Add node. Name:'a' "
    "Status Message: /src/onnxruntime/core/x.h:91 void f(int, bool) 3 by 4":
    "Add node. Name:'a' Status Message: 3 by 4",
    f"{tempfile.gettempdir()}/tmp12/model.onnx is odd": "model.onnx is odd",
    "two\n lines": "two lines",
    "": "RuntimeError",
}  # fmt: skip


@pytest.mark.parametrize("text", SAID)
def test_the_cause_is_kept(text: str) -> None:
    assert one_line(RuntimeError(text)) == SAID[text]


def test_a_file_of_a_temporary_folder_is_not_named(tmp_path: Path) -> None:
    nodes = [helper.make_node("Mystery", ["input"], ["output"], "riddle", domain="acme")]
    with tempfile.TemporaryDirectory() as folder:
        path = float_files.by_hand(Path(folder) / "raw.onnx", nodes=nodes)
        with pytest.raises(ConfigError) as raised:
            open_session(path, threads=1)
    said = one_line(raised.value)
    assert tempfile.gettempdir() not in said and "onnx file=" not in said
    assert "riddle" in said and "Mystery" in said


def test_a_failing_operator_is_named_with_its_shapes(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Constant", [], ["s"], "s", value_ints=[1, 192]),
        helper.make_node("Reshape", ["input", "s"], ["f"], "reshape"),
        helper.make_node("Relu", ["f"], ["output"], "relu"),
    ]
    session = open_session(float_files.by_hand(tmp_path / "file.onnx", nodes=nodes), threads=1)
    with pytest.raises(Exception, match="Reshape") as raised:
        session.run(None, {"input": np.zeros((2, 3, 8, 8), np.float32)})
    said = one_line(raised.value)
    assert "Reshape node. Name:'reshape'" in said and "{2,3,8,8}" in said and ".h:" not in said


def test_a_key_that_is_not_a_temporary_file_is_kept() -> None:
    assert one_line(ConfigError("data.root", "x", "a folder")) == "data.root=x: expected a folder"


@pytest.mark.parametrize(
    ("typed", "words", "end"),
    [
        ("base", ["step", "low"], " (known: low, step)"),
        ("hn", ["hN", "y"], " (did you mean hN?)"),
        ("Equalise", ["equalize", "Equalize"], " (did you mean Equalize, equalize?)"),
        ("vit", [f"vit_b_{size}" for size in range(20)], " (did you mean vit_b_"),
        ("zzz", [f"vit_b_{size}" for size in range(20)], ""),
    ],
)
def test_the_most_similar_words_are_proposed(typed: str, words: list[str], end: str) -> None:
    said = did_you_mean(typed, words)
    assert said.startswith(end) and bool(said) == bool(end)
