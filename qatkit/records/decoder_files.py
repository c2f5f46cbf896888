"""The folder of a decoder in a run and in its bundle: file names, and the configuration for onnxruntime-genai.

decoder/model.onnx         reads keys and values of earlier tokens, returns those of all tokens
decoder/tokenizer.json
decoder/genai_config.json  names and sizes, for onnxruntime-genai and for generate.py
decoder/generate.py        continues a text
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DECODER_FOLDER = "decoder"
DECODER_FILE = "model.onnx"
GENAI_FILE, GENERATE_FILE = "genai_config.json", "generate.py"
DECODER_FILES = (DECODER_FILE, "tokenizer.json", "tokenizer_config.json", GENAI_FILE, GENERATE_FILE)

# Models that have a type in onnxruntime-genai. Others get the type llama, since only names and sizes matter.
_TYPES = ("gemma", "llama", "mistral", "phi", "phi3", "qwen2", "qwen3")


def genai_config(model: Mapping[str, Any], ends: list[int], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Returns the content of genai_config.json.

    Args:
        model: the model's configuration in transformers.
        ends: the ids of the tokens that end a text.
        sizes: the numbers of "layers" and of key/value "heads", the "width" of a head, and the "context" in
            tokens.

    Source: onnxruntime-genai, docs/genai-config reference.
    """
    kind = str(model.get("model_type", ""))
    context = sizes["context"]
    start = model.get("bos_token_id")
    padding = model.get("pad_token_id")
    return {
        "model": {
            "bos_token_id": ends[0] if start is None else start,
            "context_length": context,
            "decoder": {
                "filename": DECODER_FILE,
                "head_size": sizes["width"],
                "hidden_size": int(model.get("hidden_size") or model["n_embd"]),
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "position_ids": "position_ids",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
                "num_attention_heads": int(model.get("num_attention_heads") or model["n_head"]),
                "num_hidden_layers": sizes["layers"],
                "num_key_value_heads": sizes["heads"],
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
            },
            "eos_token_id": ends,
            "pad_token_id": ends[0] if padding is None else padding,
            "type": kind if kind in _TYPES else "llama",
            "vocab_size": int(model["vocab_size"]),
        },
        "search": {
            "do_sample": False,
            "max_length": context,
            "min_length": 0,
            "num_beams": 1,
            "num_return_sequences": 1,
            "past_present_share_buffer": False,
            "temperature": 1.0,
            "top_k": 1,
            "top_p": 1.0,
        },
    }
