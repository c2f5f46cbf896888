"""A command line that is given back: quoted for a shell, with keys replaced and none of another run's own."""

from __future__ import annotations

import shlex

from qatkit.config.argv import command_with, typing


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
