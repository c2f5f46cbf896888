"""Tests of errors about keys that a typed option, recipe or short key sets: they name what was typed."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import CONF

from qatkit.config.origins import error_as_typed
from qatkit_verify.errors import ConfigError

CASES = [
    (
        ["trainer=gpu"], ConfigError("trainer.accelerator", "gpu", "auto or cpu"),
        "trainer=gpu: the option sets trainer.accelerator=gpu; expected auto or cpu",
    ),
    (
        ["trainer=ddp", "rescue=ladder"], ConfigError("trainer.devices", -1, "1 with rescue.climb=true"),
        "trainer=ddp: the option sets trainer.devices=-1; expected 1 with rescue.climb=true; "
        "rescue=ladder sets rescue.climb=true",
    ),
    (  # an option that another one names as its default
        ["export=release", "export.mode=static"], ConfigError("export.io", "float32", "uint8"),
        "export=release: the option sets export.io=float32; expected uint8",
    ),
    (  # YAML reads 1e-5 as a text
        ["schedule=qat_adamw"], ConfigError("schedule.lr", 1e-5, "more"),
        "schedule=qat_adamw: the option sets schedule.lr=1e-05; expected more",
    ),
    (
        ["recipe=vit_qat"], ConfigError("verify.max_size_ratio", 0.27, "null with schedule.optimizer=adamw"),
        "verify.max_size_ratio=0.27: expected null with schedule.optimizer=adamw; "
        "recipe=vit_qat sets verify.max_size_ratio=0.27 and schedule.optimizer=adamw",
    ),
    (
        ["onnx=a.onnx"], ConfigError("model.name", "onnx/a.onnx", "another file"),
        "onnx=a.onnx: expected another file",
    ),
    (
        ["onnx=a.onnx"], ConfigError("model.weights", "DEFAULT", "null with model.name=onnx/a.onnx"),
        "model.weights=DEFAULT: expected null with onnx=a.onnx",
    ),
    (["trainer=gpu", "trainer.accelerator=gpu"], ConfigError("trainer.accelerator", "gpu", "cpu"), None),
    (["trainer=gpu"], ConfigError("trainer.accelerator", "cuda", "auto or cpu"), None),
    (["trainer=gpu"], ConfigError("schedule.lr", 0.001, "more"), None),  # a default
    (["+algorithm={x:1}"], ConfigError("algorithm.x", 1, "{target: ...}"), None),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "error", "message"), CASES)
def test_an_error_names_what_was_typed(typed: list[str], error: ConfigError, message: str | None) -> None:
    told = error_as_typed(error, CONF, typed)
    assert told is error if message is None else str(told) == message


def test_options_of_ones_own_are_found_first(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "gpu.yaml").write_text("defaults: [cpu]\ndevices: 9\n")
    (tmp_path / "trainer" / "broken.yaml").write_text("devices: [")
    nine = ConfigError("trainer.devices", 9, "1")
    told = error_as_typed(nine, CONF, ["trainer=gpu"], [str(tmp_path)])
    assert str(told) == "trainer=gpu: the option sets trainer.devices=9; expected 1"
    cpu = ConfigError("trainer.accelerator", "cpu", "gpu")
    assert error_as_typed(cpu, CONF, ["trainer=gpu"], [str(tmp_path)]).value == "gpu"
    assert error_as_typed(nine, CONF, ["trainer=broken"], [str(tmp_path)]) is nine
