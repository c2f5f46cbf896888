"""The measurements of a run as plain dataclasses, which the table, report.json and the page read.

`qatkit.verify` fills these in. The module needs neither torch, onnx nor onnxruntime, so a report can be read
and rendered anywhere. Units are in the field names or comments. Metrics are in the unit of `task`, agreement
is a share in 0..1, latencies are in milliseconds, and sizes in bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qatkit.records.analysis import Analysis
from qatkit.records.examples import Examples
from qatkit.records.fixes import Fix, either
from qatkit.records.ladder import Ladder
from qatkit.records.plan import NextStep, Planned
from qatkit.records.precision import Precision
from qatkit.records.scores import with_key
from qatkit.records.tried import Candidate, Curve, Ran, Tried
from qatkit_verify.classification import NAMES
from qatkit_verify.placement.record import Placed
from qatkit_verify.records import Comparison, Hardware, Latency, Scores, TaskNames

# The references for the comparison of single tensors (`Divergence.reference`).
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
DYNAMIC = "dynamic"  # the dynamic int8 version of the float file, for comparison (`verify.dynamic`)
FREE = "free"  # for a model with states: both files run on their own states (`qatkit.verify.drift`)
# The beginning of the reason in `Results.skipped` for operators that calibration left in float.
MIXED_SCALES = "float, since one 8-bit scale cannot represent"


# Fields whose records have the main metric as `score`.
_SCORED = ("calibration", "algorithms", "curves", "precision", "analysis", "ladder")


@dataclass(frozen=True)
class Fidelity:
    """The distance of a file's outputs from those of the float file on the same images (`qatkit.verify.fidelity`)."""

    agreement: float  # share of the same decisions, 0..1 (boxes: F1)
    kl: float | None  # mean KL divergence from float's distribution in nats; None without distributions
    sqnr_db: float | None  # SQNR of the outputs in dB; None if they are equal to the last bit
    images: int
    remark: str = ""  # a short remark on the decisions
    doubt: str = ""  # the reason why the agreement is meaningless


@dataclass(frozen=True)
class Parity:
    """The agreement of the converted module, ONNX Runtime without optimizations, and ONNX Runtime with all of them.

    For a file that was quantized without a module, `reference` is the file itself without optimizations.
    `unoptimized` is then None, and `against_float` compares the optimized file with the float file.
    """

    images: int
    step: float  # size of one quantization step of the output
    step_source: str  # a description of how `step` was found
    unoptimized: Comparison | None
    optimized: Comparison
    reference: str = "the converted module"
    against_float: Comparison | None = None

    @property
    def agreement(self) -> float:
        """The lowest share of decisions that agree with the reference."""
        return min(one.agreement for one in (self.unoptimized, self.optimized) if one is not None)

    @property
    def held(self) -> float:
        """The lowest share of images whose decision agrees with the reference or is a tie."""
        return min(one.held for one in (self.unoptimized, self.optimized) if one is not None)

    @property
    def compared(self) -> list[tuple[str, Comparison]]:
        """The comparisons with their displayed names."""
        rows = (
            ("ONNX Runtime, no optimizations", self.unoptimized),
            ("ONNX Runtime, all optimizations", self.optimized),
            ("the same, against the float file", self.against_float),
        )
        return [(label, comparison) for label, comparison in rows if comparison is not None]


@dataclass(frozen=True)
class TensorParity:
    """The difference between a tensor of the file and its reference (`Divergence.reference`), in quantization steps."""

    name: str
    elements: int
    mismatching: float  # share of elements that differ at all, 0..1
    max_steps: int


@dataclass(frozen=True)
class Divergence:
    """The parity of single tensors in topological order; `first` is the first that exceeds `tolerance` steps, or None.

    For the comparison with the converted module, the file runs without optimizations. For the comparison with
    the file without optimizations, it runs with all of them.
    """

    tolerance: int
    first: TensorParity | None
    tensors: tuple[TensorParity, ...]
    not_recorded: tuple[str, ...] = ()  # names of quantized tensors of the file that were not recorded
    not_in_file: tuple[str, ...] = ()  # recorded names that the file does not have
    reference: str = "the converted module"
    operator: str | None = None  # the node of the file that computes the first tensor that differs

    @property
    def begins(self) -> TensorParity | None:
        """The first tensor with different rounding, if it explains `first`.

        It is None if there is no `first`, if no tensor before `first` differs, or if the share of elements that
        differ is more than ten times as large in `first` as in the tensor before it.
        """
        if self.first is None:
            return None
        before = self.tensors[: self.tensors.index(self.first)]
        grown = bool(before) and 10 * before[-1].mismatching >= self.first.mismatching
        return next((one for one in before if one.mismatching), None) if grown else None


@dataclass(frozen=True)
class InRuntime:
    """The exported file in a runtime other than ONNX Runtime; figures that were not measured are None or absent."""

    versions: Mapping[str, str]
    failed: str = ""  # the reason why the runtime cannot run the file
    latency: Mapping[str, Latency] = field(default_factory=dict)  # by "float" and "int8", in this runtime
    accuracy: Scores | None = None  # accuracy of the INT8 file, with labels
    images: int = 0  # number of images on which outputs were compared
    with_module: Comparison | None = None  # parity with the converted module, if there is one
    with_onnxruntime: Comparison | None = None
    divergence: Divergence | None = None  # set if the runtime disagrees with ONNX Runtime
    note: str = ""  # a note for readers


