"""Tests of a language model, from a model folder and texts to a decoder that generates text."""

from __future__ import annotations

import importlib
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from command_line import CONF
from language import needs_transformers, saved, texts, tokenizer
from onnx import numpy_helper
from tiny_run import report_of

from qatkit.config.compose import compose_config
from qatkit.config.schema import Config
from qatkit.export.accuracy_level import FLOAT, INT8, at_level, level_of
from qatkit.export.dequantized_blocks import as_dequantized_blocks
from qatkit.jobs import pipeline
from qatkit.run.build import data_of
from qatkit.verify.decoding import Levels, OnnxDecoder, levels
from qatkit_verify.command import main as verify_bundle
from qatkit_verify.errors import ConfigError

pytestmark = needs_transformers
CONTEXT = 48


def asked(folder: Path, model: Path, root: Path, *changes: str) -> Config:
    return compose_config(
        CONF,
        [
            "recipe=causal_lm_w4", f"model.name=hf/{model}", f"data.root={root}", f"output_dir={folder}",
            f"data.context={CONTEXT}", "data.test_images=8", "verify.latency_runs=2", "verify.max_drop=100",
            "export.accuracy_level=0",
            "trainer.progress=false", *changes,
        ],
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Returns the folders of a finished run, of its model and of its texts."""
    top = tmp_path_factory.mktemp("language")
    model, root = saved(top / "model"), texts(top / "texts")
    assert pipeline.train(asked(top / "run", model, root, "export.bundle=true")) == 0
    return top / "run", model, root


def stored(folder: Path) -> dict[str, list[np.ndarray[Any, Any]]]:
    """Returns weight, scales and zero points of each MatMulNBits of the decoder, by the weight's name."""
    model = onnx.load(folder / "decoder" / "model.onnx")
    held = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    return {node.input[1]: [held[name] for name in node.input[1:4]] for node in products}


def dequantized(constants: dict[str, list[np.ndarray[Any, Any]]], name: str) -> torch.Tensor:
    """Returns a MatMulNBits weight [out, in]: (q - zero_point) * scale, with nibbles in blocks of 32."""
    packed, scale, zeros = constants[f"{name}.weight"]
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:2], -1).astype(np.float64)
    zero = np.stack([zeros & 15, zeros >> 4], -1).reshape(len(zeros), -1)[:, : packed.shape[1]]
    return torch.from_numpy(((codes - zero[..., None]) * scale[..., None]).reshape(len(packed), -1)).float()


@pytest.fixture(scope="module")
def simulated(made: tuple[Path, Path, Path]) -> Any:
    """Returns the transformers model with the dequantized weights of the decoder's file."""
    run, folder, _ = made
    transformers: Any = importlib.import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    constants, left = stored(run), dict(model.named_modules())
    for name, module in left.items():
        if isinstance(module, torch.nn.Linear):
            with torch.no_grad():
                module.weight.copy_(dequantized(constants, name))
    return model


def test_every_bound_is_met_and_reported(made: tuple[Path, Path, Path]) -> None:
    report = report_of(made[0])
    assert report["shortfalls"] == [] and report["task"]["samples"] == "windows"
    assert report["label"] == "INT4 weights"
    decoder = report["measured"]["decoder"]
    assert decoder["agreement"] == 1.0 and decoder["perplexity"] == pytest.approx(decoder["whole"], rel=1e-6)
    assert decoder["steps"] == [16, 16] and decoder["greedy"] == [32, 32]
    names = {one["name"] for one in report["files"]}
    assert {"decoder/model.onnx", "decoder/tokenizer.json", "decoder/generate.py"} <= names


def test_perplexity_is_that_of_the_dequantized_weights(made: tuple[Path, Path, Path], simulated: Any) -> None:
    run, folder, root = made
    report = report_of(run)
    data = data_of(asked(run, folder, root))
    transformers: Any = importlib.import_module("transformers")
    exact = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    nats: dict[str, list[torch.Tensor]] = {"float": [], "int8": []}
    for tokens, _ in data.test_batches():
        for name, model in (("float", exact), ("int8", simulated)):
            with torch.no_grad():
                nats[name].append(model(tokens, labels=tokens).loss * len(tokens))
    for name, found in nats.items():
        wanted = math.exp(float(torch.stack(found).double().sum()) / data.test_count)
        assert report["accuracy"][name]["perplexity"] == pytest.approx(wanted, rel=1e-4)


