"""Sequence models: recurrent layers, causal and dilated convolutions, text, audio, time series, points, graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import List, fixed, image, mask, tokens, vector

odd = List("odd")
ENTRIES = odd.entries


@odd(image(1, 32, 64))
class Crnn(nn.Module):
    """CRNN: a bidirectional LSTM over the columns of an image of a text line, with reshapes of time and batch."""

    def __init__(self) -> None:
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 16, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, 1, 1), nn.BatchNorm2d(32),
            nn.ReLU(), nn.MaxPool2d((2, 1)), nn.Conv2d(32, 32, (8, 3), 1, (0, 1)), nn.ReLU(),
        )  # fmt: skip
        self.rnn, self.head = nn.LSTM(32, 16, bidirectional=True), nn.Linear(32, 12)

    def forward(self, x: Tensor) -> Tensor:
        features = self.cnn(x)
        _, _, h, _ = features.size()
        assert h == 1, "the height of the features must be 1"
        recurrent, _ = self.rnn(features.squeeze(2).permute(2, 0, 1))
        t, b, h = recurrent.size()
        return self.head(recurrent.view(t * b, h)).view(t, b, -1).permute(1, 0, 2).log_softmax(2)


@odd(vector(20, 8))
class LstmSeries(nn.Module):
    """Forecasting: an LSTM with a zero state made in forward, and a head on its last output and state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 24, num_layers=2, batch_first=True, dropout=0.1), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        h0 = torch.zeros(2, x.size(0), 24, device=x.device)
        out, (hn, _) = self.lstm(x, (h0, torch.zeros_like(h0)))
        return self.head(out[:, -1, :] + hn[-1])


@odd(vector(20, 8))
class GruSeries(nn.Module):
    """A bidirectional, batch-first GRU, and a head on the final states of both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(8, 16, batch_first=True, bidirectional=True), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        _, hidden = self.gru(x)
        return self.head(torch.cat((hidden[-2], hidden[-1]), dim=1))


@odd(vector(12, 8))
class PlainRnn(nn.Module):
    """`nn.RNN` with ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.RNN(8, 16, nonlinearity="relu", batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0].mean(1))


