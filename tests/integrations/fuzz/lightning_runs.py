"""Random runs of Lightning's Trainer under GradientAccumulation, against the naive loop over each window's rows."""

import copy
import os
import random

import torch
from torch import nn
from torch.nn import functional as F

from tests.integrations.lightning_problems import GradientAccumulation, Resumable, SaveAfter, StopAt, fit, lightning

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-3),
}
SCHEDULERS = {
    "steps": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7),
}


class Module(lightning.LightningModule):
    def __init__(self, options):
        super().__init__()
        self.options = options
        self.network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        self.rare = nn.Linear(3, 4).double()
        self.updates = []
        """Of each update: the gradient's norm before clipping, the learning rate, and global_step."""

    def configure_optimizers(self):
        optimizer = OPTIMIZERS[self.options["optimizer"]](self.parameters())
        if self.options["scheduler"] is None:
            return optimizer
        scheduler = SCHEDULERS[self.options["scheduler"]](optimizer)
        how = {name: self.options[name] for name in ("interval", "frequency")}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **how}}

    def loss(self, batch):
        x, y = batch
        outputs = self.network(x)
        if self.options["rare"] and (y == 0).any():  # else some parameters have no gradient
            outputs = outputs + torch.where((y == 0)[:, None], self.rare(x), 0.0)
        return F.cross_entropy(outputs, y)

    def on_train_batch_start(self, batch, index):
        return -1 if index == self.options["ends"] else None

    def training_step(self, batch, index):
        return self.loss(batch)

    def validation_step(self, batch, index):
        self.log("loss", self.loss(batch))

    def on_before_optimizer_step(self, optimizer):
        self.updates.append((self.norm(), optimizer.param_groups[0]["lr"], self.trainer.global_step))

    def norm(self):
        return float(nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None]))


class Sized(Resumable):
    def __len__(self):
        return len(self.batches)


def oracle(module, batches, steps, epochs, largest):
    """The naive loop. Leaves its record in `module.updates`. Returns the scheduler."""
    configured, options = module.configure_optimizers(), module.options
    scheduler = configured["lr_scheduler"]["scheduler"] if isinstance(configured, dict) else None
    optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
    by_updates = options["interval"] == "step"
    for epoch in range(epochs):
        length = steps[max(first for first in steps if first <= epoch)]
        windows = [batches[start : start + length] for start in range(0, len(batches), length)]
        for count, window in enumerate(windows, 1):
            optimizer.zero_grad()
            module.loss(tuple(torch.cat(parts) for parts in zip(*window, strict=True))).backward()
            module.updates.append((module.norm(), optimizer.param_groups[0]["lr"], len(module.updates)))
            if options["clip"]:
                clip = nn.utils.clip_grad_norm_ if options["by"] == "norm" else nn.utils.clip_grad_value_
                clip(module.parameters(), options["clip"])
            optimizer.step()
            if scheduler is not None and by_updates and count % options["frequency"] == 0:
                scheduler.step()
            if len(module.updates) == largest and count < len(windows):
                return scheduler
        if scheduler is not None and not by_updates and (epoch + 1) % options["frequency"] == 0:
            scheduler.step()
        if len(module.updates) == largest:
            return scheduler
    return scheduler


