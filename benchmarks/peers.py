"""What libraries that accumulate gradients make of twelve situations, each run in the loop of its own documentation.

    python -m benchmarks.peers            # print the table
    python -m benchmarks.peers --write    # and keep it in docs/peers.md, with its picture

Every cell trains a small model in float64 twice: with accumulation, and on each window's rows as one batch without it
(in the same library; for those on PyTorch in a plain loop). "off by" is the largest difference of a parameter, over the
largest movement of one.
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import contextlib
import copy
import dataclasses
import io
import logging
import math
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

RATE, MOMENTUM, IGNORED = 0.5, 0.9, -100
EXACT = 1e-6
"""Some of the optimizers round some of their numbers to float32."""

Batch = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Case:
    """A situation: batches, the steps of a window, and what else is asked for."""

    about: str
    sizes: tuple[int, ...] = (4, 4, 4, 4)
    steps: int = 2
    loss: str = "mse"
    clip: float | None = None
    halving: bool = False
    batch_norm: bool = False
    way: str = "train"
    bad: int | None = None
    """The batch whose loss is NaN."""
    given: tuple[Batch, ...] = ()
    """The batches, if they are none of these sizes."""

    def batches(self) -> list[Batch]:
        if self.given:
            return [*self.given]
        random = np.random.default_rng(0)
        found = []
        for index, rows in enumerate(self.sizes):
            x, y = random.normal(size=(rows, 5)), random.normal(size=(rows, 3))
            if self.loss in ("tokens", "classes"):
                y = random.integers(3, size=rows)
                y[: rows - 1 if self.loss == "tokens" and index % 2 else 0] = IGNORED
            if index == self.bad:
                x = x * np.nan
            found.append((x, y))
        return found

    def windows(self) -> list[Batch]:
        """Each window's rows as one batch; what is NaN is left out."""
        batches = self.batches()
        found = []
        for start in range(0, len(batches), self.steps):
            window = [b for b in batches[start : start + self.steps] if not np.isnan(b[0]).any()]
            found.append((np.concatenate([x for x, _ in window]), np.concatenate([y for _, y in window])))
        return found

    def whole(self) -> Case:
        """The same on whole windows, without accumulation."""
        return dataclasses.replace(self, steps=1, given=tuple(self.windows()))


CASES = {
    "ragged": Case("batches of 4, 4 and 1 rows are a window", sizes=(4, 4, 1), steps=3),
    "short window": Case("an epoch of 5 batches, 4 to a window", sizes=(4,) * 5, steps=4),
    "tokens": Case("cross-entropy over targets, of which batches ignore different numbers", loss="tokens"),
    "class weights": Case("cross-entropy with class weights", loss="classes"),
    "clip": Case("the norm of the update's gradient is clipped", clip=0.05),
    "scheduler": Case("the learning rate halves after each update", sizes=(4,) * 6, halving=True),
    "NaN": Case("one batch's loss is NaN, and is to be left out", way="skip", bad=1),
    "resume": Case("saved inside a window, and loaded into new objects", way="resume"),
    "BatchNorm": Case("a model with BatchNorm", batch_norm=True),
    "contrastive": Case("each row is contrasted with the window's others", loss="contrastive"),
    "LBFGS": Case("an optimizer that evaluates its closure several times", sizes=(4, 4), way="lbfgs"),
    "two optimizers": Case("two models, each with a loss and an optimizer", way="two"),
}


class NotPossible(Exception):
    """The library has no way to say this."""


# PyTorch.


def model_of(case: Case, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(5, 7), *([nn.BatchNorm1d(7)] if case.batch_norm else []), nn.Tanh(), nn.Linear(7, 3)]
    return nn.Sequential(*layers).double()


