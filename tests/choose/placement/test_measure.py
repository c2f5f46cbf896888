"""Tests of folders of variants (placement=variants): contents, rejected folders, and what measuring writes."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from gated import Gated
from onnx import TensorProto, helper

from qatkit.choose.placement.choices import Choices
from qatkit.choose.placement.families import combined, families
from qatkit.choose.precision.layout import Layouts
from qatkit.train.module import QATModule
from qatkit_verify.placement import measure as program
from qatkit_verify.placement.measure import Variant, Variants, main, read_variants, write_variants
from qatkit_verify.placement.record import read_placement
from qatkit_verify.placement.sites import Sites

EXAMPLE = torch.randn(2, 3, 12, 12)


@pytest.fixture(scope="module")
def found() -> dict[str, Sites]:
    module = QATModule(Gated(), EXAMPLE)
    graph = module.opened(Gated()).graph
    layouts = Layouts(graph, module.backend)
    return families(graph, layouts, Choices(graph, module.backend, layouts, ()))


def test_families_are_those_of_the_graph(found: dict[str, Sites]) -> None:
    assert {name: set(sites.floats) for name, sites in found.items()} == {
        "depthwise": {"silu1", "depthwise", "silu2"},
        "gates": {"mul", "sigmoid", "gate", "squeeze"},
        "sums": {"add"},
        "stem": {"stem"},
        "last": {"fc"},
        "silu": set(),
        "amx": set(),
    }
    assert found["amx"].for_amx and not found["stem"].for_amx
    assert found["silu"].opened == {"silu", "silu1", "silu2"}


def test_families_are_combined_by_two_and_all(found: dict[str, Sites]) -> None:
    every = dict(combined(found))
    assert len(every) == 7 + 21 + 1 and every["amx+stem"] == Sites(frozenset({"stem"}), for_amx=True)
    assert every["depthwise+silu"] == Sites(found["depthwise"].floats, frozenset({"silu"}))
    assert every["stem+sums"].floats == {"stem", "add"}


def repeated(path: Path, times: int) -> str:
    """Writes a file with `times` matrix products, and returns its digest."""
    names = ["input", *(f"t{i}" for i in range(times - 1)), "output"]
    nodes = [helper.make_node("MatMul", [a, "input"], [b]) for a, b in itertools.pairwise(names)]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 3, 96, 96])
        for name in ("input", "output")
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "g", ends[:1], ends[1:]), opset_imports=[helper.make_opsetid("", 13)]
    )
    model.ir_version = 8
    onnx.save(model, path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder of files of clearly different latency: 40 products (float), 20 (fixed), 2 (stem)."""
    sites = {"float": Sites(frozenset("abc")), "fixed": Sites(), "stem": Sites(frozenset("a"))}
    files = {
        name: Variant(f"{name}.onnx", repeated(tmp_path / f"{name}.onnx", count), sites[name])
        for name, count in (("float", 40), ("fixed", 20), ("stem", 2))
    }
    write_variants(tmp_path, Variants("net", "fbgemm", (3, 96, 96), "digest", {}, files))
    return tmp_path


def test_the_fastest_is_written_and_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), "--threads", "1", "--runs", "5"]) == 0
    placed = read_placement(folder / "placement.json")
    assert placed.chosen == "stem" and placed.sites == Sites(frozenset("a"))
    assert placed.of("stem").low > 2 and placed.machine.threads == 1
    assert (placed.model, placed.backend, placed.input_shape, placed.graph) == (
        "net",
        "fbgemm",
        (3, 96, 96),
        "digest",
    )
    said = capsys.readouterr().out
    assert "stem  <- chosen" in said and f"placement={folder / 'placement.json'}" in said


def test_slower_than_float_everywhere_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = read_variants(folder)
    names = {"float": stored.files["stem"], "fixed": stored.files["fixed"]}
    write_variants(
        folder, Variants(stored.model, stored.backend, stored.input_shape, stored.graph, {}, names)
    )
    assert main([str(folder), "--threads", "1", "--runs", "5", "--output", str(folder / "other.json")]) == 0
    assert "slower than float here" in capsys.readouterr().out
    assert read_placement(folder / "other.json").chosen == "fixed"


def _missing(folder: Path) -> None:
    (folder / "stem.onnx").unlink()


def _damaged(folder: Path) -> None:
    path = folder / "stem.onnx"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")


def _edited(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / program.VARIANTS_FILE
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_missing, "stem.onnx (stem) is missing"),
        (_damaged, "stem.onnx has other contents"),
        (_edited(format=9), "format 9; this version reads format 1"),
        (_edited(files={}), "'fixed' is not among its files"),
        (
            _edited(files={"fixed": {"file": "../x", "sha256": "", "float": [], "int8": []}}),
            "'../x' is not the name",
        ),
        (lambda folder: (folder / program.VARIANTS_FILE).unlink(), "variants.json"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(
    harm: Callable[[Path], None], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harm(folder)
    assert main([str(folder)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: variants=") and said in told and told.count("\n") == 1
    assert not (folder / "placement.json").exists()


@pytest.mark.parametrize("typed", [["--threads", "0"], ["--batch", "x"], ["--runs", "-1"]])
def test_counts_are_counts(typed: list[str], folder: Path) -> None:
    with pytest.raises(SystemExit) as left:
        main([str(folder), *typed])
    assert left.value.code == 2
