"""The policy for freed memory: kept for the next step, or returned to the kernel if samples or the model are large."""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any

from qatkit_verify.session import keep_memory_of_runs

_LARGE = 2**22  # bytes of one sample: an image of 592x592 pixels
_LARGE_WEIGHTS = 2**29  # bytes: more than the weights of BERT-base or ViT-B
_PAGES = 2**17  # bytes, glibc's own value
_RETURNED = 2**19  # bytes: if memory is returned, larger buffers are returned at once
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_RETURNS = [False]  # whether `keep_freed_memory` has chosen to return memory


def keep_freed_memory(sample: int = 0, weights: int = 0) -> None:
    """Tells glibc whether to keep large freed buffers for the next step or to return them to the kernel.

    In training and calibration on the CPU, every activation is such a buffer. They are kept, since the kernel
    has to clear the pages of a new buffer, which takes time. With large samples or a large model they are
    returned at once: if they were kept, the heap would grow to several times the need of a pass (figures:
    decisions 15, 46 and 60).

    Args:
        sample: the size of one sample in bytes; 0 means a small one.
        weights: the size of a model that is not trained, in bytes; 0 means a small one.
    """
    _RETURNS[0] = returns = sample >= _LARGE or weights >= _LARGE_WEIGHTS
    keep_memory_of_runs(not returns)
    library = _glibc()
    if library is None:
        return
    # The threshold is also set where memory is returned. Otherwise glibc raises it with each freed buffer, up
    # to 32 MiB, and buffers of that size stay in a heap with gaps.
    kept, returned = (2**28, 2**30, 2**31 - 1), (_PAGES, _RETURNED, _PAGES)
    names = (_M_TOP_PAD, _M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD)
    for parameter, value in zip(names, returned if returns else kept, strict=True):
        library.mallopt(parameter, value)


def return_freed_memory(*, cycles: bool = True) -> None:
    """Gives the kernel the memory that a stage has freed, unless `keep_freed_memory` has chosen to keep it.

    glibc itself returns memory only from the end of its heap. One small object there that is still in use
    keeps all freed memory before it.

    Args:
        cycles: whether reference cycles are collected first, which takes a few tenths of a second.
    """
    library = _glibc()
    if _RETURNS[0] and library is not None:
        if cycles:
            gc.collect()
        library.malloc_trim(0)


def _glibc() -> Any:
    """Returns the C library, or None if it is not glibc."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL("libc.so.6")
    except OSError:
        return None
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
