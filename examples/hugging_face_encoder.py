"""A Hugging Face encoder of token ids, quantized in one call; needs the extra `transformers`.

    uv run --extra transformers examples/hugging_face_encoder.py [FOLDER]

A small BERT with random weights takes the place of your model, and random ids that of your texts.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from qatkit import Result, quantize


class Sentence(nn.Module):
    """An encoder that returns the mean of the tokens' vectors [N, 64] for ids and mask [N, T]."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        found: Tensor = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(found.dtype)
        return (found * mask).sum(1) / mask.sum(1)


def main(folder: str = "outputs/hugging_face_encoder") -> Result:
    """Quantizes a small BERT with mean pooling; returns the result."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    encoder = BertModel(BertConfig(vocab_size=500, **shape), add_pooling_layer=False)
    lengths = torch.randint(6, 17, (12, 8, 1))
    mask = (torch.arange(16) < lengths).long()
    batches = [{"input_ids": torch.randint(0, 500, one.shape), "attention_mask": one} for one in mask]
    return quantize(Sentence(encoder).eval(), batches[0], batches, [f"output_dir={folder}"])


if __name__ == "__main__":
    sys.exit(0 if main(*sys.argv[1:]).met else 1)
