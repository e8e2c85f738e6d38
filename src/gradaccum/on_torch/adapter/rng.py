"""Rowwise random numbers: dropout draws the same for a row in a micro-batch as in the large batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradaccum.on_torch import random_state
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.random_state import RandomState, all_generators

SEED = 0x5EEDFA11
"""What a proof seeds PyTorch's generators with: nobody else does."""


def _key(generator: torch.Generator) -> Any:
    return getattr(generator, "_cdata", id(generator))


class _Known:
    """A generator that isn't made in passes, and its state, in which it has been found and from which passes begin."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator, self.state = generator, generator.get_state()
        copied = torch.Generator(generator.device)
        copied.set_state(self.state)
        torch.randint(2, (), generator=copied, device=copied.device)
        self.advanced = copied.get_state()
        """One number later: not as one is that a pass has seeded."""


class RowwiseRng(TorchDispatchMode):
    """While active, every random tensor is cut out of the one that the large batch has drawn.

    A random operation draws one number from the user's generator and seeds its own noise with it. That noise always has
    the large batch's shape; a micro-batch takes its rows of it. As the generator moves by one number per operation,
    whatever the shapes, the micro-batches stay in step with the large batch, and checkpointing replays as ever.

    Every pass begins with those of `generators` that are NumPy's or Python's as they are now. `idle`: a proof has shown
    that nothing is drawn, and that this is what is computed in. Then it looks at nothing.
    """

    def __init__(
        self, rows: int, generators: Iterable[Any] = (), *, neutral: bool = False, idle: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.rows = rows
        self.neutral = neutral
        self.unreplayed: set[str] = set()  # operations whose random numbers could not be assigned to rows
        self.precision = idle or torch.float64  # the narrowest floating dtype that was computed in
        self.idle = idle is not None
        self.used = False  # whether anything has drawn random numbers
        self._drawn: set[str] = set()
        self._draws = self._draws_of_all = 0  # in the pass that runs, and in one of the large batch
        own = [one for one in generators if not (self.idle or isinstance(one, torch.Generator))]
        self._own, self._begun = RandomState(own), RandomState(())
        self._ends: dict[Any, RandomState] = {}
        self._shapes: dict[int, torch.Size] = {}
        self._taken: Tensor | None = None
        self._generators = [_Known(one) for one in generators if isinstance(one, torch.Generator)]
        self.seeded = False
        """Whether passes have drawn numbers that the next micro-batch draws again, for rows of its own."""
        self._seeded: list[torch.Generator] = []
        self.seeded_by_forks = False
        """Whether that is so of all numbers, as `torch.random.fork_rng` takes back that they were drawn."""
        self._forks, self._draws_of_default, self._start = False, 0, Tensor()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which is off, where a proof runs, and takes as long as the operation if asked for each

    def __enter__(self) -> Any:
        return self if self.idle else super().__enter__()

    def __exit__(self, *error: Any) -> None:
        if not self.idle:
            self._look()
            super().__exit__(*error)

    def replace_noise(self) -> bool:
        """Have numbers that belong to no row be their mean from now on, and those that are drawn again be drawn again.

        Returns whether there were any.
        """
        replaced = bool(self.unreplayed) and not self.neutral
        self.neutral = self.neutral or replaced
        forks = self._forks and not self.seeded_by_forks
        self.seeded_by_forks = self.seeded_by_forks or forks
        return replaced or forks

    def rest(self) -> None:
        """Look at nothing from now on, if all rows at once have drawn nothing."""
        self.idle = self.idle or not self.used

    def start(self, taken: Tensor | None) -> None:
        if self.idle:
            return
        self.rewind()
        self._taken = taken
        random_state.seed(SEED)
        for known in self._generators:
            known.generator.set_state(known.advanced)
        self._seeded, self._draws_of_default, self._start = [], 0, torch.default_generator.get_state()
        self._begun = RandomState([*all_generators()[1:], *self._own.states])

    def rewind(self) -> None:
        if self.idle:
            return
        self._look()
        self._own.put_back()
        for known in self._generators:
            known.generator.set_state(known.state)

    def _look(self) -> None:
        """Numbers that aren't PyTorch's can't be cut. As many in each pass are the same; others follow its rows.

        Where PyTorch's are drawn more or less often than for the large batch, as in a loop over rows, they belong to no
        rows, either.
        """
        if self._draws and self._taken is None:
            self._draws_of_all = self._draws
        elif self._draws and self._draws != self._draws_of_all:
            self.unreplayed.add("drawn more or less often")
        self._draws = 0
        now = RandomState(self._begun.states)
        for generator in self._begun.moved(now):
            self.used = True
            if self._ends.setdefault(generator, now.only([generator])).moved(now):
                self._drawn.add({"python": "Python's", "numpy": "NumPy's"}.get(str(generator), "its own"))
        self._begun = RandomState(())

    def end_of_forward(self) -> None:
        """A forward pass has run. Where it has drawn, and no number is gone, the next one draws the same ones."""
        if self._draws_of_default and torch.equal(self._start, torch.default_generator.get_state()):
            self._forks = True

    def _repeats(self, generator: torch.Generator | None, device: torch.device) -> bool:
        """Whether this generator was seeded in this pass, so that each micro-batch draws the same numbers."""
        if generator is None or _key(generator) == _key(torch.default_generator):
            self._draws_of_default += 1
            on_cuda = device.type == "cuda"
            default = torch.cuda.default_generators[device.index or 0] if on_cuda else torch.default_generator
            return self.seeded_by_forks or default.initial_seed() != SEED
        if any(_key(generator) == _key(known) for known in self._seeded):
            return True
        fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
        if not torch.equal(fresh.get_state(), generator.get_state()):
            return False
        self._seeded.append(generator)
        return True

    def check(self, name: str) -> None:
        if self._drawn:
            raise ValueError(
                f"{name} draws random numbers of {', '.join(sorted(self._drawn))}, which can't be assigned to rows, so "
                "micro-batches can't be compared with the whole batch. If possible, draw them with torch."
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (draws := _DRAWS.get(func)) is None:
            draws = _DRAWS[func] = torch.Tag.nondeterministic_seeded in func.tags
        if draws:
            return self._random(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        known = not isinstance(result, Tensor) or result.dtype is self.precision
        if not known and result.is_floating_point() and result.numel() > 1:
            self.precision = min(self.precision, result.dtype, key=lambda dtype: torch.finfo(dtype).bits)
        return result

    def _random(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self.used = True
        given = {argument.name: argument.default_value for argument in func._schema.arguments}
        given.update({argument.name: value for argument, value in zip(func._schema.arguments, args)})
        given.update(kwargs)
        name = func._schema.name.removeprefix("aten::")
        base = name.rstrip("_").removesuffix("_like").removeprefix("_fused_").removeprefix("native_")
        if given.get("dropout_p") == 0.0 or given.get("train") is False or given.get("training") is False:
            return func(*args, **kwargs)
        sampler = _SAMPLERS.get(base)
        if self._repeats(given.get("generator"), _device_of(given)):
            self.seeded = True
            return func(*args, **kwargs)
        if sampler is None:
            self.unreplayed.add(name)
            return func(*args, **kwargs)
        template = _template(given)
        result = sampler(template, given, self)
        return template.copy_(result) if name.endswith("_") else result

    def uniform(self, template: Tensor, given: dict[str, Any], *, neutral: bool | None = None) -> Tensor:
        """Noise in [0, 1) of the template's shape: the rows in progress of the large batch's; 0.5 where `neutral`."""
        self._draws += 1
        shape, device, generator = template.shape, template.device, given.get("generator")
        if generator is not None and all(_key(generator) != _key(known.generator) for known in self._generators):
            self._generators.append(_Known(generator))
        drawn = torch.randint(2**62, (), generator=generator, device="cpu" if generator is None else generator.device)
        seed = int(drawn.item())
        if self._taken is None:
            self._shapes[seed] = shape
        full = self._shapes.get(seed)
        dim = row_dimension(full, shape, self.rows, self._taken) if full is not None else None
        if self.neutral if neutral is None else neutral:
            return torch.full(shape, 0.5, dtype=torch.float64, device=device)
        if full is None or dim is None:
            self.unreplayed.add("of a shape that doesn't follow the rows")
        whole = shape if full is None or dim is None else full
        source = torch.Generator(device).manual_seed(seed)
        values = torch.rand(whole, dtype=torch.float64, device=device, generator=source)
        if dim is None or dim < 0:
            return values
        assert self._taken is not None
        return rows_in(values, dim, self.rows, self._taken)


def _device_of(given: dict[str, Any]) -> torch.device:
    tensor = next((value for value in given.values() if isinstance(value, Tensor)), None)
    return torch.device(given.get("device") or "cpu") if tensor is None else tensor.device


def row_dimension(full: torch.Size, shape: torch.Size, rows: int, taken: Tensor | None) -> int | None:
    """The dimension that holds the rows; -1 where the micro-batch shares all of it, None where neither fits."""
    if full == shape:
        return -1
    if taken is None or len(full) != len(shape):
        return None
    different = [dim for dim, (a, b) in enumerate(zip(full, shape)) if a != b]
    if len(different) == 1:
        dim = different[0]
        if full[dim] % rows == 0 and full[dim] // rows * len(taken) == shape[dim]:
            return dim
    return None


def rows_in(values: Tensor, dim: int, rows: int, taken: Tensor) -> Tensor:
    """What belongs to these rows, where a dimension holds so many."""
    return values.unflatten(dim, (rows, -1)).index_select(dim, taken.to(values.device)).flatten(dim, dim + 1)


def _template(given: dict[str, Any]) -> Tensor:
    """An empty tensor like the result; for operations in place, the tensor itself."""
    dtype = given["dtype"] if isinstance(given.get("dtype"), torch.dtype) else None  # a schema's default is a number
    own = given.get("self", given.get("input", given.get("count")))
    if isinstance(own, Tensor):
        return own if dtype is None else torch.empty_like(own, dtype=dtype)
    for name in ("mean", "std"):
        if isinstance(given.get(name), Tensor):
            return given[name]
    shape = given["size"] if given.get("size") is not None else [given["n"]]
    integral = torch.int64 if "high" in given or "n" in given else None
    return torch.empty(shape, dtype=dtype or integral, device=given.get("device"))


def _bernoulli(template: Tensor, given: dict[str, Any], rng: RowwiseRng) -> Tensor:
    probability = given["self"] if given.get("p") is None else given["p"]
    kept = rng.uniform(template, given) < probability
    if rng.neutral and template.is_floating_point():
        return torch.zeros_like(template) + probability
    return kept.to(template.dtype)


def _dropout(template: Tensor, given: dict[str, Any], rng: RowwiseRng) -> tuple[Tensor, Tensor]:
    probability = given["p"]
    kept = rng.uniform(template, given) >= probability
    if rng.neutral:
        return template.clone(), torch.ones_like(template, dtype=torch.bool)
    return template * kept * (1 / (1 - probability) if probability < 1 else 0.0), kept


def _multinomial(template: Tensor, given: dict[str, Any], rng: RowwiseRng) -> Tensor:
    # An exponential race: the category that arrives first is drawn with its probability, without replacement.
    draws, weights = given["num_samples"], template
    if given["replacement"]:
        weights = template.unsqueeze(-2)
        return (_arrivals(weights.expand(*template.shape[:-1], draws, -1), given, rng) / weights).argmin(-1)
    return (_arrivals(template, given, rng) / template).topk(draws, largest=False, sorted=True).indices


def _arrivals(template: Tensor, given: dict[str, Any], rng: RowwiseRng) -> Tensor:
    return -torch.log1p(-rng.uniform(template, given))


def _normal(template: Tensor, given: dict[str, Any], rng: RowwiseRng) -> Tensor:
    # Never exactly 0, which the quantile would send to -inf.
    normal = torch.special.ndtri(rng.uniform(template, given).clamp(min=2.0**-60))
    return (normal * given.get("std", 1.0) + given.get("mean", 0.0)).to(template.dtype)


def _uniform(template: Tensor, given: dict[str, Any], rng: RowwiseRng) -> Tensor:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return (low + (high - low) * rng.uniform(template, given)).to(template.dtype)


def _randint(template: Tensor, given: dict[str, Any], rng: RowwiseRng) -> Tensor:
    low, high = given.get("low") or 0, given["high"]
    return (low + (high - low) * rng.uniform(template, given)).floor().to(template.dtype)


def _cauchy(template: Tensor, given: dict[str, Any], rng: RowwiseRng) -> Tensor:
    tangent = torch.tan(math.pi * (rng.uniform(template, given) - 0.5))
    return (given["median"] + given["sigma"] * tangent).to(template.dtype)


def _gamma(template: Tensor, given: dict[str, Any], rng: RowwiseRng) -> Tensor:
    # By Wilson and Hilferty: nearly as a gamma variable is distributed, and of one number a place. For shapes below 1,
    # a larger one's times a power of a uniform number.
    shape, power = template.double() + 1, rng.uniform(template, given).clamp(min=2.0**-60).log() / template.double()
    normal = torch.special.ndtri(rng.uniform(template, given).clamp(min=2.0**-60))
    cube = (1 - 1 / (9 * shape) + normal / (3 * shape.sqrt())).clamp(min=1e-3) ** 3
    return (shape * cube * power.exp()).clamp(min=torch.finfo(template.dtype).tiny).to(template.dtype)


def _dirichlet(template: Tensor, given: dict[str, Any], rng: RowwiseRng) -> Tensor:
    parts = _gamma(template, given, rng)
    return parts / parts.sum(-1, keepdim=True)


def _count(mean: Tensor, variance: Tensor, given: dict[str, Any], rng: RowwiseRng) -> Tensor:
    """A whole number that is about normal: of Poisson's and the binomial distribution, in a proof."""
    normal = torch.special.ndtri(rng.uniform(mean, given).clamp(min=2.0**-60))
    return (mean + variance.sqrt() * normal).round().clamp(min=0)


