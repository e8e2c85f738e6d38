"""Gradient accumulation for any PyTorch optimizer: one update per window of micro-batches, that of the large batch."""

from __future__ import annotations

import functools
import logging
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor, nn

from gradaccum.core.noise import NoiseScale
from gradaccum.core.window import Reduction, checked_reduction
from gradaccum.errors import WindowError
from gradaccum.on_torch.arguments import (
    Sync,
    checked_choice,
    checked_dtype,
    checked_limits,
    checked_model,
    checked_noise,
    needs_closure,
)
from gradaccum.on_torch.noise import NoiseMeter
from gradaccum.on_torch.private import leave_uncompiled
from gradaccum.schedule import Schedule, Steps
from gradaccum.torch.batch_norm import warn_of_batch_norm
from gradaccum.torch.optimizer import checkpoint
from gradaccum.torch.optimizer.batches import Batches
from gradaccum.torch.optimizer.proxy import (
    KEY,
    OptimizerProxy,
    check_alone,
    check_first_step,
    check_steps_of,
    checked_gradients,
    checked_inner,
    evaluated,
    has_options,
    lightning_module,
    may_evaluate_again,
    optimizers_of,
    ranks_of,
)
from gradaccum.torch.watch import parameters_of
from gradaccum.torch.window import Nonfinite, checked_nonfinite, make_windows

logger = logging.getLogger("gradaccum")

T = TypeVar("T")


def _shown(path: str) -> Any:
    """A property that reads this attribute."""
    return property(operator.attrgetter(path))


