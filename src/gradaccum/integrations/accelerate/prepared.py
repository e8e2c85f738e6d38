"""The wrapped optimizer of an Accelerator: its loss scale, its clipping and its files."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate import Accelerator, DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import gather_object
from torch import Tensor, nn

from gradaccum.errors import WindowError
from gradaccum.extras import PrivateName
from gradaccum.integrations.accelerate.body import CLIPPING, LoopBody, lead_schedules
from gradaccum.integrations.accelerate.checks import check_alone, check_distribution, is_replicated, model_of
from gradaccum.schedule import Steps
from gradaccum.torch.optim import Optimizer
from gradaccum.torch.optimizer import KEY

__all__ = ["PreparedOptimizer", "prepare_optimizer"]

_NAMES = (
    PrivateName("accelerator", "_optimizers", "saves the optimizer, and links schedulers to it"),
    PrivateName("accelerator", "_models", "holds the prepared model"),
    PrivateName("accelerator", "clip_grad_norm_", "is led to the finished gradient"),
    PrivateName("accelerator", "clip_grad_value_", "the same"),
    PrivateName("accelerator", "_schedulers", "are stepped on every rank"),
    PrivateName("accelerator", "prepare_scheduler", "makes them"),
    PrivateName("accelerator", "gradient_state.num_steps", "tells whether Accelerate accumulates as well"),
    PrivateName("accelerator", "register_save_state_pre_hook", "saves the other ranks' part of an open window"),
    PrivateName("accelerator", "register_load_state_pre_hook", "loads it"),
)


def prepare_optimizer(
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer,
    steps: Steps,
    *,
    model: nn.Module | None = None,
    **options: Any,
) -> PreparedOptimizer:
    """Wrap an optimizer, and have the Accelerator know it as if `accelerator.prepare` had returned it.

    Call it after `accelerator.prepare(model)`. Then the loop is Accelerate's own, over `optimizer.batches(loader)`.
    With an FSDP2 plugin, where Accelerate prepares model and optimizer together, call it with what that has returned:
    `model, inner = accelerator.prepare(model, inner)`.

    Args:
        accelerator: The one that has prepared the model, and accumulates nothing itself.
        optimizer: The inner optimizer, not prepared; with an FSDP2 plugin the one that was prepared with the model.
        steps: Micro-batches in a window: an int >= 1, `{epoch: steps}`, or a callable `(epoch, update) -> steps`.
        model: The prepared model. None: the one that has the optimizer's parameters.
        **options: What `gradaccum.torch.optim.Optimizer` takes: `clip_grad_norm`, `nonfinite`, `reduction` ...

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: The optimizer is prepared or wrapped already, Accelerate accumulates as well, the model is not
            prepared yet, or the Accelerator's way to distribute is not known here.

    Example:
        >>> accelerator = Accelerator(cpu=True)
        >>> model = accelerator.prepare(torch.nn.Linear(3, 1))
        >>> optimizer = prepare_optimizer(accelerator, torch.optim.SGD(model.parameters(), lr=0.1), steps=4)
        >>> for x in optimizer.batches(accelerator.prepare(torch.utils.data.DataLoader(torch.ones(40, 3), 6))):
        ...     accelerator.backward(model(x).square().mean())
        ...     _ = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> optimizer.updates                # windows of 4 and 3 micro-batches
        2
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"`accelerator` must be an Accelerator. Received: {type(accelerator).__name__}.")
    for name in _NAMES:
        missing = name.missing_from(accelerator, f"accelerate {accelerate.__version__}")
        if missing:
            raise ValueError(f"{missing} Use accelerate 1.10 or later.")
    sharded = accelerator.distributed_type == DistributedType.FSDP and accelerator.is_fsdp2
    check_distribution(accelerator, sharded)
    check_alone(accelerator.gradient_state)
    # Not one of its subclasses, which accumulates already.
    if sharded and isinstance(optimizer, AcceleratedOptimizer) and not isinstance(optimizer, PreparedOptimizer):
        accelerator._optimizers = [o for o in accelerator._optimizers if o is not optimizer]
        optimizer = optimizer.optimizer
    if getattr(optimizer, "_is_accelerate_prepared", False) or isinstance(optimizer, AcceleratedOptimizer):
        raise ValueError(
            "This optimizer is prepared already. Remove it from accelerator.prepare(...), and pass the plain one: "
            f"prepare_optimizer(accelerator, inner, steps). Received: {type(optimizer).__name__}."
        )
    if model is None:
        model = model_of(accelerator, optimizer)
    if sharded and model is None:
        raise ValueError(
            "The optimizer's parameters are in no model that this Accelerator has sharded. FSDP2 makes parameters "
            "anew: prepare both, model, inner = accelerator.prepare(model, inner); then prepare_optimizer(accelerator, "
            "inner, steps)."
        )
    if accelerator.num_processes > 1 and not sharded and not is_replicated(model):
        raise ValueError(
            "The optimizer's parameters are in no model that this Accelerator has prepared. Prepare the model first: "
            "model = accelerator.prepare(model); then prepare_optimizer(accelerator, inner, steps)."
        )
    prepared = PreparedOptimizer(
        Optimizer(optimizer, steps, model=model, **options), accelerator, model=model if sharded else None
    )
    accelerator._optimizers.append(prepared)
    _lead(accelerator)
    return prepared


