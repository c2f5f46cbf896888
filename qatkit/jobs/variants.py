"""Writes a folder of files with different placements, for `qatkit-measure` on another machine (placement=variants)."""

from __future__ import annotations

import hashlib

from qatkit.choose.placement.choices import Choices
from qatkit.choose.placement.families import combined, families
from qatkit.choose.placement.tournament import digest, with_sites
from qatkit.choose.precision.layout import Layouts
from qatkit.config.schema import Config
from qatkit.graph.nodes import site
from qatkit.graph.overrides import Overrides
from qatkit.jobs import pipeline
from qatkit.progress import shown
from qatkit.records.run_files import CHECKPOINT_FILE
from qatkit.run.backend import backend_of
from qatkit.run.build import captured, qat_module
from qatkit.run.export import write_file, write_float_file
from qatkit.run.folder import say
from qatkit.run.sound import overrides_of
from qatkit.train.module import QATModule
from qatkit_verify.errors import ConfigError, counted
from qatkit_verify.placement.measure import VARIANTS_FILE, Variant, Variants, write_variants
from qatkit_verify.placement.record import FLOAT, TABLE
from qatkit_verify.placement.sites import Sites


def variants(config: Config) -> int:
    """Writes the folder and returns 0. Nothing is calibrated or trained, since that would not affect latency.

    Raises:
        ConfigError: the folder contains a run, the files would be encrypted, the data are not pictures, or the
            configuration is wrong, as at the start of any run.
    """
    if config.export.encrypt is not None:
        raise ConfigError(
            "export.encrypt",
            config.export.encrypt,
            ("null with placement=variants, since another machine has to run the files"),
        )
    with pipeline.begun(config) as (run, data, model):
        folder, inputs = run.folder, data.inputs
        if not data.of_pictures:
            allowed = f"fixed or measured with data.source={config.data.source}, since variants are timed on pictures"
            raise ConfigError("placement", config.placement, allowed)
        if (folder / CHECKPOINT_FILE).exists():
            raise ConfigError("output_dir", folder, reason="the folder holds a run; choose another folder")
        source = captured(config, model, inputs)
        module = qat_module(config, source, inputs, QATModule, algorithms=())
        opened = module.opened(source).graph
        forced = [site(node) for node in Overrides(opened, overrides_of(config)).forced_float]
        layouts = Layouts(opened, module.backend, forced)
        found = families(opened, layouts, Choices(opened, module.backend, layouts, forced))
        asked = {FLOAT: Sites(frozenset(layouts.operators)), TABLE: Sites(), **dict(combined(found))}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / VARIANTS_FILE).unlink(missing_ok=True)
        files: dict[str, Variant] = {}
        bar = shown([(name, [name]) for name in asked], "variants", config.trainer.progress, "files")
        for name, _ in bar:
            path = folder / f"{name}.onnx"
            if name == FLOAT:
                write_float_file(source, config, inputs, path)
            else:
                placed = qat_module(with_sites(config, asked[name]), source, inputs, QATModule, algorithms=())
                write_file(placed.convert().graph, config, inputs, path)
            with path.open("rb") as stream:
                files[name] = Variant(
                    path.name, hashlib.file_digest(stream, "sha256").hexdigest(), asked[name]
                )
        options = module.backend.session_options
        write_variants(
            folder,
            Variants(
                config.model.name, backend_of(config).name, inputs.shape, digest(opened), options, files
            ),
        )
        say(
            f"{counted(len(files), 'file')}; next, on the target: qatkit-measure {folder} "
            "(writes placement.json for placement=FILE)"
        )
        print(f"output folder: {folder}", flush=True)
        return 0
