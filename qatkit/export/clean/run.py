"""Runs the requested services (see `qatkit.export.clean`) on a file, checks the result and stores it in a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import onnx_ir as ir

from qatkit.export.clean.drawn import Port, ports
from qatkit.export.clean.fix_shapes import fix_shapes
from qatkit.export.clean.float32 import to_float32
from qatkit.export.clean.fold import fold
from qatkit.export.clean.graphs import nodes
from qatkit.export.clean.layout import change_layout
from qatkit.export.clean.names import safe_names
from qatkit.export.clean.opset import to_opset
from qatkit.export.clean.proof import EQUAL, OF_HALVES, ROUNDED, Proof, prove
from qatkit.export.clean.rewrite.pairs import drop_pairs
from qatkit.export.clean.rewrite.run import APPROXIMATE, EXACT, SAME, rewrite
from qatkit.export.clean.shapes import fill_shapes
from qatkit.export.clean.store import check, store
from qatkit.export.clean.unshare import unshare

Row = tuple[str, str]  # a service and a line about what it changed


class Asked(NamedTuple):
    """The requested services (`qatkit.export.clean`): the settings of `clean`, with a default for `fold`."""

    fix_shapes: Mapping[str, Any]
    fold: str
    float32: bool
    layout: Mapping[str, str]
    opset: int | None
    unshare: bool
    names: str
    inputs: str | None
    rewrite: Sequence[str] = ()
    approximate: Sequence[str] = ()
    drop_pairs: Sequence[str] = ()

    @property
    def bound(self) -> float:
        """The signal-to-noise ratio in dB that outputs must reach; infinite if no value may change."""
        if self.float32:
            return OF_HALVES
        rounds = self.fold == "all" or self.opset is not None or not EXACT.issuperset(self.rewrite)
        return ROUNDED if rounds else EQUAL


@dataclass(frozen=True)
class Cleaned:
    """A cleaned file.

    Attributes:
        files: the files in a temporary folder, the model first.
        rows: the changes, each with its service.
        proof: the comparison of the original with the file before `approximate` and `drop_pairs`.
        error: the comparison of the original with the final file; None if neither of the two was requested.
        nodes: the numbers of nodes before and after cleaning.
        bytes: the sizes in bytes before and after cleaning.
    """

    files: list[Path]
    rows: list[Row]
    proof: Proof
    error: Proof | None
    nodes: tuple[int, int]
    bytes: tuple[int, int]


def clean(source: Path, model: ir.Model, asked: Asked, target: Path, threads: int) -> Cleaned:
    """Applies the services and compares the result with the original.

    Args:
        source: the file, with its external data next to it.
        model: the model in the file `source`.
        asked: the requested services.
        target: the path of the cleaned file, in a temporary folder.
        threads: the number of ONNX Runtime's threads.

    Raises:
        ConfigError: a service cannot be applied to the file, or the result does not compute the same outputs.
    """
    beside = _has_external(model)
    count = sum(1 for _ in nodes(model))
    wanted, ends = ports(model, source), [*model.graph.inputs, *model.graph.outputs]
    former = [str(value.name) for value in ends]
    model, wanted, rows = _prepared(source, model, asked, wanted)
    if asked.fold != "none":
        model, lines = fold(model, target.parent, exact=asked.fold == "exact", threads=threads)
        rows += [("fold", line) for line in lines]
    rows += [("rewrite", line) for line in rewrite(model, asked.rewrite, SAME, "clean.rewrite")]
    rows += [("layout", line) for line in change_layout(model, asked.layout)]
    rows += [("unshare", line) for line in (unshare(model) if asked.unshare else ())]
    rows += [("shapes", line) for line in fill_shapes(model)]
    if asked.names != "keep":
        rows += [("names", line) for line in safe_names(model, ends=asked.names == "all")]
    present = [str(value.name) for value in (*model.graph.inputs, *model.graph.outputs)]
    names = dict(zip(former, present, strict=True))

    joined = asked.fold == "all" and not asked.float32
    hint = "; try clean.fold=exact, which joins no operators" if joined else ""

    def stored(bound: float) -> tuple[list[Path], Proof]:
        files = store(model, target, beside=beside)
        check(target, source)
        return files, prove(source, target, wanted, layout=asked.layout, names=names, bound=bound,
                            inputs=asked.inputs, threads=threads, hint=hint)  # fmt: skip

    (files, found), error = stored(asked.bound), None
    if asked.approximate or asked.drop_pairs:
        lines = rewrite(model, asked.approximate, APPROXIMATE, "clean.approximate")
        changed = [("approximate", line) for line in lines]
        changed += [("drop_pairs", line) for line in drop_pairs(model, asked.drop_pairs)]
        fill_shapes(model)
        files, error = stored(-EQUAL)
        rows += [*changed, (changed[-1][0], _worst(error))]
    sizes = (source.stat().st_size, sum(path.stat().st_size for path in files))
    return Cleaned(files, rows, found, error, (count, sum(1 for _ in nodes(model))), sizes)


def _prepared(
    source: Path, model: ir.Model, asked: Asked, wanted: list[Port]
) -> tuple[ir.Model, list[Port], list[Row]]:
    """Changes types, opset and sizes.

    Returns:
        The model, its inputs (with fixed sizes, and with the types of the original file), and the changes.
    """
    rows: list[Row] = [("float32", line) for line in (to_float32(model) if asked.float32 else ())]
    if asked.opset is not None:
        model, lines = to_opset(source, model, asked.opset)
        rows += [("opset", line) for line in lines]
    rows += [("fix_shapes", line) for line in fix_shapes(model, asked.fix_shapes)]
    fixed = [
        Port(old.name, old.dtype, new.shape) for old, new in zip(wanted, ports(model, source), strict=True)
    ]
    return model, fixed, rows


def _worst(error: Proof) -> str:
    worst = min(error.outputs.values(), default=EQUAL)
    if worst == EQUAL:
        return "all outputs are equal to the original's"
    return f"the worst output has a signal-to-noise ratio of {worst:.1f} dB against the original's"


def _has_external(model: ir.Model) -> bool:
    held = (value.const_value for value in model.graph.initializers.values())
    return any(isinstance(tensor, ir.ExternalTensor) for tensor in held)
