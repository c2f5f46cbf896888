"""What do weights of few bits cost a language model? Perplexity of its text, method by method, in one table.

    uv run --group benchmark benchmarks/language_models.py FOLDER --text test.txt --calibrate valid.txt
        [--bits 4 3] [--methods nearest mse gptq gptq_ranges ort_rtn ort_k_quant ort_hqq] [--context 512] [--windows N]
        [--block 32] [--scale-dtype float32]

FOLDER is a causal language model with its tokenizer, as transformers saves it. Its Linears get weights in blocks
(`backend=weight_only`), simulated; table and head stay float. `gptq_ranges` is GPTQ with the scales of the weights'
ranges. `ort_*` are the algorithms of ONNX Runtime's
matmul_nbits_quantizer on the same weights, 4 bits with zero points. Windows of the text do not overlap, and every
method is compared with float window by window: the interval is two standard errors of the mean difference.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from qatkit.algorithms import GPTQ
from qatkit.config.schema import OverrideConfig
from qatkit.graph.captured import Captured
from qatkit.graph.phase import set_phase
from qatkit.graph.prepare import prepare_qat
from qatkit.graph.quantizers import clip_weights, quantized_operators
from qatkit.quant.backends import WEIGHT_ONLY
from qatkit.quant.granularity import PerBlock
from qatkit.quant.spec import SCALE_TYPES
from qatkit_verify.files import write_text

_FLOAT = {"*lm_head": OverrideConfig(float=True), "*embed_tokens": OverrideConfig(float=True)}
_ORT = {"ort_rtn": "RTN", "ort_k_quant": "KQuant", "ort_hqq": "HQQ"}


class Logits(nn.Module):
    """The model as a function from words [N, T] to logits [N, T, words]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor) -> Any:
        return self.model(words, use_cache=False).logits


