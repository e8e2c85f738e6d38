"""The first call of a chunked module proves itself: a few rows at once, and in micro-batches through its two passes."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef

from gradaccum.core.equivalence import Difference
from gradaccum.core.proof import Comparison, Outcome, with_fewer_rows
from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch.adapter.arrays import TorchRunner
from gradaccum.on_torch.adapter.probes import Trace, mixing, part_differs
from gradaccum.on_torch.adapter.rng import RowwiseRng
from gradaccum.on_torch.batch import BatchDims, leaves, map_leaves, number_of_rows, take
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.on_torch.private import graph_of, run_backward
from gradaccum.on_torch.random_state import all_generators, is_generator, kept
from gradaccum.on_torch.state import as_found
from gradaccum.torch.batch_norm import in_eval_mode
from gradaccum.torch.buffers import Contents, ModuleContents, gradients_kept
from gradaccum.torch.chunking.two_passes import (
    Call,
    Inputs,
    accelerators,
    attributes_of,
    gradient_leaf,
    is_floating,
    tensors_of,
)
from gradaccum.torch.proof import counting_layers, eager

ROWS = 8
"""Rows that are looked at, at most."""

_proven: list[nn.Module] = []


def proving() -> bool:
    """Whether a proof is running."""
    return bool(_proven)


class Findings(NamedTuple):
    """What a proof has found out besides that outputs and gradients are the large batch's."""

    remarks: list[str]
    """What isn't the large batch's: sentences."""
    functional: list[str]
    """Modules that call `torch.nn.functional.batch_norm` and are no BatchNorm."""


def prove(
    module: nn.Module,
    call_of: Callable[[Inputs, list[int]], Call],
    inputs: Inputs,
    batch_dims: BatchDims,
    *,
    exact: bool,
    batch_norm: bool,
    trims: bool = False,
) -> Findings:
    """Prove that micro-batches give the outputs and gradients of a few of these rows at once. Moves nothing.

    Random numbers follow their rows, so dropout is no difference. `call_of` makes the call of the module on some inputs
    in micro-batches of these sizes.
    """
    name, causes = type(module).__name__, counting_layers([module])
    if causes:
        raise NotEquivalentError(causes[0].message)
    rows = number_of_rows(inputs, batch_dims)
    if rows < 2:
        raise ValueError(f"Two rows at least are needed to compare two chunkings. Received: {rows}.")

    def attempt(count: int) -> tuple[_Runner, list[Difference]]:
        picked = torch.linspace(0, rows - 1, count).round().long()
        with torch.no_grad():
            few = map_leaves(_leaf_like, take(inputs, picked, batch_dims), inputs)
        with _alone(module, few):
            runner = _Runner(module, call_of, few, count, exact, batch_norm, trims)
            # Single rows are cut as much as any micro-batch cuts them; 5 and 3 are in step with no period.
            sizes = [1] * count if trims or count == 2 else [count // 2 + 1, count - count // 2 - 1]
            comparison = Comparison(runner, range(count), [(range(count), sizes)], "raise")
            found = comparison.beyond_rounding(comparison.differences() or [])
            wrong = [difference for difference in found if difference.part != "buffer"]
            if wrong:
                runner.rng.check(name)
                of = {"loss": "", "gradient": "gradient of "}
                listing = "\n".join(
                    f"  {of[d.part]}{d.name}   relative error {d.error:.3g}   ({runner.tolerance:g} allowed)"
                    for d in wrong
                )
                raise NotEquivalentError(
                    f"{name} is not per-row: {count} rows at once differ from the same in micro-batches of "
                    f"{' and '.join(map(str, dict.fromkeys(sizes)))}.\n{listing}\n{runner.culprit(sizes, batch_dims)}"
                )
        return runner, found

    runner, found = with_fewer_rows(attempt, min(rows, ROWS), 2, is_out_of_memory)
    moved = [difference.name for difference in found]
    if escaped := runner.escaped(moved):
        raise NotEquivalentError(
            f"{name} keeps {escaped}. In micro-batches it is the last one's alone, and without a gradient. "
            "Return it from forward, with a row for every row, and reduce over them outside."
        )
    return Findings(runner.remarks(moved), runner.whole.functional)


@contextlib.contextmanager
def _alone(module: nn.Module, few: Inputs) -> Iterator[None]:
    """Nothing around a module counts while it is proven, and nothing of it is moved."""
    generators = all_generators(accelerators([*tensors_of(few), *module.parameters()]))
    _proven.append(module)
    attributes = Contents(module.modules())
    try:
        with (
            kept([*generators, *_generators_of(module, few)]),
            eager(),
            # In place of those around, a checkpoint's say. Detached, because a saved output would keep itself alive.
            torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor),
            torch.enable_grad(),
        ):
            yield
    finally:
        attributes.put_back()
        _proven.pop()


