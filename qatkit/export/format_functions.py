"""Writes number formats as ONNX functions that compute the same as `qatkit.quant.formats`, from opset 13 on.

    y = qatkit.mxfp4(x) {axis}          a scale for each block along an axis
    y = qatkit.nvfp4(x, scale) {axis}   a scale for each block, and one for the tensor
    y = qatkit.float8_e5m2(x, scale)    a scale for the tensor (from opset 19 on: QuantizeLinear, DequantizeLinear)
    y = qatkit.bfloat16(x)              no scale

Any runtime that supports functions runs them; ONNX Runtime inlines their bodies. Every step is exact in float32, except
the quotients that the formats themselves round, so the results are bit for bit those of the simulation:

- ONNX has no operator for the exponent of a float (before opset 26). A logarithm, rounded down, is an index into a
  table of powers of two, and two comparisons correct an index that the logarithm's rounding made wrong.
- A maximum may ignore NaN, so the sum of x - x is added: 0 for finite numbers, otherwise NaN.
- ONNX does not define Clip of NaN, so limits are written as comparisons.
- Round and Where may lose the sign of a zero. Therefore magnitudes are rounded and multiplied by the sign; the sign of
  a zero is that of 1 / x.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from onnx import parser
from onnx_ir import tape

from qatkit.export.rewrite import new_constant, rewrite
from qatkit.graph.convert.format_modules import DOMAIN
from qatkit.quant.formats.table import BFLOAT16, E4M3, FLOAT16, FORMATS, Element, Format, Scale

_CASTS = {FLOAT16: onnx.TensorProto.FLOAT16, BFLOAT16: onnx.TensorProto.BFLOAT16}
# Formats that QuantizeLinear knows from this opset on.
_FLOAT8_PAIRS, _FLOAT8 = 19, {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
_FEW = 8  # largest number of spacings that are chosen by comparisons
_LEAST = -127  # exponent of the first power of two in the table


def add_format_functions(model: ir.Model, opset: int) -> None:
    """Adds the bodies of the format functions that `model` calls, written in operators of `opset`.

    From opset 19 on, a float8 format with one scale per tensor becomes a QuantizeLinear and a DequantizeLinear instead.
    """
    if opset >= _FLOAT8_PAIRS:
        rewrite(model.graph, {name: [_as_pair] for name in _FLOAT8}, DOMAIN)
    called = {node.op_type for node in model.graph if node.domain == DOMAIN}
    for name in sorted(called & FORMATS.keys()):
        function = ir.serde.deserialize_function(format_function(name, opset))
        model.functions[function.identifier()] = function
    if called:
        model.opset_imports[DOMAIN] = 1


def _as_pair(node: ir.Node, builder: tape.Tape) -> ir.Value:
    """Replaces a call by a QuantizeLinear and a DequantizeLinear to float8, between two barriers (Sums of one operand).

    Without barriers, ONNX Runtime would turn a Conv between two such pairs into a QLinearConv, and move a
    QuantizeLinear up through a Reshape. Neither has a kernel for float8, so it would refuse the file.
    """
    x, scale = node.inputs
    zero = new_constant(builder, node, "zero_point", np.zeros((), _FLOAT8[node.op_type]))
    held = builder.op("QuantizeLinear", [builder.op("Sum", [x]), scale, zero])
    return builder.op("Sum", [builder.op("DequantizeLinear", [held, scale, zero])])


def format_function(name: str, opset: int) -> onnx.FunctionProto:
    """Returns the function that rounds float32 to a format.

    Args:
        name: the name of the format, a key of `FORMATS`.
        opset: the opset of the operators in the function.
    """
    form = FORMATS[name]
    inputs = "x, scale" if form.has_tensor_scale else "x"
    attributes = "" if form.block is None else "<axis>"
    if form.element in _CASTS:
        body = [f"narrow = Cast<to = {_CASTS[form.element]}>(x)", "y = Cast<to = 1>(narrow)"]
    elif form.block is None:
        body = _of_tensor(form)
    else:
        body = _of_blocks(form, opset)
    lines = "\n".join(f"  {line}" for line in body)
    text = f'<domain: "{DOMAIN}", opset_import: ["" : {opset}]>\n{name} {attributes}({inputs}) => (y) {{\n{lines}\n}}'
    function = parser.parse_function(text)
    if opset >= 18:
        _with_axes_as_inputs(function)
    return function


def _of_tensor(form: Format) -> list[str]:
    """Returns the function's lines for one scale per tensor: NaN stays NaN, and infinities saturate."""
    return [
        *_constants(),
        "sizes = Abs(x)",
        "steps = Div(sizes, scale)",
        *_rounded("steps", "held", form.element, "element"),
        "unknown = IsNaN(steps)",
        "kept = Where(unknown, steps, held)",
        "scaled = Mul(kept, scale)",
        *_signed("scaled", "x", "y", form.element),
    ]


