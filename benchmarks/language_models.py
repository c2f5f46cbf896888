"""Measures the perplexity of a language model with low-bit weights, method by method, in one table.

    uv run --group benchmark benchmarks/language_models.py FOLDER --text test.txt --calibrate valid.txt
        [--bits 4 3] [--methods nearest mse awq gptq awq+gptq gptq_ranges ort_rtn ort_k_quant ort_hqq ort_gptq]
        [--context 512 2048] [--windows N] [--block 32] [--scale-dtype float32]

FOLDER is a causal language model with its tokenizer, as saved by transformers. The weights of its Linears are
quantized in blocks (`backend=weight_only`) in simulation; the embedding table and the head stay float. `gptq_ranges`
is GPTQ with scales from the weights' ranges. `ort_*` and `olive_gptq` run other tools on the same weights and text
(`weight_only_peers.py`). Windows of the text do not overlap, and every method is compared with float window by
window: the interval is two standard errors of the mean difference. The record contains the loss of each window.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from weight_only_peers import PEERS

from qatkit.algorithms import AWQ, GPTQ
from qatkit.config.schema import OverrideConfig
from qatkit.graph.captured import Captured
from qatkit.graph.nodes import site
from qatkit.graph.phase import set_phase
from qatkit.graph.prepare import prepare_qat
from qatkit.graph.quantizers import clip_weights, quantized_operators
from qatkit.quant.backends import WEIGHT_ONLY
from qatkit.quant.granularity import PerBlock
from qatkit.quant.spec import SCALE_TYPES
from qatkit_verify.files import write_text

_FLOAT = {"*lm_head": OverrideConfig(float=True), "*embed_tokens": OverrideConfig(float=True)}


class Logits(nn.Module):
    """The model as a function from token ids [N, T] to logits [N, T, vocabulary]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor) -> Any:
        return self.model(words, use_cache=False).logits


def windows(folder: Path, text: Path, context: int, count: int | None) -> Tensor:
    """Returns the token ids of a text, [windows, context]."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)(text.read_text(), return_tensors="pt").input_ids[0]
    found: Tensor = ids[: len(ids) // context * context].reshape(-1, context)
    return found[:count]


@torch.no_grad()
def losses(model: nn.Module, words: Tensor, batch: int, device: torch.device) -> Tensor:
    """Returns the mean nats per token of each window, float64."""
    found = []
    for part in words.split(batch):
        given = part.to(device)
        scores = model(given)[:, :-1].float()
        each = nn.functional.cross_entropy(scores.transpose(1, 2), given[:, 1:], reduction="none")
        found.append(each.double().mean(1).cpu())
    return torch.cat(found)


def prepared(
    captured: Captured, example: Tensor, bits: int, asked: argparse.Namespace, device: torch.device
) -> fx.GraphModule:
    """Returns a graph with quantized weights, rounded to nearest."""
    spec = replace(
        WEIGHT_ONLY.weight,
        dtype=f"int{bits}",
        granularity=PerBlock(asked.block),
        scale_dtype=asked.scale_dtype,
    )
    graph = captured.graph()
    prepare_qat(graph, replace(WEIGHT_ONLY, weight=spec), example, _FLOAT)
    set_phase(graph, observe=False, quantize=True)
    return graph.to(device).eval()


def methods(seen: Tensor) -> dict[str, Callable[[fx.GraphModule], Any]]:
    """Returns this package's methods by name; each quantizes the weights of a prepared graph in place."""

    def gptq(**settings: Any) -> Callable[[fx.GraphModule], Any]:
        def run(graph: fx.GraphModule) -> None:
            GPTQ(images=len(seen), batch_size=8, **settings)(graph, [seen])

        return run

    def awq(graph: fx.GraphModule) -> None:
        AWQ(images=len(seen))(graph, seen.split(4))
        set_phase(graph, observe=False, quantize=True)

    def awq_gptq(graph: fx.GraphModule) -> None:
        awq(graph)
        gptq()(graph)

    return {
        "nearest": lambda graph: None,
        "awq": awq,
        "awq+gptq": awq_gptq,
        "mse": clip_weights,
        "gptq": gptq(),
        "gptq_ranges": gptq(scales=False),
        "gptq_past=0": gptq(past=0.0),
        "gptq_past=1": gptq(past=1.0),
    }


