"""Invalid values, keys and words, and command lines that Hydra rejects."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

import typed_cases
from cases import TINY, Case, bad

from qatkit.config.fields import Choices, limit_of
from qatkit.config.schema import Config


def _settings() -> Iterator[tuple[str, Any, str, Any]]:
    """Yields (dotted key, dataclass, field name, type) of every setting."""
    for one in dataclasses.fields(Config):
        hint = typing.get_type_hints(Config)[one.name]
        if not dataclasses.is_dataclass(hint):
            yield one.name, Config, one.name, hint
            continue
        for inner in dataclasses.fields(hint):
            yield f"{one.name}.{inner.name}", hint, inner.name, typing.get_type_hints(hint)[inner.name]


def _of_type(*kinds: type) -> list[tuple[str, bool]]:
    """Returns the keys whose type is one of `kinds`, and whether each may be null."""
    found = []
    for key, _, _, hint in _settings():
        inner = set(typing.get_args(hint)) or {hint}
        if inner - {type(None)} <= set(kinds):
            found.append((key, type(None) in inner))
    return found


def _numbers() -> Iterator[Case]:
    """Yields invalid values for every number and boolean."""
    for key, optional in _of_type(int, float):
        for value in ("abc", "[1,2]", "{a:1}", "''", "inf", "-inf", "nan", "-1e30", "true1", "1_0x"):
            yield bad(f"{key}={value}", f"{key}=")
        if not optional:
            yield bad(f"{key}=null", f"{key}=null: ")
    for key, _ in _of_type(int):
        for value in ("1.5", "1e3", "-2", "99999999999999999999"):
            yield bad(f"{key}={value}", f"{key}=")
    for key, optional in _of_type(bool):
        for value in ("maybe", "2", "[true]", "''", "yess", *(() if optional else ("null",))):
            yield bad(f"{key}={value}", f"{key}=")


def _words() -> Iterator[Case]:
    """Yields misspelled words, a list, a mapping and "" for each setting with a fixed set of words."""
    for key, owner, name, hint in _settings():
        try:
            limit = limit_of(owner, name)
        except KeyError:
            continue
        if isinstance(limit, Choices):
            for word in limit.values[:3]:
                wrong = word[:-1] + ("x" if word[-1] != "x" else "z")
                if "onnx" in key or key == "mode":
                    continue
                null = ", or null" if type(None) in typing.get_args(hint) else ""
                close = " (did you mean " if len(word) > 2 else ""  # nothing is close to "nx"
                yield bad(f"{key}={wrong}", f"{key}={wrong}: expected {limit.expected()}{null}{close}")
            for value in ("[a]", "{a:1}"):
                yield bad(f"{key}={value}", f"{key}=")
            yield bad(f"{key}=''", f"{key}=: ")


GROUPS = ("model", "data", "backend", "quantizer", "calibration", "algorithm", "precision", "schedule", "trainer",
          "export", "verify", "analysis", "rescue", "search", "launcher", "recipe")  # fmt: skip
_TRAINING = [
    Case((*TINY, "schedule.epochs=1", "schedule.float_epochs=0", *typed), says)
    for *typed, says in (
        ("verify.every=0", "verify.every=0: expected an integer of at least 1"),
        ("verify.every=1", "verify.held_out=0", "verify.held_out=0: expected an integer of at least 1"),
        ("verify.every=1", "verify.held_out=5000", "verify.held_out=5000: "
         "expected a number below 1437, the number of training images"),
        ("verify.every=1", "verify.held_out=1430", "data.batch_size=32: expected at most 7, the number of training"),
        ("schedule.batch_norm=train", "schedule.batch_norm_images=1", "schedule.batch_norm_images=1: expected 0, or 2"),
        ("schedule.distill_features=[conv]", "schedule.distill_features=conv: "
         "expected a module of the model (did you mean conv"),
        ("schedule.distill_features=[fc:conv1]", "schedule.distill_features=fc:conv1: "
         "expected modules whose outputs have the same shape; fc returns"),
         ("schedule.distill_features=[fc]", "algorithm=smooth_quant", "schedule.distill_features=[fc]: "
          "expected [] with SmoothQuant"),
         ("schedule.distill_features=[fc]", "algorithm=auto", "schedule.distill_features=[fc]: "
         "expected [] with algorithm_choice"),
        ("schedule.distill=0.5", "schedule.distill_teacher=resnet50",
         "schedule.distill_teacher=resnet50: expected a teacher with the 10 classes of the data; "
            "the given one has 1000"),
        ("schedule.distill=0.5", "schedule.distill_teacher=resnet5", "schedule.distill_teacher=resnet5: "
         "expected a torchv"),
        ("schedule.distill=0.5", "schedule.distill_teacher=os.path", "schedule.distill_teacher=os.path: "),
        ("schedule.distill=0.5", "schedule.distill_checkpoint=none.pt", "schedule.distill_checkpoint=none.pt: "
         "expected an ex"),
    )
]  # fmt: skip
_KEYS = [
    bad("schedule.lrr=1", "schedule.lrr=1: the key does not exist (did you mean schedule.lr?)"),
    bad("Schedule.lr=1", "Schedule.lr=1: the key does not exist (did you mean "),
    bad("lr=1", "lr=1: the key does not exist (did you mean "),
    bad("schedule.lr.value=1", "schedule.lr="),
    bad("schedule.lr.a.b.c=1", "schedule.lr="),
    bad("schedule..lr=1", "schedule..lr=1: "),
    bad(".lr=1", ".lr=1: "),
    bad("schedule.=1", "schedule.=1: "),
    bad("=1", "=1: "),
    bad("=", "=: "),
    bad("", "=: "),
    bad(" ", "=: "),
    bad("schedule", "argument=schedule: expected KEY=VALUE"),
    bad("schedule.lr", "schedule.lr=: "),
    bad("schedule.lr==1", "schedule.lr==1: "),
    bad("schedule.lr: 1", "schedule.lr: 1=: "),
    bad("schedule[lr]=1", "schedule[lr]=1: "),
    bad("schedule/lr=1", "schedule/lr=1: "),
    bad("model/resnet18=1", "model/resnet18=1: "),
    bad("recipe@here=quickstart", "recipe@here=quickstart: "),
    bad("model@foo=resnet18", "model@foo=resnet18: "),
    bad("model@:foo=resnet18", "model@:foo=resnet18: "),
    bad("+schedule.lr=1", "+schedule.lr=1: "),
    bad("+schedule=qat_sgd", "+schedule=qat_sgd: "),
    bad("+new.group.key=1", "new.group.key=1: the key does not exist"),
    bad("++new=1", "new=1: the key does not exist"),
    bad("+new={a:1}", "new={{a:1}}: the key does not exist"),
    bad("+new@foo=resnet18", "+new@foo=resnet18: "),
    bad("~schedule.lrr", "~schedule.lrr=: "),
    bad("~schedule.lr", "schedule.lr=: "),
    bad("~schedule.lr=5", "~schedule.lr=5: "),
    bad("~hydra", "~hydra=: "),
    bad("schema=x", "schema=x: "),
    bad("_self_=1", "_self_=1: "),
    bad("defaults=[]", "defaults="),
    bad("schedule=null", "schedule="),
    bad("model=null", "model="),
    bad("model=''", "model="),
    bad("model=3", "model=3: "),
    bad("model=../config", "model=../config: "),
    bad("model=/etc/passwd", "model=/etc/passwd: "),
    bad("recipe=../../etc/passwd", "recipe=../../etc/passwd: "),
    bad("recipe=Quickstart", "recipe=Quickstart: expected one of "),
    bad("recipe=results/quickstart", "recipe=results/quickstart: expected one of "),
    bad("recipe=null", "recipe="),
    bad("model.kwargs=3", "model.kwargs=3: "),
    bad("model.kwargs=[1]", "model.kwargs="),
    bad("+model.kwargs={1:2}", "model.kwargs.1="),
    bad("+model.kwargs.nothing=1", "model.kwargs="),
    bad("algorithm=3", "algorithm=3: "),
    bad("algorithm={a:1}", "algorithm.a=1: "),
    bad("+algorithm.mine=3", "algorithm.mine=3: "),
    bad("+algorithm.mine={target:os.system}", "algorithm.mine.target=os.system: "),
    bad("+algorithm.mine={target:nowhere.X}", "algorithm.mine.target=nowhere.X: "),
    bad("+algorithm.mine={target:3}", "algorithm.mine="),
    bad("backend.overrides=3", "backend.overrides=3: "),
    bad("+backend.overrides={a:b}", "backend.overrides.a="),
    bad("+backend.overrides={nothing_here:{float:true}}", "backend.overrides="),
    bad("+backend.overrides={op/nothing:{float:true}}", "backend.overrides="),
    bad(
        "+backend.overrides={'op/conv':{\"float\":true}}",
        "+backend.overrides={{'op/conv':{{\"float\":true}}}}: expected keys of a mapping without quotes: "
        "'+backend.overrides={{op/conv:{{float:true}}}}'",
    ),
    bad("+backend.overrides={*:{activation_dtype:uint4}}", "verify.audit=true: expected false with "),
    bad("+backend.overrides={*:{activation_dtype:uint5}}", "backend.overrides.*.activation_dtype=uint5: "),
    bad("export.pack_int4=true", "export.opset=13: expected 21 to 23 with export.pack_int4=true"),
    bad("quantizer=lsqq", "quantizer=lsqq: "),
    bad("quantizer.weight=qatkit.quant.learned.lsq.LSQFakeQuantize", "quantizer.weight="),
    bad("quantizer.activation=qatkit.quant.learned.lsq.LSQWeightFakeQuantize", "quantizer.activation="),
    bad(
        "schedule.relative_lr=true",
        "schedule.relative_lr=true: expected false with schedule.optimizer=sgd, "
        "since only adamw has relative learning rates",
    ),
    bad("schedule.scale_lr=0", "schedule.scale_lr=0.0: expected a number above 0"),
    bad("schedule.scale_lr=1", "schedule.scale_lr=1.0: expected a number above 0"),
    bad("verify.checks=[]", "verify.checks=[]: "),
    bad("verify.checks=3", "verify.checks=3: "),
    bad("verify.checks=[nothing]", "verify.checks=nothing: "),
    bad("verify.checks=[os.path]", "verify.checks=os.path: "),
    bad("verify.checks=[os.path.join]", "verify.checks=os.path.join: "),
    bad("verify.runtimes=openvino", "verify.runtimes=openvino: "),
    bad(
        "verify.runtimes=[openvno]",
        "verify.runtimes=openvno: expected one of onnxruntime, openvino, or the dotted path",
    ),
    bad(
        "verify.runtimes=[os.path]",
        "verify.runtimes=os.path: expected the dotted path of an object of type qatkit_verify.runtimes",
    ),
    bad("verify.runtimes=[nowhere.X]", "verify.runtimes=nowhere.X: "),
    bad("verify.every=1", "verify.every=1: expected null with schedule.epochs=0"),
    bad("schedule.ema=1", "schedule.ema=1.0: expected a number from 0 to 0.999999"),
    bad(
        "schedule.batch_norm_images=64",
        "schedule.batch_norm_images=64: expected 0 with schedule.batch_norm=fold",
    ),
    bad(
        "schedule.distill_teacher=resnet18",
        "schedule.distill_teacher=resnet18: expected null without schedule.distill",
    ),
    bad(
        "schedule.distill_checkpoint=a.pt",
        "schedule.distill_checkpoint=a.pt: expected null without schedule.distill",
    ),
    bad("schedule.distill_features=layer1", "schedule.distill_features=layer1: "),
    *_TRAINING,
    bad(
        "verify.runtimes=[onnxruntime,onnxruntime]",
        "verify.runtimes=onnxruntime: the list has two runtimes named",
    ),
    bad("analysis.layers=3", "analysis.layers=3: "),
    Case((*TINY, "data.cache=ram", "data.cache_mb=2000000000"), "data.cache_mb=2000000000: "),
    bad("data.cache=disk", "data.cache=disk: expected one of none, ram"),
    bad("data.cache_mb=0", "data.cache_mb=0: expected an integer of at least 1"),
    bad("data.mean=[]", "data.mean=[]: "),
    bad("data.mean=[a]", "data.mean[0]=a: expected a value of type float"),
    bad("data.mean=[0.5,nan,1]", "data.mean="),
    bad("data.mean=[0.5,0.5]", "data.mean="),
    bad("data.mean=[1e30,1e30,1e30]", "data."),
    bad("data.std=[0,0,0]", "data.std="),
    bad("data.std=[1e-30]", "data.std="),
]
_DOTTED = [
    bad(f"{key}={value}", f"{key}={value}: ")
    for key in ("backend.target", "calibration.observer", "quantizer.activation", "quantizer.weight", "data.source",
                "model.name")
    for value in ("os", "nothing", "a.b.c", "qatkit", "..a", "1.2", "a..b", "a b.c")
]  # fmt: skip
_DOTTED += [
    bad(f"{key}=''", f"{key}=: ")
    for key in (
        "backend.target",
        "calibration.observer",
        "quantizer.weight",
        "data.source",
        "model.name",
        "name",
    )
]
_DEMO = [
    bad("export.demo=true", "export.demo=true: "),
    Case(
        (*TINY, "export.bundle=true", "export.demo=true", "export.demo_runtime=nowhere"),
        "export.demo_runtime=nowhere: ",
    ),
]
_SPACE = "search.space={schedule.lr:{low:1e-4,high:1e-2,log:true}}"
_SEARCH = [
    bad("launcher=slurm", "launcher=slurm: Slurm only runs sweeps; add -m"),
    bad(_SPACE, "search.trials=0: expected 1 or more with search.space"),
    bad("search=optuna", "search.space={{}}: expected at least one key"),
    *(
        Case((*TINY, "search=optuna", *typed), says)
        for typed, says in (
            (["search.space={schedule.lr:3}"], "search.space.schedule.lr=3: expected [VALUE, ...] or "),
            (
                ["search.space={schedule.lr:{low:1}}"],
                "search.space.schedule.lr.high=null: expected a finite number",
            ),
            (
                ["search.space={schedule.lr:{low:2,high:1}}"],
                "search.space.schedule.lr.high=1: expected a number above low=2",
            ),
            (
                ["search.space={schedule.lr:{low:1,high:2,base:3}}"],
                "search.space.schedule.lr.base=3: the key does not exist (known: high, log, low, step)",
            ),
            (
                ["search.space={schedule.lrr:[1,2]}"],
                "search.space.schedule.lrr=1: the value is not accepted (",
            ),
            (
                ["search.space={schedule.lr:{low:-1,high:1}}"],
                "search.space.schedule.lr=-1.0: the value is not accepted (",
            ),
            (
                ["search.space={calibration:[minmax,msee]}"],
                "search.space.calibration=msee: the value is not accepted (",
            ),
            (["search.space={output_dir:[a,b]}"], "search.space.output_dir="),
            (
                [_SPACE, "search.objectives=[acuracy]"],
                "search.objectives=acuracy: expected one of accuracy, ",
            ),
            ([_SPACE, "search.objectives=[]"], "search.objectives=[]: expected one or more of "),
            ([_SPACE, 'search.constraints=["size<3"]'], "search.constraints=size<3: expected FIGURE<=NUMBER"),
            ([_SPACE, "search.storage=study.db"], "search.storage=study.db: expected null "),
            (
                [_SPACE, "search.storage=postgresql://127.0.0.1:1/x"],
                "search.storage=postgresql://127.0.0.1:1/x: ",  # no server, or no driver
            ),
            *(
                (
                    [_SPACE, f"search.storage='postgresql://{given}'"],
                    f"search.storage=postgresql://{shown}: expected a URL without a password (use PGPASSWORD ",
                )
                for given, shown in (
                    ("me:secret@127.0.0.1:1/x", "***@127.0.0.1:1/x"),
                    ("me:se/c?ret@127.0.0.1:1/x", "***@127.0.0.1:1/x"),
                    ("me@127.0.0.1:1/x?password=secret", "me@127.0.0.1:1/x?password=***"),
                    ("/x?host=a&sslpassword=secret&b=1", "/x?host=a&sslpassword=***&b=1"),
                )
            ),
            (
                [_SPACE, "rescue=ladder"],
                "rescue=ladder: the option sets rescue.climb=true; expected false with search.",
            ),
            ([_SPACE, "trainer.devices=2"], "trainer.devices=2: expected 1 with search.trials=30"),
            (
                [_SPACE, "verify.checks=[qatkit.verify.checks.latency.LatencyCheck]"],
                "verify.checks=[qatkit.verify.checks.latency.LatencyCheck]: "
                "expected a list with the check 'validation', which",
            ),
            (
                ["search.space={verify.held_out:[10,20]}"],
                "search.space.verify.held_out=[10, 20]: this key cannot be searched",
            ),
            ([_SPACE, "schedule.lr=1e-3"], "schedule.lr=1e-3: search.space varies this key"),
        )
    ),
]
NUMBERS, WORDS = list(_numbers()), list(_words())
_PLACES = [
    bad("export.publish=there", "export.publish=there: expected null without export.bundle=true"),
    bad("export.encrypt_bundle=true", "export.encrypt_bundle=true: expected false without export.encrypt"),
    Case((*TINY, "export.bundle=true", "export.publish=there", "export.encrypt_bundle=true"),
         "export.encrypt_bundle=true: expected false without export.encrypt"),
    Case((*TINY, "export.bundle=true", "export.publish=nothing://bucket/x"), "export.publish=nothing://bucket/x: "),
    Case((*TINY, "export.bundle=true", "export.publish=s3://me:secret@bucket/x"),
         "export.publish=s3://***@bucket/x: expected a URL without credentials"),
    *(bad(f"export.publish=there{more}", "export.publish=there") for more in ("/\u0007", "/" + "n" * 250)),
    *(Case((*TINY, "export.bundle=true", "export.publish=there", f"export.version={name}"), f"export.version={name}: ")
      for name in ("a/b", "..", ".hidden", "-x")),
    Case((*TINY, "export.bundle=true", "export.publish=there", "name='a b'"),
         "name=a b: expected a folder name with export.publish: up to 128 letters"),
    bad("trainer.mlflow=nothing"),
    bad("trainer.mlflow=ftp://host"),
    bad("trainer.mlflow=file:///nowhere", "trainer.mlflow=file:///nowhere: "),
    bad("trainer.mlflow=http://", "trainer.mlflow=http://: expected a tracking URI"),
    bad("trainer.mlflow=http://me:secret@host", "trainer.mlflow=http://***@host: expected a URI without credentials"),
    Case((*TINY, "export.encrypt=key", "placement=variants"), "export.encrypt=key: expected null", "export.py"),
]  # fmt: skip

OTHERS = [*_KEYS, *_PLACES, *_DOTTED, *_DEMO, *typed_cases.CASES, *_SEARCH]
CASES = [*OTHERS, *WORDS, *NUMBERS[::5]]