def _generators_of(module: nn.Module, inputs: Inputs) -> list[Any]:
    """Generators of the user's own that the module may draw from."""
    return [*ModuleContents(module).generators, *(leaf for _, leaf in leaves(inputs) if is_generator(leaf))]


def _leaf_like(leaf: Any, other: Any) -> Any:
    """A tensor as a leaf that needs a gradient as another one does."""
    return leaf.detach().requires_grad_(other.requires_grad) if isinstance(leaf, Tensor) else leaf


class _Runner(TorchRunner):
    """Runs the same rows whole and in micro-batches, from the same state."""

    def __init__(
        self, module: nn.Module, call_of: Any, few: Inputs, rows: int, exact: bool, batch_norm: bool, trims: bool
    ) -> None:
        self.module, self.call_of, self.few, self.rows = module, call_of, few, rows
        self.exact, self.batch_norm = exact, batch_norm
        found = [tensor.device for tensor in (*module.parameters(), *tensors_of(few)) if tensor.device.type != "cpu"]
        # Where rows are not what is cut, noise that belongs to no row is replaced by its mean at once.
        super().__init__(RowwiseRng(rows, neutral=exact or trims), found[0] if found else torch.device("cpu"))
        self.rng.holds(*_generators_of(module, few))
        self.state = ModuleContents(module)
        self.whole: Watch
        self.alive: list[tuple[Tensor, str]] = []
        """What has a graph and is held by somebody when the rows have run at once, and where it was made."""
        self.outside: list[Tensor] = []
        """Tensors that get gradients, are neither parameters nor inputs, and outlive the call."""
        self.attributes: dict[str, str] = {}
        """Attributes that passes have assigned, by the names of what is in them."""
        self._cotangents: list[Tensor] = []

    def run(self, rows: Sequence[int], sizes: Sequence[int] | None) -> Outcome:
        outcome, watch = self._result(sizes)
        if sizes is not None:
            return outcome
        self.whole = watch
        if watch.alive() or watch.outside:
            gc.collect()
        self.alive = watch.alive()
        self.outside = [leaf for reference in watch.outside for leaf in [reference()] if leaf is not None]
        return outcome

    def at_once(self, rows: Sequence[int]) -> Outcome:
        return self._result(None)[0]

    def tensors(self) -> list[Tensor]:
        return [*self.state.parameters, *filter(is_floating, tensors_of(self.few))]

    def _result(self, sizes: Sequence[int] | None) -> tuple[Outcome, Watch]:
        """Outputs, gradients, and what is left behind. Afterwards the module is as it was."""
        leaf_of = {id(p): gradient_leaf(p) for p in self.state.parameters if p.requires_grad}
        few = map_leaves(_leaf_like, self.few, self.few)
        wanted, watch = self._wanted(leaf_of, few), Watch(self.module, few)
        with self.state.restored(leaf_of), as_found(self.state.modules, self.device):
            before = attributes_of(self.module)
            with self._watching(watch, neutral=not (self.exact or self.batch_norm)):
                outputs = {f"output{path}": t for path, t in leaves(self._outputs(few, sizes)) if is_floating(t)}
                outside = _leaves_besides(outputs.values(), wanted.values())
                with gradients_kept([*outside, *self.outside]):
                    self._backward([*outputs.values()])
            watch.outside = [TensorWeakRef(leaf) for leaf in outside]
            left = {n: value for n, value in attributes_of(self.module).items() if value is not before.get(n)}
            buffers = self._buffers() | self._left(left, watch)
            del left
        outputs = {name: tensor.detach().clone() for name, tensor in outputs.items()}
        gradients = {name: None if leaf.grad is None else leaf.grad.to_dense() for name, leaf in wanted.items()}
        return Outcome(outputs, gradients, buffers), watch

    def _wanted(self, leaf_of: Mapping[int, Tensor], few: Inputs) -> dict[str, Tensor]:
        """What gets gradients: parameters, and tensors in the inputs."""
        names = {id(p): name for name, p in self.module.named_parameters()}
        wanted = {names.get(key, f"a hidden parameter ({n})"): leaf for n, (key, leaf) in enumerate(leaf_of.items())}
        return wanted | {f"the input {path}": t for path, t in leaves(few) if is_floating(t) and t.requires_grad}

    def _left(self, left: Mapping[str, Any], watch: Watch) -> dict[str, Tensor]:
        """Copies of what is in the attributes that a pass has assigned."""
        found = {}
        for name, value in left.items():
            for path, leaf in leaves(value):
                self.attributes[name + path] = name
                found[name + path] = torch.as_tensor(leaf).detach().clone()
            if any(tensor.grad_fn is not None for tensor in tensors_of(value)):
                watch.with_graph.add(name)
        return found

    @contextlib.contextmanager
    def _watching(self, watch: Watch, *, neutral: bool) -> Iterator[None]:
        """A pass runs, with random numbers of its own. `neutral`: BatchNorm normalises as in eval mode."""
        watch.neutral = neutral
        with in_eval_mode(self.module) if neutral else contextlib.nullcontext(), watch, self.rng:
            try:
                yield
            finally:
                self.rng.rewind()

    def _buffers(self) -> dict[str, Tensor]:
        """Copies of them; of BatchNorm's where they are the large batch's."""
        return {
            f"{path}.{name}" if path else name: buffer.detach().clone()
            for path, layer in self.module.named_modules()
            if self.exact or not isinstance(layer, _BatchNorm)
            for name, buffer in layer.named_buffers(recurse=False)
        }

    def _outputs(self, few: Inputs, sizes: Sequence[int] | None) -> Any:
        self.rng.start(None)
        if sizes is None:
            return self.module(*few.args, **few.kwargs)
        order = itertools.cycle(torch.arange(self.rows).split(list(sizes)))
        handle = self.module.register_forward_pre_hook(lambda *_: self.rng.start(next(order)), prepend=True)
        try:
            if self.exact:  # where the whole module runs in segments, there is no noise that follows rows
                handle.remove()
            return self.call_of(few, list(sizes)).run(tensors_of(few), 0, differentiated=True)
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

    def remarks(self, moved: Sequence[str]) -> list[str]:
        """What isn't the large batch's: sentences."""
        kind, found = type(self.module).__name__, []
        left = list(dict.fromkeys(self.attributes[name] for name in moved if name in self.attributes))
        moved = [name for name in moved if name not in self.attributes]
        if self.outside:
            found.append(
                f"A chunked {kind} passes gradients to tensors that are neither its parameters "
                f"nor its inputs, of shape {', '.join(str(tuple(t.shape)) for t in self.outside)}: they get them in "
                "`.grad` micro-batch by micro-batch, so hooks run for each, and torch.autograd.grad doesn't see them. "
                "Register them as parameters, or pass them as inputs."
            )
        if moved:
            found.append(
                f"These buffers of a chunked {kind} move to the mean of where its micro-batches "
                f"take them, which is not where all rows at once take them: {_listed(moved)}."
            )
        if left:
            found.append(
                f"These attributes of a chunked {kind} are what its micro-batches make of them "
                f"one after the other, not what all rows at once do: {_listed(left)}."
            )
        return found

    def escaped(self, moved: Sequence[str]) -> str:
        """The tensor with a graph that is left besides the outputs, if there is one."""
        for name in moved:  # where it is the same, it is made of parameters alone, as a normed weight
            if self.attributes.get(name) in self.whole.with_graph:
                return f"a tensor with a graph as its attribute {self.attributes[name]!r}"
        for tensor, path in reversed(self.alive):
            made = f"made in {path!r} ({type(self.module.get_submodule(path)).__name__})" if path else "made in forward"
            return f"a tensor of shape {tuple(tensor.shape)} with a graph, {made}, in a hook, a container or a closure"
        return ""

    def culprit(self, sizes: Sequence[int], batch_dims: BatchDims) -> str:
        """The first layer whose outputs differ where its inputs don't, by running the module on each micro-batch."""
        pieces = [None, *torch.arange(self.rows).split(list(sizes))]
        whole, *parts = [self._trace(piece, batch_dims) for piece in pieces]
        cut = [(part, part_differs(self.rows, piece)) for part, piece in zip(parts, pieces[1:]) if piece is not None]
        found = [mixing(whole, part, differ, sums=False) for part, differ in cut]
        for path in (path for paths in found for path in paths if path):
            layer = self.module.get_submodule(path)
            advice = ' Use batch_norm="exact", or GroupNorm.' if isinstance(layer, _BatchNorm) else ""
            return f"{path!r} is the first layer of which that is so: a {type(layer).__name__}.{advice}"
        if functional := self.whole.functional:
            return f"torch.nn.functional.batch_norm is called in {_listed(functional)}: use GroupNorm there."
        return "It happens outside its layers. Do what looks across rows after the chunked module, on the whole batch."

    def _trace(self, piece: Tensor | None, batch_dims: BatchDims) -> Trace:
        few = self.few if piece is None else take(self.few, piece, batch_dims)
        attributes, neutral = Contents(self.module.modules()), self.exact or not self.batch_norm
        try:
            with as_found(self.state.modules, self.device), self._watching(Watch(self.module, few), neutral=neutral):
                self.rng.start(piece)
                return Trace(self.module).run(lambda: self.module(*few.args, **few.kwargs))
        finally:
            attributes.put_back()  # the trace's hooks among them


