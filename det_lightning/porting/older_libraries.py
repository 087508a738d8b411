"""Names that today's torch, numpy, Pillow and Python no longer have, or interpret differently."""

from __future__ import annotations

import libcst as cst

from det_lightning.porting.bindings import Bindings
from det_lightning.porting.findings import Severity
from det_lightning.porting.python_syntax import PythonFile

_PLAIN_TYPE = ("is gone since numpy 1.24", "use Python's {last}")
_NUMPY_2 = "is gone since numpy 2"
_RENAMED_IN_NUMPY_2 = {
    "Inf": "inf", "Infinity": "inf", "infty": "inf", "PINF": "inf", "NaN": "nan", "complex_": "complex128",
    "float_": "float64", "string_": "bytes_", "unicode_": "str_", "product": "prod", "cumproduct": "cumprod",
    "sometrue": "any", "alltrue": "all", "round_": "round",
}  # fmt: skip
_COLLECTIONS = ("is gone since Python 3.10", "import it from collections.abc")
_NO_LINALG = "raises an error since torch 2.0"
_LINALG = (_NO_LINALG, "use torch.linalg.{last}, whose results may have another form")

# By the full name: since when it is gone, and what to use.
_GONE_FROM_LIBRARIES = {
    **{f"numpy.{name}": _PLAIN_TYPE for name in ("float", "int", "complex", "object", "str")},
    "numpy.unicode": ("is gone since numpy 1.24", "use Python's str"),
    **{f"numpy.{old}": (_NUMPY_2, f"use numpy.{new}") for old, new in _RENAMED_IN_NUMPY_2.items()},
    "numpy.NINF": (_NUMPY_2, "use -numpy.inf"),
    "numpy.asfarray": (_NUMPY_2, "use numpy.asarray(..., dtype=float)"),
    "numpy.asscalar": ("is gone since numpy 1.23", "use the array's item()"),
    "numpy.in1d": ("is gone since numpy 2.4", "use numpy.isin"),
    "numpy.trapz": ("is gone since numpy 2.4", "use numpy.trapezoid"),
    "torch._six": ("is gone since torch 2.0", "use str, int and collections.abc"),
    "torch.symeig": (_NO_LINALG, "use torch.linalg.eigh"),
    "torch.lstsq": (_NO_LINALG, "use torch.linalg.lstsq"),
    **{f"torch.{name}": _LINALG for name in ("eig", "solve", "matrix_rank")},
    **{f"torch.{name}": ("is gone since torch 1.8", "use torch.fft") for name in ("rfft", "irfft")},
    "PIL.Image.ANTIALIAS": ("is gone since Pillow 10", "use PIL.Image.LANCZOS"),
    "PIL.Image.LINEAR": ("is gone since Pillow 10", "use PIL.Image.BILINEAR"),
    "PIL.Image.CUBIC": ("is gone since Pillow 10", "use PIL.Image.BICUBIC"),
    **{
        f"collections.{name}": _COLLECTIONS
        for name in ("Callable", "Iterable", "Iterator", "Mapping", "MutableMapping", "Sequence", "Set", "Sized")
    },
}


def note_older_libraries(file: PythonFile) -> None:
    """Note the uses of libraries that today's releases no longer have, or interpret differently."""
    for package in ("torch", "numpy", "PIL", "collections"):
        bindings = Bindings(file, package)
        for use in bindings.references:
            path = f"{package}{use.path.removeprefix('determined')}"
            if use.attributes:
                _note_gone(file, use.node, path, is_module=False)
            call = file.parent(use.expression)
            if isinstance(call, cst.Call) and call.func is use.expression:
                _check_call(file, call, path)
        for binding in bindings.found:
            # What is bound and never looked up, such as a module from which names are imported.
            path = f"{package}{binding.path.removeprefix('determined')}"
            _note_gone(file, binding.statement, path, is_module=True)


def _check_call(file: PythonFile, call: cst.Call, path: str) -> None:
    keywords = {argument.keyword.value for argument in call.args if argument.keyword is not None}
    if path.startswith("torch.optim.lr_scheduler.") and "verbose" in keywords:
        name = path.rpartition(".")[2]
        advice = "leave it out; get_last_lr() tells the learning rate"
        file.note(call, Severity.note, f"{name}(verbose=) is gone; torch 2.6 was the last to have it", advice)
    elif path == "torch.load" and "weights_only" not in keywords:
        reason = "torch.load() reads tensors and plain containers only, since torch 2.6"
        file.note(call, Severity.note, reason, "pass weights_only=False for whole modules in files that you trust")
    elif path == "PIL.Image.fromarray" and (len(call.args) > 1 or "mode" in keywords):
        reason = "Image.fromarray(mode=) converts no values, and Pillow has deprecated it"
        file.note(call, Severity.note, reason, "convert the array first, as with array.astype(numpy.uint8)")


def _note_gone(file: PythonFile, node: cst.CSTNode, path: str, is_module: bool) -> None:
    for name, (since, advice) in _GONE_FROM_LIBRARIES.items():
        if name == path or (is_module and path.startswith(f"{name}.")):
            file.note(node, Severity.note, f"{name} {since}", advice.format(last=name.rpartition(".")[2]))
