"""Checks that a mistake on the command line is reported in one line, with status 2, before any job starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command_line import RECIPES, Launch, no_job

ALGORITHMS = sorted(path.stem for path in (Path(__file__).parents[2] / "conf" / "algorithm").glob("*.yaml"))
ENTRY = "{target: DOTTED_PATH, SETTING: VALUE, ...}; on the command line, algorithm=NAME selects "
MISTAKES = [
    # unknown recipe, option, key
    (
        ["recipe=resnt18_qat"],
        f"recipe=resnt18_qat: expected one of the {len(RECIPES.split(', '))} names that --help lists "
        "(did you mean resnet18_qat?); your own recipes need --config-dir FOLDER",
    ),
    (
        ["backend=fbgem"],
        "backend=fbgem: expected one of fbgemm, npu_cnn, npu_transformer, qnnpack, simulated, "
        "simulated_products, tensorrt, w4a16, w8a16, weight_only "
        "(did you mean fbgemm?)",
    ),
    (
        ["model=[vit_b_16,nothing]"],
        "model=nothing: expected one of causal_lm, conformer, ds_cnn, efficientnet_b0, ",
    ),
    (["hydra/launcher=slrm"], "hydra/launcher=slrm: expected one of basic"),
    (["schedule.lrr=1"], "schedule.lrr=1: the key does not exist (did you mean schedule.lr?)"),
    (["schedul.lr=1"], "schedul.lr=1: the key does not exist (did you mean schedule.lr?)"),
    (["recipie=quickstart"], "recipie=quickstart: the key does not exist (did you mean recipe?)"),
    (["+foo=1"], "foo=1: the key does not exist"),
    (["++schedule.lrr=1"], "schedule.lrr=1: the key does not exist (did you mean schedule.lr?)"),
    (["hydra.verbos=1"], "hydra.verbos=1: the key does not exist (did you mean hydra.verbose?)"),
    (
        ["model.kwargs.p=1"],
        "model.kwargs.p=1: expected an existing entry (+model.kwargs.p=1 adds a new one)",
    ),
    (
        ["backend.overrides={conv1:{float:true}}"],
        "backend.overrides={conv1:{float:true}}: expected an existing entry "
        "(+backend.overrides={conv1:{float:true}} adds a new one)",
    ),
    (
        ["+backend.overrides.conv1.float=true"],
        "backend.overrides.conv1.float=true: expected the whole entry, '+backend.overrides={conv1:{float:true}}'",
    ),
    (
        ["+backend.overrides.layer1.0.conv1.weight_dtype=int4"],
        "backend.overrides.layer1.0.conv1.weight_dtype=int4: expected the whole entry, "
        "'+backend.overrides={layer1.0.conv1:{weight_dtype:int4}}'",
    ),
    (
        ["+backend.overrides.layer1.0.conv1={weight_dtype:int4}"],
        "backend.overrides.layer1.0.conv1={weight_dtype:int4}: expected the whole entry, "
        "'+backend.overrides={layer1.0.conv1:{weight_dtype:int4}}'",
    ),
    (
        ["+backend.overrides.layer[12].weight_dtype=int4"],
        "+backend.overrides.layer[12].weight_dtype=int4: expected a pattern without any of [ ] { } ! =, "
        "which only work in a YAML file (a recipe)",
    ),
    (
        ["+backend.overrides={conv1:{flot:true}}"],
        "backend.overrides.conv1.flot=...: the key does not exist (did you mean backend.overrides.conv1.float, ",
    ),
    # keys that an option sets
    (
        ["trainer=ddp", "rescue=ladder"],
        "trainer=ddp: the option sets trainer.devices=-1; expected 1 with rescue.climb=true; "
        "rescue=ladder sets rescue.climb=true",
    ),
    # wrong type
    (["schedule.lr=abc"], "schedule.lr=abc: expected a value of type float"),
    (["schedule.epochs=1.5"], "schedule.epochs=1.5: expected a value of type int"),
    (["schedule.max_steps=many"], "schedule.max_steps=many: expected a value of type int | None"),
    (["trainer.compile=2"], "trainer.compile=2: expected true or false"),
    (["backend.weight_symmetric=2"], "backend.weight_symmetric=2: expected true, false or null"),
    (["+backend.overrides={conv1:{float:2}}"], "backend.overrides.conv1.float=2: expected true or false"),
    (
        ["+backend.overrides={conv1:{weight_symmetric:-2}}"],
        "backend.overrides.conv1.weight_symmetric=-2: expected true, false or null",
    ),
    (["quickstart"], "argument=quickstart: expected KEY=VALUE (did you mean recipe=quickstart?)"),
    (["train"], "argument=train: expected KEY=VALUE"),
    (["trainer.devices=null"], "trainer.devices=null: expected a value of type int"),
    (["data.mean=3"], "data.mean=3: expected a value of type list[float] | None ('data.mean=[3]')"),
    (["schedule=5"], "schedule=5: Config group override must be a string or a list"),
    (
        ["+backend.overrides={conv1:{float:maybe}}"],
        "backend.overrides.conv1.float=maybe: expected a value of type bool",
    ),
    # invalid value
    (["export.opset=12"], "export.opset=12: expected an integer from 13 to 23"),
    (["calibration.images=0"], "calibration.images=0: expected an integer of at least 1"),
    (["recipe=vit_qat"], "data.root=...: the key is required; set it to the folder with train/ and val/"),
    (
        ["recipe=vit_cifar10_qat", "data.root=x"],
        "model.checkpoint=...: the key is required; set it to a float state_dict of this model",
    ),
    (["checkpoint=x.ckpt"], "checkpoint=x.ckpt: expected null with train.py"),
    (["resume=nothing.ckpt"], "resume=nothing.ckpt: expected null, auto, or a checkpoint file that exists"),
    (
        ["backend.target=qatkit.quant.backends.FBGEM"],
        "backend.target=qatkit.quant.backends.FBGEM: expected a name in qatkit.quant.backends",
    ),
    (
        ["model.name=nowhere.build"],
        "model.name=nowhere.build: expected a dotted path that can be imported (No module",
    ),
    # algorithms
    (
        ["algorithm=equalise"],
        f"algorithm=equalise: expected one of {', '.join(ALGORITHMS)} (did you mean equalize?)",
    ),
    (["algorithm.bias_correction=analytic"], f"algorithm.bias_correction=analytic: expected {ENTRY}"),
    (
        ["algorithm=all", "algorithm.bias_correction=analytic"],
        f"algorithm.bias_correction=analytic: expected {ENTRY}",
    ),
    (["algorithm=equalize", "algorithm.relu6=relu"], f"algorithm.relu6=relu: expected {ENTRY}"),
    (
        ["algorithm=equalize", "algorithm.equalise.relu6=relu"],
        f"algorithm.equalise=relu6: relu: expected {ENTRY}",
    ),
    (
        ["algorithm=equalize", "algorithm.equalize.target=qatkit.algorithms.Equalise"],
        "algorithm.equalize.target=qatkit.algorithms.Equalise: "
        "expected a name in qatkit.algorithms (did you mean Equalize",
    ),
    (
        ["algorithm=equalize", "algorithm.equalize.target=qatkit.algorithms.dead_channels"],
        "algorithm.equalize.target=qatkit.algorithms.dead_channels: "
        "expected the dotted path of a dataclass derived from ",
    ),
    (
        ["algorithm=equalize", "algorithm.equalize.target=qatkit.algorithms.Algorithm"],
        "algorithm.equalize.target=qatkit.algorithms.Algorithm: expected the dotted path of a dataclass derived from ",
    ),
    (
        ["algorithm=bias_correction", "algorithm.bias_correction.methd=analytic"],
        "algorithm.bias_correction.methd=analytic: "
        "the algorithm has no such setting (did you mean algorithm.bias_correction.method, ",
    ),
    (
        ["algorithm=bias_correction", "algorithm.bias_correction.method=mean"],
        "algorithm.bias_correction.method=mean: expected one of analytic, empirical",
    ),
    (
        ["algorithm=bias_correction", "algorithm.bias_correction.images=0"],
        "algorithm.bias_correction.images=0: expected an integer of at least 1",
    ),
    (
        ["algorithm=bias_correction", "algorithm.bias_correction.images=many"],
        "algorithm.bias_correction.images=many: expected a value of type int",
    ),
    (
        ["algorithm=bias_correction", "algorithm.bias_correction.images=true"],
        "algorithm.bias_correction.images=true: expected a value of type int",
    ),
    (
        ["algorithm=equalize", "algorithm.equalize.relu6=drop"],
        "algorithm.equalize.relu6=drop: expected one of keep, relu",
    ),
    (
        ["algorithm=equalize", "algorithm.equalize.relu6=null"],
        "algorithm.equalize.relu6=null: expected a value of type str",
    ),
    (
        ["algorithm=all", "export.mode=dynamic", "schedule=calibrate_only"],
        "algorithm=equalize,bias_correction: expected none with export.mode=dynamic",
    ),
    (
        ["algorithm=equalize", "export.tensorrt_table=8601", "schedule=calibrate_only"],
        "algorithm=equalize: expected none with export.tensorrt_table, "
        "which has ranges of the unchanged float model",
    ),
    # syntax
    (["schedule.lr"], "schedule.lr=: expected KEY=VALUE"),
    (
        ["checkpoint=a=b"],
        "checkpoint=a=b: expected KEY=VALUE, with special characters in quotes: \"checkpoint='a=b'\"",
    ),
    (["--epochs", "3"], "argument=--epochs: expected KEY=VALUE"),
    (
        ["--confg-dir=mine"],
        "argument=--confg-dir=mine: expected KEY=VALUE, after all flags such as -m (did you mean --config-dir?)",
    ),
    (["~schedule.lrr"], "~schedule.lrr=: Could not delete from config. 'schedule.lrr' does not exist."),
    (["data.root=${nothing}"], "data.root=${nothing}: Interpolation key 'nothing' not found"),
    # sweeps
    (
        ["backend=fbgemm,qnnpack"],
        "backend=fbgemm,qnnpack: expected one value, or the flag -m in front for a sweep over several",
    ),
    (
        ["data.root=/a/b,c"],
        "data.root=/a/b,c: expected one value, or the flag -m in front for a sweep "
        "over several; type a path in quotes: "
        "\"data.root='/a/b,c'\"",
    ),
    (["-m", "recipe=vit_qat,quickstart"], "data.root=...: the key is required; set it to the folder"),
    (
        ["-m", "backend=fbgemm,qnnpck"],
        "backend=qnnpck: expected one of fbgemm, npu_cnn, npu_transformer, qnnpack, simulated, "
        "simulated_products, tensorrt, w4a16, w8a16, weight_only "
        "(did you mean qnnpack?)",
    ),
    (["-m", "schedule.lr=1e-4,abc", "seed=1,2"], "schedule.lr=abc: expected a value of type float"),
    (["-m", "recipe=glob(nothing*)"], "recipe=glob(nothing*): expected at least one option that matches"),
]


@pytest.mark.parametrize(("typed", "line"), MISTAKES, ids=lambda value: " ".join(value)[:60])
def test_a_mistake_is_one_line_and_status_2(
    launch: Launch, capfd: pytest.CaptureFixture[str], typed: list[str], line: str
) -> None:
    assert launch(no_job, *typed) == 2

    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {line}")
    assert printed.err.count("\n") == 1
    assert os.listdir() == []


def test_a_mistake_in_a_recipe_of_ones_own_names_the_file(
    launch: Launch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine" / "recipe").mkdir(parents=True)
    (tmp_path / "mine" / "recipe" / "own.yaml").write_text("# @package _global_\nschedule:\n  lrr: 1\n")

    assert launch(no_job, "--config-dir", "mine", "recipe=own") == 2

    printed = capfd.readouterr().err
    assert printed.startswith("error: schedule.lrr=...: the key does not exist (did you mean schedule.lr?)")
    assert printed.endswith(" (in recipe/own.yaml)\n")


def test_a_gpu_that_is_not_there_is_refused(launch: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert launch(no_job, "trainer=gpu") == 2
    assert (
        capfd.readouterr().err
        == "error: trainer=gpu: the option sets trainer.accelerator=gpu; expected auto or cpu, since no such device "
        "is visible\n"
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["trainer.accelerator=mps"], "trainer.accelerator=mps: expected one of auto, cpu, gpu, cuda"),
        (
            ["trainer.accelerator=cpu", "trainer.devices=-1"],
            "trainer.devices=-1: expected 1 or more, since -1 means all GPUs",
        ),
        (["trainer.devices=-1"], "trainer.devices=-1: expected 1 or more, since -1 means all GPUs"),
        (["verify.threads=100000"], "verify.threads=100000: expected at most "),
        (["data.workers=100000"], "data.workers=100000: expected at most "),
        (["--cfg", "foo"], "argument=foo: argument --cfg/-c: invalid choice: 'foo'"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_this_machine_has_not_is_one_line(
    launch: Launch, capfd: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert launch(no_job, *arguments) == 2
    said = capfd.readouterr().err
    assert said.startswith(f"error: {line}") and said.count("\n") == 1


def test_an_output_dir_that_cannot_be_made_is_refused(
    launch: Launch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")

    assert launch(no_job, "output_dir=file/run") == 2
    assert capfd.readouterr().err.startswith(
        "error: output_dir=file/run: expected a folder that can be created"
    )
