"""A compiled program, and what torch.compile says where there can't be one."""

from __future__ import annotations

import itertools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch._inductor.exc
from torch import Tensor

from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.torch.compiled.passes import PassesOf

_numbers = itertools.count()

_NOT_TRACED = (
    "compile= needs a model and a loss that torch.compile traces as a whole, forward and backward. It stopped here:\n"
    "{reason}\nChange that, or leave out `compile`."
)
_NO_COMPILER = (
    "compile= needs a C++ compiler, which torch.compile's inductor calls on a CPU, and none was found: install g++ or "
    "clang++, or name one in the environment variable CXX; or leave out `compile`. ({reason})"
)


class NotCompilable(ValueError):
    """torch.compile can't make a program of these passes."""


class Program:
    """The passes of some micro-batches, compiled for their shapes when first called.

    `dynamic`: sizes in which its micro-batches differ may be others in each call.
    """

    def __init__(self, passes: PassesOf, keywords: Mapping[str, Any], *, dynamic: bool = False) -> None:
        run = type(passes).run
        # torch.compile counts recompilations by code object, and all programs would share this one.
        code = run.__code__.replace(co_name=f"window_{next(_numbers)}")
        own = types.FunctionType(code, run.__globals__, code.co_name, run.__defaults__, run.__closure__)
        self._run = torch.compile(own, fullgraph=True, dynamic=None if dynamic else False, **keywords)
        self.passes, self.dynamic, self.ran = passes, dynamic, False

    def __call__(
        self,
        parameters: Sequence[Tensor],
        micro_batches: Sequence[Any],
        factors: Sequence[Sequence[Tensor]],
        sums: Sequence[Tensor] | None,
    ) -> tuple[Any, ...]:
        try:
            return self._call(self.passes, parameters, micro_batches, factors, sums)
        except Exception as error:
            if (explanation := explained(error)) is None:
                raise
            raise NotCompilable(explanation) from error

    def _call(self, *arguments: Any) -> Any:
        if self.ran:
            try:
                return self._run(*arguments)
            except torch._dynamo.exc.Unsupported:  # it is traced once more, as shapes or modules are others now
                pass
        # This takes longer than a small program, so a program that has been traced is called without it.
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            result = self._run(*arguments)
        self.ran = True
        return result


def explained(error: Exception) -> str | None:
    """What to say of an error of torch.compile's own; None of any other."""
    exceptions = torch._dynamo.exc
    if is_out_of_memory(error) or not isinstance(
        error, exceptions.TorchDynamoException | exceptions.FailOnRecompileLimitHit
    ):
        return None
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch._inductor.exc.InvalidCxxCompiler):
            return _NO_COMPILER.format(reason=cause)
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    return _NOT_TRACED.format(reason=first_lines(error, 12))


def first_lines(error: BaseException, most: int) -> str:
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    without = [line for line in lines if "TORCHDYNAMO_VERBOSE" not in line and "TORCH_LOGS" not in line]
    return "\n".join(f"  {line}" for line in without[:most])
