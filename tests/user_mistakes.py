"""Users' modules with one mistake each: (code, settings that name it, text that the error line contains).

`{}` stands for the module's name. The message has to name the line that ends with `# here`, if there is one. The
names that they import from `helper` are in tests/test_foreign.py.
"""

from __future__ import annotations

LOAD = "def load(root, download, seed):\n"
NET = "class Mine(Net):\n    def forward(self, x):\n"
SOURCE, MODEL = "data.source={}.load", "model.name={}.Mine"


def gives(what: str, **given: str) -> str:
    """Returns the code of a source whose training set returns `what` for image `index`."""
    arguments = "".join(f", {key}={value}" for key, value in given.items())
    return f"{LOAD}    return splits(Images(get=lambda index: {what}{arguments}))\n"


# name: (code, settings, text that the error line contains)
MISTAKES: dict[str, tuple[str, list[str], str]] = {
    # modules that cannot be imported
    "a library that is not there": (
        "import no_such_library  # here",
        [SOURCE],
        "(ModuleNotFoundError: No module named",
    ),
    "a syntax error": (
        "def load(root:  # here",
        [SOURCE],
        "data.source={}.load: the code raised an exception (SyntaxError: ",
    ),
    "an error at import": ("1 / 0  # here", [SOURCE], "(ZeroDivisionError: division by zero; "),
    "a script that ends": (
        "import sys\nsys.exit(3)  # here",
        [SOURCE],
        "the code raised an exception (SystemExit: 3; ",
    ),
    "a name that is not in it": (
        "def loud(): ...",
        [SOURCE],
        "data.source={}.load: expected a name in {} (did you mean ",
    ),
    "a model's module": (
        "raise OSError('no disk')  # here",
        [MODEL],
        "model.name={}.Mine: the code raised an exception (OSError: no disk",
    ),
    "a backend's module": (
        "[][1]  # here",
        ["backend.target={}.MINE"],
        "backend.target={}.MINE: the code raised an exception (IndexError",
    ),
    # data sources
    "a source that raises": (f"{LOAD}    open('/no/such/file')  # here", [SOURCE], "(FileNotFoundError: "),
    "deep in a library": (f"{LOAD}    torch.load('/no/file')  # here", [SOURCE], "(FileNotFoundError: "),
    "a source of no arguments": (
        "def load():\n    return splits()",
        [SOURCE],
        "data.source={}.load: "
        "expected a callable that accepts (root, download, seed), not () (too many positional arguments)",
    ),
    "no function": ("load = 3", [SOURCE], "data.source={}.load: expected a function or class, not int"),
    "no splits": (
        f"{LOAD}    return None",
        [SOURCE],
        "a function that returns qatkit.data.Splits, not NoneType",
    ),
    "a pair": (
        f"{LOAD}    return Images(), Images()",
        [SOURCE],
        "a function that returns qatkit.data.Splits, not tuple",
    ),
    "classes by number": (
        f"{LOAD}    return splits(classes=4)",
        [SOURCE],
        "classes must be a tuple of names, not int",
    ),
    "no targets": (
        f"{LOAD}    return splits(Images(None))",
        [SOURCE],
        "train.targets is missing; it must list the label of each image",
    ),
    "fewer targets": (
        f"{LOAD}    return splits(Images(LABELS[1:]))",
        [SOURCE],
        "train.targets has 39 labels for 40 images; it must have one label per image",
    ),
    "an empty split": (
        f"{LOAD}    return splits(Images([], count=0))",
        [SOURCE],
        "train.targets has 0 labels for 0 images; it must have one label per image, and at least one",
    ),
    "names as targets": (
        f"{LOAD}    return splits(Images(['cat'] * 40))",
        [SOURCE],
        "train.targets[0] is 'cat' (str); labels must be integers",
    ),
    "floats as targets": (
        f"{LOAD}    return splits(Images(np.array(LABELS, float)))",
        [SOURCE],
        "train.targets[0] is '0.0' (float); labels must be integers",
    ),
    "a target of None": (
        f"{LOAD}    return splits(Images([0, None] * 20))",
        [SOURCE],
        "targets[1] is 'None' (NoneType)",
    ),
    "one-hot targets": (
        f"{LOAD}    return splits(Images(torch.eye(40)))",
        [SOURCE],
        "train.targets[0] is '[1.0, 0.0",
    ),
    "a target too large": (
        f"{LOAD}    return splits(Images([0, 4] * 20))",
        [SOURCE],
        "labels of train must be 0..3, but they are 0..4",
    ),
    "a target below 0": (
        f"{LOAD}    return splits(Images([-1, 3] * 20))",
        [SOURCE],
        "must be 0..3, but they are -1..3",
    ),
    "no length": (
        f"{LOAD}    return splits(iter([]))",
        [SOURCE],
        "the code raised an exception (TypeError: object of type 'list_iterator'",
    ),
    "fewer labels than images": (
        f"{LOAD}    return splits(TensorImages(PIXELS, LABELS[1:]))  # here",
        [SOURCE],
        "the code raised an exception (ValueError: expected one label per image, got 39 labels for 40 images; ",
    ),
    "floats in memory": (
        f"{LOAD}    return splits(TensorImages(PIXELS / 255, LABELS))",
        [SOURCE],
        "] is Tensor torch.float32 (3, 8, 8); images must be",
    ),
    "targets that raise": (
        "class Lazy(Images):\n    @property\n    def targets(self):\n        raise KeyError('label')  # here\n"
        f"    @targets.setter\n    def targets(self, value): ...\n{LOAD}    return splits(Lazy())",
        [SOURCE],
        "data.source={}.load: the code raised an exception (KeyError: 'label'; ",
    ),
    # items of a source
    "an item that raises": (
        f"def get(index):\n    return PIXELS[index + 40], 0  # here\n{gives('get(index)')}",
        [SOURCE],
        "(IndexError: index ",
    ),
    "no pair": (
        gives("PIXELS[index]"),
        [SOURCE],
        "] must be a pair (image, label), not Tensor torch.uint8 (3, 8, 8)",
    ),
    "a dictionary": (
        gives("dict(image=PIXELS[index])"),
        [SOURCE],
        "] must be a pair (image, label), not dict",
    ),
    "a label that lies": (gives("(PIXELS[index], 3 - LABELS[index])"), [SOURCE], "both must be the same"),
    "a name as label": (
        gives("(PIXELS[index], 'cat')"),
        [SOURCE],
        "] is 'cat' (str); labels must be integers",
    ),
    "a list": (
        gives("([1, 2], LABELS[index])"),
        [SOURCE],
        "] is list; images must be Pillow images or uint8 tensors",
    ),
    "no image": (
        gives("(None, LABELS[index])"),
        [SOURCE],
        "] is NoneType; images must be Pillow images or uint8",
    ),
    "floats": (
        gives("(PIXELS[index] / 0, LABELS[index])"),
        [SOURCE],
        "] is Tensor torch.float32 (3, 8, 8); images",
    ),
    "an array": (
        gives("(PIXELS[index].numpy(), LABELS[index])"),
        [SOURCE],
        "] is ndarray uint8 (3, 8, 8); images must",
    ),
    "two axes": (
        gives("(PIXELS[index][0], LABELS[index])"),
        [SOURCE],
        "] is Tensor torch.uint8 (8, 8); images must",
    ),
    "two channels": (
        gives("(PIXELS[index][:2], LABELS[index])"),
        [SOURCE],
        "images=2 channels: expected 1 or 3 channels, since data.mean has 3 numbers",
    ),
    "no pixels": (
        gives("(PIXELS[index][:, :0], LABELS[index])"),
        [SOURCE],
        "can't be read as an image (no pixels)",
    ),
    "float pixels": (
        gives("(Image.new('F', (8, 8)), LABELS[index])"),
        [SOURCE],
        "can't be read as an image (float pixels of unknown range)",
    ),
    "a file that was cut off": (
        "import io\nstream = io.BytesIO()\nImage.effect_noise((99, 99), 99).save(stream, 'png')\n"
        + gives("(Image.open(io.BytesIO(stream.getvalue()[:999])), LABELS[index])"),
        [SOURCE],
        "can't be read as an image (image file is truncated",
    ),
    "a test image": (
        f"{LOAD}    return Splits(Images(), Images(get=lambda index: PIXELS[index]), NAMES, HALVES)",
        [SOURCE],
        "data.source={}.load: test[0] must be a pair (image, label)",
    ),
    # models
    "a builder that raises": (
        "def Mine(num_classes):\n    raise OSError('no weights')  # here",
        [MODEL],
        "(OSError: no w",
    ),
    "a type in a builder": (
        "def Mine(num_classes):\n    return nn.Linear('4', 4)  # here",
        [MODEL],
        "model.name={}.Mine: the code raised an exception",
    ),
    "arguments of a builder": (
        "def Mine(width, num_classes):\n    return Net(num_classes)",
        [MODEL],
        "a callable that accepts (num_classes=...), not (width, num_classes) (missing a required argument: 'width')",
    ),
    "no model": (
        "def Mine():\n    return None",
        [MODEL],
        "model.name={}.Mine: expected a callable that returns an nn.Module, not NoneType",
    ),
    "weights in place of a model": (
        "def Mine():\n    return Net().state_dict()",
        [MODEL],
        "an nn.Module, not OrderedDict",
    ),
    "no super().__init__()": (
        "class Mine(nn.Module):\n    def __init__(self):\n        self.fc = nn.Linear(1, 1)  # here",
        [MODEL],
        "(AttributeError: cannot assign module before Module.__init__() call; ",
    ),
    "no forward": ("class Mine(nn.Module): ...", [MODEL], 'is missing the required "forward" function'),
    "a forward that raises": (
        f"{NET}        return self.fc(x.flatten(1))  # here",
        [MODEL],
        "(RuntimeError: mat1 and mat2 shapes",
    ),
    "a hook that raises": (
        "def hook(*args):\n    raise ValueError('hooked')  # here\n"
        "def Mine():\n    net = Net()\n    net.conv.register_forward_hook(hook)\n    return net",
        [MODEL],
        "(ValueError: hooked; ",
    ),
    "nothing": (
        f"{NET}        super().forward(x)",
        [MODEL],
        "one value for each class of the data; for 2 images it returned no tensor",
    ),
    "features first": (
        f"{NET}        return x.flatten(1), super().forward(x)",
        [MODEL],
        "it returned float32 [2, 192]",
    ),
    "maps": (f"{NET}        return self.conv(x)", [MODEL], "for 2 images it returned float32 [2, 8, 6, 6]"),
    "classes of its own": ("def Mine():\n    return Net(1000)", [MODEL], "it returned float32 [2, 1000]"),
    "the answer": (f"{NET}        return super().forward(x).argmax(1)", [MODEL], "it returned int64 [2]"),
    "NaN of real images": (
        f"{NET}        return super().forward(x.log().log())",
        [MODEL],
        "it returned NaN or infinity",
    ),
    "values that decide": (
        f"{NET}        return super().forward(x if x.sum() > 0 else -x)  # here",
        [MODEL],
        "the computation depends on values of a tensor",
    ),
    # checks and algorithms
    "a check": (
        "from qatkit.verify.checks.base import Check\nclass Mine(Check):\n    name = 'mine'\n"
        "    def __init__(self):\n        self.x = {}['x']  # here\n    def measure(self, subject, results): ...",
        ["verify.checks=[{}.Mine]"],
        "verify.checks={}.Mine: the code raised an exception (KeyError: 'x'; ",
    ),
    "an algorithm": (
        "from dataclasses import dataclass\nfrom qatkit.algorithms import Algorithm\n@dataclass(frozen=True)\n"
        "class Mine(Algorithm):\n    stage = 'prepared'\n    def __call__(self, graph_module, inputs):\n"
        "        raise NotImplementedError  # here",
        ["+algorithm.mine={{target: {}.Mine}}"],
        "algorithm.mine.target={}.Mine: the code raised an exception (NotImplementedError; ",
    ),
    "an algorithm that gives nothing": (
        "from dataclasses import dataclass\nfrom qatkit.algorithms import Algorithm\n@dataclass(frozen=True)\n"
        "class Mine(Algorithm):\n    stage = 'prepared'\n    def __call__(self, graph_module, inputs): ...",
        ["+algorithm.mine={{target: {}.Mine}}"],
        "algorithm=Mine: expected a callable that returns a PassResult",
    ),
}

# One mistake of each kind for the default suite; each takes half a second.
QUICK = {
    "a syntax error",
    "a source that raises",
    "a source of no arguments",
    "names as targets",
    "an item that raises",
    "a label that lies",
    "floats",
    "a builder that raises",
    "a hook that raises",
    "classes of its own",
}
