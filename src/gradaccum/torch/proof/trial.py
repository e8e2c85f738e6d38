"""Running the rows of a batch at once or in micro-batches, from the same state and with the same random numbers."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradaccum.core.proof import Outcome
from gradaccum.core.rounding import rounding
from gradaccum.core.ways import Way
from gradaccum.on_torch.adapter.arrays import TorchRunner, sample
from gradaccum.on_torch.adapter.probes import Trace
from gradaccum.on_torch.adapter.rng import RowwiseRng, watched
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.reach import held_generators
from gradaccum.on_torch.state import as_found
from gradaccum.torch.batch_norm import BatchNormChoice, frozen
from gradaccum.torch.loss import Objective, Terms, Weight, batch_losses
from gradaccum.torch.module_state import ModuleState

Gradients = Callable[[Objective, Batch, Sequence[int]], Tensor]
"""Runs the rows of a batch in micro-batches of these sizes, in order, as an update does: takes each of them by
`batch.take(rows)` before its forward pass, leaves the finished gradients in the parameters, not clipped, and returns
the loss. Exchanges nothing with other ranks, and learns nothing about sizes."""
Accumulate = Callable[..., Tensor]
"""The same, with what is done about BatchNorm: `batch_norm`."""


class LoweredScale:
    """A GradScaler's scale, lowered where gradients overflow in it: an update is skipped then, and tried again."""

    def __init__(self, scaler: Any) -> None:
        self._scaler, self.power = scaler, 0  # the power of two that the scale is multiplied by

    def scale(self, loss: Tensor) -> Tensor:
        return loss if self._scaler is None else self._scaler.scale(loss) * 2.0**self.power

    def lower(self) -> bool:
        """Scale less from now on. Returns False where no lower scale is left."""
        lowered = self._scaler is not None and self.power > -16
        self.power -= 4 * lowered
        return lowered


class _Noted(Objective):
    """The objective, which has the random numbers of a proof know when a forward pass has run."""

    rng: RowwiseRng

    def evaluate(self, batch: Batch, summed: bool = False) -> tuple[Tensor, Weight | Terms | None]:
        result = super().evaluate(batch, summed)
        self.rng.end_of_forward()
        return result


def _noted(objective: Objective, rng: RowwiseRng) -> Objective:
    noted = copy.copy(objective)
    kind = type(objective)
    noted.__class__ = _Noted if kind is Objective else type("_Noted", (_Noted, kind), {})
    assert isinstance(noted, _Noted)
    noted.rng = rng
    return noted


