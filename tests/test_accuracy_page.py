"""Checks that docs/accuracy.md has the recorded results of all recipes, and of models in each mode."""

from __future__ import annotations

import json
import runpy
from dataclasses import asdict
from typing import Any

import pytest
from command_line import CONF, ROOT

from qatkit.config.compose import compose_config

RESULTS = ROOT / "recipes" / "results"
IN_MODES = sorted((RESULTS / "modes").glob("*.json"))
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "accuracy_table.py"))
RECORD = runpy.run_path(str(ROOT / "scripts" / "record_result.py"))
GIVEN = ["model.checkpoint=float.ckpt", "data.root=data"]
COLUMNS = ["float", "PTQ", "QAT", "dynamic int8", "float16", "weight-only int4"]


def rows_of(text: str) -> list[list[str]]:
    """Returns the cells of all table rows without the headers."""
    lines = [line.strip("| ") for line in text.splitlines() if line.startswith("| ")]
    return [line.split(" | ") for line in lines if not line.startswith(("---", "recipe |", "model |"))]


def test_the_page_is_current() -> None:
    made = SCRIPT["page"]()
    assert (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8") == made, (
        "uv run scripts/accuracy_table.py"
    )
    rows = rows_of(made.partition("## Models in each mode")[0])
    results = sorted(RESULTS.glob("*.json"))
    assert [row[0].strip("`") for row in rows] == [path.stem for path in results]
    for row, path in zip(rows, results, strict=True):
        ratio = json.loads(path.read_text())["bytes"]
        assert float(row[8]) == round(ratio["int8"] / ratio["float"], 3)


def test_each_recorded_mode_has_its_cell_and_command() -> None:
    section = SCRIPT["page"]().partition("## Models in each mode")[2]
    cells = [cell for row in rows_of(section) for cell in row[2:]]
    for path in IN_MODES:
        found = json.loads(path.read_text())
        metric = next(key for key, one in found.items() if isinstance(one, dict) and "float" in one)
        change = found[metric]["int8"] - found[metric]["float"]
        size = found["bytes"]["int8"] / found["bytes"]["float"]
        cell = f"{found[metric]['int8']:.2f} ({change:+.2f}), {found['speedup']['ratio']:.2f}, {size:.3f}"
        assert cell in cells, path.name
        command = f"`uv run train.py recipe={found['recipe']} {' '.join(found['settings'])}`"
        assert f"{command}, {found['hardware']['cpu']}" in section, path.name


@pytest.mark.parametrize("path", IN_MODES, ids=lambda path: path.stem)
def test_a_recorded_mode_is_that_of_its_settings(path: Any) -> None:
    found = json.loads(path.read_text())
    config = compose_config(CONF, [f"recipe={found['recipe']}", *GIVEN, *found["settings"]])
    report = {"name": config.name, "config": asdict(config)}
    place, settings = RECORD["place"](report)
    assert place == path and found["settings"][: len(settings)] == settings
    assert "/" not in found["model"].partition("/")[2], "the model's path is of a machine"


@pytest.mark.parametrize(
    ("recipe", "settings", "name"),
    [
        ("quickstart", [], "quickstart"),
        ("minilm_sick_ptq", [], "minilm_sick_ptq"),
        ("resnet18_cifar10_ptq", ["export.mode=dynamic"], "modes/resnet18_cifar10_ptq.dynamic"),
        (
            "vit_cifar10_ptq",
            ["backend=weight_only", "algorithm=[awq,gptq]", "backend.weight_dtype=int3"],
            "modes/vit_cifar10_ptq.int3",
        ),
    ],
)
def test_a_run_is_kept_under_its_recipe_and_mode(recipe: str, settings: list[str], name: str) -> None:
    config = compose_config(CONF, [f"recipe={recipe}", *GIVEN, *settings])
    assert RECORD["place"]({"name": config.name, "config": asdict(config)}) == (
        RESULTS / f"{name}.json",
        settings,
    )


def test_what_is_not_measured_is_a_dash() -> None:
    result = json.loads((RESULTS / "unet_camvid_qat.json").read_text())
    (row,) = rows_of(SCRIPT["modes"]({"unet_camvid_qat": result}))
    assert len(row) == 2 + len(COLUMNS)
    cells = dict(zip(COLUMNS, row[2:], strict=True))
    assert cells.pop("QAT").startswith(f"{result['miou']['int8']:.2f} (")
    assert cells.pop("float") == f"{result['miou']['float']:.2f}"
    assert set(cells.values()) == {"-"}


def test_dynamic_int8_beside_a_file_has_its_cell() -> None:
    result = json.loads((RESULTS / "text_embedding_ptq.json").read_text())
    (row,) = rows_of(SCRIPT["modes"]({"text_embedding_ptq": result}))
    times, sizes, scores = result["latency_ms"], result["bytes"], result["spearman"]
    lost, speed = scores["dynamic"] - scores["float"], times["float"] / times["dynamic"]
    size = sizes["dynamic"] / sizes["float"]
    assert row[5] == f"{scores['dynamic']:.2f} ({lost:+.2f}), {speed:.2f}, {size:.3f}"
