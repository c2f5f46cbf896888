"""One thread for every test: the same sums in the same order, and no fight over cores between workers."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
