"""Defines a check: something measured on the exported file, the bounds on it, and the lines that report it.

    subject ── measure ──> Results ── shortfalls ──> missed bounds for the exit status, each with a proposed fix
                                   └─ lines ───────> lines for the terminal and report.html

To add a check, write a class in one file and add a line to `verify.checks`. Figures for which `Results` has
no field are kept under the check's name by `results.with_measured(self.name, {...})`; report.json has them.
The same classes check files that belong to no module; `Subject` then lacks the fields that need one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from qatkit.records.fixes import Fix
from qatkit.records.results import Results
from qatkit.tasks import CLASSIFICATION, Task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from qatkit.config.schema import VerifyConfig
    from qatkit.progress import Batches
    from qatkit.verify.accuracy import Predictor
    from qatkit_verify.free_run import StepSequence

_SHOWN = 10  # maximum number of lines of one kind before "and N more"


class Reference(Protocol):
    """The converted module, from which the file was made and which is the reference for it."""

    def __call__(self, images: Any) -> NDArray[np.float32]:
        """Returns the first output [N, ...] of normalised images [N, C, H, W]."""

    def integers(self, images: Any, file: Path) -> Mapping[str, NDArray[Any]]:
        """Returns the module's quantized tensors for `images`, by the names of `file`'s quantized tensors."""


@dataclass(frozen=True)
class Subject:
    """The files to check, their data and their settings.

    Attributes:
        folder: the folder of the run.
        files: the files by name: "int8" is the file to judge, "float" the file to compare it with, and
            "dynamic", if present, another int8 file of the same float file.
        batches: returns the test batches, (images, labels), from the start.
        timed: returns the input for timing at a batch size: the shape of a batch of noise, or arrays by input
            name.
        settings: the group `verify` of the configuration.
        options: the backend's session config entries.
        predictors: other functions from images to outputs whose accuracy is measured: "simulated", "control".
        reference: the converted module; None for a file that was not made from a module.
        allow_float: names or globs of operators that are float on purpose.
        other_runtime: for a file that another runtime executes, the module that knows what that runtime
            accepts.
        file_shape: the shape of an input that the files accept, [N, C, H, W], or a batch by input name; None: the
            shapes that the file declares.
        label: a word or two that name the file to judge.
        labelled: whether the labels of the batches are meaningful.
        progress: whether to show progress bars.
        sample: returns the given number of test images with their labels, balanced over the classes; None: the
            first batches are used.
        held_out: returns the held-out training images, (images, labels); None if there are none.
        task: the task whose metrics are measured.
        states: for a model with states, the output that feeds each state input in the next step.
        sizes: for a file with dynamic axes, sizes other than the example's, by input and axis.
        sequences: returns the sequences of steps that both files run through with their own states; None if
            there are no states.
        sound: the preprocessing of recordings, as in model.json; None for other samples.
    """

    folder: Path
    files: Mapping[str, Path]
    batches: Callable[[], Batches]
    timed: Callable[[int], Sequence[int] | Mapping[str, Any]]
    settings: VerifyConfig
    options: Mapping[str, str] = field(default_factory=dict)
    predictors: Mapping[str, Predictor] = field(default_factory=dict)
    reference: Reference | None = None
    allow_float: Collection[str] = ()
    other_runtime: str = ""
    file_shape: Sequence[int] | Mapping[str, Any] | None = None
    label: str = "INT8"
    labelled: bool = True
    progress: bool = False
    sample: Callable[[int], Batches] | None = None
    held_out: Callable[[], Batches] | None = None
    task: Task = CLASSIFICATION
    states: Mapping[str, str] = field(default_factory=dict)
    sequences: Callable[[], Iterator[StepSequence]] | None = None
    sizes: Sequence[Mapping[str, Mapping[int, int]]] = ()
    sound: Mapping[str, Any] | None = None

    def some(self, count: int) -> Batches:
        """Returns `count` labelled images, balanced over the classes; without `sample` the first batches."""
        return [*self._first(count)] if self.sample is None else self.sample(count)

    def first_images(self, count: int) -> Iterator[Any]:
        """Yields the first batches that together have at least `count` images, in parts that fit the caches."""
        from qatkit.verify.accuracy import parts

        for images, _ in self._first(count):
            yield from parts(images)

    def _first(self, count: int) -> Iterator[tuple[Any, Any]]:
        from qatkit_verify.feeds import rows

        seen = 0
        for images, labels in self.batches():
            yield images, labels
            seen += rows(images)
            if seen >= count:
                return


@dataclass(frozen=True)
class Speeds:
    """The speeds and counts from which a check estimates its time before there is a finished file.

    Attributes:
        of: returns the measured seconds per sample, by name: of a file ("float", "int8", or "unoptimized" for
            the int8 file without optimizations), of another predictor ("simulated", "control"), of the
            converted module ("converted"), or of loading ("load"). Raises an exception if a speed is unknown.
        files: the names of the files that are measured.
        predictors: the names of the other predictors.
        images: the number of samples on which accuracy is measured.
        tests: the number of samples in the test split.
        labelled: whether the labels are meaningful.
    """

    of: Callable[[str], float]
    files: Sequence[str]
    predictors: Sequence[str]
    images: int
    tests: int
    labelled: bool = True

    def each(self, *names: str) -> float:
        """Returns the seconds to load a sample and to run it through each of `names`."""
        return sum(map(self.of, ("load", *names)))


@dataclass(frozen=True)
class Shortfall:
    """A bound that is not met.

    Attributes:
        line: what fell short, in one line that begins with the key of the bound: "verify.max_drop=1.0: ...".
        fixes: the alternative ways to meet the bound, the best first; () if none is known.
        explained: whether another check measured the cause, which `fixes` then remove.
    """

    line: str
    fixes: Sequence[Fix] = ()
    explained: bool = False


class Check(ABC):
    """A measurement with its bounds. Its class is called without arguments.

    Attributes:
        name: the key of its figures, and its name in report.html.
        early: whether it reads only the files, and its result does not depend on their quantization ranges.
            Its bounds are then checked right after the first export, before any long work.
    """

    name: ClassVar[str]
    early: ClassVar[bool] = False

    @abstractmethod
    def measure(self, subject: Subject, results: Results) -> Results:
        """Returns a copy of `results` with this check's part; the parts of earlier checks are present."""

    def estimate(self, settings: VerifyConfig, speeds: Speeds) -> float:
        """Returns the seconds that `measure` will take, for the plan of a run; 0 if they are negligible."""
        return 0.0

    def shortfalls(self, bounds: VerifyConfig, results: Results) -> list[Shortfall]:
        """Returns the bounds that are not met; a bound whose measurement is missing counts as not met."""
        return []

    def explains(self, shortfall: Shortfall, results: Results) -> Sequence[Fix] | None:
        """Returns the fixes if this check found the cause of another check's shortfall; None otherwise."""
        return None

    def lines(self, results: Results) -> list[str]:
        """Returns the lines for the terminal and report.html; empty if the table of results says enough."""
        return []


