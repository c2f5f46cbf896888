"""Replaces the relative positions of MViT V2 by operators that ONNX has.

    score[q, k] += q·R_t[t_q, t_k] + q·R_h[h_q, h_k] + q·R_w[w_q, w_k]

Here q and k are patches of a clip, at (t, h, w); the class token has no such terms. torchvision's `_add_rel_pos`
writes the sum into a slice of the scores, which in ONNX is a ScatterND over all scores. Here the terms are padded with
zeros and added to the scores. The tables R depend only on parameters, so `convert` computes them once.

Source: Li et al., "MViTv2: Improved Multiscale Vision Transformers", 2022, section 4.1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Size = tuple[int, int, int]


class RelativePositions(nn.Module):
    """Computes `_add_rel_pos` for one clip size; its outputs agree with torchvision's to 1e-5.

    Args:
        queries, keys: the numbers of frames, rows and columns of patches, for the queries and for the keys.
    """

    def __init__(self, queries: Size, keys: Size) -> None:
        super().__init__()
        self.queries, self.keys = queries, keys
        for axis, q, k in zip("thw", queries, keys, strict=True):
            self.register_buffer(f"distance_{axis}", distances(q, k), persistent=False)

    def forward(self, scores: Tensor, q: Tensor, table_t: Tensor, table_h: Tensor, table_w: Tensor) -> Tensor:
        """Returns `scores` plus the terms of the relative positions.

        Args:
            scores: [N, heads, 1 + T·H·W, 1 + the number of key patches]; the 1 is the class token.
            q: [N, heads, 1 + T·H·W, width].
            table_t, table_h, table_w: [distances, width].
        """
        (t, h, w), (keys_t, keys_h, keys_w) = self.queries, self.keys
        patches = q[:, :, 1:].unflatten(2, (t, h, w))
        # There is one MatMul per position along an axis, which must be the third from the end:
        # […, positions, others, width].
        by_t = torch.matmul(patches.transpose(2, 3), self._table(table_t, "t")).transpose(2, 3)
        by_h = torch.matmul(patches, self._table(table_h, "h"))
        by_w = torch.matmul(patches.transpose(3, 4), self._table(table_w, "w")).transpose(3, 4)
        total = by_t.reshape(-1, q.shape[1], t * h * w, keys_t, 1, 1)
        total = total + by_h.reshape(-1, q.shape[1], t * h * w, 1, keys_h, 1)
        total = total + by_w.reshape(-1, q.shape[1], t * h * w, 1, 1, keys_w)
        return scores + F.pad(total.flatten(3), (1, 0, 1, 0))

    def _table(self, table: Tensor, axis: str) -> Tensor:
        """Returns the rows of the table for the distances between queries and keys, [queries, width, keys]."""
        index: Tensor = getattr(self, f"distance_{axis}")
        return resized(table, self.queries["thw".index(axis)], self.keys["thw".index(axis)])[index].mT


def distances(queries: int, keys: int) -> Tensor:
    """Returns the distances between queries and keys along one axis, [queries, keys].

    They are in steps of the finer of the two grids, and the smallest is 0.
    """
    q_step, k_step = max(keys / queries, 1.0), max(queries / keys, 1.0)
    return (torch.arange(queries)[:, None] * q_step - (torch.arange(keys) + (1.0 - keys)) * k_step).long()


def resized(table: Tensor, queries: int, keys: int) -> Tensor:
    """Interpolates a table [distances, width] to the size [2·max(queries, keys) - 1, width]."""
    return F.interpolate(table.T.unsqueeze(0), size=2 * max(queries, keys) - 1, mode="linear").squeeze(0).T
