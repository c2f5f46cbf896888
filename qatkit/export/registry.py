"""Caches what torch's exporter would otherwise build again for every file.

This saves 0.5 of the 1.2 s of CPU time that the export of a small model takes (torch 2.13). A run exports at least
three files, and a search for mixed precision exports two dozen.

    The table of translations to ONNX, built from the source of about 500 functions, is built once per process.
    The search for composite operators in all libraries, otherwise repeated sixty times per file, runs once per file.
    The source line of each operator, which the file does not contain, is never looked up.

None of this has a public interface. If torch's internals differ from what is expected here, nothing is cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import StackSummary
from typing import Any

from qatkit.export.replaced import replaced

_known: dict[int, Any] = {}  # tables of translations by opset


@contextmanager
def tables_made_once() -> Iterator[None]:
    """Within the context of one export, reuses results of earlier exports."""
    with _translations_made_once(), _composites_found_once(), _lines_left_out():
        yield


@contextmanager
def _composites_found_once() -> Iterator[None]:
    """Searches for newly registered operators only once within the context."""
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
    """Records no stack traces for the nodes of traced graphs within the context."""
    from torch.fx import proxy

    if not hasattr(proxy, "CapturedTraceback"):
        yield
        return
    with replaced(proxy, "CapturedTraceback", _NoTraceback):
        yield


class _NoTraceback:
    """A traceback without frames, in place of `torch.utils._traceback.CapturedTraceback`."""

    @classmethod
    def extract(cls, **_: Any) -> _NoTraceback:
        return cls()

    def summary(self) -> StackSummary:
        return StackSummary()


@contextmanager
def _translations_made_once() -> Iterator[None]:
    """Gives an export within the context a copy of the table that the first export at the same opset built.

    It is a copy because exports extend their table.
    """
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