@dataclass(frozen=True)
class NodeAudit:
    """A node of the graph that ONNX Runtime really runs.

    `precision` is what the kernel received: "int8", "float", "weight-only" (8- or 4-bit weights, float
    activations) or "other" (indices, booleans). `source` names the operator of the INT8 file that it came
    from (None: inserted by ONNX Runtime), `macs` counts multiply-accumulates for one image, and `microseconds` is the
    time of its kernel (None if it has none).
    """

    name: str
    op: str
    domain: str
    precision: str
    source: str | None
    reason: str  # the reason why it is float; empty for int8
    problem: bool
    macs: int
    microseconds: float | None


@dataclass(frozen=True)
class RuntimeDequantize:
    """A constant that is stored quantized and converted to float again on every run."""

    name: str
    kind: str  # weight | bias | constant
    bytes: int  # size of the resulting float tensor
    feeds: str  # the operator that reads it


@dataclass(frozen=True)
class Audit:
    """The optimized graph, node by node, and its problems."""

    nodes: tuple[NodeAudit, ...]
    ops: Mapping[str, Mapping[str, int]]  # operator: {precision: count}
    quantize: int  # number of remaining QuantizeLinear nodes
    dequantize: int  # number of remaining DequantizeLinear nodes
    transposes: int
    runtime_dequantize: tuple[RuntimeDequantize, ...]
    macs: int
    int8_macs: int
    problems: tuple[str, ...]
    for_onnxruntime: bool = True  # if False, "int8" is what the file requests from another runtime
    packed_bits: float | None = None  # bits per packed weight, including scales and zero points

    @property
    def ok(self) -> bool:
        """Returns whether the audit found no problems."""
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
    fixes: Sequence[Sequence[Fix]] = ()  # the alternative fixes for each shortfall
    climb: str = ""  # the command of a rescue if the file is too far from float; "" if none is suggested
    analysis: Analysis | None = None
    ladder: Ladder | None = None  # the ladder of a rescue
    examples: Examples | None = None  # test samples that the page draws
    measured: Mapping[str, Any] = field(default_factory=dict)  # plain figures of other checks, by name
    classes: Sequence[str] = ()  # names, in the order of the outputs
    labelled: bool = True  # if False, only fidelity can be measured, not accuracy
    label: str = "INT8"  # a short name for the exported file (the key "int8")
    calibration: Sequence[Candidate] = ()  # from a tournament of calibration methods
    algorithms: Sequence[Tried] = ()  # with algorithm_choice=auto; the first row is without any
    ran: Sequence[Ran] = ()  # the algorithms of a fixed list, in the order of their calls
    curves: Sequence[Curve] = ()  # from training stages whose epochs were evaluated
    precision: Precision | None = None  # from a search for a mixed precision
    placement: Placed | None = None  # set if the placement of operators was chosen by measured speed
    notes: Sequence[str] = ()  # notes for readers, a line each
    int8_file: str = "model.int8.onnx"  # relative to the output folder
    fixed_batch: int | None = None  # batch size of the exported file; None for any
    session_options: Mapping[str, str] = field(default_factory=dict)  # ONNX Runtime's config entries
    preprocessing: Mapping[str, Any] | None = None  # as in model.json: image_size, resize, mean, std, ...
    hardware: Hardware | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)  # seconds per stage
    plan: Sequence[
        Planned
    ] = ()  # stages with their estimated and measured seconds, as announced at the start
    next: Sequence[NextStep] = ()  # suggested next commands
    files: Sequence[FileRecord] = ()

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The (key, label) of rows with at least one figure, in the order of `ROWS`."""
        measured = (self.accuracy, self.fidelity, self.latency, self.sizes)
        labels = dict(ROWS) | {
            "simulated": f"{self.label}, simulated in PyTorch",
            "int8": f"{self.label}, ONNX Runtime",
            FREE: f"{self.label}, with its own states",
        }
        return [(key, labels[key]) for key, _ in ROWS if any(key in mapping for mapping in measured)]

    @property
    def size_ratio(self) -> float | None:
        """The ratio of INT8 bytes to float bytes; None if one of them is not known."""
        if "float" not in self.sizes or "int8" not in self.sizes:
            return None
        return self.sizes["int8"] / self.sizes["float"]

    @property
    def runtime_latency(self) -> dict[str, Mapping[str, Latency]]:
        """The latencies of the files by runtime, for every runtime that timed the exported file, fastest first."""
        every = {"onnxruntime": self.latency, **{name: one.latency for name, one in self.runtimes.items()}}
        timed = {name: found for name, found in every.items() if "int8" in found}
        return dict(sorted(timed.items(), key=lambda item: item[1]["int8"].median_ms))

    def with_measured(self, name: str, figures: Mapping[str, Any]) -> Results:
        """Returns a copy with the plain figures of the check `name`."""
        return dataclasses.replace(self, measured={**self.measured, name: figures})

    def as_dict(self) -> dict[str, Any]:
        """Returns plain containers for JSON, including derived figures that readers would otherwise compute."""
        record = dataclasses.asdict(self)
        # Older reports have the fixes under this key, which readers expect.
        record = {"mends" if key == "fixes" else key: value for key, value in record.items()}
        record["mends"] = [either(one) for one in self.fixes]
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
