"""Tests of the comparison of runs: finding them, figures, the Pareto front, and the page in a real browser."""

from __future__ import annotations

import html
import json
import random
import re
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Launch, run_script

from qatkit.compare.command import main
from qatkit.compare.find import runs_below
from qatkit.compare.page import render_page, write_page
from qatkit.compare.text import plain_table
from qatkit.config.schema import Config
from qatkit.records.comparison import BROKEN, MET, SHORT, UNFINISHED, Row, front
from qatkit.records.results import Fidelity, Results
from qatkit.report import write_report
from qatkit_verify.classification import NAMES, classified
from qatkit_verify.records import Hardware, Latency, Metric

CHROMIUM = shutil.which("chromium")


def a_run(folder: Path, name: str = "digits", **changes: Any) -> None:
    """Writes the report of a finished run."""
    draw = random.Random(str(folder))
    ms = draw.uniform(0.2, 5)
    figures: dict[str, Any] = {
        "accuracy": {"float": classified(97.5, None, 360), "int8": classified(draw.uniform(90, 98), None, 360)},
        "fidelity": {"int8": Fidelity(0.99, 0.01, 20.0, 360)},
        "latency": {"int8": Latency(ms, ms, ms, 2.0, 2.0, 2.0, 1, 2, 50)},
        "sizes": {"float": 4_000_000, "int8": draw.randrange(1_000_000, 2_000_000)},
        "hardware": Hardware("a CPU", 2, (), 2, "Linux"),
        "config": {"data": {"source": "qatkit.data.digits"}, "backend": {"target": "qatkit.quant.backends.FBGEMM"}},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    write_report(folder / "report.json", Results(name, "a model", str(folder), **{**figures, **changes}))


def test_every_run_below_a_folder_is_a_row_of_its_report_figures(tmp_path: Path) -> None:
    a_run(tmp_path / "a", sizes={"float": 4_000_000, "int8": 1_000_000},
          accuracy={"float": classified(97.5, None, 360), "int8": classified(96.0, None, 360)})  # fmt: skip
    a_run(tmp_path / "b" / "rungs" / "naive", "other", shortfalls=["verify.max_drop=1: 3 points"])
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.yaml").write_text(
        "name: stopped\nexport: {}\nmodel: {name: resnet18}\nbackend: {target: qatkit.quant.backends.QNNPACK}\n"
    )
    rows = {row.folder: row for row in runs_below(tmp_path)}
    assert {name: row.state for name, row in rows.items()} == {
        "a": MET, "b/rungs/naive": SHORT, "c": UNFINISHED
    }  # fmt: skip
    one = rows["a"]
    assert (one.recipe, one.backend, one.score, one.drop) == ("digits", "fbgemm", 96.0, 1.5)
    assert (one.bytes, one.size_ratio, one.same) == (1_000_000, 0.25, 99.0)
    assert (rows["c"].recipe, rows["c"].backend) == ("stopped", "qnnpack")
    assert "verify.max_drop=1: 3 points" in rows["b/rungs/naive"].why


def test_a_bundle_of_a_run_and_somebody_elses_files_are_no_runs(tmp_path: Path) -> None:
    a_run(tmp_path / "a")
    a_run(tmp_path / "a" / "bundle")
    (tmp_path / "a" / "bundle" / "manifest.json").write_text("{}")
    a_run(tmp_path / "published" / "1")  # counts: a published bundle has no run next to it
    (tmp_path / "published" / "1" / "manifest.json").write_text("{}")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "config.yaml").write_text("jobs: [1, 2]\n")
    a_run(tmp_path / ".hidden" / "a")
    assert [row.folder for row in runs_below(tmp_path)] == ["a", "published/1"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "Expecting value"),
        ('{"schema": 1', "Expecting"),
        ("[]", "it was not written by a run"),
        ('{"schema": 99}', "schema 99"),
        ('{"schema": 1}', "'accuracy' is missing"),
        ("[" * 100_000, "nested too deeply"),
        ('{"schema": 1, "accuracy": {"int8": {"top1": NaN}}, "latency": {}, "sizes": {}}', "is not a finite number"),
        ('{"schema": 1, "accuracy": [], "latency": {}, "sizes": {}}', "report.json"),
        ('{"schema": 1, "accuracy": {"int8": {"top1": "97"}}, "latency": {}, "sizes": {}}', "'97'"),
    ],
)  # fmt: skip
def test_a_broken_report_is_a_row_that_says_what_is_wrong(tmp_path: Path, text: str, told: str) -> None:
    a_run(tmp_path / "whole")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "report.json").write_text(text)
    broken, whole = runs_below(tmp_path)
    assert (broken.state, whole.state) == (BROKEN, MET)
    assert told in broken.why and "\n" not in broken.why


def test_front_matches_brute_force_among_comparable_runs() -> None:
    draw = random.Random(0)
    points = [
        (draw.choice("aab"), draw.randrange(5), draw.randrange(5), draw.randrange(5)) for _ in range(80)
    ]
    states = [draw.choice([MET, MET, MET, SHORT]) for _ in points]
    rows = [
        Row(str(i), state, machine=machine, score=top1, latency_ms=ms, bytes=size)
        for i, (state, (machine, top1, ms, size)) in enumerate(zip(states, points, strict=True))
    ]
    rivals = [point for point, state in zip(points, states, strict=True) if state == MET]
    wanted = [
        state == MET
        and not any(
            other != point and other[0] == point[0] and other[1] >= point[1]
            and other[2] <= point[2] and other[3] <= point[3]
            for other in rivals
        )
        for point, state in zip(points, states, strict=True)
    ]  # fmt: skip
    assert front(rows) == wanted and 0 < sum(wanted) < len(rows) / 2