class BatchRunner(TorchRunner):
    """Runs rows of a batch on a model and a loss, each time from the state that these have now.

    `generators`, `rng`: as for `RowwiseRng`.
    """

    def __init__(
        self,
        objective: Objective,
        batch: Batch,
        gradients: Gradients,
        parameters: Mapping[str, Tensor],
        state: ModuleState,
        *,
        generators: Sequence[Any] = (),
        scale: LoweredScale | None = None,
        **rng: Any,
    ) -> None:
        self.gradients, self._parameters, self.state = gradients, parameters, state
        self._scale, self.batch = scale or LoweredScale(None), batch
        self._own_ids = set(map(id, parameters.values()))
        super().__init__(RowwiseRng(batch.rows, generators, **rng), objective.device, batch.rows)
        self.objective = _noted(objective, self.rng)
        self.updated: list[str] = []
        """Parameters that the backward pass of the rows at once has changed."""

    def tensors(self) -> list[Tensor]:
        return list(self._parameters.values())

    def again(self) -> BatchRunner:
        other = copy.copy(self)  # small frozen parameters are part of the state
        other.state = ModuleState(self.objective.modules, self.objective.holders())
        return other

    @contextlib.contextmanager
    def passes(self, rows: Tensor | None = None) -> Iterator[None]:
        """Around passes: random numbers are those of these rows; with None, the whole batch's."""
        for parameter in self.tensors():
            parameter.grad = None
        self.rng.start(rows)
        try:
            with self.rng:
                yield
        finally:
            self.rng.rewind()
            self.state.put_back()

    def taken(self, rows: Tensor | None) -> Batch:
        """These rows (None: all) in tensors of their own: they may be edited, and their gradients are nobody's."""
        return (self.batch if rows is None else self.batch.take(rows)).map(self._own)

    def _own(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or id(leaf) in self._own_ids:
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    def run(self, way: Way | None) -> Outcome:
        with self.passes():
            if way is None:
                loss = self.objective.whole(self.taken(None))
                self._backward(loss)
            else:
                order = torch.tensor(way[0])
                few = self.taken(order)
                if not self.rng.idle:
                    few = watched(few, lambda taken: self.rng.start(order[taken]))
                loss = self.gradients(self.objective, few, way[1])
            gradients: dict[str, Tensor | None] = {}
            for name, parameter in self._parameters.items():
                if parameter.requires_grad:
                    gradients[name] = None if parameter.grad is None else self.kept(parameter.grad.detach().to_dense())
                    parameter.grad = None
            # What weighs nothing leaves no gradient, and a loss of 0 / 0.
            weighs = way is None or any(g is not None for g in gradients.values()) or not bool(loss.isnan())
            return Outcome({"loss": loss.detach().clone()}, gradients, self.left(), weighs=weighs)

    def _backward(self, loss: Tensor) -> None:
        """Note which parameters change in it, and take that back where a hook of the user's may be why."""
        versions = {name: parameter._version for name, parameter in self._parameters.items()}
        hooked = {name: p.detach().clone() for name, p in self._parameters.items() if _is_hooked(p)}
        self._scale.scale(loss).backward()
        self.updated = [name for name, p in self._parameters.items() if p._version != versions[name]]
        with torch.no_grad():
            for name in self.updated:
                if name in hooked:
                    self._parameters[name].copy_(hooked[name])

    def kept(self, gradient: Tensor) -> Tensor:
        """What is compared of a gradient."""
        return sample(gradient).clone()  # the next backward pass may fill the same tensor

    def left(self) -> dict[str, Any]:
        """What modules hold now, by name: tensors and numbers."""
        return {**self.state.tensors(), **self.state.numbers()}

    def lower_scale(self) -> bool:
        return self._scale.lower()


def _is_hooked(parameter: Tensor) -> bool:
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def named_parameters(objective: Objective) -> dict[str, Tensor]:
    """The parameters of the model and the loss, by name."""
    found: dict[int, tuple[str, Tensor]] = {}
    for prefix, root in objective.modules.items():
        for name, parameter in root.named_parameters(prefix):
            found.setdefault(id(parameter), (name, parameter))
    return dict(found.values())


def in_micro_batches(objective: Objective, batch: Batch, sizes: Sequence[int]) -> Tensor:
    """What `TrainStep` does with a batch, in a few lines: a loop over micro-batches, weighed as it weighs them."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    parts = [slice(stop - size, stop) for size, stop in zip(sizes, ends, strict=True)]

    def count() -> list[Terms]:
        modules = [module for root in objective.modules.values() for module in root.modules()]
        with as_found(modules, objective.device), torch.no_grad():
            return [objective.evaluate(batch.take(part))[1] for part in parts]  # type: ignore[misc]  # terms

    window = batch_losses(objective, batch, count)
    window.waits = True
    for part in parts:
        window.backward(window.forward(batch.take(part)))
    divisor = 1.0 if window.divisor is None else float(window.divisor)
    for parameter in named_parameters(objective).values():
        if parameter.grad is not None:
            parameter.grad /= divisor
    return window.loss


class Trial(BatchRunner):
    """The same on a copy of model, loss and batch in another dtype, and what goes on inside.

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
        tolerance: float,
        batch_norm: BatchNormChoice | None = "warn",
    ) -> None:
        self.original, self.allowed = objective, tolerance
        self.notes: list[str] = []  # what the comparison had to leave out

        def convert(thing: Any) -> Any:
            floating = isinstance(thing, nn.Module) or thing.is_floating_point()
            return thing.to(device=device, dtype=dtype if floating else None)

        def converted(leaf: Any) -> Any:
            return (
                convert(leaf.detach().clone()).requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
            )

        copies = _Copies(convert)
        model, loss_fn, compute_loss, weight = copies.of_all(
            (_bare(objective.model), objective.loss_fn, objective.compute_loss, objective.weight)
        )
        copied = objective.on(model)
        copied.loss_fn, copied.compute_loss, copied.weight, copied.autocast = loss_fn, compute_loss, weight, None
        copied.forget()
        self.hooks = copies.of_hooks(objective)  # hooks on the gradients of parameters, by the parameter's name
        parameters = named_parameters(copied)
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in parameters.values()):
            raise ValueError("The model has lazy layers whose sizes aren't known yet: run it once before the check.")
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        if not trained:
            raise ValueError("No parameter of the model requires a gradient: there is nothing to compare.")
        gradients: Gradients = in_micro_batches
        if accumulate is not None and batch_norm in ("exact", "pooled"):
            gradients = functools.partial(accumulate, batch_norm=batch_norm)
        self.by_train_step = gradients is not in_micro_batches
        """Whether TrainStep adds up, so that what it says about the model is what there is to know."""
        generators = held_generators(*copied.modules.values(), copied.evaluate)
        state = ModuleState(copied.modules, copied.holders())
        few = batch.map(converted)
        super().__init__(copied, few, gradients, trained, state, generators=generators, neutral=self.by_train_step)
        self.device, self._batch_norm = str(device), batch_norm

    @property
    def tolerance(self) -> float:
        return max(self.allowed, rounding(self.precision, self.device))

    @contextlib.contextmanager
    def passes(self, rows: Tensor | None = None) -> Iterator[None]:
        lends, freezes = self._batch_norm is None, self._batch_norm in (None, "frozen")
        norm = frozen(self.objective.model, lends=lends) if freezes else contextlib.nullcontext()
        with norm, super().passes(rows):
            yield

    def kept(self, gradient: Tensor) -> Tensor:
        return gradient.clone()

    def left(self) -> dict[str, Tensor]:
        return self.state.tensors()

    def on(self, batch: Batch) -> Trial:
        """The same trial with another batch, of as many rows."""
        other = copy.copy(self)
        other.batch = batch
        return other

    def run(self, way: Way | None) -> Outcome:
        try:
            outcome = super().run(way)
        except RuntimeError as error:
            if way is None and "does not require grad" in str(error):
                raise ValueError(
                    "The loss has no gradient: it was computed without gradients (under torch.no_grad(), or by "
                    ".item(), detach() or argmax), or doesn't depend on the model."
                ) from error
            raise
        own = {id(parameter) for parameter in self.objective.model.parameters()}
        of_model = [g for name, g in outcome.gradients.items() if id(self._parameters[name]) in own]
        if way is None and all(gradient is None for gradient in of_model or outcome.gradients.values()):
            raise ValueError(
                "The loss doesn't reach the parameters of `model`. compute_loss(model, *batch) must use the model that "
                "it is given: the check runs a copy."
            )
        return outcome

    def replace_noise(self) -> bool:
        what = ", ".join(sorted(self.rng.unreplayed))
        before, replaced = self.rng.neutral, super().replace_noise()
        if self.rng.neutral and not before:
            self.notes.append(
                f"Random numbers that belong to no row ({what}) were replaced by their mean, and dropout was off."
            )
        return replaced

    def trace(self, rows: Tensor | None) -> Trace:
        """What goes into and comes out of every module, for these rows (None: all, at once). Forward pass only."""
        with self.passes(rows):
            taken = self.taken(rows)
            return Trace(self.objective.model).run(lambda: self.objective.forward(taken))

    def terms(self) -> list[Any]:
        """The names of the losses, where there are several."""
        with self.passes(), torch.no_grad():
            terms = self.objective.evaluate(self.taken(None))[1]
        return list(terms) if isinstance(terms, dict) else []

    def raw(self, term: Any, rows: Sequence[int] | None) -> tuple[list[Tensor], float | None]:
        """The user's loss as it is, neither weighed nor divided, on these rows: `[loss, gradient]`.

        The second value is the weight that `compute_loss` returns, if it does. Of several losses, `term` says which;
        None stands for their sum.
        """
        taken = None if rows is None else torch.tensor(rows)
        with self.passes(taken):
            loss, weight = self.objective.forward(self.taken(taken))
            if isinstance(weight, dict):
                loss, weight = (loss, None) if term is None else weight[term]
            if loss.requires_grad:
                loss.backward()
            vector = [(torch.zeros_like(p) if p.grad is None else p.grad.to_dense()).flatten() for p in self.tensors()]
        blocks = [loss.detach().reshape(1), torch.cat(vector)]
        wide = [(block if block.is_complex() else block.double()).cpu() for block in blocks]
        return wide, None if weight is None else float(weight)


