"""Programs that run an INT8 file, with this model's own preprocessing filled in: Python, C++ and JavaScript.

The Python program is self-contained. Its pixels, from 0 to 255, differ from those of training by at most 1
where Pillow scales down, and not at all where it scales up or crops. JavaScript has no built-in antialiased
resizing, so its program uses the preprocess.mjs of a bundle. C++ has no standard way to read pictures, so its
program starts from resized pixels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from qatkit.records.results import Results
from qatkit.records.run_files import MODEL_FILE
from qatkit.report.run_fitting import cpp_fitted, python_fitted, python_sides
from qatkit_verify.bundle.manifest import (
    ARRAYS_FILE,
    GOLDEN_FILE,
    INT8_FILE,
    LABELS_FILE,
    PREPROCESS_FILE,
    REPORT_FILE,
    TOKENIZER_FILE,
)
from qatkit_verify.bundle.ports import Port
from qatkit_verify.classification import NAMES, names_of
from qatkit_verify.fitting import LEVELS, sides

_PROGRAMS = Path(__file__).with_name("programs")
_PYTHON_ENTRY = "options.add_session_config_entry({}, {})\n"
_LANGUAGES = {"Python": "run.py.txt", "C++": "run.cpp.txt", "JavaScript": "run.mjs.txt"}


@dataclass(frozen=True)
class Loading:
    """The facts about a file that are filled into the programs that run it.

    Attributes:
        file: the name of the file.
        prepare: the preprocessing with the keys of preprocess.json (image_size, resize, interpolation, mean,
            std, upright and so on).
        integer: whether the file's input is uint8 pixels and its output 8-bit scores.
        batch: the batch size that the file was exported for; None if it is dynamic.
        session_options: the session config entries of ONNX Runtime.
        labels: the file with the names of the classes (a run's model.json, or a bundle's labels.txt); None if
            there is none.
        bundled: whether the file is in a bundle.
        classes: whether the first output is a score for each class; otherwise the programs print all outputs.
    """

    file: str
    prepare: Mapping[str, Any]
    integer: bool = False
    batch: int | None = None
    session_options: Mapping[str, str] = field(default_factory=dict)
    labels: str | None = MODEL_FILE
    bundled: bool = False
    classes: bool = True

    @classmethod
    def of_results(cls, results: Results) -> Loading | None:
        """Returns the facts about a run's own file; None if the preprocessing is not known."""
        if results.preprocessing is None:
            return None
        return cls(
            file=results.int8_file,
            prepare=results.preprocessing,
            integer=results.config.get("export", {}).get("io") == "uint8",
            batch=results.fixed_batch,
            session_options=results.session_options,
            classes=results.task.name == NAMES.name,
        )

    @classmethod
    def of_bundle(cls, folder: Path, session_options: Mapping[str, str]) -> Loading:
        """Returns the facts about the file in a bundle, read from the other files of the bundle."""
        prepare = json.loads((folder / PREPROCESS_FILE).read_text(encoding="utf-8"))
        first, report = prepare["input"]["shape"][0], folder / REPORT_FILE
        return cls(
            file=INT8_FILE,
            prepare=prepare,
            integer=prepare["input"]["dtype"] == "uint8",
            batch=first if isinstance(first, int) else None,
            session_options=session_options,
            labels=LABELS_FILE if (folder / LABELS_FILE).is_file() else None,
            bundled=True,
            classes=names_of(json.loads(report.read_text(encoding="utf-8"))).name == NAMES.name,
        )


def programs(loading: Loading) -> dict[str, str]:
    """Returns programs by language that print the five most likely classes of image.jpg, or the output shapes.

    The C++ program is a function. For a run's own folder there is only the Python program, since the others
    read files that only a bundle has.
    """
    return {
        language: Template((_PROGRAMS / name).read_text(encoding="utf-8")).substitute(_filled(loading))
        for language, name in _LANGUAGES.items()
        if language == "Python" or loading.bundled
    }


def as_markdown(loading: Loading) -> str:
    """Returns `programs` as Markdown for a model card."""
    fences = {"Python": "python", "C++": "cpp", "JavaScript": "js"}
    return "\n\n".join(f"```{fences[name]}\n{code}```" for name, code in programs(loading).items())


def arrays_program(bundle: Path, session_options: Mapping[str, str]) -> str:
    """Returns a Python program for a bundle of arrays, as Markdown for a model card.

    For a model of texts, code that tokenizes a text follows.
    """
    told = json.loads((bundle / ARRAYS_FILE).read_text(encoding="utf-8"))
    ports = [Port.from_dict(one) for one in told["inputs"]]
    loading = Loading(INT8_FILE, {}, session_options=session_options)
    feeds = "".join(
        f"    {json.dumps(one.name)}: stored[{json.dumps(f'input:0/{one.name}')}],  # {one}\n"
        for one in ports
    )
    template = Template((_PROGRAMS / "run_arrays.py.txt").read_text(encoding="utf-8"))
    code = template.substitute(
        file=INT8_FILE, golden=GOLDEN_FILE, feeds=feeds, options=_entries(loading, _PYTHON_ENTRY)
    )
    text = f"```python\n{code}```\n\nIn C++ and JavaScript, the inputs have the same names and arrays."
    return f"{text}\n\n{_of_text(ports)}" if (bundle / TOKENIZER_FILE).is_file() else text


