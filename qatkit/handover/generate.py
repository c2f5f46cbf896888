"""Continues a text with the decoder next to this file.

    pip install onnxruntime numpy tokenizers
    python generate.py "Once upon a time" --tokens 200

Decoding is greedy. Keys and values of earlier tokens are passed from step to step, so that a step computes
only one token.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from tokenizers import Tokenizer


class Generator:
    """A decoder and its tokenizer.

    Args:
        folder: the folder with model.onnx, tokenizer.json and genai_config.json.
        threads: the number of threads of ONNX Runtime; 0 means its default.
    """

    def __init__(self, folder: Path, threads: int = 0) -> None:
        config = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["model"]
        about, self._ends = config["decoder"], config["eos_token_id"]
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        # Products with weights from a DequantizeLinear are computed in float. A MatMulNBits has its own
        # accuracy level.
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
        self.tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._session = ort.InferenceSession(
            folder / about["filename"], options, providers=["CPUExecutionProvider"]
        )
        heads, width = about["num_key_value_heads"], about["head_size"]
        self._empty = np.zeros((1, heads, 0, width), np.float32)
        self._past = [one.name for one in self._session.get_inputs() if one.name.startswith("past")]

    def tokens(self, prompt: list[int], count: int) -> Iterator[int]:
        """Yields up to `count` tokens that continue the prompt, and stops at an end-of-text token."""
        past, given, place = [self._empty] * len(self._past), prompt, 0
        for _ in range(count):
            feeds = {
                "input_ids": np.array([given], np.int64),
                "attention_mask": np.ones((1, place + len(given)), np.int64),
                "position_ids": np.arange(place, place + len(given), dtype=np.int64)[None],
                **dict(zip(self._past, past, strict=True)),
            }
            logits, *past = self._session.run(None, feeds)
            token = int(logits[0, -1].argmax())
            place, given = place + len(given), [token]
            if token in self._ends:
                return
            yield token

    def text(self, prompt: str, count: int) -> Iterator[str]:
        """Yields the text that continues a prompt, piece by piece."""
        ids, whole, told = self.tokenizer.encode(prompt).ids, "", ""
        made: list[int] = []
        for token in self.tokens(ids, count):
            made.append(token)
            whole = self.tokenizer.decode(made)
            if not whole.endswith("\N{REPLACEMENT CHARACTER}"):  # an incomplete multi-byte character
                yield whole[len(told) :]
                told = whole
        yield whole[len(told) :]


def main() -> None:
    """Parses the arguments and prints the text as it is generated."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prompt", help="text to continue")
    parser.add_argument("--tokens", type=int, default=200, help="maximum number of tokens (default: 200)")
    parser.add_argument("--threads", type=int, default=0, help="number of threads (default: ONNX Runtime's)")
    asked = parser.parse_args()
    print(asked.prompt, end="", flush=True)
    for piece in Generator(Path(__file__).parent, asked.threads).text(asked.prompt, asked.tokens):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
