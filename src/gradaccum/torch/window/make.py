"""Makes the windows of an optimizer: on one device, or on several ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from gradaccum.on_torch.noise import NoiseMeter
from gradaccum.schedule import Schedule
from gradaccum.torch.watch import parameters_of
from gradaccum.torch.window.gradient_window import GradientWindow
from gradaccum.torch.window.windows import Windows


def make_windows(
    inner: Any,
    schedule: Schedule,
    noise: NoiseMeter | None,
    options: Mapping[str, Any],
    wrapper: Callable[[], Any],
    check_steps: Callable[[Schedule], None],
    ranks: Any = None,
) -> Windows:
    """Those of `ranks`, a `gradaccum.torch.distributed.Ranks`; None: of one device."""
    parameters = functools.partial(parameters_of, inner)
    if ranks is None:
        return Windows(inner, schedule, GradientWindow(parameters, noise, options), wrapper, check_steps)
    from gradaccum.torch.window.ranks_window import RanksWindow
    from gradaccum.torch.window.ranks_windows import RanksWindows

    current = RanksWindow(parameters, noise, options, ranks)
    return RanksWindows(inner, schedule, current, wrapper, check_steps, ranks)