class PreparedOptimizer(AcceleratedOptimizer):
    """What `prepare_optimizer` returns: Accelerate's optimizer around a wrapped one, with the properties of both.

    `step`, `zero_grad` and `backward` go through the Accelerator's GradScaler, where it has one; everything else is the
    wrapper's: `batches`, `flush`, `updated`, `updates`, `inner` ...

    Args:
        optimizer: The wrapped optimizer.
        accelerator: Whose scaler it takes.
        model: The model, if it is sharded.
    """

    optimizer: Optimizer

    def __init__(self, optimizer: Optimizer, accelerator: Accelerator, *, model: nn.Module | None = None) -> None:
        super().__init__(optimizer, device_placement=False, scaler=accelerator.scaler)
        self._is_accelerate_prepared = True
        self._accelerator = accelerator
        self._folder: Path | None = None  # what `load_state` reads, on several processes
        self._loads = False  # whether the processes have yet to tell each other how loading went
        self._run = ""  # the same on all processes, and another in every run and after every `load_state`
        if accelerator.num_processes > 1 and model is None:
            self._agree()
            accelerator.register_save_state_pre_hook(self._save_own_part)
            accelerator.register_load_state_pre_hook(self._remember)
        self._model = model
        self._sharded = {} if model is None else dict(model.named_parameters())
        self._body = LoopBody(accelerator, optimizer, self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "optimizer" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.optimizer, name)

    @property
    def steps(self) -> int:
        """Micro-batches of this window; of the next one, when none is open. Settable then."""
        return self.optimizer.steps

    @steps.setter
    def steps(self, steps: Steps) -> None:
        self.optimizer.steps = steps

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last `step()` made no update: a prepared scheduler steps otherwise, in a hook, too."""
        return not (self.optimizer.updated or self._body.updating)

    @property
    def grad_norm(self) -> Tensor | None:
        """2-norm of the last finished gradient before it was clipped, by the Accelerator or by the wrapper."""
        return self._body.norm if self._body.norm is not None else self.optimizer.grad_norm

    def backward(self, loss: Tensor, weight: float | None = None, **how: Any) -> None:
        """Add this micro-batch's gradient to the open window, as `accelerator.backward` does, weighed.

        Args:
            loss: Scalar, the mean over this micro-batch.
            weight: What that mean is over: rows, or valid tokens. 0 skips the micro-batch.
            **how: As for `gradaccum.torch.optim.Optimizer.backward`.
        """
        self.optimizer.backward(loss if self.scaler is None else self.scaler.scale(loss), weight, **how)

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Count a micro-batch; with the one that closes the window, make the update."""
        check_alone(self.gradient_state)
        self._body.updating = False
        try:
            super().step(closure)
        finally:
            self._body.updating = False

    def flush(self) -> bool:
        """Close the open window now, as `gradaccum.torch.optim.Optimizer.flush` does. Returns whether it updated."""
        try:
            return self.optimizer.flush()
        finally:
            self._body.updating = False

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_post_hook(hook)

    def state_dict(self) -> dict[str, Any]:
        """What goes into a checkpoint, open window included."""
        state: dict[str, Any] = super().state_dict()
        if self._run:
            state[KEY]["save"] = self._save_point(state[KEY])
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint, open window included.

        Raises:
            WindowError: From `load_state`: a part of an open window is not there, or loading failed elsewhere.
        """
        folder, self._folder, failed = self._folder, None, None
        if folder is None:
            return super().load_state_dict(state_dict)
        try:
            super().load_state_dict(self._with_own_part(folder, state_dict))
        except Exception as error:
            failed = error
        self._settle(failed)

    def _settle(self, failed: Exception | None) -> None:
        """Raise what has failed here, or elsewhere: others would go on, and wait for that process."""
        others = self._agree(failed)
        if failed is not None:
            raise failed
        if others:
            rank, message = others[0]
            raise WindowError(f"The checkpoint could not be loaded on rank {rank}, so it is on none. There: {message}")

    # Accelerate writes the optimizer of one process. The others have another part of an open window.

    def _agree(self, failed: Exception | None = None) -> list[tuple[int, str]]:
        """Draw a new name of the run with all processes; returns those on which something has failed, and what."""
        mine = self._accelerator.process_index, failed and f"{type(failed).__name__}: {failed}", secrets.token_hex(8)
        everybody = gather_object([mine])
        self._run, self._loads = everybody[0][2], False
        return [(rank, message) for rank, message, _ in everybody if message]

    def _save_point(self, window: dict[str, Any]) -> list[Any]:
        """What is the same on all processes in one `save_state`, and in no other one."""
        return [self._run, self._number(), window["epoch"], window["updates"], window["window"]["micro_batches"]]

    def _save_own_part(self, models: Any, weights: Any, folder: str) -> None:
        file = self._own_file(folder)
        if self._accelerator.is_main_process or not self.optimizer.micro_batches:
            file.unlink(missing_ok=True)
        else:
            torch.save(self.state_dict()[KEY], file)

    def _remember(self, models: Any, folder: str) -> None:
        self._folder = Path(folder)

    def _with_own_part(self, folder: Path, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict that Accelerate has read, with this process's part of an open window."""
        window = state_dict.get(KEY)
        if window is None or not window["window"]["micro_batches"]:
            return state_dict
        (rank, size), accelerator = window.get("rank", (0, 1)), self._accelerator
        if size != accelerator.num_processes or rank == accelerator.process_index:  # the former is refused later
            return state_dict
        file = self._own_file(folder)
        part, why = _read(file)
        if not why and (part.get("save"), part.get("rank")) != (window.get("save"), [accelerator.process_index, size]):
            why = "of another save"
        if why:
            raise WindowError(
                f"The checkpoint was taken inside a window, and this process's part of it is not there: {file} is "
                f"{why}. Call accelerator.save_state() on all processes, not on the main one alone, let it finish on "
                "all of them, and keep the folder where all of them can read it; or save when `optimizer.updated` is "
                "True."
            )
        return {**state_dict, KEY: part}

    def _number(self) -> int:
        return next(i for i, optimizer in enumerate(self._accelerator._optimizers) if optimizer is self)

    def _own_file(self, folder: str | Path) -> Path:
        return Path(folder) / f"optimizer_{self._number()}_window_{self._accelerator.process_index}.bin"

    def owned(self, parameters: list[Tensor]) -> list[Tensor]:
        """Those of the parameters that it updates: the sharded ones, where a forward pass has put whole ones there."""
        known = {id(p): p for group in self.param_groups for p in group["params"]}
        if self._model is not None:
            known |= {id(p): self._sharded[name] for name, p in self._model.named_parameters()}
        return [known[id(p)] for p in parameters if id(p) in known]


