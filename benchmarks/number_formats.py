"""What number formats cost in accuracy: simulated, and computed by their ONNX file.

    uv run benchmarks/number_formats.py recipe=vit_cifar10_ptq data.root=DIR model.checkpoint=FILE
        [--images 1000] [--file 100] [--formats bfp16 mxfp4]

What stands before the options is train.py's. Weights and activations of each format are calibrated on 256 images (which
formats with a scale for the tensor read alone), without any algorithm. A line is printed for each:

    bits        of a value, with its part of its block's scale
    top-1       of the simulation on the test images
    same        share of images with float's class
    dB          float's outputs over the error
    file        images on which ONNX Runtime has the simulation's class, and the largest difference of an output
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from torch import Tensor, fx

from qatkit import models
from qatkit.config.compose import compose_config
from qatkit.config.schema import Config
from qatkit.data import DataModule
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.phase import inference, set_phase
from qatkit.quant.formats.table import FORMATS
from qatkit.run.build import data_of, qat_module
from qatkit.train.module import QATModule

CONF = Path(__file__).resolve().parent.parent / "conf"
_PLAIN = (
    "backend=simulated",
    "algorithm=none",
    "calibration=minmax",
    "calibration.images=256",
    "trainer=cpu",
)


def prepared(config: Config, data: DataModule) -> QATModule:
    """The calibrated module."""
    module = qat_module(config, models.build(config.model, data.num_classes), data.inputs, QATModule)
    module.calibrate(images for images, _ in data.calibration_batches(256, 64))
    return module


def outputs(graph: fx.GraphModule, batches: Sequence[Tensor], *, quantize: bool) -> Tensor:
    """Returns the graph's outputs for all images."""
    with inference(graph):
        set_phase(graph, observe=False, quantize=quantize)
        return torch.cat([graph(images) for images in batches])


def in_file(module: QATModule, images: Tensor) -> Tensor:
    """Returns ONNX Runtime's outputs for them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        set_phase(module.graph, observe=False, quantize=True)
        export_onnx(module.convert().graph, images[:2], path)
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        found = [session.run(None, {"input": part.numpy()})[0] for part in images.split(10)]
    return torch.from_numpy(np.concatenate(found))


def main() -> None:
    """Prints a line for each format."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--file", type=int, default=100, help="images in ONNX Runtime")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    asked, overrides = parser.parse_known_args()
    exact = None
    for name in asked.formats:
        types = (f"backend.weight_dtype={name}", f"backend.activation_dtype={name}")
        config = compose_config(CONF, [*overrides, *_PLAIN, *types])
        data = data_of(config)
        batches = list(data.test_subset(asked.images, 100))
        images, labels = [x for x, _ in batches], torch.cat([y for _, y in batches])
        module = prepared(config, data)
        if exact is None:
            exact = outputs(module.graph, images, quantize=False)
            top = (exact.argmax(1) == labels).float().mean()
            print(f"{'float32':16} {32:5.2f} bits  top-1 {100 * top:.2f}", flush=True)
        found = outputs(module.graph, images, quantize=True)
        top, same = (100 * (found.argmax(1) == one).float().mean() for one in (labels, exact.argmax(1)))
        decibels = 10 * torch.log10(exact.square().sum() / (found - exact).square().sum())
        count = min(asked.file, len(found))
        of_file = in_file(module, torch.cat(images)[:count])
        alike = int((of_file.argmax(1) == found[:count].argmax(1)).sum())
        furthest = float((of_file - found[:count]).abs().max())
        print(
            f"{name:16} {FORMATS[name].bits:5.2f} bits  top-1 {top:.2f}  same {same:.1f} %  {decibels:.1f} dB"
            f"  file {alike} of {count}, {furthest:.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
