"""Models with the surroundings of users' code: wrappers, hooks, checkpoints, scripted parts, types, devices, state."""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from zoo.entry import List, fixed, image, vector
from zoo.odd_branches import body

odd = List("odd")
ENTRIES = odd.entries
log = logging.getLogger(__name__)


class _Net(nn.Module):
    """A plain classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = body(), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


@odd(image(3, 32, 32))
def data_parallel() -> nn.Module:
    """A model wrapped in nn.DataParallel, as training scripts leave it."""
    return nn.DataParallel(_Net())


@odd(image(3, 32, 32))
def averaged() -> nn.Module:
    """A model wrapped in AveragedModel of torch.optim.swa_utils."""
    return torch.optim.swa_utils.AveragedModel(_Net())


@odd(image(3, 32, 32))
def half_model() -> nn.Module:
    """`model.half()`, which casts its float32 input to the type of its weights."""

    class Half(_Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(next(self.parameters()).dtype)).float()

    return Half().half()


@odd(image(3, 32, 32))
def half_inside() -> nn.Module:
    """A layer in float16, with `.half()` before it and `.float()` after it."""

    class Half(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.middle = nn.Conv2d(16, 16, 3, padding=1).half()

        def forward(self, x: Tensor) -> Tensor:
            x = self.middle(self.body(x).half()).float()
            return self.head(x.mean((2, 3)))

    return Half()


@odd(image(3, 32, 32))
def double_model() -> nn.Module:
    """A model in float64 that casts its input."""

    class Double(_Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.double())

    return Double().double()


@odd(image(3, 32, 32))
class Checkpointed(nn.Module):
    """torch.utils.checkpoint: around blocks only in training, around a method and a Sequential always."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = body(), nn.Linear(16, 5)
        self.blocks = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
        self.tail = nn.Sequential(nn.ReLU(), nn.Conv2d(16, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        x = checkpoint(self._again, x, use_reentrant=True)
        x = checkpoint_sequential(self.tail, 2, x, use_reentrant=False)
        return self.head(x.mean((2, 3)))

    def _again(self, x: Tensor) -> Tensor:
        return F.hardswish(self.blocks[0](x))


@odd(image(3, 32, 32))
class FeatureHooks(nn.Module):
    """Features collected by forward hooks in a dictionary of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.features = OrderedDict[str, Tensor]()
        self.body, self.conv, self.head = body(), nn.Conv2d(16, 16, 3, padding=1), nn.Linear(40, 5)
        for name in ("1", "4"):
            self.body[int(name)].register_forward_hook(functools.partial(self._keep, name))

    def _keep(self, name: str, module: nn.Module, given: Any, output: Tensor) -> None:
        self.features[name] = output

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        self.features.clear()
        x = self.conv(self.body(x))
        pooled = [f.mean((2, 3)) for f in self.features.values()]
        return self.head(torch.cat([x.amax((2, 3)), *pooled], 1)), list(self.features.values())


class _Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 8), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = x.mean((2, 3))
        y = torch.sigmoid(self.fc2(F.relu(self.fc1(y))))
        return x * y.unsqueeze(-1).unsqueeze(-1)


@odd(image(3, 32, 32), refused="TorchScript has no Python code")
def scripted_part() -> nn.Module:
    """A model with a part compiled by torch.jit.script."""

    class Mixed(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.gate = torch.jit.script(_Gate())

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.gate(self.body(x)).mean((2, 3)))

    return Mixed()


@odd(vector(6, 8), refused="torch.vmap transforms a function")
class Vmapped(nn.Module):
    """torch.vmap over rows, and over the stacked parameters of an ensemble."""

    def __init__(self) -> None:
        super().__init__()
        members = [nn.Linear(8, 4) for _ in range(3)]
        self.weight = nn.Parameter(torch.stack([m.weight.detach() for m in members]))
        self.bias, self.first = nn.Parameter(torch.stack([m.bias.detach() for m in members])), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.vmap(lambda row: torch.tanh(self.first(row)))(x)
        out = torch.vmap(F.linear, in_dims=(None, 0, 0))(x, self.weight, self.bias)
        return out.mean(0)


@dataclass
class _Config:
    width: int = 16
    act: str = "gelu"
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Output:
    logits: Tensor
    hidden: list[Tensor] | None = None
    name: str = "net"


@odd({"pixels": image(3, 32, 32), "scale": vector(1)})
class Configured(nn.Module):
    """A model built from a dataclass, with keyword arguments, flags at their defaults, and a dataclass as output."""

    def __init__(self, config: _Config = _Config()) -> None:  # noqa: B008
        super().__init__()
        acts: dict[str, Any] = {"gelu": F.gelu, "relu": F.relu}
        self.config, self.act = config, acts[config.act]
        self.body, self.head = body(config.width), nn.Linear(config.width, 5)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(
        self, pixels: Tensor, scale: Tensor | None = None, *, hidden: bool = True, **kwargs: Any
    ) -> _Output:
        log.debug("pixels %s", tuple(pixels.shape))
        x = self.act(self.body(pixels.to(self.device, non_blocking=True)))
        if scale is not None:
            x = x * torch.sigmoid(scale).view(-1, 1, 1, 1)
        if torch.cuda.is_available() and x.is_cuda:
            x = x.contiguous(memory_format=torch.channels_last)
        logits = self.head(x.mean((2, 3)))
        return _Output(logits, [x] if hidden else None)


@odd((vector(4, 8), fixed(torch.tril(torch.ones(4, 4)).bool())))
class FixedMask(nn.Module):
    """A 4 x 4 attention mask as an input without a batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1) / 8**0.5).masked_fill(~mask, float("-inf"))
        return self.head(scores.softmax(-1) @ v).mean(1)


