"""Checkpoints: in the middle of a window, in a fresh process, bit for bit; a plain optimizer's, and another's."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import gradaccum.torch
from gradaccum import WindowError
from tests.reference import relative_error, torch_updates
from tests.torch.distributed.processes import fresh_process
from tests.torch.optimizer.loops import assert_same
from tests.torch.problems import adam, mse, network, regression, sgd, split

pytestmark = pytest.mark.usefixtures("float64")

SIZES = [2, 3, 1, 4, 2, 3]


def start(make=adam, steps=4, **options):
    model = network()
    return model, gradaccum.torch.optim.Optimizer(make(model.parameters()), steps=steps, **options)


def train(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        optimizer.backward(mse(model, x, y), weight=len(x))
        optimizer.step()


def resume(middle, end):
    """In a fresh process, with other parameters to begin with."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    model = network(seed=99)
    optimizer = gradaccum.torch.optim.Optimizer(adam(model.parameters()), steps=4)
    saved = torch.load(middle, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert optimizer.micro_batches == 2, optimizer.micro_batches
    train(model, optimizer, optimizer.batches(split(regression(15), SIZES)[2:]))
    torch.save([optimizer.updates, optimizer.epoch, optimizer.loss, *model.state_dict().values()], end)


def test_a_window_resumes_in_a_fresh_process_bit_for_bit(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    micro_batches = split(regression(15), SIZES)
    model, optimizer = start()

    def saving():
        for index, batch in enumerate(micro_batches):
            if index == 3:  # one batch is fetched ahead: two are done
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "middle.pt")
            yield batch

    train(model, optimizer, optimizer.batches(saving()))
    torch.set_num_threads(threads)
    process = fresh_process(resume, tmp_path / "middle.pt", tmp_path / "end.pt")
    process.join(100)
    assert process.exitcode == 0
    updates, epoch, loss, *resumed = torch.load(tmp_path / "end.pt", weights_only=True)
    assert (updates, epoch) == (2, 1)
    assert torch.equal(loss, optimizer.loss)
    assert all(torch.equal(a, b) for a, b in zip(resumed, model.state_dict().values(), strict=True))


def test_batches_go_on_with_a_restored_window_and_its_epoch():
    micro_batches = split(regression(15), SIZES)
    model, optimizer = start(steps={0: 2, 1: 4})
    for _ in optimizer.batches(micro_batches):
        pass
    train(model, optimizer, optimizer.batches(micro_batches))
    train(model, optimizer, micro_batches[:1])
    state, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
    assert (optimizer.epoch, optimizer.steps) == (1, 4)
    other_model, other = start(steps={0: 2, 1: 4})
    other_model.load_state_dict(weights)
    other.load_state_dict(state)
    train(other_model, other, other.batches(micro_batches[1:]))
    assert other.epoch == 2
    train(model, optimizer, micro_batches[1:])
    optimizer.flush()
    assert_same(other_model, model)


def test_a_snapshot_in_memory_does_not_move_with_the_window():
    micro_batches = split(regression(15), SIZES)
    model, optimizer = start()
    train(model, optimizer, micro_batches[:1])
    snapshot = optimizer.state_dict()
    before = copy.deepcopy(snapshot)
    train(model, optimizer, micro_batches[1:2])
    for index, gradient in snapshot["gradaccum"]["gradients"].items():
        assert torch.equal(gradient, before["gradaccum"]["gradients"][index])
    other_model, other = start()
    other.load_state_dict(snapshot)
    train(other_model, other, micro_batches[1:2])
    assert torch.equal(snapshot["gradaccum"]["gradients"][0], before["gradaccum"]["gradients"][0])


def test_the_usual_keys_hold_the_inner_optimizers_state():
    micro_batches = split(regression(15), SIZES)
    model, optimizer = start()
    train(model, optimizer, micro_batches)
    state = optimizer.state_dict()
    plain_model = network()
    plain_model.load_state_dict(model.state_dict())
    plain = adam(plain_model.parameters())
    plain.load_state_dict(state)
    assert state["param_groups"] == plain.state_dict()["param_groups"]
    assert (
        relative_error([s["exp_avg"] for s in plain.state.values()], [s["exp_avg"] for s in optimizer.state.values()])
        == 0
    )


def test_a_plain_optimizers_state_dict_loads():
    data = regression(15)
    plain_model = network()
    plain = adam(plain_model.parameters())
    torch_updates(plain_model, plain, [data], mse)
    model, optimizer = start(steps=3)
    model.load_state_dict(plain_model.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    train(model, optimizer, split(data, SIZES)[:3])
    assert optimizer.updated
    torch_updates(plain_model, plain, [tuple(t[:6] for t in data)], mse)
    assert_same(model, plain_model)


def test_loading_replaces_an_open_window():
    micro_batches = split(regression(15), SIZES)
    model, optimizer = start(sgd, steps=2)
    closed = optimizer.state_dict()
    train(model, optimizer, micro_batches[:1])
    optimizer.load_state_dict(closed)
    assert optimizer.micro_batches == 0
    assert all(p.grad is None for p in model.parameters())


def test_the_hooks_of_state_dicts_run():
    _, optimizer = start()
    seen = []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("pre"))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "note": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, state: {k: v for k, v in state.items() if k != "note"})
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    state = optimizer.state_dict()
    assert state["note"] == 1
    optimizer.load_state_dict(state)
    assert seen == ["pre", "loaded"]


