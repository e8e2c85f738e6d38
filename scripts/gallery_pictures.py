"""The pictures of docs/gallery.md, from what its examples do: `python -m scripts.gallery_pictures [NAME ...]`.

The recipes and the backends of Keras run in processes of their own; all of it takes some minutes.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import runpy
import subprocess
import sys
from typing import Any

from scripts.pictures import IMAGES, ROOT, box, chart, line, svg, text

NAMES = ("gpt", "resnet18", "mnist", "mlp", "vgg16", "batch_optimizer", "recipes", "elastic", "large_models")
RECIPES = ("fine_tuning", "gan", "diffusion", "clip_ranks", "third_party_optimizers")
FRACTION = r"([\w -]+): relative error .*?([\d.]+e[+-]\d+)"

MLP = """
import json, runpy, keras
from examples.demo.data import load
from examples.demo.progress import Progress
import gradaccum.keras
keras.utils.set_random_seed(0)
with Progress() as progress:
    data = load("digits", progress=progress)
model = runpy.run_path("examples/keras/mlp.py")["network"](data.features)
optimizer = gradaccum.keras.optimizers.RMSprop(steps=4)
model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
callbacks = [gradaccum.keras.callbacks.GradientAccumulation()]
found = model.fit(data.train_x / data.scale, data.train_y, batch_size=32, epochs=12, verbose=0, callbacks=callbacks)
print(json.dumps(found.history["accuracy"]))
"""

VGG16 = """
import json, keras, torch
model = keras.applications.VGG16(weights=None, input_shape=(32, 32, 3), classes=10)
parameters = {each.value.untyped_storage().data_ptr() for each in model.variables}
found = {}
for rows in (128, 16):
    kept = {}
    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(torch.rand(rows, 32, 32, 3), training=True).sum()
    found[rows] = sum(size for place, size in kept.items() if place not in parameters) / 2**20
