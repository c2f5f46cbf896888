"""Defines placement.json: which operators of a model run in int8 or float, by a measurement on one machine.

It stores the differences from the backend's table of operators. This module needs neither torch nor ONNX.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qatkit_verify.errors import ConfigError, did_you_mean
from qatkit_verify.files import write_text
from qatkit_verify.placement.sites import Sites
from qatkit_verify.untrusted import read_json

FORMAT = 1
FLOAT, TABLE = "float", "fixed"  # the two files that are always timed: in float, and by the backend's table


@dataclass(frozen=True)
class Machine:
    """The machine and the settings of a measurement.

    Attributes:
        cpu: the name of the CPU.
        isa: the names of its instruction sets that decide int8 speed.
        onnxruntime: the version of ONNX Runtime.
        threads, batch: the number of threads and the batch size of a run.
    """

    cpu: str
    isa: tuple[str, ...]
    onnxruntime: str
    threads: int
    batch: int

    def differs(self, other: Machine) -> list[str]:
        """Returns descriptions of what differs on the other machine; instruction sets are not compared."""
        return [
            f"{name} {_plainly(mine)} (here {_plainly(theirs)})"
            for name, mine in asdict(self).items()
            if mine != (theirs := getattr(other, name)) and name != "isa"
        ]


@dataclass(frozen=True)
class Measured:
    """The timings of one file in the measurement of a placement.

    Attributes:
        name: "float", "fixed" (placed by the backend's table), "opened" (all SiLUs in int8), "even" (every
            other operator in float), or the number of a predicted file.
        floats: the number of operators that are float in addition to those of the table.
        opened: the number of SiLUs that are int8 operators in addition to those of the table.
        predicted_ms: the time that was predicted before the file was made; None if none was, as for the files
            on which predictions are based.
        ms: the time of the fastest run.
        ratio, low, high: the speed-up over the file "fixed" (its time divided by this file's): median,
            minimum and maximum over the sessions.
    """

    name: str
    floats: int
    opened: int
    predicted_ms: float | None
    ms: float
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Placed:
    """A placement, and the measurement that chose it.

    Attributes:
        model, backend, input_shape: the model, backend and (C, H, W) that it belongs to.
        graph: a digest of the graph's operators and shapes.
        machine: the machine that measured.
        sites: the differences of the chosen file from the backend's table.
        files: all timed files.
        chosen: the name of the chosen file.
        noise: the variation of a file's `ratio` between sessions, as a share; median of the files.
        costs: for each operator in `sites`, by path, by how many milliseconds the file is predicted to become
            slower if this operator is placed as in the table; empty if nothing was predicted.
        quiet: whether the machine did nothing else in at least one session. If not, only a lead that no busy
            core explains was accepted.
        waited: the time that the threads waited for a core, relative to the time that they ran.
    """

    model: str
    backend: str
    input_shape: tuple[int, ...]
    graph: str
    machine: Machine
    sites: Sites
    files: tuple[Measured, ...]
    chosen: str
    noise: float
    costs: Mapping[str, float] = field(default_factory=dict)
    quiet: bool = True
    waited: float = 0.0

    def of(self, name: str) -> Measured:
        """Returns the timings of the file with the given name."""
        return next(one for one in self.files if one.name == name)

    def unrest(self) -> str:
        """Returns a remark if the machine was not quiet, else ""."""
        if self.quiet:
            return ""
        waited = (
            f" (threads waited {100 * self.waited:.0f} % of their time for a core)" if self.waited else ""
        )
        taken = (
            "the backend's table is kept"
            if self.chosen == TABLE
            else "a file had to be clearly faster than the backend's table to be chosen"
        )
        return f"the machine was busy with other work while files were timed{waited}, so {taken}"

    def as_dict(self) -> dict[str, Any]:
        """Returns the placement as plain containers for JSON."""
        stored = asdict(self)
        stored["sites"] = self.sites.as_dict()
        return {"format": FORMAT, **stored}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Placed:
        """Reads a placement from the output of `as_dict`, also after a round trip through JSON.

        Raises:
            ValueError, KeyError, TypeError: the record is not a placement.
        """
        given = dict(stored)
        if (version := given.pop("format")) != FORMAT:
            raise ValueError(f"format {version}; this version reads format {FORMAT}")
        machine = given["machine"]
        given["sites"] = Sites.from_dict(given["sites"])
        given["machine"] = Machine(**{**machine, "isa": tuple(machine["isa"])})
        given["files"] = tuple(Measured(**one) for one in given["files"])
        given["input_shape"] = tuple(given["input_shape"])
        placed = cls(**given)
        if missing := sorted({placed.chosen, FLOAT, TABLE} - {one.name for one in placed.files}):
            raise ValueError(f"{missing[0]!r} is not among its files")
        return placed


def write_placement(path: Path, placed: Placed) -> None:
    """Writes a placement, completely or not at all."""
    write_text(path, json.dumps(placed.as_dict(), indent=1) + "\n")


def read_placement(path: str | Path, key: str = "placement") -> Placed:
    """Reads a placement.

    Raises:
        ConfigError: the file cannot be read, or is not a placement of this format.
    """
    try:
        return Placed.from_dict(read_json(Path(path)))
    except OSError as error:
        raise ConfigError(
            key, path, f"fixed, measured, or a placement.json that can be read ({error.strerror})"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ConfigError(
            key, path, f"a placement.json of a run with placement=measured ({reason})"
        ) from error


def check_fits(placed: Placed, model: str, backend: str, shape: tuple[int, ...], path: Any) -> None:
    """Raises ConfigError, which names the differences, if model, backend or input shape differ."""
    pairs = {"model.name": (placed.model, model), "backend": (placed.backend, backend),
             "input": (placed.input_shape, shape)}  # fmt: skip
    differ = [
        f"{name} {_plainly(theirs)} (here {_plainly(ours)})"
        for name, (theirs, ours) in pairs.items()
        if theirs != ours
    ]
    if differ:
        raise ConfigError(
            "placement", path, f"a placement for this model, backend and input; found {', '.join(differ)}"
        )


def check_graph(placed: Placed, digest: str, known: Iterable[str], path: Any) -> None:
    """Raises ConfigError, which names a missing operator, if the placement was measured on another graph.

    If none is missing, the message says that shapes or connections differ.
    """
    if placed.graph == digest:
        return
    sites = list(known)
    missing = sorted((placed.sites.floats | placed.sites.opened) - set(sites))
    told = "its operators have the same names, but other shapes or neighbours"
    if missing:
        told = f"there is no {missing[0]} here{did_you_mean(missing[0], sites)}"
    raise ConfigError(
        "placement",
        path,
        f"a placement that was measured on this graph ({told}); placement=measured writes one",
    )


def _plainly(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