def _binomial(template: Tensor, given: dict[str, Any], rng: RowwiseRng) -> Tensor:
    count, share = given["count"].double(), given["prob"].double()
    drawn = _count(count * share, count * share * (1 - share), given, rng)
    return drawn.minimum(count).to(given["count"].dtype)


def _geometric(template: Tensor, given: dict[str, Any], rng: RowwiseRng) -> Tensor:
    return (_arrivals(template, given, rng) / -math.log1p(-given["p"])).floor().add(1).to(template.dtype)


def _random(template: Tensor, given: dict[str, Any], rng: RowwiseRng) -> Tensor:
    low, high = given.get("from") or 0, given.get("to")
    if high is None:
        high = 2 ** (24 if template.is_floating_point() else min(8 * template.itemsize - 1, 31))
    return (low + (high - low) * rng.uniform(template, given)).floor().to(template.dtype)


def _permutation(template: Tensor, given: dict[str, Any], rng: RowwiseRng) -> Tensor:
    # In no order but a drawn one: the rows' own would hide that rows are mixed.
    return rng.uniform(template, given, neutral=False).argsort()


def _rrelu(template: Tensor, given: dict[str, Any], rng: RowwiseRng) -> Tensor:
    low, high = given["lower"], given["upper"]
    slopes = (low + (high - low) * rng.uniform(template, given)).to(template.dtype)
    given["noise"].copy_(slopes.where(template <= 0, torch.ones_like(slopes)))  # which backward reads
    return template * given["noise"]


