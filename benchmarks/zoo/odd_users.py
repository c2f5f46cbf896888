"""What surrounds a model in users' code: wrappers, hooks, checkpoints, scripted parts, types, devices, state."""

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
    """A model in nn.DataParallel, as a training script leaves it."""
    return nn.DataParallel(_Net())


@odd(image(3, 32, 32))
def averaged() -> nn.Module:
    """The moving average of a model's weights (swa_utils)."""
    return torch.optim.swa_utils.AveragedModel(_Net())


@odd(image(3, 32, 32))
def half_model() -> nn.Module:
    """`model.half()`, called with float32 that it casts to the type of its own weights."""

    class Half(_Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(next(self.parameters()).dtype)).float()

    return Half().half()


@odd(image(3, 32, 32))
def half_inside() -> nn.Module:
    """Half of the model in float16, by hand: `.half()` in front of it and `.float()` behind it."""

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
    """A model in float64 that casts what it gets."""

    class Double(_Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.double())

    return Double().double()


@odd(image(3, 32, 32))
class Checkpointed(nn.Module):
    """torch.utils.checkpoint around blocks while training, around a Sequential always."""

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
    """Features gathered by forward hooks into a dictionary of the module."""

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
    """A part of the model is torch.jit.script'ed."""

    class Mixed(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.gate = torch.jit.script(_Gate())

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.gate(self.body(x)).mean((2, 3)))

    return Mixed()


@odd(vector(6, 8), refused="torch.vmap transforms a function")
class Vmapped(nn.Module):
    """torch.vmap over rows, and an ensemble by functional_call over stacked parameters."""

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
    """Built from a dataclass, called by keywords with flags left at their defaults, yields a dataclass."""

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
    """A mask over positions beside the batch, four by four."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1) / 8**0.5).masked_fill(~mask, float("-inf"))
        return self.head(scores.softmax(-1) @ v).mean(1)


@odd(vector(2, 8))
class FunctionalAttention(nn.Module):
    """`F.multi_head_attention_forward` with parameters of one's own, as CLIP's attention pool calls it."""

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
    """Lazy layers, made concrete by the first call; layers found by name; flags in a ModuleDict."""

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
