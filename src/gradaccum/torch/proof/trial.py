"""A copy of what the user trains, on which a batch can be run at once or in micro-batches, as often as needed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradaccum.core.proof import Outcome
from gradaccum.on_torch.adapter.copies import copied
from gradaccum.on_torch.adapter.probes import Outputs, Trace
from gradaccum.on_torch.adapter.rng import RowwiseRng
from gradaccum.on_torch.adapter.runner import TorchRunner
from gradaccum.on_torch.batch import Batch, BatchDims
from gradaccum.torch.batch_norm import BatchNormChoice, frozen
from gradaccum.torch.buffers import ModuleState
from gradaccum.torch.loss import Objective, Terms, TermsAccumulator, Totals, accumulator, counted

__all__ = ["Accumulate", "Trial"]

Accumulate = Callable[[Objective, Batch, Sequence[int], BatchNormChoice], Tensor]
"""Runs a batch in micro-batches of these sizes, as training does. Leaves the finished gradients in the parameters, and
the buffers as an update leaves them; returns the loss."""


class Trial(TorchRunner):
    """Runs a batch on fresh copies of model and loss, with the same random numbers for the same rows each time."""

    def __init__(
        self,
        objective: Objective,
        batch: Batch,
        accumulate: Accumulate,
        *,
        device: torch.device,
        dtype: torch.dtype | None = torch.float64,
        batch_norm: BatchNormChoice = "warn",
    ) -> None:
        self.original = objective
        self.notes: list[str] = []
        """What the comparison had to leave out."""
        self.term: Any = None
        """Of several losses, the name of the one that `raw` evaluates; None for their sum."""
        self._accumulate = accumulate
        self.batch_norm = batch_norm
        self.by_train_step = batch_norm in ("exact", "pooled")
        self.dtype = dtype

        def converted(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            floating = dtype if leaf.is_floating_point() else None
            return leaf.detach().clone().to(device=device, dtype=floating).requires_grad_(leaf.requires_grad)

        self.batch = batch.map(converted)
        self.rows = self.batch.rows
        super().__init__(RowwiseRng(self.rows, neutral=self.by_train_step), device)
        memo: dict[int, Any] = {}
        self._things = _copy_all(_things(objective), memo, self._convert)
        self.hooks = _copy_hooks(objective, memo, self._convert)
        """Hooks on the gradients of parameters, by the parameter's name."""
        parameters = [p for module in _modules(self._things) for p in module.parameters()]
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in parameters):
            raise ValueError("The model has lazy layers whose sizes aren't known yet: run it once before the check.")
        self._shared = {id(p): p for p in parameters if p.requires_grad}
        if not self._shared:
            raise ValueError("No parameter of the model requires a gradient: there is nothing to compare.")

    @property
    def parameters(self) -> list[Tensor]:
        """What is trained."""
        return list(self._shared.values())

    def _convert(self, thing: Any) -> Any:
        floating = isinstance(thing, nn.Module) or thing.is_floating_point()
        return thing.to(device=self.device, dtype=self.dtype if floating else None)

    @contextlib.contextmanager
    def _fresh(self, batch_dims: BatchDims | None = None) -> Iterator[Objective]:
        """An objective on a fresh copy of everything but the trained parameters, whose gradients start empty."""
        for parameter in self._shared.values():
            parameter.grad = None
        things = _copy_all(self._things, dict(self._shared), lambda thing: thing)
        objective = _rebuilt(self.original, things, batch_dims)
        freezing = frozen(objective.model) if self.batch_norm == "frozen" else contextlib.nullcontext()
        self.rng.holds(objective.model, objective.evaluate)
        with freezing, torch.enable_grad(), self.rng:
            self._state = ModuleState(objective.modules)
            yield objective

    def _whole(self, batch: Batch) -> Batch:
        return batch.map(
            lambda leaf: leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        )

    def _outcome(self, objective: Objective, loss: Tensor) -> Outcome:
        gradients = {
            name: None if p.grad is None else p.grad.detach().to_dense()
            for prefix, module in objective.modules.items()
            for name, p in module.named_parameters(prefix)
            if p.requires_grad
        }
        for parameter in self._shared.values():
            parameter.grad = None
        return Outcome({"loss": loss.detach()}, gradients, self._state.tensors())

    def on(self, batch: Batch) -> Trial:
        """The same trial with another batch, of as many rows."""
        other = copy.copy(self)
        other.batch = batch
        return other

    def run(self, rows: Sequence[int], sizes: Sequence[int] | None, batch_dims: BatchDims | None = None) -> Outcome:
        """The rows at once (None), or in micro-batches, which are weighed as `TrainStep` would weigh them."""
        if sizes is None:
            return self._at_once()
        batch = self.batch if batch_dims is None else Batch(self.batch.tree, batch_dims)
        parts = torch.tensor(rows).split(list(sizes))
        with self._fresh(batch_dims) as objective:
            if self.by_train_step:
                self.rng.start(None)
                loss = self._accumulate(objective, self._whole(batch), list(sizes), self.batch_norm)
                return self._outcome(objective, loss)
            window = accumulator(objective, batch)
            if isinstance(window, TermsAccumulator) and window.totals is None:
                window = TermsAccumulator(objective, batch, self._totals(parts, batch, batch_dims))
            for part in parts:
                self.rng.start(part)
                weighted = window.forward(self._whole(batch.take(part)))
                if weighted.loss is not None:
                    window.backward(weighted, weighted.loss)
                window.add(weighted)
            if window.divisor is not None:
                for parameter in self._shared.values():
                    if parameter.grad is not None:
                        parameter.grad /= float(window.divisor)
            return self._outcome(objective, window.loss)

    def _at_once(self) -> Outcome:
        with self._fresh() as objective:
            self.rng.start(None)
            loss = objective.whole(self._whole(self.batch))
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

    def tensors(self) -> list[Tensor]:
        """What is trained."""
        return self.parameters

    def replace_noise(self) -> bool:
        """Whether random numbers that belong to no row are their mean from now on."""
        what = ", ".join(sorted(self.rng.unreplayed))
        replaced = super().replace_noise()
        if replaced:
            self.notes.append(
                f"Random numbers that belong to no row ({what}) were replaced by their mean, dropout by nothing."
            )
        return replaced

    def _totals(self, partition: Sequence[Tensor], batch: Batch, batch_dims: BatchDims | None) -> Totals:
        """What each of several losses divides by, as `TrainStep` counts it."""
        found: list[Terms] = []
        with self._fresh(batch_dims) as objective, torch.no_grad():
            for rows in partition:
                self.rng.start(rows)
                terms = objective.evaluate(self._whole(batch.take(rows)))[1]
                assert isinstance(terms, dict)
                found.append(terms)
            return counted(objective, found)

    def trace(self, rows: Tensor | None, batch: Batch | None = None) -> Trace:
        """What goes into and comes out of every module, for these rows (None: all, at once). Forward pass only."""
        with self._fresh() as objective:
            self.rng.start(rows)
            batch = self.batch if batch is None else batch
            taken = self._whole(batch if rows is None else batch.take(rows))
            trace = Trace(objective.model)
            with trace.failures():
                objective.forward(taken)
            return trace

    def outputs(self) -> Outputs:
        """What the model returns for the large batch, to be put in place of what it returns for micro-batches."""
        with self._fresh() as objective:
            self.rng.start(None)
            outputs = Outputs(self.rows)
            with outputs.kept(objective.model):
                objective.forward(self._whole(self.batch))
            return outputs

    def terms(self) -> list[Any]:
        """The names of the losses, where there are several."""
        with self._fresh() as objective, torch.no_grad():
            self.rng.start(None)
            terms = objective.evaluate(self._whole(self.batch))[1]
            return list(terms) if isinstance(terms, dict) else []

    def raw(self, rows: Tensor | None, outputs: Outputs | None = None) -> tuple[list[Tensor], float | None]:
        """The user's loss as it is, neither weighed nor divided, on these rows: `[loss, gradient, outputs' gradient]`.

        With `outputs`, the model's outputs are replaced by the large batch's, so that the loss alone decides. The
        second value is the weight that `compute_loss` returns, if it does. Of several losses, `term` says which.
        """
        with self._fresh() as objective:
            self.rng.start(rows)
            taken = self._whole(self.batch if rows is None else self.batch.take(rows))
            with outputs.replaced(objective.model, rows) if outputs is not None else contextlib.nullcontext():
                loss, weight = objective.forward(taken)
            if isinstance(weight, dict):
                loss, weight = (loss, None) if self.term is None else weight[self.term]
            if loss.requires_grad:
                loss.backward()
            vector = [
                (torch.zeros_like(p) if p.grad is None else p.grad.to_dense()).flatten() for p in self._shared.values()
            ]
            blocks = [loss.detach().reshape(1), torch.cat(vector)]
            if outputs is not None:
                blocks.append(outputs.gradients())
            return blocks, None if weight is None else float(weight)