_DRAWS: dict[Any, bool] = {}
"""Whether these operations draw random numbers."""

_SAMPLERS: dict[str, Callable[[Tensor, dict[str, Any], RowwiseRng], Any]] = {
    "bernoulli": _bernoulli,
    "dropout": _dropout,
    "multinomial": _multinomial,
    "normal": _normal,
    "randn": _normal,
    "log_normal": lambda template, given, rng: _normal(template.double(), given, rng).exp().to(template.dtype),
    "rand": _uniform,
    "uniform": _uniform,
    "randint": _randint,
    "randperm": _permutation,
    "_standard_gamma": _gamma,
    "_sample_dirichlet": _dirichlet,
    "poisson": lambda template, given, rng: _count(template.double(), template.double(), given, rng).to(template.dtype),
    "binomial": _binomial,
    "geometric": _geometric,
    "random": _random,
    "exponential": lambda template, given, rng: (_arrivals(template, given, rng) / given["lambd"]).to(template.dtype),
    "cauchy": _cauchy,
    "rrelu_with_noise": _rrelu,
}


def watched(batch: Batch, taken: Callable[[Tensor], Any]) -> Batch:
    """The batch, which tells which rows are taken of it."""
    batch = copy.copy(batch)
    batch.__class__ = _Watched
    assert isinstance(batch, _Watched)
    batch.taken = taken
    return batch


class _Watched(Batch):
    taken: Callable[[Tensor], Any]

    def take(self, rows: slice | Tensor) -> Batch:
        self.taken(torch.arange(self.rows)[rows] if isinstance(rows, slice) else rows.cpu())
        return super().take(rows)