def windows(folder: Path, text: Path, context: int, count: int | None) -> Tensor:
    """The words of a text, [windows, context]."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)(text.read_text(), return_tensors="pt").input_ids[0]
    found: Tensor = ids[: len(ids) // context * context].reshape(-1, context)
    return found[:count]


@torch.no_grad()
def losses(model: nn.Module, words: Tensor, batch: int, device: torch.device) -> Tensor:
    """Mean nats a word of each window, float64."""
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
    """A graph with quantized weights, rounded to the nearest."""
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


def by_onnxruntime(asked: tuple[np.ndarray, str, int]) -> np.ndarray:
    """A weight [out, in] quantized by one of ONNX Runtime's algorithms in 4 bits, dequantized again."""
    weight, name, block = asked
    import onnx
    from onnx import TensorProto, helper, numpy_helper
    from onnxruntime.quantization import matmul_nbits_quantizer as tool

    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "product")],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, weight.shape[1]])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, len(weight)])],
        [numpy_helper.from_array(np.ascontiguousarray(weight.T), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    if name == "HQQ":
        config: Any = tool.HQQWeightOnlyQuantConfig(block_size=block, bits=4)
    elif name == "KQuant":
        config = tool.KQuantWeightOnlyQuantConfig()
    else:
        config = tool.DefaultWeightOnlyQuantConfig(block_size=block, is_symmetric=False, bits=4)
    quantizer = tool.MatMulNBitsQuantizer(model, block_size=block, is_symmetric=False, algo_config=config)
    quantizer.process()
    made: onnx.ModelProto = quantizer.model.model
    (node,) = [node for node in made.graph.node if node.op_type == "MatMulNBits"]
    size = next(one.i for one in node.attribute if one.name == "block_size")
    held = {one.name: numpy_helper.to_array(one) for one in made.graph.initializer}
    data, scale, zero = (held[key] for key in node.input[1:4])
    rows, blocks = data.shape[:2]
    codes = np.stack([data & 15, data >> 4], -1).reshape(rows, blocks, size).astype(np.float32)
    if zero.dtype == np.uint8:
        packed = zero.reshape(rows, -1)
        zero = np.stack([packed & 15, packed >> 4], -1).reshape(rows, -1)[:, :blocks]
    zeros = zero.reshape(rows, blocks, 1).astype(np.float32)
    values = (codes - zeros) * scale.reshape(rows, blocks, 1)
    return np.asarray(values.reshape(rows, -1)[:, : weight.shape[1]])


def methods(seen: Tensor, jobs: int, block: int) -> dict[str, Callable[[fx.GraphModule], Any]]:
    """Returns the methods by name; each quantizes the weights of a prepared graph in place."""

    def gptq(**settings: Any) -> Callable[[fx.GraphModule], Any]:
        def run(graph: fx.GraphModule) -> None:
            GPTQ(images=len(seen), batch_size=8, **settings)(graph, [seen])

        return run

    def tool(name: str) -> Callable[[fx.GraphModule], Any]:
        def run(graph: fx.GraphModule) -> None:
            chosen = [operator for _, operator, _ in quantized_operators(graph)]
            asked = [(one.weight.detach().cpu().numpy(), name, block) for one in chosen]
            context = multiprocessing.get_context("spawn")  # a CUDA context is lost by a fork
            with ProcessPoolExecutor(jobs, context) as pool:
                for one, values in zip(chosen, pool.map(by_onnxruntime, asked), strict=True):
                    one.weight.data = torch.from_numpy(values.copy()).to(one.weight.device)
            set_phase(graph, observe=False, quantize=False)

        return run

    known: dict[str, Callable[[fx.GraphModule], Any]] = {
        "nearest": lambda graph: None,
        "mse": clip_weights,
        "gptq": gptq(),
        "gptq_ranges": gptq(scales=False),
        "gptq_past=0": gptq(past=0.0),
        "gptq_past=1": gptq(past=1.0),
    }
    return known | {key: tool(name) for key, name in _ORT.items()}


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Float, then every method with every number of bits."""
    from transformers import AutoModelForCausalLM

    device = torch.device(asked.device)
    model = Logits(AutoModelForCausalLM.from_pretrained(asked.folder, dtype=torch.float32)).eval()
    words = windows(asked.folder, asked.text, asked.context, asked.windows)
    seen = windows(asked.folder, asked.calibrate, asked.context, asked.sequences)
    captured = Captured(model, seen[:2])
    base = losses(model.to(device), words, asked.batch, device)
    yield {"bits": 32, "method": "float", "perplexity": math.exp(base.mean()), "seconds": 0.0}
    model.cpu()
    known = methods(seen, asked.jobs, asked.block)
    for bits in asked.bits:
        for name in asked.methods:
            if name in _ORT and bits != 4:
                continue
            graph, start = prepared(captured, seen[:2], bits, asked, device), time.perf_counter()
            known[name](graph)
            seconds = time.perf_counter() - start
            found = losses(graph, words, asked.batch, device)
            lost = found - base
            interval = 2 * float(lost.std() / math.sqrt(len(lost)))
            yield {
                "bits": bits, "method": name, "perplexity": math.exp(found.mean()), "lost": float(lost.mean()),
                "interval": interval, "ratio": math.exp(lost.mean()), "seconds": seconds,
            }  # fmt: skip


def main() -> None:
    """Parses the arguments, measures, and prints one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calibrate", type=Path, required=True, help="another text")
    parser.add_argument("--bits", type=int, nargs="+", default=[4], choices=(2, 3, 4, 8))
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--scale-dtype", default="float32", choices=SCALE_TYPES)
    parser.add_argument("--methods", nargs="+", default=["nearest", "mse", "gptq", *_ORT])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--windows", type=int, help="of the text, at most")
    parser.add_argument("--sequences", type=int, default=128, help="to calibrate with")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--record", type=Path, help="a JSON file of what was measured")
    asked = parser.parse_args()
    found = []
    print(
        "| bits | method | perplexity | against float | nats a word more | seconds |\n|---|---|---|---|---|---|"
    )
    for row in rows(asked):
        found.append(row)
        more = f"{row['lost']:.4f} ± {row['interval']:.4f}" if "lost" in row else "-"
        print(f"| {row['bits']} | {row['method']} | {row['perplexity']:.3f} | {row.get('ratio', 1):.4f} | {more} |"
              f" {row['seconds']:.0f} |", flush=True)  # fmt: skip
        if asked.record:
            write_text(asked.record, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
