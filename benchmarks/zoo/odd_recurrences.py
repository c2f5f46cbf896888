"""Recent sequence mixers, most of which carry a state: delta rules, gated memories, scans, long convolutions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import List, image, vector
from zoo.odd_recent_text import RmsNorm

odd = List("odd")
ENTRIES = odd.entries


@odd(vector(8, 16))
class Rwkv7(nn.Module):
    """RWKV-7 time mixing: token shift, a per-channel decay, and a generalized delta rule, step by step."""

    def __init__(self, width: int = 16, count: int = 2) -> None:
        super().__init__()
        self.count, self.size = count, width // count
        self.mix = nn.Parameter(torch.rand(5, 1, 1, width))
        self.r, self.k, self.v, self.w, self.a = (nn.Linear(width, width, bias=False) for _ in range(5))
        self.w0, self.bonus = (
            nn.Parameter(torch.zeros(width)),
            nn.Parameter(torch.randn(count, self.size) * 0.1),
        )
        self.norm, self.out = nn.GroupNorm(count, width, eps=64e-5), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        shifted = F.pad(x, (0, 0, 1, -1)) - x
        xr, xw, xk, xv, xa = (x + shifted * self.mix).unbind(0)
        split = (b, t, self.count, self.size)
        r, k, v = self.r(xr).view(split), self.k(xk).view(split), self.v(xv).view(split)
        w = torch.exp(-0.606531 * torch.sigmoid(self.w0 + torch.tanh(self.w(xw)))).view(split)
        a, kk = torch.sigmoid(self.a(xa)).view(split), F.normalize(k, dim=-1, p=2.0)
        state = torch.zeros(b, self.count, self.size, self.size, device=x.device)
        out = torch.zeros_like(v)
        for i in range(t):
            kept = state @ kk[:, i].unsqueeze(-1)
            removed = kept @ (kk[:, i] * a[:, i]).unsqueeze(-2)
            state = state * w[:, i].unsqueeze(-2) - removed + v[:, i].unsqueeze(-1) @ k[:, i].unsqueeze(-2)
            out[:, i] = (state @ r[:, i].unsqueeze(-1)).squeeze(-1)
        y = self.norm(out.reshape(b * t, c)).view(b, t, c)
        y = y + ((r * k * self.bonus).sum(-1, keepdim=True) * v).view(b, t, c)
        return self.out(y)


@odd(vector(8, 16))
class GatedDelta(nn.Module):
    """A gated delta network: short convolutions, normalized queries and keys, a decay and write strength per step."""

    def __init__(self, width: int = 16, count: int = 2) -> None:
        super().__init__()
        self.count = count
        self.qkv, self.ba = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 2 * count)
        self.conv = nn.Conv1d(3 * width, 3 * width, 4, groups=3 * width, padding=3)
        self.log_a, self.dt = nn.Parameter(torch.rand(count)), nn.Parameter(torch.rand(count))
        self.z, self.norm, self.out = (
            nn.Linear(width, width),
            RmsNorm(width // count),
            nn.Linear(width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        mixed = F.silu(self.conv(self.qkv(x).mT)[..., :t]).mT
        q, k, v = (part.reshape(b, t, self.count, -1) for part in mixed.split(c, dim=-1))
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6)
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        beta, alpha = self.ba(x).chunk(2, -1)
        g = (-self.log_a.exp() * F.softplus(alpha + self.dt)).exp()
        beta, outputs = beta.sigmoid(), []
        state = x.new_zeros(b, self.count, c // self.count, c // self.count)
        for i in range(t):
            state = state * g[:, i, :, None, None]
            memory = (state * k[:, i].unsqueeze(-1)).sum(-2)
            delta = (v[:, i] - memory) * beta[:, i].unsqueeze(-1)
            state = state + k[:, i].unsqueeze(-1) * delta.unsqueeze(-2)
            outputs.append((state * q[:, i].unsqueeze(-1)).sum(-2))
        y = self.norm(torch.stack(outputs, dim=1)).reshape(b, t, c)
        return self.out(y * F.silu(self.z(x)))


@odd(vector(10, 16))
class MatrixLstm(nn.Module):
    """mLSTM in its parallel form: exponential gates and a matrix of log decays, stabilized by its row maxima."""

    def __init__(self, width: int = 16, count: int = 2) -> None:
        super().__init__()
        self.count, self.qkv = count, nn.Linear(width, 3 * width)
        self.i_gate, self.f_gate, self.o_gate = (
            nn.Linear(width, count),
            nn.Linear(width, count),
            nn.Linear(width, width),
        )
        self.norm, self.out = nn.LayerNorm(width // count), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.count, -1).permute(2, 0, 3, 1, 4)
        log_f = F.logsigmoid(self.f_gate(x) + 3.0).transpose(1, 2)
        total = torch.cumsum(log_f, dim=-1)
        decay = total[..., :, None] - total[..., None, :] + self.i_gate(x).transpose(1, 2)[..., None, :]
        decay = decay.masked_fill(~torch.tril(torch.ones(t, t, dtype=torch.bool)), -float("inf"))
        largest, _ = torch.max(decay, dim=-1, keepdim=True)
        scores = (q @ k.transpose(-2, -1)) / k.shape[-1] ** 0.5 * torch.exp(decay - largest)
        size = torch.maximum(scores.sum(-1, keepdim=True).abs(), torch.exp(-largest))
        y = self.norm((scores / (size + 1e-6)) @ v).transpose(1, 2).reshape(b, t, c)
        return self.out(torch.sigmoid(self.o_gate(x)) * y)


@odd(vector(8, 12))
class ScalarLstm(nn.Module):
    """sLSTM: exponential gates kept finite by a running maximum, a normalizer state, heads by einsum."""

    def __init__(self, width: int = 12, count: int = 3) -> None:
        super().__init__()
        self.count, self.w = count, nn.Linear(width, 4 * width)
        self.r = nn.Parameter(torch.randn(count, width // count, 4 * width // count) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        gates = self.w(x).view(b, t, self.count, -1)
        cell = normal = largest = hidden = torch.zeros(b, self.count, c // self.count)
        outputs = []
        for step in range(t):
            raw = gates[:, step] + torch.einsum("bhd,hdk->bhk", hidden, self.r)
            z, i, f, o = raw.chunk(4, dim=-1)
            log_f = -F.softplus(-f)
            new = i if step == 0 else torch.max(log_f + largest, i)
            keep, write = torch.exp(log_f + largest - new), torch.exp(i - new)
            cell, normal, largest = keep * cell + write * torch.tanh(z), keep * normal + write, new
            hidden = torch.sigmoid(o) * cell / normal.clamp_min(1e-6)
            outputs.append(hidden)
        return torch.stack(outputs, 1).flatten(2)


@odd(vector(16, 16))
class LongConvolution(nn.Module):
    """Hyena: filters over the whole length from an MLP of positions, applied as Toeplitz matrices, with gates."""

    def __init__(self, width: int = 16, length: int = 16) -> None:
        super().__init__()
        self.proj, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.short = nn.Conv1d(3 * width, 3 * width, 3, padding=2, groups=3 * width)
        t = torch.linspace(0, 1, length)[:, None]
        bands = torch.arange(1, 4) * 2 * torch.pi * t
        self.register_buffer("positions", torch.cat([t, bands.cos(), bands.sin()], -1))
        self.positions: Tensor
        self.filter = nn.Sequential(nn.Linear(7, 16), nn.SiLU(), nn.Linear(16, width))
        self.decay, self.bias = nn.Parameter(torch.rand(width) * 3), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        x0, x1, v = self.short(self.proj(x).transpose(1, 2))[..., :t].chunk(3, dim=1)
        kernel = self.filter(self.positions) * torch.exp(-self.decay.abs() * self.positions[:, :1])
        shift = torch.arange(t)[:, None] - torch.arange(t)[None, :]
        toeplitz = kernel.t()[:, shift.clamp(min=0)] * (shift >= 0)
        gated = v * x1
        y = torch.einsum("dts,bds->bdt", toeplitz, gated) + gated * self.bias[:, None]
        return self.out((y * x0).transpose(1, 2))


@odd(vector(12, 8))
class MinGru(nn.Module):
    """minGRU: gates that do not depend on the state; all steps at once by cumsum and logcumsumexp."""

    def __init__(self, width: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.gate, self.candidate, self.head = (
            nn.Linear(width, hidden),
            nn.Linear(width, hidden),
            nn.Linear(hidden, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        k, h = self.gate(x), self.candidate(x)
        log_z, log_coefficients = -F.softplus(-k), -F.softplus(k)
        log_h = torch.where(h >= 0, (F.relu(h) + 0.5).log(), -F.softplus(-h))
        total = torch.cumsum(log_coefficients, dim=1)
        log_state = total + torch.logcumsumexp(log_z + log_h - total, dim=1)
        return self.head(log_state.exp())


@odd(image(3, 16, 16))
class CrossScan(nn.Module):
    """The 2-D selective scan of VMamba: four directions by flips and transposes, a loop over positions, a merge."""

    def __init__(self, width: int = 12, state: int = 4) -> None:
        super().__init__()
        self.state, self.stem = state, nn.Conv2d(3, width, 4, 4)
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.dw = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.x_proj = nn.Parameter(torch.randn(4, 2 * state + 1, width) * 0.3)
        self.a_log, self.d = nn.Parameter(torch.rand(4, width, state)), nn.Parameter(torch.ones(4, width))
        self.dt, self.out = nn.Parameter(torch.randn(4, width, 1) * 0.5), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).permute(0, 2, 3, 1)
        residual = x
        x, z = self.inner(self.norm(x)).chunk(2, dim=-1)
        x = F.silu(self.dw(x.permute(0, 3, 1, 2)))
        b, c, h, w = x.shape
        xs = x.new_empty((b, 4, c, h * w))
        xs[:, 0], xs[:, 1] = x.flatten(2, 3), x.transpose(2, 3).flatten(2, 3)
        xs[:, 2:4] = torch.flip(xs[:, 0:2], dims=[-1])
        dts, bs, cs = torch.einsum("bkdl,kcd->bkcl", xs, self.x_proj).split(
            [1, self.state, self.state], dim=2
        )
        dts, a = F.softplus(dts * self.dt), -torch.exp(self.a_log)
        memory, ys = x.new_zeros(b, 4, c, self.state), []
        for i in range(h * w):
            step = dts[..., i, None]
            memory = torch.exp(step * a) * memory + step * bs[:, :, None, :, i] * xs[..., i, None]
            ys.append((memory * cs[:, :, None, :, i]).sum(-1))
        y = torch.stack(ys, -1) + xs * self.d[..., None]
        y = y[:, 0:2] + y[:, 2:4].flip(dims=[-1])
        y = y[:, 0] + y[:, 1].view(b, c, w, h).transpose(2, 3).contiguous().view(b, c, -1)
        y = y.transpose(1, 2).view(b, h, w, c)
        return residual + self.out(y * F.silu(z))


@odd(vector(8, 12))
class TestTimeTraining(nn.Module):
    """A linear model inside the layer, trained on the sequence chunk by chunk with explicit gradient steps."""

    def __init__(self, width: int = 12, chunk: int = 2) -> None:
        super().__init__()
        self.chunk, self.qkv, self.rate = chunk, nn.Linear(width, 3 * width), nn.Linear(width, 1)
        self.w0, self.norm, self.out = (
            nn.Parameter(torch.eye(width) * 0.5),
            nn.LayerNorm(width),
            nn.Linear(width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        rate = 0.1 * self.rate(x).sigmoid()
        weight, outputs = self.w0.expand(x.shape[0], -1, -1), []
        for start in range(0, x.shape[1], self.chunk):
            part = slice(start, start + self.chunk)
            outputs.append(torch.baddbmm(q[:, part], q[:, part], weight))
            error = torch.bmm(k[:, part], weight) - v[:, part]
            weight = torch.baddbmm(weight, (rate[:, part] * k[:, part]).mT, error, alpha=-1.0)
        return self.out(self.norm(torch.cat(outputs, dim=1)))


@odd(vector(10, 16))
class LightningAttention(nn.Module):
    """Linear attention with a fixed decay per head: a masked product within blocks, a state between blocks."""

    def __init__(self, width: int = 16, count: int = 2, block: int = 4) -> None:
        super().__init__()
        self.count, self.block = count, block
        self.qkv, self.gate, self.out = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )
        self.register_buffer("slopes", torch.tensor([0.5, 0.25]).view(count, 1, 1))
        self.slopes: Tensor

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = F.silu(self.qkv(x)).view(b, t, self.count, -1).transpose(1, 2).chunk(3, dim=-1)
        state, output = torch.zeros(b, self.count, q.size(-1), v.size(-1)), torch.empty_like(v)
        for start in range(0, t, self.block):
            size = min(self.block, t - start)
            place = torch.arange(1, size + 1).float()
            q_decay, k_decay = (
                torch.exp(-self.slopes * place[:, None]),
                torch.exp(-self.slopes * (size - place)[:, None]),
            )
            diagonal = torch.exp(-self.slopes * (place[:, None] - place)).tril()
            qi, ki, vi = (one[:, :, start : start + size] for one in (q, k, v))
            within = (qi @ ki.transpose(-1, -2) * diagonal) @ vi
            output[:, :, start : start + size] = within + (qi * q_decay) @ state
            state = state * torch.exp(-self.slopes * size) + (ki * k_decay).transpose(-1, -2) @ vi
        return self.out(torch.sigmoid(self.gate(x)) * output.transpose(1, 2).reshape(b, t, c))
