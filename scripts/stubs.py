"""What editors and type checkers see of the optimizers that are wrapped by name: `python -m scripts.stubs` writes it.

Their classes are made when they are asked for, from whatever torch or Keras is installed, so their stubs are made, too.
"""

from __future__ import annotations

import collections.abc
import importlib
import inspect
import pathlib
import re
import typing
from typing import Any

SOURCE = pathlib.Path(__file__).parent.parent / "src"
HEADER = """# Made by `python -m scripts.stubs` from {version}: what editors and type checkers see of {name}.
"""
TORCH = """
from typing import Any, Literal, overload

import torch
from torch.optim.optimizer import ParamsT

from gradaccum.schedule import Steps
from gradaccum.torch.optimizer import Optimizer as Optimizer

__all__ = ["Optimizer"]
"""
KERAS = """
from typing import Any, overload

from typing_extensions import Self

from gradaccum.keras.batch_optimizer import BatchOptimizer as BatchOptimizer
from gradaccum.keras.optimizer import Optimizer as Optimizer
from gradaccum.schedule import Steps

__all__: list[str]
"""

NEW = "\n    def __new__(cls, *args: Any, **kwargs: Any) -> Self: ..."
"""Pyright takes Keras' own, which returns anything, for a reason not to look at `__init__`."""


def _annotation(found: Any) -> str:
    if found is inspect.Parameter.empty:
        return "Any"
    from torch.optim.optimizer import ParamsT

    return "ParamsT" if found == ParamsT else inspect.formatannotation(found)


def _written(parameter: inspect.Parameter) -> str:
    """`name: type = ...`, or `**kwargs: Any`."""
    star = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
    default = "" if star or parameter.default is parameter.empty else " = ..."
    annotation = "Steps" if parameter.name == "steps" else _annotation(parameter.annotation)
    return f"{star}{parameter.name}: {annotation}{default}"


def _arguments(parameters: collections.abc.Iterable[inspect.Parameter]) -> str:
    written, bare = list[str](), True
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and bare:
            written.append("*")
            bare = False
        written.append(_written(parameter))
    return ", ".join(written)


def class_of(name: str, wrapped: type[Any], hints: dict[str, Any], made: str = "") -> str:
    """The stub of a wrapped optimizer: `steps` by keyword, or first; `made` stands before them."""
    parameters = [
        p.replace(annotation=hints.get(p.name, p.annotation)) for p in inspect.signature(wrapped).parameters.values()
    ]
    (steps,) = (p for p in parameters if p.name == "steps")
    first = steps.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rest = [p for p in parameters if p.name != "steps"]
    return f"""
class {name}(Optimizer):{made}
    @overload
    def __init__(self, {_arguments(parameters)}) -> None: ...
    @overload
    def __init__(self, {_arguments([first, *rest])}) -> None: ...
"""


def stub(face: str) -> str:
    """The text of a face's stub."""
    module, framework = importlib.import_module(face), importlib.import_module(face.split(".")[1])
    wrapper = module.Optimizer
    hints = typing.get_type_hints(wrapper.__init__) if face.endswith("optim") else {}
    classes = {
        name: found
        for name in sorted(set(dir(module)) - {"Optimizer", "BatchOptimizer"})
        if isinstance(found := getattr(module, name), type) and issubclass(found, wrapper)
        if found.__module__ == face
    }
    version = re.sub(r"\+.*", "", f"{framework.__name__} {framework.__version__}")
    text = HEADER.format(version=version, name=face) + (TORCH if face.endswith("optim") else KERAS)
    made = "" if face.endswith("optim") else NEW
    return text + "".join(class_of(name, found, hints, made) for name, found in classes.items())


def path_of(face: str) -> pathlib.Path:
    """Where a face's stub lies."""
    return SOURCE / (face.replace(".", "/") + ".pyi")


if __name__ == "__main__":
    for face in ("gradaccum.torch.optim", "gradaccum.keras.optimizers"):
        path_of(face).write_text(stub(face), encoding="utf-8")