@odd(vector(2, 8))
class FunctionalAttention(nn.Module):
    """`F.multi_head_attention_forward` with the model's own parameters, as in CLIP's attention pool."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.c_proj = (nn.Linear(8, 8) for _ in range(4))
        self.position = nn.Parameter(torch.randn(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(1, 0, 2)
        x = torch.cat([x.mean(dim=0, keepdim=True), x], dim=0) + self.position[:, None, :].to(x.dtype)
        x, _ = F.multi_head_attention_forward(
            query=x[:1],
            key=x,
            value=x,
            embed_dim_to_check=x.shape[-1],
            num_heads=2,
            q_proj_weight=self.q_proj.weight,
            k_proj_weight=self.k_proj.weight,
            v_proj_weight=self.v_proj.weight,
            in_proj_weight=None,
            in_proj_bias=torch.cat([self.q_proj.bias, self.k_proj.bias, self.v_proj.bias]),
            bias_k=None,
            bias_v=None,
            add_zero_attn=False,
            dropout_p=0,
            out_proj_weight=self.c_proj.weight,
            out_proj_bias=self.c_proj.bias,
            use_separate_proj_weight=True,
            training=self.training,
            need_weights=False,
        )
        return x.squeeze(0)


@odd(image(3, 32, 32))
class Lazy(nn.Module):
    """Lazy layers, initialized by a first call; layers looked up by name; heads in a ModuleDict."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.LazyConv2d(8, 3, stride=2)
        for i in range(2):
            self.add_module(
                f"layer{i}", nn.Sequential(nn.LazyConv2d(8, 3, padding=1), nn.LazyBatchNorm2d(), nn.ReLU())
            )
        self.heads = nn.ModuleDict({"a": nn.LazyLinear(3), "b": nn.LazyLinear(2)})
        self(torch.zeros(2, 3, 32, 32))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        for i in range(2):
            x = getattr(self, f"layer{i}")(x) + x
        return {f"head_{name}": head(x.mean((2, 3))) for name, head in self.heads.items()}
