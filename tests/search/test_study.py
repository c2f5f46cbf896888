"""A shared study: no trial is lost or counted twice, another study is refused, trials end early as in Optuna."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

optuna = pytest.importorskip("optuna")

from qatkit.config.schema import SearchConfig  # noqa: E402
from qatkit.report.search_page import search_page  # noqa: E402
from qatkit.run import lock  # noqa: E402
from qatkit.search.median import falls_behind  # noqa: E402
from qatkit.search.space import axes  # noqa: E402
from qatkit.search.storage import DATABASE, JOURNAL, StorageError, storage_of  # noqa: E402
from qatkit.search.study import SharedStudy  # noqa: E402
from qatkit_verify.errors import ConfigError  # noqa: E402

SPACE: dict[str, Any] = {
    "schedule.lr": {"low": 1e-4, "high": 1e-1, "log": True},
    "calibration": ["minmax", "mse"],
}
ASKED = SearchConfig(trials=3, space=SPACE, objectives=["accuracy", "size"], startup=2,
                     storage="journal")  # fmt: skip


def _study(folder: Path, asked: SearchConfig = ASKED, seed: int = 0, **settings: Any) -> SharedStudy:
    return SharedStudy(asked, axes(asked.space), "name", folder, seed, {"schedule.epochs": 2} | settings)


def _figures(number: int) -> dict[str, float]:
    return {"accuracy": 90.0 + number % 3, "size": 3.0 + number % 2}


TESTED = {"accuracy": 50.0}


def _in_a_process(work: Callable[[], None]) -> int:
    """Its exit status: locks belong to processes."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            lock._HELD.clear()  # a process that is started holds none
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture(scope="module")
def postgresql() -> Iterator[str]:
    """A real server of its own, on a free port; the URL of its database."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")) or [
        Path(one) for one in [shutil.which("initdb")] if one
    ]
    pytest.importorskip("psycopg")
    if not found:
        pytest.skip("PostgreSQL is not installed (Debian: postgresql)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        as_owner = []
        if os.getuid() == 0:  # which the server refuses to run as
            shutil.chown(folder, "postgres")
            as_owner = ["runuser", "-u", "postgres", "--"]

        def run(name: str, *arguments: str) -> None:
            command = [*as_owner, str(found[-1].with_name(name)), "-D", f"{folder}/data", *arguments]
            subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL, timeout=120)

        run("initdb", "-A", "trust", "-U", "worker")
        run("pg_ctl", "-w", "-l", f"{folder}/log", "-o", f"-p {port} -k {folder} -h 127.0.0.1", "start")
        try:
            yield f"postgresql://worker@127.0.0.1:{port}/postgres"
        finally:
            run("pg_ctl", "-w", "-m", "immediate", "stop")


@pytest.mark.parametrize("storage", [None, "journal", pytest.param("postgresql", marks=pytest.mark.slow)])
def test_a_trial_whose_worker_was_killed_goes_on_once(
    tmp_path: Path, storage: str | None, request: pytest.FixtureRequest
) -> None:
    asked = replace(ASKED, storage=request.getfixturevalue(storage) if storage == "postgresql" else storage)

    def killed() -> None:
        claimed = _study(tmp_path, asked).claim()
        assert claimed is not None and claimed.number == 0
        with claimed:
            claimed.epoch("last", 1, 55.0)
            os.kill(os.getpid(), signal.SIGKILL)

    assert _in_a_process(killed) == -signal.SIGKILL
    study = _study(tmp_path, asked)
    values = study.optuna.trials[0].params
    again = study.claim()
    assert again is not None and (again.number, again.values, again.epochs) == (0, values, {"last 1": 55.0})

    with again:  # which another worker leaves alone

        def other() -> None:
            claimed = _study(tmp_path, asked).claim()
            assert claimed is not None and claimed.number == 1
            with claimed:
                claimed.complete(_figures(1), TESTED)

        assert _in_a_process(other) == 0
        again.complete(_figures(0), TESTED)
    while (claimed := study.claim()) is not None:
        with claimed:
            claimed.complete(_figures(claimed.number), TESTED)
    trials = study.records().trials
    assert [(trial.number, trial.state) for trial in trials] == [(number, "complete") for number in range(3)]
    assert [trial.attempts for trial in trials] == [2, 1, 1]
    assert [dict(trial.figures) for trial in trials] == [_figures(number) for number in range(3)]


def test_a_trial_that_was_not_proposed_to_its_end_is_none(tmp_path: Path) -> None:
    study = _study(tmp_path)
    study.optuna.ask()  # killed before a value was written
    numbers = []
    while (claimed := study.claim()) is not None:
        with claimed:
            numbers.append(claimed.number)
            claimed.fail("as a test")
    assert numbers == [1, 2, 3]
    assert [trial.number for trial in study.records().trials] == numbers


def test_the_front_is_of_the_trials_within_the_bounds_that_nobody_beats(tmp_path: Path) -> None:
    study = _study(tmp_path, replace(ASKED, trials=6, constraints=["size<=4"]))
    made = [(90.0, 3.0), (90.0, 2.0), (91.0, 4.0), (99.0, 5.0), (89.0, 3.5), (92.0, 4.0)]
    for accuracy, size in made:
        claimed = study.claim()
        assert claimed is not None
        with claimed:
            claimed.complete({"accuracy": accuracy, "size": size}, {"accuracy": 100 - accuracy})
    best = {
        i
        for i, (a, s) in enumerate(made)
        if s <= 4 and not any(t <= 4 and b >= a and t <= s and (b, t) != (a, s) for b, t in made)
    }
    records = study.records()
    assert best == {1, 5}
    assert [trial.number for trial in records.front] == [5, 1]  # the most accurate first
    assert [trial.feasible for trial in records.trials] == [True, True, True, False, True, True]
    page = search_page(records)
    front, every = page.split("All trials")
    assert front.count(">92.00<") == 1 and front.count(">8.00<") == 1  # held out, and of test images
    assert ">8.00<" not in every and every.count(">92.00<") == 1
    assert page.count('class="pin chosen"') == 2 and page.count(">outside</span>") == 1


@pytest.mark.parametrize("storage", [None, "journal"])
@pytest.mark.parametrize("objectives", [["sqnr"], ["sqnr", "size"], ["size", "sqnr", "latency"]])
def test_equal_outputs_are_the_best_whatever_is_stored_where(
    tmp_path: Path, storage: str | None, objectives: list[str]
) -> None:
    """Endless decibels are kept, kept within bounds, on the front, and don't stop what proposes."""
    asked = replace(
        ASKED, trials=12, objectives=objectives, constraints=["sqnr>=30"], storage=storage, startup=3
    )
    study = _study(tmp_path, asked)
    while (claimed := study.claim()) is not None:
        with claimed:
            decibel = math.inf if claimed.number % 3 == 1 else 25.0 + claimed.number
            claimed.complete({"sqnr": decibel, "size": 3.0 + claimed.number, "latency": 2.0}, {})
    records = _study(tmp_path, asked).records()
    equal = [trial for trial in records.trials if trial.number % 3 == 1]
    assert len(equal) == 4 and all(trial.figures["sqnr"] == math.inf and trial.feasible for trial in equal)
    assert [trial.number for trial in records.trials if not trial.feasible] == [0, 2, 3]
    front = {trial.number for trial in records.front}
    assert front == ({1, 4, 7, 10} if objectives == ["sqnr"] else {1})
    assert "equal" in search_page(records) and "nan" not in search_page(records)


