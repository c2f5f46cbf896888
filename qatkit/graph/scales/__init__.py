"""Alignment of activation scales, so that no result lies near a rounding boundary."""
