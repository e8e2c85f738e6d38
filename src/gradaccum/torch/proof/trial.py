"""A copy of what the user trains, on which a batch can be run at once or in micro-batches, as often as needed."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradaccum.core.proof import Outcome
from gradaccum.on_torch.adapter.arrays import TorchRunner
from gradaccum.on_torch.adapter.probes import Outputs, Trace
from gradaccum.on_torch.adapter.rng import RowwiseRng
from gradaccum.on_torch.batch import Batch, BatchDims
from gradaccum.torch.batch_norm import BatchNormChoice, frozen
from gradaccum.torch.buffers import ModuleState
from gradaccum.torch.loss import LossAccumulator, Objective, Terms, Totals, accumulator, counted

__all__ = ["Accumulate", "Trial"]

Accumulate = Callable[[Objective, Batch, Sequence[int], BatchNormChoice], Tensor]
"""Runs a batch in micro-batches of these sizes, as training does. Leaves the finished gradients in the parameters, and
the buffers as an update leaves them; returns the loss."""


class Trial(TorchRunner):
    """Runs a batch on fresh copies of model and loss, with the same random numbers for the same rows each time.

    Micro-batches are added up here, or by `accumulate` where BatchNorm is exact or pooled.
    """

    def __init__(
        self,
        objective: Objective,
        batch: Batch,
        accumulate: Accumulate | None,
        *,
        device: torch.device,
        dtype: torch.dtype | None = torch.float64,
        batch_norm: BatchNormChoice = "warn",
    ) -> None:
        self.original, self.batch_norm = objective, batch_norm
        self.notes: list[str] = []
        """What the comparison had to leave out."""
        self.accumulate = accumulate if batch_norm in ("exact", "pooled") else None

        def converted(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            floating = dtype if leaf.is_floating_point() else None
            return leaf.detach().clone().to(device=device, dtype=floating).requires_grad_(leaf.requires_grad)

        def convert(thing: Any) -> Any:
            floating = isinstance(thing, nn.Module) or thing.is_floating_point()
            return thing.to(device=device, dtype=dtype if floating else None)

        self.batch, self.rows = batch.map(converted), batch.rows
        super().__init__(RowwiseRng(self.rows, neutral=self.accumulate is not None), device)
        copies = _Copies({}, convert)
        things = _bare(objective.model), objective.loss_fn, objective.compute_loss, objective.weight
        self._things = copies.of_all(things)
        self.hooks = copies.of_hooks(objective)
        """Hooks on the gradients of parameters, by the parameter's name."""
        parameters = [p for thing in self._things if isinstance(thing, nn.Module) for p in thing.parameters()]
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in parameters):
            raise ValueError("The model has lazy layers whose sizes aren't known yet: run it once before the check.")
        self._shared = {id(p): p for p in parameters if p.requires_grad}
        if not self._shared:
            raise ValueError("No parameter of the model requires a gradient: there is nothing to compare.")

    def tensors(self) -> list[Tensor]:
        """What is trained."""
        return list(self._shared.values())

    def on(self, batch: Batch) -> Trial:
        """The same trial with another batch, of as many rows."""
        other = copy.copy(self)
        other.batch = batch
        return other

    @contextlib.contextmanager
    def _fresh(self, rows: Tensor | None = None, batch_dims: BatchDims | None = None) -> Iterator[Objective]:
        """An objective on a fresh copy of everything but the trained parameters, whose gradients start empty.

        Random numbers are those of these rows; with None, the large batch's.
        """
        for parameter in self.tensors():
            parameter.grad = None
        model, loss_fn, compute_loss, weight = _Copies({**self._shared}).of_all(self._things)
        objective = Objective(
            model,
            loss_fn=loss_fn,
            compute_loss=compute_loss,
            weight=weight,
            reduction=self.original.reduction,
            batch_dims=self.original.batch_dims if batch_dims is None else batch_dims,
        )
        objective.found = self.original.found
        freezing = frozen(objective.model) if self.batch_norm == "frozen" else contextlib.nullcontext()
        self.rng.holds(objective.model, objective.evaluate)
        with freezing, torch.enable_grad(), self.rng:
            self._state = ModuleState(objective.modules)
            self.rng.start(rows)
            yield objective

    def _taken(self, rows: Tensor | None, batch: Batch | None = None) -> Batch:
        """These rows (None: all) in tensors of their own."""
        batch = self.batch if batch is None else batch
        return (batch if rows is None else batch.take(rows)).map(
            lambda leaf: leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        )

    def _outcome(self, objective: Objective, loss: Tensor) -> Outcome:
        gradients = {
            name: None if p.grad is None else p.grad.detach().to_dense()
            for prefix, module in objective.modules.items()
            for name, p in module.named_parameters(prefix)
            if p.requires_grad
        }
        for parameter in self.tensors():
            parameter.grad = None
        return Outcome({"loss": loss.detach()}, gradients, self._state.tensors())

    def run(self, rows: Sequence[int], sizes: Sequence[int] | None, batch_dims: BatchDims | None = None) -> Outcome:
        """The rows at once (None), or in micro-batches, which are weighed as `TrainStep` would weigh them."""
        if sizes is None:
            return self._at_once()
        batch = self.batch if batch_dims is None else Batch(self.batch.tree, batch_dims)
        parts = torch.tensor(rows).split(list(sizes))
        with self._fresh(batch_dims=batch_dims) as objective:
            if self.accumulate is not None:
                loss = self.accumulate(objective, self._taken(None, batch), list(sizes), self.batch_norm)
                return self._outcome(objective, loss)
            window = accumulator(objective, batch)
            if window.named and window.total is None:
                window = LossAccumulator(objective, batch, self._totals(parts, batch, batch_dims), named=True)
            for part in parts:
                self.rng.start(part)
                weighted = window.forward(self._taken(part, batch))
                if weighted.loss is not None:
                    window.backward(weighted, weighted.loss)
                window.add(weighted)
            divisor = 1.0 if window.divisor is None else float(window.divisor)
            for parameter in self.tensors():
                if parameter.grad is not None:
                    parameter.grad /= divisor
            return self._outcome(objective, window.loss)

    def _at_once(self) -> Outcome:
        with self._fresh() as objective:
            loss = objective.whole(self._taken(None))
            if not loss.requires_grad:
                raise ValueError(
                    "The loss has no gradient: it was computed without gradients (under torch.no_grad(), or by "
                    ".item(), detach() or argmax), or doesn't depend on the model."
                )
            loss.backward()
            outcome = self._outcome(objective, loss)
        if all(gradient is None for gradient in outcome.gradients.values()):
            raise ValueError(
                "The loss doesn't reach the parameters of `model`. compute_loss(model, *batch) must use the model that "
                "it is given: the check runs a copy."
            )
        return outcome

    def _totals(self, parts: Sequence[Tensor], batch: Batch, batch_dims: BatchDims | None) -> Totals:
        """What each of several losses divides by, as `TrainStep` counts it."""
        found: list[Terms] = []
        with self._fresh(batch_dims=batch_dims) as objective, torch.no_grad():
            for rows in parts:
                self.rng.start(rows)
                terms = objective.evaluate(self._taken(rows, batch))[1]
                assert isinstance(terms, dict)
                found.append(terms)
            return counted(objective, found)

    def replace_noise(self) -> bool:
        """Whether random numbers that belong to no row are their mean from now on."""
        what = ", ".join(sorted(self.rng.unreplayed))
        replaced = super().replace_noise()
        if replaced:
            self.notes.append(
                f"Random numbers that belong to no row ({what}) were replaced by their mean, dropout by nothing."
            )
        return replaced

    def trace(self, rows: Tensor | None, batch: Batch | None = None) -> Trace:
        """What goes into and comes out of every module, for these rows (None: all, at once). Forward pass only."""
        with self._fresh(rows) as objective:
            taken = self._taken(rows, batch)
            return Trace(objective.model).run(lambda: objective.forward(taken))

    def outputs(self) -> Outputs:
        """What the model returns for the large batch, to be put in place of what it returns for micro-batches."""
        outputs = Outputs(self.rows)
        with self._fresh() as objective:
            outputs.keep(objective.model)
            objective.forward(self._taken(None))
        return outputs

    def terms(self) -> list[Any]:
        """The names of the losses, where there are several."""
        with self._fresh() as objective, torch.no_grad():
            terms = objective.evaluate(self._taken(None))[1]
        return list(terms) if isinstance(terms, dict) else []

    def raw(self, rows: Tensor | None, outputs: Outputs | None, term: Any) -> tuple[list[Tensor], float | None]:
        """The user's loss as it is, neither weighed nor divided, on these rows: `[loss, gradient, outputs' gradient]`.

        With `outputs`, the model's outputs are replaced by the large batch's, so that the loss alone decides. The
        second value is the weight that `compute_loss` returns, if it does. Of several losses, `term` says which; None
        stands for their sum.
        """
        with self._fresh(rows) as objective:
            taken = self._taken(rows)
            if outputs is not None:
                outputs.replace(objective.model, rows)
            loss, weight = objective.forward(taken)
            if isinstance(weight, dict):
                loss, weight = (loss, None) if term is None else weight[term]
            if loss.requires_grad:
                loss.backward()
            vector = [(torch.zeros_like(p) if p.grad is None else p.grad.to_dense()).flatten() for p in self.tensors()]
            blocks = [loss.detach().reshape(1), torch.cat(vector)]
            if outputs is not None:
                blocks.append(outputs.gradients())
            return blocks, None if weight is None else float(weight)