def _read(file: Path) -> tuple[dict[str, Any], str]:
    """A process's part of an open window, and what is wrong with its file."""
    if not file.exists():
        return {}, "missing"
    try:
        part = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # cut off: errors of zip files, of pickles, of tensors
        return {}, f"not whole ({type(error).__name__})"
    return (part, "") if isinstance(part, dict) else ({}, "not what was written")


def _lead(accelerator: Accelerator) -> None:
    """Have the Accelerator's clipping wait for finished gradients, and `load_state` for all processes."""
    lead_schedules(accelerator, lambda: [o._body for o in accelerator._optimizers if isinstance(o, PreparedOptimizer)])
    for name in (*CLIPPING, "load_state"):
        original = getattr(accelerator, name)
        if getattr(original, "__wrapped__", None) is None:
            led = _led(accelerator, name, original) if name in CLIPPING else _together(accelerator, original)
            setattr(accelerator, name, led)


def _together(accelerator: Accelerator, original: Callable[..., Any]) -> Callable[..., Any]:
    """Have `load_state` succeed on all processes or on none: those that have come further would wait for one."""

    @functools.wraps(original)
    def load_state(*args: Any, **keywords: Any) -> Any:
        listed, failed = [o for o in accelerator._optimizers if isinstance(o, PreparedOptimizer) and o._run], None
        if not listed:
            return original(*args, **keywords)
        for optimizer in listed:
            optimizer._loads = True
        try:
            original(*args, **keywords)
        except Exception as error:
            failed = error
        for optimizer in [o for o in listed if o._loads]:
            optimizer._agree(failed)
        return listed[0]._settle(failed)

    return load_state


def _led(accelerator: Accelerator, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **keywords: Any) -> Any:
        found = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        prepared = [o for o in accelerator._optimizers if isinstance(o, PreparedOptimizer)]
        owned = {id(o): own for o in prepared if (own := o.owned(found))}
        if not owned:
            return original(found, *args, **keywords)
        others = [o for o in accelerator._optimizers if id(o) not in owned and _ids(o) & {id(p) for p in found}]
        if len(owned) + len(others) > 1:
            raise ValueError(
                f"accelerator.{name} was given parameters of {len(owned) + len(others)} optimizers, whose windows "
                "close apart. Call it for the parameters of each."
            )
        owner = next(o for o in prepared if id(o) in owned)
        owner._body.clip(name, owned[id(owner)], args, keywords)
        return None  # the norm is not known before the window closes: `grad_norm`

    return clip


def _ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
