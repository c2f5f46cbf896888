"""Tests of ShiftChannels: it keeps the float function, removes means and lowers the 4-bit error."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from chain import noise, prepared, run_ort, small_vit
from torch import Tensor, fx, nn

from qatkit.algorithms import ShiftChannels
from qatkit.algorithms.channel_means import shiftable
from qatkit.calibration import calibrate
from qatkit.config.schema import OverrideConfig
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.to_integers import convert
from qatkit.graph.phase import inference, set_phase

INT4 = {"*": OverrideConfig(weight_dtype="int4", activation_dtype="uint4")}


def _vit() -> nn.Module:
    """Returns a small ViT with random biases, so that channels have means far from zero."""
    model = small_vit()
    for i, (name, parameter) in enumerate(model.named_parameters()):
        if name.endswith("bias"):
            parameter.data += noise(*parameter.shape, seed=i)
    return model


def _outputs(graph: fx.GraphModule, images: Tensor, *, quantize: bool) -> Tensor:
    with inference(graph):
        set_phase(graph, observe=False, quantize=quantize)
        return cast(Tensor, graph(images))


def _read(graph: fx.GraphModule, images: Tensor) -> dict[str, Tensor]:
    """Returns the float input of each Linear."""
    found: dict[str, Tensor] = {}

    class Watch(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            if n.op == "call_module" and isinstance(self.module.get_submodule(str(n.target)), nn.Linear):
                found[n.name] = self.env[cast(fx.Node, n.args[0])]
            return super().run_node(n)

    with inference(graph):
        set_phase(graph, observe=False, quantize=False)
        Watch(graph).run(images)
    return found


def test_means_behind_norms_and_attention_are_moved() -> None:
    model, images = _vit(), noise(16, 3, 32, 32)
    graph = prepared(model, images[:2]).eval()
    assert [len(source.followed.readers) for source in shiftable(graph)] == [1] * 7
    before = _read(graph, images)
    assert ShiftChannels(images=16)(graph, images.split(6)).changed == 7
    torch.testing.assert_close(_outputs(graph, images, quantize=False), model(images), rtol=1e-4, atol=1e-4)
    after = _read(graph, images)
    for name, x in before.items():
        means = x.double().numpy().reshape(-1, x.shape[-1]).mean(0)
        # A GELU has no bias that could be shifted.
        wanted = x if name.endswith("mlp_3") else x - torch.from_numpy(means)
        np.testing.assert_allclose(after[name].numpy(), wanted.numpy(), atol=1e-4)


class Held(nn.Module):
    """A padded Conv, a Linear without a bias and a Linear that is called twice; none can undo a shift."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.padded = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.bare, self.fc = nn.LayerNorm(8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.padded(self.first(x)).mean((2, 3))
        return cast(Tensor, self.fc(torch.relu(self.fc(self.bare(self.norm(x))))))


def test_what_cannot_take_a_shift_back_holds_it() -> None:
    torch.manual_seed(0)
    model, images = Held().eval(), noise(8, 3, 6, 6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    graph = prepared(model, images[:2]).eval()
    assert ShiftChannels()(graph, [images]).changed == 0
    assert all(torch.equal(graph.state_dict()[name], value) for name, value in before.items())


def test_a_conv_takes_back_the_means_of_a_group_norm() -> None:
    """The float outputs stay the same, although the Conv has two groups and 3x3 kernels."""
    torch.manual_seed(0)
    last = nn.Conv2d(8, 4, 3, groups=2)
    model, images = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), last).eval(), noise(8, 3, 6, 6)
    norm = cast(nn.GroupNorm, model[1])
    norm.bias.data += 3 * noise(8)
    graph = prepared(model, images[:2]).eval()
    assert ShiftChannels()(graph, [images]).changed == 1
    torch.testing.assert_close(_outputs(graph, images, quantize=False), model(images), rtol=1e-4, atol=1e-4)
    assert not torch.equal(graph.state_dict()["1.bias"], norm.bias)


@pytest.mark.slow
def test_shifted_channels_lose_less_at_four_bits(tmp_path: Path) -> None:
    model, images = _vit(), noise(32, 3, 32, 32)
    exact = model(images).detach()
    errors = []
    for algorithm in (None, ShiftChannels(images=32)):
        graph = prepared(model, images[:2], overrides=INT4).eval()
        if algorithm is not None:
            algorithm(graph, [images])
        calibrate(graph, [images])
        outputs = _outputs(graph, images, quantize=True)
        errors.append(float((outputs - exact).square().mean()))
    assert errors[1] < 0.5 * errors[0]
    converted, path = convert(graph).graph, tmp_path / "model.onnx"
    export_onnx(converted, images[:2], path)
    with torch.no_grad():
        simulated = converted(images).numpy()
    assert np.abs(run_ort(path, images) - simulated).mean() <= 1e-3 * np.abs(simulated).max()
