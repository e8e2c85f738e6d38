"""Which classes run a step's windows: the one table of what hangs on the plain window, chosen once per `TrainStep`.

What isn't asked for isn't imported. A feature is a line in `features_of`, with a subclass of `WindowRunner`, of
`TrainPasses`, or of both, in a module of its own.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from gradaccum.torch.loss import Objective
from gradaccum.torch.train_step.micro_batcher import MicroBatcher
from gradaccum.torch.train_step.options import Options, inside
from gradaccum.torch.train_step.passes import TrainPasses, composed
from gradaccum.torch.train_step.update import Update
from gradaccum.torch.train_step.window import WindowRunner


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
