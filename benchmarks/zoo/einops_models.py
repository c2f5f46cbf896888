"""Transformers written with einops layers and functions: those of vit-pytorch, and our own blocks."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from einops import rearrange, reduce, repeat
from einops.layers.torch import EinMix, Rearrange, Reduce
from torch import Tensor, einsum, nn

from zoo.entry import Entry, Feeds, List, image

own = List("einops")
_SMALL = {
    "image_size": 32,
    "patch_size": 8,
    "num_classes": 6,
    "dim": 32,
    "depth": 2,
    "heads": 4,
    "mlp_dim": 64,
}
_PLAIN = {key: value for key, value in _SMALL.items() if key != "patch_size"}
_PICTURE = image(3, 32, 32)

# name: (module of vit_pytorch, class, arguments, inputs)
MODELS: dict[str, tuple[str, str, dict[str, Any], Feeds]] = {
    "vit": ("vit", "ViT", _SMALL, _PICTURE),
    "simple_vit": ("simple_vit", "SimpleViT", _SMALL, _PICTURE),
    "simple_vit_qk_norm": ("simple_vit_with_qk_norm", "SimpleViT", _SMALL, _PICTURE),
    "simple_vit_registers": ("simple_vit_with_register_tokens", "SimpleViT", _SMALL, _PICTURE),
    "simple_vit_patch_dropout": ("simple_vit_with_patch_dropout", "SimpleViT", _SMALL, _PICTURE),
    "deepvit": ("deepvit", "DeepViT", _SMALL, _PICTURE),
    "cait": ("cait", "CaiT", _SMALL | {"cls_depth": 1}, _PICTURE),
    "vit_small_dataset": ("vit_for_small_dataset", "ViT", _SMALL, _PICTURE),
    "value_residual": ("simple_vit_with_value_residual", "SimpleViT", _SMALL, _PICTURE),
    "parallel_vit": ("parallel_vit", "ViT", _SMALL, _PICTURE),
    "rvt": ("rvt", "RvT", _SMALL, _PICTURE),
    "normalized_vit": ("normalized_vit", "nViT", _SMALL, _PICTURE),
    "vit_1d": ("vit_1d", "ViT", {"seq_len": 64, "patch_size": 8, "num_classes": 6, "dim": 32, "depth": 2, "heads": 4,
                                 "mlp_dim": 64}, image(3, 64)),
    "vit_3d": ("vit_3d", "ViT", _PLAIN | {"image_patch_size": 8, "frames": 4, "frame_patch_size": 2},
               image(3, 4, 32, 32)),
    "cct": ("cct", "CCT", {"img_size": 32, "embedding_dim": 32, "n_conv_layers": 2, "num_layers": 2, "num_heads": 4,
                           "mlp_ratio": 2.0, "num_classes": 6}, _PICTURE),
    "cvt": ("cvt", "CvT", {"num_classes": 6, "s1_emb_dim": 16, "s2_emb_dim": 32, "s3_emb_dim": 48, "s3_depth": 1,
                           "s2_heads": 2, "s3_heads": 2}, image(3, 64, 64)),
    "pit": ("pit", "PiT", _SMALL | {"depth": (1, 1)}, _PICTURE),
    "levit": ("levit", "LeViT", {"image_size": 64, "num_classes": 6, "dim": (16, 24, 32), "depth": 1,
                                 "heads": (2, 3, 4),
                                 "mlp_mult": 2}, image(3, 64, 64)),
    "twins_svt": ("twins_svt", "TwinsSVT", {"num_classes": 6, "s1_emb_dim": 16, "s2_emb_dim": 24, "s3_emb_dim": 32,
                                            "s4_emb_dim": 32, "s3_depth": 1, "s1_local_patch_size": 4,
                                            "s2_local_patch_size": 4, "s3_local_patch_size": 2,
                                            "s1_global_k": 4, "s2_global_k": 4, "s3_global_k": 2, "s4_global_k": 2},
                  image(3, 64, 64)),
    "crossformer": ("crossformer", "CrossFormer", {"num_classes": 6, "dim": (32, 64, 64, 64), "depth": (1, 1, 1, 1),
                                                   "global_window_size": (4, 2, 2, 1), "local_window_size": 2},
                    image(3, 64, 64)),
    "t2t": ("t2t", "T2TViT", {"image_size": 64, "num_classes": 6, "dim": 32, "depth": 1, "heads": 2, "mlp_dim": 64},
            image(3, 64, 64)),
    "mobile_vit": ("mobile_vit", "MobileViT", {"image_size": (64, 64), "dims": [16, 24, 32], "num_classes": 6,
                                               "depths": (1, 1, 1),
                                               "channels": [8, 8, 16, 16, 24, 24, 32, 32, 48, 48, 64]},
                   image(3, 64, 64)),
    "scalable_vit": ("scalable_vit", "ScalableViT", {"num_classes": 6, "dim": 16, "heads": (1, 2), "depth": (1, 1),
                                                     "ssa_dim_key": (8, 8), "reduction_factor": (4, 2),
                                                     "window_size": (8, 4)}, image(3, 64, 64)),
    "nest": ("nest", "NesT", {"image_size": 32, "patch_size": 4, "dim": 16, "heads": 2, "num_hierarchies": 2,
                              "block_repeats": (1, 1), "num_classes": 6}, _PICTURE),
    "max_vit": ("max_vit", "MaxViT", {"num_classes": 6, "dim_conv_stem": 8, "dim": 16, "dim_head": 8, "depth": (1, 1),
                                      "window_size": 4}, image(3, 64, 64)),
    "region_vit": ("regionvit", "RegionViT", {"dim": (16, 24, 32, 48), "depth": (1, 1, 1, 1), "window_size": 2,
                                              "num_classes": 6}, image(3, 64, 64)),
}  # fmt: skip


@own(_PICTURE)
class EinopsFunctions(nn.Module):
    """The functions `rearrange`, `reduce` and `repeat`, with `einsum` between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Linear(192, 32), nn.Linear(32, 96, bias=False), nn.Linear(32, 6)
        self.cls = nn.Parameter(torch.randn(1, 1, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(rearrange(x, "b c (h p) (w q) -> b (h w) (p q c)", p=8, q=8))
        x = torch.cat([repeat(self.cls, "1 1 d -> b 1 d", b=x.shape[0]), x], dim=1)
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=4) for t in self.qkv(x).chunk(3, dim=-1))
        share = (einsum("b h i d, b h j d -> b h i j", q, k) * 8**-0.5).softmax(-1)
        x = x + rearrange(einsum("b h i j, b h j d -> b h i d", share, v), "b h n d -> b n (h d)")
        return self.head(reduce(x, "b n d -> b d", "mean"))