# Copies.


def _things(objective: Objective) -> tuple[Any, ...]:
    return _bare(objective.model), objective.loss_fn, objective.compute_loss, objective.weight


def _bare(model: Any) -> Any:
    """The user's own module inside torch's wrappers, which can't be copied or would reduce over ranks."""
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return _bare(model.module)
    return getattr(model, "_orig_mod", model)


def _modules(things: tuple[Any, ...]) -> list[nn.Module]:
    return [thing for thing in things if isinstance(thing, nn.Module)]


def _copy_hooks(
    objective: Objective, memo: dict[int, Any], convert: Callable[[Any], Any]
) -> dict[str, list[RemovableHandle]]:
    """Put copies of the users' hooks on the copies of their parameters: deepcopy leaves them out."""
    handles: dict[str, list[RemovableHandle]] = {}
    for prefix, module in {**objective.modules, "": _bare(objective.model)}.items():
        for name, parameter in module.named_parameters(prefix):
            twin: Any = memo.get(id(parameter))
            hooks = list((parameter._backward_hooks or {}).values()) if twin is not None and twin.requires_grad else []
            users = [hook for hook in hooks if not getattr(hook, "__module__", "").startswith(("torch.", "gradaccum."))]
            if users:
                handles[name] = [twin.register_hook(copied(hook, memo, convert)) for hook in users]
    return handles


def _rebuilt(original: Objective, things: tuple[Any, ...], batch_dims: BatchDims | None) -> Objective:
    model, loss_fn, compute_loss, weight = things
    new = Objective(
        model,
        loss_fn=loss_fn,
        compute_loss=compute_loss,
        weight=weight,
        reduction=original.reduction,
        batch_dims=original.batch_dims if batch_dims is None else batch_dims,
    )
    new.found = original.found
    return new


def _copy_all(things: tuple[Any, ...], memo: dict[int, Any], convert: Callable[[Any], Any]) -> tuple[Any, ...]:
    names = ("The model", "`loss_fn`", "`compute_loss`", "`weight`")
    copies = []
    for name, thing in zip(names, things):
        try:
            copies.append(copied(thing, memo, convert))
        except Exception as error:
            raise TypeError(
                f"{name} can't be copied, and the check works on a copy: {type(error).__name__}: {error}"
            ) from error
    return tuple(copies)
