"""The base class of algorithms, and their selection by the configuration.

    algorithm:                                        # an ordered mapping: NAME → target and settings
      equalize: {target: qatkit.algorithms.Equalize, relu6: keep}
      mine: {target: my_package.Mine, strength: 0.5}

Algorithms run in the order of their stages, and within a stage as listed. A new algorithm needs two files: a
subclass of `Algorithm`, and `conf/algorithm/NAME.yaml` with the entry above.

`--help` and the check of a command line import the modules of algorithms. These modules therefore contain only
settings; they import the computing code, and torch, only when they are called.
"""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from qatkit.config.field_types import checked
from qatkit.config.fields import check_limits
from qatkit.graph.pass_result import PassResult
from qatkit_verify.dotted import resolve
from qatkit_verify.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from torch import fx

FUSED, PREPARED, CALIBRATED, OBSERVED = STAGES = ("fused", "prepared", "calibrated", "observed")
WITH_IMAGES = (OBSERVED, CALIBRATED)
_ORDER = (FUSED, PREPARED, OBSERVED, CALIBRATED)


class Algorithm(ABC):
    """A change to a model's parameters that needs no labels. Subclasses are frozen dataclasses; fields are settings.

    Attributes:
        stage: when it is called, and with what:
            "fused"        after fuse and stub, before prepare_qat, with an example: an image [1, C, H, W], or a
                           tuple of the model's inputs;
            "prepared"     after prepare_qat, before calibration, with an example as well;
            "observed"     just before calibration, with batches of calibration images: it changes weights or biases
                           according to the activations and keeps the model's function; ranges are found
                           afterwards;
            "calibrated"   after calibration, with batches of calibration images: ranges are available.
            For a model with several inputs each batch is a tuple of tensors in the graph's order.
        images: the number of calibration images that it needs (observed, calibrated).
        weights_alone: whether it needs a weight-only backend (`backend=weight_only`).
        formats: whether it also supports weights and activations in number formats such as float8 or mxfp4
            (`backend=simulated`).
        expensive: whether it trains weights and thus takes more than a few passes over the images. Where
            `qatkit.choose` selects among algorithms, an expensive one is tried only while the target is
            missed.
        changes_weights: whether it writes into weights. If it changes only biases and quantizers, the graph
            can share the weights with the float model.
        rescales: whether it multiplies channels of weights and activations by factors, so that a scale or range that
            was given for the float model no longer fits.
    """

    stage: ClassVar[str]
    expensive: ClassVar[bool] = False
    weights_alone: ClassVar[bool] = False
    formats: ClassVar[bool] = False
    changes_weights: ClassVar[bool] = True
    rescales: ClassVar[bool] = False
    images: int = 0

    def __post_init__(self) -> None:
        check_limits(self, type(self).__name__)

    @abstractmethod
    def __call__(self, graph_module: fx.GraphModule, inputs: Any) -> PassResult:
        """Changes the graph in place, and returns what was changed and what was skipped.

        Args:
            graph_module: the graph, at the algorithm's stage.
            inputs: an example or batches of images, depending on the stage.
        """

    def notes(self, graph_module: fx.GraphModule) -> list[tuple[str, str]]:
        """Returns (site, reason) of the operators that a call leaves unchanged.

        This is determined only from the structure of the prepared graph. An algorithm that gets images is not
        called when a run is resumed, since its changes are in the checkpoint. The report must list the same
        operators nevertheless. The other algorithms are called whenever a module is built, so they report
        these operators in `PassResult.skipped`.
        """
        return []


def algorithms_of(chosen: Mapping[str, Any]) -> dict[str, Algorithm]:
    """Returns the algorithms of a configuration by their names, in the order in which they run.

    Args:
        chosen: `Config.algorithm`, whose structure `validate` has checked.

    Raises:
        ConfigError: a target cannot be imported or is not a dataclass derived from `Algorithm` that defines
            `__call__` and a known stage; a setting is unknown or has no value; or a value has another type or is
            out of range, such as `images` below 1 in a stage that needs images.
    """
    made = {name: _algorithm(f"algorithm.{name}", entry) for name, entry in chosen.items()}
    return dict(sorted(made.items(), key=lambda item: _ORDER.index(item[1].stage)))


def _algorithm(key: str, entry: Mapping[str, Any]) -> Algorithm:
    owner = resolve(entry["target"], f"{key}.target")
    if not (
        inspect.isclass(owner) and issubclass(owner, Algorithm) and dataclasses.is_dataclass(owner)
    ) or inspect.isabstract(owner):
        allowed = (
            "the dotted path of a dataclass derived from qatkit.algorithms.Algorithm that defines __call__"
        )
        raise ConfigError(f"{key}.target", entry["target"], allowed)
    if getattr(owner, "stage", None) not in STAGES:
        raise ConfigError(
            f"{key}.target",
            entry["target"],
            f"an algorithm whose stage is {', '.join(STAGES[:-1])} or {STAGES[-1]}",
        )
    settings = {name: value for name, value in entry.items() if name != "target"}
    fields = {one.name: one for one in dataclasses.fields(owner)}
    for name, value in settings.items():
        if name not in fields:
            near = did_you_mean(f"{key}.{name}", [f"{key}.{field}" for field in fields])
            raise ConfigError(f"{key}.{name}", value, reason=f"the algorithm has no such setting{near}")
        settings[name] = checked(owner, name, f"{key}.{name}", value)
    for name, one in fields.items():
        if name not in settings and one.default is one.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{key}.{name}", None, "a value, because the setting has no default")
    made: Algorithm = owner(**settings)
    if made.stage in WITH_IMAGES and made.images < 1:
        if "images" in settings:
            allowed = f"an integer of at least 1, because the algorithm's stage is {made.stage}"
            raise ConfigError(f"{key}.images", made.images, allowed)
        allowed = f"an algorithm whose field `images` is at least 1, because its stage is {made.stage}"
        raise ConfigError(f"{key}.target", entry["target"], allowed)
    return made
