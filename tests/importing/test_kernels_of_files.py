"""Tests that each kernel of an imported file and of its quantized file belongs to a site of the model.

A site is the name by which the model knows an operator; it must be found whatever the file's nodes are
called.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import small_nets
from small_nets import Case, begin_again, saved
from written import write

from qatkit.choose.precision.layout import Layouts
from qatkit.graph.nodes import op_class, site
from qatkit.verify.site_kernels import site_kernels

_NETS = (small_nets.residual, small_nets.silu, small_nets.layer_norm, small_nets.gelu, small_nets.dense_block)


def _as_they_are(model: onnx.ModelProto) -> None: ...


def _without_names(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        node.name = ""


def _dotted(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        node.name = f"/features.0{node.name}"


def _not_for_python(model: onnx.ModelProto) -> None:
    for index, node in enumerate(model.graph.node):
        node.name = f'{{"node" {index}}}'


@pytest.mark.parametrize("rename", [_as_they_are, _without_names, _dotted, _not_for_python])
@pytest.mark.parametrize("build", _NETS, ids=lambda build: build.__name__)
def test_kernels_have_sites(
    tmp_path: Path,
    build: Callable[[small_nets.Net], tuple[str, ...]],
    rename: Callable[[onnx.ModelProto], None],
) -> None:
    begin_again()
    source, feeds = saved(Case(build, {}), tmp_path)
    model = onnx.load(source)
    rename(model)
    onnx.save(model, source)
    written = write(source, feeds)
    opened = written.module.opened(written.model)
    layouts = Layouts(opened.graph, written.module.backend)
    weighted = {site(node) for node in opened.graph.nodes if op_class(node) == "Conv"}
    for path in (source, written.path):
        kernels = site_kernels(
            path,
            layouts.sites,
            paths=written.model.paths,
            options=written.module.backend.session_options,
            threads=1,
            input_shape={name: value.numpy() for name, value in feeds.items()},
        )
        computed = [kernel for kernel in kernels if not kernel.border]
        assert computed
        assert not [kernel for kernel in computed if kernel.site not in layouts.sites], path.name
        assert weighted <= {kernel.site for kernel in computed}, path.name