def test_proposals_follow_seed_and_number(tmp_path: Path) -> None:
    def drawn(folder: Path, seed: int) -> list[Any]:
        found = []
        for _ in range(3):
            claimed = _study(folder, seed=seed).claim()  # a worker of its own each time
            assert claimed is not None
            with claimed:
                claimed.complete(_figures(claimed.number), TESTED)
            found.append(claimed.values)
        return found

    first = drawn(tmp_path / "a", 0)
    assert first == drawn(tmp_path / "b", 0) != drawn(tmp_path / "c", 1)
    assert len({str(values) for values in first}) == 3


@pytest.mark.parametrize(
    ("asked", "settings", "says"),
    [
        (replace(ASKED, space=SPACE | {"calibration": ["minmax", "entropy"]}), {},
         r"search\.space=.*calibration there \['minmax', 'mse'\], here \['minmax', 'entropy'\]"),
        (replace(ASKED, space={"schedule.lr": SPACE["schedule.lr"]}), {}, "calibration there .*, here absent"),
        (replace(ASKED, objectives=["accuracy"]), {}, r"search\.objectives="),
        (replace(ASKED, constraints=["size<=3"]), {}, r"search\.constraints="),
        (ASKED, {"schedule.epochs": 3}, r"schedule\.epochs there 2, here 3"),
    ],
)  # fmt: skip
def test_another_study_is_refused_with_what_differs(
    tmp_path: Path, asked: SearchConfig, settings: dict[str, Any], says: str
) -> None:
    _study(tmp_path)
    with pytest.raises(ConfigError, match=says):
        _study(tmp_path, asked, **settings)
    _study(tmp_path, replace(ASKED, trials=9, attempts=2))