def loss_of(case: Case) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return {
        "mse": nn.functional.mse_loss,
        "tokens": lambda z, y: nn.functional.cross_entropy(z, y, ignore_index=IGNORED),
        "classes": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 9.0]).double()),
        "contrastive": lambda z, y: nn.functional.cross_entropy(z @ y.T, torch.arange(len(z))),
    }[case.loss]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM)


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def tensors(batches: list[Batch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in batches]


def loader(batches: list[Any], collate: Callable[[Any], Any] = lambda b: b[0]) -> Any:
    return DataLoader(batches, batch_size=1, collate_fn=collate)  # type: ignore[arg-type]


def arrays(*models: nn.Module) -> list[np.ndarray]:
    return [p.detach().numpy().copy() for model in models for p in model.parameters()]


class PlainTorch:
    """The loop without accumulation, on whole windows: what the others are compared with."""

    def train(self, case: Case) -> list[np.ndarray]:
        model, loss = model_of(case), loss_of(case)
        optimizer = sgd(model)
        scheduler = halving(optimizer)
        for x, y in tensors(case.windows()):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            if case.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            if case.halving:
                scheduler.step()
        return arrays(model)

    skip = resume = train

    def lbfgs(self, case: Case) -> list[np.ndarray]:
        model, loss = model_of(case), loss_of(case)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
        for x, y in tensors(case.windows()):

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                value = loss(model(x), y)
                value.backward()
                return value

            optimizer.step(closure)
        return arrays(model)

    def two(self, case: Case) -> list[np.ndarray]:
        models = model_of(case), model_of(case, 1)
        optimizers = [sgd(model) for model in models]
        for x, y in tensors(case.windows()):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(case)(model(x), y).backward()
                optimizer.step()
        return arrays(*models)


class Torch:
    """A library on PyTorch."""

    def expected(self, case: Case) -> list[np.ndarray]:
        return getattr(PlainTorch(), case.way)(case)

    def start(self, case: Case) -> list[np.ndarray]:
        return arrays(*([model_of(case), model_of(case, 1)] if case.way == "two" else [model_of(case)]))


class Gradaccum(Torch):
    name = "gradaccum"

    def train(self, case: Case) -> list[np.ndarray]:
        import gradaccum.torch
        from gradaccum.torch.optim import Optimizer

        model, loss = model_of(case), loss_of(case)
        weight = {
            "tokens": lambda batch: (batch[1] != IGNORED).sum(),
            "classes": lambda batch: torch.tensor([1.0, 3.0, 9.0])[batch[1]].sum(),
        }.get(case.loss)
        if case.batch_norm or case.loss == "contrastive":
            if case.loss == "contrastive":
                return self._chunked(case, gradaccum.torch.chunked(model, 4))
            step = gradaccum.torch.TrainStep(model, sgd(model), loss_fn=loss, micro_batch_size=4, batch_norm="exact")
            for x, y in tensors(case.windows()):
                step(x, y)
            return arrays(model)
        optimizer = Optimizer(sgd(model), case.steps, clip_grad_norm=case.clip)
        scheduler = halving(optimizer)
        for x, y in optimizer.batches(tensors(case.batches()), weight=weight):
            optimizer.zero_grad()
            value = loss(model(x), y)
            if case.bad is None:
                value.backward()
            else:
                optimizer.backward(value, weight=len(x) if value.isfinite() else 0)
            optimizer.step()
            if case.halving and optimizer.updated:
                scheduler.step()
        return arrays(model)

    skip = train

    def _chunked(self, case: Case, model: nn.Module) -> list[np.ndarray]:
        optimizer = sgd(model)
        for x, y in tensors(case.windows()):
            optimizer.zero_grad()
            loss_of(case)(model(x), y).backward()
            optimizer.step()
        return arrays(model)

    def resume(self, case: Case) -> list[np.ndarray]:
        from gradaccum.torch.optim import Optimizer

        batches, states = tensors(case.batches()), None
        for part in (batches[:1], batches[1:]):
            model = model_of(case)
            optimizer = Optimizer(sgd(model), case.steps)
            if states is not None:
                model.load_state_dict(states[0])
                optimizer.load_state_dict(states[1])
            for x, y in part:
                optimizer.zero_grad()
                optimizer.backward(loss_of(case)(model(x), y), weight=len(x))
                optimizer.step()
            file = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict()], file)
            file.seek(0)
            states = torch.load(file, weights_only=True)
        return arrays(model)

    def lbfgs(self, case: Case) -> list[np.ndarray]:
        import gradaccum.torch

        model = model_of(case)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
        step = gradaccum.torch.TrainStep(model, optimizer, loss_fn=loss_of(case), micro_batch_size=4)
        for x, y in tensors(case.windows()):
            step(x, y)
        return arrays(model)

    def two(self, case: Case) -> list[np.ndarray]:
        from gradaccum.torch.optim import Optimizer

        models = model_of(case), model_of(case, 1)
        first, second = (Optimizer(sgd(model), case.steps) for model in models)
        for x, y in tensors(case.batches()):
            for model, optimizer in zip(models, (first, second), strict=True):
                optimizer.zero_grad()
                optimizer.backward(loss_of(case)(model(x), y), weight=len(x))
                optimizer.step()
        first.flush()
        second.flush()
        return arrays(*models)


