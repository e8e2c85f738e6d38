"""What type checkers accept, and what not: `mypy` reads this file, nobody runs it."""

import torch
from typing_extensions import assert_type

import gradaccum.keras
import gradaccum.torch

model = torch.nn.Linear(3, 1)
adam = gradaccum.torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.99), steps=4)
assert_type(adam, gradaccum.torch.optim.Adam)
assert_type(adam.steps, int)
assert_type(adam.flush(), bool)
loader: list[tuple[torch.Tensor, int]] = []
for batch in adam.batches(loader, weight=lambda batch: batch[1]):
    assert_type(batch, tuple[torch.Tensor, int])
gradaccum.torch.TrainStep(model, adam.inner, loss_fn=torch.nn.MSELoss(), micro_batch_size="auto")
gradaccum.torch.TrainStep(model, adam.inner, loss_fn=torch.nn.MSELoss(), micro_batch_size="fast")  # type: ignore[arg-type]
gradaccum.torch.optim.SGD({0: 8, 4: 2}, model.parameters(), lr=0.1, clip_grad_norm=1.0)
gradaccum.torch.optim.AdamW([{"params": model.parameters(), "lr": 0.1}], steps=lambda epoch, update: 4)
gradaccum.torch.optim.Adam(model.parameters(), lr=1e-3)  # type: ignore[call-overload]  # no steps
gradaccum.torch.optim.Adam(model.parameters(), stepz=4)  # type: ignore[call-overload]
gradaccum.torch.optim.Adam(model.parameters(), steps=4, reduction="average")  # type: ignore[call-overload]
unknown = gradaccum.torch.optim.Adamm  # type: ignore[attr-defined]

gradaccum.keras.optimizers.Adam(steps=4, learning_rate=1e-3)
gradaccum.keras.optimizers.Adam(4, 1e-3)
gradaccum.keras.optimizers.Adam(learning_rate=1e-3)  # type: ignore[call-overload]  # no steps
