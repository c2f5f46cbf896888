"""Measures the accuracy of number formats in simulation, and compares their ONNX files with it.

    uv run benchmarks/number_formats.py recipe=vit_cifar10_ptq data.root=DIR model.checkpoint=FILE
        [--images 1000] [--file 100] [--formats bfp16 mxfp4] [--algorithm gptq] [--quark PYTHON]

Arguments before the options are those of train.py. Each format, for weights and activations, is calibrated on 256
images, which matter only to formats with a scale per tensor. No algorithm runs unless one is named. It prints one line
per format:

    bits        bits per value, including its share of the block's scale
    top-1       of the simulation on the test images
    same        share of images with the float model's class
    dB          SQNR of the outputs against float
    file        number of images for which ONNX Runtime and the simulation agree on the class, the largest difference
                of an output, and the size of the file in MB

PYTHON is an interpreter with AMD Quark 0.13 (ONNX), which quantizes the same float file with
`number_formats_quark.py`. These formats need no calibration in Quark, so it gets only ten images.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from number_formats_quark import PRESETS
from torch import Tensor, fx, nn

from qatkit import models
from qatkit.algorithms.base import CALIBRATED, OBSERVED, algorithms_of
from qatkit.config.compose import compose_config
from qatkit.config.schema import Config
from qatkit.data import DataModule
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.simplify import float_baseline
from qatkit.graph.phase import inference, set_phase
from qatkit.quant.formats.table import FORMATS
from qatkit.run.build import data_of, qat_module
from qatkit.train.module import QATModule

CONF = Path(__file__).resolve().parent.parent / "conf"
_PLAIN = (
    "calibration=minmax",
    "calibration.images=256",
    "trainer=cpu",
)


def prepared(config: Config, data: DataModule) -> QATModule:
    """Returns the calibrated module, with its algorithms applied."""
    module = qat_module(config, models.build(config.model, data.num_classes), data.inputs, QATModule)
    images = [images for images, _ in data.calibration_batches(256, 64)]
    algorithms = algorithms_of(config.algorithm).values()
    for algorithm in (one for one in algorithms if one.stage == OBSERVED):
        algorithm(module.graph, images)
    module.calibrate(images)
    for algorithm in (one for one in algorithms if one.stage == CALIBRATED):
        algorithm(module.graph, images)
    return module


def outputs(graph: fx.GraphModule, batches: Sequence[Tensor], *, quantize: bool) -> Tensor:
    """Returns the graph's outputs for all images."""
    with inference(graph):
        set_phase(graph, observe=False, quantize=quantize)
        return torch.cat([graph(images) for images in batches])


def in_file(module: QATModule, images: Tensor) -> tuple[Tensor, int]:
    """Returns the outputs of the module's ONNX file for `images`, and the size of the file in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        set_phase(module.graph, observe=False, quantize=True)
        export_onnx(module.convert().graph, images[:2], path)
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        found = [session.run(None, {"input": part.numpy()})[0] for part in images.split(10)]
        size = path.stat().st_size
    return torch.from_numpy(np.concatenate(found)), size


def figures(found: Tensor, exact: Tensor, labels: Tensor) -> str:
    """Returns top-1, the share of images with the float model's class and the SQNR, as text."""
    top, same = (100 * (found.argmax(1) == one).float().mean() for one in (labels, exact.argmax(1)))
    decibels = 10 * torch.log10(exact.square().sum() / (found - exact).square().sum())
    return f"top-1 {top:.2f}  same {same:.1f} %  {decibels:.1f} dB"


def by_quark(
    interpreter: Path, formats: Sequence[str], model: nn.Module, data: DataModule, images: Tensor
) -> dict[str, Tensor]:
    """Returns the outputs of Quark's files, by the names of `number_formats_quark.py`."""
    with tempfile.TemporaryDirectory() as folder:
        file, given, made = (Path(folder) / name for name in ("float.onnx", "images.npz", "outputs.npz"))
        export_onnx(float_baseline(model.eval(), images[:2]), images[:2], file, opset=17)
        calibration = torch.cat([x for x, _ in data.calibration_batches(10, 10)])
        np.savez(given, calibration=calibration.numpy(), test=images.numpy())
        script = Path(__file__).resolve().with_name("number_formats_quark.py")
        known = [name for name in formats if name in PRESETS]
        paths = (interpreter.absolute(), script, file, given, made)
        command = [*map(str, paths), "--formats", *known]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
        return {name: torch.from_numpy(one) for name, one in np.load(made).items()}


def main() -> None:
    """Measures one recipe and prints one line per format."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--file", type=int, default=100, help="number of images to run in ONNX Runtime")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--algorithm", default="none", help="value of train.py's key algorithm")
    parser.add_argument("--quark", type=Path, help="Python interpreter with AMD Quark")
    asked, overrides = parser.parse_known_args()
    exact = None
    for name in asked.formats:
        types = (f"backend.weight_dtype={name}", f"backend.activation_dtype={name}")
        algorithm = f"algorithm={asked.algorithm}"
        config = compose_config(CONF, ["backend=simulated", *overrides, *_PLAIN, algorithm, *types])
        data = data_of(config)
        batches = list(data.test_subset(asked.images, 100))
        images, labels = [x for x, _ in batches], torch.cat([y for _, y in batches])
        module = prepared(config, data)
        if exact is None:
            exact = outputs(module.graph, images, quantize=False)
            top = (exact.argmax(1) == labels).float().mean()
            print(f"{'float32':16} {32:5.2f} bits  top-1 {100 * top:.2f}", flush=True)
        found = outputs(module.graph, images, quantize=True)
        count = min(asked.file, len(found))
        of_file, size = in_file(module, torch.cat(images)[:count])
        alike = int((of_file.argmax(1) == found[:count].argmax(1)).sum())
        furthest = float((of_file - found[:count]).abs().max())
        print(
            f"{name:16} {FORMATS[name].bits:5.2f} bits  {figures(found, exact, labels)}"
            f"  file {alike} of {count}, {furthest:.1e}, {size / 1e6:.2f} MB",
            flush=True,
        )
    if asked.quark is not None and exact is not None:
        model = models.build(config.model, data.num_classes)
        for name, found in by_quark(asked.quark, asked.formats, model, data, torch.cat(images)).items():
            print(f"Quark {name:20} {figures(found, exact, labels)}", flush=True)


if __name__ == "__main__":
    main()
