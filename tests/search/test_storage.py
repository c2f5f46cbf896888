"""Tests of a study's storage: damage, locks and lost connections lose no trial, and errors take one line."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("optuna")

from shared_study import ASKED, SPACE, TESTED, figures_of, study_in

from qatkit.config.rules import validate
from qatkit.config.schema import Config
from qatkit.config.search_space import axes
from qatkit.search.storage import DATABASE, JOURNAL, StorageError, storage_of
from qatkit.search.study import SharedStudy
from qatkit_verify.errors import ConfigError


def test_a_line_of_the_journal_that_was_cut_off_is_none(tmp_path: Path) -> None:
    claimed = study_in(tmp_path).claim()
    assert claimed is not None
    with claimed:
        claimed.complete(figures_of(0), TESTED)
    path = tmp_path / JOURNAL
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[-1][:-7])  # as after a full disk or a kill
    for number in (1, 2):
        claimed = study_in(tmp_path).claim()
        assert claimed is not None and claimed.number == number
        with claimed:
            claimed.complete(figures_of(number), TESTED)
    assert [one.state for one in study_in(tmp_path).records().trials] == ["complete"] * 3
    assert path.read_bytes().startswith(whole)
    assert all(json.loads(line) for line in path.read_bytes().splitlines())


def test_a_trial_of_a_locked_storage_is_left_to_the_next_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qatkit.search.storage._BUSY", 0.1)
    asked = replace(ASKED, storage=None)
    claimed = study_in(tmp_path, asked).claim()
    assert claimed is not None
    other = sqlite3.connect(tmp_path / DATABASE)
    with claimed:
        other.execute("BEGIN EXCLUSIVE")
        for write in (
            lambda: claimed.epoch("last", 1, 55.0),
            lambda: claimed.complete(figures_of(0), TESTED),
            lambda: claimed.fail("as a test"),
        ):
            with pytest.raises(
                StorageError, match=r"^search\.storage=study\.db: .*locked.*continues the search"
            ):
                write()
        other.rollback()
    again = study_in(tmp_path, asked).claim()
    assert again is not None and again.number == 0


@pytest.mark.slow
def test_a_connection_that_was_dropped_is_made_anew(tmp_path: Path, postgresql: str) -> None:
    """Simulates a firewall or a server restart that drops the connection."""
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
        claimed.complete(figures_of(0), TESTED)
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
        study_in(tmp_path, replace(ASKED, storage=f"sqlite:///{tmp_path}/no/such/folder.db"))


@pytest.mark.parametrize("url", [
    "sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite+pysqlite://", "sqlite:///?timeout=5",
    "sqlite:///file::memory:?cache=shared&uri=true", "sqlite:///file:name?mode=memory&uri=true", "SQLite://",
])  # fmt: skip
def test_a_study_in_memory_is_refused(url: str) -> None:
    """A study in memory would be lost with its worker, and no other worker could see it."""
    config = Config(search=replace(ASKED, storage=url))
    with pytest.raises(
        ConfigError,
        match=r"(?i)^search\.storage=sqlite.*: expected null \(SQLite in .*; a study in memory is lost",
    ):
        validate(config)


@pytest.mark.parametrize("url", ["sqlite:///study.db", "sqlite:////memory/mode.db", "sqlite:///:memory:.db"])
def test_a_study_in_a_file_is_none_in_memory(url: str) -> None:
    validate(Config(search=replace(ASKED, storage=url)))


@pytest.mark.parametrize(
    ("driver", "module", "where"),
    [
        ("", "psycopg", "; install it with uv sync --inexact --extra postgresql"),
        ("+psycopg2", "psycopg2", r" \(psycopg2\)"),
    ],
)
def test_a_driver_that_is_missing_is_named(
    driver: str, module: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"search\.storage=postgresql.*driver .* is not installed{where}"):
        study_in(tmp_path, replace(ASKED, storage=f"postgresql{driver}://127.0.0.1:1/x"))


@pytest.mark.parametrize("name", ["br{a}", "pc%20#x", "we?rd", "it's"])
def test_a_folder_may_have_any_name(name: str, tmp_path: Path) -> None:
    asked = replace(ASKED, storage=None)
    study = study_in(tmp_path / name, asked)
    assert study.claim() is not None
    assert (tmp_path / name / "study.db").is_file() and [path.name for path in tmp_path.iterdir()] == [name]