def test_generated_text_is_that_of_transformers(made: tuple[Path, Path, Path], simulated: Any) -> None:
    folder = made[0] / "bundle" / "decoder"
    prompt = "the cat sat on the big red mat and then"
    ids = torch.tensor([tokenizer().encode(prompt).ids])
    with torch.no_grad():
        found = simulated.generate(ids, max_new_tokens=60, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    wanted = tokenizer().decode([one for one in found.tolist() if one != 0])

    done = subprocess.run(
        [sys.executable, str(folder / "generate.py"), prompt, "--tokens", "60"],
        capture_output=True, check=True, cwd=folder.parent,
    )  # fmt: skip
    assert done.stdout.decode() == f"{prompt}{wanted}\n"


def test_rows_with_padding_are_those_without(made: tuple[Path, Path, Path]) -> None:
    decoder = OnnxDecoder(made[0] / "decoder" / "model.onnx", 1)
    draw = np.random.default_rng(0)
    tokens, mask = draw.integers(1, 320, (3, 12)), np.ones((3, 13), np.int64)
    for row, padding in enumerate((0, 3, 7)):
        mask[row, :padding] = 0
    logits, past = decoder.run(tokens, decoder.empty(3), mask[:, :12])
    after, _ = decoder.run(new := draw.integers(1, 320, (3, 1)), past, mask)
    for row, padding in enumerate((0, 3, 7)):
        alone, past_alone = decoder.run(tokens[row : row + 1, padding:], decoder.empty(1))
        np.testing.assert_allclose(logits[row, padding:], alone[0], atol=2e-5)
        alone, _ = decoder.run(new[row : row + 1], past_alone)
        np.testing.assert_allclose(after[row], alone[0], atol=2e-5)


def test_a_decoder_at_level_4_rounds_activations(made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    exact, rounded = made[0] / "decoder" / "model.onnx", tmp_path / "model.onnx"
    at_level(exact, rounded, INT8)
    assert (level_of(exact), level_of(rounded)) == (FLOAT, INT8)
    tokens = np.random.default_rng(0).integers(1, 320, (1, 40))
    first, second = OnnxDecoder(exact, 1), OnnxDecoder(rounded, 1)
    logits = [one.run(tokens, one.empty(1))[0] for one in (first, second)]
    decibel = 10 * np.log10(np.square(logits[0]).sum() / np.square(logits[0] - logits[1]).sum())
    assert 20 < decibel < 70

    found = levels(first, second, [tokens])
    wanted = [
        float(
            torch.nn.functional.cross_entropy(torch.from_numpy(one[0, :-1]), torch.from_numpy(tokens[0, 1:]))
        )
        for one in logits
    ]
    assert np.log(found.perplexity) == pytest.approx(wanted, rel=1e-5)
    assert found.agreement == (logits[0].argmax(-1) == logits[1].argmax(-1)).mean()


@pytest.mark.parametrize(
    ("perplexity", "low", "pays"),
    [((20.0, 20.09), 1.5, True), ((20.0, 20.11), 1.5, False), ((20.0, 19.0), 1.0, False)],
)
def test_level_4_pays_where_it_is_fast_and_good(
    perplexity: tuple[float, float], low: float, pays: bool
) -> None:
    assert Levels(perplexity, 1.0, 2.0, low).pays == pays


@pytest.mark.slow
@pytest.mark.parametrize("level", ["4", "auto"])
def test_the_report_has_the_price_of_a_level(
    level: str, made: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    _, model, root = made
    config = asked(tmp_path / "run", model, root, f"export.accuracy_level={level}", "algorithm=none")
    assert pipeline.train(config) in (0, 1)  # for a random model, a level may cost more than half a percent
    report = report_of(tmp_path / "run")
    shipped = level_of(tmp_path / "run" / "decoder" / "model.onnx")
    assert report["measured"]["decoder"]["level"] == shipped and shipped == (4 if level == "4" else shipped)
    assert report["measured"]["decoder"]["agreement"] == 1.0  # compared with the other file, at level 0
    assert ("levels" in report["measured"]["decoder"]) == (shipped == 4)
    told = [note for note in report["notes"] if note.startswith("export.accuracy_level=auto")]
    assert len(told) == (level == "auto")
    assert not (tmp_path / "run" / "decoder" / "level_4.onnx").exists()


def test_the_bundle_can_be_checked(made: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_bundle([str(made[0] / "bundle")]) == 0
    card = (made[0] / "bundle" / "card.md").read_text()
    assert "pipeline_tag: text-generation" in card and "python decoder/generate.py" in card
    told = json.loads((made[0] / "bundle" / "decoder" / "genai_config.json").read_text())["model"]
    assert (told["type"], told["vocab_size"], told["context_length"]) == ("llama", 320, 128)
    names = {one.name for one in ort.InferenceSession(made[0] / "decoder" / "model.onnx").get_inputs()}
    decoder = told["decoder"]
    assert names == {
        *(decoder["inputs"][key] for key in ("input_ids", "attention_mask", "position_ids")),
        *(decoder["inputs"][f"past_{kind}_names"] % layer for kind in ("key", "value") for layer in (0, 1)),
    }
    shape = [2, decoder["num_key_value_heads"], decoder["num_hidden_layers"], decoder["head_size"]]
    assert shape == [2, 2, 2, 16]


def test_a_decoder_of_standard_operators_computes_the_same(
    made: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    own, standard = made[0] / "decoder" / "model.onnx", tmp_path / "model.onnx"
    shutil.copyfile(own, standard)
    assert as_dequantized_blocks(standard) == 21
    tokens = np.random.default_rng(0).integers(1, 320, (1, 40))
    first, second = (
        one.run(tokens, one.empty(1))[0] for one in (OnnxDecoder(own, 1), OnnxDecoder(standard, 1))
    )
    np.testing.assert_allclose(second, first, atol=1e-5)


@pytest.mark.slow
def test_factors_of_awq_reach_the_decoder(made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert pipeline.train(asked(folder, *made[1:], "algorithm=awq", "verify.dynamic=false")) == 0
    report = report_of(folder)
    assert report["measured"]["decoder"]["greedy"] == [32, 32]
    assert report["fidelity"]["int8"]["sqnr_db"] > 5


@pytest.mark.slow
def test_a_decoder_is_written_of_standard_operators(made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    changes = ("algorithm=none", "export.packed_weights=dequantize_linear", "verify.dynamic=false")

    assert pipeline.train(asked(folder, *made[1:], *changes)) == 0

    assert report_of(folder)["measured"]["decoder"]["greedy"] == [32, 32]
    written = onnx.load(folder / "decoder" / "model.onnx")
    assert {one.domain for one in written.opset_import} == {""} and written.opset_import[0].version == 21


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["GPT2", "Qwen3"])
def test_other_architectures_decode(kind: str, tmp_path: Path) -> None:
    model, root = saved(tmp_path / "model", kind), texts(tmp_path / "texts", 60)
    assert pipeline.train(asked(tmp_path / "run", model, root, "algorithm=none")) == 0
    assert report_of(tmp_path / "run")["measured"]["decoder"]["greedy"] == [32, 32]


def refused(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        pipeline.train(config)
    assert "\n" not in str(caught.value) and not Path(str(config.output_dir)).exists()
    return str(caught.value)


def test_what_can_be_no_decoder_is_refused_early(made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, model, root = made
    told = refused(asked(tmp_path / "a", model, root, "backend=fbgemm", "algorithm=none"))
    assert told.startswith("export.decoder=true: expected false with backend=fbgemm")
    told = refused(asked(tmp_path / "b", model, root, "data.context=17"))
    assert told == "data.context=17: expected at least 18 with export.decoder=true"
    told = refused(asked(tmp_path / "c", model, root, "data.context=129"))
    assert told == "data.context=129: expected at most 128, the number of positions of the model"
    told = refused(
        asked(tmp_path / "e", model, root, "export.mode=dynamic", "backend=fbgemm", "algorithm=none")
    )
    assert told == "export.decoder=true: expected false with export.mode=dynamic"
    told = refused(asked(tmp_path / "d", model, root, "task=outputs"))
    assert "export.decoder=true: expected false with task=outputs" in told


def test_a_text_is_at_most_as_long_as_a_window_of_attention(tmp_path: Path) -> None:
    model, root = saved(tmp_path / "model", "Mistral", sliding_window=40), texts(tmp_path / "texts", 60)
    told = refused(asked(tmp_path / "run", model, root))
    assert told.startswith("data.context=48: expected at most 40, the attention window")


def test_weights_of_another_head_are_refused(tmp_path: Path) -> None:
    folder, root = saved(tmp_path / "model"), texts(tmp_path / "texts", 60)
    transformers: Any = importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(folder, tie_word_embeddings=False)
    transformers.LlamaModel(config).save_pretrained(folder)
    told = refused(asked(tmp_path / "run", folder, root))
    assert told.startswith(
        "model.weights=DEFAULT: the weights do not fit the model; missing or of another shape: lm_head.weight"
    )
