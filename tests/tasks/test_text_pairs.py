"""Tests of pair embeddings: rank correlation against SciPy, errors against resampling, pooling, agreement."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from torch.nn import functional as F

from qatkit.config.schema import ScheduleConfig
from qatkit.models.pooling import pooling_of
from qatkit.tasks import task_of
from qatkit.tasks.text_pairs import TextPairs
from qatkit_verify.compare import Output
from qatkit_verify.errors import ConfigError

PAIRS, WIDTH = 400, 12


@pytest.fixture(scope="module")
def pairs() -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float64]]:
    """Returns embeddings of a model and of a similar one, [2 N, D], and scores [N] with ties."""
    draw = np.random.default_rng(0)
    first = draw.normal(size=(PAIRS, WIDTH))
    share = draw.uniform(size=(PAIRS, 1))
    rows = np.stack([first, share * first + (1 - share) * draw.normal(size=(PAIRS, WIDTH))], 1)
    exact = rows.reshape(-1, WIDTH).astype(np.float32)
    near = exact + 0.2 * draw.normal(size=exact.shape).astype(np.float32)
    return exact, near, np.round(4 * share[:, 0]) / 4


def cosine(outputs: NDArray[np.float32]) -> NDArray[np.float32]:
    rows = torch.from_numpy(outputs)
    return F.cosine_similarity(rows[::2], rows[1::2]).numpy()


def test_the_figure_is_the_rank_correlation(
    pairs: tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float64]],
) -> None:
    exact, near, scores = pairs
    task = task_of("text_pairs")
    for outputs in (exact, near):
        meter = task.meter()
        for start in range(0, PAIRS, 150):
            meter.add(outputs[2 * start : 2 * (start + 150)], scores[start : start + 150])
        found = meter.result()
        assert found.images == PAIRS
        assert found.score == pytest.approx(100 * spearmanr(cosine(outputs), scores).statistic, abs=1e-3)


def test_the_standard_error_is_that_of_resampled_pairs(
    pairs: tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float64]],
) -> None:
    exact, near, scores = pairs
    task, draw = TextPairs(), np.random.default_rng(1)
    first, second = (task.values(outputs, scores) for outputs in (exact, near))
    differences, values = [], []
    for _ in range(400):
        chosen = draw.integers(0, PAIRS, PAIRS)
        values.append(task.mean(first[chosen]))
        differences.append(values[-1] - task.mean(second[chosen]))
    assert task.noise(first, second) == pytest.approx(np.std(differences), rel=0.2)
    assert task.spread(0.0, PAIRS, first) == pytest.approx(np.std(values), rel=0.2)
    lost = task.mean(first) - task.mean(second)
    assert lost > 2 * task.noise(first, second)
    assert (
        task.worse(first, second, 2.0) == f"loses {lost:.3g} points" and task.worse(second, first, 2.0) == ""
    )


def test_a_rank_correlation_of_nothing_is_zero() -> None:
    task = TextPairs()
    assert task.mean(np.zeros((5, 2))) == 0.0
    assert float(task.total(torch.ones(4, 3), torch.tensor([0.0, 1.0]))) == 0.0


def test_an_epoch_has_the_mean_of_its_batches(
    pairs: tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float64]],
) -> None:
    exact, _, scores = pairs
    task = TextPairs()
    outputs, targets = torch.from_numpy(exact), torch.from_numpy(scores)
    found = float(task.figure(task.total(outputs, targets), PAIRS))
    assert found == pytest.approx(100 * spearmanr(cosine(exact), scores).statistic, abs=1e-3)
    wanted = np.square(cosine(exact) - scores).mean()
    assert float(task.loss(outputs, targets, ScheduleConfig())) == pytest.approx(wanted, rel=1e-5)


def test_two_embeddings_agree_by_their_cosine() -> None:
    task, draw = TextPairs(), np.random.default_rng(0)
    exact = draw.normal(size=(200, 64)).astype(np.float32)
    found = exact + (0.14 * draw.normal(size=exact.shape)).astype(np.float32)
    wanted = F.cosine_similarity(torch.from_numpy(exact), torch.from_numpy(found)).numpy() >= 0.99
    assert 0.2 < wanted.mean() < 0.9
    assert np.array_equal(task.agree(exact, found), wanted)

    output = Output(1, task.rule)
    for rows in (slice(0, 50), slice(50, 200)):
        output.add(exact[rows], [found[rows]])
    assert output.comparisons(0.1)[0].agreement == wanted.mean()


def test_what_are_no_pairs_is_refused() -> None:
    task = TextPairs()
    assert task.fits((8, 16), 4, None) and not task.fits((4, 16), 4, None)
    assert "must differ, but all are 0.5" in task.check_targets("test", (), [0.5, 0.5])
    with pytest.raises(ValueError, match="finite scores"):
        task.target("nan")


@pytest.mark.parametrize("mode", ["mean_tokens", "cls_token", "max_tokens"])
def test_pooling_is_what_the_folder_asks_for(mode: str, tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    others = {"pooling_mode_mean_tokens": False, "word_embedding_dimension": 8}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(others | {f"pooling_mode_{mode}": True}))
    tokens = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    known: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "mean_tokens": lambda rows: rows.mean(0),
        "cls_token": lambda rows: rows[0],
        "max_tokens": lambda rows: rows.max(0).values,
    }
    pool = known[mode]
    wanted = torch.stack([pool(tokens[0, :3]), pool(tokens[1])])
    found = pooling_of(str(tmp_path))(tokens, mask)
    torch.testing.assert_close(found, wanted / wanted.norm(dim=1, keepdim=True))


def test_a_pooling_that_is_not_known_is_refused(tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    file = tmp_path / "1_Pooling" / "config.json"
    for text, told in (
        ('{"pooling_mode_lasttoken": true}', "it names lasttoken"),
        (
            '{"pooling_mode_cls_token": true, "pooling_mode_max_tokens": true}',
            "it names cls_token, max_tokens",
        ),
        ("{", "config.json cannot be read ("),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            pooling_of(str(tmp_path))
        assert told in str(caught.value) and "\n" not in str(caught.value)