def _of_blocks(form: Format, opset: int) -> list[str]:
    """Returns the function's lines for one scale per block.

    They reshape x [..., axis, ...] to zero-padded blocks [outer, blocks, block, inner], round it, and reshape it back.
    """
    assert form.block is not None
    return [
        *_constants(),
        *_whole("zero_1", 0), *_whole("one_1", 1), *_whole("minus_1", -1), *_whole("two_1", 2),
        *_whole("block_1", form.block),
        "shape = Shape(x)",
        "axis_0 = Constant<value_int: int = @axis>()",
        "axis_1 = Reshape(axis_0, one_1)",
        "length = Gather<axis = 0>(shape, axis_1)",
        "rank = Shape(shape)",
        "from_the_end = Add(axis_1, rank)",
        "at = Mod(from_the_end, rank)",
        "next = Add(at, one_1)",
        "trailing = Slice(shape, next, rank)",
        "one_block = ConstantOfShape(trailing)",
        "size = Size(one_block)",
        "inner = Reshape(size, one_1)",
        "three = Concat<axis = 0>(minus_1, length, inner)",
        "apart = Reshape(x, three)",
        "behind = Add(length, block_1)",
        "before = Sub(behind, one_1)",
        "blocks = Div(before, block_1)",
        "filled = Mul(blocks, block_1)",
        "missing = Sub(filled, length)",
        "pads = Concat<axis = 0>(zero_1, zero_1, zero_1, zero_1, missing, zero_1)",
        "padded = Pad(apart, pads)",
        "four = Concat<axis = 0>(minus_1, blocks, block_1, inner)",
        "v = Reshape(padded, four)",
        *_block_scale(form),
        "steps = Div(sizes, s)",
        *_rounded("steps", "held", form.element, "element"),
        "scaled = Mul(held, s)",
        *_signed("scaled", "v", "w", form.element),
        "joined = Concat<axis = 0>(minus_1, filled, inner)",
        "long = Reshape(w, joined)",
        "cut = Slice(long, zero_1, length, one_1)",
        "y = Reshape(cut, shape)",
    ]  # fmt: skip


def _block_scale(form: Format) -> list[str]:
    """Returns the lines for the scale s of each block of v; s is NaN if a value of the block is not finite."""
    lines = [
        "sizes = Abs(v)",
        "largest = ReduceMax<axes = [2], keepdims = 1>(sizes)",
        "nothing = Sub(v, v)",
        "finite = ReduceSum<keepdims = 1>(nothing, two_1)",
    ]
    if form.scale is Scale.E4M3:
        return [
            *lines,
            *_number("maximum", form.element.maximum),
            *_number("least_scale", E4M3.least),
            "per_element = Div(largest, maximum)",
            "per_tensor = Div(per_element, scale)",
            *_rounded("per_tensor", "e4m3", E4M3, "scale"),
            "too_small = Less(e4m3, least_scale)",
            "raised = Where(too_small, least_scale, e4m3)",
            "of_numbers = Mul(raised, scale)",
            "s = Add(of_numbers, finite)",
        ]
    emax = form.element.largest_exponent
    return [
        *lines,
        *_power_of_two("largest", "power", math.ldexp(1.0, emax + _LEAST), BFLOAT16.maximum, "block"),
        *_number("emax", math.ldexp(1.0, emax)),
        "of_numbers = Div(power, emax)",
        "s = Add(of_numbers, finite)",
    ]


def _rounded(x: str, y: str, element: Element, tag: str) -> list[str]:
    """Returns the lines that round magnitudes to an element type, with saturation; NaN gives an undefined result."""
    return [
        *_number(f"{tag}_high", element.maximum),
        f"{tag}_fits = Less({x}, {tag}_high)",
        f"{tag}_limited = Where({tag}_fits, {x}, {tag}_high)",
        *_steps(f"{tag}_limited", f"{tag}_step", element, tag),
        f"{tag}_counted = Div({tag}_limited, {tag}_step)",
        f"{tag}_whole = Round({tag}_counted)",
        f"{y} = Mul({tag}_whole, {tag}_step)",
    ]


