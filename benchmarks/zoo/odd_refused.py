"""Models, most of which no static INT8 file can express: these are refused with a one-line error."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import List, image, vector
from zoo.odd_branches import body

odd = List("odd")
ENTRIES = odd.entries


@odd(image(3, 32, 32), refused="the path depends on values")
class BranchOnValue(nn.Module):
    """A branch on the mean of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = body(), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).mean((2, 3))
        if x.mean() > 0.1:
            return self.one(x)
        return self.two(x)


@odd(vector(8), refused="the number of rounds depends on values")
class LoopOnValue(nn.Module):
    """A loop that ends when a norm is small."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(10):
            x = 0.5 * torch.tanh(self.step(x))
            if float(x.norm()) < 0.5:
                break
        return x


@odd(image(3, 32, 32), refused="the size of the output depends on values")
class SelectByMask(nn.Module):
    """Selection of the rows above a threshold: the size depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = body(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).flatten(2).transpose(1, 2)
        kept = x[x.sum(-1) > 0.5]
        return self.head(kept).sum(0, keepdim=True)


@odd(image(3, 32, 32), refused="hard gating picks samples by value")
class HardExperts(nn.Module):
    """A mixture of experts that sends each sample to one expert (`nonzero` and `index_add_`)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate = body(), nn.Linear(16, 2)
        self.experts = nn.ModuleList(nn.Linear(16, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).mean((2, 3))
        chosen = self.gate(x).argmax(1)
        out = x.new_zeros(x.shape[0], 4)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().flatten()
            out.index_add_(0, rows, expert(x[rows]))
        return out


@odd(vector(16, 16), refused="complex numbers")
class FourierMixer(nn.Module):
    """FNet: a 2-D FFT instead of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mlp, self.head = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + torch.fft.fft2(x, norm="ortho").real
        return self.head((x + F.gelu(self.mlp(x))).mean(1))


@odd(vector(16, 8), refused="complex numbers")
class FourierOperator(nn.Module):
    """A layer of a Fourier neural operator: rfft, complex weights, irfft."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = nn.Linear(8, 16), nn.Linear(16, 2)
        self.weight = nn.Parameter(torch.randn(4, 16, 16, dtype=torch.cfloat) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        low = torch.einsum("bki,kio->bko", torch.fft.rfft(x, dim=1)[:, :4], self.weight)
        return self.head(F.gelu(x + torch.fft.irfft(low, n=x.shape[1], dim=1)))


@odd(image(3, 32, 32))
def bfloat16_model() -> nn.Module:
    """A model in bfloat16 that casts its input and output (it is not refused)."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = body().bfloat16(), nn.Linear(16, 4).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x.to(torch.bfloat16)).mean((2, 3))).float()

    return Half()


@odd(image(3, 32, 32), refused="a random output in evaluation")
class RandomInEvaluation(nn.Module):
    """Dropout that is also active in evaluation (Monte Carlo dropout)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = body(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.body(x).mean((2, 3)), 0.5, training=True))


@odd(image(3, 32, 32), refused="values leave torch")
class NumpyInside(nn.Module):
    """A computation in NumPy between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = body(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).mean((2, 3))
        return self.head(torch.from_numpy(x.detach().numpy().clip(0, 1)))
