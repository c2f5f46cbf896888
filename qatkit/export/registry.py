"""Caches what torch's exporter otherwise builds again for every file.

This saves 0.5 of the 1.2 s of CPU time that the export of a small model takes (torch 2.13). A run exports at
least
three files, and a search for mixed precision exports two dozen.

    its table of translations to ONNX, from the source of some hundred functions      once a process
    its look at every composite operator of every library, sixty times for one file   once a file
    the lines of Python that each operator comes from, which no file keeps            never

None of them has a public interface; if torch's internals differ from what is expected here, nothing is
cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import StackSummary
from typing import Any

from qatkit.export.replaced import replaced

_known: dict[int, Any] = {}  # by opset


@contextmanager
def tables_made_once() -> Iterator[None]:
    """Provides the context of one export."""
    with _translations_made_once(), _composites_found_once(), _lines_left_out():
        yield


@contextmanager
def _composites_found_once() -> Iterator[None]:
    """Looks only once, within the context, for operators registered since the last export."""
    from torch._export import utils

    find = getattr(utils, "_materialize_cpp_cia_ops", None)
    if find is None:
        yield
        return
    find()
    with replaced(utils, "_materialize_cpp_cia_ops", lambda: None):
        yield


@contextmanager
def _lines_left_out() -> Iterator[None]:
    """Suppresses the stack traces of nodes of a traced graph within the context."""
    from torch.fx import proxy

    if not hasattr(proxy, "CapturedTraceback"):
        yield
        return
    with replaced(proxy, "CapturedTraceback", _NoTraceback):
        yield


class _NoTraceback:
    """A traceback of no frames, in the place of `torch.utils._traceback.CapturedTraceback`."""

    @classmethod
    def extract(cls, **_: Any) -> _NoTraceback:
        return cls()

    def summary(self) -> StackSummary:
        return StackSummary()


@contextmanager
def _translations_made_once() -> Iterator[None]:
    """Gives an export, within the context, a copy of the first export's table, which it may extend."""
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        make = vars(ONNXRegistry)["from_torchlib"].__func__
        fields = vars(ONNXRegistry()).keys()
    except (ImportError, KeyError, AttributeError):
        fields = None
    if fields != {"_opset_version", "functions"}:
        yield
        return

    def copy_of_known(cls: type[Any], opset_version: int) -> Any:
        if opset_version not in _known:
            _known[opset_version] = make(cls, opset_version)
        table, found = cls(), _known[opset_version]
        table._opset_version = found._opset_version
        table.functions = {name: list(ways) for name, ways in found.functions.items()}
        return table

    with replaced(ONNXRegistry, "from_torchlib", classmethod(copy_of_known)):
        yield
