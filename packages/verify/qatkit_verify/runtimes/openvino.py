"""OpenVINO on the CPU, set up for low latency, in the file's own precision.

- INFERENCE_PRECISION_HINT=f32: on CPUs with bfloat16 instructions OpenVINO otherwise computes in bfloat16,
  and the figures are not those of the file. EXECUTION_MODE_HINT=ACCURACY prevents dynamic quantization of
  activations.
- A file is compiled once for each input shape. With a dynamic batch, OpenVINO 2026.4 cannot compile Swin's
  INT8 file (its ReshapeTransformation throws), and small networks run at half the speed (decision 26).
- Its telemetry is not imported: it sends an event while `import openvino` runs, from a fork that outlives its
  parent.
- It knows com.microsoft.QuickGelu, so it does not need the function of that name in the file (SiLU).

Source: docs.openvino.ai, "CPU Device" and "Precision Control".
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from qatkit_verify.runtimes.base import Execute, Runtime

_Shapes = tuple[tuple[str, tuple[int, ...]], ...]
_KEPT = 4  # maximum number of compiled models: whole batches, the last part of a batch, and one image


def _open(path: Path, threads: int) -> Execute:
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type] # openvino then uses a stub
    import openvino

    core = openvino.Core()
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        "EXECUTION_MODE_HINT": "ACCURACY",
    }

    @lru_cache(maxsize=_KEPT)
    def compiled(shapes: _Shapes) -> Any:
        model = core.read_model(str(path))
        model.reshape({name: list(shape) for name, shape in shapes})
        return core.compile_model(model, "CPU", settings).create_infer_request()

    def execute(given: Mapping[str, Any]) -> list[Any]:
        request = compiled(tuple((name, value.shape) for name, value in given.items()))
        return list(request.infer(dict(given), share_inputs=True).to_tuple())

    return execute


def _versions() -> Mapping[str, str]:
    return {"openvino": metadata.version("openvino")}


RUNTIME = Runtime("openvino", _open, _versions, extra="openvino")
