"""Compares a run's decoder with other decoders of the same model: speed and accuracy, in one table.

    uv run --group benchmark benchmarks/decoding.py RUN --text test.txt [--windows 4] [--rounds 10] [--work DIR]

RUN is the folder of a finished run with export.decoder=true. Its decoder is compared with a float
file of the same model, and with that file quantized by ONNX Runtime: dynamically to int8, and to 4 bits in
blocks of 32 with zero points. 4-bit files are timed at accuracy level 0 (float activations) and 4 (8-bit
activations). In each round every file in turn decodes 8 tokens after a prompt of 256, and ratios are taken within
rounds. Perplexity and the share of positions with the same next token as float are measured on whole windows of
512 tokens.
"""

from __future__ import annotations

import argparse
import logging
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

from qatkit import models
from qatkit.config.compose import load_config
from qatkit.data.tokenizer import tokenizer_of
from qatkit.export.accuracy_level import FLOAT, INT8, at_level
from qatkit.export.decoder_inputs import for_runtimes
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.captured import Captured
from qatkit.graph.convert.simplify import float_baseline
from qatkit.models.hf_decoder import MASK, PAST_MASK, Decoder, past_names
from qatkit.verify.decoding import OnnxDecoder

_CONTEXT, _BEFORE, _TOKENS = 512, 256, 8


def float_decoder(run: Path, path: Path) -> None:
    """Writes the decoder of a run's float model."""
    config = load_config(run / "config.yaml")
    decoder = Decoder(models.build(config.model, task=config.task))
    example = decoder.example(torch.randint(0, 1000, (2, 18)), 7)
    with decoder.as_forward() as model:
        graph = Captured(model, example, decoder.axes()).graph()
        export_onnx(float_baseline(graph, example), example, path, opset=config.export.opset)
    for_runtimes(path, MASK, PAST_MASK, past_names(decoder.layers))


def files(run: Path, work: Path) -> Iterator[tuple[str, Path]]:
    """Yields the title and path of every file, and writes the files that the run does not have."""
    logging.disable(logging.WARNING)
    exact, ours = work / "float.onnx", run / "decoder" / "model.onnx"
    if not exact.is_file():
        float_decoder(run, exact)
    yield "float", exact
    for level in (FLOAT, INT8):
        at_level(ours, work / f"ours_{level}.onnx", level)
        yield f"this run, level {level}", work / f"ours_{level}.onnx"
    quantize_dynamic(exact, work / "dynamic.onnx", per_channel=True, weight_type=QuantType.QInt8)
    yield "ONNX Runtime, dynamic int8", work / "dynamic.onnx"
    for level in (0, 4):
        config = DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=False, accuracy_level=level, bits=4)
        quantizer = MatMulNBitsQuantizer(onnx.load(exact), 32, False, level, algo_config=config)
        quantizer.process()
        onnx.save(quantizer.model.model, work / f"rtn_{level}.onnx")
        yield f"ONNX Runtime, 4-bit RTN, level {level}", work / f"rtn_{level}.onnx"


def quality(decoder: OnnxDecoder, windows: np.ndarray) -> tuple[float, np.ndarray]:
    """Returns the mean loss in nats per token, and the most likely next tokens [windows, T]."""
    nats, likeliest = [], []
    for row in windows:
        logits = decoder.run(row[None], decoder.empty(1))[0][0].astype(np.float64)
        largest = logits.max(1, keepdims=True)
        total = largest[:, 0] + np.log(np.exp(logits - largest).sum(1))
        nats.append((total[:-1] - logits[np.arange(len(row) - 1), row[1:]]).mean())
        likeliest.append(logits.argmax(1))
    return float(np.mean(nats)), np.stack(likeliest)


def main() -> None:
    """Parses the arguments, measures and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, help="folder that keeps the generated files")
    asked = parser.parse_args()
    config = load_config(asked.run / "config.yaml")
    about = models.declared(config.model, None, config.task).about
    ids = tokenizer_of(config.data, about).encode(asked.text.read_text(), add_special_tokens=False).ids
    windows = np.array(ids[: asked.windows * _CONTEXT], np.int64).reshape(-1, _CONTEXT)
    with tempfile.TemporaryDirectory() as temporary:
        work = asked.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        known = dict(files(asked.run, work))
        decoders = {name: OnnxDecoder(path, asked.threads) for name, path in known.items()}
        pasts = {name: one.run(windows[:1, :_BEFORE], one.empty(1))[1] for name, one in decoders.items()}
        seconds: dict[str, list[float]] = {name: [] for name in decoders}
        for _ in range(asked.rounds + 1):
            for name, one in decoders.items():
                past, start = pasts[name], time.perf_counter()
                for place in range(_BEFORE, _BEFORE + _TOKENS):
                    _, past = one.run(windows[:1, place : place + 1], past)
                seconds[name].append((time.perf_counter() - start) / _TOKENS)
        base, chosen = quality(decoders["float"], windows)
        print(
            "| file | MB | tokens/s | speed-up over float [p10-p90] | perplexity | same next token % |\n"
            "|---|---|---|---|---|---|"
        )
        for name, one in decoders.items():
            found, likeliest = (base, chosen) if name == "float" else quality(one, windows)
            timed = np.array(seconds[name][1:])
            ratios = np.array(seconds["float"][1:]) / timed
            low, high = np.quantile(ratios, [0.1, 0.9])
            print(
                f"| {name} | {known[name].stat().st_size / 1e6:.0f} | {1 / np.median(timed):.1f} |"
                f" {np.median(ratios):.2f} [{low:.2f}-{high:.2f}] | {math.exp(found):.2f} |"
                f" {100 * (likeliest == chosen).mean():.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
