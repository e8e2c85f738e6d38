"""What a `TrainStep` with compiled windows is composed of."""

from __future__ import annotations

from typing import Any

from gradaccum.torch.compiled.options import check_compiled, keywords_of
from gradaccum.torch.compiled.window import CompiledPasses, CompiledRunner
from gradaccum.torch.train_step.passes import TrainPasses, composed


def add_to(features: Any, options: Any, ranks: Any) -> None:
    """Add compiled windows to `features`, the classes of a step with these options.

    Raises:
        TypeError, ValueError: `compile` is invalid, or can't be combined with another option.
    """
    keywords = keywords_of(options.compile)
    check_compiled(
        batch_norm=options.batch_norm, noise_scale=bool(options.noise_scale), distributed=ranks.is_distributed
    )
    eager_passes = composed(TrainPasses, *features.passes)
    features.passes.insert(0, CompiledPasses)
    features.add(CompiledRunner, keywords=keywords, verify=options.verify, eager_passes=eager_passes)
