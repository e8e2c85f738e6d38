"""A trainer's batch in micro-batches: what stands in the place of its `compute_loss` in training."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.errors import NotEquivalentError
from gradaccum.integrations.trainer import check_same, refuse, replaced
from gradaccum.integrations.transformers.denominator import IGNORED, Denominator
from gradaccum.integrations.transformers.router import Router, router_of, tokens
from gradaccum.integrations.transformers.rows import (
    as_inputs,
    as_rows,
    blocks_of,
    can_be_trimmed,
    check_cuttable,
    row_count,
)
from gradaccum.integrations.transformers.settings import MicroBatches, balances, gathers, inner_of, wrong
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.random_state import all_generators
from gradaccum.on_torch.state import as_found
from gradaccum.torch import TrainStep

logger = logging.getLogger("gradaccum")

WITHOUT_LIMIT = 1 << 40
"""Tokens of a micro-batch that holds so many rows, whatever their lengths."""

COUNTED = 16
"""Rows of a forward pass that counts a router's choices, before "auto" has found a size."""

Loss = Callable[..., Any]


class LargeBatch:
    """Leaves the finished gradient of a trainer's batch: a backward pass from the loss it returns adds nothing."""

    def __init__(self, trainer: Any, micro_batches: MicroBatches) -> None:
        self._trainer, self.micro_batches = trainer, micro_batches
        fixed = micro_batches.micro_batch_size != "auto" and micro_batches.max_tokens is None
        self.trims = fixed and micro_batches.verify
        """Whether rows are sorted, and each micro-batch rid of the padding that all its rows have."""
        self.denominator: Denominator | None = None
        self.step: TrainStep | None = None
        self.router: Router | None = None
        """Of a mixture of experts whose balancing loss counts."""
        self._made_for: tuple[Any, ...] = (None, None, None)
        self._state: dict[str, Any] = {}
        self._metrics = Metrics(trainer)
        self._epoch = -1

    def __call__(
        self,
        own: Loss,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """What `own`, the trainer's compute_loss, returns for this batch, its gradient left in the parameters."""
        trainer = self._trainer
        if return_outputs:
            raise TypeError(
                f"{type(trainer).__name__}.training_step asks compute_loss for the outputs of the large batch, which "
                "never exist at once. Leave out return_outputs=True in training."
            )
        blocks = blocks_of(trainer)
        check_cuttable(inputs, blocks, self.micro_batches.max_tokens)
        batch = as_rows(inputs, blocks)
        if "num_items_in_batch" in batch:
            batch["_gradaccum_rows"] = row_count(batch)
        if trainer.args.world_size > 1 or trainer.args.neftune_noise_alpha is not None:  # its noise goes by the length
            self.trims = False
        self.trims = self.trims and can_be_trimmed(batch)
        step = self._step_on(model, own)
        self._meet_other_ranks(row_count(batch), step)
        # Losses are means over this rank's own micro-batch: TrainStep weighs them, over all ranks.
        with replaced(trainer.args, average_tokens_across_devices=False), self._metrics.of_a_batch():
            assert self.denominator is not None
            self._count_choices(step, model, own, batch)
            self.denominator.look_at(batch)
            try:
                loss = self._backward(step, model, own, batch)
            except NotEquivalentError as error:
                raise NotEquivalentError(
                    f"{error}\nThe loss is {type(trainer).__name__}.compute_loss on a part of the batch, with the "
                    "`num_items_in_batch` of that part. If it is a mean over something else, pass "
                    "MicroBatchTrainer(weight=...)."
                ) from None
            if all(p.grad is None for group in trainer.optimizer.param_groups for p in group["params"]):
                loss = self._leave_zeros(model, own, batch)
        return loss.requires_grad_()

    def _count_choices(self, step: TrainStep, model: nn.Module, own: Loss, batch: Any) -> None:
        """Have the router know which experts the batch's tokens go to: one forward pass more."""
        if self.router is None:
            return
        trainer, size = self._trainer, step.micro_batch_size or COUNTED
        rows = Batch((batch,))

        def passes() -> Iterator[Callable[[], Tensor]]:
            for start in range(0, rows.rows, size):
                yield functools.partial(self._own, own, model, rows.take(slice(start, start + size)).tree[0])

        modules = list(trainer.accelerator.unwrap_model(model).modules())
        with as_found(modules, trainer.args.device, all_generators()):
            self.router.count(passes(), functools.partial(trainer.accelerator.reduce, reduction="sum"))

    def _backward(self, step: TrainStep, model: nn.Module, own: Loss, batch: Any) -> Tensor:
        try:
            return step.backward(batch)
        except NotEquivalentError as error:
            if not self.trims:
                raise
            logger.debug("Padding is not cut off: %s", error)
            self.trims = False
            return self._step_on(model, own).backward(batch)

    def _leave_zeros(self, model: nn.Module, own: Loss, batch: Any) -> Tensor:
        """Nothing in the batch counts, on any rank: the stock trainer's update is one with a gradient of zero."""
        parameters = [p for group in self._trainer.optimizer.param_groups for p in group["params"] if p.requires_grad]
        loss = self._alone(own, model, Batch((batch,)).take(slice(0, 1)).tree[0])
        reached = torch.autograd.grad(loss, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, reached, strict=True):
            parameter.grad = None if gradient is None else torch.zeros_like(parameter)
        return loss.detach()

    def _step_on(self, model: nn.Module, own: Loss) -> TrainStep:
        """The machinery on this model and today's optimizer."""
        trainer, settings = self._trainer, self.micro_batches
        optimizer, step = inner_of(trainer), self.step
        made_for = model, optimizer, self.trims
        same = [one is other for one, other in zip(made_for, self._made_for, strict=True)]
        if step is not None and all(same):
            return step
        refuse(wrong(trainer, settings))
        state = self._state if step is None else step.state_dict()

        def plain_loss(model: nn.Module, batch: Any) -> Tensor:
            if new.proving or new.batcher.predicting:
                return self._own(own, model, batch)
            inputs, items = self._inputs(batch)
            self._metrics.next(batch, inputs)
            return own(model, inputs, num_items_in_batch=items)

        def balanced_loss(model: nn.Module, batch: Any) -> dict[str, Tensor]:
            assert router is not None
            with router.balanced():
                loss = plain_loss(model, batch)
            return {"loss": loss, "router": router.loss}

        def weights(batch: Any) -> dict[str, Any]:
            return {"loss": denominator(batch), "router": tokens(as_inputs(batch))}

        if self.denominator is None or not all(same[:2]):
            self.denominator = Denominator(trainer, lambda batch: self._alone(own, model, batch), settings.weight)
            self.router = router_of(trainer.accelerator.unwrap_model(model)) if balances(trainer) else None
        denominator, router = self.denominator, self.router
        new = TrainStep(
            model,
            optimizer,
            compute_loss=plain_loss if router is None else balanced_loss,
            weight=denominator if router is None else weights,
            scaler=getattr(trainer.accelerator, "scaler", None),
            micro_batch_size=settings.micro_batch_size,
            max_tokens=WITHOUT_LIMIT if self.trims else settings.max_tokens,
            memory_limit=settings.memory_limit,
            verify=settings.verify,
        )
        if state:
            new.load_state_dict(state)
        self.denominator.exchanges, self.denominator.idle = new.ranks.is_distributed, new.ranks.sharded
        self.step, self._made_for = new, made_for
        return new

    def _inputs(self, batch: Any) -> tuple[dict[str, Any], Any]:
        """What the trainer's loss takes for a micro-batch, a mean over what it counts there."""
        assert self.denominator is not None
        inputs, rows = as_inputs(batch), batch.get("_gradaccum_rows")
        if rows is not None:  # TRL divides a sum over the tokens by those of the whole generation
            del inputs["_gradaccum_rows"]
            inputs["num_items_in_batch"] = inputs["num_items_in_batch"] * (row_count(batch) / int(rows))
        return inputs, self.denominator.items(batch)

    def _alone(self, own: Loss, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a pass that only proves something, without a router's."""
        with contextlib.nullcontext() if self.router is None else self.router.balanced():
            return self._own(own, model, batch)

    def _own(self, own: Loss, model: nn.Module, batch: Any) -> Tensor:
        """The loss in a pass that only proves or counts: no trace in logs and metrics, no callback, no other rank."""
        trainer = self._trainer
        inputs, items = self._inputs(batch)
        function = getattr(own, "__func__", None)
        if function is not None and getattr(own, "__self__", None) is trainer:
            own = function.__get__(_without_traces(trainer))
        return own(trainer.accelerator.unwrap_model(model), inputs, num_items_in_batch=items)

    def _meet_other_ranks(self, rows: int, step: TrainStep) -> None:
        """Raise on all ranks at once where they have different numbers of batches, or of micro-batches that gather."""
        trainer = self._trainer
        if trainer.args.world_size == 1:
            return
        loader = trainer.callback_handler.train_dataloader
        try:
            batches = len(loader)
        except TypeError:
            batches = -1
        together, epoch = gathers(trainer), int(trainer.state.epoch or 0)
        if epoch == self._epoch and batches >= 0 and not together:
            return
        self._epoch = epoch
        passes = -(-rows // (step.micro_batch_size or rows or 1)) if together else 0
        mine = [batches, trainer.accelerator.gradient_state.end_of_dataloader if batches < 0 else 0, passes, rows]
        everybody = trainer.accelerator.gather(torch.tensor([mine], device=trainer.args.device)).tolist()
        check_same(
            [f"{n} batches" if n >= 0 else "the last batch" if last else "more" for n, last, *_ in everybody],
            "Ranks have different numbers of batches: {}. The others would wait for a rank that has none left. Leave "
            "even_batches=True in `accelerator_config`, or cut the data of all ranks to the shortest.",
        )
        check_same(
            [passes for *_, passes, _ in everybody],
            f"{type(trainer).__name__}.compute_loss gathers metrics over the ranks, so all of them need as many "
            "micro-batches. Received: {}. Set dataloader_drop_last=True, or give all ranks batches of one size.",
            [f"{rows} rows, {passes} micro-batches" for *_, passes, rows in everybody],
        )

    # The sizes that "auto" has found, and whether padding is cut off, belong to a checkpoint: other micro-batches draw
    # other dropout masks.

    def state_dict(self) -> dict[str, Any]:
        return ({} if self.step is None else self.step.state_dict()) | {"trims": self.trims}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state, self.trims = state, state.get("trims", False)
        if self.step is not None:
            self.step.load_state_dict(state)


# A trainer for passes that only prove something.

LARGEST = 4096
"""Entries of a container that is copied."""

_CONTAINERS = (dict, list, set, deque)


class _Quiet:
    """An object whose methods of these names do nothing: each returns what it gets in this place."""

    def __init__(self, inside: Any, names: tuple[str, ...], place: int) -> None:
        self._inside, self._names, self._place = inside, names, place

    def __getattr__(self, name: str) -> Any:
        if name.startswith(self._names):
            return lambda *given, **more: given[self._place]
        return getattr(self._inside, name)


def _without_traces(trainer: Any) -> Any:
    """A copy of a trainer that logs nothing, calls no callback and no rank, with counters and lists of its own."""
    alone = copy.copy(trainer)
    own = vars(alone)
    for name, value in own.items():
        if isinstance(value, _CONTAINERS) and _is_small(value, [LARGEST]):
            own[name] = copy.deepcopy(value)
    own["accelerator"] = _Quiet(trainer.accelerator, ("gather", "reduce"), 0)  # as of a rank that is alone
    own["callback_handler"] = _Quiet(trainer.callback_handler, ("on_", "call_event"), 2)  # the control as it is
    own["state"], own["control"] = copy.copy(trainer.state), copy.copy(trainer.control)
    own["state"].log_history = list(trainer.state.log_history)
    own["log"] = lambda *values, **more: None
    return alone


def _is_small(value: Any, left: list[int]) -> bool:
    """Whether this is numbers and names alone, in containers, and not too many."""
    left[0] -= 1
    if left[0] < 0:
        return False
    if isinstance(value, _CONTAINERS):
        return all(_is_small(item, left) for item in ([*value, *value.values()] if isinstance(value, dict) else value))
    return value is None or isinstance(value, (bool, int, float, str))


# TRL's metrics.


class Metrics:
    """TRL's metrics of micro-batches, one number each in a list per name, as those of the batch.

    Means are weighed by the micro-batch's rows; those over tokens, by its tokens; those of the chosen or the rejected
    rows, by these rows' alone.
    """

    _OVER_TOKENS = (
        "mean_token_accuracy", "entropy", "logits/chosen", "logits/rejected", "kl", "clip_ratio/", "cispo_clip_ratio",
    )  # fmt: skip

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._kinds = {cls.__name__ for cls in type(trainer).__mro__}
        self._counts: list[dict[tuple[str, bool], float]] = []

    def next(self, batch: Any, inputs: Mapping[str, Any]) -> None:
        """A micro-batch begins."""
        if gathers(self._trainer):
            self._counts.append(_counts(inputs, row_count(batch), blocks_of(self._trainer)))

    @contextlib.contextmanager
    def of_a_batch(self) -> Iterator[None]:
        """Turn what the micro-batches of one batch have added to the lists into one number each."""
        metrics = getattr(self._trainer, "_metrics", {}).get("train", {}) if gathers(self._trainer) else {}
        before = {name: (values, len(values)) for name, values in metrics.items() if isinstance(values, list)}
        self._counts.clear()
        yield
        for name, values in metrics.items() if len(self._counts) > 1 else ():
            known, start = before.get(name, (values, 0))
            if isinstance(values, list) and values is known and (found := self._of_all(name, values[start:])):
                values[start:] = found
        sides = [any(count.get((side, False)) for count in self._counts) for side in ("chosen", "rejected")]
        if "KTOTrainer" in self._kinds and len(self._counts) > 1 and all(sides):  # no micro-batch may have had both
            margin = metrics["rewards/chosen"][-1] - metrics["rewards/rejected"][-1]
            metrics.setdefault("rewards/margins", [])[before.get("rewards/margins", ([], 0))[1] :] = [margin]

    def _of_all(self, name: str, values: list[float]) -> list[float]:
        """The one number, or nothing where these are none of the micro-batches'."""
        over_tokens, side = name.startswith(self._OVER_TOKENS), name.rpartition("/")[2]
        if name.startswith("clip_ratio/"):  # RLOO clips the ratio of a whole completion
            over_tokens = "RLOOTrainer" not in self._kinds
        if name == "mean_token_accuracy" and "DPOTrainer" in self._kinds:
            side = "chosen"
        weights = [count.get((side, over_tokens), count["", over_tokens]) for count in self._counts]
        if len(values) != len(weights):  # not added where it has no rows
            weights = [weight for weight in weights if weight]
        if len(values) != len(weights):
            return []
        for which in (min, max):
            if which.__name__ in name.replace("/", "_").split("_"):
                return [which(values)]
        pairs = [(weight, value) for weight, value in zip(weights, values) if not math.isnan(value)]
        total = sum(weight for weight, _ in pairs)
        return [sum(weight * value for weight, value in pairs) / total if total else values[-1]]


def _counts(inputs: Mapping[str, Any], rows: int, blocks: int) -> dict[tuple[str, bool], float]:
    """Of all rows (""), and of the chosen and the rejected ones: how many there are, and their tokens (True)."""
    labels, mask = inputs.get("labels"), inputs.get("completion_mask", inputs.get("attention_mask"))
    if isinstance(labels, Tensor) and labels.dim() > 1:
        mask = labels[..., 1:] != IGNORED
    found = {("", False): float(rows), ("", True): float(mask.sum()) if isinstance(mask, Tensor) else 1.0}
    chosen = inputs.get("label")  # KTO's
    if blocks == 2 and isinstance(mask, Tensor):
        chosen = torch.arange(len(mask), device=mask.device) < len(mask) // 2
    if isinstance(chosen, Tensor) and isinstance(mask, Tensor) and chosen.shape == mask.shape[:1]:
        for name, side in (("chosen", chosen.bool()), ("rejected", ~chosen.bool())):
            found |= {(name, False): float(side.sum()), (name, True): float(mask[side].sum())}
    return found
