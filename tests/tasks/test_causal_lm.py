"""Tests of next-token prediction: perplexity, its standard error and losses, against torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from qatkit.config.schema import ScheduleConfig
from qatkit.tasks import task_of
from qatkit.tasks.causal_lm import CausalLM
from qatkit.verify.accuracy import accuracies
from qatkit.verify.fidelity import fidelity

WINDOWS, TOKENS, WORDS = 6, 9, 13


@pytest.fixture(scope="module")
def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns logits [N, T, V] and tokens [N, T]."""
    draw = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(WINDOWS, TOKENS, WORDS, generator=draw)
    return logits, torch.randint(0, WORDS, (WINDOWS, TOKENS), generator=draw)


def nats(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), tokens[:, 1:].reshape(-1), reduction="none")


def test_perplexity_is_that_of_the_cross_entropy(text: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, tokens = text
    task = task_of("causal_lm")
    wanted = math.exp(nats(logits, tokens).double().mean())
    batches = [(logits[i : i + 4].numpy(), tokens[i : i + 4].numpy()) for i in (0, 4)]

    scores = accuracies({"a": lambda x: task.joined([x])}, batches, task=task)["a"]
    right = float((logits[:, :-1].argmax(-1) == tokens[:, 1:]).double().mean())
    assert scores.images == WINDOWS
    assert [one.value for one in scores.metrics] == pytest.approx([wanted, 100 * right], rel=1e-6)
    assert scores.main.lost(20.0, 21.5) == 1.5  # lower is better

    total = sum(float(task.total(*one)) for one in ((logits[:4], tokens[:4]), (logits[4:], tokens[4:])))
    assert task.figure(total, WINDOWS) == pytest.approx(wanted, rel=1e-6)


def test_values_are_compared_window_by_window(text: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, tokens = text
    task, other = (
        CausalLM(),
        logits + 0.3 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)),
    )
    first, second = (task.values(task.joined([one.numpy()]), tokens.numpy()) for one in (logits, other))

    assert first == pytest.approx(nats(logits, tokens).reshape(WINDOWS, -1).mean(1).numpy(), rel=1e-5)
    difference = second - first
    error = math.exp(second.mean()) * difference.std() / math.sqrt(WINDOWS)
    assert task.noise(first, second) == pytest.approx(error)
    assert task.worse(first, first + 0.5, 2.0) == "loses 0.5 nats per token"
    assert task.worse(first, first - 0.5, 2.0) == ""


def test_agreement_and_divergence_are_of_each_token(text: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, _ = text
    task, other = CausalLM(), logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    exact = logits.log_softmax(-1).double()
    divergence = (exact.exp() * (exact - other.double().log_softmax(-1))).sum(-1).mean()

    batches = [(logits.numpy(), None)]
    found = fidelity(
        lambda x: task.joined([x]), {"b": lambda _: task.joined([other.numpy()])}, batches, task=task
    )["b"]
    assert found.agreement == pytest.approx(float((logits.argmax(-1) == other.argmax(-1)).double().mean()))
    assert found.kl == pytest.approx(float(divergence), rel=1e-5)
    assert found.sqnr_db == pytest.approx(
        float(10 * torch.log10(logits.double().square().sum() / (logits - other).double().square().sum()))
    )


def test_losses_are_those_of_torch(text: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, tokens = text
    task = CausalLM()
    assert float(task.loss(logits, tokens, ScheduleConfig())) == pytest.approx(
        float(nats(logits, tokens).mean())
    )
    teacher = logits.roll(1, 0)
    wanted = 4 * F.kl_div(
        (logits / 2).log_softmax(-1).reshape(-1, WORDS),
        (teacher / 2).softmax(-1).reshape(-1, WORDS),
        reduction="batchmean",
    )
    assert float(task.distillation(logits, teacher, 2.0)) == pytest.approx(float(wanted), rel=1e-5)


def test_targets_are_the_tokens_of_windows() -> None:
    task = CausalLM()
    targets = [task.target(one) for one in ([1, 2, 3], np.array([4, 5, 70000]), torch.tensor([7, 8, 9]))]
    assert task.collate(targets).tolist() == [[1, 2, 3], [4, 5, 70000], [7, 8, 9]]
    assert task.target(targets[1]) == targets[1]
    assert task.check_targets("train", (), targets) == ""
    uneven = [*targets, task.target([1, 2])]
    assert "the same length of at least 2 tokens; lengths: 2, 3" in task.check_targets("train", (), uneven)
    assert "tokens; lengths: 1" in task.check_targets("test", (), [task.target([1])])
    for wrong in (3, "text", [0.5, 1.0], [[1, 2]]):
        with pytest.raises(TypeError, match="the tokens of a window"):
            task.target(wrong)


def test_outputs_are_logits_of_each_token() -> None:
    task = CausalLM()
    assert task.fits((2, 7, 50), 2, None) and task.fits((2, 7, 50), 2, 50)
    assert not task.fits((2, 50), 2, None) and not task.fits((3, 7, 50), 2, None)
    assert task.shape_text(None) == "[N, tokens, vocabulary]"