@torch.no_grad()
def rounded(graph: fx.GraphModule, model: nn.Module) -> dict[str, np.ndarray]:
    """Returns, by name, the graph's parameters that differ from the model's, with quantized weights dequantized."""
    before, found = dict(model.named_parameters()), dict(graph.named_parameters())
    for node, one, quantizer in quantized_operators(graph):
        found[f"{site(node)}.weight"] = nn.Parameter(quantizer(one.weight)[0])
    changed = {
        name: one for name, one in found.items() if name in before and not torch.equal(one, before[name])
    }
    return {name: one.cpu().numpy() for name, one in changed.items()}


@contextmanager
def installed(model: nn.Module, values: dict[str, np.ndarray]) -> Iterator[None]:
    """Replaces parameters of a model, by name, within a `with` block."""
    parameters = {name: model.get_parameter(name) for name in values}
    kept = {name: one.data for name, one in parameters.items()}
    for name, one in parameters.items():
        one.data = torch.from_numpy(values[name]).to(one.device)
    yield
    for name, one in parameters.items():
        one.data = kept[name]


def against(lost: Tensor) -> tuple[float, float]:
    """Returns the mean of paired differences and two standard errors of that mean."""
    return float(lost.mean()), 2 * float(lost.std() / math.sqrt(len(lost)))


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row for float and for every method with every number of bits, each per context length."""
    from transformers import AutoModelForCausalLM

    device = torch.device(asked.device)
    model = Logits(AutoModelForCausalLM.from_pretrained(asked.folder, dtype=torch.float32)).eval()
    texts = {size: windows(asked.folder, asked.text, size, asked.windows) for size in asked.context}
    seen = windows(asked.folder, asked.calibrate, asked.context[0], asked.sequences)
    captured = Captured(model, seen[:2])
    known, base = methods(seen), dict[int, Tensor]()

    def measured(bits: int, method: str, seconds: float) -> Iterator[dict[str, Any]]:
        for size, words in texts.items():
            found = losses(model.to(device), words, max(asked.batch * asked.context[0] // size, 1), device)
            lost, interval = against(found - base.setdefault(size, found))
            yield {
                "context": size, "bits": bits, "method": method, "perplexity": math.exp(found.mean()),
                "lost": lost, "interval": interval, "ratio": math.exp(lost), "seconds": seconds,
                "windows": found.tolist(),
            }  # fmt: skip

    yield from measured(32, "float", 0.0)
    for bits in asked.bits:
        for name in asked.methods:
            start = time.perf_counter()
            if name in PEERS:
                weights = PEERS[name](model, seen, bits, asked.block, asked.jobs)
                weights = {f"{path}.weight": values for path, values in weights.items()}
            else:
                graph = prepared(captured, seen[:2], bits, asked, device)
                known[name](graph)
                weights = rounded(graph, model)
                del graph
            with installed(model, weights):
                yield from measured(bits, name, time.perf_counter() - start)


def main() -> None:
    """Parses the arguments, measures, and prints one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calibrate", type=Path, required=True, help="text file for calibration")
    parser.add_argument("--bits", type=int, nargs="+", default=[4], choices=(2, 3, 4, 8))
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--scale-dtype", default="float32", choices=SCALE_TYPES)
    parser.add_argument(
        "--methods", nargs="+", default=["nearest", "mse", "gptq", "ort_rtn", "ort_k_quant", "ort_hqq"]
    )
    parser.add_argument(
        "--context", type=int, nargs="+", default=[512], help="context lengths; the first one also calibrates"
    )
    parser.add_argument("--windows", type=int, help="maximum number of windows of the text")
    parser.add_argument("--sequences", type=int, default=128, help="number of calibration sequences")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--record", type=Path, help="JSON file for the results")
    asked = parser.parse_args()
    found = []
    print("| context | bits | method | perplexity | ratio to float | extra nats per token | seconds |")
    print("|---|---|---|---|---|---|---|")
    for row in rows(asked):
        found.append(row)
        print(f"| {row['context']} | {row['bits']} | {row['method']} | {row['perplexity']:.3f} | {row['ratio']:.4f} |"
              f" {row['lost']:.4f} ± {row['interval']:.4f} | {row['seconds']:.0f} |", flush=True)  # fmt: skip
        if asked.record:
            write_text(asked.record, json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
