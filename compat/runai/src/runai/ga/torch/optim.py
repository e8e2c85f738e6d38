"""`runai.ga.torch.optim`: `Optimizer` around any optimizer, and torch's own in wrapped form."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

import gradaccum.torch.optim
from gradaccum import WindowError

__all__ = ["Optimizer", "State"]


class State:
    """`optimizer.runai`, which the inner optimizer and `state_dict()["state"]` have too, as in the original.

    Args:
        steps: Micro-batches of a window.
        step: Micro-batches since the start.
        optimizer: The wrapped optimizer that it is the state of, or None for one in a file.
    """

    def __init__(self, steps: int, step: int = 0, optimizer: Any = None) -> None:
        self._steps, self._step = steps, step
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)

    @property
    def steps(self) -> int:
        """Micro-batches of a window. Setting it holds from the next window on."""
        optimizer = self._live()
        return self._steps if optimizer is None else (optimizer._steps_again or optimizer.steps)

    @steps.setter
    def steps(self, steps: int) -> None:
        optimizer = self._live()
        if optimizer is not None:
            optimizer.steps, optimizer._steps_again = steps, None
        self._steps = steps

    @property
    def step(self) -> int:
        """Micro-batches since the start. Setting it between windows to a number inside one shortens the next.

        Raises:
            WindowError: It is set inside an open window to another place of a window.
        """
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        optimizer = self._live()
        if optimizer is not None:
            optimizer._begin_at(step % self.steps, step)
        self._step = step

    def _live(self) -> Any:
        return None if self._optimizer is None else self._optimizer()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and (self.steps, self.step) == (other.steps, other.step)

    __hash__ = None  # type: ignore[assignment]  # its numbers change

    def __repr__(self) -> str:
        return f"State(steps={self.steps}, step={self.step})"

    def __getstate__(self) -> dict[str, int]:
        return {"steps": self.steps, "step": self.step}  # what the original's files have

    def __setstate__(self, numbers: dict[str, int]) -> None:
        self.__init__(numbers["steps"], numbers["step"])  # type: ignore[misc]


torch.serialization.add_safe_globals([State])


class _RunAI:
    """What the original's optimizers showed, in front of a wrapped optimizer."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._count_from(0)
        how = "summed" if kwargs.get("reduction") == "sum" else "averaged"
        name = type(self.inner).__name__
        print(f"Wrapping '{name}' PyTorch optimizer with GA of {self.steps} steps (gradients are {how})")

    def _count_from(self: Any, step: int) -> None:
        self._steps_again: int | None = None
        """What windows go on with after one that was shortened by setting `runai.step`."""
        self._runai = State(self.steps, step, self)
        vars(self.inner)["runai"] = self._runai  # for a custom optimizer that reads it in its step

    @property
    def optimizer(self: Any) -> torch.optim.Optimizer:
        """The inner optimizer."""
        return self.inner

    @property
    def runai(self) -> State:
        """`.steps` of a window, and `.step`, counted from the start."""
        return self._runai

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Count a micro-batch; with the one that closes the window, make the update. One without a gradient counts."""
        if any(p.grad is not None for group in self.param_groups for p in group["params"]):
            result = super().step(closure)  # type: ignore[misc]  # of the optimizer beside it
        else:
            with _Silence():
                result = super().step(closure)  # type: ignore[misc]
        self._runai._step += 1
        self._round_up()
        return result

    def flush(self: Any) -> bool:
        """Close the open window now, short as it is: `runai.step` continues at the start of the next one."""
        updated = super().flush()  # type: ignore[misc]
        self._round_up()
        return updated

    def discard(self: Any) -> None:
        """Drop the open window without an update."""
        super().discard()  # type: ignore[misc]
        self._round_up()

    def _round_up(self: Any) -> None:
        """Between windows the step is a multiple of `steps`."""
        if not self.micro_batches:
            if self._steps_again is not None:
                self.steps, self._steps_again = self._steps_again, None
            self._runai._step += -self._runai._step % self.steps

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """Empty the gradients between windows, by the inner optimizer, too; inside an open window, do nothing."""
        is_first = not self.micro_batches
        super().zero_grad(set_to_none)  # type: ignore[misc]
        if is_first:
            self.inner.zero_grad(*(() if set_to_none else (False,)))  # the original passed nothing on

    def _begin_at(self: Any, place: int, step: int) -> None:
        """The next micro-batch is at this place of its window."""
        if place == self.micro_batches:
            return
        if self.micro_batches:
            raise WindowError(
                f"The open window holds the gradients of {self.micro_batches} micro-batches. Received: "
                f"runai.step={step}, which is {place} into a window. Close it with optimizer.flush(), or load the "
                "optimizer's state with its window."
            )
        if self.__getstate__()["schedule"].constant is None:
            raise ValueError("`runai.step` can be set inside of a window only where all windows have the same `steps`.")
        again = self._steps_again or self.steps
        self.steps, self._steps_again = again - place, again if place else None

    def state_dict(self: Any) -> dict[str, Any]:
        state = super().state_dict()  # type: ignore[misc]
        return {**state, "state": {**state["state"], "runai": State(self._runai.steps, self._runai.step)}}

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict["state"])
        ours: State | None = state.pop("runai", None)
        plain = {**state_dict, "state": state}
        super().load_state_dict(plain)  # type: ignore[misc]
        if ours is not None:
            self._count_from(ours.step)
            if not self.micro_batches:
                self._runai.step = ours.step

    def __getstate__(self: Any) -> dict[str, Any]:
        return {**super().__getstate__(), "runai": self._runai.step}  # type: ignore[misc]

    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        state = dict(state)
        step = state.pop("runai", 0)
        super().__setstate__(state)  # type: ignore[misc]
        self._count_from(step)


class _Silence(logging.Filter):
    """Keeps out of the log that a micro-batch has no gradient: the original counted it all the same."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "had no backward pass" not in record.getMessage()

    def __enter__(self) -> None:
        logging.getLogger("gradaccum").addFilter(self)

    def __exit__(self, *error: object) -> None:
        logging.getLogger("gradaccum").removeFilter(self)


class Optimizer(_RunAI, gradaccum.torch.optim.Optimizer):
    """`gradaccum.torch.optim.Optimizer`, as Run:AI's library had it: `Optimizer(optimizer, steps=4)`.

    Gradients are averaged over a window. The original summed them: `reduction="sum"` does.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), steps=4)
        Wrapping 'SGD' PyTorch optimizer with GA of 4 steps (gradients are averaged)
        >>> optimizer.runai.steps, optimizer.runai.step
        (4, 0)
    """


def __getattr__(name: str) -> type[Any]:
    wrapped = getattr(gradaccum.torch.optim, name)
    if not (isinstance(wrapped, type) and issubclass(wrapped, gradaccum.torch.optim.Optimizer)):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # One class per name, so that pickle finds the same one again.
    globals()[name] = type(name, (_RunAI, wrapped), {"__doc__": wrapped.__doc__, "__module__": __name__})
    return globals()[name]


def __dir__() -> list[str]:
    return dir(gradaccum.torch.optim)
