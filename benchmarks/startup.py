"""Measures the CPU time (user and system) of commands that should return at once: help and errors.

    uv run benchmarks/startup.py [--rounds 5]

Each command runs once untimed, which writes the bytecode, then in turns with the others. For each command it prints the
fastest round and whether torch was imported. Each command runs in its own process, as if typed by a user.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

ROOT = Path(__file__).parent.parent
COMMANDS = {
    "help": "train.py --help",
    "help of export.py": "export.py --help",
    "composed configuration": "train.py --cfg job",
    "mistyped key": "train.py recipe=quickstart schedule.lrr=1",
    "wrong value": "train.py schedule.lr=-1",
    "unknown recipe": "train.py recipe=nothing",
    "wrong setting of an algorithm": "train.py algorithm=equalize algorithm.equalize.relu6=drop",
    "unknown component": "train.py calibration.observer=qatkit.quant.observers.MinMaxs",
    "too many threads": "train.py verify.threads=100000",
    "missing checkpoint": "export.py checkpoint=nothing.ckpt",
    "missing ONNX file": "export.py onnx=nothing.onnx mode=static",
    "damaged ONNX file": "export.py onnx=damaged.onnx mode=static",
    "quantized ONNX file": "export.py onnx=quantized.onnx mode=static",
    "ONNX file with another input": "export.py onnx=rank.onnx mode=static",
    "nothing to quantize": "export.py onnx=pool.onnx mode=static data.image_size=8",
    "unknown operator": "export.py onnx=mystery.onnx mode=static data.image_size=8",
}


def write_files(folder: Path) -> None:
    """Writes the files that the commands name, with random weights."""
    (folder / "damaged.onnx").write_text("this is no model")
    weight = np.random.default_rng(0).standard_normal((8, 3, 3, 3)).astype(np.float32)
    image: Sequence[str | int] = ["N", 3, 8, 8]
    conv = helper.make_node("Conv", ["input", "w"], ["y"])
    nodes: dict[str, tuple[Sequence[str | int], list[onnx.NodeProto]]] = {
        "quantized": (image, [helper.make_node("DynamicQuantizeLinear", ["input"], ["y", "s", "z"])]),
        "rank": (["N", 192], [conv]),
        "pool": (image, [helper.make_node("GlobalAveragePool", ["input"], ["y"])]),
        "mystery": (image, [conv, helper.make_node("Mystery", ["y"], ["z"], domain="acme")]),
    }
    for name, (shape, made) in nodes.items():
        graph = helper.make_graph(
            made,
            name,
            [helper.make_tensor_value_info("input", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info(made[-1].output[0], TensorProto.FLOAT, None)],
            [numpy_helper.from_array(weight, "w")],
        )
        imports = [helper.make_opsetid("", 13), helper.make_opsetid("acme", 1)]
        onnx.save(helper.make_model(graph, opset_imports=imports), str(folder / f"{name}.onnx"))


def run(typed: str, folder: Path, *flags: str) -> tuple[float, str]:
    """Returns the CPU seconds of one command, and its stderr."""
    script, *arguments = typed.split()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *flags, str(ROOT / script), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode in (0, 2), done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stderr


def main(argv: Sequence[str] | None = None) -> None:
    """Times all commands and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args(argv).rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder)
        with_torch = {
            typed: "torch"
            in [line.split()[-1] for line in said.splitlines() if line.startswith("import time:")]
            for typed in COMMANDS.values()
            for _, said in [run(typed, folder, "-X", "importtime")]
        }
        seconds: dict[str, list[float]] = {typed: [] for typed in COMMANDS.values()}
        for _ in range(rounds):
            for typed, measured in seconds.items():
                measured.append(run(typed, folder)[0])
    print(f"{'':<32}{'CPU s':>6}  torch  command")
    for what, typed in COMMANDS.items():
        print(f"{what:<32}{min(seconds[typed]):>6.2f}  {'yes' if with_torch[typed] else 'no':<5}  {typed}")


if __name__ == "__main__":
    main()