def _bare(model: Any) -> Any:
    """The user's own module inside torch's wrappers, which can't be copied or would reduce over ranks."""
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return _bare(model.module)
    return getattr(model, "_orig_mod", model)


class _Copies:
    """Deep copies. Functions are copied with the modules and tensors they refer to, so that these stay untouched."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self._memo: dict[int, Any] = {}
        self._convert = convert

    def of_all(self, things: tuple[Any, ...]) -> tuple[Any, ...]:
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
        bare = objective.on(_bare(objective.model))
        for name, parameter in named_parameters(bare).items():
            copied: Any = self._memo.get(id(parameter))
            if copied is None or not copied.requires_grad:
                continue
            hooks = (parameter._backward_hooks or {}).values()
            users = [h for h in hooks if not getattr(h, "__module__", "").startswith(("torch.", "gradaccum."))]
            if users:
                handles[name] = [copied.register_hook(self.of(hook)) for hook in users]
        return handles

    def of(self, thing: Any) -> Any:
        if isinstance(thing, types.MethodType):
            return types.MethodType(self.of(thing.__func__), self.of(thing.__self__))
        if isinstance(thing, functools.partial):
            keywords = {name: self.of(value) for name, value in thing.keywords.items()}
            return functools.partial(self.of(thing.func), *map(self.of, thing.args), **keywords)
        if not isinstance(thing, (nn.Module, Tensor, types.FunctionType)):
            return thing
        if id(thing) not in self._memo:
            if isinstance(thing, types.FunctionType):
                self._memo[id(thing)] = self._of_function(thing)
            else:
                new = copy.deepcopy(thing, self._memo)
                self._memo[id(thing)] = self._convert(new)
        return self._memo[id(thing)]

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
        return new


def _names(code: types.CodeType) -> set[str]:
    nested = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*(_names(inner) for inner in nested))
