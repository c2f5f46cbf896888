"""Tasks: the loss, the metrics and the decisions of a model; the rest of qatkit uses only the class `Task`.

base.py             `Task`, the base class of your own tasks
drawing.py          `Drawing`: how the report shows samples of a task
class_maps.py       the drawing of segmentation
spectrograms.py     the drawing of audio classification
logits.py           base class of tasks whose models return logits of classes
vectors.py          base class of tasks whose models return vectors
influence.py        base class of tasks whose metric is not a mean over samples
classification.py   one of a number of classes
causal_lm.py        the next token of a text
text_classification.py  one of a number of classes for a text or a pair of texts
text_pairs.py       pairs of texts, by the cosine of their embeddings
audio_classification.py  one of a number of classes for a recording
segmentation.py     a class for each pixel
embedding.py        vectors of samples with class labels, by their nearest neighbours
regression.py       numbers for a sample
detection.py        boxes of objects; average_precision.py scores them, drawn_boxes.py draws them
outputs.py          outputs of any meaning, compared with those of the float model
decisions/          rules that decide whether two such outputs agree

`task` names the task: one of `TASKS`, or the dotted path of a class derived from `Task`.
"""

from __future__ import annotations

from functools import cache
from inspect import isabstract

from qatkit.former_names import present_task
from qatkit.tasks.base import Task
from qatkit.tasks.classification import Classification
from qatkit.tasks.decisions import AUTO
from qatkit.tasks.outputs import Outputs
from qatkit_verify.dotted import dotted_path, resolve
from qatkit_verify.errors import ConfigError
from qatkit_verify.foreign import calling, check_call

TASKS = {
    "classification": "qatkit.tasks.classification.Classification",
    "causal_lm": "qatkit.tasks.causal_lm.CausalLM",
    "text_classification": "qatkit.tasks.text_classification.TextClassification",
    "text_pairs": "qatkit.tasks.text_pairs.TextPairs",
    "audio_classification": "qatkit.tasks.audio_classification.AudioClassification",
    "segmentation": "qatkit.tasks.segmentation.Segmentation",
    "embedding": "qatkit.tasks.embedding.Embedding",
    "regression": "qatkit.tasks.regression.Regression",
    "detection": "qatkit.tasks.detection.Detection",
    "outputs": "qatkit.tasks.outputs.Outputs",
}
CLASSIFICATION = Classification()

__all__ = ["CLASSIFICATION", "TASKS", "Classification", "Task", "dotted", "task_of"]


def dotted(name: str) -> str:
    """Returns the dotted path of the class that a value of `task` names.

    Raises:
        ConfigError: `name` is neither a built-in task nor a dotted path.
    """
    return dotted_path(present_task(name), TASKS, "task", "qatkit.tasks.base.Task")


def task_of(name: str, decision: str = AUTO) -> Task:
    """Returns the task that a value of `task` names.

    Args:
        name: name of the task.
        decision: a value of `verify.decision`.

    Raises:
        ConfigError: `name` is not accepted by `dotted`, or does not lead to a subclass of `Task` that implements
            all abstract methods and can be built without arguments; or `decision` is invalid, or is set for a task
            other than outputs.
    """
    task = _task_of(name)
    if decision == AUTO:
        return task
    if not isinstance(task, Outputs):
        raise ConfigError("verify.decision", decision, f"{AUTO} with task={name}, which has its own decision")
    return Outputs(decision)


@cache
def _task_of(name: str) -> Task:
    found = resolve(dotted(name), "task")
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ConfigError("task", name, "the dotted path of a class derived from qatkit.tasks.base.Task")
    if isabstract(found) or not hasattr(found, "names"):
        missing = [*sorted(found.__abstractmethods__), *(() if hasattr(found, "names") else ("names",))]
        raise ConfigError("task", name, f"a task that implements {', '.join(missing)}")
    check_call("task", name, found)
    with calling("task", name, found):
        made: Task = found()
    return made
