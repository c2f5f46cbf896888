"""Tests of commands that are printed for the user to type.

They are quoted for a shell, and leave out keys that only concern the current run, such as output_dir.
"""

from __future__ import annotations

import shlex

import pytest

from qatkit.config.argv import (
    EXPORT,
    TRAIN,
    again,
    announces_plan,
    command,
    command_with,
    left_open,
    one_of_many,
    setting,
    typing,
)


def test_without_a_command_line_there_is_nothing_to_type() -> None:
    assert command_with("rescue=ladder") == ""
    with typing(["recipe=a"]), typing(None):
        assert command_with("rescue=ladder") == ""


def test_a_shell_reads_back_what_was_typed() -> None:
    given = ["recipe=vit_qat", "data.root=/my pictures", "+backend.overrides={op/conv:{float:true}}"]
    with typing(given):
        assert shlex.split(command_with("rescue=ladder")) == [
            "uv",
            "run",
            "train.py",
            *given,
            "rescue=ladder",
        ]


def test_keys_are_replaced_and_those_of_a_run_are_left_out() -> None:
    given = [
        "recipe=a",
        "+target.max_drop=1",
        "resume=auto",
        "output_dir=x",
        "export.mode=dynamic",
        "data=digits",
    ]
    with typing(given):
        said = command_with("target.max_drop=0.2", without=("export.mode",))
    assert said == "uv run train.py recipe=a data=digits target.max_drop=0.2"


def test_each_program_is_given_back_with_its_flags() -> None:
    given = ["onnx=a b.onnx", "mode=static", "output_dir=x"]
    with typing(given, EXPORT, ["--config-dir", "my conf"]):
        assert command_with("rescue=ladder") == ""  # the typed command was export.py, not train.py
        said = again("mode=dynamic")
    words = ["onnx=a b.onnx", "mode=dynamic", "--config-dir", "my conf"]
    assert shlex.split(said) == ["uv", "run", "export.py", *words]


def test_an_addition_to_a_mapping_keeps_earlier_ones() -> None:
    with typing(["+backend.overrides={a:{float:true}}"]):
        said = again("+backend.overrides={b:{float:true}}")
    assert shlex.split(said)[3:] == [
        "+backend.overrides={a:{float:true}}",
        "+backend.overrides={b:{float:true}}",
    ]


def test_an_installed_command_names_installed_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/qatkit-export"])
    assert command(TRAIN, "recipe=a") == "qatkit-train recipe=a"
    assert command("qatkit compare", "my runs") == "qatkit compare 'my runs'"


def test_a_key_is_open_unless_the_user_has_set_it() -> None:
    assert not left_open("data.batch_size")  # nothing is known about the user's choices
    with typing(["recipe=a", "+data.batch_size=4"]), typing(None):
        assert not left_open("data.batch_size") and left_open("calibration.batch_size")
    with setting(["data.batch_size=4"]):
        assert left_open("schedule.lr") and command_with() == ""


def test_a_plan_is_announced_once_for_many() -> None:
    assert announces_plan()
    with one_of_many():
        assert not announces_plan()
    assert announces_plan()