def _leaves_besides(outputs: Iterable[Tensor], known: Iterable[Tensor]) -> list[Tensor]:
    """The leaves of these tensors' graphs that are not known."""
    inside, nodes = set(map(id, known)), graph_of(*[tensor.grad_fn for tensor in outputs])
    reached = [getattr(node, "variable", None) for node in nodes]
    return [leaf for leaf in reached if leaf is not None and id(leaf) not in inside]


def _listed(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


class Watch(TorchFunctionMode):
    """What a forward pass does inside besides returning its outputs: every tensor that is made with a graph."""

    def __init__(self, module: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.neutral = False
        self.inputs = inputs  # kept, as are the containers among them, in which a module may have left something
        self.outside: list[TensorWeakRef] = []
        self.with_graph: set[str] = set()
        """Attributes that the pass has left a tensor with a graph in."""
        self.functional: list[str] = []
        """Modules that call `torch.nn.functional.batch_norm` and are no BatchNorm."""
        self._modules = {layer: path for path, layer in module.named_modules()}
        self._made: list[tuple[TensorWeakRef, str]] = []
        self._running: list[nn.Module] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Watch:
        self._handles = [
            register_module_forward_pre_hook(lambda layer, args: self._running.append(layer)),
            register_module_forward_hook(self._ends, always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def _ends(self, layer: nn.Module, args: Any, output: Any) -> None:
        while self._running and self._running.pop() is not layer:
            pass  # what has been left by an exception, such as those that end recomputations
        self._note(output, layer)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        layer = self._running[-1] if self._running else None
        if func is F.batch_norm:
            given = dict(zip(("input", "running_mean", "running_var", "weight", "bias", "training"), args))
            given.update(kwargs)
            path = self._modules.get(layer, "")
            if given.get("training") and not isinstance(layer, _BatchNorm):
                self.functional += [] if path in self.functional else [path]
                if self.neutral:
                    return _normalised_alone(**given)
        result = func(*args, **kwargs)
        self._note(result, layer)
        return result

    def _note(self, result: Any, layer: nn.Module | None) -> None:
        path = self._modules.get(layer, "")
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                self._made.append((TensorWeakRef(value), path))

    def alive(self) -> list[tuple[Tensor, str]]:
        """The tensors with a graph that somebody holds, and the module that made each, in order."""
        found: dict[int, tuple[Tensor, str]] = {}
        for reference, path in self._made:
            tensor = reference()
            if tensor is not None:
                found.setdefault(id(tensor), (tensor, path))
        return list(found.values())


def _normalised_alone(input: Tensor, running_mean: Any = None, running_var: Any = None, **given: Any) -> Tensor:
    """Batch normalisation in eval mode; without running statistics, with mean 0 and variance 1."""
    channels = input.shape[1]
    mean = input.new_zeros(channels) if running_mean is None else running_mean
    variance = input.new_ones(channels) if running_var is None else running_var
    weight, bias, eps = given.get("weight"), given.get("bias"), given.get("eps", 1e-5)
    return F.batch_norm(input, mean, variance, weight, bias, False, 0.0, eps)
