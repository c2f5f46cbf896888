"""Defines a runtime: how it opens a file, and how it reports its version.

    verify.runtimes=[onnxruntime,openvino,my_package.tvm.RUNTIME]

ONNX Runtime is measured by every check. Any other runtime opens the same files, is timed in a process of its
own (`timing`), and is compared with ONNX Runtime and the converted module (`qatkit.verify.checks.runtimes`).
To add a runtime, write a module with such a record, and list the record's dotted path. Nothing here imports a
runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qatkit_verify.dotted import dotted_path, resolve
from qatkit_verify.errors import ConfigError, first_line
from qatkit_verify.foreign import calling
from qatkit_verify.installed import install_extra

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A function from arrays by input name to all outputs of a file, in the file's order.
Execute = Callable[[Mapping[str, "NDArray[Any]"]], Sequence["NDArray[Any]"]]

_KEY = "verify.runtimes"
_KNOWN = {name: f"{__package__}.{name}.RUNTIME" for name in ("onnxruntime", "openvino")}
REFERENCE = "onnxruntime"


@dataclass(frozen=True)
class Runtime:
    """A runtime that can run ONNX files.

    Attributes:
        name: its name in reports.
        open: returns a function that runs an ONNX file, given the file and the number of threads. It computes
            in float32 wherever the file is float, and a later call does not change the outputs of an earlier
            one.
        versions: returns the versions of the packages that affect its figures; raises ImportError if the
            runtime is not installed.
        extra: the extra of qatkit-verify that installs the runtime; "" if there is none.
    """

    name: str
    open: Callable[[Path, int], Execute]
    versions: Callable[[], Mapping[str, str]]
    extra: str = ""


def load_runtimes(names: Iterable[str]) -> dict[str, Runtime]:
    """Returns the named runtimes, by dotted path.

    Raises:
        ConfigError: a name is unknown, a path leads to no `Runtime`, two have the same name, or one is not
            installed.
    """
    found: dict[str, Runtime] = {}
    for given in names:
        path = dotted(given)
        runtime = resolve(path, _KEY)
        if not isinstance(runtime, Runtime):
            raise ConfigError(_KEY, given, f"the dotted path of an object of type {__name__}.Runtime")
        if runtime.name in {one.name for one in found.values()}:
            raise ConfigError(
                _KEY, given, reason=f"the list has two runtimes named '{runtime.name}'; remove one"
            )
        _check_installed(given, runtime)
        found[path] = runtime
    return found


def other_runtimes(names: Iterable[str]) -> dict[str, Runtime]:
    """Returns the runtimes of `load_runtimes` without ONNX Runtime, which every other check measures."""
    return {path: one for path, one in load_runtimes(names).items() if one.name != REFERENCE}


def dotted(name: str) -> str:
    """Returns the dotted path for a name in `verify.runtimes`.

    Raises:
        ConfigError: the name is neither a known runtime nor a dotted path.
    """
    return dotted_path(name, _KNOWN, _KEY, "Runtime")


def _check_installed(given: str, runtime: Runtime) -> None:
    with calling(_KEY, given, runtime.versions):
        try:
            runtime.versions()
        except ImportError as error:
            install = f"install it with {install_extra(runtime.extra, 'qatkit-verify')}"
            told = install if runtime.extra else first_line(error)
            raise ConfigError(_KEY, given, f"an installed runtime ({told})") from error
