"""Tests of a text classifier, from a model folder and labelled texts to a file, against transformers."""

from __future__ import annotations

import importlib
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from command_line import CONF
from language import WORDS, needs_transformers, tokenizer
from tiny_run import report_of

from qatkit.config.compose import compose_config
from qatkit.config.schema import Config
from qatkit.jobs import pipeline
from qatkit.run.build import data_of
from qatkit_verify.command import main as verify_bundle
from qatkit_verify.errors import ConfigError

pytestmark = needs_transformers
ENDS = ("tree", "cat")
CLASSES = ("wood", "animal")
SHAPE = {
    "vocab_size": 320, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
    "max_position_embeddings": 64,
}  # fmt: skip
# Enough to learn the task from random weights.
TRAINED = (
    "schedule.float_epochs=6",
    "schedule.float_lr=2e-3",
    "schedule.optimizer=adamw",
    "schedule.warmup=0.1",
)


def sentence(draw: random.Random, first: str) -> str:
    return " ".join([first, *draw.choices([one for one in WORDS if one not in ENDS], k=draw.randint(1, 4))])


def labelled(folder: Path, classes: tuple[str, ...] = CLASSES) -> Path:
    """Returns a folder of text pairs whose class depends on the first word of the second text."""
    folder.mkdir(parents=True)
    draw = random.Random(0)
    for name, count in (("train.tsv", 320), ("test.tsv", 60)):
        rows = ["text_1\ttext_2\tlabel\n"]
        for _ in range(count):
            kind = draw.randrange(2)
            rows.append(f"{sentence(draw, 'the')}\t{sentence(draw, ENDS[kind])}\t{classes[kind]}\n")
        (folder / name).write_text("".join(rows))
    return folder


def saved(folder: Path, kind: str = "BertModel", **changes: Any) -> Path:
    """Returns the folder of a small model with its tokenizer, written by `save_pretrained`."""
    transformers: Any = importlib.import_module("transformers")
    processors: Any = importlib.import_module("tokenizers").processors
    torch.manual_seed(0)
    model = getattr(transformers, kind)
    model(model.config_class(**SHAPE | changes)).save_pretrained(folder)
    made = tokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="<eos> $A <eos>", pair="<eos> $A <eos> $B:1 <eos>:1", special_tokens=[("<eos>", 0)]
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    return folder


