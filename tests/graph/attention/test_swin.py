"""Tests of Swin's windows, and of other rewrites by `stub`, against the originals."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from chain import calibrated, noise, prepared
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.convnext import LayerNorm2d
from torchvision.models.swin_transformer import (
    PatchMerging,
    PatchMergingV2,
    ShiftedWindowAttention,
    ShiftedWindowAttentionV2,
    SwinTransformerBlock,
    SwinTransformerBlockV2,
    _patch_merging_pad,
)
from torchvision.models.video.swin_transformer import ShiftedWindowAttention3d

from qatkit.graph.convert.to_integers import convert
from qatkit.graph.nodes import op_class
from qatkit.graph.stub import stub
from qatkit.graph.trace import trace
from qatkit.quant.qat_layers import QATLinear

ATTENTION = {"v1": ShiftedWindowAttention, "v2": ShiftedWindowAttentionV2}


def attention(version: str, shift: int = 2, **options: Any) -> nn.Module:
    """Returns an attention in windows of 4 x 4, with random parameters."""
    torch.manual_seed(0)
    module = ATTENTION[version](24, [4, 4], [shift, shift], 3, **options)
    for name, parameter in module.named_parameters():
        if "logit_scale" not in name:
            nn.init.normal_(parameter, std=0.3)
    return nn.Sequential(module).eval()


@pytest.mark.parametrize("size", [(8, 8), (4, 8), (4, 4), (3, 3), (7, 9)], ids=str)
@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize("version", ATTENTION)
def test_the_window_twin_is_the_attention(version: str, shift: int, size: tuple[int, int]) -> None:
    model, x = attention(version, shift), noise(3, *size, 24)
    result = stub(model, x)
    assert (result.changed, result.skipped) == (1, [])
    torch.testing.assert_close(result.graph(x), model(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.graph(x[:1]), model(x[:1]), rtol=1e-5, atol=1e-5)
    kept = {k: v for k, v in model.state_dict().items() if "relative_co" not in k and "_index" not in k}
    assert kept.keys() <= result.graph.state_dict().keys()


@pytest.mark.parametrize("padding", [False, True], ids=["whole windows", "padded"])
def test_what_a_window_reads_is_gathered_in_8_bits(padding: bool) -> None:
    """Quantization comes before the Gather, so that it moves a quarter of the bytes."""
    size = (7, 9) if padding else (8, 8)
    model = nn.Sequential(nn.GELU(), attention("v1")).eval()
    graph = calibrated(model, noise(2, *size, 24))
    (gather, _) = [n for n in graph.graph.nodes if n.target == "index_select"]
    before = gather
    while op_class(before) == "shape":
        before = before.all_input_nodes[0]
    assert ("pad" if padding else "0_quant") in str(before.target)


@pytest.mark.parametrize("size", [(4, 8, 8), (3, 7, 5), (2, 4, 8), (1, 3, 2)], ids=str)
@pytest.mark.parametrize("shift", [(0, 0, 0), (1, 2, 2)], ids=str)
def test_the_window_twin_is_the_attention_on_clips(shift: tuple[int, ...], size: tuple[int, ...]) -> None:
    """Covers whole and padded windows, and axes that a single window spans."""
    torch.manual_seed(0)
    model = nn.Sequential(ShiftedWindowAttention3d(12, [2, 4, 4], list(shift), 3)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = noise(2, *size, 12)
    result = stub(model, x)
    assert (result.changed, result.skipped) == (1, [])
    assert not any(op_class(n) == "window_attention" for n in result.graph.graph.nodes)
    torch.testing.assert_close(result.graph(x), model(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.graph(x[:1]), model(x[:1]), rtol=1e-5, atol=1e-5)


def test_what_outgrows_its_parameters_is_not_folded() -> None:
    """For 8 windows of 4·7·7 tokens, bias and mask would take 5 MB; their table and regions take 90 kB."""
    torch.manual_seed(0)
    model = nn.Sequential(ShiftedWindowAttention3d(12, [4, 7, 7], [2, 3, 3], 3)).eval()
    x = noise(2, 8, 14, 14, 12)
    converted = convert(calibrated(model, x)).graph
    assert sum(b.nbytes for b in converted.buffers()) < 1 << 20
    with torch.no_grad():
        assert (converted(x) - model(x)).abs().max() < 0.1 * model(x).abs().max()


@pytest.mark.parametrize("version", ATTENTION)
def test_gradients_through_the_twin_are_those_of_the_original(version: str) -> None:
    model, x = attention(version), noise(2, 8, 8, 24)
    graph = stub(model, x).graph
    model(x).pow(2).sum().backward()
    graph(x).pow(2).sum().backward()
    found, expected = dict(graph.named_parameters()), dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        scale = cast(Tensor, parameter.grad).abs().max()
        assert (cast(Tensor, found[name].grad) - cast(Tensor, parameter.grad)).abs().max() <= 1e-4 * scale, (
            name
        )


@pytest.mark.parametrize("block", [SwinTransformerBlock, SwinTransformerBlockV2])
def test_every_linear_is_quantized_and_position_bias_folded(block: Any) -> None:
    torch.manual_seed(0)
    model, x = block(24, 3, [4, 4], [2, 2]).eval(), noise(4, 8, 8, 24)
    graph = calibrated(model, x)
    quantized = {n for n, m in graph.named_modules() if isinstance(m, QATLinear) and m.weight_fake_quant}
    assert quantized == {"attn.qkv", "attn.proj", "mlp.0", "mlp.3"}
    result = convert(graph).graph
    kinds = {str(n.target) for n in result.graph.nodes if n.op == "call_function"}
    assert not any("position_bias" in kind for kind in kinds)
    assert [n for n in result.graph.nodes if n.op == "get_attr"]  # the folded bias
    with torch.no_grad():
        expected, got = model(x), result(x)
    assert (got - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize("size", [(8, 6), (7, 5), (3, 8, 6)], ids=str)
@pytest.mark.parametrize("kind", [PatchMerging, PatchMergingV2])
def test_patch_merging_is_one_permute(kind: Any, size: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, x = kind(6).eval(), noise(2, *size, 6)
    graph = stub(model, x).graph
    assert torch.equal(graph(x), model(x))
    kept = any(n.target is _patch_merging_pad for n in graph.graph.nodes)
    assert kept == (size == (7, 5))  # odd sizes need padding and keep the original


class Calls(nn.Module):
    """A model that calls one function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.norm = function, LayerNorm2d(5)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.function(self, x))