class Optimizer(OptimizerProxy):
    """An optimizer that makes one update per window of micro-batches: the update of the large batch.

    Every `step()` counts a micro-batch. The one that closes the window divides the sum of gradients by its weight,

        gradient = sum_i w_i g_i / sum_i w_i,

    and steps the inner optimizer, once. Until then `step()` and `zero_grad()` touch nothing, and `p.grad` holds the
    undivided sum.

    Args:
        optimizer: The inner optimizer, any `torch.optim.Optimizer`. It stays the same object. Or a list of them, such
            as Muon and AdamW, each with parameters of its own: one window, one clip and one `step()` for all.
        steps: Micro-batches in a window: an int >= 1; `{epoch: steps}` with epoch 0 in it; or a callable
            `(epoch, update) -> steps`. Epochs are counted by `batches()`, or by `flush()`.
        model: The model. Its data-parallel reduction is held back to the window's end, and a warning names BatchNorm in
            it.
        reduction: `"mean"`: losses are means over their micro-batch. `"sum"`: they are sums, divided by the window's
            total weight if weights are given, else by nothing.
        clip_grad_norm: Largest 2-norm of the finished gradient. `grad_norm` is its norm before clipping.
        clip_grad_value: Largest absolute value of an entry of the finished gradient; after `clip_grad_norm`.
        accumulate_dtype: Dtype in which gradients of narrower parameters are summed, such as `torch.float32` for
            bfloat16. Those of float16 always are summed wider, because their sum may overflow.
        nonfinite: `"propagate"` NaN and infinity as a plain loop does; `"skip_window"`: no update from a gradient that
            is not finite. `backward(loss, weight=0)` leaves out one micro-batch.
        noise_scale: Measure the noise scale for the property `noise_scale`.
        sync: `"window"`: data-parallel ranks reduce once per window; `"micro_batch"`: once per micro-batch, for sharded
            models whose unsharded gradients don't fit.

    Raises:
        TypeError: `optimizer` is no optimizer, or an argument is of the wrong type.
        ValueError: `optimizer` is wrapped already, or re-evaluates closures (LBFGS) with `steps` > 1, or an argument is
            out of range.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = Optimizer(torch.optim.Adam(model.parameters()), steps=4)
        >>> rows = [(torch.randn(16, 3), torch.randn(16, 1)) for _ in range(10)]
        >>> for x, y in optimizer.batches(rows):
        ...     optimizer.zero_grad()
        ...     torch.nn.functional.mse_loss(model(x), y).backward()
        ...     optimizer.step()
        >>> optimizer.updates            # windows of 4, 4 and 2
        3
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        steps: Steps,
        *,
        model: nn.Module | None = None,
        reduction: Reduction = "mean",
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
        accumulate_dtype: torch.dtype | None = None,
        nonfinite: Nonfinite = "propagate",
        noise_scale: bool = False,
        sync: Sync = "window",
    ) -> None:
        self._accumulation_arguments: dict[str, Any] = {
            "reduction": checked_reduction(reduction),
            **checked_limits(clip_grad_norm=clip_grad_norm, clip_grad_value=clip_grad_value),
            "accumulate_dtype": checked_dtype(accumulate_dtype),
            "nonfinite": checked_nonfinite(nonfinite),
            "noise_scale": checked_noise(noise_scale) or None,
        }
        self._model = None if model is None else checked_model(model)
        schedule = Schedule(steps)
        if schedule.constant != 1:
            self._check_batch_norm()
        self._sync = checked_choice("sync", sync, get_args(Sync))
        inner = checked_inner(optimizer)
        self._start(inner, schedule)
        names = ", ".join(type(each).__name__ for each in optimizers_of(inner))
        logger.info("Wrapping '%s' PyTorch optimizer with GA of %s steps", names, schedule)

    def _start(self, inner: Any, schedule: Schedule) -> None:
        arguments = {**self._accumulation_arguments}
        check_steps = functools.partial(check_steps_of, inner, self._accumulation_arguments)
        check_steps(schedule)
        narrow = any(p.dtype is torch.float16 and not hasattr(p, "to_local") for p in parameters_of(inner))
        if arguments["accumulate_dtype"] is None and narrow:
            arguments["accumulate_dtype"] = torch.float32  # sums overflow easily
        self._hold(inner)
        leave_uncompiled()
        options = {"steps": schedule.constant, **arguments, "sync": self._sync}
        ranks = ranks_of(self._model, inner, options)
        noise = NoiseMeter() if arguments.pop("noise_scale") else None
        # Nothing holds this object: without cycles it goes as soon as an error ends its loop.
        windows = make_windows(inner, schedule, noise, arguments, weakref.ref(self), check_steps, ranks)
        self._windows, current = windows, windows.current
        self._loss_scale, self._passes = current.loss_scale, current.passes
        weakref.finalize(self, windows.collect).atexit = False
        self._checked = False

    _warned_of_batch_norm = False

    def _check_batch_norm(self) -> None:
        if self._model is not None and not self._warned_of_batch_norm:
            self._warned_of_batch_norm = warn_of_batch_norm(
                self._model,
                "TrainStep(batch_norm=\"exact\") gives the large batch's; GroupNorm and frozen BatchNorm don't differ.",
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the inner optimizer; their part of the open window's sum starts here.

        Raises:
            WindowError: The window is open, and the parameters have gradients of unknown micro-batches.
        """
        if hasattr(self, "inner"):  # or behind a framework's imitation of this class
            self._inner.add_param_group(param_group)
            if self._windows.current.window.is_open and any(
                parameter.grad is not None for parameter in self.inner.param_groups[-1]["params"]
            ):
                del self.inner.param_groups[-1]
                raise WindowError(
                    "add_param_group() inside an open window received parameters that have gradients already, which "
                    "would join its sum. Set them to None first, or add the group when `updated` is True."
                )
            self._windows.parameters_added()

    # The window.

    @property
    def epoch(self) -> int:
        """Finished epochs, for the schedule."""
        return self._windows.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._windows.epoch = epoch

    updates: int = _shown("_windows.updates")
    """Updates made."""
    updated: bool = _shown("_windows.updated")
    """Whether the last `step()` or `flush()` made an update."""
    micro_batches: int = _shown("_windows.current.window.micro_batches")
    """Micro-batches in the open window."""
    closes_next: bool = _shown("_windows.closes_next")
    """Whether the next `step()` closes the window."""
    grad_norm: Tensor | None = _shown("_windows.current.grad_norm")
    """2-norm of the last finished gradient, before clipping; None without `clip_grad_norm`."""

    @property
    def steps(self) -> int:
        """Micro-batches of this window, or of the next one if none is open; then you can set it."""
        return self._windows.steps

    @steps.setter
    def steps(self, steps: Steps) -> None:
        self._windows.reschedule(Schedule(steps))

    @property
    def _in_batches(self) -> bool:
        """Whether a loop of `batches()` is running: integrations leave an epoch's end to it."""
        return self._windows.source is not None

    @property
    def loss(self) -> Tensor | None:
        """The mean loss of the open window, else of the last one, a detached scalar tensor.

        None unless losses came through `backward`.
        """
        return self._windows.current.losses.mean()

    @property
    def noise_scale(self) -> NoiseScale:
        """How many rows an update can use, measured over the last 500 windows; reading it waits for the device.

        Raises:
            ValueError: It is not measured.
        """
        noise = self._windows.current.noise
        if noise is None:
            raise ValueError("The noise scale is not measured. Pass noise_scale=True to the optimizer.")
        return noise.estimate()

    def backward(
        self,
        loss: Tensor,
        weight: float | None = None,
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> None:
        """Add this micro-batch's gradient to the open window.

        At the window's end the update sees  sum_i w_i g_i / sum_i w_i,  the gradient of the large batch's mean loss.
        Several calls for the same rows count as one micro-batch.

        Args:
            loss: Scalar, the mean over this micro-batch (with `reduction="sum"`, the sum). Several losses over the same
                rows can be added; where each has a denominator of its own, use `TrainStep`.
            weight: What that mean is over: rows, or valid tokens. 0 skips the micro-batch, even if its loss is NaN.
                None: the batch's rows under `batches()`, else 1.
            retain_graph: As for `torch.Tensor.backward`.
            create_graph: As for `torch.Tensor.backward`.

        Raises:
            TypeError: `loss` is no tensor, or `weight` no number.
            ValueError: `weight` is neither 0 nor between 1e-150 and 1e150, or not the one given before for this
                micro-batch; or `loss` is no scalar.
            WindowError: An earlier backward pass of this window failed.

        Example:
            >>> model = torch.nn.Linear(3, 1)
            >>> optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
            >>> for rows in (16, 4):
            ...     optimizer.zero_grad()
            ...     optimizer.backward(model(torch.ones(rows, 3)).mean(), weight=rows)
            ...     optimizer.step()
            >>> optimizer.updated
            True
        """
        self._windows.current.backward(loss, weight, retain_graph, create_graph)

    def add_gradients(
        self, gradients: Sequence[Tensor | None] | Mapping[Tensor, Tensor], weight: float | None = None
    ) -> None:
        """Add gradients that `torch.autograd.grad` or `torch.func.grad` returned to the open window.

        Assigning them to `p.grad`, as a plain loop does, would replace the sum of the window's other micro-batches.
        `step()` counts the micro-batch, as after a backward pass.

        Args:
            gradients: In the order of the optimizer's parameters, None for those without one; or by parameter. Each is
                the gradient of the mean over this micro-batch (with `reduction="sum"`, of the sum), times a
                GradScaler's scale where one is used. They are not changed.
            weight: What that mean is over, as for `backward`.

        Raises:
            TypeError: `weight` is no number.
            ValueError: Their number or a shape doesn't fit, or a parameter is not the optimizer's.
            WindowError: The sum was edited from outside, or an earlier backward pass of this window failed.

        Example:
            >>> model = torch.nn.Linear(3, 1)
            >>> optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
            >>> for rows in (16, 4):
            ...     loss = model(torch.ones(rows, 3)).mean()
            ...     optimizer.add_gradients(torch.autograd.grad(loss, list(model.parameters())), weight=rows)
            ...     optimizer.step()
            >>> optimizer.updated
            True
        """
        self._windows.current.add_gradients(checked_gradients(gradients, self._windows.parameters()), weight)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Count a micro-batch. The one that closes the window makes the update.

        Args:
            closure: Evaluates the micro-batch and returns its loss; called once, with gradients on.

        Returns:
            What the closure returns, else None.

        Raises:
            WindowError: The sum of an open window was edited or cleared from outside, or a backward pass failed.
        """
        windows, passes, result = self._windows, self._passes, None
        if passes.ordinary and passes.arrivals and closure is None and not self._scaled:
            windows.count_ordinary()  # nearly always
            return None
        if closure is not None:
            again = may_evaluate_again(self._inner)
            plain = not (has_options(self._accumulation_arguments) or windows.ranks is not None)
            if needs_closure(self._inner) or (again and plain and windows.steps == 1):
                return windows.evaluate(functools.partial(self._step_inner, closure))
            try:
                with torch.enable_grad():
                    result = closure()
            except BaseException:
                windows.abort()
                raise
            if result is None and lightning_module(closure) is not None:
                windows.window.leave_out()  # its training_step returned None: there was no backward pass
            self._answer = (evaluated(self._inner, result),) if again else ()
        if not windows.current.passes.arrivals and checkpoint.is_initialisation(windows):
            return checkpoint.initialise(windows)
        if not self._checked:
            self._check_first_step(closure)
        try:
            windows.count(self._scaled)
        finally:
            self._answer = ()
        return result

    # torch would call the hooks around every call of `step`; here they belong to the update.
    step.hooked = True  # type: ignore[attr-defined]

    def _check_first_step(self, closure: Any) -> None:
        windows = self._windows
        if windows.ranks is None:
            check_alone(self._model, windows.parameters(), windows.schedule.constant)
        if windows.schedule.constant != 1:
            check_first_step(closure)
        self._checked = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients between windows; inside an open window, do nothing.

        Raises:
            WindowError: A gradient has reached the open window's sum since the last `step()`.
        """
        passes = self._passes
        if passes.arrivals or not (passes.ordinary and passes.open):
            self._windows.zero_grad(set_to_none)

    def flush(self) -> bool:
        """Close the open window now, divided by the weight that it holds.

        Outside of `batches()` this also ends the epoch, for a schedule that goes by epochs.

        Returns:
            Whether an update was made: False when no window is open, or when its weight is 0.

        Raises:
            WindowError: The last micro-batch had its backward pass, and no `step()`.
        """
        return self._windows.flush()

    def discard(self) -> None:
        """Drop the open window without an update, and log it."""
        self._windows.discard()

    def batches(self, loader: Iterable[T], *, weight: Callable[[T], float] | None = None) -> Batches[T]:
        """The loader's batches, unchanged; the last one closes its window, however short it is.

        Each pass is an epoch for the schedule, except after `load_state_dict` restored an open window, which it
        continues. Breaking out discards the open window and logs it; `flush()` before the break keeps it. If the loader
        raises, the window stays as it is: iterating over the same iterator again continues it, and a new pass over the
        loader replaces it.

        Args:
            loader: Any iterable of batches, sized or not.
            weight: `weight(batch) -> number`, what the batch's mean loss is a mean over: 0, or 1e-150 to 1e150. None:
                its rows, which all tensors in it must agree on.

        Raises:
            ValueError: The loader yields nothing, or a batch's number of rows is unclear.
            WindowError: A batch had its backward pass, and no `step()`.

        Example:
            >>> model = torch.nn.Linear(3, 1)
            >>> optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), steps=4)
            >>> for x in optimizer.batches(torch.ones(16, 3) for _ in range(2)):
            ...     optimizer.zero_grad()
            ...     model(x).mean().backward()
            ...     optimizer.step()
            >>> optimizer.updates
            1
        """
        return Batches(loader, self._windows, weight)

    # Files.

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict under its usual keys, and the open window with its gradients.

        With a sharded model all ranks must call it, and get the same.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state = checkpoint.state_dict(self._windows)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state = post_hook(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint: this wrapper's, open window included, or a plain optimizer's.

        Nothing changes unless all of it fits.

        Raises:
            TypeError, ValueError: It is no state dict, or one of another model.
            WindowError: It holds an open window whose length differs from `steps`.
        """
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        checkpoint.load(self._windows, state_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "inner": self._inner,
            "schedule": self._windows.schedule,
            "arguments": {
                "_accumulation_arguments": self._accumulation_arguments,
                "_model": self._model,
                "_sync": self._sync,
            },
            KEY: checkpoint.window_state(self._windows),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["arguments"])
        self._start(state["inner"], state["schedule"])
        checkpoint.restore(self._windows, state[KEY])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._windows.schedule} steps, {self.inner!r})"
