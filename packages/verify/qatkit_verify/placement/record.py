"""placement.json: what was measured, on which machine, for which graph, and which operators are another than in the
backend's table.

Plain: nothing here needs torch or ONNX.
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
FLOAT, TABLE = "float", "fixed"  # names of the two files that always compete


@dataclass(frozen=True)
class Machine:
    """Where it was measured, and how.

    Attributes:
        cpu, isa: its name, and the instruction sets that decide int8 speed.
        onnxruntime: the version.
        threads, batch: of a run.
    """

    cpu: str
    isa: tuple[str, ...]
    onnxruntime: str
    threads: int
    batch: int

    def differs(self, other: Machine) -> list[str]:
        """What is another there, in words."""
        return [
            f"{name} {_plainly(mine)} (here {_plainly(theirs)})"
            for name, mine in asdict(self).items()
            if mine != (theirs := getattr(other, name)) and name != "isa"
        ]


@dataclass(frozen=True)
class Measured:
    """One file that competed.

    Attributes:
        name: "float", "fixed" (the backend's table), or a number.
        floats, opened: how many operators are float, and SiLUs int8 operators, beside the table.
        predicted_ms: before it was made; None of the files that predictions stand on.
        ms: the fastest run.
        ratio, low, high: the table's time over this file's: median, least and largest of the sessions.
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
    """A placement.

    Attributes:
        model, backend, input_shape: what it is of; (C, H, W).
        graph: a digest of the graph's operators and shapes.
        machine: that measured.
        sites: what is another than in the backend's table.
        files: that competed.
        chosen: the name of one of them.
        noise: by how much a file's ratio to the table differs from session to session, as a share, in the median.
        costs: of each site that is another, how many milliseconds more it is predicted to take as in the table.
        quiet: whether the machine did nothing else in a session; else a file needed a lead that no busy core explains.
        waited: of the time that the threads ran, what they waited for a core beside it.
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
        """A file by its name."""
        return next(one for one in self.files if one.name == name)

    def unrest(self) -> str:
        """What is to be said of a machine that was not quiet; "" of one that was."""
        if self.quiet:
            return ""
        waited = (
            f" (threads waited {100 * self.waited:.0f} % of their time for a core)" if self.waited else ""
        )
        taken = (
            "the table stays" if self.chosen == TABLE else "what was chosen leads by more than that explains"
        )
        return f"the machine was busy with other work while files were timed{waited}, so {taken}"

    def as_dict(self) -> dict[str, Any]:
        """Plain containers."""
        stored = asdict(self)
        stored["sites"] = self.sites.as_dict()
        return {"format": FORMAT, **stored}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Placed:
        """The inverse, also of what was JSON in the meantime.

        Raises:
            ValueError, KeyError, TypeError: it is none.
        """
        given = dict(stored)
        if (version := given.pop("format")) != FORMAT:
            raise ValueError(f"format {version}; this version reads {FORMAT}")
        machine = given["machine"]
        given["sites"] = Sites.from_dict(given["sites"])
        given["machine"] = Machine(**{**machine, "isa": tuple(machine["isa"])})
        given["files"] = tuple(Measured(**one) for one in given["files"])
        given["input_shape"] = tuple(given["input_shape"])
        placed = cls(**given)
        if missing := sorted({placed.chosen, FLOAT, TABLE} - {one.name for one in placed.files}):
            raise ValueError(f"no file {missing[0]!r} among those that competed")
        return placed


def write_placement(path: Path, placed: Placed) -> None:
    """Writes it, whole or not at all."""
    write_text(path, json.dumps(placed.as_dict(), indent=1) + "\n")


def read_placement(path: str | Path, key: str = "placement") -> Placed:
    """Reads one.

    Raises:
        ConfigError: no such file, or another kind of file.
    """
    try:
        return Placed.from_dict(read_json(Path(path)))
    except OSError as error:
        raise ConfigError(
            key, path, f"fixed, measured, or a placement.json that can be read ({error.strerror})"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ConfigError(
            key, path, f"a placement.json of a run with placement=measured ({reason})"
        ) from error


def check_fits(placed: Placed, model: str, backend: str, shape: tuple[int, ...], path: Any) -> None:
    """Refuses a placement of something else, by ConfigError that names what differs."""
    pairs = {"model.name": (placed.model, model), "backend": (placed.backend, backend),
             "input": (placed.input_shape, shape)}  # fmt: skip
    differ = [
        f"{name} {_plainly(theirs)} (here {_plainly(ours)})"
        for name, (theirs, ours) in pairs.items()
        if theirs != ours
    ]
    if differ:
        raise ConfigError("placement", path, f"a placement of this model; this one is of {', '.join(differ)}")


def check_graph(placed: Placed, digest: str, known: Iterable[str], path: Any) -> None:
    """Refuses a placement of another graph, by ConfigError with the operators that are not there."""
    if placed.graph == digest:
        return
    sites = list(known)
    missing = sorted((placed.sites.floats | placed.sites.opened) - set(sites))
    told = "its operators are called the same, but have other shapes or neighbours"
    if missing:
        told = f"there is no {missing[0]} here{did_you_mean(missing[0], sites)}"
    raise ConfigError(
        "placement", path, f"one that was measured on this graph ({told}); placement=measured makes one"
    )


def _plainly(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