print(json.dumps(found))
"""


def example(name: str) -> dict[str, Any]:
    """The functions of an example of PyTorch."""
    return runpy.run_path(str(ROOT / "examples" / "torch" / f"{name}.py"))


def printed(*arguments: str, **environment: str) -> str:
    """What Python prints in a process of its own."""
    places = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    run = [sys.executable, *arguments]
    return subprocess.run(
        run, cwd=ROOT, env={**os.environ, **places, **environment}, capture_output=True, text=True, check=True
    ).stdout


def gpt() -> str:
    """Bits a byte of each update: whole batches, and packed micro-batches."""
    import torch

    from gradaccum.torch import TrainStep

    names, rows, size, updates = example("gpt"), 0, 32, 80
    text_rows = names["python_text"](128)
    torch.manual_seed(0)
    start, curves = names["GPT"](64, 2, 128), []
    for name, how in (("whole batch", {"micro_batch_size": size}), ("packed, 512 bytes", {"max_tokens": 512})):
        model = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        step = TrainStep(model, optimizer, compute_loss=names["compute_loss"], weight=names["targets"], **how)
        losses = []
        for update in range(updates):
            rows = update * size
            losses.append(step(names["padded"](text_rows[rows : rows + size])).item() / math.log(2))
        curves.append((name, range(1, updates + 1), losses))
    return chart("A small GPT, 32 docstrings an update", "update", curves, "bits a byte")


def resnet18() -> str:
    """How far exact BatchNorm and BatchNorm as it is end from the large batch, by updates."""
    import torch
    from examples.demo.data import load
    from examples.demo.progress import Progress

    names = example("resnet18")
    with Progress() as progress:
        data = load("digits", progress=progress)
    x, y = torch.from_numpy(data.train_x).double().view(-1, 1, 8, 8) / data.scale, torch.from_numpy(data.train_y)
    torch.manual_seed(0)
    start = names["resnet18"](2).double()
    ways = {"large batch": (48, "micro"), "exact": (16, "exact"), "as it is": (16, "micro")}
    curves: dict[str, list[float]] = {name: [0.0] for name in ways}
    first = torch.nn.utils.parameters_to_vector(start.parameters()).detach()
    for updates in range(1, 9):
        ends = {
            name: torch.nn.utils.parameters_to_vector(
                names["train"](copy.deepcopy(start), x, y, 48, size, batch_norm, updates).parameters()
            ).detach()
            for name, (size, batch_norm) in ways.items()
        }
        large = ends["large batch"]
        for name, end in ends.items():
            curves[name].append(100 * float((end - large).norm() / (large - first).norm()))
    lines = [(name, range(9), values) for name, values in curves.items()]
    return chart(
        "A ResNet-18: distance from the large batch's parameters", "update", lines, "% of how far those have moved"
    )


def mnist() -> str:
    """Test error after each epoch: batches of 64, and 4 x 16 through the wrapped optimizer."""
    import torch
    from examples.demo.data import load
    from examples.demo.progress import Progress

    import gradaccum.torch

    names, epochs = example("mnist"), range(1, 7)
    with Progress() as progress:
        data = load("digits", progress=progress)
    train, test = (
        torch.utils.data.TensorDataset(names["tensors"](data, part).tensors[0].double(), torch.from_numpy(labels))
        for part, labels in (("train", data.train_y), ("test", data.test_y))
    )
    curves = []
    for name, rows, steps in (("64 rows at once", 64, 1), ("4 x 16 rows", 16, 4)):
        torch.manual_seed(0)
        model = names["network"]().double()
        plain = torch.optim.Adam(model.parameters(), lr=1e-3)
        optimizer = gradaccum.torch.optim.Optimizer(plain, steps=steps)
        loader = torch.utils.data.DataLoader(train, rows, shuffle=True, generator=torch.Generator().manual_seed(0))
        found = []
        for _ in epochs:
            names["train"](model, loader, optimizer)
            found.append(100 - 100 * names["accuracy"](model, torch.utils.data.DataLoader(test, 500)))
        curves.append((name, epochs, found))
    return chart("A convolutional network, 64 rows an update, float64", "epoch", curves, "test error on the digits, %")


def mlp() -> str:
    """Accuracy of the same training on Keras' three backends."""
    curves = [
        (title, range(1, 13), [100 * value for value in json.loads(printed("-c", MLP, KERAS_BACKEND=name))])
        for name, title in (("tensorflow", "TensorFlow"), ("jax", "JAX"), ("torch", "PyTorch"))
    ]
    return chart("An MLP in fit, 4 x 32 rows an update", "epoch", curves, "training accuracy on the digits, %")


def vgg16() -> str:
    """What a micro-batch keeps for its backward pass, on PyTorch."""
    kept = json.loads(printed("-c", VGG16, KERAS_BACKEND="torch"))
    shapes = [text(20, 28, "VGG16: memory kept for the backward pass, parameters aside", "title")]
    for place, (rows, size) in enumerate(kept.items()):
        y, wide = 46 + 28 * place, 360 * size / max(kept.values())
        shapes += [text(150, y + 14, f"{rows} pictures at once", "small end"), box(160, y, wide, 20, "ba"[place])]
        shapes.append(text(166 + wide, y + 14, f"{size:.1f} MiB", "small"))
    words = "; ".join(f"{rows} pictures at once {size:.1f} MiB" for rows, size in kept.items())
    return svg(640, 112, f"Memory that VGG16 keeps for its backward pass: {words}.", shapes)


def batch_optimizer() -> str:
    """The differences that the example prints, on TensorFlow."""
    said = printed("examples/keras/batch_optimizer.py", "--quick", KERAS_BACKEND="tensorflow")
    found = re.findall(r"^(float\d\d) +(\d+) +(\d+) .*?([\d.]+e[+-]\d+)$", said, re.MULTILINE)
    values = {f"{dtype}, {wanted} rows in {rows}s": float(error) for dtype, rows, wanted, error in found}
    return bars("BatchOptimizer: relative difference from the large batch's weights", values)