@odd(vector(6, 8))
class CellLoop(nn.Module):
    """`nn.LSTMCell` and `nn.GRUCell` in a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.head = nn.LSTMCell(8, 16), nn.GRUCell(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, c = x.new_zeros(x.size(0), 16), x.new_zeros(x.size(0), 16)
        state = x.new_zeros(x.size(0), 16)
        for step in x.unbind(1):
            h, c = self.lstm(step, (h, c))
            state = self.gru(h, state)
        return self.head(state)


@odd(image(2, 12, 12))
class ConvLstm(nn.Module):
    """A ConvLSTM over one frame repeated three times, with gates by split."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.out = nn.Conv2d(2 + 8, 32, 3, padding=1), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, _, height, width = x.size()
        h = torch.zeros(b, 8, height, width, device=x.device)
        c = torch.zeros(b, 8, height, width, device=x.device)
        for _ in range(3):
            i, f, o, g = torch.split(self.gates(torch.cat([x, h], dim=1)), 8, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return self.out(h)


@odd(image(1, 800))
class KeywordSpotting(nn.Module):
    """M5: 1-D convolutions over raw audio."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, 16, 40, 8), nn.BatchNorm1d(16), nn.ReLU(), nn.MaxPool1d(4),
            nn.Conv1d(16, 32, 3), nn.BatchNorm1d(32), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(32, 12)

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.head(self.net(x)), dim=-1)


@odd(image(4, 40))
class Tcn(nn.Module):
    """A temporal convolutional network: padding on both sides, and a slice that cuts off the future (Chomp1d)."""

    class Chomp(nn.Module):
        """A slice without the last `size` steps."""

        def __init__(self, size: int) -> None:
            super().__init__()
            self.size = size

        def forward(self, x: Tensor) -> Tensor:
            return x[:, :, : -self.size].contiguous()

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.layers = nn.ModuleList(
            nn.Sequential(norm(nn.Conv1d(i, 16, 3, padding=2 * d, dilation=d)), self.Chomp(2 * d), nn.ReLU())
            for i, d in ((4, 1), (16, 2), (16, 4))
        )
        self.first, self.head = nn.Conv1d(4, 16, 1), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        residual = self.first(x)
        for layer in self.layers:
            x = layer(x)
            x = residual = F.relu(x + residual)
        return self.head(x[:, :, -1])


@odd(image(8, 48))
class WaveNet(nn.Module):
    """WaveNet: gated dilated convolutions, padded on the left by `F.pad`, and a sum of skips."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.ModuleList(nn.Conv1d(8, 8, 2, dilation=2**i) for i in range(3))
        self.gates = nn.ModuleList(nn.Conv1d(8, 8, 2, dilation=2**i) for i in range(3))
        self.skips = nn.ModuleList(nn.Conv1d(8, 16, 1) for _ in range(3))
        self.out = nn.Conv1d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        total: Any = 0
        for i, (one, gate, skip) in enumerate(zip(self.filters, self.gates, self.skips, strict=True)):
            padded = F.pad(x, (2**i, 0))
            z = torch.tanh(one(padded)) * torch.sigmoid(gate(padded))
            total = skip(z) + total
            x = x + z
        return self.out(F.relu(total))


@odd(tokens(100, 16))
class TextCnn(nn.Module):
    """Kim's sentence classifier: an Embedding, convolutions of several widths, and the maximum over time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 24, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv2d(1, 8, (k, 24)) for k in (3, 4, 5))
        self.head = nn.Linear(24, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).unsqueeze(1)
        parts = [F.relu(conv(x)).squeeze(3) for conv in self.convs]
        pooled = [F.max_pool1d(part, part.size(2)).squeeze(2) for part in parts]
        return self.head(F.dropout(torch.cat(pooled, 1), 0.5, self.training))


@odd({"ids": tokens(100, 12), "mask": mask(12)})
class BagOfWords(nn.Module):
    """The mean embedding of all words that are not padding; ids and mask are keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(100, 16), nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        words = self.embed(ids) * mask.unsqueeze(-1).float()
        mean = words.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        return self.head(F.relu(self.hidden(mean)))


@odd(tokens(60, 10))
class Gpt(nn.Module):
    """A small GPT: token and position embeddings, causal blocks, a head tied to the embedding."""

    def __init__(self) -> None:
        from zoo.odd_attention import _Sdpa

        super().__init__()
        self.wte, self.wpe = nn.Embedding(60, 32), nn.Embedding(16, 32)
        self.blocks, self.norm = nn.ModuleList(_Sdpa() for _ in range(2)), nn.LayerNorm(32)
        self.head = nn.Linear(32, 60, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        _, t = ids.size()
        assert t <= 16, f"a sequence of {t} is longer than 16"
        x = self.wte(ids) + self.wpe(torch.arange(0, t, dtype=torch.long, device=ids.device))
        for one in self.blocks:
            x = one(x)
        return self.head(self.norm(x))


@odd(vector(3, 64))
class PointNet(nn.Module):
    """PointNet: shared MLPs as 1-D convolutions, a learned transform by bmm, the maximum over points."""

    def __init__(self) -> None:
        super().__init__()
        self.tnet = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU())
        self.transform, self.mlp = (
            nn.Linear(16, 9),
            nn.Sequential(nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU()),
        )
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch = x.size()[0]
        t = self.transform(torch.max(self.tnet(x), 2, keepdim=True)[0].view(-1, 16)).view(-1, 3, 3)
        t = t + torch.eye(3, device=x.device).repeat(batch, 1, 1)
        x = torch.bmm(x.transpose(2, 1), t).transpose(2, 1)
        return self.head(torch.max(self.mlp(x), 2)[0])


@odd(vector(10, 8))
class GraphConv(nn.Module):
    """Graph convolutions `A @ x @ W` with the adjacency matrix as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        linked = (torch.rand(10, 10, generator=torch.Generator().manual_seed(0)) > 0.6).float() + torch.eye(
            10
        )
        self.register_buffer("adjacency", linked / linked.sum(1, keepdim=True))
        self.adjacency: Tensor
        self.w1, self.w2 = nn.Parameter(torch.randn(8, 16) * 0.3), nn.Parameter(torch.randn(16, 4) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(torch.matmul(self.adjacency, x) @ self.w1)
        return torch.matmul(self.adjacency, x @ self.w2)


@odd((vector(10, 8), fixed(torch.eye(10) * 0.5 + 0.05)))
class GraphInput(nn.Module):
    """Graph convolutions with the adjacency matrix as an input without a batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return self.two(adjacency @ F.relu(self.one(adjacency @ x)))


@odd(image(1, 16, 8, 6))
class SkeletonGcn(nn.Module):
    """ST-GCN: einsum over joints with a buffer that is multiplied by a learned importance."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.rand(2, 6, 6))
        self.a: Tensor
        self.importance = nn.Parameter(torch.ones(2, 6, 6))
        self.conv, self.time, self.head = (
            nn.Conv2d(16, 32, 1),
            nn.Conv2d(16, 16, (3, 1), padding=(1, 0)),
            nn.Linear(16, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.squeeze(1))
        n, kc, t, v = x.size()
        x = torch.einsum("nkctv,kvw->nctw", (x.view(n, 2, kc // 2, t, v), self.a * self.importance))
        x = self.time(F.relu(x.contiguous()))
        return self.head(F.avg_pool2d(x, x.size()[2:]).view(n, -1))


@odd(vector(24, 4))
class DLinear(nn.Module):
    """DLinear: the trend is a moving average with repeated ends; trend and season have one Linear over time each."""

    def __init__(self) -> None:
        super().__init__()
        self.average, self.season, self.trend = nn.AvgPool1d(5, 1), nn.Linear(24, 6), nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        front, end = x[:, :1, :].repeat(1, 2, 1), x[:, -1:, :].repeat(1, 2, 1)
        trend = self.average(torch.cat([front, x, end], dim=1).permute(0, 2, 1)).permute(0, 2, 1)
        season = self.season((x - trend).permute(0, 2, 1))
        return (season + self.trend(trend.permute(0, 2, 1))).permute(0, 2, 1)


@odd(vector(16, 12))
class PatchSeries(nn.Module):
    """PatchTST: each series is normalized in forward, cut into patches by `unfold`, and denormalized at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 16), nn.Linear(16 * 7, 4)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True).detach()
        std = torch.sqrt(torch.var(x, dim=1, keepdim=True, unbiased=False) + 1e-5).detach()
        x = ((x - mean) / std).permute(0, 2, 1)
        patches = self.embed(x.unfold(dimension=-1, size=4, step=2))
        out = self.head(F.gelu(patches).flatten(-2)).permute(0, 2, 1)
        return out * std + mean
