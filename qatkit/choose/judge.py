"""Judges models by their files in ONNX Runtime, on held-out images.

    Judge(float outputs of the images) ── graph ──> file ──> metric, same decision as float, error of the outputs

All figures are kept per image, so that two models can be compared image by image (a paired comparison).
The result is a `qatkit.choose.verdict.Verdict`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from qatkit.choose.verdict import Verdict
from qatkit.config.schema import ExportConfig
from qatkit.export.torch_to_onnx import export_onnx, may_be_literals, refill
from qatkit.graph.convert.to_integers import convert
from qatkit.graph.guarded import unguarded
from qatkit.graph.phase import inference, set_phase
from qatkit.graph.signature import Example, inputs_of, on, output_leaves
from qatkit.progress import Batches, shown
from qatkit.tasks import CLASSIFICATION, Task
from qatkit.train.module import QATModule
from qatkit.verify.accuracy import file_predictor
from qatkit_verify.int8_operators import PRECISE
from qatkit_verify.saturation import saturates_here
from qatkit_verify.session import FloatArray, open_session


def judging_options(module: QATModule) -> Mapping[str, str]:
    """Returns the session config entries for files of `module` that are compared with one another.

    Sums of products that may saturate on this processor are computed exactly. No calibration method,
    algorithm or training can compensate for saturation, so it must not influence the comparison.
    """
    options = module.backend.session_options
    exact = saturates_here() and bool(unguarded(module.graph))
    return {**options, PRECISE: "1"} if exact else options


@dataclass(frozen=True)
class Runtime:
    """The settings for exporting and running files; without labels there is no metric."""

    export: ExportConfig
    options: Mapping[str, str]
    threads: int
    progress: bool
    labelled: bool = True
    task: Task = CLASSIFICATION


class Files:
    """Writes graphs as ONNX files: the first one is exported, the others are the same file with other values.

    A graph that needs another file than the first (other nodes or other literals) is exported as well.

    Args:
        example: the example input, as in `export_onnx`.
        folder: a folder for temporary files.
        export: the settings of the export.
    """

    def __init__(self, example: Example, folder: Path, export: ExportConfig) -> None:
        self.example, self.template, self.export = example, folder / "template.onnx", export
        self.first: dict[str, Tensor] = {}

    def write(self, graph_module: fx.GraphModule) -> Path:
        """Writes a prepared graph with its current values and returns the file, which later calls may overwrite."""
        converted = convert(graph_module).graph
        path = self.template.with_name("candidate.onnx") if self.template.exists() else self.template
        if path != self.template:
            try:
                refill(self.template, converted, path, self.first)
                return path
            except ValueError:
                pass  # another graph (a bias beyond int32 led to per-channel scales), or literals
        else:
            self.first = {name: value.detach().clone() for name, value in may_be_literals(converted).items()}
        export_onnx(
            converted,
            self.example,
            path,
            opset=self.export.opset,
            dynamic_batch=self.export.dynamic_batch,
            template=True,
        )
        return path


class Judge:
    """Judges models on one set of images.

    Args:
        graph_module: the prepared graph; with quantization off it is the reference for the others.
        example: the example input, as in `export_onnx`.
        held_out: (images, labels) batches, which are read once for each model and once for float.
        folder: a folder for temporary files.
        runtime: the settings of export and inference.
        title: the title of the progress bars.
        shared: whether only judges of the same model and images use the folder. The first one then leaves its
            template and float's outputs there for the next.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        example: Example,
        held_out: Batches,
        folder: Path,
        runtime: Runtime,
        title: str,
        *,
        shared: bool = False,
    ) -> None:
        self.held_out, self.runtime, self.title = held_out, runtime, title
        self.files = Files(example, folder, runtime.export)
        known = folder / "float.npz"
        if shared and known.exists():
            with np.load(known) as stored:
                self.wanted, self.labels = stored["wanted"], stored["labels"]
        else:
            batches = shown(held_out, f"{title}: float", runtime.progress)
            self.wanted, self.labels = _float_outputs(graph_module, batches, self.task)
        if shared and not known.exists():
            np.savez(known, wanted=self.wanted, labels=self.labels)

    @property
    def task(self) -> Task:
        """The task, which defines the metrics."""
        return self.runtime.task

    @property
    def float_score(self) -> float | None:
        """The main metric of the float model; None without labels."""
        return self.task.mean(self._values(self.wanted)) if self.runtime.labelled else None

    def noise(self, verdict: Verdict) -> float:
        """Returns the standard error of the difference in the main metric between the judged and the float model."""
        values = self._values(self.wanted)
        return self.task.noise(values, values if verdict.values is None else verdict.values)

    def _values(self, outputs: NDArray[Any]) -> NDArray[Any]:
        return self.task.values(outputs, self.labels)

    def __call__(self, graph_module: fx.GraphModule, name: str) -> Verdict:
        """Judges a prepared graph with its current ranges, weights and biases."""
        return self.of_file(self.files.write(graph_module), name)

    def of_float(self) -> Verdict:
        """Returns the verdict on the float model itself."""
        images = len(self.wanted)
        values = self._values(self.wanted) if self.runtime.labelled else None
        return Verdict(values, np.ones(images, np.bool_), np.zeros(images), self.task)

    def of_file(self, path: Path, name: str) -> Verdict:
        """Judges a file that is already written."""
        session = open_session(path, threads=self.runtime.threads, options=self.runtime.options)
        batches = shown(self.held_out, f"{self.title}: {name}", self.runtime.progress)
        predict = file_predictor(session, self.task)
        outputs = np.concatenate([predict(images) for images, _ in batches]).astype(np.float64)
        wanted = self.wanted
        size = self.task.power(wanted)
        squares = self.task.errors(wanted, outputs)
        return Verdict(
            self._values(outputs) if self.runtime.labelled else None,
            _mostly(self.task.agree(wanted, outputs)),
            squares / size if size else np.full(len(wanted), math.nan),
            self.task,
        )


def _mostly(same: NDArray[Any]) -> NDArray[np.bool_]:
    """Returns whether more than half of each image's decisions agree, [N]."""
    return np.asarray(same.reshape(len(same), -1).mean(1) > 0.5)


def _float_outputs(
    graph_module: fx.GraphModule, batches: Batches, task: Task
) -> tuple[FloatArray, NDArray[Any]]:
    """Returns the outputs [N, ...] of the prepared graph with quantization off, and the labels [N]."""
    device = next((p.device for p in graph_module.parameters()), torch.device("cpu"))
    outputs, labels = [], []
    with inference(graph_module):
        set_phase(graph_module, observe=False, quantize=False)
        for images, those in batches:
            found = output_leaves(graph_module(*on(device, inputs_of(graph_module, images))))[1]
            outputs.append(task.joined([one.float().cpu().numpy() for one in found]))
            labels.append(np.asarray(those))
    return np.concatenate(outputs), np.concatenate(labels)
