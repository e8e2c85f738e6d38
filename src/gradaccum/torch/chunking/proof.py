"""The first call proves itself: a few rows at once, and in micro-batches through the two passes of later calls."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.weak import TensorWeakRef

from gradaccum.core.rounding import rounding
from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch.adapter.arrays import relative_error
from gradaccum.on_torch.adapter.rng import RowwiseRng
from gradaccum.on_torch.batch import BatchDims, leaves, map_leaves, number_of_rows, take
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.on_torch.private import run_backward
from gradaccum.on_torch.random_state import all_generators, kept
from gradaccum.torch.buffers import Attributes, LentBuffers, gradients_kept
from gradaccum.torch.chunking.gradients import gradient_leaf
from gradaccum.torch.chunking.recompute import ModuleState, accelerators, parametrizations_computed
from gradaccum.torch.chunking.trees import Inputs, as_leaf, copied, is_floating, tensors_of
from gradaccum.torch.chunking.two_passes import Call
from gradaccum.torch.chunking.watch import (
    Watch,
    attributes_of,
    generators_of,
    leaves_besides,
    noted,
    same_values,
)
from gradaccum.torch.proof import counting_layers, eager

__all__ = ["ROWS", "Findings", "prove"]

ROWS = 8
"""Rows that are looked at, at most."""

CallOf = Callable[[nn.Module, Inputs, list[int]], Call]
"""Makes the call of a module on these inputs in micro-batches of these sizes."""


class Findings(NamedTuple):
    """What a proof has found out besides that outputs and gradients are the large batch's."""

    remarks: list[str]
    """What isn't the large batch's: sentences."""
    functional: list[str]
    """Modules that call `torch.nn.functional.batch_norm` and are no BatchNorm."""


def prove(
    module: nn.Module,
    call_of: CallOf,
    inputs: Inputs,
    batch_dims: BatchDims,
    *,
    exact: bool,
    batch_norm: bool,
    trims: bool = False,
    most: int = ROWS,
) -> Findings:
    """Prove that micro-batches give the outputs and gradients of a few of these rows at once. Moves nothing.

    Random numbers follow their rows, so dropout is no difference.

    Args:
        module: What is called.
        call_of: Makes a call of it.
        inputs: What it is called with.
        batch_dims: Where their rows are.
        exact: Whether BatchNorm is the large batch's.
        batch_norm: Whether BatchNorm that isn't counts; else it is left out of the comparison.
        trims: Whether columns of padding are cut off.
        most: Rows to look at; half as many wherever memory runs out.

    Raises:
        NotEquivalentError: Outputs or gradients differ, or a tensor that passes gradients leaves by the side.
    """
    for cause in counting_layers([module]):
        raise NotEquivalentError(cause.message)
    rows = number_of_rows(inputs, batch_dims)
    if rows < 2:
        raise ValueError(f"Two rows at least are needed to compare two chunkings. Received: {rows}.")
    count = min(rows, most)
    try:
        comparison, wrong = _compared(module, call_of, inputs, batch_dims, count, exact, batch_norm, trims)
    except Exception as error:
        if not is_out_of_memory(error) or count <= 2:
            raise
        comparison = None
    if comparison is None:  # out of reach of the error's frames, which hold what took the memory
        fewer = max(2, count // 2)
        return prove(module, call_of, inputs, batch_dims, exact=exact, batch_norm=batch_norm, trims=trims, most=fewer)
    name = type(module).__name__
    if wrong:
        comparison.noise.check(name)
        listing, sizes = "\n".join(wrong), " and ".join(map(str, dict.fromkeys(comparison.sizes)))
        raise NotEquivalentError(
            f"{name} is not per-row: {count} rows at once differ from the same in micro-batches of {sizes}.\n"
            f"{listing}\n{comparison.culprit()}"
        )
    if comparison.escaped:
        raise NotEquivalentError(
            f"{name} keeps {comparison.escaped}. In micro-batches it is the last one's alone, and without a gradient. "
            "Return it from forward, with a row for every row, and reduce over them outside."
        )
    return Findings(comparison.remarks, comparison.functional)


def _compared(
    module: nn.Module,
    call_of: CallOf,
    inputs: Inputs,
    batch_dims: BatchDims,
    count: int,
    exact: bool,
    batch_norm: bool,
    trims: bool,
) -> tuple[_Comparison, list[str]]:
    """The comparison of so many rows, made, and what differs."""
    picked = torch.linspace(0, number_of_rows(inputs, batch_dims) - 1, count).round().long()
    with torch.no_grad():
        few = map_leaves(as_leaf, take(inputs, picked, batch_dims), inputs)
    generators = all_generators(accelerators([*tensors_of(few), *module.parameters()]))
    with (
        kept([*generators, *generators_of(module, few)]),
        noted(module),
        contextlib.ExitStack() as stack,
        eager(),
        parametrizations_computed(),
        # In place of those around, a checkpoint's say. Detached, because a saved output would keep itself alive.
        torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, _itself),
        torch.enable_grad(),
    ):
        stack.callback(Attributes(module.modules()).put_back)
        # Once more, with the mean in place of noise that belongs to no row; at once where columns are cut off.
        for neutral in (exact or trims, True):
            comparison = _Comparison(module, call_of, few, count, exact, batch_norm, neutral=neutral, trims=trims)
            wrong = comparison.differences()
            if neutral or not comparison.noise.unreplayed:
                break
        if wrong and comparison.noise.precision is not torch.float64:
            wrong = comparison.differences_in_float64(wrong)
    return comparison, wrong