class TestBadStates:
    @staticmethod
    def untouched(model, optimizer, state, error, match):
        before = copy.deepcopy([optimizer.state_dict(), model.state_dict()])
        with pytest.raises(error, match=match):
            optimizer.load_state_dict(state)
        after = [optimizer.state_dict(), model.state_dict()]
        assert str(before) == str(after)

    def test_another_steps_inside_an_open_window(self):
        model, optimizer = start(steps=4)
        train(model, optimizer, split(regression(15), SIZES)[:2])
        state = optimizer.state_dict()
        other_model, other = start(steps=2)
        train(other_model, other, split(regression(15), SIZES)[:3])
        self.untouched(other_model, other, state, WindowError, r"window of 4 steps \(2 of them done\).*steps=2")

    def test_another_steps_between_windows_is_fine(self):
        model, optimizer = start(steps=2)
        train(model, optimizer, split(regression(15), SIZES)[:2])
        _, other = start(steps=3)
        other.load_state_dict(optimizer.state_dict())
        assert (other.steps, other.updates) == (3, 1)

    def test_another_number_of_parameters(self):
        model, optimizer = start()
        other = gradaccum.torch.optim.Optimizer(adam(nn.Linear(5, 3).parameters()), steps=4)
        self.untouched(model, optimizer, other.state_dict(), ValueError, "another model.*2.*4")

    @pytest.mark.parametrize("middle", [True, False])
    def test_other_shapes(self, middle):
        torch.manual_seed(0)
        narrow = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
        other = gradaccum.torch.optim.Optimizer(adam(narrow.parameters()), steps=4)
        train(narrow, other, split(regression(15), SIZES)[: 3 if middle else 4])
        model, optimizer = start()
        self.untouched(model, optimizer, other.state_dict(), ValueError, r"another model.*\(6, 5\).*\(7, 5\)")

    def test_no_state_dict_at_all(self):
        model, optimizer = start()
        self.untouched(model, optimizer, model.state_dict(), ValueError, "no optimizer's state dict")


@pytest.mark.parametrize("make", [adam, sgd])
def test_get_state_dict_and_set_state_dict_take_the_wrapper_for_an_optimizer(make):
    micro_batches = split(regression(15), SIZES)
    model, optimizer = start(make, steps=3)
    train(model, optimizer, micro_batches[:3])
    model_state, optimizer_state = copy.deepcopy(get_state_dict(model, optimizer))
    train(model, optimizer, micro_batches[3:])
    again, other = start(make, steps=3)
    get_state_dict(again, other)  # as torch.distributed.checkpoint wants it: makes the inner optimizer's state
    assert other.micro_batches == other.updates == 0
    set_state_dict(again, other, model_state_dict=model_state, optim_state_dict=optimizer_state)
    train(again, other, micro_batches[3:])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
