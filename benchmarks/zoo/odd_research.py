"""Layers of papers as in their repositories: splines, scans, experts, modulation, slots, codebooks, diffusion."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import List, image, tokens, vector
from zoo.odd_branches import body

odd = List("odd")
ENTRIES = odd.entries


class _KanLinear(nn.Module):
    """The layer of efficient-kan: a base Linear, and B-splines with a weight that is scaled per edge."""

    def __init__(self, inputs: int, outputs: int, size: int = 5, order: int = 3) -> None:
        super().__init__()
        self.inputs, self.outputs, self.order = inputs, outputs, order
        step = 2 / size
        grid = (torch.arange(-order, size + order + 1) * step - 1).expand(inputs, -1).contiguous()
        self.register_buffer("grid", grid)
        self.grid: Tensor
        self.base_weight = nn.Parameter(torch.empty(outputs, inputs))
        self.spline_weight = nn.Parameter(torch.randn(outputs, inputs, size + order) * 0.3)
        self.spline_scaler = nn.Parameter(torch.empty(outputs, inputs))
        nn.init.kaiming_uniform_(self.base_weight, a=math.sqrt(5))
        nn.init.kaiming_uniform_(self.spline_scaler, a=math.sqrt(5))

    def b_splines(self, x: Tensor) -> Tensor:
        assert x.dim() == 2 and x.size(1) == self.inputs
        grid, x = self.grid, x.unsqueeze(-1)
        bases = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            bases = (x - grid[:, : -(k + 1)]) / (grid[:, k:-1] - grid[:, : -(k + 1)]) * bases[:, :, :-1] + (
                grid[:, k + 1 :] - x
            ) / (grid[:, k + 1 :] - grid[:, 1:(-k)]) * bases[:, :, 1:]
        return bases.contiguous()

    @property
    def scaled_spline_weight(self) -> Tensor:
        return self.spline_weight * self.spline_scaler.unsqueeze(-1)

    def forward(self, x: Tensor) -> Tensor:
        base = F.linear(F.silu(x), self.base_weight)
        spline = F.linear(
            self.b_splines(x).view(x.size(0), -1), self.scaled_spline_weight.view(self.outputs, -1)
        )
        return base + spline


@odd(vector(8))
def kan() -> nn.Module:
    """Kolmogorov-Arnold layers (efficient-kan)."""
    return nn.Sequential(_KanLinear(8, 16), _KanLinear(16, 4))


class _Mamba(nn.Module):
    """A selective scan, step by step over a known length (mamba-minimal)."""

    def __init__(self, width: int = 16, inner: int = 32, state: int = 8, rank: int = 4) -> None:
        super().__init__()
        self.inner, self.state, self.rank = inner, state, rank
        self.in_proj = nn.Linear(width, inner * 2, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.x_proj = nn.Linear(inner, rank + state * 2, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, state + 1).float().repeat(inner, 1)))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        (_, length, _) = x.shape
        (x, res) = self.in_proj(x).split(split_size=[self.inner, self.inner], dim=-1)
        x = x.transpose(1, 2)
        x = F.silu(self.conv1d(x)[:, :, :length].transpose(1, 2))
        y = self.ssm(x) * F.silu(res)
        return self.out_proj(y)

    def ssm(self, x: Tensor) -> Tensor:
        (d_in, n) = self.A_log.shape
        a = -torch.exp(self.A_log.float())
        (delta, gain, out) = self.x_proj(x).split(split_size=[self.rank, n, n], dim=-1)
        delta = F.softplus(self.dt_proj(delta))
        (b, length, d_in) = x.shape
        delta_a = torch.exp(torch.einsum("bld,dn->bldn", delta, a))
        delta_b_x = torch.einsum("bld,bln,bld->bldn", delta, gain, x)
        state, ys = torch.zeros((b, d_in, n), device=delta_a.device), []
        for i in range(length):
            state = delta_a[:, i] * state + delta_b_x[:, i]
            ys.append(torch.einsum("bdn,bn->bd", state, out[:, i, :]))
        return torch.stack(ys, dim=1) + x * self.D


@odd(tokens(50, 12))
class MambaText(nn.Module):
    """Mamba blocks over tokens, RMS norms with weights in a ParameterList, a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(_Mamba() for _ in range(2))
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(16)) for _ in range(3))
        self.lm_head = nn.Linear(16, 50, bias=False)
        self.lm_head.weight = self.embedding.weight

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer, weight in zip(self.layers, self.norms, strict=False):
            x = layer(self.norm(x, weight)) + x
        return self.lm_head(self.norm(x, self.norms[-1]))


