"""The measurements of a run as plain dataclasses, which the table, report.json and the page read.

`qatkit.verify` fills these in. Nothing here needs torch, onnx or onnxruntime, so a report can be read and
rendered anywhere. Units are in the field names or comments: metrics in the unit of `task`, agreement as a
share 0..1, latencies in milliseconds, sizes in bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qatkit.records.analysis import Analysis
from qatkit.records.examples import Examples
from qatkit.records.ladder import Ladder
from qatkit.records.precision import Precision
from qatkit.records.scores import with_key
from qatkit.records.tried import Candidate, Curve, Tried
from qatkit_verify.classification import NAMES
from qatkit_verify.placement.record import Placed
from qatkit_verify.records import Comparison, Hardware, Latency, Scores, TaskNames

# The references that another runtime is compared with, tensor by tensor (`Divergence.reference`).
ALONE = "ONNX Runtime, each operator on the same inputs"
WHOLE = "ONNX Runtime, the whole file"
# The rows of the final table, in order: key in `Results.accuracy`, `.latency` and `.sizes`, and its label.
ROWS: tuple[tuple[str, str], ...] = (
    ("float", "float"),
    ("control", "float, fine-tuned (control)"),
    ("simulated", "INT8, simulated in PyTorch"),
    ("int8", "INT8, ONNX Runtime"),
    ("free", "INT8, with its own states"),
    ("dynamic", "ONNX Runtime's dynamic int8"),
)
DYNAMIC = "dynamic"  # of the same float file, for comparison (`verify.dynamic`)
FREE = "free"  # for a model whose states are fed back: both files with their own (`qatkit.verify.drift`)
# The beginning of the reason in `Results.skipped` for operators that calibration left in float.
MIXED_SCALES = "float, since one scale for all values loses"


# Fields whose records hold the main metric as `score`.
_SCORED = ("calibration", "algorithms", "curves", "precision", "analysis", "ladder")


@dataclass(frozen=True)
class Fidelity:
    """The outputs against those of the float file, over the same images (`qatkit.verify.fidelity`)."""

    agreement: float  # share of the same decisions, 0..1 (boxes: F1)
    kl: float | None  # of float's distribution to this one's, nats, mean; None: no distributions
    sqnr_db: float | None  # of the outputs; None: equal to the last bit
    images: int
    remark: str = ""  # a remark on the decisions, in a few words
    doubt: str = ""  # why the agreement means nothing, a clause


@dataclass(frozen=True)
class Parity:
    """Three-way parity: the converted module, ONNX Runtime without optimizations, ONNX Runtime with all.

    For a file that was quantized without a module, `reference` is the file itself without optimizations:
    `unoptimized` is None, and `against_float` tells how far the optimized file is from the float file.
    """

    images: int
    step: float  # size of one quantization step of the output
    step_source: str  # where `step` comes from, in words
    unoptimized: Comparison | None
    optimized: Comparison
    reference: str = "the converted module"
    against_float: Comparison | None = None

    @property
    def agreement(self) -> float:
        """The lower share of decisions that agree with the reference."""
        return min(one.agreement for one in (self.unoptimized, self.optimized) if one is not None)

    @property
    def held(self) -> float:
        """The lower share of images whose decision agrees with the reference or is a tie."""
        return min(one.held for one in (self.unoptimized, self.optimized) if one is not None)

    @property
    def compared(self) -> list[tuple[str, Comparison]]:
        """The comparisons, each with its name in words."""
        rows = (
            ("ONNX Runtime, no optimizations", self.unoptimized),
            ("ONNX Runtime, all optimizations", self.optimized),
            ("the same, against the float file", self.against_float),
        )
        return [(label, comparison) for label, comparison in rows if comparison is not None]


@dataclass(frozen=True)
class TensorParity:
    """A tensor of the file against its reference (`Divergence.reference`), in steps."""

    name: str
    elements: int
    mismatching: float  # share of elements that differ at all, 0..1
    max_steps: int


@dataclass(frozen=True)
class Divergence:
    """Tensor-by-tensor parity in topological order; `first` exceeds `tolerance` steps, or is None.

    Against the converted module the file runs without optimizations. Against the file without optimizations
    it runs with all.
    """

    tolerance: int
    first: TensorParity | None
    tensors: tuple[TensorParity, ...]
    not_recorded: tuple[str, ...] = ()  # quantized tensors of the file that were not recorded
    not_in_file: tuple[str, ...] = ()  # recorded names that the file does not have
    reference: str = "the converted module"
    operator: str | None = None  # the node of the file that computes the first tensor that differs

    @property
    def begins(self) -> TensorParity | None:
        """The first tensor with different roundings, from which `first` grew by less than ten times at its
        own operator.

        None if nothing before it differs, or if it differs far more than its inputs.
        """
        if self.first is None:
            return None
        before = self.tensors[: self.tensors.index(self.first)]
        grown = bool(before) and 10 * before[-1].mismatching >= self.first.mismatching
        return next((one for one in before if one.mismatching), None) if grown else None


@dataclass(frozen=True)
class InRuntime:
    """The exported file in a runtime other than ONNX Runtime; what was not measured is None or absent."""

    versions: Mapping[str, str]
    failed: str = ""  # why it can't run the file
    latency: Mapping[str, Latency] = field(default_factory=dict)  # "float" and "int8", in this runtime
    accuracy: Scores | None = None  # of the INT8 file, with labels
    images: int = 0  # on which outputs were compared
    with_module: Comparison | None = None  # the converted module, if there is one
    with_onnxruntime: Comparison | None = None
    divergence: Divergence | None = None  # if it disagrees with ONNX Runtime
    note: str = ""  # what a reader should know


@dataclass(frozen=True)
class NodeAudit:
    """A node of the graph that ONNX Runtime really runs.

    `precision` is what the kernel received: "int8", "float", "weight-only" (8- or 4-bit weights, float
    activations) or "other" (indices, booleans). `source` names the operator of the INT8 file that it came
    from (None: inserted by ONNX Runtime), `macs` counts multiply-accumulates for one image.
    """

    name: str
    op: str
    domain: str
    precision: str
    source: str | None
    reason: str  # why it is float; empty for int8
    problem: bool
    macs: int
    microseconds: float | None


@dataclass(frozen=True)
class RuntimeDequantize:
    """A constant that is stored quantized and converted to float again on every run."""

    name: str
    kind: str  # weight | bias | constant
    bytes: int  # size of the float tensor that is made
    feeds: str  # the operator that reads it


@dataclass(frozen=True)
class Audit:
    """The optimized graph, node by node, and its problems."""

    nodes: tuple[NodeAudit, ...]
    ops: Mapping[str, Mapping[str, int]]  # operator: {precision: count}
    quantize: int  # QuantizeLinear left
    dequantize: int  # DequantizeLinear left
    transposes: int
    runtime_dequantize: tuple[RuntimeDequantize, ...]
    macs: int
    int8_macs: int
    problems: tuple[str, ...]
    for_onnxruntime: bool = True  # otherwise "int8" is what the file asks another runtime for
    packed_bits: float | None = (
        None  # per weight of products with packed weights, with their scales and zero points
    )

    @property
    def ok(self) -> bool:
        """The absence of problems: True if there are none."""
        return not self.problems

    @property
    def matrix_nodes(self) -> tuple[NodeAudit, ...]:
        """The Conv, Gemm and MatMul nodes, which multiply and accumulate."""
        return tuple(node for node in self.nodes if node.macs)

    @property
    def int8_share(self) -> float:
        """The share of multiply-accumulates that run in int8, 0..1."""
        return self.int8_macs / self.macs if self.macs else 0.0


@dataclass(frozen=True)
class FileRecord:
    """An artifact in the output folder."""

    name: str  # relative to the output folder
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Results:
    """All results of one run. What was not measured is absent from its mapping or None."""

    name: str
    model: str
    output_dir: str
    task: TaskNames = NAMES
    accuracy: Mapping[str, Scores] = field(default_factory=dict)  # keys: ROWS
    fidelity: Mapping[str, Fidelity] = field(default_factory=dict)  # keys: ROWS, except float
    latency: Mapping[str, Latency] = field(default_factory=dict)  # keys: ROWS
    sizes: Mapping[str, int] = field(default_factory=dict)  # bytes; keys: ROWS
    parity: Parity | None = None
    divergence: Divergence | None = None
    audit: Audit | None = None
    runtimes: Mapping[str, InRuntime] = field(default_factory=dict)  # by name, except ONNX Runtime
    skipped: Sequence[tuple[str, str]] = ()  # (site, reason)
    shortfalls: Sequence[str] = ()
    fixes: Sequence[str] = ()  # for each shortfall the proposed fix, as it is typed; "" if none is known
    climb: str = ""  # if the file is too far from float: what to type to continue the climb
    analysis: Analysis | None = None
    ladder: Ladder | None = None  # of a rescue
    examples: Examples | None = None  # test samples that the page draws
    measured: Mapping[str, Any] = field(default_factory=dict)  # by name: plain figures of further checks
    classes: Sequence[str] = ()  # names, in the order of the outputs
    labelled: bool = True  # False: there is no accuracy to measure, only fidelity
    label: str = "INT8"  # what the exported file (the key "int8") is, in a word or two
    calibration: Sequence[Candidate] = ()  # from a tournament of calibration methods
    algorithms: Sequence[Tried] = ()  # from a competition of algorithms, the first without any
    curves: Sequence[Curve] = ()  # from training stages whose epochs were evaluated
    precision: Precision | None = None  # from a search for a mixed precision
    placement: Placed | None = None  # if operators differ from the backend's table, for their speed
    notes: Sequence[str] = ()  # what a reader should know, a line each
    int8_file: str = "model.int8.onnx"  # relative to the output folder
    fixed_batch: int | None = None  # images that the exported file takes at a time; None: any number
    session_options: Mapping[str, str] = field(default_factory=dict)  # ONNX Runtime's config entries
    preprocessing: Mapping[str, Any] | None = None  # as in model.json: image_size, resize, mean, std, ...
    hardware: Hardware | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)  # seconds per stage
    files: Sequence[FileRecord] = ()

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The rows that have something to show: (key, label), in the order of `ROWS`."""
        measured = (self.accuracy, self.fidelity, self.latency, self.sizes)
        labels = dict(ROWS) | {
            "simulated": f"{self.label}, simulated in PyTorch",
            "int8": f"{self.label}, ONNX Runtime",
            FREE: f"{self.label}, with its own states",
        }
        return [(key, labels[key]) for key, _ in ROWS if any(key in mapping for mapping in measured)]

    @property
    def size_ratio(self) -> float | None:
        """The ratio of INT8 bytes to float bytes."""
        if "float" not in self.sizes or "int8" not in self.sizes:
            return None
        return self.sizes["int8"] / self.sizes["float"]

    @property
    def runtime_latency(self) -> dict[str, Mapping[str, Latency]]:
        """The latencies of the files by runtime, for every runtime that timed the exported file, the fastest
        first.
        """
        every = {"onnxruntime": self.latency, **{name: one.latency for name, one in self.runtimes.items()}}
        timed = {name: found for name, found in every.items() if "int8" in found}
        return dict(sorted(timed.items(), key=lambda item: item[1]["int8"].median_ms))

    def with_measured(self, name: str, figures: Mapping[str, Any]) -> Results:
        """Returns a copy that holds the plain figures of the check `name`."""
        return dataclasses.replace(self, measured={**self.measured, name: figures})

    def as_dict(self) -> dict[str, Any]:
        """Returns plain containers for JSON, with derived figures that a reader would compute."""
        record = dataclasses.asdict(self)
        # Older reports have the fixes under this key, and readers look for it.
        record = {"mends" if key == "fixes" else key: value for key, value in record.items()}
        record |= {name: with_key(record[name], self.task.main) for name in _SCORED}
        record |= {
            "task": self.task.as_dict(),
            "accuracy": {k: one.as_dict() for k, one in self.accuracy.items()},
        }
        for name, one in self.runtimes.items():
            record["runtimes"][name]["accuracy"] = None if one.accuracy is None else one.accuracy.as_dict()
        if self.ladder is not None:
            record["ladder"]["task"] = self.ladder.task.as_dict()
        record["size_ratio"] = self.size_ratio
        record["examples"] = None if self.examples is None else self.examples.as_dict()
        if self.placement is not None:
            record["placement"] = self.placement.as_dict()
        if self.runtimes:
            record["fastest_runtime"] = next(iter(self.runtime_latency), None)
        if self.audit is not None:
            record["audit"] |= {"ok": self.audit.ok, "int8_share": self.audit.int8_share}
        return record
