"""Checks by the noise in dB, not only by decisions, whether ONNX Runtime still computes what was verified.

A version can silently change what a file computes. ONNX Runtime 1.32 turns products of 16-bit activations,
which were exact before, into MatMulNBits, which quantizes the activations to 8 bits. The SQNR is then 39 dB,
and most decisions stay the same. So the outputs for the golden inputs on this machine ("here") are compared
with those of the machine that made the bundle ("there"). The noise is relative to the power of the answers:

    optimized here       against optimized there     the noise that is judged
    optimized there      against as written there    noise that optimizations may cause
    as written here      against as written there    noise that versions and processors may cause in float

The first may be up to ten times the sum of the other two. The answers of a file that rounds to 8 bits may
move by whole steps, which can exceed this limit. They still pass if they are within the tolerance of the
golden answers, unless ONNX Runtime adds a MatMulNBits here that quantizes activations to 8 bits.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qatkit_verify.bundle.golden import away
from qatkit_verify.checks.base import OK, SHORT, CheckInputs, Found
from qatkit_verify.feeds import Array
from qatkit_verify.installed import untested
from qatkit_verify.onnx_file import Node, OnnxFile, read_onnx
from qatkit_verify.session import (
    ACCURACY_LEVEL,
    RUNTIME_VERSION,
    SESSION_OPTIONS,
    UNSET_OPTIONS,
    open_session,
)

_TIMES = 10.0  # maximum factor over the explained noise: 10 dB
_FLOOR = 1e-8  # 80 dB: float32 in another order, and 16-bit values that round the other way
_UNKNOWN = "the version that verified it"
_INT8_LEVEL = 4  # the accuracy level of MatMulNBits that rounds its activations to 8 bits
_WIDE = frozenset({4, 5, 6, 12})  # uint16, int16, int32 and uint32 of TensorProto.DataType
_ROUNDS = (
    "QLinear",
    "QGemm",
    "MatMulIntegerToFloat",
    "Dynamic",
)  # prefixes of the names of operators that round to 8 bits


@dataclass(frozen=True)
class _Noise:
    """The noise between the golden answers and those here, as shares of the answers' power.

    Attributes:
        here: the noise between the optimized answers here and there.
        there: the noise between the optimized answers and those as written, both there.
        written: the noise between the answers as written here and there.
        steps: the largest distance between the optimized answers here and there, in steps of the output.
    """

    here: float
    there: float
    written: float
    steps: float

    @property
    def explained(self) -> bool:
        """Returns whether `there` and `written` explain the noise `here`."""
        return self.here <= _TIMES * (self.there + self.written) + _FLOOR


def runtime(asked: CheckInputs) -> Found:
    """Compares this ONNX Runtime's answers with those of the version that verified the file."""
    there = asked.manifest.onnxruntime or asked.manifest.made_by.get("onnxruntime") or _UNKNOWN
    noise = _measured(asked, asked.answers[True])
    nodes = _made_here(asked)
    culprits = [node.name for node in nodes if node.ints.get("accuracy_level") == _INT8_LEVEL]
    stepwise = (
        noise.steps <= asked.golden.tolerance and not culprits and rounds_to_8_bits(read_onnx(asked.int8))
    )
    figures = {
        "onnxruntime": RUNTIME_VERSION, "verified_with": there, "session_options": asked.options,
        "db": _finite(noise.here), "db_optimizations_there": _finite(noise.there),
        "db_as_written": _finite(noise.written), "quantize_activations": culprits,
    }  # fmt: skip
    note = f"; ONNX Runtime {RUNTIME_VERSION} is {told}" if (told := untested(RUNTIME_VERSION)) else ""
    if noise.explained or stepwise:
        seen = f"the outputs of ONNX Runtime {RUNTIME_VERSION} match those of {there}: {_db(noise.here)}"
        seen += ", which rounding explains" if noise.here > _FLOOR else ""
        return Found("runtime", OK, seen + _without_options(asked, nodes) + note, figures=figures)
    seen = f"the outputs of ONNX Runtime {RUNTIME_VERSION} differ from those of {there}: {_db(noise.here)}"
    seen += f" ({there} with and without optimizations: {_db(noise.there)})" + _named(culprits) + note
    return Found("runtime", SHORT, seen, _fix(asked, there, bool(culprits)), figures)


