"""Checks on this processor how fast the file is, how much of it runs in int8, and whether it can saturate."""

from __future__ import annotations

from typing import Any

from qatkit_verify.bundle.manifest import FLOAT_FILE
from qatkit_verify.checks.base import OK, OPEN, SHORT, CheckInputs, Found
from qatkit_verify.errors import counted
from qatkit_verify.int8_operators import PRECISE, Int8Operator, int8_operators
from qatkit_verify.kernels import CONVS, MATMULS, executed
from qatkit_verify.latency import latency
from qatkit_verify.proofs import never_on_arm, never_on_x86
from qatkit_verify.saturation import saturates_here

_LESS = 0.01  # maximum decrease of the int8 share of the multiply-accumulates here
_NAMED = 1  # maximum number of saturating operators in the text; the figures list all


def speed(asked: CheckInputs) -> Found:
    """Times the INT8 file here, alternating with the float file if the bundle has one.

    The speed-up over the float file falls short if it is below `asked.bound`.
    """
    both = {"float": asked.folder / FLOAT_FILE, "int8": asked.int8}
    files = {name: path for name, path in both.items() if path.is_file()}
    inputs, batch = asked.golden.inputs, asked.batch or 1
    images = len(inputs) == 1 and not asked.golden.runs
    lone = next(iter(inputs.values())).shape[1:] if images else None
    given = lone or asked.one_batch
    times = latency(files, given, batch=batch, threads=asked.threads, runs=asked.runs, options=asked.options)
    int8 = times["int8"]
    threads = counted(asked.threads, "thread")
    seen = f"{int8.median_ms:.2f} ms [{int8.p10_ms:.2f}-{int8.p90_ms:.2f}], {threads}, batch {batch}"
    figures = {"int8_ms": int8.median_ms, "threads": asked.threads}
    if "float" not in files:
        return Found("speed", OK, seen, figures=figures)
    spread = f"{int8.ratio_p10:.2f}-{int8.ratio_p90:.2f}" + (", noisy" if int8.noise else "")
    ratio = f"{int8.ratio:.2f} times as fast as float [{spread}]"
    seen += f"; {ratio} (float {times['float'].median_ms:.2f} ms)"
    figures |= {
        "float_ms": times["float"].median_ms,
        "ratio": int8.ratio,
        "p10": int8.ratio_p10,
        "p90": int8.ratio_p90,
    }
    bound = asked.bound
    if bound is None or int8.ratio >= bound:
        return Found("speed", OK, seen, figures=figures)
    fix = (
        "run export.py placement=variants where the model was trained, then qatkit-measure here, which finds the "
        f"fastest placement; or lower the bound with --min-speedup (now {bound:g})"
    )
    return Found("speed", SHORT, seen, fix, figures)


def kernels(asked: CheckInputs) -> Found:
    """Compares the share of the multiply-accumulates in int8 here with that where the bundle was made."""
    ran = executed(asked.int8, options=asked.options, threads=asked.threads,
                   given=asked.one_batch,
                   images=asked.batch or 1)  # fmt: skip
    matrix = [one for one in ran if one.op in CONVS | MATMULS]
    total, int8 = sum(one.macs for one in matrix), [one for one in matrix if one.precision == "int8"]
    share = sum(one.macs for one in int8) / total if total else 0.0
    seen = (
        f"{len(int8)} of {len(matrix)} convolutions and products run in int8, {100 * share:.1f} % of "
        "multiply-accumulates"
    )
    audit = asked.report.get("audit") or {}
    made = audit.get("int8_share")
    figures = {"int8_share": share, "made_with": made}
    if made is None or share >= float(made) - _LESS:
        return Found("int8 kernels", OK, seen, figures=figures)
    floats = [one.name for one in matrix if one.precision == "float"]
    seen += f"; {100 * float(made):.1f} % where the bundle was made (in float here: {', '.join(floats[:3])})"
    fix = "use the version of ONNX Runtime that manifest.json names"
    return Found("int8 kernels", SHORT, seen, fix, figures)


def saturation(asked: CheckInputs) -> Found:
    """Finds from the weights which operators can saturate on x86 without VNNI, and tests this processor.

    For a file without uint8 x int8 products, it finds the operators that can exceed 16 bits on ARM.
    """
    found = int8_operators(asked.int8, options=asked.options)
    open_ones = [one for one in found if one.saturating != 0]
    here = saturates_here()
    figures = {
        "saturates": here,
        "operators": len(found),
        "can_saturate": {one.name: one.saturating for one in open_ones},
    }
    if not found:
        return _signed_products(asked, figures)
    if not open_ones:
        return Found("saturation", OK, never_on_x86(counted(len(found), "operator")), figures=figures)
    named = ", ".join(_told(one) for one in open_ones[:_NAMED]) + (", ..." if len(open_ones) > _NAMED else "")
    seen = f"{len(open_ones)} of {counted(len(found), 'operator')} can saturate on x86 without VNNI ({named})"
    if not here:
        return Found("saturation", OK, f"{seen}; none does on this processor", figures=figures)
    return Found(
        "saturation",
        OPEN,
        f"{seen}, such as this processor; the answers above show the effect",
        figures=figures,
    )


def _signed_products(asked: CheckInputs, figures: dict[str, Any]) -> Found:
    """Finds the int8 x int8 operators that can exceed 16 bits on ARM: a sum of two products -128 * -128."""
    found = int8_operators(asked.int8, options=asked.options, signed=True)
    open_ones = [one for one in found if one.saturating != 0]
    figures |= {
        "int8_by_int8": len(found),
        "can_overflow_on_arm": {one.name: one.saturating for one in open_ones},
    }
    if not found:
        exact = f" ({PRECISE}=1 makes the weights uint8)" if asked.options.get(PRECISE) == "1" else ""
        seen = f"no operator adds products with int8 weights in 16 bits{exact}"
        return Found("saturation", OK, seen, figures=figures)
    if not open_ones:
        seen = never_on_arm(len(found))
    else:
        named = ", ".join(_told(one) for one in open_ones[:_NAMED])
        seen = (
            f"{len(open_ones)} of {counted(len(found), 'int8 x int8 operator')} can exceed 16 bits on ARM without "
            f"the dot product ({named}{', ...' if len(open_ones) > _NAMED else ''})"
        )
    return Found("saturation", OK, seen, figures=figures)


def _told(one: Int8Operator) -> str:
    if one.saturating is None:
        return f"{one.name}: weights are computed at run time"
    return f"{one.name}: {one.saturating} of {one.channels} channels"
