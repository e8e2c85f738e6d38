"""Backward passes that start at once do what `torch.autograd.backward` does."""

import pytest
import torch

from gradaccum.on_torch.private import autograd, run_backward


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