@odd(vector(6, 16))
class StackedExperts(nn.Module):
    """Experts as stacked matrices in an einsum of three operands, with top-k gates scattered into zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4, bias=False)
        self.w1, self.w2 = (
            nn.Parameter(torch.randn(4, 16, 24) * 0.2),
            nn.Parameter(torch.randn(4, 24, 16) * 0.2),
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = torch.topk(self.gate(x), k=2, dim=-1)
        gates = torch.zeros(*x.shape[:2], 4, device=x.device).scatter(-1, chosen, scores.softmax(-1))
        hidden = F.gelu(torch.einsum("bnd,edf->benf", x, self.w1))
        x = x + torch.einsum("benf,efd,bne->bnd", hidden, self.w2, gates)
        return self.head(x.mean(1))


@odd((image(3, 32, 32), tokens(40, 7)))
class FilmVqa(nn.Module):
    """FiLM: a question scales and shifts the feature maps of an image, with coordinates as extra channels."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn = nn.Embedding(40, 12, padding_idx=0), nn.GRU(12, 16, batch_first=True)
        self.film, self.body = nn.Linear(16, 2 * 2 * 16), body()
        self.convs = nn.ModuleList(nn.Conv2d(18, 16, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16, affine=False) for _ in range(2))
        self.head = nn.Linear(16, 6)

    def forward(self, image: Tensor, question: Tensor) -> Tensor:
        _, hidden = self.rnn(self.words(question))
        gammas, betas = self.film(hidden.squeeze(0)).view(-1, 2, 2, 16).unbind(2)
        x = self.body(image)
        ys, xs = torch.meshgrid(
            torch.linspace(-1, 1, x.size(2)), torch.linspace(-1, 1, x.size(3)), indexing="ij"
        )
        coordinates = torch.stack([xs, ys]).to(x).unsqueeze(0).expand(x.size(0), -1, -1, -1)
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(torch.cat([x, coordinates], 1)))
            x = x + F.relu((1 + gammas[:, i, :, None, None]) * y + betas[:, i, :, None, None])
        return self.head(x.flatten(2).max(-1)[0])


