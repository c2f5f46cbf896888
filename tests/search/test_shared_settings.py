"""Tests of which settings may differ between the workers of a study; every setting is checked."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from qatkit.config.schema import Config, SearchConfig
from qatkit.search.shared_settings import settings_of

# No figure of a trial depends on these settings.
MAY_DIFFER = [
    "name",
    "output_dir",
    "resume",
    "data.root",
    "data.workers",
    "data.eval_batch_size",
    "data.download",
    "data.cache",
    "data.cache_mb",
    "trainer.accelerator",
    "trainer.compile",
    "trainer.channels_last",
    "trainer.progress",
    "trainer.debug",
    "trainer.checkpoint_every",
    "trainer.mlflow",
    "calibration.cache",
    "analysis.isolation",
    "analysis.sensitivity",
    "analysis.top",
    "analysis.layers",
    "analysis.images",
    "analysis.batch_size",
    "analysis.tensors",
    "analysis.pictures",
    "analysis.histograms",
    "export.bundle",
    "export.bundle_as",
    "export.bundle_float",
    "export.golden_images",
    "export.sign",
    "export.demo",
    "export.demo_runtime",
    "export.encrypt_bundle",
    "export.publish",
    "export.version",
    "search.trials",
    "search.space",
    "search.objectives",
    "search.constraints",
    "search.storage",
    "search.prune",
    "search.startup",
    "search.attempts",
    "search.worker",
]
SETTINGS = [
    f"{group.name}.{one.name}" if is_dataclass(getattr(Config(), group.name)) else group.name
    for group in fields(Config)
    for one in (
        fields(getattr(Config(), group.name)) if is_dataclass(getattr(Config(), group.name)) else [group]
    )
]


def _with(key: str, value: Any) -> Config:
    config = Config(search=SearchConfig(trials=3))
    group, _, name = key.rpartition(".")
    if not group:
        return replace(config, **{name: value})
    return replace(config, **{group: replace(getattr(config, group), **{name: value})})


@pytest.mark.parametrize("key", SETTINGS)
def test_a_setting_may_differ_where_no_figure_depends_on_it(key: str, tmp_path: Path) -> None:
    other = tmp_path / "no such file"
    assert (settings_of(_with(key, "one")) == settings_of(_with(key, str(other)))) == (
        key in [*MAY_DIFFER, "export.encrypt"]
    )


def test_every_name_of_the_table_is_a_setting() -> None:
    assert len(SETTINGS) > 100 and not set(MAY_DIFFER) - set(SETTINGS)


def test_a_key_may_lie_elsewhere_but_not_be_left_out() -> None:
    assert settings_of(_with("export.encrypt", "a")) == settings_of(_with("export.encrypt", "b"))
    assert settings_of(_with("export.encrypt", "a")) != settings_of(_with("export.encrypt", None))


@pytest.mark.parametrize("key", ["model.checkpoint", "schedule.distill_checkpoint", "placement"])
def test_a_file_is_what_it_holds(key: str, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("here", "there", "another")]
    for path, content in zip(paths, (b"weights", b"weights", b"others"), strict=True):
        path.write_bytes(content)
    here, there, another = (settings_of(_with(key, str(path))) for path in paths)
    assert here == there != another
    assert str(tmp_path) not in str(here)
