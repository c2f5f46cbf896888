"""Tests of the bounds of `verify`: each shortfall names its key, the required and the measured value."""

from __future__ import annotations

import dataclasses

from qatkit.config.schema import VerifyConfig
from qatkit.records.results import Audit, Parity, Results
from qatkit.verify.checks.base import default_checks
from qatkit.verify.thresholds import shortfalls
from qatkit_verify.classification import classified
from qatkit_verify.records import Comparison, Latency

GOOD = Results(
    name="run",
    model="resnet18",
    output_dir="out",
    accuracy={"float": classified(78.6, 98.0, 1000), "int8": classified(78.0, 97.9, 1000)},
    latency={"int8": Latency(2.0, 1.9, 2.2, 2.5, 2.4, 2.6, 1, 2, 50)},
    sizes={"float": 40_000_000, "int8": 10_400_000},
    parity=Parity(512, 0.1, "a step", Comparison(1.0, 0, 0, 0, 0), Comparison(0.9995, 0.1, 0, 1, 0)),
    audit=Audit((), {}, 1, 1, 2, (), 100, 100, ()),
)
STRICT = VerifyConfig(max_drop=1.0, min_agreement=0.999, max_size_ratio=0.27, min_speedup=2.0, audit=True)


def broken(config: VerifyConfig, results: Results) -> list[str]:
    """Returns the lines of the shortfalls."""
    return [one.line for one in shortfalls(default_checks(), config, results)]


def test_a_good_run_passes() -> None:
    assert broken(STRICT, GOOD) == []


def test_a_loss_of_just_the_bound_keeps_it() -> None:
    """In floating point, 78.5 - 78.3 is slightly more than 0.2."""
    accuracy = {"float": classified(78.5, None, 1000), "int8": classified(78.3, None, 1000)}
    found = dataclasses.replace(GOOD, accuracy=accuracy)
    assert broken(dataclasses.replace(STRICT, max_drop=0.2), found) == []
    assert broken(dataclasses.replace(STRICT, max_drop=0.199), found) != []


def test_each_bound_that_is_broken_is_one_line() -> None:
    bad = dataclasses.replace(
        GOOD,
        accuracy={"float": classified(78.6, None, 1000), "int8": classified(76.2, None, 1000)},
        latency={"int8": Latency(2.0, 1.9, 2.2, 1.25, 1.2, 1.3, 1, 2, 50)},
        sizes={"float": 40_000_000, "int8": 20_000_000},
        parity=Parity(512, 0.1, "a step", Comparison(1.0, 0, 0, 0, 0), Comparison(0.5, 9, 1, 90, 10)),
        audit=Audit((), {}, 1, 1, 2, (), 100, 50, ("float Conv 'a': why", "float Conv 'b': why")),
    )
    assert broken(STRICT, bad) == [
        "verify.max_drop=1.0: INT8 top-1 76.20 is 2.40 points below float 78.60",
        "verify.min_agreement=0.999: ONNX Runtime agrees with the converted module on 50.00 % of 512 images",
        "verify.max_size_ratio=0.27: the INT8 file has 0.500 times the size of the float file",
        "verify.min_speedup=2.0: INT8 runs 1.25 times as fast as float (2.00 ms, 2 threads)",
        "verify.audit=true: float Conv 'a': why (and 1 more)",
    ]


def test_null_checks_nothing() -> None:
    config = VerifyConfig(
        max_drop=None, min_agreement=None, max_size_ratio=None, min_speedup=None, audit=False
    )
    assert broken(config, Results("run", "m", "out")) == []


def test_a_bound_without_its_measurement_is_not_kept() -> None:
    lines = broken(STRICT, Results("run", "m", "out"))
    assert [line.partition("=")[0] for line in lines] == [
        "verify.max_drop",
        "verify.min_agreement",
        "verify.max_size_ratio",
        "verify.min_speedup",
        "verify.audit",
    ]
