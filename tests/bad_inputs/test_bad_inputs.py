"""Checks that any bad input ends quickly in one line `error: key=value: what is allowed` and exit status 2.

The cases are data in `setting_cases`, `typed_cases`, `path_cases` and `file_cases`; add new ones there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import file_cases
import forked
import path_cases
import pytest
import setting_cases
from cases import TINY, Case

Run = Callable[..., forked.Outcome]
CPU_SECONDS = 30  # far more than a busy machine needs for one error, far less than a huge value would take
_EVERY = 16  # the default suite tries every 16th setting case


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    forked.preload()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("places")
    path_cases.make_files(folder)
    return folder


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged")
    file_cases.make_files(folder)
    return folder


def _name(case: Case) -> str:
    files = [source for source, _ in getattr(case, "files", ())]
    return " ".join((*(one for one in case.typed if one not in TINY), *files))[:70]


def _assert_refused(case: Case, files: Path, outcome: forked.Outcome) -> None:
    told = f"{_name(case)}: status {outcome.status}, {outcome.cpu_seconds:.1f} s, left {outcome.left}\n{outcome.err}"
    assert outcome.status == 2, told
    (line,) = outcome.lines
    assert line.startswith("error: " + case.says.format(files=files)), told
    key, _, allowed = line.removeprefix("error: ").partition(": ")
    assert key and allowed and line.isprintable() and len(line) < 3000, told
    assert outcome.out == "" and outcome.left == [], told
    assert outcome.cpu_seconds < CPU_SECONDS, told


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=_name(case), marks=[] if index % _EVERY == 0 else [pytest.mark.slow])
        for index, case in enumerate(setting_cases.CASES)
    ],
)
def test_a_setting_typed_wrong(case: Case, tmp_path: Path) -> None:
    _assert_refused(case, tmp_path, forked.outcome(case.script, case.typed, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("case", path_cases.CASES, ids=_name)
def test_a_path_to_what_can_not_be_used(case: Case, places: Path, tmp_path: Path) -> None:
    _assert_refused(case, places, path_cases.run(case, places, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("case", file_cases.CASES, ids=_name)
def test_a_damaged_file(case: file_cases.FileCase, damaged: Path, tmp_path: Path) -> None:
    _assert_refused(case, damaged, file_cases.run(case, damaged, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("case", file_cases.HINTS, ids=_name)
def test_a_damaged_neighbour_that_is_only_a_hint_is_passed_over(
    case: file_cases.FileCase, damaged: Path, tmp_path: Path
) -> None:
    outcome = file_cases.run(case, damaged, tmp_path)

    assert outcome.status == 0, outcome.err
    assert "out/report.json" in outcome.left


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", ["model.checkpoint", "resume", "calibration.cache", "output_dir", "data.root"]
)
def test_a_folder_without_permission(place: str) -> None:
    """Runs as `nobody` if root runs the tests, and outside pytest's folder, which `nobody` cannot enter."""
    if os.geteuid() == 0 and not all(
        folder.stat().st_mode & 0o5 == 0o5 for folder in Path(os.__file__).parents
    ):
        pytest.skip("the user `nobody` cannot read Python's own folder")
    with tempfile.TemporaryDirectory() as there:
        folder = Path(there)
        folder.chmod(0o777)
        (folder / "locked").mkdir(mode=0o700)
        case = path_cases.typed(place, f"{folder}/locked/x")
        if os.geteuid() != 0:
            (folder / "locked").chmod(0)
        outcome = forked.outcome(case.script, case.typed, folder, as_nobody=os.geteuid() == 0)

        _assert_refused(Case(case.typed, f"{place}="), folder, outcome)


@pytest.mark.slow
@pytest.mark.parametrize("case", setting_cases.CASES[::15], ids=_name)
def test_the_same_in_a_process_of_its_own(case: Case, tmp_path: Path) -> None:
    if any("\0" in one for one in case.typed):
        pytest.skip("no process can be given a NUL byte")
    done = subprocess.run(
        [sys.executable, str(forked.ROOT / case.script), *case.typed],
        cwd=tmp_path, capture_output=True, text=True, errors="backslashreplace", check=False, timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # includes the folder of tiny_run
    )  # fmt: skip
    outcome = forked.Outcome(
        done.returncode, done.stdout, done.stderr, 0, sorted(p.name for p in tmp_path.iterdir())
    )

    _assert_refused(case, tmp_path, outcome)
