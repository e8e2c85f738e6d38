"""A wrapped optimizer for Accelerate's Accelerator, with its loss scale, clipping and checkpoints.

The Accelerator's own loop fills its windows.
"""

from __future__ import annotations

from gradaccum.extras import require

require("accelerate")

import functools
import gc
import itertools
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sized
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate import Accelerator, DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradaccum.errors import WindowError
from gradaccum.extras import PrivateName
from gradaccum.integrations.trainer import Library, fsdp1, refuse
from gradaccum.lazy import listed
from gradaccum.schedule import Steps
from gradaccum.torch.distributed import Settings
from gradaccum.torch.optim import Optimizer
from gradaccum.torch.optimizer import KEY

__all__ = ["PreparedOptimizer", "prepare_optimizer"]

__dir__ = listed(__name__)

logger = logging.getLogger("gradaccum")

_ACCELERATE = Library(
    "accelerate",
    accelerate.__version__,
    "Use accelerate 1.10 or later.",
    (
        PrivateName("accelerator", "_optimizers", "saves the optimizer, and links schedulers to it"),
        PrivateName("accelerator", "_models", "holds the prepared model"),
        PrivateName("accelerator", "clip_grad_norm_", "is applied to the finished gradient"),
        PrivateName("accelerator", "clip_grad_value_", "the same"),
        PrivateName("accelerator", "_schedulers", "miss updates after the loop, which a warning reports"),
        PrivateName("accelerator", "gradient_state.num_steps", "tells whether Accelerate accumulates as well"),
        PrivateName("accelerator", "gradient_state.dataloader_references", "tells which batch is the epoch's last"),
        PrivateName("accelerator", "register_save_state_pre_hook", "saves the other ranks' part of an open window"),
        PrivateName("accelerator", "register_load_state_pre_hook", "loads it"),
    ),
)

CLIPPING: dict[str, Callable[..., Any]] = {
    "clip_grad_norm_": torch.nn.utils.clip_grad_norm_,
    "clip_grad_value_": torch.nn.utils.clip_grad_value_,
}

Clip = tuple[str, list[Tensor], tuple[Any, ...], dict[str, Any]]
"""Function, parameters, arguments."""

_KNOWN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP)


