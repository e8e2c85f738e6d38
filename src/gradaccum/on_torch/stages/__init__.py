"""What happens to a window's summed gradients before the inner optimizer's step: a list of stages, built once.

    for stage in stages:
        if not stage(total):
            return False            # no update

No stage knows another. A new one is a module here, and a line in `gradient_stages`, which states the order.
"""

from gradaccum.on_torch.stages.cast import Cast
from gradaccum.on_torch.stages.clip_norm import ClipNorm
from gradaccum.on_torch.stages.clip_value import ClipValue
from gradaccum.on_torch.stages.divide import Divide
from gradaccum.on_torch.stages.finite import Finite
from gradaccum.on_torch.stages.noise import MeasureNoise
from gradaccum.on_torch.stages.order import gradient_stages
from gradaccum.on_torch.stages.total import Stage, WindowTotal, run_stages
from gradaccum.on_torch.stages.unscale import Unscale

__all__ = [
    "Cast",
    "ClipNorm",
    "ClipValue",
    "Divide",
    "Finite",
    "MeasureNoise",
    "Stage",
    "Unscale",
    "WindowTotal",
    "gradient_stages",
    "run_stages",
]