def test_a_hundred_runs_take_seconds_and_a_small_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(100):
        a_run(tmp_path / f"run{i}", f"recipe{i % 7}", notes=["x" * 100] * 500)
    start = time.process_time()
    assert main([str(tmp_path)]) == 0
    assert time.process_time() - start < 5
    assert (tmp_path / "compare.html").stat().st_size < 2e6
    lines = capsys.readouterr().out.splitlines()
    assert sum("all bounds met" in line for line in lines) == 100


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["nowhere"], "folder=nowhere: expected a folder of runs"),
        (["empty"], "folder=empty: expected a folder that contains runs"),
        (["file"], "folder=file: expected a folder of runs"),
        (["runs", "--output", "empty"], "--output=empty: expected the path of a file"),
        (["runs", "--output", "file/page.html"], "--output=file/page.html: expected a file in a folder"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, typed: list[str], told: str) -> None:
    a_run(tmp_path / "runs" / "a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    done = run_script("compare.py", *typed, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {told}") and done.stderr.count("\n") == 1


def test_names_of_others_stay_text() -> None:
    name = "</script><script>alert(1)</script>&quot;\"'"
    page = render_page([Row("a/b#c?d e", MET, name, recipe=name, backend=name, page=True)], name)
    assert "<script>alert" not in page
    assert 'href="a/b%23c%3Fd%20e/report.html"' in page
    stored = re.search(r'id="rows">(.*?)</script>', page)
    assert stored is not None and json.loads(stored[1])[0]["recipe"] == name


def test_a_sweep_ends_with_its_runs_side_by_side(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def job(config: Config) -> int:
        a_run(Path(str(config.output_dir)), f"seed{config.seed}")
        return 0

    assert launch(job, "-m", "seed=3,4", "name=both") == 0
    (page,) = (tmp_path / "multirun").glob("*/compare.html")
    links = re.findall(r'href="([^"]*both[^"]*)"', page.read_text())
    assert len(links) == 2
    assert all((page.parent / html.unescape(link)).resolve().is_dir() for link in links)
    assert {"seed=3", "seed=4"} <= set(capsys.readouterr().out.split())


def test_a_single_run_compares_nothing(launch: Launch, tmp_path: Path) -> None:
    assert launch(lambda config: 0) == 0
    assert not list(tmp_path.rglob("compare.html"))


def in_browser(page: Path, address: str = "") -> tuple[str, str]:
    """Returns the document after its script has run, and Chromium's console output."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,900", "--enable-logging=stderr",
         f"--user-data-dir={page.parent / 'profile'}", "--virtual-time-budget=2000", "--dump-dom", f"file://{page}{address}"],
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium to open the page in")
def test_page_draws_and_filters_in_a_browser_without_errors(tmp_path: Path) -> None:
    for i in range(12):
        a_run(tmp_path / f"run{i}", f"recipe{i % 3}")
    a_run(tmp_path / "short", shortfalls=["verify.max_drop=1: 3 points"])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "report.json").write_text("{")
    rows = runs_below(tmp_path)
    assert main([str(tmp_path)]) == 0
    shown, console = in_browser(tmp_path / "compare.html")
    assert not console
    svgs = re.findall(r'<svg class="scatter".*?</svg>', shown, re.DOTALL)
    assert [svg.count("<a ") for svg in svgs] == [13, 13]
    assert [svg.count('class="short"') for svg in svgs] == [1, 1]
    assert [svg.count('class="front"') for svg in svgs] == [sum(front(rows))] * 2
    assert shown.count('<tr class="front"') == sum(front(rows))
    assert "NaN" not in shown

    some = [row for row in rows if row.recipe == "recipe1"]
    shown, console = in_browser(tmp_path / "compare.html", "#recipe=recipe1")
    assert not console and "4 of 14 shown" in shown
    assert len(re.findall(r"<tr[^>]* hidden", shown)) == len(rows) - len(some)
    svgs = re.findall(r'<svg class="scatter".*?</svg>', shown, re.DOTALL)
    assert [svg.count('class="front"') for svg in svgs] == [sum(front(some))] * 2


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium to open the page in")
def test_the_page_prefers_a_lower_perplexity(tmp_path: Path) -> None:
    task = replace(NAMES, metrics=(Metric("perplexity", unit="", higher_is_better=False),))
    rows = [
        Row(name, MET, recipe=name, task=task, score=score, latency_ms=2.0, bytes=1_000_000)
        for name, score in (("better", 8.0), ("worse", 9.0))
    ]
    assert front(rows) == [True, False]
    write_page(tmp_path / "compare.html", rows, tmp_path)
    shown, console = in_browser(tmp_path / "compare.html")
    assert not console and "9.00, 2.00 ms" in shown
    assert [bool(re.search(f'<tr class="front".*{name}', shown)) for name in ("better", "worse")] == [
        True,
        False,
    ]


def test_a_noisy_speedup_is_marked() -> None:
    row = Row("a", MET, ratio=1.4, ratio_p10=0.8, ratio_p90=2.1)
    assert "1.40x, noisy: 0.80 to 2.10" in plain_table([row])
    assert 'data-v="1.4">1.40x, noisy: 0.80 to 2.10<' in render_page([row], "runs")
    clear = replace(row, ratio_p10=1.3, ratio_p90=1.5)
    assert "noisy" not in plain_table([clear]) + render_page([clear], "runs").partition("</style>")[2]
