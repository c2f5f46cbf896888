"""Modules with some operators in float, made from a module with all operators in int8.

Operators that stay int8 keep the changes of the algorithms; they are matched by name. Operators that become
float are copied from the float model. Tensors that only the new module quantizes are calibrated.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from qatkit.choose.ranges import Calibrated, calibrate_module
from qatkit.config.schema import Config
from qatkit.data import DataModule
from qatkit.graph.captured import Captured
from qatkit.graph.transplant import transplant
from qatkit.run.build import example_batch, qat_module
from qatkit.run.export import write_file
from qatkit.train.module import QATModule


class Builder:
    """Makes modules with some operators in float from a module with all operators in int8."""

    def __init__(
        self,
        config: Config,
        model: nn.Module | Captured,
        data: DataModule,
        module: QATModule,
        calibrated: Calibrated,
    ) -> None:
        self.config, self.model, self.data, self.int8 = config, model, data, module
        self._calibrated = calibrated

    def module(self, floats: Sequence[str], *, calibrate: bool = True) -> QATModule:
        """Returns a module with some operators in float.

        Args:
            floats: the sites of the float operators; if there are none, the int8 module itself is returned.
            calibrate: whether tensors that only this module quantizes are calibrated. Latency does not depend
                on it.
        """
        if not floats:
            return self.int8
        config, names = self.config, self.int8.about.get("algorithms")
        module = qat_module(
            config, self.model, self.data.inputs, type(self.int8), algorithms=names, floats=floats
        )
        if transplant(self.int8.graph, module.graph) and calibrate:
            plain = replace(config, calibration=replace(config.calibration, cache=None))
            example = example_batch(config, self.data.inputs)
            with warnings.catch_warnings():  # the same images have already caused this warning
                warnings.simplefilter("ignore")
                calibrate_module(module, self.data, plain, example, method=self._calibrated.method)
            transplant(self.int8.graph, module.graph)
        module.about = dict(self.int8.about)
        module.ready_to_convert()
        return module

    def write(self, floats: Sequence[str], path: Path, *, calibrate: bool = True) -> Path:
        """Writes the module with these sites in float as an ONNX file, and returns its path."""
        graph = self.module(floats, calibrate=calibrate).convert().graph
        write_file(graph, self.config, self.data.inputs, path)
        return path
