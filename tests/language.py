"""Small Hugging Face language models with their own tokenizer, and texts, as folders."""

from __future__ import annotations

import importlib
import importlib.util
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
WORDS = re.findall(
    r"\w+", "the a cat dog sat ran on over mat hill and then saw big red quick bird tree home sun"
)
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # so that rounding cannot change which token is likeliest
}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.2}


def text(lines: int, seed: int) -> str:
    """Returns sentences of random words."""
    draw = random.Random(seed)
    return "".join(" ".join(draw.choices(WORDS, k=draw.randint(4, 9))) + ".\n" for _ in range(lines))


def texts(folder: Path, lines: int = 200) -> Path:
    """Writes a text to calibrate with and one to test with, and returns their folder."""
    folder.mkdir(parents=True)
    (folder / "train.txt").write_text(text(2 * lines, 0))
    (folder / "test.txt").write_text(text(lines, 1))
    return folder


def tokenizer(size: int = 320) -> Any:
    """Returns a byte-level tokenizer of `tokenizers` with `size` tokens."""
    tokenizers: Any = importlib.import_module("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
    )
    made.train_from_iterator([text(400, 2)], trainer)
    assert made.get_vocab_size() == size
    return made


def language_model(kind: str, size: int = 320, **changes: Any) -> Any:
    """Returns a transformers model with random weights: "Llama", "GPT2" or "Qwen3"."""
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    shape = (GPT2 if kind == "GPT2" else SHAPE) | changes
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=size, bos_token_id=0, eos_token_id=0, tie_word_embeddings=True, **shape
    )
    name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    return getattr(transformers, name)(config).eval()


def saved(folder: Path, kind: str = "Llama", **changes: Any) -> Path:
    """Saves a model and its tokenizer by `save_pretrained` and returns the folder."""
    transformers: Any = importlib.import_module("transformers")
    language_model(kind, **changes).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer(), eos_token="<eos>").save_pretrained(
        folder
    )
    return folder
