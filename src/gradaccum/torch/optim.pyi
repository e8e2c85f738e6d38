# Made by `python -m scripts.stubs` from torch 2.13.0: what editors and type checkers see of gradaccum.torch.optim.

from typing import Any, Literal, overload

import torch
from torch.optim.optimizer import ParamsT

from gradaccum.schedule import Steps
from gradaccum.torch.optimizer import Optimizer as Optimizer

__all__ = ["Optimizer"]

class ASGD(Optimizer):
    @overload
    def __init__(self, params: ParamsT, lr: float | torch.Tensor = ..., lambd: float = ..., alpha: float = ..., t0: float = ..., weight_decay: float = ..., foreach: bool | None = ..., maximize: bool = ..., differentiable: bool = ..., capturable: bool = ..., *, steps: Steps, model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...
    @overload
    def __init__(self, steps: Steps, params: ParamsT, lr: float | torch.Tensor = ..., lambd: float = ..., alpha: float = ..., t0: float = ..., weight_decay: float = ..., foreach: bool | None = ..., maximize: bool = ..., differentiable: bool = ..., capturable: bool = ..., *, model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...

class Adadelta(Optimizer):
    @overload
    def __init__(self, params: ParamsT, lr: float | torch.Tensor = ..., rho: float = ..., eps: float = ..., weight_decay: float = ..., foreach: bool | None = ..., *, capturable: bool = ..., maximize: bool = ..., differentiable: bool = ..., steps: Steps, model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...
    @overload
    def __init__(self, steps: Steps, params: ParamsT, lr: float | torch.Tensor = ..., rho: float = ..., eps: float = ..., weight_decay: float = ..., foreach: bool | None = ..., *, capturable: bool = ..., maximize: bool = ..., differentiable: bool = ..., model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...

class Adafactor(Optimizer):
    @overload
    def __init__(self, params: ParamsT, lr: float | torch.Tensor = ..., beta2_decay: float = ..., eps: tuple[float | None, float] = ..., d: float = ..., weight_decay: float = ..., *, foreach: bool | None = ..., maximize: bool = ..., steps: Steps, model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...
    @overload
    def __init__(self, steps: Steps, params: ParamsT, lr: float | torch.Tensor = ..., beta2_decay: float = ..., eps: tuple[float | None, float] = ..., d: float = ..., weight_decay: float = ..., *, foreach: bool | None = ..., maximize: bool = ..., model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...

class Adagrad(Optimizer):
    @overload
    def __init__(self, params: ParamsT, lr: float | torch.Tensor = ..., lr_decay: float = ..., weight_decay: float = ..., initial_accumulator_value: float = ..., eps: float = ..., foreach: bool | None = ..., *, maximize: bool = ..., differentiable: bool = ..., fused: bool | None = ..., steps: Steps, model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...
    @overload
    def __init__(self, steps: Steps, params: ParamsT, lr: float | torch.Tensor = ..., lr_decay: float = ..., weight_decay: float = ..., initial_accumulator_value: float = ..., eps: float = ..., foreach: bool | None = ..., *, maximize: bool = ..., differentiable: bool = ..., fused: bool | None = ..., model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...

class Adam(Optimizer):
    @overload
    def __init__(self, params: ParamsT, lr: float | torch.Tensor = ..., betas: tuple[float | torch.Tensor, float | torch.Tensor] = ..., eps: float = ..., weight_decay: float = ..., amsgrad: bool = ..., *, foreach: bool | None = ..., maximize: bool = ..., capturable: bool = ..., differentiable: bool = ..., fused: bool | None = ..., decoupled_weight_decay: bool = ..., steps: Steps, model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...
    @overload
    def __init__(self, steps: Steps, params: ParamsT, lr: float | torch.Tensor = ..., betas: tuple[float | torch.Tensor, float | torch.Tensor] = ..., eps: float = ..., weight_decay: float = ..., amsgrad: bool = ..., *, foreach: bool | None = ..., maximize: bool = ..., capturable: bool = ..., differentiable: bool = ..., fused: bool | None = ..., decoupled_weight_decay: bool = ..., model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...

class AdamW(Optimizer):
    @overload
    def __init__(self, params: ParamsT, lr: float | torch.Tensor = ..., betas: tuple[float | torch.Tensor, float | torch.Tensor] = ..., eps: float = ..., weight_decay: float = ..., amsgrad: bool = ..., *, maximize: bool = ..., foreach: bool | None = ..., capturable: bool = ..., differentiable: bool = ..., fused: bool | None = ..., steps: Steps, model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...
    @overload
    def __init__(self, steps: Steps, params: ParamsT, lr: float | torch.Tensor = ..., betas: tuple[float | torch.Tensor, float | torch.Tensor] = ..., eps: float = ..., weight_decay: float = ..., amsgrad: bool = ..., *, maximize: bool = ..., foreach: bool | None = ..., capturable: bool = ..., differentiable: bool = ..., fused: bool | None = ..., model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...

class Adamax(Optimizer):
    @overload
    def __init__(self, params: ParamsT, lr: float | torch.Tensor = ..., betas: tuple[float, float] = ..., eps: float = ..., weight_decay: float = ..., foreach: bool | None = ..., *, maximize: bool = ..., differentiable: bool = ..., capturable: bool = ..., steps: Steps, model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...
    @overload
    def __init__(self, steps: Steps, params: ParamsT, lr: float | torch.Tensor = ..., betas: tuple[float, float] = ..., eps: float = ..., weight_decay: float = ..., foreach: bool | None = ..., *, maximize: bool = ..., differentiable: bool = ..., capturable: bool = ..., model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...

class LBFGS(Optimizer):
    @overload
    def __init__(self, params: ParamsT, lr: float | torch.Tensor = ..., max_iter: int = ..., max_eval: int | None = ..., tolerance_grad: float = ..., tolerance_change: float = ..., history_size: int = ..., line_search_fn: str | None = ..., *, steps: Steps, model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...
    @overload
    def __init__(self, steps: Steps, params: ParamsT, lr: float | torch.Tensor = ..., max_iter: int = ..., max_eval: int | None = ..., tolerance_grad: float = ..., tolerance_change: float = ..., history_size: int = ..., line_search_fn: str | None = ..., *, model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...

class Muon(Optimizer):
    @overload
    def __init__(self, params: ParamsT, lr: float = ..., weight_decay: float = ..., momentum: float = ..., nesterov: bool = ..., ns_coefficients: tuple[float, float, float] = ..., eps: float = ..., ns_steps: int = ..., adjust_lr_fn: str | None = ..., *, steps: Steps, model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...
    @overload
    def __init__(self, steps: Steps, params: ParamsT, lr: float = ..., weight_decay: float = ..., momentum: float = ..., nesterov: bool = ..., ns_coefficients: tuple[float, float, float] = ..., eps: float = ..., ns_steps: int = ..., adjust_lr_fn: str | None = ..., *, model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...

class NAdam(Optimizer):
    @overload
    def __init__(self, params: ParamsT, lr: float | torch.Tensor = ..., betas: tuple[float, float] = ..., eps: float = ..., weight_decay: float = ..., momentum_decay: float = ..., decoupled_weight_decay: bool = ..., *, foreach: bool | None = ..., maximize: bool = ..., capturable: bool = ..., differentiable: bool = ..., steps: Steps, model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...
    @overload
    def __init__(self, steps: Steps, params: ParamsT, lr: float | torch.Tensor = ..., betas: tuple[float, float] = ..., eps: float = ..., weight_decay: float = ..., momentum_decay: float = ..., decoupled_weight_decay: bool = ..., *, foreach: bool | None = ..., maximize: bool = ..., capturable: bool = ..., differentiable: bool = ..., model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...

class RAdam(Optimizer):
    @overload
    def __init__(self, params: ParamsT, lr: float | torch.Tensor = ..., betas: tuple[float, float] = ..., eps: float = ..., weight_decay: float = ..., decoupled_weight_decay: bool = ..., *, foreach: bool | None = ..., maximize: bool = ..., capturable: bool = ..., differentiable: bool = ..., steps: Steps, model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...
    @overload
    def __init__(self, steps: Steps, params: ParamsT, lr: float | torch.Tensor = ..., betas: tuple[float, float] = ..., eps: float = ..., weight_decay: float = ..., decoupled_weight_decay: bool = ..., *, foreach: bool | None = ..., maximize: bool = ..., capturable: bool = ..., differentiable: bool = ..., model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...

class RMSprop(Optimizer):
    @overload
    def __init__(self, params: ParamsT, lr: float | torch.Tensor = ..., alpha: float = ..., eps: float = ..., weight_decay: float = ..., momentum: float = ..., centered: bool = ..., capturable: bool = ..., foreach: bool | None = ..., maximize: bool = ..., differentiable: bool = ..., *, steps: Steps, model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...
    @overload
    def __init__(self, steps: Steps, params: ParamsT, lr: float | torch.Tensor = ..., alpha: float = ..., eps: float = ..., weight_decay: float = ..., momentum: float = ..., centered: bool = ..., capturable: bool = ..., foreach: bool | None = ..., maximize: bool = ..., differentiable: bool = ..., *, model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...

class Rprop(Optimizer):
    @overload
    def __init__(self, params: ParamsT, lr: float | torch.Tensor = ..., etas: tuple[float, float] = ..., step_sizes: tuple[float, float] = ..., *, capturable: bool = ..., foreach: bool | None = ..., maximize: bool = ..., differentiable: bool = ..., steps: Steps, model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...
    @overload
    def __init__(self, steps: Steps, params: ParamsT, lr: float | torch.Tensor = ..., etas: tuple[float, float] = ..., step_sizes: tuple[float, float] = ..., *, capturable: bool = ..., foreach: bool | None = ..., maximize: bool = ..., differentiable: bool = ..., model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...

class SGD(Optimizer):
    @overload
    def __init__(self, params: ParamsT, lr: float | torch.Tensor = ..., momentum: float = ..., dampening: float = ..., weight_decay: float | torch.Tensor = ..., nesterov: bool = ..., *, maximize: bool = ..., foreach: bool | None = ..., differentiable: bool = ..., fused: bool | None = ..., steps: Steps, model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...
    @overload
    def __init__(self, steps: Steps, params: ParamsT, lr: float | torch.Tensor = ..., momentum: float = ..., dampening: float = ..., weight_decay: float | torch.Tensor = ..., nesterov: bool = ..., *, maximize: bool = ..., foreach: bool | None = ..., differentiable: bool = ..., fused: bool | None = ..., model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...

class SparseAdam(Optimizer):
    @overload
    def __init__(self, params: ParamsT, lr: float | torch.Tensor = ..., betas: tuple[float, float] = ..., eps: float = ..., maximize: bool = ..., *, steps: Steps, model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...
    @overload
    def __init__(self, steps: Steps, params: ParamsT, lr: float | torch.Tensor = ..., betas: tuple[float, float] = ..., eps: float = ..., maximize: bool = ..., *, model: torch.nn.modules.module.Module | None = ..., reduction: Literal['mean', 'sum'] = ..., clip_grad_norm: float | None = ..., clip_grad_value: float | None = ..., accumulate_dtype: torch.dtype | None = ..., nonfinite: Literal['propagate', 'skip_window'] = ..., noise_scale: bool = ..., sync: Literal['window', 'micro_batch'] = ...) -> None: ...