@own(_PICTURE)
def einops_layers() -> nn.Module:
    """An MLP mixer: `Rearrange` and `Reduce` in a Sequential."""
    return nn.Sequential(
        Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=8, q=8), nn.Linear(192, 32), Rearrange("b n d -> b d n"),
        nn.Linear(16, 16), nn.GELU(), Rearrange("b d n -> b n d"), nn.LayerNorm(32), Reduce("b n d -> b d", "max"),
        nn.Linear(32, 6),
    )  # fmt: skip


@own(_PICTURE)
def einops_mix() -> nn.Module:
    """`EinMix`: a Linear layer defined by an einsum pattern."""
    return nn.Sequential(
        EinMix("b c (h p) (w q) -> b (h w) d", weight_shape="c p q d", bias_shape="d", c=3, p=8, q=8, d=32),
        nn.GELU(), EinMix("b n d -> b m d", weight_shape="n m", n=16, m=8), Reduce("b m d -> b d", "mean"),
        nn.Linear(32, 6),
    )  # fmt: skip


def _entry(name: str, module: str, kind: str, options: dict[str, Any], feeds: Feeds) -> Entry:
    def build() -> nn.Module:
        model: nn.Module = getattr(import_module(f"vit_pytorch.{module}"), kind)(**options)
        return model

    return Entry(f"einops/{name}", build, feeds, about=f"vit_pytorch.{module}.{kind}")


ENTRIES = [*own.entries, *(_entry(name, *row) for name, row in MODELS.items())]
