"""The first call of a chunked module proves itself: a few rows at once, and in micro-batches through its two passes."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef

from gradaccum.core.proof import Comparison, Outcome, with_fewer_rows
from gradaccum.core.ways import Way
from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch.adapter.arrays import TorchRunner
from gradaccum.on_torch.adapter.probes import Trace, mixing, part_differs
from gradaccum.on_torch.adapter.rng import RowwiseRng
from gradaccum.on_torch.batch import BatchDims, leaves, map_leaves, number_of_rows, take
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.on_torch.private import graph_of, run_backward
from gradaccum.on_torch.reach import held_generators
from gradaccum.on_torch.state import as_found, same
from gradaccum.torch.batch_norm import frozen
from gradaccum.torch.chunking.two_passes import (
    Inputs,
    accelerators,
    attributes_of,
    gradient_leaf,
    is_floating,
    tensors_of,
)
from gradaccum.torch.module_state import Contents, ModuleContents, gradients_kept, left_as_found
from gradaccum.torch.proof import counting_layers, eager

logger = logging.getLogger("gradaccum")

ROWS = 8
"""Rows that are looked at, at most."""

_proven: list[nn.Module] = []


def proving() -> bool:
    """Whether a proof is running."""
    return bool(_proven)


def prove(
    module: nn.Module,
    in_micro_batches: Callable[[Inputs, list[int]], Any],
    inputs: Inputs,
    batch_dims: BatchDims,
    *,
    neutral: bool,
    exact: bool = False,
    trims: bool = False,
) -> None:
    """Prove that micro-batches give the outputs and gradients of a few of these rows at once. Moves nothing.

    Random numbers follow their rows, so dropout is no difference. `in_micro_batches` calls the module on some inputs in
    micro-batches of these sizes; `neutral`: BatchNorm normalises as in eval mode. What else isn't the large batch's is
    a warning.
    """
    name, causes = type(module).__name__, counting_layers([module])
    if causes:
        raise NotEquivalentError(causes[0].message)
    rows = number_of_rows(inputs, batch_dims)
    if rows < 2:
        raise ValueError(f"Comparing micro-batches with all rows at once needs at least two rows. Received: {rows}.")

    def attempt(count: int) -> Comparison[_Runner]:
        picked = torch.linspace(0, rows - 1, count).round().long()
        with torch.no_grad():
            few = map_leaves(_leaf_like, take(inputs, picked, batch_dims), inputs)
        generators = held_generators(module, *few)
        with _alone(module, few, generators):
            how = {"generators": generators, "exact": exact, "neutral": neutral, "trims": trims}
            runner = _Runner(module, in_micro_batches, few, count, batch_dims, **how)
            # Single rows are cut as much as any micro-batch cuts them; 5 and 3 are in step with no period.
            sizes = [1] * count if trims or count == 2 else [count // 2 + 1, count - count // 2 - 1]
            comparison = Comparison(runner, [(range(count), sizes)], "raise")
            comparison.judged()
            if wrong := [difference for difference in comparison.wrong if difference.part != "buffer"]:
                runner.rng.check(name)
                if comparison.unrepeated:
                    raise NotEquivalentError(
                        f"{name} gives another result for the same {count} rows each time, by a relative error of "
                        f"{max(one.error for one in comparison.unrepeated):.2g}, with the same random state: look for "
                        "state of its own, or randomness that torch, Python and NumPy don't seed."
                    )
                listing = "\n".join(
                    f"  {'gradient of ' * (d.part == 'gradient')}{d.name}   relative error {d.error:.3g}   "
                    f"({runner.tolerance:g} allowed)"
                    for d in wrong
                )
                raise NotEquivalentError(
                    f"{name} is not per-row: {count} rows at once differ from the same rows in micro-batches of "
                    f"{' and '.join(map(str, dict.fromkeys(sizes)))}.\n{listing}\n{runner.culprit(sizes)}"
                )
        return comparison

    proven = with_fewer_rows(attempt, min(rows, ROWS), 2, is_out_of_memory)
    proven.runner.judge_what_is_left([difference.name for difference in proven.wrong])


@contextlib.contextmanager
def _alone(module: nn.Module, few: Inputs, generators: Sequence[Any]) -> Iterator[None]:
    """Nothing around a module counts while it is proven, and nothing of it is moved."""
    devices = accelerators([*tensors_of(few), *module.parameters()])
    _proven.append(module)
    try:
        with (
            left_as_found({"": module}, [], devices, generators),
            eager(),
            # In place of those around, a checkpoint's say. Detached, because a saved output would keep itself alive.
            torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor),
            torch.enable_grad(),
        ):
            yield
    finally:
        _proven.pop()


def _leaf_like(leaf: Any, other: Any) -> Any:
    """A tensor as a leaf that needs a gradient as another one does."""
    return leaf.detach().requires_grad_(other.requires_grad) if isinstance(leaf, Tensor) else leaf


class _Runner(TorchRunner):
    """Runs the same rows at once and in micro-batches, from the same state."""

    def __init__(
        self, module: nn.Module, in_micro_batches: Any, few: Inputs, rows: int, batch_dims: BatchDims, **how: Any
    ) -> None:
        self.module, self._in_micro_batches, self.few, self._batch_dims = module, in_micro_batches, few, batch_dims
        self._exact, self._neutral = how["exact"], how["neutral"]
        self._place = next(iter(accelerators([*module.parameters(), *tensors_of(few)])), torch.device("cpu"))
        # Where rows are not what is cut, noise that belongs to no row is replaced by its mean at once.
        super().__init__(RowwiseRng(rows, how["generators"], neutral=how["exact"] or how["trims"]), self._place, rows)
        self.state = ModuleContents(module)
        self._alive: list[tuple[Tensor, str]] = []
        """What has a graph and is held by somebody when the rows have run at once, and where it was made."""
        self._outside: list[Tensor] = []
        """Tensors that get gradients, are neither parameters nor inputs, and outlive the call."""
        self._attributes: dict[str, str] = {}
        """Attributes that passes have assigned, by the names of what is in them."""
        self._with_graph: set[str] = set()
        """Those in which the rows at once have left a tensor with a graph."""
        self._cotangents: list[Tensor] = []
        self._watched: list[tuple[str, Tensor | None, Tensor | None]] | None = None
        """Values of gradients, and the tensors that came as these, where that is looked at."""

    def tensors(self) -> list[Tensor]:
        return [*self.state.parameters, *filter(is_floating, tensors_of(self.few))]

    def run(self, way: Way | None) -> Outcome:
        made = _Made(self.module)
        outcome, outside, with_graph = self._result(None if way is None else [*way[1]], made)
        if way is None:
            self._with_graph = with_graph
            if made.alive() or outside:
                gc.collect()
            self._alive = made.alive()
            self._outside = [leaf for reference in outside if (leaf := reference()) is not None]
        return outcome

    def _result(self, sizes: list[int] | None, made: _Made) -> tuple[Outcome, list[TensorWeakRef], set[str]]:
        """Outputs, gradients, and what is left behind. Afterwards the module is as it was."""
        leaf_of = {id(p): gradient_leaf(p) for p in self.state.parameters if p.requires_grad}
        few = made.inputs = map_leaves(_leaf_like, self.few, self.few)
        names = {id(p): name for name, p in self.module.named_parameters()}
        wanted = {names.get(key, f"a hidden parameter ({n})"): leaf for n, (key, leaf) in enumerate(leaf_of.items())}
        wanted |= {f"the input {path}": t for path, t in leaves(few) if is_floating(t) and t.requires_grad}
        with self.state.restored(leaf_of), as_found(self.state.modules, self._place):
            before = attributes_of(self.module)
            with self._passes(self._neutral), made:
                outputs = {f"output{path}": t for path, t in leaves(self._outputs(few, sizes)) if is_floating(t)}
                known = set(map(id, wanted.values()))
                nodes = graph_of(*[tensor.grad_fn for tensor in outputs.values()])
                reached = [leaf for node in nodes if (leaf := getattr(node, "variable", None)) is not None]
                outside = [leaf for leaf in reached if id(leaf) not in known]
                with gradients_kept([*outside, *self._outside]):
                    self._backward([*outputs.values()])
            left = {n: value for n, value in attributes_of(self.module).items() if value is not before.get(n)}
            with_graph = {n for n, value in left.items() if any(t.grad_fn is not None for t in tensors_of(value))}
            buffers = self._buffers() | self._copies(left)
            del left
        outputs = {name: tensor.detach().clone() for name, tensor in outputs.items()}
        gradients = self._gradients(wanted)
        return Outcome(outputs, gradients, buffers), [*map(TensorWeakRef, outside)], with_graph

    def _gradients(self, leaves: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """Copies of them: the next backward pass may fill the same tensors."""
        found = {name: leaf.grad for name, leaf in leaves.items()}
        gradients = {name: None if grad is None else grad.to_dense().clone() for name, grad in found.items()}
        if self._watched is not None:
            self._watched += [(name, gradients[name], grad) for name, grad in found.items()]
        return gradients

    def _copies(self, attributes: Mapping[str, Any]) -> dict[str, Tensor]:
        """Of what is in attributes that a pass has assigned."""
        found = [(name + path, name, leaf) for name, value in attributes.items() for path, leaf in leaves(value)]
        self._attributes |= {path: name for path, name, _ in found}
        return {path: torch.as_tensor(leaf).detach().clone() for path, _, leaf in found}

    @contextlib.contextmanager
    def _passes(self, neutral: bool) -> Iterator[None]:
        """Passes run, with random numbers of their own."""
        with frozen(self.module, lends=True) if neutral else contextlib.nullcontext(), self.rng:
            try:
                yield
            finally:
                self.rng.rewind()

    def _buffers(self) -> dict[str, Tensor]:
        """Copies of them; of BatchNorm's where they are the large batch's."""
        return {
            f"{path}.{name}" if path else name: buffer.detach().clone()
            for path, layer in self.module.named_modules()
            if self._exact or not isinstance(layer, _BatchNorm)
            for name, buffer in layer.named_buffers(recurse=False)
        }

    def _outputs(self, few: Inputs, sizes: list[int] | None) -> Any:
        self.rng.start(None)
        if sizes is None:
            return self.module(*few.args, **few.kwargs)
        if self._exact:  # where the whole module runs in segments, there is no noise that follows rows
            return self._in_micro_batches(few, sizes)
        order = itertools.cycle(torch.arange(self.rows).split(sizes))
        handle = self.module.register_forward_pre_hook(lambda *_: self.rng.start(next(order)), prepend=True)
        try:
            return self._in_micro_batches(few, sizes)
        finally:
            handle.remove()

    def _backward(self, outputs: list[Tensor]) -> None:
        if not self._cotangents:
            # Without random numbers, which the module's own are compared by.
            counted = [torch.arange(t.numel(), dtype=torch.float64).view(t.shape) for t in outputs]
            self._cotangents = [(1 + 12.9898 * n).cos().to(t.device, t.dtype) for n, t in zip(counted, outputs)]
        roots = [(t, one) for t, one in zip(outputs, self._cotangents, strict=True) if t.requires_grad]
        if roots:
            run_backward([t for t, _ in roots], [one for _, one in roots])

    def judge_what_is_left(self, moved: Sequence[str]) -> None:
        """Warn of what differs besides outputs and gradients. Raises a NotEquivalentError if a graph leaves with it."""
        name = type(self.module).__name__
        if escaped := self._escaped(moved):
            raise NotEquivalentError(
                f"{name} keeps {escaped}. In micro-batches only the last one's is left, and it gets no gradient. "
                "Return it from forward with a row for each row of the inputs, and reduce it outside."
            )
        if self._outside:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in self._outside)
            logger.warning(
                "A chunked %s passes gradients to tensors that are neither its parameters nor its inputs, of shape "
                "%s. Their `.grad` is added to once per micro-batch, so hooks run for each, and "
                "torch.autograd.grad doesn't return them. Register them as parameters, or pass them as inputs.",
                name,
                shapes,
            )
        if buffers := [one for one in moved if one not in self._attributes]:
            logger.warning(
                "These buffers of a chunked %s move to the mean of their values after each micro-batch, which is not "
                "their value after one pass over all rows: %s. gradaccum.torch.combine_buffers sets another rule.",
                name,
                _listed(buffers),
            )
        if left := [*dict.fromkeys(self._attributes[one] for one in moved if one in self._attributes)]:
            logger.warning(
                "These attributes of a chunked %s are changed by every micro-batch, so their values differ from those "
                "after one pass over all rows: %s. Return what you need of them, with a row for each row.",
                name,
                _listed(left),
            )

    def _escaped(self, moved: Sequence[str]) -> str:
        """The tensor with a graph that is left besides the outputs, if there is one."""
        for name in moved:  # where it is the same, it is made of parameters alone, as a normed weight
            if self._attributes.get(name) in self._with_graph:
                return f"a tensor with a graph as its attribute {self._attributes[name]!r}"
        for tensor, path in reversed(self._alive):
            made = f"made in {path!r} ({type(self.module.get_submodule(path)).__name__})" if path else "made in forward"
            return f"a tensor of shape {tuple(tensor.shape)} with a graph, {made}, in a hook, a container or a closure"
        return ""

    def culprit(self, sizes: Sequence[int]) -> str:
        """The first layer whose outputs differ where its inputs don't, by running the module on each micro-batch."""
        if name := self._refilled(sizes):
            return (
                f"Its backward pass returns the same tensor each time as the gradient of {name!r}, and fills it again, "
                "so the next micro-batch overwrites the sum. torch.cuda.make_graphed_callables and CUDA graphs do so. "
                "Return a clone of it, or graph the module inside of each micro-batch."
            )
        whole = self._trace(None)
        for piece in torch.arange(self.rows).split(list(sizes)):
            for path in filter(None, mixing(whole, self._trace(piece), part_differs(self.rows, piece), sums=False)):
                layer = self.module.get_submodule(path)
                advice = ' Use batch_norm="exact", or GroupNorm.' if isinstance(layer, _BatchNorm) else ""
                return (
                    f"{path!r} is the first layer whose outputs depend on other rows: a {type(layer).__name__}.{advice}"
                )
        return (
            "It happens outside its layers. Compute what looks across rows after the chunked module, on the whole "
            "batch; use GroupNorm in place of torch.nn.functional.batch_norm."
        )

    def _refilled(self, sizes: Sequence[int]) -> str:
        """A parameter or input whose gradient the next backward pass overwrites, if there is one."""
        watched: list[tuple[str, Tensor | None, Tensor | None]] = []
        self._watched = watched
        self.run(None)
        self._watched = None
        self.run(([*range(self.rows)], sizes))
        pairs = [(name, value, grad) for name, value, grad in watched if value is not None and grad is not None]
        return next((name for name, value, grad in pairs if not same(grad.to_dense(), value)), "")

    def _trace(self, piece: Tensor | None) -> Trace:
        few = self.few if piece is None else take(self.few, piece, self._batch_dims)
        attributes = Contents(self.module.modules())
        try:
            with as_found(self.state.modules, self._place), self._passes(self._exact or self._neutral):
                self.rng.start(piece)
                return Trace(self.module).run(lambda: self.module(*few.args, **few.kwargs))
        finally:
            attributes.put_back()  # the trace's hooks among them


def _listed(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


class _Made(TorchFunctionMode):
    """Every tensor that a pass makes with a graph, and the module that returned it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inputs: Any = None  # kept, as are the containers among them, in which a module may have left something
        self._paths = {layer: path for path, layer in module.named_modules()}
        self._found: list[tuple[TensorWeakRef, str]] = []

    def __enter__(self) -> _Made:
        self._handle = register_module_forward_hook(
            lambda layer, args, output: self._note(output, self._paths.get(layer, ""))
        )
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._handle.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(result, "")
        return result

    def _note(self, result: Any, path: str) -> None:
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                self._found.append((TensorWeakRef(value), path))

    def alive(self) -> list[tuple[Tensor, str]]:
        """Those that somebody holds, in the order in which they were made, each with the innermost module."""
        found: dict[int, tuple[Tensor, str]] = {}
        for reference, path in self._found:
            tensor = reference()
            if tensor is not None and not found.get(id(tensor), (tensor, ""))[1]:
                found[id(tensor)] = tensor, path
        return list(found.values())
