"""What is used of torch beyond its public API is listed, and all there."""

import ast
import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradaccum
from gradaccum.on_torch import private
from gradaccum.on_torch.private import autograd, run_backward
from gradaccum.torch.optim import SGD

HOME = Path(gradaccum.__file__).parent
LAZY = (
    "_subclasses.fake_tensor",
    "utils._python_dispatch",
    "utils._pytree",
    "autograd.graph",
    "_dynamo",
    "_inductor.exc",
)


@pytest.fixture(scope="module")
def samples():
    for name in LAZY:
        importlib.import_module(f"torch.{name}")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, replica = nn.Linear(2, 2), DistributedDataParallel(nn.Linear(2, 2))
        yield {
            "torch": torch,
            "torch.optim.optimizer": sys.modules["torch.optim.optimizer"],
            "tensor": torch.ones(1),
            "node": torch.ones(1, requires_grad=True).exp().grad_fn,
            "operator": torch.ops.aten.add.Tensor,
            "module": model,
            "optimizer": SGD(model.parameters(), lr=0.1, steps=2),
            "group": dist.group.WORLD,
            "ddp": replica,
            "reducer": replica.reducer,
            **(of_a_sharded_model() if torch.__version__ >= "2.13" else {}),  # before, it is refused
        }
    finally:
        dist.destroy_process_group()


def of_a_sharded_model():
    sharded = fully_shard(nn.Linear(2, 2))
    sharded(torch.ones(1, 2)).sum().backward()
    state = sharded._get_fsdp_state()
    (group,) = state._fsdp_param_groups
    return {"fsdp": sharded, "fsdp state": state, "fsdp group": group, "fsdp parameter": group.fsdp_params[0]}


def test_this_version_of_torch_has_every_private_name_that_is_used(samples):
    owners = {name.owner for name in private.NAMES}
    assert {name for name in owners - samples.keys() if not name.startswith("fsdp")} == set()
    assert private.missing(samples) == []
    reducer = SimpleNamespace(_rebuild_buckets=None, _get_zeros_like_grad_buckets=None)
    assert private.missing({**samples, "reducer": reducer}) == [
        f"torch {torch.__version__} has no _autograd_hook in its reducer: DDP reduces outside of a backward pass. "
        "Without it: torch.distributed.all_reduce."
    ]


GATHERED = ("group", "ddp", "reducer", "fsdp", "fsdp state", "fsdp group", "fsdp parameter")
"""Whose private names are used in one wing alone."""

PYTHONS = {"_getframe", "_fields", "_replace"}


def private_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        else:
            names = [node.attr] if isinstance(node, ast.Attribute) else []
        yield from ((node.lineno, name) for name in names if re.match("_[^_]", name))


def test_every_private_name_of_torch_is_listed_and_internals_are_touched_in_one_wing():
    paths = [p for wing in ("torch", "on_torch") for p in sorted((HOME / wing).rglob("*.py"))]
    anywhere = {n for entry in private.NAMES if entry.owner not in GATHERED for n in entry.name.split(".")}
    ours = [*paths, *(HOME / "core").rglob("*.py")]
    own = {f"_{name}" for p in ours for name in re.findall(r"(?:(?:self|cls)\._|def _)(\w+)\b", p.read_text())}
    own -= {name for entry in private.NAMES for name in entry.name.split(".")}
    found = [
        f"{path.relative_to(HOME)}:{line}: {name}"
        for path in paths
        if path.parent.name != "private"
        for line, name in private_names(path)
        if name not in anywhere | own | PYTHONS
    ]
    assert not found, "\n".join(found)


# Backward passes that start at once do what `torch.autograd.backward` does.


@pytest.fixture(params=["torch's engine", "another torch"])
def start(request, monkeypatch):
    if request.param == "another torch":  # whose engine is called otherwise
        monkeypatch.setattr(autograd, "backward_engine", lambda: None)
    else:
        assert autograd.backward_engine() is not None
    return run_backward


def test_gradients_add_up_from_several_tensors_whose_graphs_are_freed(start):
    weight = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    weight.grad = torch.tensor([10.0, 10.0], dtype=torch.float64)
    roots = [weight**2, weight.sum()], [torch.tensor([1.0, 0.5], dtype=torch.float64), torch.tensor(3.0).double()]
    start(*roots)
    assert weight.grad.tolist() == [15.0, 15.0]
    with pytest.raises(RuntimeError, match="second time"):
        start(*roots)
    with pytest.raises(RuntimeError, match="does not require grad"):
        start([torch.ones(())], [torch.ones(())])


def test_subclasses_have_their_own_way(start):
    seen = []

    class Watching(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    loss = (torch.ones((), requires_grad=True) * 2).as_subclass(Watching)
    torch.autograd.backward([loss], [torch.ones(())], retain_graph=True)
    expected, seen[:] = seen[:], []
    start([loss], [torch.ones(())])
    assert [each for each in seen if each in expected] == expected