def wrong(seed, folder):
    """What is wrong with a run; empty where it is right."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    rows = [choose.randint(1, 5) for _ in range(choose.randint(3, 13))]
    batches = [(torch.randn(n, 3, dtype=torch.float64), torch.randint(0, 4, (n,))) for n in rows]
    options = {
        "optimizer": choose.choice(sorted(OPTIMIZERS)),
        "scheduler": choose.choice([None, *SCHEDULERS]),
        "interval": choose.choice(["step", "epoch"]),
        "frequency": choose.choice([1, 1, 2, 3]),
        "clip": choose.choice([0, 0, 0.05, 0.3]),
        "by": choose.choice(["norm", "value"]),
        "rare": choose.random() < 0.3,
    }
    steps = {0: choose.randint(1, 5)} | ({choose.randint(1, 3): choose.randint(1, 5)} if choose.random() < 0.4 else {})
    epochs, largest = choose.randint(1, 4), choose.choice([-1, -1, choose.randint(1, 8)])
    limit = choose.choice([None, None, choose.randint(1, len(batches))])
    used = batches[:limit]
    keywords = {"max_epochs": epochs, "max_steps": largest, "limit_train_batches": limit or 1.0}
    if validated := choose.random() < 0.4:
        how = {"val_check_interval": choose.randint(1, len(used))}
        keywords |= how if choose.random() < 0.6 else {"check_val_every_n_epoch": 2}
    if options["clip"]:
        keywords |= {"gradient_clip_val": options["clip"], "gradient_clip_algorithm": options["by"]}
    saved = choose.choice([None, None, choose.randint(1, len(used) * epochs)])
    kind = choose.choice([Sized, Sized, Resumable])
    if limit or kind is Resumable:  # Lightning saves such a loader where it has fetched ahead, or stopped short
        saved = None
    weight = (lambda batch: len(batch[0])) if choose.random() < 0.3 else None
    stop = choose.randrange(len(used)) if choose.random() < 0.2 else None
    if stop is not None:
        used, saved, epochs, keywords["max_epochs"] = used[: stop + 1], None, 1, 1
    options["ends"] = None  # where a hook of the module's ends each epoch
    if stop is None and len(used) > 1 and choose.random() < 0.2:
        options["ends"] = choose.randrange(1, len(used))
        used, saved = used[: options["ends"]], None
    path = os.path.join(folder, f"{seed}.ckpt")
    said = f"seed {seed}: {options}, {steps}, {keywords}, rows {rows}, saved {saved}, {kind}, stop {stop}"

    def run(module, others=(), path=None):
        callbacks = [GradientAccumulation(steps if len(steps) > 1 else steps[0], weight=weight)]
        for one in others:
            callbacks.insert(choose.choice([0, 1]), one)
        validation = kind(batches[:2]) if validated else None
        return fit(module, kind(batches), path, validation, callbacks=callbacks, default_root_dir=folder, **keywords)

    expected = Module(options)
    found, resumed = copy.deepcopy(expected), copy.deepcopy(expected)
    scheduler = oracle(expected, used, steps, epochs, largest)
    one = run(found, [SaveAfter(saved, path)] if saved else [StopAt(stop)] if stop is not None else [])
    problems = [
        name
        for name, same in {
            "updates": one.global_step == len(expected.updates) == len(found.updates),
            "parameters": _error(found, expected) < 1e-11,
            "norms, rates, steps": _same(found.updates, expected.updates),
            "scheduler": scheduler is None
            or (stop is not None and options["interval"] == "epoch")  # Lightning counts whole epochs alone
            # ... and not one that a module would have ended behind the last update.
            or (options["ends"] and options["interval"] == "epoch" and one.global_step == largest)
            or found.lr_schedulers().last_epoch == scheduler.last_epoch,
            "left as it was": one.accumulate_grad_batches == 1
            and all(config.frequency == options["frequency"] for config in one.lr_scheduler_configs)
            and not {"update_lr_schedulers", "_build_kwargs"} & vars(one.fit_loop.epoch_loop).keys()
            and "backward" not in vars(one.precision_plugin),
        }.items()
        if not same
    ]
    if not problems and saved and os.path.exists(path):
        run(resumed, path=path)
        if _error(resumed, found) > 1e-13:
            problems.append(f"resumed {_error(resumed, found):.1e}")
    return f"{said}\n  {', '.join(problems)}: {_error(found, expected):.1e}" if problems else ""


def _error(found, expected):
    flat = [nn.utils.parameters_to_vector(m.parameters()).detach() for m in (found, expected)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


def _same(found, expected):
    return len(found) == len(expected) and all(
        abs(a - b) <= 1e-11 for ours, theirs in zip(found, expected, strict=True) for a, b in zip(ours, theirs)
    )
