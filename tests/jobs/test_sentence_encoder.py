"""Tests of a sentence encoder, from a model folder and scored pairs to an ONNX file, against transformers."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from command_line import CONF
from language import needs_transformers, text, tokenizer
from scipy.stats import spearmanr
from tiny_run import report_of
from torch.nn import functional as F

from qatkit.config.compose import compose_config
from qatkit.config.schema import Config
from qatkit.jobs import pipeline
from qatkit.run.build import data_of

pytestmark = needs_transformers
HEAD = "sentence_A\tsentence_B\trelatedness_score\n"


def scored(folder: Path) -> Path:
    """Returns a folder of pairs whose score is the number of words that they share."""
    folder.mkdir()
    draw = random.Random(0)
    for name, count in (("train.tsv", 80), ("test.tsv", 60)):
        rows, sentences = [HEAD], text(300, count).split(".\n")
        for _ in range(count):
            first = draw.choice(sentences[:-1]).split()
            second = [*first[: draw.randint(0, len(first))], *draw.choice(sentences[:-1]).split()[:3]]
            rows.append(f"{' '.join(first)}\t{' '.join(second)}\t{len({*first} & {*second})}\n")
        (folder / name).write_text("".join(rows))
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a small BERT with its tokenizer, written by `save_pretrained`."""
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("encoder") / "model"
    config = transformers.BertConfig(
        vocab_size=320, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer()).save_pretrained(folder)
    return folder


def asked(folder: Path, model: Path, root: Path, *changes: str) -> Config:
    return compose_config(
        CONF,
        [
            "recipe=text_embedding_ptq", f"model.name=hf/{model}", f"data.root={root}", f"output_dir={folder}",
            "calibration.images=40", "verify.latency_runs=2", "verify.max_drop=5", "trainer.progress=false", *changes,
        ],
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [(), ("backend=weight_only", "algorithm=gptq")],
    ids=["int8", "int4"],
)
def test_the_rank_correlation_is_that_of_the_file(
    changes: tuple[str, ...], encoder: Path, tmp_path: Path
) -> None:
    config = asked(tmp_path / "run", encoder, scored(tmp_path / "pairs"), *changes)
    assert pipeline.train(config) == 0
    report = report_of(tmp_path / "run")
    assert report["task"]["name"] == "text_pairs" and report["task"]["samples"] == "pairs"

    transformers: Any = importlib.import_module("transformers")
    model = transformers.AutoModel.from_pretrained(encoder, dtype=torch.float32).eval()
    files = {
        name: ort.InferenceSession(tmp_path / "run" / f"model.{name}.onnx") for name in ("float", "int8")
    }
    found: dict[str, list[Any]] = {name: [] for name in files}
    scores = []
    for batch, targets in data_of(config).test_batches():
        ids, mask = batch["input_ids"], batch["attention_mask"]
        with torch.no_grad():
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
        means = torch.stack([row[: int(own.sum())].mean(0) for row, own in zip(hidden, mask, strict=True)])
        feeds = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
        outputs = {name: session.run(None, feeds)[0] for name, session in files.items()}
        np.testing.assert_allclose(outputs["float"], F.normalize(means).numpy(), atol=1e-5)
        for name, one in outputs.items():
            found[name].append((one[::2] * one[1::2]).sum(1))
        scores.append(targets.numpy())
    for name in files:
        wanted = 100 * spearmanr(np.concatenate(found[name]), np.concatenate(scores)).statistic
        assert report["accuracy"][name]["spearman"] == pytest.approx(wanted, abs=0.02)
    _check_lengths(files["int8"])


def _check_lengths(session: ort.InferenceSession) -> None:
    """Checks that the file accepts sentences of any length and that padding hardly changes the embedding."""
    for length in (2, 9, 40):
        ids = np.random.default_rng(length).integers(1, 320, (1, length))
        (found,) = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
        padded, mask = (np.pad(one, [(0, 0), (0, 7)]) for one in (ids, np.ones_like(ids)))
        (other,) = session.run(None, {"input_ids": padded, "attention_mask": mask})
        assert found.shape == (1, 48) and float((found * other).sum()) > 0.99