def load_checks(paths: Iterable[str]) -> list[Check]:
    """Loads the checks at dotted paths, in their order.

    Raises:
        ConfigError: a path does not resolve or does not lead to a `Check`, two checks have the same name, or a
            class cannot be called without arguments.
    """
    from qatkit_verify.dotted import resolve
    from qatkit_verify.errors import ConfigError
    from qatkit_verify.foreign import calling, check_call

    checks: dict[str, Check] = {}
    for path in paths:
        found = resolve(path, "verify.checks")
        if (
            not (isinstance(found, type) and issubclass(found, Check))
            or found.__abstractmethods__
            or not getattr(found, "name", "")
        ):
            raise ConfigError(
                "verify.checks",
                path,
                "the dotted path of a class derived from qatkit.verify.checks.base.Check, with name and measure",
            )
        if found.name in checks:
            reason = f"the list has two checks named '{found.name}'; remove one"
            raise ConfigError("verify.checks", path, reason=reason)
        check_call("verify.checks", path, found)
        with calling("verify.checks", path, found):
            checks[found.name] = found()
    return list(checks.values())


def default_checks() -> list[Check]:
    """Returns the checks that the configuration lists by default."""
    from qatkit.config.schema import VerifyConfig

    return load_checks(VerifyConfig().checks)


def capped(title: str, items: Sequence[str]) -> list[str]:
    """Returns a line for each of the first items, and a line with the number of the others."""
    shown = [f"  {title}{item}" for item in items[:_SHOWN]]
    more = len(items) - len(shown)
    return [*shown, f"  ... and {more} more, see report.json"] if more else shown
