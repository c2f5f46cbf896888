"""A torch module for nodes without a PyTorch equivalent (a region), which ONNX Runtime computes in float."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch
from onnx import helper
from torch import Tensor, nn

from qatkit.importing.operators.table import Array, UnsupportedError, Value
from qatkit.importing.operators.values import array, tensor
from qatkit_verify.errors import ConfigError
from qatkit_verify.session import open_session, use_library

_OWN_DOMAINS = (
    "com.microsoft.",
    "com.ms.",
    "ai.onnx.ml.",
    "ai.onnx.training.",
    "ai.onnx.preview.",
)  # domains of ONNX Runtime


@dataclass(frozen=True)
class Border:
    """A tensor that enters or leaves a region.

    Attributes:
        name: the name in the file.
        dtype: the type in the file, which the module may not support (float16, uint64); None for outputs.
        one_image: whether its first axis has size 1 in the file; None if its shape is not known.
    """

    name: str
    dtype: np.dtype[Any] | None
    one_image: bool | None


@dataclass(frozen=True)
class Region:
    """Nodes of a file that stay float and run in ONNX Runtime.

    Attributes:
        name: the name of the first node without a PyTorch equivalent; reports use it for the region.
        reason: why this node has no equivalent, as a clause that follows the name.
        operators: the operators of all nodes, with their domain if it is not the standard one.
        nodes: the name of the first output of each node.
        inputs, outputs: the tensors at the border of the region.
        model: the region as a serialized ONNX model.
        per_image: whether a batch is computed image by image.
        weighted: the names of all nodes, also in branches and loop bodies, whose weights stay float.
    """

    name: str
    reason: str
    operators: tuple[str, ...]
    nodes: tuple[str, ...]
    inputs: tuple[Border, ...]
    outputs: tuple[Border, ...]
    model: bytes
    per_image: bool
    weighted: tuple[str, ...] = ()


class Island(nn.Module):
    """A region that ONNX Runtime computes in float, on the CPU. No gradient passes through it.

    Args:
        region: the region that it computes.
        library: a library of custom operators; None if the region needs none.
    """

    opaque = True  # a leaf of a recorded graph (`qatkit.graph.capture.run.is_leaf`), through which no gradient passes
    one_operator = True
    positional = True

    def __init__(self, region: Region, library: Path | None = None) -> None:
        super().__init__()
        self.region, self.library = region, library
        self._session: ort.InferenceSession | None = None

    @property
    def reason(self) -> str:
        """The reason why PyTorch does not compute the region, for the report."""
        told = f"stays in float and runs in ONNX Runtime, because {self.region.reason}"
        others = [name for name in self.region.weighted if name != self.region.name]
        return f"{told}; so do these other nodes with weights: {', '.join(others)}" if others else told

    @property
    def session(self) -> ort.InferenceSession:
        """The session that runs the region, without optimizations.

        Raises:
            UnsupportedError: ONNX Runtime cannot run the region either.
        """
        if self._session is None:
            if self.library is not None:
                use_library(self.library)  # a copy of this module may be in another process
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "island.onnx"
                path.write_bytes(self.region.model)
                try:
                    self._session = open_session(path, threads=torch.get_num_threads(), optimize=False)
                except ConfigError as error:
                    reason = f"{self.region.reason}; {error.problem}{self._hint()}"
                    raise UnsupportedError(reason) from error
        return self._session

    def forward(self, *values: Value) -> Tensor | tuple[Tensor, ...]:
        """Returns the region's outputs; float tensors have torch's default type."""
        with torch._C.DisableTorchFunction():
            given = [tensor(value) for value in values]
            device = given[0].device if given else torch.device("cpu")
            made = self._computed([value.detach().cpu().numpy() for value in given])
            found = []
            for one in made:
                value = torch.from_numpy(np.ascontiguousarray(array(one)).reshape(np.shape(one)))
                value = value.to(torch.get_default_dtype()) if value.is_floating_point() else value
                found.append(value.to(device))
        return found[0] if len(found) == 1 else tuple(found)

    def _computed(self, values: Sequence[Array]) -> list[Array]:
        borders = self.region.inputs
        batched = [len(v) for v, b in zip(values, borders, strict=True) if b.one_image and v.ndim]
        count = max(batched, default=1)
        if not self.region.per_image or count == 1:
            return self._run(values)
        split = [
            b.one_image is not False and v.ndim > 0 and len(v) == count
            for v, b in zip(values, borders, strict=True)
        ]
        parts = [
            self._run([v[i : i + 1] if one else v for v, one in zip(values, split, strict=True)])
            for i in range(count)
        ]
        return [np.concatenate(images) for images in zip(*parts, strict=True)]

    def _run(self, values: Sequence[Array]) -> list[Array]:
        feeds = {b.name: v.astype(b.dtype) for b, v in zip(self.region.inputs, values, strict=True)}
        found: list[Array] = self.session.run([one.name for one in self.region.outputs], feeds)
        return found

    def _hint(self) -> str:
        """Returns advice on how to load custom operators into ONNX Runtime; "" if the region has none."""
        custom = [one for one in self.region.operators if "." in one and not one.startswith(_OWN_DOMAINS)]
        if not custom:
            return ""
        named = "import_onnx(..., custom_ops=LIBRARY), or '+model.kwargs={custom_ops:LIBRARY}' on the command line"
        return f"; give the library that implements {', '.join(custom)}: {named}"

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the session, which cannot be copied; a copy opens its own."""
        return {**self.__dict__, "_session": None}

    def extra_repr(self) -> str:
        """Returns the operators of the region."""
        return ", ".join(self.region.operators)


def serialized(
    model: ir.Model,
    nodes: Sequence[ir.Node],
    inputs: Sequence[tuple[Border, int | None]],
    outputs: Sequence[str],
    initializers: Sequence[onnx.TensorProto],
) -> bytes:
    """Returns some nodes of a model as a serialized ONNX model.

    Args:
        model: the model, whose opsets are used.
        nodes: the nodes, in order.
        inputs: the inputs with their ranks (None: unknown).
        outputs: the names of the outputs.
        initializers: constants that the nodes read.

    Raises:
        ValueError: the serialized model would exceed 2 GB.
    """
    given = []
    for border, rank in inputs:
        assert border.dtype is not None
        kind = helper.np_dtype_to_tensor_dtype(border.dtype)
        given.append(
            helper.make_tensor_value_info(border.name, kind, None if rank is None else [None] * rank)
        )
    ends = [helper.make_empty_tensor_value_info(name) for name in outputs]
    graph = helper.make_graph([ir.to_proto(node) for node in nodes], "island", given, ends, initializers)
    imports = [helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    proto = helper.make_model(graph, opset_imports=imports, ir_version=model.ir_version or 8)
    return bytes(proto.SerializeToString())
