"""Tests of block-wise learning: partition, tensor cache, Fisher importance, resume and skipped operators."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from chain import SMALL, Mlp, calibrated, noise, settle, small_vit
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations

from qatkit.algorithms import AdaRound, BlockReconstruction, SequentialMSE
from qatkit.algorithms.base import Algorithm
from qatkit.algorithms.blocks.cached import Cache
from qatkit.algorithms.blocks.fisher import direction, fisher_diagonal
from qatkit.algorithms.blocks.journal import block_file, working
from qatkit.algorithms.blocks.lesson import rounded
from qatkit.algorithms.blocks.partition import Block, blocks, is_learner, layers
from qatkit.graph.nodes import site
from qatkit.graph.phase import set_phase
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.observers import MinMaxObserver
from qatkit.quant.spec import QuantSpec
from qatkit.train.module import QATModule


def _small(name: str) -> tuple[nn.Module, Tensor]:
    if name == "vit":
        return small_vit(), noise(8, 3, 32, 32)
    kind, shape = SMALL[name]
    torch.manual_seed(0)
    return settle(kind(), *shape), noise(16, *shape)


def _one_after_the_other(graph: fx.GraphModule, parts: Sequence[Block], images: Tensor) -> Tensor:
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    known: dict[fx.Node, Any] = {inputs[0]: images}
    for block in parts:
        outputs = block.extract()(*(known[node] for node in block.inputs))
        known.update(zip(block.outputs, outputs, strict=True))
    last = next(node for node in graph.graph.nodes if node.op == "output")
    return cast(Tensor, known[last.all_input_nodes[0]])


@pytest.mark.parametrize(
    "name", ["chain", "residual", "block", "gate", "concat", "conv_flatten_linear", "vit"]
)
def test_the_blocks_one_after_the_other_are_the_graph(name: str) -> None:
    model, images = _small(name)
    graph = calibrated(model, images)
    learners = [node for node in graph.graph.nodes if is_learner(node)]
    for quantize in (True, False):
        set_phase(graph, observe=False, quantize=quantize)
        with torch.no_grad():
            wanted = graph(images)
            for parts in (blocks(graph, 1), blocks(graph, 3), blocks(graph, 100), layers(graph)):
                assert torch.equal(_one_after_the_other(graph, parts, images), wanted)
                assert [node for block in parts for node in block.operators] == learners
    assert all(len(block.operators) <= 3 for block in blocks(graph, 3))
    assert len(blocks(graph, 100)) == 1
    assert sum(block.operators != () for block in layers(graph)) == len(learners)


def test_blocks_are_cut_where_one_tensor_is_alive() -> None:
    model, images = _small("residual")
    parts = blocks(calibrated(model, images), 2)
    assert [[site(node) for node in block.operators] for block in parts] == [
        ["stem"],
        ["conv1", "conv2"],
        ["fc"],
    ]
    assert all(len(block.inputs) == len(block.outputs) == 1 for block in parts)
    vit = blocks(calibrated(small_vit(), noise(4, 3, 32, 32)), 4)
    assert [[site(node).rsplit(".", 2)[-1] for node in block.operators] for block in vit] == [
        ["conv_proj", "qkv", "out_proj"],
        ["0", "3", "qkv", "out_proj"],
        ["0", "3", "head"],
    ]
    assert all(len(block.outputs) == 1 for block in vit)


class _TwoHeads(nn.Module):
    """A net with two exported outputs and one only for training, like a detector."""

    inference_outputs = 2

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.stem(x).relu()
        logits = self.second(x)
        return {"boxes": self.first(x), "scores": logits.sigmoid(), "logits": logits}


@pytest.mark.parametrize("fisher", [False, True])
def test_outputs_for_training_alone_are_not_learned_from(fisher: bool) -> None:
    torch.manual_seed(0)
    images = noise(16, 3, 8, 8)
    graph = calibrated(_TwoHeads(), images)
    parts = blocks(graph, 100)
    outputs = [[site(node).removesuffix("_quant") for node in block.outputs] for block in parts]
    assert outputs == [["first", "sigmoid"]]
    set_phase(graph, observe=False, quantize=False)
    with torch.no_grad():
        exact = graph(images)
        for found, wanted in zip(parts[0].extract()(images), exact, strict=True):
            assert torch.equal(found, wanted)
    algorithm = BlockReconstruction(images=16, steps=20, batch_size=8, operators=1, fisher=fisher)
    assert algorithm(graph, [images]).changed > 0
    with torch.no_grad():
        errors = [
            float((one - other).square().mean()) for one, other in zip(graph(images), exact, strict=True)
        ]
    assert 0 < max(errors) < 1e-3


def test_a_layer_has_the_activation_behind_it() -> None:
    model, images = _small("block")  # its GELU follows fc1 directly, without a fake quantizer between
    parts = {site(b.operators[0]): b for b in layers(calibrated(model, images)) if b.operators}
    assert [site(node) for node in parts["fc1"].nodes][:2] == ["fc1", "act"]
    assert [site(node) for node in parts["fc2"].nodes] == ["fc2"]


@pytest.mark.parametrize("limit", [0, 2**30])
def test_cached_tensors_are_exact_on_a_grid_and_near_elsewhere(limit: int) -> None:
    quantizer = FakeQuantize(QuantSpec(), MinMaxObserver())
    x = 3 * noise(50, 40) + 1
    quantizer.observe(x)
    quantizer.enabled = True
    cache, y = Cache(limit), quantizer(x)
    cache.put("steps", 0, y, quantizer)
    cache.put("float", 0, x)
    cache.put("parts", 0, (x, torch.arange(5)))
    cache.put("large", 0, 1e5 * x)
    cache.put("small", 0, 1e-6 * x)
    assert torch.equal(cache.get("steps", 0), y)
    assert bool(((cache.get("float", 0) - x).abs() <= 2**-11 * x.abs() + 1e-7).all())
    assert torch.equal(cache.get("parts", 0)[1], torch.arange(5))
    assert torch.equal(cache.get("large", 0), 1e5 * x) and torch.equal(cache.get("small", 0), 1e-6 * x)
    assert cache.held == (0 if limit == 0 else 2000 * (1 + 2 + 2 + 4 + 4) + 40)
    folder = None if cache._folder is None else Path(cache._folder.name)
    cache.drop("large")
    assert folder is None or len(list(folder.iterdir())) == 5
    cache.close()
    assert folder is None or not folder.exists()


def test_importance_is_the_diagonal_of_the_fisher_information() -> None:
    """The mean importance of y_i over draws approaches Σ_ab W_ai (diag(p) - p pᵀ)_ab W_bi.

    Here p = softmax(W y + b).
    """
    torch.manual_seed(0)
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_module("fc", (x,)),))
    tail = fx.GraphModule(nn.ModuleDict({"fc": nn.Linear(6, 4)}), graph)
    y = noise(3, 6)
    generator = torch.Generator().manual_seed(0)
    found = torch.stack([fisher_diagonal(tail, [y], [0], generator)[0] for _ in range(3000)]).mean(0)
    weight = tail.get_parameter("fc.weight").detach().double().numpy()
    shares = torch.softmax(tail(y)[0].detach().double(), 1).numpy()
    wanted = [np.diag(weight.T @ (np.diag(p) - np.outer(p, p)) @ weight) for p in shares]
    np.testing.assert_allclose(found.numpy(), np.array(wanted), rtol=0.15)
    signs = direction(noise(2, 3, 5), generator, classes=True)  # tokens: no logits
    assert set(signs.unique().tolist()) == {-1.0, 1.0}


ALGORITHMS: list[Algorithm] = [
    SequentialMSE(images=16, candidates=3, batch_size=8),
    AdaRound(images=16, steps=6, batch_size=8),
    BlockReconstruction(images=16, steps=6, batch_size=8, operators=2, scale_lr=0.01, bias_lr=0.01),
    BlockReconstruction(images=16, steps=6, batch_size=8, operators=2, fisher=True, memory=1),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["mse", "adaround", "blocks", "fisher"])
def test_a_killed_call_goes_on_and_comes_to_the_same_bits(algorithm: Algorithm, tmp_path: Path) -> None:
    model, images = _small("residual")
    file = tmp_path / "it.partial"
    whole, killed, resumed = (calibrated(model, images) for _ in range(3))
    with working(progress=False, seed=3, file=None):
        algorithm(whole, [images])
    # The importance of the first block's output sends two chunks through the last operator.
    calls = iter(range(3 if getattr(algorithm, "fisher", False) else 1))
    last = killed.get_submodule("fc").register_forward_pre_hook(lambda *_: _kill_after(calls))
    with pytest.raises(KeyboardInterrupt), working(progress=False, seed=3, file=file):
        algorithm(killed, [images])
    last.remove()
    kept = len(list(tmp_path.iterdir()))
    assert kept > 0
    with working(progress=False, seed=3, file=file):
        algorithm(resumed, [images])
    wanted, found = whole.state_dict(), resumed.state_dict()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert len(list(tmp_path.iterdir())) > kept


def _kill_after(calls: Iterator[int]) -> None:
    next(calls)
    if operator.length_hint(calls) == 0:
        raise KeyboardInterrupt


@pytest.mark.parametrize("fault", ["damaged", "other images", "other setting"])
def test_what_is_kept_of_something_else_is_not_taken(fault: str, tmp_path: Path) -> None:
    model, images = _small("chain")
    file = tmp_path / "it.partial"
    algorithm, other = (AdaRound(images=16, steps=n, batch_size=8) for n in (4, 5))
    first, graph, plain = (calibrated(model, images) for _ in range(3))
    with working(progress=False, seed=0, file=file):
        (other if fault == "other setting" else algorithm)(
            first, [images.flip(0)] if fault == "other images" else [images]
        )
    first_block = block_file(file, 0)
    if fault == "damaged":
        stored = first_block.read_bytes()
        first_block.write_bytes(stored[: len(stored) // 2])
    algorithm(plain, [images])
    pattern = re.escape(str(first_block)) + ".*its block and all later ones are computed again"
    with pytest.warns(UserWarning, match=pattern), working(progress=False, seed=0, file=file):
        algorithm(graph, [images])
    assert all(
        torch.equal(a, b)
        for a, b in zip(graph.state_dict().values(), plain.state_dict().values(), strict=True)
    )


def test_a_walk_reads_no_more_batches_than_it_needs() -> None:
    model, images = _small("chain")
    batches = iter(images.split(8))
    SequentialMSE(images=8)(calibrated(model, images), batches)
    assert torch.equal(next(batches), images[8:])


def test_an_algorithm_without_operators_says_so() -> None:
    with pytest.warns(UserWarning, match="AdaRound found no operator that it can change and changed nothing"):
        assert rounded(AdaRound(), {}) == 0


def test_what_stays_says_why() -> None:
    reasons = dict(AdaRound().notes(calibrated(*_small("twice"))))
    assert set(reasons) == {"conv", "conv_1"}
    assert set(reasons.values()) == {"rounding not learned: several calls share its weight"}
    alive = calibrated(*_small("chain"), batch_norm="freeze")
    assert [where for where, _ in SequentialMSE().notes(alive)] == ["conv1", "conv2"]
    model = Mlp().eval()
    parametrizations.weight_norm(model.fc1)
    images = noise(8, 12)
    graph = calibrated(model, images)
    expected = [("fc1", "rounding not learned: its weight is computed from other parameters")]
    algorithm = BlockReconstruction(images=8, steps=2)
    assert algorithm.notes(graph) == expected and algorithm(graph, [images]).skipped == expected


class Two(nn.Module):
    """A net with two inputs (images and numbers) whose inner tensors are [tokens, images, channels]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.table, self.last = nn.Conv2d(3, 8, 3), nn.Linear(4, 8), nn.Linear(8, 5)

    def forward(self, image: Tensor, numbers: Tensor) -> Tensor:
        tokens = self.conv(image).flatten(2).permute(2, 0, 1)
        return cast(Tensor, self.last(torch.relu(tokens + self.table(numbers))).mean(0))


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["mse", "adaround", "blocks", "fisher"])
def test_several_inputs_and_tokens_before_images(algorithm: Algorithm) -> None:
    torch.manual_seed(0)
    batch = (noise(16, 3, 6, 6), noise(16, 4, seed=1))
    module = QATModule(Two().eval(), (batch[0][:2], batch[1][:2]), algorithms=[algorithm])
    module.calibrate([batch])
    module.correct([batch])
    module.eval()
    module.ready_to_convert()
    converted = module.convert().graph
    torch.testing.assert_close(converted(*batch), module.graph(*batch), rtol=1e-4, atol=1e-4)
