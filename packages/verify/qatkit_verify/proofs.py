"""Sentences about files proven never to exceed 16 bits in a sum of two products (`qatkit_verify.pairs`)."""

from __future__ import annotations

from qatkit_verify.errors import counted


def never_on_x86(operators: str) -> str:
    """Says that sums of two uint8 x int8 products cannot saturate; `operators` is such as "20 operators"."""
    return f"uint8 x int8: no sum of two products saturates on x86, proven from the integers of {operators}"


def never_on_arm(operators: int) -> str:
    """Says that sums of two int8 x int8 products fit into 16 bits; `operators` is the number of operators."""
    these = counted(operators, "operator")
    return f"int8 x int8: no sum of two products exceeds 16 bits, proven from the integers of {these}"
