"""Compares BatchNorms of two processes with one process on the whole batch.

With the arguments RANK PORT FOLDER, this script is one of the two processes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).parents[2]


class WithActivation(nn.BatchNorm2d):
    """A BatchNorm as in timm, whose own forward calls F.batch_norm and an activation."""

    def forward(self, x: Tensor) -> Tensor:
        training, momentum = self.training or self.running_mean is None, self.momentum or 0.1
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, bias=self.bias, training=training,
            momentum=momentum, eps=self.eps,
        )  # fmt: skip
        return torch.relu(x)


class ByHand(nn.BatchNorm2d):
    """A BatchNorm that computes its statistics without F.batch_norm, so that they cannot be synchronized."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean((0, 2, 3), keepdim=True)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm2d(3),
        nn.Conv2d(3, 4, 3, bias=False),
        WithActivation(4),
        nn.Conv2d(4, 4, 1, bias=False),
        nn.BatchNorm2d(4, affine=False),
    )


def _images() -> Tensor:
    return torch.randn(12, 3, 6, 6, generator=torch.Generator().manual_seed(1)) * torch.arange(1, 13).view(
        12, 1, 1, 1
    )


def _step(model: nn.Module, images: Tensor, count: int) -> dict[str, Tensor]:
    """Returns outputs, gradients and statistics of a step, whose loss is a sum divided by `count`."""
    outputs = model(images)
    (outputs.pow(3).sum() / count).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"outputs": outputs.detach(), **gradients, **dict(model.named_buffers())}


@pytest.mark.slow  # starts two processes
def test_two_processes_are_one_with_the_summed_batch(tmp_path: Path) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__]
    ranks = [
        subprocess.Popen([*command, str(rank), str(port), str(tmp_path)], cwd=ROOT, env=environment,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        said = rank.communicate(timeout=280)[0]
        assert rank.returncode == 0, said
        assert said.count("ByHand computes its statistics without torch.nn.functional.batch_norm") == 1
        assert "WithActivation computes" not in said
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    whole = _model().train()
    wanted, parameters = _step(whole, _images(), 12), dict(whole.named_parameters())
    torch.testing.assert_close(torch.cat([one.pop("outputs") for one in found]), wanted.pop("outputs"))
    assert wanted.keys() == found[0].keys()
    for name, value in wanted.items():
        first, second = (one[name] for one in found)
        gradient = name in parameters  # gradients are of half of the images each
        torch.testing.assert_close(first + second if gradient else first, value, rtol=1e-4, atol=1e-5)


def _main(rank: int, port: str, folder: Path) -> None:
    from qatkit.train.sync_batch_norm import synchronized

    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    model, images = _model().train(), _images()[rank * 6 :][:6]
    with synchronized(model):
        found = _step(model, images, 12)
    by_hand = ByHand(3)
    with synchronized(by_hand):
        for _ in range(2):
            by_hand(images)
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
