"""The bounds that a run must keep: each one broken becomes one line that names its key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qatkit.verify.results import Results

if TYPE_CHECKING:
    from qatkit.config.schema import VerifyConfig


def thresholds(config: VerifyConfig, results: Results) -> list[str]:
    """Each shortfall as one line; empty passes. A bound whose measurement is absent falls short too."""
    checks = (_drop, _agreement, _size, _speed, _audit)
    return [line for check in checks if (line := check(config, results))]


def _drop(config: VerifyConfig, results: Results) -> str | None:
    if config.max_drop is None:
        return None
    reference, int8 = results.accuracy.get("float"), results.accuracy.get("int8")
    if reference is None or int8 is None:
        return f"verify.max_drop={config.max_drop}: accuracy was not measured"
    drop = reference.top1 - int8.top1
    if drop <= config.max_drop:
        return None
    return (
        f"verify.max_drop={config.max_drop}: {results.label} top-1 {int8.top1:.2f} is {drop:.2f} points"
        f" below float {reference.top1:.2f}"
    )


def _agreement(config: VerifyConfig, results: Results) -> str | None:
    if config.min_agreement is None:
        return None
    if results.parity is None:
        return f"verify.min_agreement={config.min_agreement}: parity was not measured"
    if results.parity.agreement >= config.min_agreement:
        return None
    return (
        f"verify.min_agreement={config.min_agreement}: ONNX Runtime agrees with {results.parity.reference} on"
        f" {100 * results.parity.agreement:.2f} % of {results.parity.images} images"
    )


def _size(config: VerifyConfig, results: Results) -> str | None:
    if config.max_size_ratio is None:
        return None
    ratio = results.size_ratio
    if ratio is None:
        return f"verify.max_size_ratio={config.max_size_ratio}: sizes were not measured"
    if ratio <= config.max_size_ratio:
        return None
    return f"verify.max_size_ratio={config.max_size_ratio}: the {results.label} file is {ratio:.3f} of the float file"


def _speed(config: VerifyConfig, results: Results) -> str | None:
    if config.min_speedup is None:
        return None
    int8 = results.latency.get("int8")
    if int8 is None:
        return f"verify.min_speedup={config.min_speedup}: latency was not measured"
    if int8.ratio >= config.min_speedup:
        return None
    return (
        f"verify.min_speedup={config.min_speedup}: {results.label} runs {int8.ratio:.2f} times as fast as float"
        f" ({int8.median_ms:.2f} ms, {int8.threads} threads)"
    )


def _audit(config: VerifyConfig, results: Results) -> str | None:
    if not config.audit:
        return None
    if results.audit is None:
        return "verify.audit=true: the file was not audited"
    if results.audit.ok:
        return None
    first, count = results.audit.problems[0], len(results.audit.problems)
    more = f" (and {count - 1} more)" if count > 1 else ""
    return f"verify.audit=true: {first}{more}"
