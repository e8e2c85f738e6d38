"""Which classes run a step's windows: the one table of what hangs on the plain window, chosen once per `TrainStep`.

What isn't asked for isn't imported. A feature is a line in `features_of`, with a subclass of `WindowRunner`, of
`TrainPasses`, or of both, in a module of its own.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gradaccum.on_torch.arguments import checked_noise
from gradaccum.torch.loss import Objective
from gradaccum.torch.train_step.micro_batcher import MicroBatcher
from gradaccum.torch.train_step.options import Options, inside
from gradaccum.torch.train_step.passes import TrainPasses, composed
from gradaccum.torch.train_step.update import Update
from gradaccum.torch.train_step.window import WindowRunner

logger = logging.getLogger("gradaccum")


def objective_of(model: Any, options: Options, **loss: Any) -> tuple[Objective, Callable[..., Any] | None]:
    """How the loss is computed; and what is called around a step's call, where that returns more than the loss."""
    if not options.has_aux:
        return Objective(model, **loss), None
    from gradaccum.torch.aux_outputs import AuxObjective, with_aux

    objective = AuxObjective(model, aux=options.aux, **loss)
    return objective, lambda call: functools.partial(with_aux, call, objective.collector)


class Features:
    """The classes that a step needs, and what these are made with beside a plain runner's arguments."""

    def __init__(self) -> None:
        self.runners: list[type[WindowRunner]] = []
        self.passes: list[type[TrainPasses]] = []
        self.keywords: dict[str, Any] = {}

    def add(
        self, runner: type[WindowRunner] | None = None, passes: type[TrainPasses] | None = None, **keywords: Any
    ) -> None:
        """Those that are added first override those that follow."""
        self.runners += [] if runner is None else [runner]
        self.passes += [] if passes is None else [passes]
        self.keywords |= keywords


class OneDevice:
    """What a step asks of its ranks, where there are none."""

    is_distributed = sharded = False
    rank, size = 0, 1


def has_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def find_ranks(model: nn.Module, objective: Objective, update: Update, options: Options) -> Any:
    """What keeps this model's large batches together with those of the other ranks."""
    if not has_ranks():
        return OneDevice()
    from gradaccum.torch.train_step.global_batch import detected

    return detected(model, objective, update, options)


def check_ranks(model: nn.Module, parameters: Sequence[Any], ranks: Any) -> None:
    """Raise, or warn, if ranks share this model's update and the step doesn't know it."""
    if has_ranks():
        from gradaccum.torch.train_step.global_batch import check_members

        check_members(model, parameters, ranks)


def spans_ranks(model: nn.Module, ranks: Any, *, exact: bool, verify: bool) -> bool:
    """Whether a forward pass of one rank needs the others."""
    layers = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    spans = ranks.sharded or (ranks.is_distributed and exact and layers)
    if verify and spans:
        logger.warning(
            "Whether micro-batches make the large batch's update is not proven here: in this model the ranks wait "
            "for each other in every pass. Prove it on one process, with gradaccum.torch.check_equivalence."
        )
    return spans


def features_of(model: nn.Module, options: Options, update: Update, ranks: Any, whole: Any) -> Features:
    """What takes part in windows. `whole`: exact BatchNorm's `whole_batch`, if there is one."""
    found = _everywhere(options, whole)
    if options.reproducible:
        from gradaccum.torch.reproducible.window import ReproducibleWindow, check_reproducible

        check_reproducible(model, ranks, vars(options), closures=bool(options.closures()))
        found.add(ReproducibleWindow, options=options)
        return found
    if update.noise is not None:
        from gradaccum.torch.train_step.scaled import NoisyPasses, NoisyRunner

        found.add(NoisyRunner, NoisyPasses, noise=update.noise)
    if options.has_aux:
        from gradaccum.torch.aux_outputs import AuxPasses

        found.add(None, AuxPasses)
    if ranks.sharded:
        from gradaccum.torch.train_step.sharded import ExactShardedRunner, ShardedPasses, ShardedRunner

        found.add(ShardedRunner if whole is None else ExactShardedRunner, ShardedPasses, ranks=ranks)
    elif ranks.is_distributed:
        from gradaccum.torch.train_step.global_batch import RanksRunner

        found.add(RanksRunner, ranks=ranks)
    if options.compile is not False:
        from gradaccum.torch.compiled import add_to

        add_to(found, options, ranks)
    return found


def rehearsal_features(options: Options, model: nn.Module, whole: Any) -> Features:
    """What takes part in the windows of proofs, which this rank runs alone."""
    from gradaccum.torch.train_step.rehearsal import Rehearsal

    found = _everywhere(options, whole)
    found.add(Rehearsal, alone=inside(model) if whole is None else whole.chunks)
    return found


def _everywhere(options: Options, whole: Any) -> Features:
    """What changes the passes themselves, so that proofs go through it as well."""
    found = Features()
    if whole is not None:
        from gradaccum.torch.train_step.exact import ExactRunner

        found.add(ExactRunner, whole=whole)
    if options.scaler is not None:
        from gradaccum.torch.train_step.scaled import ScaledPasses

        found.add(None, ScaledPasses)
    return found


def noise_meter(noise_scale: bool) -> Any:
    """What measures the noise scale, or None."""
    if not checked_noise(noise_scale):
        return None
    from gradaccum.on_torch.noise import NoiseMeter

    return NoiseMeter()


def whole_batch(*arguments: Any, **keywords: Any) -> Any:
    """A model that takes the large batch with exact BatchNorm, `WholeBatch`."""
    from gradaccum.torch.train_step.exact import WholeBatch

    return WholeBatch(*arguments, **keywords)


def window_runner(
    objective: Objective, model: nn.Module, update: Update, batcher: MicroBatcher, features: Features, **keywords: Any
) -> Any:
    """A runner of the class that these features compose."""
    runner, passes = composed(WindowRunner, *features.runners), composed(TrainPasses, *features.passes)
    return runner(objective, model, update, batcher, passes=passes, **features.keywords, **keywords)