def _bare(model: Any) -> Any:
    """The user's own module inside torch's wrappers, which can't be copied or would reduce over ranks."""
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return _bare(model.module)
    return getattr(model, "_orig_mod", model)


class _Copies:
    """Deep copies. Functions are copied with the modules and tensors they refer to, so that these stay untouched."""

    def __init__(self, memo: dict[int, Any], convert: Callable[[Any], Any] = lambda thing: thing) -> None:
        self._memo, self._convert = memo, convert

    def of_all(self, things: tuple[Any, ...]) -> tuple[Any, ...]:
        """Of the model, `loss_fn`, `compute_loss` and `weight`."""
        copies = []
        for name, thing in zip(("The model", "`loss_fn`", "`compute_loss`", "`weight`"), things):
            try:
                copies.append(self.of(thing))
            except Exception as error:
                raise TypeError(
                    f"{name} can't be copied, and the check works on a copy: {type(error).__name__}: {error}"
                ) from error
        return tuple(copies)

    def of_hooks(self, objective: Objective) -> dict[str, list[RemovableHandle]]:
        """Put copies of the users' hooks on the copies of their parameters: deepcopy leaves them out."""
        handles: dict[str, list[RemovableHandle]] = {}
        for prefix, module in {**objective.modules, "": _bare(objective.model)}.items():
            for name, parameter in module.named_parameters(prefix):
                copied: Any = self._memo.get(id(parameter))
                hooks = (
                    (parameter._backward_hooks or {}).values() if copied is not None and copied.requires_grad else ()
                )
                users = [h for h in hooks if not getattr(h, "__module__", "").startswith(("torch.", "gradaccum."))]
                if users:
                    handles[name] = [copied.register_hook(self.of(hook)) for hook in users]
        return handles

    def of(self, thing: Any) -> Any:
        if isinstance(thing, (nn.Module, Tensor)):
            known = id(thing) in self._memo
            new = copy.deepcopy(thing, self._memo)
            if not known:
                self._memo[id(thing)] = new = self._convert(new)
            return new
        if isinstance(thing, types.FunctionType):
            return self._memo[id(thing)] if id(thing) in self._memo else self._of_function(thing)
        if isinstance(thing, types.MethodType):
            return types.MethodType(self.of(thing.__func__), self.of(thing.__self__))
        if isinstance(thing, functools.partial):
            keywords = {name: self.of(value) for name, value in thing.keywords.items()}
            return functools.partial(self.of(thing.func), *map(self.of, thing.args), **keywords)
        return thing

    def _of_function(self, function: types.FunctionType) -> Any:
        kept = (nn.Module, Tensor, functools.partial)
        named = {name: function.__globals__.get(name) for name in _names(function.__code__)}
        used = {name: self.of(value) for name, value in named.items() if isinstance(value, kept)}
        cells = []
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not filled yet
                content = None
            inside = isinstance(content, (*kept, types.FunctionType)) and content is not function
            cells.append(types.CellType(self.of(content)) if inside else cell)
        new = types.FunctionType(
            function.__code__,
            {**function.__globals__, **used} if used else function.__globals__,
            function.__name__,
            tuple(map(self.of, function.__defaults__)) if function.__defaults__ else None,
            tuple(cells) or None,
        )
        new.__kwdefaults__ = function.__kwdefaults__
        self._memo[id(function)] = new
        return new


def _names(code: types.CodeType) -> set[str]:
    nested = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*(_names(inner) for inner in nested))