def recipes() -> str:
    """The relative error that each recipe prints."""
    found = {}
    for name in RECIPES:
        said = printed(f"examples/torch/{name}.py")
        found |= {title: float(error) for title, error in re.findall(FRACTION, said)}
    return bars("Recipes: relative error against the large batch", found)


def bars(title: str, values: dict[str, float]) -> str:
    """Bars on a logarithmic axis from 1e-17 to 1."""
    left, wide, tall = 220, 380, 26

    def at(value: float) -> float:
        return left + wide * (17 + math.log10(max(value, 1e-17))) / 17

    foot = 50 + tall * len(values)
    shapes = [text(20, 28, title, "title")]
    for power in range(-16, 1, 4):
        shapes += [line([(at(10**power), 44), (at(10**power), foot)], "rule", 1)]
        shapes += [text(at(10**power), foot + 16, f"1e{power}" if power else "1", "small mid")]
    for place, (name, value) in enumerate(values.items()):
        y = 50 + tall * place
        shapes += [text(left - 10, y + 14, name, "small end"), box(left, y, max(at(value) - left, 2), tall - 8, "a")]
        shapes += [text(at(value) + 6, y + 14, f"{value:.1e}", "small")]
    words = "; ".join(f"{name} {value:.1e}" for name, value in values.items())
    return svg(660, foot + 30, f"{title}: {words}.", shapes)


def elastic() -> str:
    """Three ranks until one is lost, then two, then one: six micro-batches an update throughout."""
    shapes = [text(20, 28, "Elastic training: the same micro-batches on any number of ranks", "title")]
    x = 84.0
    for rank in range(3):
        shapes.append(text(20, 82 + 40 * rank, f"rank {rank}", "small"))
    for update, ranks in enumerate((3, 3, 3, 2, 2, 2, 1, 1), 1):
        each = 6 // ranks
        for place in range(6):
            rank, number = divmod(place, each)
            shapes.append(box(x + 11 * number, 64 + 40 * rank, 9, 28, "abc"[rank]))
        shapes.append(text(x + 5.5 * each, 198, f"{update}", "small mid"))
        x += 11 * each + 12
        if update in (3, 6):
            shapes += [line([(x, 52), (x, 184)], "quiet", 1.5, "4 3"), text(x + 6, 182, "one is lost", "small")]
            x += 14
    shapes.append(text(20, 198, "update", "small"))
    words = "Updates of six micro-batches: two on each of three ranks, three on each of two, six on one."
    return svg(660, 216, words, shapes)


def large_models() -> str:
    """The table of docs/layers.md: what each way of training seven billion parameters takes."""
    page = (ROOT / "docs" / "layers.md").read_text(encoding="utf-8")
    rows = re.findall(r"^(\w[\w ,]+?)\s{2,}(\d+) rows\s+([\d.]+) GiB", page, re.MULTILINE)
    shapes = [text(20, 28, "7 billion parameters with Adam: peak memory of an update of 64 rows", "title")]
    for place, (name, count, peak) in enumerate(rows):
        y, wide = 46 + 28 * place, min(float(peak), 110.0) * 3
        shapes += [text(190, y + 14, name, "small end"), box(200, y, wide, 20, "b" if float(peak) > 80 else "a")]
        shapes.append(text(max(206 + wide, 450), y + 14, f"{peak} GiB, {count} rows at a time", "small"))
    foot = 46 + 28 * len(rows)
    shapes += [
        line([(200 + 240, 40), (200 + 240, foot)], "quiet", 1.5, "4 3"),
        text(440, foot + 14, "80 GiB", "small mid"),
    ]
    words = "; ".join(f"{name} {peak} GiB" for name, _, peak in rows)
    return svg(720, foot + 28, f"Peak memory of an update: {words}.", shapes)


def main() -> None:
    """Draw those that are named, or all."""
    for name in sys.argv[1:] or NAMES:
        (IMAGES / f"gallery_{name}.svg").write_text(globals()[name](), encoding="utf-8")


if __name__ == "__main__":
    main()
