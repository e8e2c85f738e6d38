"""The training step on PyTorch: a loop, in which autograd sums into the variables' own gradients."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from keras import tree
from keras.src import backend

from gradaccum.keras.batch_norm import Pool, during_micro_batch
from gradaccum.keras.denominators import denominators_of, tell_trackers, weighed_losses
from gradaccum.keras.step import MicroBatchedStep, Plan
from gradaccum.keras.step_data import has_rows, rows_of, unpack
from gradaccum.sizes import even_sizes

__all__ = ["TorchStep"]


class TorchStep(MicroBatchedStep):
    """`model.train_step` on PyTorch."""

    def __call__(self, data: Any) -> Any:
        model = self.model
        rows = rows_of(data)
        assert rows is not None
        self.build(data)
        sizes = even_sizes(rows, self.size_for(data, rows))
        micro_batches = _split(data, sizes)
        plan = self._plan(micro_batches[0])
        # One loss and nothing beside it: its gradients are summed in multiples of the first micro-batch's count and
        # divided at the end. Otherwise the counts must be known first: a forward pass over all micro-batches.
        at_the_end = bool(plan.counted) and not plan.terms and not model.losses
        totals = None if at_the_end or not plan.counted else self._counted(micro_batches)
        sums = _Gradients(model.trainable_weights)
        layers = self.batch_norms
        pool = Pool(layers) if self.batch_norm == "pooled" else None
        if pool is not None:
            before, pooled = [variable.value.detach().clone() for variable in pool.variables], pool.zeros()
        losses, counts, outputs = [], [], []
        tracked = [0.0] * plan.tracked
        model.zero_grad()
        for micro_batch, size in zip(micro_batches, sizes):
            x, y, sample_weight = unpack(micro_batch)
            # On PyTorch, Keras' losses multiply sample weights with masks in place: they get copies.
            with during_micro_batch(layers, self.batch_norm) as seen:
                y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
            with weighed_losses(model, size / rows, totals) as measured:
                loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=_copied(sample_weight), training=True)
            if at_the_end:
                counts.append(measured.counts[plan.counted[0]].detach())
                if totals is None:
                    totals = {plan.counted[0]: torch.where(counts[0] != 0, counts[0], 1) * (rows / size)}
            part = loss * (size / rows)
            losses.append(part.detach())
            tracked = [total + measured.values[j].detach() * (size / rows) for j, total in enumerate(tracked)]
            if pool is not None:
                with torch.no_grad():
                    pooled = pool.add(pooled, [v.value.detach() for v in pool.variables], seen.valid, size)
            if model.trainable_weights:
                (part if model.optimizer is None else model.optimizer.scale_loss(part)).backward()
                sums.take()
            y_pred = tree.map_structure(_detached, y_pred)
            if plan.metrics == "streamed":
                model._compile_metrics.update_state(y, y_pred, sample_weight)
            elif plan.metrics == "whole":
                outputs.append(y_pred)
            del loss, part, y_pred  # free this micro-batch's graph before the next one's forward pass
        loss = sum(losses[1:], losses[0])
        scale = None
        if at_the_end:
            assert totals is not None
            total = sum(counts[1:], counts[0])
            scale = next(iter(totals.values())) / torch.where(total != 0, total, 1)
            loss = loss * scale
        model._loss_tracker.update_state(loss, sample_weight=rows)
        tell_trackers(model, tracked, rows)
        with torch.no_grad():
            if pool is not None:
                for variable, value in zip(pool.variables, pool.moved(pooled, before)):
                    variable.assign(value)
            if model.trainable_weights:
                model.optimizer.apply(sums.scaled(scale), model.trainable_weights[:])
            else:
                warnings.warn("The model does not have any trainable weights.", stacklevel=2)
        if plan.metrics != "whole":
            return model.get_metrics_result()
        x, y, sample_weight = unpack(data)
        return model.compute_metrics(x, y, _concatenated(outputs), sample_weight=sample_weight)

    def eagerly(self) -> Any:
        """While this is open, random numbers are drawn that nobody misses afterwards."""
        return torch.random.fork_rng()

    def _plan(self, micro_batch: Any) -> Plan:
        key = (
            self.model._compile_loss,
            str(tree.map_structure(lambda a: a if a is None else len(a.shape), micro_batch)),
        )
        if key not in self.plans:
            buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
            with torch.no_grad(), torch.random.fork_rng():
                _, measured, y_pred, loss = denominators_of(self.model, self._state(), *_unpacked(micro_batch))
                self.plans[key] = self.plan(measured, y_pred, loss, micro_batch)
                for buffer, value in buffers:
                    buffer.copy_(value)
        return self.plans[key]

    def _counted(self, micro_batches: list[Any]) -> dict[int, Any]:
        state = self._state()
        totals: dict[int, Any] = {}
        with torch.no_grad(), torch.random.fork_rng():  # random masks will be drawn once more, the same
            for micro_batch in micro_batches:
                state[1], measured, _, _ = denominators_of(self.model, state, *_unpacked(micro_batch))
                for index, count in measured.counts.items():
                    totals[index] = totals[index] + count if index in totals else count
        return totals

    def _state(self) -> list[Any]:
        model = self.model
        parts = (model.trainable_variables, model.non_trainable_variables, model.metrics_variables)
        return [[variable.value for variable in variables] for variables in parts]


class _Gradients:
    """The sums of gradients: in `.grad` where that has at least 32 bits, else beside it in float32."""

    def __init__(self, variables: list[Any]) -> None:
        self.parameters = [variable.value for variable in variables]
        self.half = [index for index, p in enumerate(self.parameters) if p.dtype in (torch.float16, torch.bfloat16)]
        self.sums: dict[int, torch.Tensor] = {}

    def take(self) -> None:
        """Move half-precision gradients of the micro-batch that was just run into their sums."""
        for index in self.half:
            gradient, self.parameters[index].grad = self.parameters[index].grad, None
            if gradient is not None:
                if index in self.sums:
                    self.sums[index] += gradient
                else:
                    self.sums[index] = gradient.float()

    def scaled(self, scale: torch.Tensor | None) -> list[torch.Tensor | None]:
        """The sums, in the order of the variables; None for those that no loss depends on."""
        gradients = [self.sums.get(index, parameter.grad) for index, parameter in enumerate(self.parameters)]
        if scale is not None:
            for gradient in gradients:
                if gradient is not None:
                    gradient *= scale
        return gradients


def _split(data: Any, sizes: list[int]) -> list[Any]:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        tree.map_structure(
            lambda leaf, start=start, size=size: leaf[start : start + size] if has_rows(leaf) else leaf, data
        )
        for start, size in zip(starts, sizes)
    ]


def _copied(sample_weight: Any) -> Any:
    return tree.map_structure(lambda leaf: leaf.clone() if torch.is_tensor(leaf) else leaf, sample_weight)


def _unpacked(micro_batch: Any) -> tuple[Any, Any, Any]:
    x, y, sample_weight = unpack(micro_batch)
    return x, y, _copied(sample_weight)


def _detached(output: Any) -> Any:
    detached, mask = output.detach(), backend.get_keras_mask(output)
    if mask is not None:
        backend.set_keras_mask(detached, mask)
    return detached


def _concatenated(outputs: list[Any]) -> Any:
    def joined(*parts: Any) -> Any:
        whole, masks = torch.cat(parts), [backend.get_keras_mask(part) for part in parts]
        if masks[0] is not None:
            backend.set_keras_mask(whole, torch.cat(masks))
        return whole

    return tree.map_structure(joined, *outputs)
