"""Tests of the report's line on a measured placement: it says whether the file used was the fastest."""

from __future__ import annotations

import pytest

from qatkit.report.placement import chosen_line
from qatkit_verify.placement.record import FLOAT, TABLE, Machine, Measured, Placed
from qatkit_verify.placement.sites import Sites


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (TABLE, "no clearly faster one among 2 quantized files, timed in alternation"),
        ("1", "the fastest of 2 quantized files, timed in alternation"),
    ],
)
def test_a_kept_table_is_not_called_the_fastest(chosen: str, said: str) -> None:
    files = tuple(
        Measured(name, 0, 0, None, ms, 1.0, 1.0, 1.0)
        for name, ms in ((FLOAT, 0.9), (TABLE, 1.0), ("1", 0.98))
    )
    machine = Machine("cpu", (), "1.31", 1, 1)
    placed = Placed("net", "fbgemm", (3, 8, 8), "0", machine, Sites(), files, chosen, 0.05)
    assert said in chosen_line(placed)