class _Result(NamedTuple):
    outputs: list[tuple[str, Tensor]]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    attributes: dict[str, Any]
    """Those that have been assigned."""
    with_graph: set[str]
    """Attributes with a tensor that passes gradients."""
    outside: list[TensorWeakRef]
    """Leaves of the graph that are neither parameters nor inputs."""
    inputs: Inputs


class _Comparison:
    """The same rows whole and in micro-batches, from the same state.

    Args:
        module, call_of, exact, batch_norm: As for `prove`.
        few: The rows.
        rows: How many there are.
        neutral: Replace random numbers by their mean.
        trims: As for `prove`.
    """

    def __init__(
        self,
        module: nn.Module,
        call_of: CallOf,
        few: Inputs,
        rows: int,
        exact: bool,
        batch_norm: bool,
        *,
        neutral: bool,
        trims: bool,
    ) -> None:
        self.module, self.call_of, self.few, self.rows, self.trims = module, call_of, few, rows, trims
        self.exact, self.batch_norm, self.neutral = exact, batch_norm, neutral
        halves = [rows // 2 + 1, rows - rows // 2 - 1] if rows > 2 else [1, 1]  # 5 and 3: in step with no period
        self.sizes = [1] * rows if trims else halves  # single rows: cut as much as any micro-batch cuts them
        self.noise = RowwiseRng(rows, neutral=neutral)
        self.noise.holds(*generators_of(module, few))
        self.state = ModuleState(module)
        self.names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.escaped = ""
        """What leaves by the side, and where; empty if nothing does."""
        self.functional: list[str] = []
        self.remarks: list[str] = []
        self.outside: list[Tensor] = []
        """Tensors that get gradients, are neither parameters nor inputs, and outlive the call."""
        self._cotangents: list[Tensor] = []
        self._layers: tuple[dict[str, Any], ...] = ()

    def differences(self) -> list[str]:
        """What differs by more than rounding, a line each."""
        watches = [Watch(self.module, neutral=not (self.exact or self.batch_norm)) for _ in range(2)]
        whole = self._result(self._whole, watches[0])
        if watches[0].alive() or whole.outside:
            gc.collect()
        alive = watches[0].alive()
        self.outside = [leaf for reference in whole.outside for leaf in [reference()] if leaf is not None]
        parts = self._result(self._in_micro_batches, watches[1])
        self.escaped = self._escaped(alive, whole, parts)
        self.functional = watches[0].functional
        self._layers = watches[0].layers, watches[1].layers
        wrong = []
        for (path, expected), (_, actual) in zip(whole.outputs, parts.outputs, strict=True):
            wrong += self._line(f"output{path}", actual, expected)
        largest = max([g.abs().max().item() for g in whole.gradients.values() if g is not None and g.numel()] or [0.0])
        for name, gradient in whole.gradients.items():
            pair = [g for g in (parts.gradients[name], gradient) if g is not None]
            if pair:
                other = torch.zeros_like(pair[0])
                actual, expected = (other if g is None else g for g in (parts.gradients[name], gradient))
                # A gradient that is zero but for rounding has no relative error of its own: floor its scale.
                wrong += self._line(f"gradient of {name}", actual, expected, floor=1e-3 * largest)
        self._remark(whole, parts, watches[0].sizes)
        return wrong

    def differences_in_float64(self, found: list[str]) -> list[str]:
        """What of this differs in float64, too; all of it, where the module can't be copied or computed in that."""
        try:
            few = map_leaves(lambda leaf: as_leaf(leaf.double()) if is_floating(leaf) else leaf, self.few)
            module = copy.deepcopy(self.module).double()
            flags = {"neutral": self.neutral, "trims": self.trims}
            again = _Comparison(module, self.call_of, few, self.rows, self.exact, self.batch_norm, **flags)
            return again.differences()
        except Exception:
            return found

    def _line(self, name: str, actual: Tensor, expected: Tensor, floor: float = 0.0) -> list[str]:
        error, allowed = relative_error(actual, expected, floor), self._allowed(expected)
        return [] if error <= allowed else [f"  {name}   relative error {error:.3g}   ({allowed:g} allowed)"]

    def _differ(self, whole: Tensor | None, *parts: Tensor | None) -> bool:
        """Whether the rows of the parts are others than those of the whole; not where that can't be told."""
        kept = [part for part in parts if part is not None]
        if whole is None or not whole.dim() or sum(len(part) for part in kept) != len(whole):
            return False
        if any(part.shape[1:] != whole.shape[1:] for part in kept):  # columns were cut off
            return False
        return bool(self._line("", torch.cat(kept), whole))

    def _allowed(self, tensor: Tensor) -> float:
        return rounding(str(self.noise.precision), tensor.device.type)

    def _remark(self, whole: _Result, parts: _Result, sizes: dict[str, float]) -> None:
        if self.outside:
            self.remarks.append(
                f"A chunked {type(self.module).__name__} passes gradients to tensors that are neither its parameters "
                f"nor its inputs, of shape {', '.join(str(tuple(t.shape)) for t in self.outside)}: they get them in "
                "`.grad` micro-batch by micro-batch, so hooks run for each, and torch.autograd.grad doesn't see them. "
                "Register them as parameters, or pass them as inputs."
            )
        moved = []
        for name, value in whole.buffers.items():
            # A mean that is zero but for rounding has the scale of what it averages; a count has its own.
            size = sizes.get(name.rpartition(".")[0], 0.0) if is_floating(value) else 0.0
            if name not in parts.buffers or self._line("", parts.buffers[name], value, floor=1e-3 * size):
                moved.append(name)
        if moved:
            self.remarks.append(
                f"These buffers of a chunked {type(self.module).__name__} move to the mean of where its micro-batches "
                f"take them, which is not where all rows at once take them: {_listed(moved)}."
            )
        kept = {name: value for name, value in whole.attributes.items() if name not in whole.with_graph}
        left = [name for name, value in kept.items() if not same_values(parts.attributes.get(name), value)]
        if left:
            self.remarks.append(
                f"These attributes of a chunked {type(self.module).__name__} are what its micro-batches make of them "
                f"one after the other, not what all rows at once do: {_listed(left)}."
            )

    def _result(self, outputs_of: Callable[[Inputs], Any], watch: Watch) -> _Result:
        """Outputs, gradients, and what is left behind. Afterwards the module is as it was."""
        leaf_of = {id(p): gradient_leaf(p) for p in self.state.parameters if p.requires_grad}
        few = map_leaves(as_leaf, self.few)
        wanted = {self.names[key]: leaf for key, leaf in leaf_of.items()}
        wanted.update(
            {f"the input {path}": leaf for path, leaf in leaves(few) if is_floating(leaf) and leaf.requires_grad}
        )
        with self.state.restored(leaf_of), LentBuffers(self.state.buffers).lent():
            before = attributes_of(self.module)
            with watch, self.noise:
                try:
                    outputs = outputs_of(few)
                    found = [(path, leaf) for path, leaf in leaves(outputs) if is_floating(leaf)]
                    outside = leaves_besides([tensor for _, tensor in found], [*wanted.values()])
                    with gradients_kept([*outside, *self.outside]):
                        self._backward([tensor for _, tensor in found])
                finally:
                    self.noise.rewind()
            left = {name: value for name, value in attributes_of(self.module).items() if value is not before.get(name)}
            buffers = {
                f"{path}.{name}" if path else name: buffer.detach().clone()
                for path, layer in self.module.named_modules()
                if self.exact or not isinstance(layer, _BatchNorm)
                for name, buffer in layer.named_buffers(recurse=False)
            }
        return _Result(
            [(path, tensor.detach().clone()) for path, tensor in found],
            {name: None if leaf.grad is None else leaf.grad.to_dense() for name, leaf in wanted.items()},
            buffers,
            {name: map_leaves(copied, value) for name, value in left.items()},
            {name for name, value in left.items() if any(leaf.grad_fn is not None for leaf in tensors_of(value))},
            [TensorWeakRef(leaf) for leaf in outside],
            few,
        )

    def _backward(self, outputs: list[Tensor]) -> None:
        if not self._cotangents:
            # Without random numbers, which the module's own are compared by.
            counted = [torch.arange(t.numel(), dtype=torch.float64).view(t.shape) for t in outputs]
            self._cotangents = [(1 + 12.9898 * n).cos().to(t.device, t.dtype) for n, t in zip(counted, outputs)]
        roots = [(t, one) for t, one in zip(outputs, self._cotangents, strict=True) if t.requires_grad]
        if roots:
            run_backward([t for t, _ in roots], [one for _, one in roots])

    def _whole(self, few: Inputs) -> Any:
        self.noise.start(None)
        return self.module(*few.args, **few.kwargs)

    def _in_micro_batches(self, few: Inputs) -> Any:
        order = itertools.cycle(torch.arange(self.rows).split(self.sizes))

        def start(*_: Any) -> None:
            self.noise.start(next(order))

        # Where the whole module runs in segments, there is no noise that follows rows.
        handles = [] if self.exact else [self.module.register_forward_pre_hook(start, prepend=True)]
        self.noise.start(None)
        try:
            return self.call_of(self.module, few, self.sizes).run(tensors_of(few), 0, differentiated=True)
        finally:
            for handle in handles:
                handle.remove()

    def _escaped(self, alive: list[tuple[Tensor, str]], whole: _Result, parts: _Result) -> str:
        """The tensor with a graph that is left besides the outputs, if there is one."""
        for name in whole.with_graph:  # where it is the same, it is made of parameters alone, as a normed weight
            if not same_values(parts.attributes.get(name), whole.attributes[name]):
                return f"a tensor with a graph as its attribute {name!r}"
        for tensor, path in reversed(alive):
            made = f"made in {path!r} ({type(self.module.get_submodule(path)).__name__})" if path else "made in forward"
            return f"a tensor of shape {tuple(tensor.shape)} with a graph, {made}, in a hook, a container or a closure"
        return ""

    def culprit(self) -> str:
        """The first layer whose outputs differ."""
        whole, parts = self._layers
        for path, calls in whole.items():
            pieces = parts.get(path, [])[: len(self.sizes)]
            if path and len(calls) == 1 and len(pieces) == len(self.sizes):
                inputs, outputs = zip(*calls, *pieces)
                if self._differ(*outputs):
                    if self._differ(*inputs):
                        break
                    layer = self.module.get_submodule(path)
                    advice = ' Use batch_norm="exact", or GroupNorm.' if isinstance(layer, _BatchNorm) else ""
                    return f"{path!r} is the first layer of which that is so: a {type(layer).__name__}.{advice}"
        if self.functional:
            return f"torch.nn.functional.batch_norm is called in {_listed(self.functional)}: use GroupNorm there."
        return "It happens outside its layers. Do what looks across rows after the chunked module, on the whole batch."


def _listed(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def _itself(tensor: Tensor) -> Tensor:
    return tensor
