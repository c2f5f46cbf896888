"""The overrides that keep chosen operators in float; callers combine them with those of a configuration."""

from __future__ import annotations

from collections.abc import Iterable

from qatkit.config.schema import OverrideConfig


def float_overrides(floats: Iterable[str]) -> dict[str, OverrideConfig]:
    """Returns the overrides that keep operators in float.

    Args:
        floats: the paths of the operators (`qatkit_verify.placement.sites.FloatSites`), which become the
            selectors, in this order.
    """
    return {one: OverrideConfig(float=True) for one in floats}