def asked(folder: Path, model: Path, root: Path, *changes: str) -> Config:
    return compose_config(
        CONF,
        [
            "recipe=text_classification_ptq", f"model.name=hf/{model}", f"data.root={root}", f"output_dir={folder}",
            "calibration.images=64", "verify.latency_runs=2", "verify.max_drop=5", "trainer.progress=false", *changes,
        ],
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns the folder of a run that trains a new head on text pairs, and the folder of the pairs."""
    top = tmp_path_factory.mktemp("classifier")
    root = labelled(top / "pairs")
    changes = (*TRAINED, "export.bundle=true")
    assert pipeline.train(asked(top / "run", saved(top / "model"), root, *changes)) == 0
    return top / "run", root


@pytest.mark.slow
def test_metrics_are_those_of_the_file(made: tuple[Path, Path]) -> None:
    run, root = made
    report, model = report_of(run), onnx_inputs(run / "model.int8.onnx")
    assert model == ["input_ids", "attention_mask", "token_type_ids"]
    assert report["shortfalls"] == [] and report["classes"] == sorted(CLASSES)
    assert report["task"]["name"] == "text_classification" and report["task"]["samples"] == "texts"
    data = data_of(asked(run, run.parent / "model", root))
    for name in ("float", "int8", "dynamic"):
        session, found, labels = ort.InferenceSession(run / f"model.{name}.onnx"), [], []
        for batch, targets in data.test_batches():
            feeds = {one: values.numpy() for one, values in batch.items()}
            found.append(session.run(None, feeds)[0].argmax(1))
            labels.append(targets.numpy())
        guess, truth = np.concatenate(found), np.concatenate(labels)
        scores = report["accuracy"][name]
        assert scores["accuracy"] == pytest.approx(100 * (guess == truth).mean())
        assert scores["macro_f1"] == pytest.approx(100 * np.mean([f1(guess, truth, one) for one in (0, 1)]))
        assert scores["accuracy"] > 90
    assert report["latency"]["dynamic"]["ratio"] > 0 and report["sizes"]["dynamic"] < report["sizes"]["float"]
    assert {"lost", "interval"} == report["measured"]["dynamic"].keys()


def onnx_inputs(path: Path) -> list[str]:
    return [one.name for one in ort.InferenceSession(path).get_inputs()]


def f1(guess: np.ndarray[Any, Any], truth: np.ndarray[Any, Any], label: int) -> float:
    right = ((guess == label) & (truth == label)).sum()
    return float(2 * right / ((guess == label).sum() + (truth == label).sum()))


@pytest.mark.slow
def test_a_file_takes_texts_of_any_length(made: tuple[Path, Path]) -> None:
    session = ort.InferenceSession(made[0] / "model.int8.onnx")
    for length in (2, 9, 40):
        ids = np.random.default_rng(length).integers(1, 320, (1, length))
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        (found,) = session.run(None, feeds)
        padded = {name: np.pad(one, [(0, 0), (0, 7)]) for name, one in feeds.items()}
        (other,) = session.run(None, padded)
        assert found.shape == (1, 2) and np.abs(found - other).max() < 0.1 * max(1.0, np.abs(found).max())


@pytest.mark.slow
def test_the_card_of_a_bundle_tells_how_a_text_is_read(
    made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = made[0] / "bundle"
    monkeypatch.chdir(bundle)
    first, second = re.findall(r"```python\n(.*?)```", (bundle / "card.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(first + second.replace('encode("A text.")', 'encode("the tree", "cat tree")'), names)
    assert names["feeds"]["token_type_ids"].sum() > 0
    (found,) = names["session"].run(None, names["feeds"])
    assert found.argmax() == sorted(CLASSES).index("animal")
    assert verify_bundle([".", "--min-speedup", "0.01"]) == 0


def refused(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        pipeline.train(config)
    assert "\n" not in str(caught.value) and not Path(str(config.output_dir)).exists()
    return str(caught.value)


def test_a_head_without_weights_has_to_be_trained(tmp_path: Path) -> None:
    model, root = saved(tmp_path / "model"), labelled(tmp_path / "pairs")
    told = refused(asked(tmp_path / "run", model, root))
    assert (
        told.startswith("model.weights=DEFAULT: ")
        and "has no pretrained weights for this head (classifier.bias)" in told
    )
    assert "schedule.float_epochs=3" in told


def test_a_trained_head_names_the_classes(tmp_path: Path) -> None:
    names = {0: "animal", 1: "stone", 2: "wood"}
    model = saved(tmp_path / "model", "DistilBertForSequenceClassification", dim=48, n_layers=1, n_heads=2,
                  hidden_dim=96, id2label=names, label2id={name: key for key, name in names.items()})  # fmt: skip
    root = labelled(tmp_path / "pairs")
    data = data_of(asked(tmp_path / "run", model, root))
    assert data.classes == ("animal", "stone", "wood") and list(data.inputs.example(1)) == [
        "input_ids",
        "attention_mask",
    ]
    told = refused(asked(tmp_path / "run", model, labelled(tmp_path / "others", ("wood", "plant"))))
    assert (
        "has the label 'plant'; expected a class of the model (animal, stone, wood) or a number from" in told
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["Roberta", "DistilBert", "Albert", "Electra", "MPNet", "ModernBert", "DebertaV2"]
)
def test_other_architectures_are_quantized(kind: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"embedding_size": 48} if kind in ("Albert", "Electra") else {}
    if kind == "DistilBert":
        changes = {"dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 96}
    changes |= {"pad_token_id": 1} if kind in ("Roberta", "MPNet", "ModernBert") else {}
    model = saved(tmp_path / "model", f"{kind}ForSequenceClassification", **changes)
    root = labelled(tmp_path / "pairs", ("0", "1"))
    config = asked(tmp_path / "run", model, root, "verify.max_drop=100", "verify.dynamic=false")
    assert pipeline.train(config) == 0
    transformers: Any = importlib.import_module("transformers")
    exact = transformers.AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    session = ort.InferenceSession(tmp_path / "run" / "model.float.onnx")
    batch, _ = next(iter(data_of(config).test_batches()))
    with torch.no_grad():
        wanted = exact(**batch).logits.numpy()
    (found,) = session.run(None, {name: one.numpy() for name, one in batch.items()})
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.slow
def test_a_classifier_is_fine_tuned(made: tuple[Path, Path], tmp_path: Path) -> None:
    _, root = made
    model = saved(tmp_path / "model")
    config = asked(
        tmp_path / "run", model, root, *TRAINED, "+backend.overrides={*: {weight_dtype: int4}}",
        "schedule.epochs=2", "schedule.lr=5e-4",
    )  # fmt: skip
    assert pipeline.train(config) == 0
    assert report_of(tmp_path / "run")["accuracy"]["int8"]["accuracy"] > 90
