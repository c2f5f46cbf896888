"""What a check is: something measured on the exported file, the bounds on it, and what is said of it.

    subject ── measure ──> Results ── shortfalls ──> lines for the exit status, each with its proposed fix
                                   └─ lines ───────> what the terminal says, and the page

A check of your own is a class in one file and a line in `verify.checks`. What no field of `Results` is made for,
it keeps as plain figures by its name: `results.with_measured(self.name, {...})`, which report.json holds.
Files that belong to no module are checked by the same classes: what needs one, `Subject` has not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from qatkit.records.results import Results
from qatkit.tasks import CLASSIFICATION, Task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from qatkit.config.schema import VerifyConfig
    from qatkit.progress import Batches
    from qatkit.verify.accuracy import Predictor
    from qatkit_verify.free_run import StepSequence

_SHOWN = 10  # lines of one kind before "and N more"


class Reference(Protocol):
    """The converted module: what the file was made of, and is held against."""

    def __call__(self, images: Any) -> NDArray[np.float32]:
        """The first output [N, ...] of normalised images [N, C, H, W]."""

    def integers(self, images: Any, file: Path) -> Mapping[str, NDArray[Any]]:
        """Its quantized tensors for `images`, by the names of the QuantizeLinear outputs of `file`."""


@dataclass(frozen=True)
class Subject:
    """What is checked.

    Attributes:
        folder: of the run.
        files: by name: "int8", the file to judge, "float", what it is compared with, and perhaps "dynamic", another
            int8 file of the same float file.
        batches: gives the test batches (images, labels) from the start.
        timed: gives what files are timed with, for a size of batch: the shape of a batch of noise, or arrays by
            the names of the inputs.
        settings: the group `verify` of the configuration.
        options: session config entries of the backend.
        predictors: what else has an accuracy, functions from images to outputs: "simulated", "control".
        reference: the converted module; None for a file that was made of no module.
        allow_float: operators left float on purpose, names or globs.
        other_runtime: of a file that another runtime executes, the module that knows what that takes.
        file_shape: an input that the files take, [N, C, H, W], or a batch by the names of the inputs; None: as the
            file says.
        label: what the file to judge is, in a word or two.
        labelled: whether the labels of the batches say anything.
        progress: whether bars are shown.
        sample: gives so many test images with their labels, balanced over the classes.
        held_out: gives the training images held out, (images, labels); None where there are none.
        task: whose metrics are measured.
        states: of a model with states, the output that such an input takes from the step before.
        sizes: of a file with free axes, other sizes than the example's: by input and axis.
        sequences: gives the sequences of steps that both files run through with their own states; None where there are
            no states.
        sound: the preparation of recordings as model.json has it; None of other samples.
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
        """So many images with their labels, of all classes alike; without a `sample` the first batches."""
        return [*self._first(count)] if self.sample is None else self.sample(count)

    def first_images(self, count: int) -> Iterator[Any]:
        """Whole batches of images, until there are `count`; a few at a time, as caches have room for."""
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
class Shortfall:
    """A bound that is not met.

    Attributes:
        line: what fell short; it begins with the key of the bound, "verify.max_drop=1.0: ...".
        fix: the proposed fix, as it is typed; "" where none is known.
        explained: whether another check measured the cause, which `fix` then removes.
    """

    line: str
    fix: str = ""
    explained: bool = False


class Check(ABC):
    """One thing that is measured. A class without arguments.

    Attributes:
        name: the key of its figures, and what the page calls it.
        early: it reads the files alone, and finds the same whatever their ranges are: its bounds are held at the
            first export already, before anything long.
    """

    name: ClassVar[str]
    early: ClassVar[bool] = False

    @abstractmethod
    def measure(self, subject: Subject, results: Results) -> Results:
        """A copy of `results` with this check's part filled in; earlier checks' parts are there already."""

    def shortfalls(self, bounds: VerifyConfig, results: Results) -> list[Shortfall]:
        """The bounds that are not met; one whose measurement is absent is not met either."""
        return []

    def explains(self, shortfall: Shortfall, results: Results) -> str | None:
        """The fix, as it is typed, where what was measured here causes another check's shortfall; else None."""
        return None

    def lines(self, results: Results) -> list[str]:
        """What the terminal says of it, and the page; empty where it says enough in the table."""
        return []


def load_checks(paths: Iterable[str]) -> list[Check]:
    """The checks at dotted paths, in their order.

    Raises:
        ConfigError: a path that leads nowhere, something else than a `Check`, or two of one name.
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
                "the dotted path of a class of qatkit.verify.checks.base.Check, with a name",
            )
        if found.name in checks:
            raise ConfigError("verify.checks", path, f"one check named '{found.name}', not two")
        check_call("verify.checks", path, found)
        with calling("verify.checks", path, found):
            checks[found.name] = found()
    return list(checks.values())


def default_checks() -> list[Check]:
    """Those that the configuration lists by itself."""
    from qatkit.config.schema import VerifyConfig

    return load_checks(VerifyConfig().checks)


def capped(title: str, items: Sequence[str]) -> list[str]:
    """A line for each of the first items, and how many more there are."""
    shown = [f"  {title}{item}" for item in items[:_SHOWN]]
    more = len(items) - len(shown)
    return [*shown, f"  ... and {more} more, see report.json"] if more else shown
