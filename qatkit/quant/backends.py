"""Backends as data: how each target quantizes each operator class.

The code that decides what is quantized (`qatkit.graph.placement`) reads this data, never a backend's name. A new
backend therefore needs only a `Backend` here and a file under conf/backend that names it. The reasons for the tables
are in docs/onnxruntime-qdq.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from qatkit.quant.granularity import PerBlock, PerChannel, PerTensor
from qatkit.quant.spec import QuantSpec
from qatkit_verify.errors import ConfigError


@dataclass(frozen=True)
class OpRule:
    """A rule that says how one operator class is quantized.

    Attributes:
        when: "always": its inputs (and weight) are always quantized. "inputs": it runs in int8 where all of
            its inputs are int8 anyway, else in float. "shortcut": the other input of an Add that follows a
            Conv is quantized, so that the two can run as one int8 kernel. "output": its output is always
            quantized, as naive tools do. "weight": only its weight is quantized and it computes in float
            (`Backend.weights_alone`).
        output: whether its output is quantized as well. If not, the output stays float unless a later
            operator reads int8 (transformers are faster and more accurate with a float residual stream).
    """

    when: str
    output: bool = True


@dataclass(frozen=True)
class Shifts:
    """Inclusive bounds of the shifts by which hardware with scales 2^-pos requantizes (decision 77).

    If a shift is out of bounds, the scale that the entry names is changed.

    Attributes:
        cut: bounds of pos(weight) + pos(input) - pos(output) for a convolution or Linear; changes the weight's
            scale.
        bias: upper bound of pos(weight) + pos(input) - pos(bias), whose lower bound is 0; changes the bias's scale.
        read: bounds of the distance between the pos of a sum's inputs; changes the finer input's scale.
        sum_write: bounds of (the smallest pos of a sum's inputs) - pos(output); changes the output's scale.
        product_write: bounds of (the sum of the pos of a product's two inputs) - pos(output); changes the
            output's scale.
    """

    cut: tuple[int, int]
    bias: int
    read: tuple[int, int]
    sum_write: tuple[int, int]
    product_write: tuple[int, int]


@dataclass(frozen=True)
class Backend:
    """A deployment target.

    Attributes:
        name: the name in messages and reports.
        activation, weight: default specs. Weights are per-tensor, per-channel (`PerChannel(0)`) or, with
            `weights_alone`, in blocks. An asymmetric weight has zero points (for their cost see
            docs/onnxruntime-qdq.md, 2a) and is not guarded against saturation (`QuantSpec.pairs`).
        rules: the rule of each operator class (`qatkit.graph.operators`); a missing class stays float.
        session_options: config entries that ONNX Runtime needs to run this backend's files.
        other_runtime: "" if ONNX Runtime runs the files. They are shaped for its int8 kernels (int32 biases,
            barriers against its fusions) and audited on it. For another runtime, the dotted path of the module
            that knows what this runtime accepts (`asks_for_int8`, `broken_pairs`, like
            `qatkit.verify.tensorrt_pairs`). Its files have float biases (except with `integer_biases`) and no
            barriers. ONNX Runtime only computes what their pairs define, and the audit only reads them.
        channel_multiples: the multiples of channels that the int8 kernels need for "conv" and "depthwise";
            empty if any number is allowed (`qatkit.graph.pad_channels`).
        has_amx: whether its CPUs may have AMX, so that weights can be stored for it
            (`qatkit.export.shift_weights`).
        every_operator: whether the rules are those of `everywhere`. If so, ONNX Runtime's own tools also
            quantize every node that they can.
        fuses: for each operator class, the activation classes that are computed in the same step if nothing
            else reads the operator's output; no pair is placed between the two.
        aligned: operator classes whose inputs and output share one scale and zero point; pools only if scales
            are powers of two. Operators that only select or move values share them with any backend.
        shifts: bounds of the hardware's shifts, for scales that are powers of two; None if any shift is
            allowed.
        integer_biases: whether the other runtime reads integer biases, as ONNX Runtime does.
        sixteen_bits: whether the other runtime also supports 16-bit integers, as ONNX Runtime does.
        all_int8: whether no operator may be kept in float for the sake of accuracy, because another processor
            would have to compute it; `calibration.mixed_scales` then only reports.

    Raises:
        ConfigError: the specs do not fit each other or the rules.
    """

    name: str
    activation: QuantSpec
    weight: QuantSpec
    rules: Mapping[str, OpRule]
    session_options: Mapping[str, str] = field(default_factory=dict)
    other_runtime: str = ""
    channel_multiples: Mapping[str, int] = field(default_factory=dict)
    has_amx: bool = False
    every_operator: bool = False
    fuses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    shifts: Shifts | None = None
    integer_biases: bool = False
    sixteen_bits: bool = False
    all_int8: bool = False

    def __post_init__(self) -> None:
        for part, known in (("activation", (PerTensor(),)), ("weight", (PerTensor(), PerChannel(0)))):
            found = getattr(self, part).granularity
            blocks = part == "weight" and self.weights_alone and isinstance(found, PerBlock)
            if found not in known and not blocks:
                kinds = " or ".join(map(str, known))
                hint = " (backend=weight_only allows blocks)" if part == "weight" else ""
                need = "this" if len(known) == 1 else "one of these"
                allowed = f"{kinds}, since int8 kernels need {need}{hint}"
                raise ConfigError(f"backend={self.name}: {part}.granularity", found, allowed)
        if (self.weight.form is None) != (self.activation.form is None):
            same = "an integer type" if self.activation.form is None else "a number format"
            allowed = f"{same}, since activation.dtype={self.activation.dtype} is one"
            raise ConfigError(f"backend={self.name}: weight.dtype", self.weight.dtype, allowed)
        if self.aligned and not self.activation.symmetric:  # the scale of a ReLU's output starts at zero
            allowed = "true, since this backend aligns scales"
            raise ConfigError(f"backend={self.name}: activation.symmetric", False, allowed)
        if self.weight.scale_dtype != "float32" and not self.weights_alone:
            allowed = "float32, since int8 kernels need it (backend=weight_only allows others)"
            raise ConfigError(f"backend={self.name}: weight.scale_dtype", self.weight.scale_dtype, allowed)

    @property
    def for_onnxruntime(self) -> bool:
        """Returns whether ONNX Runtime executes the files."""
        return not self.other_runtime

    @property
    def weights_alone(self) -> bool:
        """Returns whether activations are float everywhere."""
        return all(rule.when == "weight" for rule in self.rules.values())

    @property
    def simulated(self) -> bool:
        """Returns whether the file simulates number formats in float, since no kernel here computes with them."""
        return self.weight.form is not None

    @property
    def label(self) -> str:
        """The name of its files in reports: "INT8", "INT4 weights", "W8A16", or "simulated MXFP4 x MXFP8_E4M3"."""
        if self.simulated:
            return f"simulated {self.weight.dtype.upper()} x {self.activation.dtype.upper()}"
        if self.weights_alone:
            return f"{self.weight.dtype.upper()} weights"
        return f"W{self.weight.bits}A{self.activation.bits}" if self.activation.wide else "INT8"

    def with_activations(self, dtype: str) -> Backend:
        """Returns the same target with activations of another number type.

        ONNX Runtime has no kernel for 16-bit activations, so with these the file is not shaped for its kernels.
        Version 1.32 replaces a MatMul of such activations by one that rounds them to 8 bits, unless the session
        option for the accuracy level is 0, which is therefore set.
        """
        found = replace(self, activation=replace(self.activation, dtype=dtype))
        if not found.activation.wide:
            return found
        options = {**self.session_options, "session.qdq_matmulnbits_accuracy_level": "0"}
        return replace(found, session_options=options, channel_multiples={}, has_amx=False, shifts=None)

    @property
    def saturates(self) -> bool:
        """Returns whether sums of two products can saturate on some of its processors (x86 without VNNI)."""
        return self.for_onnxruntime and self.activation.dtype == "uint8" and not self.weights_alone

    def reduced(self, choice: bool | str) -> Backend:
        """Returns the same target with weights chosen for processors on which sums saturate (`saturates`).

        Args:
            choice: "auto": weights keep the target's bits, and no two products that a kernel adds can
                saturate (`qatkit.quant.pairs`); True: 7-bit weights; False: 8-bit weights, which may saturate
                there.
        """
        if choice == "auto":
            weight = replace(self.weight, pairs=self.saturates)
        else:
            weight = replace(self.weight, reduce_range=choice is True, pairs=False)
        return replace(self, weight=weight)

    def everywhere(self) -> Backend:
        """Returns the same target with every output quantized, LayerNorm, Softmax, GELU and sums included.

        Tools that quantize a whole graph without choosing operators do this. It is meant for comparison,
        since it costs transformers accuracy and speed.
        """
        own = {name: replace(rule, output=True) for name, rule in self.rules.items() if rule.when == "always"}
        rules = {**self.rules, **dict.fromkeys(_COMPUTE, OpRule("output")), **own}
        return replace(self, rules=rules, every_operator=True)


# Operators that compute floats from floats, without a weight.
_COMPUTE = (
    *("add", "mul", "cat", "where", "mean", "matmul", "softmax", "layer_norm", "batch_norm"),
    *("relu", "relu6", "leaky_relu", "sigmoid", "hardsigmoid", "silu", "hardswish", "gelu"),
    *("avg_pool", "global_pool"),
)

_RULES = {
    "conv": OpRule("always"),
    "linear": OpRule("always", output=False),
    **dict.fromkeys(("add", "mul", "cat", "avg_pool", "global_pool"), OpRule("inputs")),
    **dict.fromkeys(("sigmoid", "hardsigmoid", "silu"), OpRule("inputs")),
    **dict.fromkeys(("max_pool", "shape", "pass", "pad", "resize", "relu", "relu6"), OpRule("inputs")),
}

FBGEMM = Backend(
    name="fbgemm",
    activation=QuantSpec("uint8"),
    weight=QuantSpec("int8", symmetric=True, granularity=PerChannel(0), pairs=True),
    rules=_RULES,
    channel_multiples={"conv": 4, "depthwise": 16},
    has_amx=True,
)

# ARM's int8 kernels need signed activations; ONNX Runtime on x86 runs them only on request.
QNNPACK = Backend(
    name="qnnpack",
    activation=QuantSpec("int8"),
    weight=QuantSpec("int8", symmetric=True, granularity=PerChannel(0)),
    rules=_RULES,
    session_options={"session.qdqisint8allowed": "1"},
)

# NVIDIA GPUs. TensorRT only supports symmetric int8. It needs pairs on the inputs of Conv and Gemm and on one
# branch of a residual sum, and fuses bias, ReLU and sum itself. It refuses a quantized bias and a zero point
# other than 0. Source: "Explicit Quantization" and "Q/DQ Layer-Placement Recommendations" of its developer
# guide.
TENSORRT = Backend(
    name="tensorrt",
    activation=QuantSpec("int8", symmetric=True),
    weight=QuantSpec("int8", symmetric=True, granularity=PerChannel(0)),
    rules={
        **dict.fromkeys(("conv", "linear"), OpRule("always", output=False)),
        "add": OpRule("shortcut"),
        **dict.fromkeys(("max_pool", "shape", "pass", "pad", "resize"), OpRule("inputs")),
    },
    # ONNX Runtime computes in float between the pairs, since its own int8 fusions would apply only to some of
    # them.
    session_options={"session.disable_quant_qdq": "1"},
    other_runtime="qatkit.verify.tensorrt_pairs",
)

# Weights of few bits in blocks, for models limited by reading weights (language models) and for small files.
# ONNX Runtime multiplies by such weights without converting them to float first (MatMulNBits); it converts
# those of convolutions to float when it loads the file.
WEIGHT_ONLY = Backend(
    name="weight_only",
    activation=QuantSpec("uint8"),
    weight=QuantSpec("int4", granularity=PerBlock(32)),
    rules=dict.fromkeys(("conv", "linear"), OpRule("weight")),
)

# Number formats of other hardware (`qatkit.quant.formats`), for the inputs and weights of every product, in
# blocks along the axis that it sums over. Between products everything is float, as in the accumulators of
# such hardware.
SIMULATED = Backend(
    name="simulated",
    activation=QuantSpec("mxfp8_e4m3", symmetric=True),
    weight=QuantSpec("mxfp8_e4m3", symmetric=True),
    rules=dict.fromkeys(("conv", "linear"), OpRule("always", output=False)),
)

# The same, also for products of two activations, such as those of attention: for hardware that can only
# multiply blocks.
SIMULATED_PRODUCTS = replace(
    SIMULATED, name="simulated_products", rules={**SIMULATED.rules, "matmul": OpRule("always", output=False)}
)

# AMD's NPUs, as Quark's XINT8 describes them. Every operator is symmetric int8, with one power of two as the
# scale of each tensor, so that all requantization is a shift. The bounds of the shifts are those of the
# hardware's compiler.
_ACTIVATIONS = ("relu", "relu6", "leaky_relu", "prelu", "gelu")
_NPU_INT8 = QuantSpec("int8", symmetric=True, scale_type="pow2", bias_dtype="int8")
NPU_CNN = Backend(
    name="npu_cnn",
    activation=_NPU_INT8,
    weight=_NPU_INT8,
    rules={
        **_RULES,
        **dict.fromkeys(("conv", "linear"), OpRule("always")),
        **dict.fromkeys((*_COMPUTE, "prelu"), OpRule("inputs")),
    },
    session_options={"session.disable_quant_qdq": "1"},
    other_runtime="qatkit.verify.npu_pairs",
    integer_biases=True,
    sixteen_bits=True,
    fuses=dict.fromkeys(("conv", "linear", "add"), _ACTIVATIONS),
    all_int8=True,
    aligned=("cat", "avg_pool", "global_pool"),
    shifts=Shifts(cut=(0, 16), bias=15, read=(0, 7), sum_write=(-7, 25), product_write=(0, 32)),
)

# Transformers on the same NPUs: only products with a weight, uint8 activations and scales of any size.
NPU_TRANSFORMER = Backend(
    name="npu_transformer",
    activation=QuantSpec("uint8"),
    weight=QuantSpec("int8", symmetric=True),
    rules={
        "linear": OpRule("always"),
        **dict.fromkeys(("max_pool", "shape", "pass", "pad", "resize"), OpRule("inputs")),
        **dict.fromkeys(_ACTIVATIONS, OpRule("inputs")),
    },
    session_options={"session.disable_quant_qdq": "1"},
    other_runtime="qatkit.verify.npu_pairs",
    integer_biases=True,
    sixteen_bits=True,
    fuses={"linear": _ACTIVATIONS},
)
