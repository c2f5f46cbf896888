"""Tests of the progress bar over batches when the output is not a terminal."""

from __future__ import annotations

import re

import pytest

from qatkit import progress


@pytest.mark.parametrize(("every", "told"), [(0.0, ["25", "50", "75", "100"]), (3600.0, ["100"])])
def test_a_log_is_told_how_far_it_is(
    every: float, told: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_EVERY", every)
    batches = [(None, range(5))] * 4
    assert list(progress.shown(batches, "accuracy", progress=True)) == batches
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert all(line.startswith("accuracy") for line in lines)
    assert [re.findall(r"(\d+)%", line)[0] for line in lines] == told
    assert "samples/s" in lines[-1]