def test_a_study_whose_folder_is_elsewhere_is_refused(tmp_path: Path) -> None:
    asked = replace(ASKED, storage=f"sqlite:///{tmp_path}/shared.db")
    _study(tmp_path / "here", asked)
    with pytest.raises(ConfigError, match="output_dir"):
        _study(tmp_path / "there", asked)


def _another_name(folder: Path) -> None:
    SharedStudy(ASKED, axes(SPACE), "other", folder, 0, {})


def _another_storage(folder: Path) -> None:
    _study(folder, replace(ASKED, storage=None))


def _a_lost_storage(folder: Path) -> None:
    (folder / JOURNAL).unlink()
    _study(folder)


@pytest.mark.parametrize("begins", [_another_name, _another_storage, _a_lost_storage])
def test_a_study_begins_where_there_are_no_trials_of_another(
    tmp_path: Path, begins: Callable[[Path], None]
) -> None:
    """Their reports are in folders of the same numbers."""
    first = _study(tmp_path).claim()
    assert first is not None
    with first:
        first.complete(_figures(0), TESTED)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"output_dir=.*: a folder without trials of another study"):
            begins(tmp_path)
    if begins is not _a_lost_storage:
        second = _study(tmp_path).claim()  # the first study goes on
        assert second is not None and second.number == 1


def test_a_line_of_the_journal_that_was_cut_off_is_none(tmp_path: Path) -> None:
    claimed = _study(tmp_path).claim()
    assert claimed is not None
    with claimed:
        claimed.complete(_figures(0), TESTED)
    path = tmp_path / JOURNAL
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[-1][:-7])  # a full disk, or a kill
    for number in (1, 2):
        claimed = _study(tmp_path).claim()
        assert claimed is not None and claimed.number == number
        with claimed:
            claimed.complete(_figures(number), TESTED)
    assert [one.state for one in _study(tmp_path).records().trials] == ["complete"] * 3
    assert path.read_bytes().startswith(whole)
    assert all(json.loads(line) for line in path.read_bytes().splitlines())


def test_a_storage_that_no_longer_answers_leaves_the_trial_to_the_next_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qatkit.search.storage._BUSY", 0.1)
    asked = replace(ASKED, storage=None)
    claimed = _study(tmp_path, asked).claim()
    assert claimed is not None
    other = sqlite3.connect(tmp_path / DATABASE)
    with claimed:
        other.execute("BEGIN EXCLUSIVE")
        for write in (
            lambda: claimed.epoch("last", 1, 55.0),
            lambda: claimed.complete(_figures(0), TESTED),
            lambda: claimed.fail("as a test"),
        ):
            with pytest.raises(StorageError, match=r"^search\.storage=study\.db: .*locked.*goes on"):
                write()
        other.rollback()
    again = _study(tmp_path, asked).claim()
    assert again is not None and again.number == 0


@pytest.mark.slow
def test_a_connection_that_was_dropped_is_made_anew(tmp_path: Path, postgresql: str) -> None:
    """By a firewall, or a server that was started again."""
    psycopg = pytest.importorskip("psycopg")
    asked = replace(ASKED, storage=postgresql)
    study = SharedStudy(asked, axes(SPACE), "dropped", tmp_path, 0, {})
    claimed = study.claim()
    assert claimed is not None
    with claimed, psycopg.connect(postgresql) as other:
        for epoch in (1, 2):
            claimed.epoch("last", epoch, 55.0)
            other.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()"
            )
        claimed.complete(_figures(0), TESTED)
    assert study.records().trials[0].state == "complete"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux's")