def sound_program(bundle: Path, session_options: Mapping[str, str]) -> str:
    """Returns programs in Python and JavaScript for a bundle of recordings, as Markdown for a model card."""
    prepare = json.loads((bundle / PREPROCESS_FILE).read_text(encoding="utf-8"))
    loading = Loading(INT8_FILE, {}, session_options=session_options)
    filled = {
        "file": INT8_FILE,
        "rate": prepare["rate"],
        "input": prepare["input"]["name"],
        "labels": LABELS_FILE,
        "options": _entries(loading, _PYTHON_ENTRY),
        "js_options": _javascript_options(loading),
    }
    parts = (("python", "run_sound.py.txt"), ("js", "run_sound.mjs.txt"))
    return "\n\n".join(
        f"```{language}\n{Template((_PROGRAMS / name).read_text(encoding='utf-8')).substitute(filled)}```"
        for language, name in parts
    )


def _of_text(ports: Sequence[Port]) -> str:
    """Returns Markdown that shows how to tokenize a text into the inputs of a bundle."""
    known = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    feeds = [
        f"    {json.dumps(one.name)}: np.array([text.{known[one.name]}], np.{one.type}),\n"
        for one in ports
        if one.name in known
    ]
    code = (
        "from tokenizers import Tokenizer\n\n"
        f'text = Tokenizer.from_file("{TOKENIZER_FILE}").encode("A text.")\n'
        f"feeds = {{\n{''.join(feeds)}}}\n"
    )
    said = "The bundle's tokenizer turns a text into these arrays (a pair of texts is two arguments):"
    return f"{said}\n\n```python\n{code}```"


def _filled(loading: Loading) -> dict[str, str]:
    """Returns the values of the placeholders in the templates."""
    prepare, rows = loading.prepare, loading.batch or 1
    (height, width), channels = sides(prepare["image_size"]), len(prepare["mean"])
    common = {"file": loading.file, "height": height, "width": width, "channels": channels, "rows": rows}
    filled = {name: str(value) for name, value in common.items()} | {
        "shape": " x ".join(map(str, (channels, height, width))),
        "js_batch": _javascript_batch(rows),
        "first": ".slice(0, answer[session.outputNames[0]].dims[1])" if rows > 1 else "",
        "mode": "L" if channels == 1 else "RGB",
        "interpolation": prepare["interpolation"],
        **_turned(bool(prepare.get("upright"))),
        "js_options": _javascript_options(loading),
        "options": _entries(loading, _PYTHON_ENTRY),
        "sides": python_sides(prepare),
        "resized": _python_resized(prepare["interpolation"]),
        "fitted": python_fitted(prepare),
        "batch": _python_batch(loading),
        "repeated": f".repeat({rows}, axis=0)  # the file has a fixed batch of {rows}" if rows > 1 else "",
        **_names(loading),
        **_cpp(loading),
    }
    return filled | _answers(loading, filled)


def _turned(upright: bool) -> dict[str, str]:
    """Returns the placeholders for opening a picture; it is rotated by its EXIF data if training does so."""
    return {
        "pil": "Image, ImageOps" if upright else "Image",
        "opened": 'ImageOps.exif_transpose(Image.open("image.jpg"))'
        if upright
        else 'Image.open("image.jpg")',
        "js_turned": ".rotate()" if upright else "",
        "cpp_turned": "rotated by its EXIF data, " if upright else "",
    }


def _entries(loading: Loading, line: str) -> str:
    """Returns a line for each of ONNX Runtime's config entries."""
    options = sorted(loading.session_options.items())
    return "".join(line.format(json.dumps(key), json.dumps(value)) for key, value in options)


def _cpp(loading: Loading) -> dict[str, str]:
    """Returns the values of the placeholders that only the C++ template has."""
    prepare = loading.prepare
    axes = (
        ["height", "width", "channels"] if _is(prepare, "layout", "NHWC") else ["channels", "height", "width"]
    )
    colour = "channels - 1 - c" if _is(prepare, "channel_order", "BGR") else "c"
    pixel = f"pixels[(y * width + x) * channels + {colour}]"
    mean, std = (", ".join(f"{float(value)}f" for value in prepare[key]) for key in ("mean", "std"))
    common = {
        "cpp_axes": ", ".join(axes),
        "cpp_fitted": cpp_fitted(prepare),
        "cpp_loops": "\n".join(_cpp_loop(axis, 4 + 2 * i) for i, axis in enumerate(axes)),
        "cpp_options": _entries(loading, "//       options.AddConfigEntry({}, {});\n"),
    }
    if loading.integer:
        score = f"{prepare.get('output', {}).get('dtype', 'uint8')}_t"
        return common | {"cpp_type": "uint8_t", "cpp_score": score, "cpp_value": pixel, "cpp_numbers": ""}
    of_range = pixel if _is(prepare, "pixels", LEVELS) else f"{pixel} / 255.0f"
    return common | {
        "cpp_type": "float",
        "cpp_score": "float",
        "cpp_value": f"({of_range} - mean[c]) / deviation[c]",
        "cpp_numbers": f"  const float mean[] = {{{mean}}}, deviation[] = {{{std}}};\n",
    }