class Accelerate(Torch):
    name = "accelerate"

    def _accelerator(self, case: Case) -> Any:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        return Accelerator(cpu=True, gradient_accumulation_steps=case.steps)

    def _tokens(self, case: Case) -> list[np.ndarray]:
        """The loop of its guide for samples of variable size, which collects a window's batches first."""
        accelerator, model = self._accelerator(case), model_of(case)
        model, optimizer, rows = accelerator.prepare(model, sgd(model), loader(tensors(case.batches())))
        iterator = iter(rows)
        short = len(rows) % case.steps or case.steps  # the guide's last window takes what is left
        updates = -(-len(rows) // case.steps)
        for update in range(updates):
            window = [next(iterator) for _ in range(case.steps if update < updates - 1 else short)]
            items = accelerator.gather(sum((y != IGNORED).sum() for _, y in window)).sum().item()
            for x, y in window:
                total = nn.functional.cross_entropy(model(x), y, ignore_index=IGNORED, reduction="sum")
                accelerator.backward(total * case.steps / items)
            optimizer.step()
            optimizer.zero_grad()
        return arrays(model)

    def train(self, case: Case, folder: str | None = None) -> list[np.ndarray]:
        if case.loss == "tokens":
            return self._tokens(case)
        accelerator, loss, batches = self._accelerator(case), loss_of(case), tensors(case.batches())
        start = 0
        while True:
            model = model_of(case)
            optimizer = sgd(model)
            model, optimizer, rows, scheduler = accelerator.prepare(
                model, optimizer, loader(batches[start:]), halving(optimizer)
            )
            if start:
                accelerator.load_state(folder)
            for x, y in rows:
                with accelerator.accumulate(model):
                    accelerator.backward(loss(model(x), y))
                    if accelerator.sync_gradients and case.clip is not None:
                        accelerator.clip_grad_norm_(model.parameters(), case.clip)
                    optimizer.step()
                    if case.halving:
                        scheduler.step()
                    optimizer.zero_grad()
                if folder is not None and not start:
                    accelerator.save_state(folder)
                    break
            if folder is None or start:
                return arrays(model)
            start, accelerator = 1, self._accelerator(case)

    skip = train

    def resume(self, case: Case) -> list[np.ndarray]:
        with tempfile.TemporaryDirectory() as folder:
            return self.train(case, folder)

    def lbfgs(self, case: Case) -> list[np.ndarray]:
        accelerator, model = self._accelerator(case), model_of(case)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
        model, optimizer, rows = accelerator.prepare(model, optimizer, loader(tensors(case.batches())))
        for x, y in rows:
            with accelerator.accumulate(model):

                def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                    optimizer.zero_grad()
                    value = loss_of(case)(model(x), y)
                    accelerator.backward(value)
                    return value

                optimizer.step(closure)
        return arrays(model)

    def two(self, case: Case) -> list[np.ndarray]:
        accelerator, models = self._accelerator(case), (model_of(case), model_of(case, 1))
        *prepared, rows = accelerator.prepare(*models, *map(sgd, models), loader(tensors(case.batches())))
        for x, y in rows:
            with accelerator.accumulate(*prepared[:2]):
                for model, optimizer in zip(prepared[:2], prepared[2:], strict=True):
                    accelerator.backward(loss_of(case)(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
        return arrays(*models)


class Lightning(Torch):
    name = "lightning"

    def _module(self, case: Case, make: Callable[[nn.Module], Any] = sgd) -> Any:
        import lightning.pytorch as lightning

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.network = model_of(case)

            def configure_optimizers(self) -> Any:
                optimizer = make(self.network)
                if not case.halving:
                    return optimizer
                return [optimizer], [{"scheduler": halving(optimizer), "interval": "step"}]

            def training_step(self, batch: Any, index: int) -> Any:
                value = loss_of(case)(self.network(batch[0]), batch[1])
                return None if case.way == "skip" and value.isnan() else value

        return Module()

    def _fit(self, case: Case, module: Any, start: int = 0, path: str | None = None, callbacks: Any = ()) -> None:
        import lightning.pytorch as lightning

        trainer = lightning.Trainer(
            accumulate_grad_batches=case.steps, gradient_clip_val=case.clip, max_epochs=1, accelerator="cpu",
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[*callbacks],
        )  # fmt: skip
        rows = tensors(case.batches())
        rows = rows[start:] + rows[:start]  # a resumed epoch takes what is left of it, from the loader's beginning
        trainer.fit(module, loader(rows), ckpt_path=path, weights_only=False)

    def train(self, case: Case) -> list[np.ndarray]:
        module = self._module(case)
        self._fit(case, module)
        return arrays(module)

    skip = train

    def resume(self, case: Case) -> list[np.ndarray]:
        import lightning.pytorch as lightning

        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/middle.ckpt"

            class Save(lightning.Callback):
                def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
                    if index == 0:
                        trainer.save_checkpoint(path)

            self._fit(case, self._module(case), callbacks=[Save()])
            module = self._module(case)
            self._fit(case, module, 1, path)
            return arrays(module)

    def lbfgs(self, case: Case) -> list[np.ndarray]:
        module = self._module(case, lambda model: torch.optim.LBFGS(model.parameters(), max_iter=5))
        self._fit(case, module)
        return arrays(module)

    def two(self, case: Case) -> list[np.ndarray]:
        module = self._module(case, lambda model: [sgd(model), sgd(model)])
        self._fit(case, module)
        return arrays(module)


class Transformers(Torch):
    name = "transformers"

    def _trainer(
        self, case: Case, model: nn.Module, batches: list[Any], optimizers: Any, loss: Any = None, **settings: Any
    ) -> Any:
        import transformers

        class Trainer(transformers.Trainer):
            def get_train_dataloader(self) -> Any:
                return loader(batches)

        arguments = transformers.TrainingArguments(
            gradient_accumulation_steps=case.steps, max_grad_norm=case.clip or 0.0, num_train_epochs=1, use_cpu=True,
            report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no", **settings,
        )  # fmt: skip
        return Trainer(model, arguments, optimizers=optimizers, compute_loss_func=loss)

    def _model(self, case: Case) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.network = model_of(case)

            def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
                logits = self.network(x)
                loss = {} if labels is None else {"loss": loss_of(case)(logits, labels)}
                return {**loss, "logits": logits}

        return Model()

    def train(self, case: Case, make: Callable[[nn.Module], Any] = sgd) -> list[np.ndarray]:
        def over_items(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
            total = nn.functional.cross_entropy(outputs["logits"], labels, ignore_index=IGNORED, reduction="sum")
            return total / num_items_in_batch

        model = self._model(case)
        batches = [{"x": x, "labels": y} for x, y in tensors(case.batches())]
        optimizer = make(model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.5**update if case.halving else 1.0)
        loss = over_items if case.loss == "tokens" else None
        with tempfile.TemporaryDirectory() as folder:
            self._trainer(case, model, batches, (optimizer, schedule), loss, output_dir=folder).train()
        return arrays(model)

    skip = train

    def resume(self, case: Case) -> list[np.ndarray]:
        """Checkpoints are asked for after every micro-batch."""
        import transformers

        inside = []

        class Ask(transformers.TrainerCallback):
            def on_substep_end(self, arguments: Any, state: Any, control: Any, **rest: Any) -> Any:
                control.should_save = True
                inside.append(len(list(Path(arguments.output_dir).glob("checkpoint-*"))))
                return control

        model = self._model(case)
        optimizer = sgd(model)
        batches = [{"x": x, "labels": y} for x, y in tensors(case.batches()[:2])]
        with tempfile.TemporaryDirectory() as folder:
            optimizers = optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
            trainer = self._trainer(case, model, batches, optimizers, output_dir=folder)
            trainer.add_callback(Ask())
            trainer.train()
            steps = [path.name for path in Path(folder).glob("checkpoint-*")]
        if steps in ([], ["checkpoint-1"]):  # after the update, if at all
            raise NotPossible("it saves between updates")
        raise RuntimeError(f"checkpoints {steps}")

    def lbfgs(self, case: Case) -> list[np.ndarray]:
        return self.train(case, lambda model: torch.optim.LBFGS(model.parameters(), max_iter=5))

    def two(self, case: Case) -> list[np.ndarray]:
        model = self._model(case)
        batches = [{"x": x, "labels": y} for x, y in tensors(case.batches())]
        with tempfile.TemporaryDirectory() as folder:
            self._trainer(case, model, batches, ([sgd(model), sgd(model)], None), output_dir=folder).train()
        return arrays(model)


# Others.


class Keras:
    name = "keras"

    def _model(self, case: Case) -> Any:
        import keras

        keras.utils.set_random_seed(0)
        keras.backend.set_floatx("float64")
        norm = [keras.layers.BatchNormalization()] if case.batch_norm else []
        layers = [keras.layers.Dense(7), *norm, keras.layers.Activation("tanh"), keras.layers.Dense(3)]
        return keras.Sequential([keras.Input((5,)), *layers])

    def _compiled(self, case: Case) -> Any:
        import keras

        model = self._model(case)
        rate = keras.optimizers.schedules.ExponentialDecay(RATE, 1, 0.5, staircase=True) if case.halving else RATE
        optimizer = keras.optimizers.SGD(
            rate,
            momentum=MOMENTUM,
            global_clipnorm=case.clip,
            gradient_accumulation_steps=case.steps if case.steps > 1 else None,
        )

        def contrast(y: Any, z: Any) -> Any:
            logits = keras.ops.matmul(z, keras.ops.transpose(y))
            labels = keras.ops.arange(keras.ops.shape(z)[0])
            return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)

        def crossentropy(**options: Any) -> Any:
            return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)

        loss = {
            "mse": lambda: "mse",
            "tokens": lambda: crossentropy(ignore_class=IGNORED),
            "classes": crossentropy,
            "contrastive": lambda: contrast,
        }[case.loss]()
        model.compile(optimizer, loss)
        return model

    def train(self, case: Case) -> list[np.ndarray]:
        import keras

        model, batches = self._compiled(case), case.batches()

        class Rows(keras.utils.PyDataset):
            def __len__(self) -> int:
                return len(batches)

            def __getitem__(self, index: int) -> Batch:
                return batches[index]

        weights = {0: 1.0, 1: 3.0, 2: 9.0} if case.loss == "classes" else None
        model.fit(Rows(), shuffle=False, verbose=0, class_weight=weights)
        return [np.asarray(v) for v in model.trainable_variables]

    skip = train

    def resume(self, case: Case) -> list[np.ndarray]:
        import keras

        if case.steps == 1:
            return self.train(case)
        batches, model = case.batches(), self._compiled(case)
        model.train_on_batch(*batches[0])
        with tempfile.TemporaryDirectory() as folder:
            model.save(f"{folder}/model.keras")
            model = keras.models.load_model(f"{folder}/model.keras")
        for batch in batches[1:]:
            model.train_on_batch(*batch)
        return [np.asarray(v) for v in model.trainable_variables]

    def lbfgs(self, case: Case) -> list[np.ndarray]:
        import keras

        try:
            keras.optimizers.get("lbfgs")
        except ValueError:
            raise NotPossible("it has no such optimizer") from None
        raise RuntimeError("there is one")

    def two(self, case: Case) -> list[np.ndarray]:
        models = self._compiled(case), self._compiled(case)
        for batch in case.batches():
            for model in models:
                model.train_on_batch(*batch)
        return [np.asarray(v) for model in models for v in model.trainable_variables]

    def expected(self, case: Case) -> list[np.ndarray]:
        whole = case.whole()
        return self.two(whole) if case.way == "two" else self.train(whole)

    def start(self, case: Case) -> list[np.ndarray]:
        models = [self._model(case) for _ in range(2 if case.way == "two" else 1)]
        return [np.asarray(v) for model in models for v in model.trainable_variables]


class Optax:
    name = "optax"

    def _parameters(self, seed: int = 0) -> Any:
        import jax

        jax.config.update("jax_enable_x64", True)
        a, b = jax.random.split(jax.random.key(seed))
        return {"a": jax.random.normal(a, (5, 7)) / 5**0.5, "b": jax.random.normal(b, (7, 3)) / 7**0.5}

    def _loss(self, case: Case) -> Callable[..., Any]:
        import jax
        import jax.numpy as jnp
        import optax

        weights = jnp.asarray([1.0, 3.0, 9.0])

        def loss(parameters: Any, x: Any, y: Any) -> Any:
            hidden = x @ parameters["a"]
            if case.batch_norm:
                hidden = (hidden - hidden.mean(0)) / jnp.sqrt(hidden.var(0) + 1e-5)
            z = jnp.tanh(hidden) @ parameters["b"]
            if case.loss == "mse":
                return jnp.mean((z - y) ** 2)
            if case.loss == "contrastive":
                return optax.softmax_cross_entropy_with_integer_labels(z @ y.T, jnp.arange(len(z))).mean()
            rows = optax.softmax_cross_entropy_with_integer_labels(z, jnp.maximum(y, 0))
            weight = jnp.where(y == IGNORED, 0.0, 1.0) if case.loss == "tokens" else weights[y]
            return (rows * weight).sum() / weight.sum()

        return jax.jit(loss)

    def _optimizer(self, case: Case) -> Any:
        import optax

        rate = optax.exponential_decay(RATE, 1, 0.5, staircase=True) if case.halving else RATE
        inner = optax.sgd(rate, momentum=MOMENTUM)
        if case.clip is not None:
            inner = optax.chain(optax.clip_by_global_norm(case.clip), inner)
        if case.steps == 1:
            return inner
        skip = {"should_skip_update_fn": optax.skip_not_finite} if case.way == "skip" else {}
        return optax.MultiSteps(inner, every_k_schedule=case.steps, **skip)

    def train(self, case: Case) -> list[np.ndarray]:
        import jax
        import optax

        parameters, optimizer, loss = self._parameters(), self._optimizer(case), self._loss(case)
        state = optimizer.init(parameters)
        for index, batch in enumerate(case.batches()):
            updates, state = optimizer.update(jax.grad(loss)(parameters, *batch), state, parameters)
            parameters = optax.apply_updates(parameters, updates)
            if case.way == "resume" and index == 0:
                parameters, state = pickle.loads(pickle.dumps((parameters, state)))
        return [np.asarray(p) for p in parameters.values()]

    skip = resume = train

    def lbfgs(self, case: Case) -> list[np.ndarray]:
        import jax
        import optax

        parameters, loss = self._parameters(), self._loss(case)
        inner = optax.lbfgs()
        optimizer = inner if case.steps == 1 else optax.MultiSteps(inner, every_k_schedule=case.steps)
        state = optimizer.init(parameters)
        for batch in case.batches():

            def of(parameters: Any, batch: Batch = batch) -> Any:
                return loss(parameters, *batch)

            value, gradients = jax.value_and_grad(of)(parameters)
            updates, state = optimizer.update(gradients, state, parameters, value=value, grad=gradients, value_fn=of)
            parameters = optax.apply_updates(parameters, updates)
        return [np.asarray(p) for p in parameters.values()]

    def two(self, case: Case) -> list[np.ndarray]:
        import jax
        import optax

        loss, found = self._loss(case), []
        parameters = [self._parameters(0), self._parameters(1)]
        optimizers = [self._optimizer(case), self._optimizer(case)]
        states = [o.init(p) for o, p in zip(optimizers, parameters, strict=True)]
        for batch in case.batches():
            for i in range(2):
                gradients = jax.grad(loss)(parameters[i], *batch)
                updates, states[i] = optimizers[i].update(gradients, states[i], parameters[i])
                parameters[i] = optax.apply_updates(parameters[i], updates)
        for one in parameters:
            found += [np.asarray(p) for p in one.values()]
        return found

    def expected(self, case: Case) -> list[np.ndarray]:
        return getattr(self, case.way)(case.whole())

    def start(self, case: Case) -> list[np.ndarray]:
        both = [self._parameters(0), *([self._parameters(1)] if case.way == "two" else [])]
        return [np.asarray(p) for one in both for p in one.values()]


PEERS: tuple[Any, ...] = (Transformers(), Accelerate(), Lightning(), Keras(), Optax(), Gradaccum())


def outcome(peer: Any, case: Case) -> str:
    """What came of it, in a word or two."""
    try:
        found = getattr(peer, case.way)(case)
    except NotPossible as reason:
        return f"not possible: {reason}"
    except Exception as error:
        print(f"-- {peer.name}: {case.about}", file=sys.stderr)
        print("".join(traceback.format_exception(error)[-3:]), file=sys.stderr)
        return f"refused ({type(error).__name__})"
    expected, start = peer.expected(case), peer.start(case)
    moved = max(float(np.abs(e - s).max()) for e, s in zip(expected, start, strict=True))
    off = max(float(np.abs(f - e).max()) for f, e in zip(found, expected, strict=True)) / moved
    if math.isnan(off):
        return "NaN"
    return "exact" if off < EXACT else f"off by {off:.2g}" if off < 0.995 else f"off by {off:.1f}"


def measure(only: str | None = None) -> str:
    """The table."""
    from benchmarks.harness import table

    rows = []
    for name, case in CASES.items():
        if only is None or only == name:
            rows.append([f"**{name}**: {case.about}", *(outcome(peer, copy.deepcopy(case)) for peer in PEERS)])
    return table(["", *(peer.name for peer in PEERS)], rows)


def main() -> None:
    from benchmarks.harness import ROOT, arguments, keep, packages, write_json

    options = arguments(__doc__)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        found = measure("ragged" if options.quick else None)
    names = ("transformers", "accelerate", "lightning", "keras", "optax", "torch", "jax", "gradaccum")
    made = f"{packages(names)}. Keras runs on PyTorch. Made by `python -m benchmarks.peers --write`."
    print(section := f"{found}\n\n{made}\n")
    record = {"title": "Twelve situations", "body": found, "made": made, "seconds": time.perf_counter() - start}
    write_json(options, "peers", record | {"quick": options.quick, "ours": ["gradaccum"], "measured": []})
    if options.write:
        from scripts.pictures import IMAGES, exactness

        keep(ROOT / "docs" / "peers.md", "peers", section)
        (IMAGES / "exactness.svg").write_text(exactness(), encoding="utf-8")


if __name__ == "__main__":
    main()
