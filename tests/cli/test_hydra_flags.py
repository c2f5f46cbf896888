"""Checks that Hydra's flags are parsed on Python 3.14, whose argparse checks the help of each added flag."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from command_line import Launch
from hydra._internal.utils import get_args_parser

from qatkit.cli.hydra_flags import flags_parser
from qatkit.cli.train_command import train_run


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds Python 3.14's check to argparse if an older version runs the tests."""
    if hasattr(argparse.ArgumentParser, "_check_help"):
        return
    container = argparse.ArgumentParser.__mro__[2]
    added = container.add_argument  # type: ignore[attr-defined]

    def check(self: Any, action: argparse.Action) -> None:
        if action.help:
            "%" in action.help  # noqa: B015  # what Python 3.14 does, within a try that raises ValueError

    def add_argument(self: Any, *names: Any, **given: Any) -> argparse.Action:
        action: argparse.Action = added(self, *names, **given)
        self._check_help(action)
        return action

    monkeypatch.setattr(container, "_check_help", check, raising=False)
    monkeypatch.setattr(container, "add_argument", add_argument)


@pytest.mark.usefixtures("checked")
def test_hydra_cannot_build_its_parser_alone() -> None:
    with pytest.raises((ValueError, TypeError)):
        get_args_parser()

    assert flags_parser().parse_args(["-m", "a=1"]).multirun


@pytest.mark.usefixtures("checked")
def test_a_command_reaches_its_configuration(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(train_run, "recipe=quickstart", "--cfg", "job") == 0
    assert "schedule:" in capsys.readouterr().out