def test_a_network_that_was_cut_is_noticed_in_minutes(tmp_path: Path, postgresql: str) -> None:
    for query, seconds in (("", 120), ("?tcp_user_timeout=7000", 7)):
        storage = cast(Any, storage_of(postgresql + query, tmp_path))
        connection = storage.engine.raw_connection()
        with socket.socket(fileno=os.dup(connection.driver_connection.fileno())) as used:
            assert used.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * seconds
            assert used.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert used.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
        connection.close()


def test_a_database_that_does_not_answer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"search\.storage"):
        _study(tmp_path, replace(ASKED, storage=f"sqlite:///{tmp_path}/no/such/folder.db"))


@pytest.mark.parametrize(
    ("driver", "module", "where"),
    [("", "psycopg", "uv sync --extra postgresql"), ("+psycopg2", "psycopg2", "this is missing: psycopg2")],
)
def test_a_driver_that_is_missing_is_named(
    driver: str, module: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"search\.storage=postgresql.*driver is installed; {where}"):
        _study(tmp_path, replace(ASKED, storage=f"postgresql{driver}://127.0.0.1:1/x"))


def test_trials_end_early_where_optunas_median_pruner_ends_them() -> None:
    """200 drawn curves against the finished ones before them, epoch by epoch."""
    draw = random.Random(0)
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.MedianPruner(4, 0))
    finished: list[dict[str, float]] = []
    ended = 0
    for _ in range(200):
        trial, epochs = study.ask(), dict[str, float]()
        for epoch in range(draw.randint(1, 5)):
            epochs[f"last {epoch}"] = draw.uniform(0, 100)
            trial.report(epochs[f"last {epoch}"], epoch)
            assert falls_behind(epochs, finished, 4) == trial.should_prune()
        if falls_behind(epochs, finished, 4):
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            ended += 1
        else:
            study.tell(trial, epochs[f"last {epoch}"])
            finished.append(epochs)
    assert 20 < ended < 180


def test_a_trial_that_has_just_ended_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at what is running and its lock another worker completes it."""
    one, other = _study(tmp_path / "study"), _study(tmp_path / "study")
    claimed = one.claim()
    assert claimed is not None
    running = other.optuna.get_trials(states=(optuna.trial.TrialState.RUNNING,))
    with claimed:
        claimed.complete(_figures(0), {})
    assert other._taken(running[0]) is None
    following = other.claim()
    assert following is not None and following.number == 1


@pytest.mark.parametrize("name", ["br{a}", "pc%20#x", "we?rd", "it's"])
def test_a_folder_may_have_any_name(name: str, tmp_path: Path) -> None:
    asked = replace(ASKED, storage=None)
    study = _study(tmp_path / name, asked)
    assert study.claim() is not None
    assert (tmp_path / name / "study.db").is_file() and [path.name for path in tmp_path.iterdir()] == [name]


def test_whole_ends_are_another_space_than_real_ones(tmp_path: Path) -> None:
    for high in (1, 1.0):
        space = axes({"schedule.weight_decay": {"low": 0, "high": high}})
        if high == 1.0 and isinstance(high, float):
            with pytest.raises(ConfigError, match="that of the study that goes on"):
                SharedStudy(ASKED, space, "name", tmp_path / "study", 0, {})
        else:
            SharedStudy(ASKED, space, "name", tmp_path / "study", 0, {})


@pytest.mark.parametrize(("objectives", "constraints", "ends"), [
    (["accuracy"], [], True), (["latency"], ["drop<=1"], True), (["latency", "size"], [], False)
])  # fmt: skip
def test_epochs_end_trials_only_where_accuracy_is_aimed_at(
    objectives: list[str], constraints: list[str], ends: bool, tmp_path: Path
) -> None:
    asked = replace(ASKED, objectives=objectives, constraints=constraints, prune=True, startup=1)
    study = _study(tmp_path / "study", asked)
    for number in range(3):
        claimed = study.claim()
        assert claimed is not None
        with claimed:
            ended = claimed.epoch("last", 1, 90.0 if number < 2 else 10.0)
            if number < 2:
                claimed.complete(
                    {**_figures(number), "drop": 0.0, "latency": 1.0, "size": 1.0, "accuracy": 90.0}, {}
                )
    assert ended == ends