REWRITTEN = {
    "mean": lambda m, x: x.mean([2, 3]),
    "mean, keepdim": lambda m, x: x.mean((-2, -1), keepdim=True),
    "torch.mean": lambda m, x: torch.mean(x, dim=[2, 3]),
    "einsum, transposed": lambda m, x: torch.einsum("N C I D, N C J D -> N C I J", x, x * 2),
    "einsum, plain": lambda m, x: torch.einsum("NCIJ,NCJD->NCID", x, x),
    "layer norm": lambda m, x: m.norm(x),
}
LEFT = {
    "mean over channels": lambda m, x: x.mean(1),
    "mean over all": lambda m, x: x.mean(),
    "einsum, other": lambda m, x: torch.einsum("NCIJ,NCJD->NCDI", x, x),
    "einsum, implicit": lambda m, x: torch.einsum("ncij,ncjd", x, x),
    "einsum, ellipsis": lambda m, x: torch.einsum("...ij,...jd->...id", x, x),
    "einsum, sum": lambda m, x: torch.einsum("NCIJ->NC", x),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_functions_become_operators_with_kernels(name: str) -> None:
    model, x = Calls(REWRITTEN[name]), noise(2, 5, 6, 6)
    result = stub(model, x)
    assert result.changed == 1
    torch.testing.assert_close(result.graph(x), model(x), rtol=1e-5, atol=1e-5)
    assert not {op_class(n) for n in result.graph.graph.nodes} & {"mean", "einsum"}
    assert not any(n.target is F.layer_norm for n in result.graph.graph.nodes)


@pytest.mark.parametrize("name", LEFT)
def test_other_forms_are_left_alone(name: str) -> None:
    model, x = Calls(LEFT[name]), noise(2, 5, 6, 6)
    result = stub(model, x)
    assert result.changed == 0
    torch.testing.assert_close(result.graph(x), model(x))


class Auxiliary(nn.Module):
    """Two heads, the second only in training, as in torchvision's Inception."""

    def __init__(self, aux_logits: bool = True) -> None:
        super().__init__()
        self.aux_logits = aux_logits
        self.stem, self.main, self.aux = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3), nn.Conv2d(4, 2, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        if self.training and self.aux_logits:
            return self.main(x).mean((2, 3)), self.aux(x).mean((2, 3))
        return self.main(x).mean((2, 3))


def test_auxiliary_heads_are_trained_and_not_shipped() -> None:
    model, x = Auxiliary().eval(), noise(4, 3, 8, 8)
    expected = model(x)
    graph = calibrated(model, x)
    torch.testing.assert_close(graph(x), expected, atol=0.1, rtol=0.1)
    graph.train()
    main, aux = graph(x)
    (main.sum() + aux.sum()).backward()
    assert cast(Tensor, cast(nn.Conv2d, graph.get_submodule("aux")).weight.grad).any()
    converted = convert(graph).graph
    assert "aux" not in dict(converted.named_modules())
    assert converted(x).shape == expected.shape


class Segments(nn.Module):
    """A model with a dictionary of outputs."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Conv2d(3, i + 1, 1) for i, name in enumerate(names)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: head(x) for name, head in self.heads.items()}


def test_a_dictionary_of_outputs() -> None:
    """In inference, heads that torchvision or the model marks as auxiliary are left out; the order stays."""
    x = noise(2, 3, 4, 4)
    model = Segments("out", "aux").eval()
    model.aux_classifier = model.heads["aux"]
    assert torch.equal(trace(model, x)(x), model(x)["out"])
    features = Segments("out", "aux").eval()  # like a backbone, which marks no output as auxiliary
    assert trace(features, x).meta["outputs"] == ("out", "aux")
    marked = Segments("out", "edges", "aux").eval()
    marked.auxiliary_outputs = ("aux",)  # type: ignore[assignment]
    graph = trace(marked, x)
    assert graph.meta["outputs"] == ("out", "edges") and len(graph(x)) == 2 and len(graph.train()(x)) == 3
    several = Segments("p3", "p4", "p5").eval()
    graph = trace(several, x)
    assert graph.meta["outputs"] == ("p3", "p4", "p5")
    assert all(torch.equal(a, b) for a, b in zip(graph(x), several(x).values(), strict=True))


class Shuffle(nn.Module):
    """ShuffleNet's chunk, concat and channel shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x).chunk(2, dim=1)
        x = torch.cat((a, self.branch(b)), 1)
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)
        return cast(Tensor, self.last(x))


def test_int8_travels_through_chunk_and_shuffle() -> None:
    model, x = Shuffle().eval(), noise(4, 3, 6, 6)
    graph = prepared(model, x)
    points = [str(n.target) for n in graph.graph.nodes if str(n.target).endswith("_quant")]
    assert points == ["input_quant", "first_quant", "branch_quant", "cat_quant", "last_quant"]
    torch.testing.assert_close(graph(x), model(x))
