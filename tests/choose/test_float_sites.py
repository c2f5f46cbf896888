"""Tests of the float operators in precision and placement records, and of the overrides made from them."""

from __future__ import annotations

import json

import pytest

from qatkit.config.float_overrides import float_overrides
from qatkit.config.schema import OverrideConfig
from qatkit.records.precision import Precision, PrecisionPoint
from qatkit_verify.placement.sites import Sites, read_float_sites


def test_both_records_come_back_from_their_files() -> None:
    point = PrecisionPoint(0, ("conv2", "conv1"), 2, 1.0, 1.0, 2.0, None, 0.9, 20.0, chosen=True)
    front = Precision((point,), 2, 1, 32, "")
    assert Precision.from_dict(json.loads(json.dumps(front.as_dict()))) == front  # the order is kept
    sites = Sites(frozenset({"b", "a"}), frozenset({"silu"}))
    assert sites.as_dict() == {"float": ["a", "b"], "int8": ["silu"]}
    assert Sites.from_dict(json.loads(json.dumps(sites.as_dict()))) == sites and sites.float_sites == (
        "a",
        "b",
    )


def test_overrides_come_in_the_order_of_the_sites() -> None:
    assert list(float_overrides(("b", "a")).items()) == [
        ("b", OverrideConfig(float=True)),
        ("a", OverrideConfig(float=True)),
    ]


@pytest.mark.parametrize("stored", [[1], "abc", ["a", None]])
def test_what_are_no_names_is_refused(stored: list[object]) -> None:
    with pytest.raises(ValueError, match="names of operators"):
        read_float_sites(stored)