def _steps(x: str, y: str, element: Element, tag: str) -> list[str]:
    """Returns the lines for the spacing of an element type at each magnitude, by comparisons if spacings are few."""
    least, largest = element.least_exponent, element.largest_exponent
    spacings = [math.ldexp(1.0, exponent - element.mantissa_bits) for exponent in range(least, largest + 1)]
    if len(spacings) > _FEW:
        return [
            *_power_of_two(x, f"{tag}_power", math.ldexp(1.0, least), element.maximum, tag),
            *_number(f"{tag}_mantissas", math.ldexp(1.0, element.mantissa_bits)),
            f"{y} = Div({tag}_power, {tag}_mantissas)",
        ]
    lines, before = [], y if len(spacings) == 1 else f"{tag}_spacing_0"
    lines += _number(before, spacings[0])
    for place, spacing in enumerate(spacings[1:], 1):
        last = place == len(spacings) - 1
        found = y if last else f"{tag}_spacing_{place}"
        lines += [
            *_number(f"{tag}_from_{place}", math.ldexp(1.0, least + place)),
            *_number(f"{tag}_wide_{place}", spacing),
            f"{tag}_below_{place} = Less({x}, {tag}_from_{place})",
            f"{found} = Where({tag}_below_{place}, {before}, {tag}_wide_{place})",
        ]
        before = found
    return lines


def _signed(sizes: str, x: str, y: str, element: Element) -> list[str]:
    """Returns the lines that give magnitudes the sign of x. Zeros get it too, except for integer elements."""
    lines = [
        *_number("one", 1.0), *_number("minus_one", -1.0),
        f"reciprocal = Div(one, {x})",
        "behind_zero = Less(reciprocal, zero)",
        f"below_zero = Less({x}, zero)",
        "negative = Or(below_zero, behind_zero)",
        "sign = Where(negative, minus_one, one)",
    ]  # fmt: skip
    if not element.integer:
        return [*lines, f"{y} = Mul({sizes}, sign)"]
    return [
        *lines,
        f"with_sign = Mul({sizes}, sign)",
        f"is_zero = Equal({sizes}, zero)",
        f"{y} = Where(is_zero, zero, with_sign)",
    ]


def _power_of_two(x: str, y: str, least: float, most: float, tag: str) -> list[str]:
    """Returns the lines for the largest power of two up to x, after x is clipped to `least`..`most`."""
    t = f"{tag}_p_"
    return [
        *_number(f"{t}least", least), *_number(f"{t}most", most),
        f"{t}fits = Less({x}, {t}most)",
        f"{t}no_more = Where({t}fits, {x}, {t}most)",
        f"{t}reaches = Greater({t}no_more, {t}least)",
        f"{t}within = Where({t}reaches, {t}no_more, {t}least)",
        f"{t}ln = Log({t}within)",
        f"{t}log = Div({t}ln, ln2)",
        f"{t}floor = Floor({t}log)",
        f"{t}above = Greater({t}floor, highest)",
        f"{t}exponent = Where({t}above, highest, {t}floor)",
        f"{t}place = Sub({t}exponent, lowest)",
        f"{t}index = Cast<to = 7>({t}place)",
        f"{t}guess = Gather<axis = 0>(powers, {t}index)",
        f"{t}half = Div({t}guess, two)",
        f"{t}too_high = Less({t}within, {t}guess)",
        f"{t}lowered = Where({t}too_high, {t}half, {t}guess)",
        f"{t}twice = Mul({t}lowered, two)",
        f"{t}too_low = Less({t}within, {t}twice)",
        f"{y} = Where({t}too_low, {t}lowered, {t}twice)",
    ]  # fmt: skip


def _constants() -> list[str]:
    powers = ", ".join(repr(math.ldexp(1.0, exponent)) for exponent in range(_LEAST, 128))
    return [
        f"powers = Constant<value = float[{128 - _LEAST}] {{{powers}}}>()",
        *_number("ln2", math.log(2)),
        *_number("lowest", float(_LEAST)),
        *_number("highest", 127.0),
        *_number("two", 2.0),
        *_number("zero", 0.0),
    ]


def _number(name: str, value: float) -> list[str]:
    return [f"{name} = Constant<value = float {{{value!r}}}>()"]


def _whole(name: str, value: int) -> list[str]:
    return [f"{name} = Constant<value = int64[1] {{{value}}}>()"]


def _with_axes_as_inputs(function: onnx.FunctionProto) -> None:
    """Turns the axes of each ReduceMax from an attribute into an input, as opset 18 and later require."""
    for node in function.node:
        if node.op_type == "ReduceMax":
            del node.attribute[[one.name for one in node.attribute].index("axes")]
            node.input.append("two_1")
