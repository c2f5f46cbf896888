"""Checks that files can be measured on a machine without torch, lightning, torchvision, rich and hydra."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from qdq_graphs import INPUT_SCALE, QdqGraph, classifier

import qatkit.verify

BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "lightning", "rich", "torchvision", "hydra"):
            raise ImportError(f"{name} is not on this machine")

sys.meta_path.insert(0, Blocker())
"""

MEASURE = """
import sys
from pathlib import Path
import numpy as np
from qatkit.verify.accuracy import accuracy, module_accuracy
from qatkit.verify.audit import audit
from qatkit.verify.checks.base import Subject
from qatkit.verify.divergence import optimizer_divergence
from qatkit.verify.parity import file_parity, parity
from qatkit_verify.latency import latency
from qatkit_verify.session import open_session

folder = Path(sys.argv[1])
files = {"float": folder / "float.onnx", "int8": folder / "int8.onnx"}
draw = np.random.default_rng(0)
images = (draw.standard_normal((40, 16, 8, 8)) + draw.standard_normal((40, 16, 1, 1))).astype(np.float32)
batches = [(images, np.arange(40) % 10)]
assert list(latency(files, (16, 8, 8), runs=3, threads=1)) == ["float", "int8"]
found = accuracy(open_session(files["int8"], threads=1), batches)
assert found.images == 40 and found.metrics[1].value is not None
assert module_accuracy(lambda x: np.eye(10, dtype=np.float32)[: len(x)], [(images[:5], range(5))]).score == 100
audited = audit(files["int8"])
assert audited.ok and audited.int8_share == 1.0
agreed = file_parity(files["float"], files["int8"], batches, threads=1)
assert agreed.agreement == 1 and agreed.against_float is not None
session = open_session(files["int8"], threads=1, optimize=False)
assert parity(lambda x: session.run(None, {"input": x})[0], files["int8"], batches).agreement == 1
assert optimizer_divergence(files["int8"], images[:4], threads=1).first is None
print("measured")
"""


def _float_twin(path: Path) -> None:
    """Writes a float classifier with the input and classes of `classifier`."""
    graph = QdqGraph()
    graph.weight("conv.weight", (16, 16, 3, 3))
    weight = graph.initializers.pop("conv.weight_q").astype("float32") * INPUT_SCALE
    graph.nodes.clear()
    graph.initializers.clear()
    hidden = graph.node("Conv", ["input", graph.constant("w", weight)], "conv", pads=[1, 1, 1, 1])
    pooled = graph.node("GlobalAveragePool", [graph.node("Relu", [hidden], "relu")], "pool")
    flat = graph.node("Flatten", [pooled], "flat")
    last = graph.node("Gemm", [flat, graph.constant("fc", weight[:10, :, 0, 0])], "fc", transB=1)
    graph.save(path, last, ["N", 16, 8, 8], 2)


def test_files_are_measured_where_there_is_no_torch(tmp_path: Path) -> None:
    classifier(tmp_path / "int8.onnx")
    _float_twin(tmp_path / "float.onnx")
    command = [sys.executable, "-c", BLOCKED + MEASURE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "measured"


def test_no_module_of_verify_loads_torch() -> None:
    folder = Path(qatkit.verify.__path__[0])
    names = [
        ".".join(path.relative_to(folder.parent.parent).with_suffix("").parts)
        for path in folder.rglob("*.py")
    ]
    assert len(names) > 10
    imports = "\n".join(f"import {name.removesuffix('.__init__')}" for name in names)
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED + imports], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
