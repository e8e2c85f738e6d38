"""A proof that compiled windows leave what eager ones leave: gradients, loss and buffers of the whole batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum.core.proof import Comparison, Outcome, Runner
from gradaccum.core.ways import Way
from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch.adapter.arrays import bits_flipped, measure, sample
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.torch.train_step.window import WindowRunner

Rehearse = Callable[[Batch, bool], Tensor]
"""Leaves the finished gradient of a batch, from compiled passes or not, and returns its loss."""

NEARLY = 20
"""Times the tolerance: code that rounds elsewhere differs by so much where a loss is small, or terms cancel."""


class _Windows(Runner):
    """Runs a batch's window eagerly, or as programs, each time from the same state."""

    compiles = True

    def __init__(self, runner: WindowRunner, batch: Batch, rehearse: Rehearse) -> None:
        self._runner, self._batch, self._rehearse, self.rows = runner, batch, rehearse, batch.rows
        self.device = runner.objective.device.type
        self._parameters: dict[str, Tensor] = {
            name: p for prefix, root in runner.objective.modules.items() for name, p in root.named_parameters(prefix)
        }
        known = {*map(id, self._parameters.values())}
        others = [p for p in runner.buffer.parameters() if id(p) not in known]
        self._parameters |= {f"parameter {index}": p for index, p in enumerate(others)}
        dtypes = [p.dtype for p in self._parameters.values() if p.is_floating_point()]
        dtypes += [runner.objective.autocast] if runner.objective.autocast is not None else []
        self.precision = str(min(dtypes or [torch.float32], key=lambda d: torch.finfo(d).bits)).removeprefix("torch.")

    def run(self, way: Way | None) -> Outcome:
        runner = self._runner
        with runner.as_found():
            loss = self._rehearse(self._batch, way is not None)
            gradients: dict[str, Tensor | None] = {}
            for name, parameter in self._parameters.items():
                if parameter.requires_grad:
                    gradients[name] = None if parameter.grad is None else sample(parameter.grad.detach()).clone()
                    parameter.grad = None
            buffers = {
                name: buffer.detach().clone()
                for prefix, root in runner.objective.modules.items()
                for name, buffer in root.named_buffers(prefix)
            }
            return Outcome({"loss": loss.detach().clone()}, gradients, buffers, weighs=not bool(loss.isnan()))

    @contextlib.contextmanager
    def moved(self, seed: int, *, far: bool = False) -> Iterator[Runner]:
        with bits_flipped(self._parameters.values(), seed, half=far):
            yield self

    def measure(self, pairs: Sequence[tuple[Any, Any]]) -> Any:
        return measure(pairs)

    def is_finite(self, arrays: Sequence[Any]) -> bool:
        return all(bool(array.isfinite().all()) for array in arrays)


def prove(runner: WindowRunner, batch: Batch, rehearse: Rehearse, *, repeated: bool = False) -> None:
    """Raise a NotEquivalentError where the compiled window differs by more than rounding. Moves nothing.

    `repeated`: its programs have been proven before. What training leaves of a gradient may be mostly rounding.
    """
    comparison = Comparison(_Windows(runner, batch, rehearse), [((*range(batch.rows),), (batch.rows,))], "raise")
    try:
        comparison.judged()
    except Exception as error:
        if is_out_of_memory(error):  # the window itself starts over with smaller micro-batches
            return
        raise
    allowed = comparison.runner.tolerance * (NEARLY**2 if repeated else NEARLY)
    if wrong := [difference for difference in comparison.wrong if not difference.error <= allowed]:
        listed = "".join(f"\n  {one.part} {one.name}   relative error {one.error:.3g}" for one in wrong[:5])
        raise NotEquivalentError(
            f"The compiled window differs from the eager one on the same {batch.rows} rows:{listed}\n"
            "torch.compile has changed what the model or the loss computes. Leave out `compile`, or compare "
            'compile={"backend": "aot_eager"}, which traces the passes and generates no code.'
        )
