"""Chunked encoders against the whole batch, GradCache's algorithm and a checkpoint per chunk, in time and in memory."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.harness import WARM_UP, arguments, first_call, keep_freed_memory, publish, ratios, table
from gradaccum.torch import chunked

ROWS, SIZE, PIXELS, WORDS = 512, 64, 28, 12


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(64 * 49, 64),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.layers(x), dim=1)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.out = nn.Linear(64, 64)

    def forward(self, text: Tensor) -> Tensor:
        return F.normalize(self.out(self.layer(self.embedding(text)).mean(1)), dim=1)


def loss_of(a: Tensor, b: Tensor) -> Tensor:
    logits, labels = a @ b.T * 10, torch.arange(len(a), device=a.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def random_state() -> Tensor:
    """Of the device that the tensors are on."""
    return torch.get_rng_state() if torch.get_default_device().type == "cpu" else torch.cuda.get_rng_state()


def set_random_state(state: Tensor) -> None:
    """Put it back."""
    torch.set_rng_state(state) if torch.get_default_device().type == "cpu" else torch.cuda.set_rng_state(state)


def grad_cache(encoders: list[nn.Module], inputs: list[Tensor]) -> None:
    """Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (2021), written anew."""
    states: list[list[Tensor]] = []
    representations = []
    for encoder, x in zip(encoders, inputs, strict=True):
        states.append([])
        parts = []
        with torch.no_grad():
            for rows in x.split(SIZE):
                states[-1].append(random_state())
                parts.append(encoder(rows))
        representations.append(torch.cat(parts).requires_grad_())
    loss_of(*representations).backward()
    after = random_state()
    for encoder, x, cached, of_parts in zip(encoders, inputs, representations, states, strict=True):
        assert cached.grad is not None
        for rows, gradient, state in zip(x.split(SIZE), cached.grad.split(SIZE), of_parts, strict=True):
            set_random_state(state)
            torch.dot(encoder(rows).flatten(), gradient.flatten()).backward()
    set_random_state(after)


def checkpointed(encoder: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([checkpoint(encoder, rows, use_reentrant=False) for rows in x.split(SIZE)])


def live_bytes(update: Callable[[], None], weights: list[Tensor]) -> int:
    """The most bytes that graphs hold at once, inputs and parameters left out."""
    held, most = Counter[tuple[int, int]](), [0]  # by where a tensor is, as two graphs may hold the same one
    known = {tensor.untyped_storage().data_ptr() for tensor in weights}

    class Held:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor, self.place = tensor, (tensor.data_ptr(), tensor.nbytes)
            held[self.place] += 1
            most[0] = max(most[0], sum(nbytes for (_, nbytes), count in held.items() if count))

        def __del__(self) -> None:
            held[self.place] -= 1

    def pack(tensor: Tensor) -> Tensor | Held:
        return tensor if tensor.untyped_storage().data_ptr() in known else Held(tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.tensor if isinstance(t, Held) else t):
        update()
    return most[0]


def data(rows: int) -> list[Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    x = torch.randn(rows, 1, PIXELS, PIXELS, generator=generator)
    return [x, torch.randint(1000, (rows, WORDS), generator=generator)]


def main() -> None:
    global ROWS
    options = arguments(__doc__, cuda=True)
    if options.quick:
        ROWS = 128
    torch.manual_seed(0)
    encoders: list[nn.Module] = [Pictures(), Words()]
    inputs = data(ROWS)
    chunks = ROWS // SIZE

    def whole() -> None:
        loss_of(*(encoder(x) for encoder, x in zip(encoders, inputs, strict=True))).backward()

    def with_chunks(keep: int, inputs: list[Tensor] = inputs) -> Callable[[], None]:
        small = [chunked(encoder, SIZE, keep=keep) for encoder in encoders]
        return lambda: loss_of(*(encoder(x) for encoder, x in zip(small, inputs, strict=True))).backward()

    def with_checkpoints() -> None:
        loss_of(*(checkpointed(encoder, x) for encoder, x in zip(encoders, inputs, strict=True))).backward()

    contenders: dict[str, Callable[[], None]] = {
        "whole batch": whole,
        "chunked": with_chunks(0),
        f"chunked, keep={chunks // 4}": with_chunks(chunks // 4),
        f"chunked, keep={chunks // 2}": with_chunks(chunks // 2),
        f"chunked, keep={chunks}": with_chunks(chunks),
        "GradCache's algorithm": lambda: grad_cache(encoders, inputs),
        "a checkpoint per chunk": with_checkpoints,
    }
    weights = [p for encoder in encoders for p in encoder.parameters()]
    rounds, warm_up = (3, 1) if options.quick else (15, WARM_UP)
    time = ratios(contenders, "whole batch", rounds, about="forward and backward", warm_up=warm_up)
    first = first_call(lambda: with_chunks(0), 1 if options.quick else 5)
    memory = {name: live_bytes(update, [*weights, *inputs]) for name, update in contenders.items()}
    rows = [[name, time[name], memory[name] / memory["whole batch"]] for name in contenders]
    flat = []
    for count in (256, 1024) if options.quick else (256, 512, 1024, 2048, 4096):
        more = data(count)
        # The loss itself holds rows x rows numbers, as it does for the whole batch: one of the encoders, and its mean.
        small, whole_encoder = chunked(copy.deepcopy(encoders[0]), SIZE), copy.deepcopy(encoders[0])

        def update(encoder: nn.Module = small, x: Tensor = more[0]) -> None:
            encoder(x).std().backward()

        def large(encoder: nn.Module = whole_encoder, x: Tensor = more[0]) -> None:
            encoder(x).std().backward()

        outputs = 2 * count * 64 * 4
        flat.append(
            [
                count,
                (live_bytes(update, [*small.parameters(), more[0]]) - outputs) / 2**20,
                live_bytes(large, [*whole_encoder.parameters(), more[0]]) / 2**20,
            ]
        )
    keep_freed_memory()
    rivals = {name: contenders[name] for name in ("chunked", "GradCache's algorithm")}
    rounds = 3 if options.quick else 25
    about = "where freed memory is kept"
    against = ratios(rivals, "GradCache's algorithm", rounds, about=about, warm_up=warm_up)["chunked"]
    body = (
        f"Two encoders and a contrastive loss of {ROWS} rows, {SIZE} at a time. Forward and backward, relative to "
        "the whole batch.\n\n"
        + table(["", "time", "live activations"], rows)
        + f"\n\nIf the C library keeps freed memory, `chunked` takes {against} of the time of GradCache's "
        f"algorithm. The first call, which is proven, takes {first} later ones.\n\n"
        f"From {flat[0][0]} to {flat[-1][0]} rows, the live activations of the picture encoder, without its outputs, "
        f"go from {flat[0][2]:.0f} to {flat[-1][2]:.0f} MiB for the whole batch, and from {flat[0][1]:.1f} to "
        f"{flat[-1][1]:.1f} MiB "
        "in chunks."
    )
    publish(
        "chunked",
        "Chunked encoders",
        body,
        ["torch"],
        options,
        ours=["chunked", "chunked, keep=2", "chunked, keep=4", "chunked, keep=8"],
    )


if __name__ == "__main__":
    main()