class _SpatialGate(nn.Module):
    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(width), nn.Conv1d(length, length, kernel_size=1)
        assert self.proj.bias is not None
        nn.init.constant_(self.proj.bias, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        u, v = x.chunk(2, dim=-1)
        return u * self.proj(self.norm(v))


@odd(image(3, 32, 32))
class Gmlp(nn.Module):
    """gMLP on patches: a Conv1d over the tokens makes the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 24, 8, 8)
        self.norm, self.up, self.gate = nn.LayerNorm(24), nn.Linear(24, 48), _SpatialGate(24, 16)
        self.down, self.head = nn.Linear(24, 24), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = x + self.down(self.gate(F.gelu(self.up(self.norm(x)))))
        return self.head(x.mean(dim=1))


@odd(image(3, 32, 32))
class SlotAttention(nn.Module):
    """Slot attention: slots compete for pixels in three rounds of attention with a GRU cell."""

    def __init__(self, slots: int = 4, width: int = 16) -> None:
        super().__init__()
        self.slots, self.scale, self.eps = slots, width**-0.5, 1e-8
        self.body, self.position = body(width), nn.Linear(4, width)
        self.mu, self.log_sigma = (
            nn.Parameter(torch.randn(1, 1, width)),
            nn.Parameter(torch.zeros(1, 1, width)),
        )
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))
        self.gru = nn.GRUCell(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.ReLU(inplace=True), nn.Linear(32, width))
        self.norm_input, self.norm_slots, self.norm_mlp = (nn.LayerNorm(width) for _ in range(3))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        line = torch.linspace(0.0, 1.0, steps=x.shape[-1])
        grid = torch.stack(torch.meshgrid(line, line, indexing="ij"), dim=-1)[None]
        x = x.permute(0, 2, 3, 1) + self.position(torch.cat([grid, 1.0 - grid], dim=-1))
        x = self.norm_input(torch.flatten(x, 1, 2))
        b, _, d = x.shape
        mu, sigma = self.mu.expand(b, self.slots, -1), self.log_sigma.exp().expand(b, self.slots, -1)
        spread = torch.randn(mu.shape) if self.training else torch.linspace(-1, 1, self.slots)[None, :, None]
        slots, k, v = mu + sigma * spread, self.to_k(x), self.to_v(x)
        for _ in range(3):
            before = slots
            q = self.to_q(self.norm_slots(slots))
            attention = (torch.einsum("bid,bjd->bij", q, k) * self.scale).softmax(dim=1) + self.eps
            weights = attention / attention.sum(dim=-1, keepdim=True)
            updates = torch.einsum("bjd,bij->bid", v, weights)
            slots = self.gru(updates.reshape(-1, d), before.reshape(-1, d)).reshape(b, -1, d)
            slots = slots + self.mlp(self.norm_mlp(slots))
        return self.head(slots), attention


@odd(image(3, 32, 32))
class VqVae(nn.Module):
    """VQ-VAE: the nearest code of a codebook, with a straight-through gradient; the distances are an output too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.codes = body(), nn.Embedding(24, 16)
        nn.init.uniform_(self.codes.weight, -1, 1)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.ReLU(True), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh()
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.encoder(x).permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, 16)
        distances = (
            torch.sum(flat**2, dim=1, keepdim=True)
            + torch.sum(self.codes.weight**2, dim=1)
            - 2 * torch.matmul(flat, self.codes.weight.t())
        )
        nearest = torch.argmin(distances, dim=1).unsqueeze(1)
        one_hot = torch.zeros(nearest.shape[0], 24, device=x.device)
        one_hot.scatter_(1, nearest, 1)
        quantized = torch.matmul(one_hot, self.codes.weight).view(z.shape)
        quantized = z + (quantized - z).detach()
        return {"image": self.decoder(quantized.permute(0, 3, 1, 2).contiguous()), "distances": distances}


@odd((image(3, 16, 16), tokens(100)))
class DiffusionUnet(nn.Module):
    """The U-Net of a diffusion model: sinusoidal time embeddings, GroupNorm, attention over pixels, a list of skips."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, 64), nn.SiLU(), nn.Linear(64, 64))
        self.stem, self.down = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, 2, 1)
        self.blocks = nn.ModuleList(_TimeBlock(width * (1 + (i > 1)), width) for i in range(4))
        self.qkv, self.proj = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)
        self.out = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def attend(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = self.qkv(x).reshape(b, 3, c, h * w).unbind(1)
        weight = torch.bmm(q.permute(0, 2, 1), k) * (int(c) ** (-0.5))
        return x + self.proj(torch.bmm(v, F.softmax(weight, dim=2).permute(0, 2, 1)).reshape(b, c, h, w))

    def forward(self, x: Tensor, timesteps: Tensor) -> Tensor:
        half = self.width // 2
        freqs = torch.exp(-math.log(10000) * torch.arange(start=0, end=half, dtype=torch.float32) / half)
        args = timesteps[:, None].float() * freqs[None]
        emb = self.time(torch.cat([torch.cos(args), torch.sin(args)], dim=-1))
        skips = [self.stem(x)]
        skips.append(self.blocks[0](skips[-1], emb))
        h = self.attend(self.blocks[1](self.down(skips[-1]), emb))
        h = F.interpolate(h, scale_factor=2.0, mode="nearest")
        for block in self.blocks[2:]:
            h = block(torch.cat([h, skips.pop()], dim=1), emb)
        return self.out(h)


class _TimeBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_layers = nn.Sequential(
            nn.GroupNorm(4, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1)
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(64, 2 * outputs))
        self.out_layers = nn.Sequential(
            nn.GroupNorm(4, outputs), nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(outputs, outputs, 3, padding=1)
        )
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h = self.in_layers(x)
        emb_out = self.emb_layers(emb).type(h.dtype)
        while len(emb_out.shape) < len(h.shape):
            emb_out = emb_out[..., None]
        out_norm, out_rest = self.out_layers[0], self.out_layers[1:]
        scale, shift = torch.chunk(emb_out, 2, dim=1)
        return self.skip(x) + out_rest(out_norm(h) * (1 + scale) + shift)