def _named(culprits: Sequence[str]) -> str:
    if not culprits:
        return ""
    names = ", ".join(culprits[:3]) + (", ..." if len(culprits) > 3 else "")
    nodes = "1 MatMulNBits node" if len(culprits) == 1 else f"{len(culprits)} MatMulNBits nodes"
    return f"; this version quantizes the activations of {nodes} to 8 bits ({names})"


def _measured(asked: CheckInputs, optimized: Sequence[Array]) -> _Noise:
    golden = asked.golden
    on, off = list(golden.on.values()), list(golden.off.values())
    steps = away(golden.on, golden.steps, optimized).steps
    return _Noise(noise(on, optimized), noise(off, on), noise(off, asked.answers[False]), steps)


def noise(wanted: Iterable[Array], found: Iterable[Array]) -> float:
    """Returns the power of the noise relative to the power of `wanted`, for the output where this ratio is largest.

    It is 0 if they are equal. It is infinite if a value is not finite, or if only `wanted` is all zeros.
    """
    worst = 0.0
    for one, other in zip(wanted, found, strict=True):
        reference = one.astype(np.float64)
        difference = float(np.square(reference - other).sum())
        power = float(np.square(reference).sum())
        share = 0.0 if difference == 0 else difference / power if power else math.inf
        worst = max(worst, share if math.isfinite(share) else math.inf)
    return worst


def rounds_to_8_bits(file: OnnxFile) -> bool:
    """Returns whether the file rounds a value to 8 bits or fewer; versions may round near a tie differently."""
    return any(_rounds(node, file.types) for node in file.nodes)


def _rounds(node: Node, types: Mapping[str, int]) -> bool:
    if node.op_type != "QuantizeLinear":
        return node.op_type.startswith(_ROUNDS)
    zero_point = node.inputs[2] if len(node.inputs) > 2 else ""
    return (types.get(zero_point) or node.ints.get("output_dtype", 0)) not in _WIDE


def _made_here(asked: CheckInputs) -> list[Node]:
    """Returns the MatMulNBits nodes that ONNX Runtime adds to the file here, without the file's own."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "optimized.onnx"
        open_session(asked.int8, threads=asked.threads, options=asked.options, optimized_path=saved)
        optimized = read_onnx(saved)
    own = {
        name for node in read_onnx(asked.int8).nodes if node.op_type == "MatMulNBits" for name in node.outputs
    }
    return [node for node in optimized.nodes if node.op_type == "MatMulNBits" and not own & {*node.outputs}]


def _without_options(asked: CheckInputs, nodes: Sequence[Node]) -> str:
    """Returns a text on how far the answers move without the session option that keeps `nodes` in float.

    It is "" if there are no such nodes, if the option is not set, or if rounding explains the distance.
    """
    level = asked.options[ACCURACY_LEVEL]
    if not nodes or level == UNSET_OPTIONS[ACCURACY_LEVEL]:
        return ""
    plain = _measured(asked, asked.answers_with({**asked.options, **UNSET_OPTIONS}))
    return "" if plain.explained else f" ({_db(plain.here)} without {ACCURACY_LEVEL}={level})"


def _fix(asked: CheckInputs, there: str, quantizes: bool) -> str:
    if quantizes:
        restored = _measured(asked, asked.answers_with({**asked.options, **SESSION_OPTIONS}))
        if restored.explained:
            entry = f"{ACCURACY_LEVEL}={SESSION_OPTIONS[ACCURACY_LEVEL]}"
            return f"set the session option {entry}, which restores the outputs ({_db(restored.here)})"
    return "use the version of ONNX Runtime that verified the file" + (
        f": {there}" if there != _UNKNOWN else ""
    )


def _db(share: float) -> str:
    decibels = _finite(share)
    return (
        "bit-identical"
        if share == 0
        else "completely different"
        if decibels is None
        else f"SQNR {decibels:.0f} dB"
    )


def _finite(share: float) -> float | None:
    """Returns the SQNR in dB for a share of noise; None for equal answers and for an infinite share."""
    return -10 * math.log10(share) if 0 < share < math.inf else None
