"""The few lines of Python that run the INT8 file, with this model's own preprocessing filled in."""

from __future__ import annotations

from qatkit.verify.results import Results


def run_code(results: Results) -> str:
    """A complete program that needs onnxruntime, numpy and Pillow; "" when the preprocessing is not known."""
    prepare = results.preprocessing
    if prepare is None:
        return ""
    mode = "L" if len(prepare["mean"]) == 1 else "RGB"
    size = prepare["image_size"]
    shorter = prepare["resize"] or size
    options = "".join(
        f"options.add_session_config_entry({key!r}, {value!r})\n"
        for key, value in sorted(results.session_options.items())
    )
    return (
        "import numpy as np\nimport onnxruntime as ort\nfrom PIL import Image\n\n"
        f"options = ort.SessionOptions()\n{options}"
        f"session = ort.InferenceSession({results.int8_file!r}, options,"
        " providers=['CPUExecutionProvider'])\n"
        f"image = Image.open('image.jpg').convert('{mode}')\n"
        f"sides = [side * {shorter} // min(image.size) for side in image.size]\n"
        f"image = image.resize(sides, Image.Resampling.{prepare['interpolation'].upper()})\n"
        f"left, top = [(side - {size}) // 2 for side in image.size]  # centre crop\n"
        f"image = image.crop((left, top, left + {size}, top + {size}))\n"
        f"{_to_batch(results, size)}"
        f"{_repeated(results)}"
        "logits = session.run(None, {session.get_inputs()[0].name: batch})[0]\n"
        "print(logits.argmax(axis=1))\n"
    )


def _repeated(results: Results) -> str:
    """A file of a fixed batch takes no single image."""
    if results.fixed_batch in (None, 1):
        return ""
    return f"batch = np.repeat(batch, {results.fixed_batch}, axis=0)  # the file takes so many at a time\n"


def _to_batch(results: Results, size: int) -> str:
    """From the cropped image to the file's input."""
    if results.config.get("export", {}).get("io") == "uint8":
        return f"batch = np.asarray(image, np.uint8).reshape({size}, {size}, -1).transpose(2, 0, 1)[None]\n"
    prepare = results.preprocessing
    assert prepare is not None
    return (
        f"pixels = np.asarray(image, np.float32).reshape({size}, {size}, -1) / 255\n"
        f"pixels = (pixels - {list(prepare['mean'])}) / {list(prepare['std'])}\n"
        "batch = pixels.astype(np.float32).transpose(2, 0, 1)[None]\n"
    )