def _cpp_loop(axis: str, indent: int) -> str:
    name = {"channels": "c", "height": "y", "width": "x"}[axis]
    return f"{' ' * indent}for (int64_t {name} = 0; {name} < {axis}; ++{name})"


def _is(prepare: Mapping[str, Any], key: str, value: str) -> bool:
    return bool(prepare.get(key) == value)


def _names(loading: Loading) -> dict[str, str]:
    """Returns the code with which Python and JavaScript look up the name of a class."""
    if loading.labels is None:
        return {"imports": "", "labels": "", "js_labels": "", "label": "place"}
    read = f'Path("{loading.labels}").read_text(encoding="utf-8")'
    is_json = loading.labels == MODEL_FILE
    return {
        "imports": ("import json\n" if is_json else "") + "from pathlib import Path\n\n",
        "labels": f'labels = json.loads({read})["classes"]\n'
        if is_json
        else f"labels = {read}.splitlines()\n",
        "js_labels": f'const labels = readFileSync("{loading.labels}", "utf8").split("\\n");\n',
        "label": "labels[place]",
    }


def _answers(loading: Loading, filled: Mapping[str, str]) -> dict[str, str]:
    """Returns the part of the programs that prints the most likely classes, or the names and shapes of all outputs."""
    kind = "classes" if loading.classes else "outputs"
    scores = "// The scores of the classes, in the order of the labels.\nstd::vector<{cpp_score}> classify"
    every = "// All outputs, in the order of the file.\nstd::vector<Ort::Value> answers"
    found = {"cpp_function": scores.format(**filled) if loading.classes else every}
    for language, ending in (("python", "py"), ("js", "mjs"), ("cpp", "cpp")):
        lines = Template((_PROGRAMS / f"{kind}.{ending}.txt").read_text(encoding="utf-8"))
        found[f"{language}_answers"] = lines.substitute(filled).rstrip()
    return found


def _python_resized(interpolation: str) -> str:
    """Returns the lines that convert `image` to `pixels`, float32 [C, H, W], before the crop."""
    if interpolation == "nearest":  # Pillow's own method selects other pixels
        return (
            "along = [np.arange(to) * np.float32(side / to) for to, side in zip(sides, image.size)]\n"
            "pixels = np.asarray(image, np.float32).reshape(*image.size[::-1], -1).transpose(2, 0, 1)\n"
            "pixels = pixels[:, along[1].astype(int)][:, :, along[0].astype(int)]\n"
        )
    return (
        "grows = any(to > side for to, side in zip(sides, image.size))  # enlarged in float\n"
        'bands = [band.convert("F") if grows else band for band in image.split()]\n'
        f"resized = [band.resize(sides, Image.Resampling.{interpolation.upper()}) for band in bands]\n"
        "pixels = np.stack([np.asarray(band, np.float32) for band in resized])\n"
    )


def _python_batch(loading: Loading) -> str:
    """Returns the lines that convert the fitted `pixels` to the file's input, without the batch axis."""
    prepare = loading.prepare
    lines = "pixels = pixels[::-1]  # blue, green, red\n" if _is(prepare, "channel_order", "BGR") else ""
    if loading.integer:
        lines += "image = pixels.round().clip(0, 255).astype(np.uint8)\n"
    else:
        mean, std = list(prepare["mean"]), list(prepare["std"])
        of_range = "pixels.T" if _is(prepare, "pixels", LEVELS) else "pixels.T / 255"
        lines += f"mean, deviation = np.float32({mean}), np.float32({std})\n"
        lines += f"image = (({of_range} - mean) / deviation).T\n"
    return lines + ("image = image.transpose(1, 2, 0)\n" if _is(prepare, "layout", "NHWC") else "")


def _javascript_options(loading: Loading) -> str:
    """Returns the argument with the session's options, which follows the name of the file."""
    entries = dict(sorted(loading.session_options.items()))
    return f", {{ extra: {json.dumps(entries)} }}" if entries else ""


def _javascript_batch(rows: int) -> str:
    """Returns the lines that convert the picture's tensor to the file's input, which may have a batch size above 1."""
    if rows == 1:
        return "const input = new ort.Tensor(image.type, image.data, image.dims);\n"
    return (
        f"const batch = new image.data.constructor({rows} * image.data.length); // fixed batch of the file\n"
        f"for (let i = 0; i < {rows}; i++) batch.set(image.data, i * image.data.length);\n"
        f"const input = new ort.Tensor(image.type, batch, [{rows}, ...image.dims.slice(1)]);\n"
    )
