"""The training step on PyTorch: a loop, in which autograd sums into the variables' own gradients."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from keras import tree

from gradaccum.core.sizes import Piece, Rows, Sizers
from gradaccum.keras.batch_norm import Pool, during_micro_batch
from gradaccum.keras.equivalence import Outcome, as_array, held
from gradaccum.keras.loss import divisors_of, update_trackers, weighed_losses
from gradaccum.keras.private import (
    compiled_losses,
    compiled_metrics,
    compute_loss,
    keras_mask,
    layers_in,
    loss_tracker,
    own_trainable_variables,
    set_keras_mask,
    takes_training,
    torch_device,
)
from gradaccum.keras.train_step.data import has_rows, rows_of, unpack
from gradaccum.keras.train_step.step import MicroBatchedStep, Plan
from gradaccum.keras.train_step.sums_torch import GradientSums
from gradaccum.on_torch.fitting import Fitting, StartOver, nothing_fits
from gradaccum.on_torch.memory import Gauge, is_out_of_memory
from gradaccum.on_torch.private import run_backward
from gradaccum.on_torch.transaction import Transaction

__all__ = ["TorchStep"]

_T = TypeVar("_T")


class TorchStep(MicroBatchedStep):
    """`model.train_step` on PyTorch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        device = torch.device(torch_device())
        self.gauge = Gauge(device)
        self.transaction = Transaction([self.model], self._trained, device, self._places)
        self.sizers: Sizers | None = None
        self._as_cut = False
        """Whether a micro-batch that does not fit is an error, and not run in smaller ones."""

    def _make_train_function(self, force: bool = False) -> Any:
        """Keras' own, which would hand the whole step to torch.compile where it is asked to.

        Raises:
            ValueError: It is asked to.
        """
        if self.model.jit_compile:
            raise ValueError(
                "micro_batched on PyTorch runs a loop that torch.compile can't take as a whole. Received: "
                "jit_compile=True. Pass jit_compile=False to compile(), or train on the JAX or TensorFlow backend, "
                "where the loop is compiled."
            )
        return super()._make_train_function(force)

    def __call__(self, data: Any) -> Any:
        if self.proof is None:
            return self._update(data)
        self.build(data)
        self.proof.run(data)
        logs = self._update(data)
        self.proof.say()
        return logs

    def _update(self, data: Any) -> Any:
        model = self.model
        window, loss, gradients = self._summed(data)
        loss_tracker(model).update_state(loss, sample_weight=rows_of(data))
        update_trackers(model, window.tracked, rows_of(data))
        with torch.no_grad():
            if model.trainable_weights:
                model.optimizer.apply(gradients, model.trainable_weights[:])
            else:
                warnings.warn("The model does not have any trainable weights.", stacklevel=2)
        self.transaction.close()
        if not window.whole_metrics:
            return model.get_metrics_result()
        x, y, sample_weight = unpack(data)
        return model.compute_metrics(x, y, _concatenated(window.outputs), sample_weight=sample_weight)

    def outcome(self, data: Any, state: Any = None) -> Outcome:
        """What the update of this batch is made of, computed as an update computes it. Leaves everything as found."""
        model, variables = self.model, [variable for part in self.variables() for variable in part]
        found = None if state is None else [variable.value.detach().clone() for variable in variables]
        self._as_cut = True
        held_gradients = [variable.value.grad for variable in model.trainable_variables]
        try:
            if state is not None:
                _assign(variables, [value for part in state for value in part])
            before = list(map(as_array, model.non_trainable_variables))
            with held() as draws:
                _, loss, gradients = self._summed(data)
            draws.raw |= self.transaction.drew()
            arrays = [None if gradient is None else as_array(gradient) for gradient in gradients]
            return Outcome(
                model, as_array(loss), arrays, before, list(map(as_array, model.non_trainable_variables)), draws
            )
        finally:
            if self.sizers is not None:
                self.transaction.abandon()
            if found is not None:
                _assign(variables, found)
            for variable, gradient in zip(model.trainable_variables, held_gradients):
                variable.value.grad = gradient

    def _summed(self, data: Any) -> tuple[_Window, Any, list[torch.Tensor | None]]:
        """Run all micro-batches: what they have added up to, the loss, and the gradients."""
        model = self.model
        rows = rows_of(data)
        assert rows is not None
        self.build(data)
        if self.sizers is None:  # only a model that is built has all its layers
            self.sizers = Sizers(self.micro_batch_size, self.gauge.limit, minimum=2 if self.batch_norms else 1)
        leaves = [("/".join(map(str, path)), leaf) for path, leaf in tree.flatten_with_path(data) if has_rows(leaf)]
        plan = self._plan(data, rows)
        pool = Pool(self.batch_norms) if self.batch_norm == "pooled" else None
        before = [] if pool is None else [variable.value.detach().clone() for variable in pool.variables]
        self.transaction.open()
        while True:
            pieces = Rows(self.sizers.of([(path, leaf, 0) for path, leaf in leaves]), rows)
            try:
                window = self._exact_window(data, rows, pieces, plan, pool)
                break
            except StartOver:
                self.transaction.start_over()
            except BaseException:
                model.zero_grad()
                self.transaction.abandon()
                raise
        self.sizers.close(pieces.sizer, rows)
        loss, scale = sum(window.losses[1:], window.losses[0]), None
        if window.at_the_end:
            assert window.totals is not None
            ((index, assumed),) = window.totals.items()
            total = window.counts[index]
            scale = torch.where(total != 0, assumed / torch.where(total != 0, total, 1), 0)
            loss = loss * scale
        if pool is not None:
            with torch.no_grad():
                for variable, value in zip(pool.variables, pool.moved(window.pooled, before)):
                    variable.assign(value)
        return window, loss, window.sums.scaled(scale)

    def eagerly(self) -> Any:
        """While this is open, random numbers are drawn that nobody misses afterwards."""
        return torch.random.fork_rng()

    def _exact_window(self, data: Any, rows: int, pieces: Rows, plan: Plan, pool: Pool | None) -> _Window:
        """Run all micro-batches, and once more where random masks were counted for others than those that ran."""
        totals, counted, drew = None, None, False
        if plan.counted and not _at_the_end(plan):
            totals, counted, drew = self._counted(data, pieces)
        todo = iter(pieces)
        while True:
            window = self._window(data, rows, todo, pieces, plan, totals, pool)
            if window.added and _at_the_end(plan):  # a layer adds losses that it did not add when this was planned
                self.transaction.abandon()
                plan = dataclasses.replace(plan, terms=True)
                self.plans = {key: plan if known.counted else known for key, known in self.plans.items()}
                return self._exact_window(data, rows, pieces, plan, pool)
            if counted is None or not drew or window.ran == counted:
                return window
            self.transaction.abandon()
            totals, counted, todo = window.counts, window.ran, iter(window.ran)

    def _window(
        self,
        data: Any,
        rows: int,
        todo: Iterator[Piece],
        pieces: Rows,
        plan: Plan,
        totals: dict[int, Any] | None,
        pool: Pool | None,
    ) -> _Window:
        model, layers = self.model, self.batch_norms
        model.zero_grad()
        sums = GradientSums(model.trainable_weights, self.overwriting)
        window = _Window(
            rows,
            sums,
            totals,
            tracked=[0.0] * plan.tracked,
            whole_metrics=plan.metrics == "whole",
            at_the_end=_at_the_end(plan),
        )
        window.pooled = [] if pool is None else pool.zeros()

        def forward(piece: Piece) -> tuple[Any, ...]:
            share = piece.size / rows
            x, y, sample_weight = unpack(_take(data, piece))
            # On PyTorch, Keras' losses multiply sample weights with masks in place: they get copies.
            with during_micro_batch(layers, self.batch_norm) as seen:
                y_pred = model(x, training=True) if takes_training(model) else model(x)
            with weighed_losses(model, share, window.totals) as measured:
                loss = compute_loss(model, x=x, y=y, y_pred=y_pred, sample_weight=_copied(sample_weight), training=True)
            counts = {index: count.detach() for index, count in measured.divisors.items()}
            window.added = window.added or (window.at_the_end and bool(model.losses))
            if window.totals is None and window.at_the_end:
                window.totals = {i: torch.where(count != 0, count, 1) / share for i, count in counts.items()}
            return share, y, sample_weight, seen, y_pred, measured, loss, counts

        def backward(piece: Piece, forwarded: tuple[Any, ...]) -> None:
            share, y, sample_weight, seen, y_pred, measured, loss, counts = forwarded
            if model.trainable_weights:
                scaled = loss if model.optimizer is None else model.optimizer.scale_loss(loss)
                run_backward([scaled], [torch.full_like(scaled, share, requires_grad=False)])
                window.sums.take()
            # From here on nothing can run out of memory that smaller micro-batches would need less of.
            window.ran.append(piece)
            window.losses.append(loss.detach() * share)
            window.counts = {i: window.counts.get(i, 0) + count for i, count in counts.items()}
            window.tracked = [t + measured.values[j].detach() * share for j, t in enumerate(window.tracked)]
            if pool is not None:
                with torch.no_grad():
                    statistics = [variable.value.detach() for variable in pool.variables]
                    window.pooled = pool.add(window.pooled, statistics, seen.valid, piece.size)
            y_pred = tree.map_structure(_detached, y_pred)
            if plan.metrics == "streamed":
                compiled_metrics(model).update_state(y, y_pred, sample_weight)
            elif plan.metrics == "whole":
                window.outputs.append(y_pred)

        fitting, passes = Fitting(self.transaction, self.gauge), _Passes(forward, backward)
        coupled = self.batch_norm != "frozen" and bool(layers)
        for piece in todo:
            run = fitting.once if self._as_cut else functools.partial(fitting.run, coupled=lambda: coupled)
            run(piece, pieces, passes)
            window.sums.take()  # what had arrived before memory ran out
        return window

    def _plan(self, data: Any, rows: int) -> Plan:
        key = compiled_losses(self.model), str(tree.map_structure(lambda a: a if a is None else len(a.shape), data))
        if key not in self.plans:
            self.transaction.forget()  # compiled anew: other variables may move
            self.transaction.open()

            def plan(size: int) -> Plan:
                few = _take(data, Piece(slice(0, size)))
                _, measured, y_pred, loss = divisors_of(self.model, self._state(), *_unpacked(few))
                return self.plan(measured, y_pred, loss, few)

            size = 2 if self.sizers is None or self.sizers.size is None else max(2, self.sizers.size)
            self.plans[key] = self._forward(min(rows, size), plan)
        return self.plans[key]

    def _counted(self, data: Any, pieces: Rows) -> tuple[dict[int, Any], list[Piece], bool]:
        """A forward pass over all rows: what losses divide by, the micro-batches it took, whether it drew."""

        def counted(size: int) -> tuple[dict[int, Any], list[Piece], bool]:
            cut = Piece(slice(0, pieces.rows)).split(size)
            totals, moved = self._counts(data, cut)
            return totals, cut, moved or self.transaction.drew()

        return self._forward(pieces.sizer.size, counted)

    def _forward(self, size: int, run: Callable[[int], _T]) -> _T:
        """`run(size)`, forward passes without gradients and side effects; of fewer rows, where these don't fit."""
        while True:
            try:
                with torch.no_grad():
                    return run(size)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if size == 1:
                    raise nothing_fits(error) from error
            finally:
                self.transaction.abandon()
            self.gauge.release()
            size = -(-size // 2)

    def _counts(self, data: Any, cut: list[Piece]) -> tuple[dict[int, Any], bool]:
        """What the losses divide by, and whether any state of the model moved meanwhile, such as that of a seed."""
        state = self._state()
        before = state[1]
        totals: dict[int, Any] = {}
        for piece in cut:
            state[1], measured, _, _ = divisors_of(self.model, state, *_unpacked(_take(data, piece)))
            for index, count in measured.divisors.items():
                totals[index] = totals.get(index, 0) + count
        return totals, any(not torch.equal(one, other) for one, other in zip(before, state[1]))

    def _state(self) -> list[Any]:
        model = self.model
        parts = (model.trainable_variables, model.non_trainable_variables, model.metrics_variables)
        return [[variable.value for variable in variables] for variables in parts]

    def _trained(self) -> list[torch.Tensor]:
        return [variable.value for variable in self.model.trainable_weights]

    def _places(self) -> list[tuple[dict[str, Any], str]]:
        """Where Keras keeps what a forward pass or a metric moves: not in buffers of the modules."""
        weights = {
            id(v) for layer in [self.model, *layers_in(self.model)] for v in own_trainable_variables(layer)
        }  # frozen ones
        variables = [*self.model.non_trainable_variables, *self.model.metrics_variables]
        return [(vars(variable), "_value") for variable in variables if id(variable) not in weights]


class _Passes(NamedTuple):
    forward: Callable[[Piece], tuple[Any, ...]]
    backward: Callable[[Piece, tuple[Any, ...]], None]


@dataclass
class _Window:
    """What the micro-batches of a batch have added up to."""

    rows: int
    sums: GradientSums
    totals: dict[int, Any] | None
    """What the losses are divided by, as far as it is known or assumed."""
    tracked: list[Any]
    whole_metrics: bool
    """Whether metrics see the whole batch's outputs."""
    at_the_end: bool
    """Whether gradients are divided at the end."""
    added: bool = False
    """Whether there were terms of `add_loss` although they are."""
    counts: dict[int, Any] = field(default_factory=dict)
    """What they have turned out to divide by."""
    losses: list[Any] = field(default_factory=list)
    pooled: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    ran: list[Piece] = field(default_factory=list)


def _at_the_end(plan: Plan) -> bool:
    """Whether gradients can be divided at the end: one loss, and nothing beside it.

    They are summed in multiples of the first micro-batch's count. Otherwise the counts must be known first.
    """
    return bool(plan.counted) and not plan.terms


def _assign(variables: list[Any], values: list[Any]) -> None:
    with torch.no_grad():
        for variable, value in zip(variables, values):
            variable.assign(value)


def _take(data: Any, piece: Piece) -> Any:
    return tree.map_structure(lambda leaf: leaf[piece.rows] if has_rows(leaf) else leaf, data)


def _copied(sample_weight: Any) -> Any:
    return tree.map_structure(lambda leaf: leaf.clone() if torch.is_tensor(leaf) else leaf, sample_weight)


def _unpacked(micro_batch: Any) -> tuple[Any, Any, Any]:
    x, y, sample_weight = unpack(micro_batch)
    return x, y, _copied(sample_weight)


def _detached(output: Any) -> Any:
    detached, mask = output.detach(), keras_mask(output)
    if mask is not None:
        set_keras_mask(detached, mask)
    return detached


def _concatenated(outputs: list[Any]) -> Any:
    def joined(*parts: Any) -> Any:
        whole, masks = torch.cat(parts), [keras_mask(part) for part in parts]
        if masks[0] is not None:
            set_keras_mask(whole, torch.cat(masks))
        return whole

    return tree.map_structure(joined, *outputs)
