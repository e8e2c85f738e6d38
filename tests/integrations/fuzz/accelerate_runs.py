"""Random loops of Accelerate's, around `prepare_optimizer` or a wrapped optimizer that Accelerate prepares, against the
naive loop over each window's rows.
"""

import os
import random

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from gradaccum.integrations.accelerate import prepare_optimizer
from gradaccum.torch.optim import Optimizer
from tests.integrations.fuzz.lightning_runs import OPTIMIZERS
from tests.reference import torch_updates

CLIPS = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}


def counted(batch):
    return (batch[1] != -100).sum()


class Run:
    """One program: how it loops, what an update does beside the gradient, and where it is saved and goes on."""

    def __init__(self, seed):
        choose = random.Random(seed)
        self.count, self.steps = choose.randint(5, 26), choose.choice([{0: n} for n in (1, 2, 3, 4)] + [{0: 2, 1: 3}])
        self.rows, self.epochs = choose.randint(1, 5), choose.randint(1, 3)
        self.how = choose.choice(["batches", "weight", "plain", "backward"])
        if self.how == "plain":  # whose batches weigh the same
            self.rows = choose.choice([n for n in range(1, 6) if self.count % n == 0])
        self.optimizer = choose.choice(sorted(OPTIMIZERS))
        self.scale = choose.choice([None, None, 256.0])
        self.clip = choose.choice([None, ("norm", 0.05), ("value", 0.01)])
        self.schedule = choose.choice([None, None, "prepared", "hook", "if updated"])
        whole = self.schedule is None and self.how in ("plain", "backward") and len(self.steps) == 1
        self.saved = choose.randint(1, -(-self.count // self.rows)) if whole and choose.random() < 0.7 else None
        self.wraps_first = choose.choice([False, False, True])
        if self.wraps_first:  # Accelerate's own clipping and scheduler know of no windows
            self.clip = self.clip if self.clip != ("value", 0.01) else None
            self.schedule = self.schedule and "if updated"
            self.scale = None if self.how == "backward" else self.scale
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(self.count, 4, dtype=torch.float64, generator=generator)
        y = torch.randint(3, (self.count,), generator=generator)
        if self.how in ("weight", "backward"):
            y[torch.rand(self.count, generator=generator) < 0.3] = -100
        self.data = x, y

    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()

    def loss(self, model, x, y):
        return F.cross_entropy(model(x), y, reduction="sum") / (y != -100).sum().clamp(min=1)

    def prepare(self):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.accelerator = Accelerator(cpu=True)
        if self.scale is not None:
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=self.scale)
        self.trained = self.accelerator.prepare(self.model())
        inner = OPTIMIZERS[self.optimizer](self.trained.parameters())
        steps = self.steps if len(self.steps) > 1 else self.steps[0]
        if not self.wraps_first:
            self.wrapped = self.prepared = prepare_optimizer(self.accelerator, inner, steps)
            return
        self.wrapped = Optimizer(inner, steps, clip_grad_norm=self.clip and self.clip[1])
        self.prepared = self.accelerator.prepare(self.wrapped)

    def micro_batch(self, batch, schedule):
        loss = self.loss(self.trained, *batch)
        if self.how == "backward":
            self.wrapped.backward(loss, weight=counted(batch))
        else:
            self.accelerator.backward(loss)
        if self.clip is not None and not self.wraps_first:
            clip = getattr(self.accelerator, f"clip_grad_{self.clip[0]}_")
            assert clip(self.trained.parameters(), self.clip[1]) is None
        self.prepared.step()
        if self.schedule == "prepared" or (self.schedule == "if updated" and self.wrapped.updated):
            schedule.step()
        self.prepared.zero_grad()

    def train(self, folder):
        self.prepare()
        schedule = torch.optim.lr_scheduler.StepLR(self.wrapped, 2, 0.7) if self.schedule else None
        if self.schedule == "prepared":
            schedule = self.accelerator.prepare(schedule)
        elif self.schedule == "hook":
            self.wrapped.register_step_post_hook(lambda *_: schedule.step())
        plain = DataLoader(TensorDataset(*self.data), batch_size=self.rows)
        for epoch in range(self.epochs):
            loader = self.accelerator.prepare(plain)
            if self.how in ("batches", "weight"):
                loader = self.wrapped.batches(loader, weight=counted if self.how == "weight" else None)
            for index, batch in enumerate(loader, 1):
                self.micro_batch(batch, schedule)
                if epoch == 0 and index == self.saved:
                    break
            flushes = self.wraps_first and self.how in ("plain", "backward") and not (epoch == 0 and self.saved)
            if flushes and self.wrapped.flush() and schedule is not None:
                schedule.step()
            if epoch == 0 and self.saved:
                self.accelerator.save_state(folder)
                self.prepare()
                self.accelerator.load_state(folder)
                for batch in [*plain][self.saved :]:
                    self.micro_batch(batch, schedule)
                self.wrapped.flush()

    def oracle(self):
        """Returns the model, and the losses of its updates."""
        model, windows = self.model(), []
        for epoch in range(self.epochs):
            length = self.rows * self.steps[max(first for first in self.steps if first <= epoch)]
            windows += zip(*(t.split(length) for t in self.data), strict=True)
        inner = OPTIMIZERS[self.optimizer](model.parameters())
        if self.clip is not None:
            inner.register_step_pre_hook(lambda *_: CLIPS[self.clip[0]](model.parameters(), self.clip[1]) and None)
        after = torch.optim.lr_scheduler.StepLR(inner, 2, 0.7).step if self.schedule else None
        counted_ones = [window for window in windows if counted(window)]
        return model, torch_updates(model, inner, counted_ones, self.loss, after_update=after)


def wrong(seed, folder):
    """What is wrong with a run; empty where it is right."""
    run = Run(seed)
    try:
        run.train(os.path.join(folder, str(seed)))
        model, updates = run.oracle()
        found, expected = (nn.utils.parameters_to_vector(m.parameters()).detach() for m in (run.trained, model))
        error = float((found - expected).norm() / expected.norm())
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    if error < 1e-11 and run.wrapped.updates == len(updates):
        return ""
    said = {name: value for name, value in vars(run).items() if isinstance(value, int | float | str | dict | tuple)}
    said.pop("data")
    return f"seed {seed}: {said}\n  {error:.1e}, updates {run.wrapped.updates} of {len(updates)}"