def prepare_optimizer(
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer,
    steps: Steps,
    *,
    model: nn.Module | None = None,
    **options: Any,
) -> PreparedOptimizer:
    """Wrap an optimizer, and register it with the Accelerator as `accelerator.prepare` does.

    Call it after `accelerator.prepare(model)`. Loop over `optimizer.batches(loader)`, where a batch's weight is its
    rows, or over a prepared loader, where all batches weigh the same. The last batch of either closes the epoch's last
    window. An FSDP2 plugin prepares model and optimizer together, so pass the optimizer that
    `model, inner = accelerator.prepare(model, inner)` returns.

    Args:
        accelerator: The Accelerator that prepared the model. It must not accumulate itself.
        optimizer: The inner optimizer, not prepared; with an FSDP2 plugin the one that was prepared with the model.
        steps: Micro-batches in a window: an int >= 1, `{epoch: steps}`, or a callable `(epoch, update) -> steps`.
        model: The prepared model. Default: the one that has the optimizer's parameters.
        **options: Options of `gradaccum.torch.optim.Optimizer`: `nonfinite`, `reduction`, `clip_grad_norm` (which clips
            on a rank without any batch, too) ...

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: The optimizer is prepared or wrapped already, Accelerate accumulates too, the model is not
            prepared yet, or the Accelerator's way to distribute is not supported.

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
    refuse(_wrong(accelerator))
    _check_alone(accelerator.gradient_state)
    sharded = accelerator.distributed_type == DistributedType.FSDP
    # Not one of its subclasses, which accumulates already.
    if sharded and isinstance(optimizer, AcceleratedOptimizer) and not isinstance(optimizer, PreparedOptimizer):
        accelerator._optimizers = [o for o in accelerator._optimizers if o is not optimizer]
        optimizer = optimizer.optimizer
    if getattr(optimizer, "_is_accelerate_prepared", False) or isinstance(optimizer, AcceleratedOptimizer):
        raise ValueError(
            "This optimizer is prepared already. Remove it from accelerator.prepare(...), and pass the plain one: "
            f"prepare_optimizer(accelerator, inner, steps). Received: {type(optimizer).__name__}."
        )
    model = _checked_model(accelerator, optimizer, model, sharded)
    prepared = PreparedOptimizer(
        Optimizer(optimizer, steps, model=model, **options), accelerator, model=model if sharded else None
    )
    accelerator._optimizers.append(prepared)
    if not hasattr(accelerator, "_gradaccum_methods"):
        for method in CLIPPING:
            setattr(accelerator, method, _clipping_at_the_end(accelerator, method, getattr(accelerator, method)))
        accelerator._gradaccum_methods = True
    return prepared


class PreparedOptimizer(AcceleratedOptimizer):
    """Accelerate's optimizer around a wrapped one, with the properties of both; `prepare_optimizer` returns it.

    `step`, `zero_grad` and `backward` use the Accelerator's GradScaler, if it has one; everything else is the
    wrapper's: `batches`, `flush`, `updated`, `updates`, `inner` ...

    Args:
        optimizer: The wrapped optimizer.
        accelerator: The Accelerator, whose scaler it uses.
        model: The model, if it is sharded.
    """

    optimizer: Optimizer

    def __init__(self, optimizer: Optimizer, accelerator: Accelerator, *, model: nn.Module | None = None) -> None:
        super().__init__(optimizer, device_placement=False, scaler=accelerator.scaler)
        self._is_accelerate_prepared = True
        self._model = model
        self._sharded = {} if model is None else dict(model.named_parameters())
        several = accelerator.num_processes > 1
        self._files = WindowFiles(accelerator, self) if several and model is None else None
        self._clips: dict[Any, tuple[str, Iterable[Tensor], tuple[Any, ...], dict[str, Any]]] = {}
        """What the body has asked for in this window. Until its end parameters are not looked at."""
        self._last_clips: list[Clip] = []
        """What it asked for in its last one."""
        self._norm: Tensor | None = None
        self._known: tuple[Any, set[int]] = (None, set())
        self._in_body = False
        """Whether `step()` or `flush()` is running: updates at other times come after the loop."""
        self._updated = False
        self._steps_in_loop, self._loops = 0, 0
        self._ended: Any = None
        """The loader, and its epoch, whose last batch has closed a window here."""
        self._warned = self._warned_of_schedules = False
        self._accelerator = accelerator
        if several:
            settings = optimizer._windows.ranks.settings = Settings(self._settings)
            settings.known_early = False  # a loop's body clips after its backward pass
        optimizer.register_step_pre_hook(self._before_update)
        optimizer.register_step_post_hook(self._after_update)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "optimizer" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.optimizer, name)

    @property
    def steps(self) -> int:
        """Micro-batches of this window, or of the next one if none is open; then you can set it."""
        return self.optimizer.steps

    @steps.setter
    def steps(self, steps: Steps) -> None:
        self.optimizer.steps = steps

    @property
    def updated(self) -> bool:
        """Whether the last `step()` or `flush()` made an update."""
        return self._updated

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last `step()` made no update; a prepared scheduler reads this."""
        return not self._updated

    @property
    def grad_norm(self) -> Tensor | None:
        """2-norm of the last finished gradient before it was clipped, by the Accelerator or by the wrapper."""
        return self._norm if self._norm is not None else self.optimizer.grad_norm

    def backward(self, loss: Tensor, weight: float | None = None, **how: Any) -> None:
        """Add this micro-batch's gradient to the open window, as `accelerator.backward` does, with its weight.

        Args:
            loss: Scalar, the mean over this micro-batch.
            weight: What that mean is over: rows, or valid tokens. 0 skips the micro-batch.
            **how: As for `gradaccum.torch.optim.Optimizer.backward`.
        """
        self.optimizer.backward(loss if self.scaler is None else self.scaler.scale(loss), weight, **how)

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Count a micro-batch. The one that closes the window, or the loader's last, makes the update."""
        _check_alone(self.gradient_state)
        self._in_body, self._updated = True, False
        try:
            if self.scaler is None:  # Accelerate's own step looks for optimizers and devices that this is not
                self.optimizer.step(closure)
            else:
                super().step(closure)
            if self._is_epochs_last():
                self.optimizer.flush()
        finally:
            self._leave_body()

    def flush(self) -> bool:
        """Close the open window now, as `gradaccum.torch.optim.Optimizer.flush` does. Returns whether it updated."""
        self._in_body, self._updated = True, False
        try:
            return self.optimizer.flush()
        finally:
            self._leave_body()

    def _leave_body(self) -> None:
        self._in_body = False
        if not self.optimizer.micro_batches:
            self._clips.clear()

    def discard(self) -> None:
        """Drop the open window without an update, as `gradaccum.torch.optim.Optimizer.discard` does."""
        self._clips.clear()
        self.optimizer.discard()

    def batches(self, loader: Iterable[Any], *, weight: Callable[[Any], float] | None = None) -> Any:
        """The loader's batches, as from `gradaccum.torch.optim.Optimizer.batches`."""
        if not self.optimizer.micro_batches:  # of a window that an earlier loop has dropped
            self._clips.clear()
        if hasattr(getattr(loader, "iterable", None), "end_of_dataloader"):
            logger.warning(
                "batches() fetches one batch ahead, because the Accelerator's loader is wrapped in another iterable; "
                "so accelerator.gather_for_metrics is one batch ahead, too. Wrap batches() instead: "
                "tqdm(optimizer.batches(loader))."
            )
        return self.optimizer.batches(loader, weight=weight)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients between windows; inside an open window, do nothing."""
        self.optimizer.zero_grad(set_to_none is not False)

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_post_hook(hook)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, open window included."""
        state: dict[str, Any] = super().state_dict()
        return state if self._files is None else self._files.marked(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint, open window included.

        Raises:
            WindowError: From `load_state`, if a part of an open window is missing, or loading failed on another rank.
        """
        self._clips.clear()
        self._updated = False
        super().load_state_dict(state_dict if self._files is None else self._files.own_part(state_dict))

    def _is_epochs_last(self) -> bool:
        """Whether a plain loop over one of Accelerate's loaders has come to its last batch."""
        if self.optimizer._in_batches:
            return False
        loaders = self.gradient_state.dataloader_references
        if len(loaders) != self._loops:  # another loop has begun
            self._loops, self._steps_in_loop = len(loaders), 0
        self._steps_in_loop += 1
        loader: Any = loaders[-1]
        if loader is None or not loader.end_of_dataloader:
            return False
        if isinstance(loader, Sized) and self._steps_in_loop > len(loader):
            if not self._warned:
                self._warned = True
                logger.warning(
                    "step() is called more often than the loader has batches (%d), so the loader's last batch doesn't "
                    "close the window, which continues in the next epoch. Call optimizer.flush() at the epoch's end.",
                    len(loader),
                )
            return False
        epoch = id(loader), getattr(loader, "iteration", None)
        if epoch == self._ended:
            raise WindowError(
                "step() was called again in the loader's last batch, which had closed the epoch's last window. Call it "
                "once per batch; or loop over optimizer.batches(parts_of_batches), where each part is a micro-batch."
            )
        self._ended, self._steps_in_loop = epoch, 0
        return True

    def _clips_now(self) -> list[Clip]:
        """What is clipped at the end of this window; after the loop, as at its last one."""
        if not self._clips and not self._in_body:
            return self._last_clips
        for key, (name, parameters, args, keywords) in self._clips.items():
            self._clips[key] = name, self._owned(parameters), args, keywords
        return [*self._clips.values()]  # type: ignore[list-item]  # lists by now

    def _own_ids(self) -> set[int]:
        """Of the parameters that it updates."""
        lengths = [len(group["params"]) for group in self.param_groups]
        if self._known[0] != lengths:
            self._known = lengths, _ids(self)
        return self._known[1]

    def _owned(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Those that it updates: the sharded ones, where a forward pass has put whole ones in their place."""
        names = {} if self._model is None else {id(p): self._sharded[n] for n, p in self._model.named_parameters()}
        own = self._own_ids()
        return [one for p in parameters if id(one := names.get(id(p), p)) in own]

    def _settings(self) -> list[dict[str, Any]]:
        """What must be the same on all ranks at a window's end: hyperparameters, and clipping."""
        first, *others = self.param_groups
        parameters = [*(p for group in self.param_groups for p in group["params"]), *self._sharded.values()]
        places = {id(p): place for place, p in enumerate(parameters)}
        clipping = [
            f"accelerator.{name}(parameters {[places[id(p)] for p in those]}, {_plain(args)}, {_plain(keywords)})"
            for name, those, args, keywords in self._clips_now()
        ]
        return [{**first, "clipping": ", ".join(clipping)} if clipping else first, *others]

    def _before_update(self, *_: Any) -> None:
        self._updated, self._norm, self._last_clips = True, None, self._clips_now()
        for name, parameters, args, keywords in self._last_clips:
            norm: Tensor | None = CLIPPING[name](parameters, *args, **keywords)
            self._norm = self._norm if norm is None else norm
        self._clips.clear()

    def _after_update(self, *_: Any) -> None:
        if self._in_body or self._warned_of_schedules or len(self.optimizer._optimizer_step_post_hooks) > 1:
            return
        own = self, self.optimizer, self.optimizer.inner
        prepared = (getattr(one.scheduler, "optimizer", None) for one in self._accelerator._schedulers)
        if any(hasattr(one.step, "_wrapped_by_lr_sched") for one in own[:2]) or any(one in own for one in prepared):
            self._warned_of_schedules = True
            logger.warning(
                "An update was made after the loop, because the last batch was skipped or other ranks had more. A "
                "scheduler that the loop's body steps misses it. Use a hook: optimizer.register_step_post_hook(lambda "
                "*_: scheduler.step())."
            )


def _clipping_at_the_end(accelerator: Accelerator, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """The Accelerator's clipping, which waits for the finished gradient where a window holds it."""

    @functools.wraps(original)
    def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **keywords: Any) -> Any:
        rest = iter([parameters] if isinstance(parameters, Tensor) else parameters)
        found, owners = list(itertools.islice(rest, 1)), accelerator._optimizers
        only = owners[0] if len(owners) == 1 and isinstance(owners[0], PreparedOptimizer) else None
        if only is None or not found or id(found[0]) not in only._own_ids():
            found += rest  # else it isn't looked at before the end
            ids = {id(p) for p in found}
            owners = [o for o in owners if (o._owned(found) if isinstance(o, PreparedOptimizer) else ids & _ids(o))]
        owner = next((o for o in owners if isinstance(o, PreparedOptimizer)), None)
        if owner is None:
            return original(found, *args, **keywords)
        if len(owners) > 1:
            raise ValueError(
                f"accelerator.{name} was given parameters of {len(owners)} optimizers, whose windows close at "
                "different times. Call it once for the parameters of each."
            )
        owner._clips[name, id(found[0])] = name, itertools.chain(found, rest), args, keywords
        return None  # the norm is not known before the window closes: `grad_norm`

    return clip


def _ids(optimizer: Any) -> set[int]:
    """Of the parameters that it updates; of none, where it is no optimizer, which `Optimizer` refuses by name."""
    return {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}


def _plain(value: Any) -> Any:
    """Numbers in place of tensors."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return [*map(_plain, value)]
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


# Several processes.


class WindowFiles:
    """A process's part of an open window, in the folders of `save_state`: Accelerate writes one process's optimizer."""

    def __init__(self, accelerator: Accelerator, prepared: Any) -> None:
        self._accelerator, self._prepared = accelerator, prepared
        self._folder: Path | None = None
        """What `load_state` reads."""
        self._run = gather_object([secrets.token_hex(8)])[0]
        """The same on all processes, and another in every run and after every `load_state`."""
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._begin_load)

    def marked(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A state dict that says of which save it is: the same on all processes, and in no other save."""
        window = state_dict[KEY]
        position = [window["epoch"], window["updates"], window["window"]["micro_batches"]]
        return {**state_dict, KEY: {**window, "save": [self._run, self._number(), *position]}}

    def own_part(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict, inside `load_state` with this process's part of its open window."""
        folder, self._folder = self._folder, None
        window = state_dict.get(KEY)
        if folder is None or window is None or not window["window"]["micro_batches"]:
            return state_dict
        (rank, size), own = window.get("rank", (0, 1)), self._accelerator.process_index
        if size != self._accelerator.num_processes:  # refused later
            return state_dict
        file, part, why = self._file(folder), window, ""
        if rank != own:
            try:
                part = torch.load(file, map_location="cpu", weights_only=True)
                if (part.get("save"), part.get("rank")) != (window.get("save"), [own, size]):
                    why = "from another save"
            except FileNotFoundError:
                why = "missing"
            except Exception as error:  # cut off: errors of zip files, of pickles, of tensors
                why = f"incomplete ({type(error).__name__})"
        problems = [problem for problem in gather_object([why and f"{file} is {why}"]) if problem]
        if problems:
            raise WindowError(
                f"The checkpoint was taken inside a window, and a process's part of it can't be used: {problems[0]}. "
                "Call accelerator.save_state() on all processes, not on the main one alone, let it finish on all of "
                "them, and keep the folder where all of them can read it; or save when `optimizer.updated` is True."
            )
        return {**state_dict, KEY: part}

    def _save(self, models: Any, weights: Any, folder: str) -> None:
        file = self._file(folder)
        if self._accelerator.is_main_process or not self._prepared.micro_batches:
            file.unlink(missing_ok=True)
        else:
            torch.save(self._prepared.state_dict()[KEY], file)

    def _begin_load(self, models: Any, folder: str) -> None:
        self._folder = Path(folder)
        self._run += "+"

    def _number(self) -> int:
        return next(i for i, one in enumerate(self._accelerator._optimizers) if one is self._prepared)

    def _file(self, folder: str | Path) -> Path:
        return Path(folder) / f"optimizer_{self._number()}_window_{self._accelerator.process_index}.bin"


# What an Accelerator must be.


def _wrong(accelerator: Accelerator) -> Iterator[str]:
    yield from _ACCELERATE.lacks(accelerator)
    kind = accelerator.distributed_type
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        yield fsdp1("FullyShardedDataParallelPlugin(fsdp_version=2)")
    if kind not in _KNOWN:
        yield (
            "prepare_optimizer works on one device, with DistributedDataParallel, and with FSDP2. Received: an "
            f"Accelerator of type {kind.value}. Remove its plugin."
        )


def _check_alone(state: Any) -> None:
    if state.num_steps != 1:
        raise ValueError(
            "Accelerate and gradaccum both accumulate. Received: Accelerator(gradient_accumulation_steps="
            f"{state.num_steps}). Remove it, and GradientAccumulationPlugin(num_steps=...), from the Accelerator."
        )


def _checked_model(
    accelerator: Accelerator, optimizer: Any, model: nn.Module | None, sharded: bool
) -> nn.Module | None:
    """The prepared model that has the optimizer's parameters: on several ranks there must be one."""
    if model is None:
        own, models = _ids(optimizer), accelerator._models
        if not sharded and accelerator.num_processes > 1:
            # Accelerate keeps the modules inside. By type, without isinstance: other objects may be proxies.
            models = [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]
        model = next((m for m in models if own & {*map(id, m.parameters())}), None)
    parts = () if model is None else model.modules()  # the ranks may train a part of it together
    is_parallel = sharded or any(isinstance(m, DistributedDataParallel) for m in parts)
    if (sharded and model is None) or (accelerator.num_processes > 1 and not is_parallel):
        kind, how = (
            ("sharded", "FSDP2 replaces parameters, so prepare both: model, inner = accelerator.prepare(model, inner)")
            if sharded
            else ("prepared", "Prepare the model first: model = accelerator.prepare(model)")
        )
        raise ValueError(
            f"The optimizer's parameters are in no model that this Accelerator has {kind}. {how}; then "
            "prepare_optimizer(accelerator, inner, steps)."
        )
    return model
