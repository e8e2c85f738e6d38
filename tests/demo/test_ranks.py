"""gradaccum demo --ranks 2: the accumulated run on two processes is the large batch's on one."""

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from gradaccum.cli import commands
from gradaccum.demo.experiment import Setup, in_a_process, initial_parameters, plans
from gradaccum.demo.progress import Progress
from gradaccum.demo.torch_experiment import train
from tests.demo import fashion_mnist
from tests.reference import FLOAT64, relative_error


def test_two_ranks_make_the_updates_of_one_process():
    # 7 micro-batches of 4 rows: in the last window the second rank has none
    data = fashion_mnist.data(44, 10)
    setup = Setup(batch_size=16, steps=4, epochs=2, dtype="float64", ranks=2)
    one_process, two_ranks, _ = plans(setup)
    threads = torch.get_num_threads()
    large = train(setup, data, one_process, initial_parameters(data.features, setup.seed), lambda epoch: None)
    torch.set_num_threads(threads)
    with Progress() as progress:
        accumulated = in_a_process(setup, data, two_ranks, progress)
    assert relative_error(accumulated.parameters, large.parameters) <= FLOAT64
    assert relative_error(accumulated.first_gradients, large.first_gradients) <= FLOAT64
    assert accumulated.plan.ranks == 2
    assert accumulated.updates == large.updates == 6
    np.testing.assert_allclose(
        [epoch.train_loss for epoch in accumulated.epochs], [epoch.train_loss for epoch in large.epochs], rtol=1e-12
    )


@pytest.mark.parametrize("arguments", [["--ranks", "3"], ["--ranks", "2", "--framework", "keras"]])
def test_bad_ranks_are_one_clear_line(arguments):
    result = CliRunner().invoke(commands, ["demo", *arguments])
    assert result.exit_code == 2
    assert "--ranks" in result.output
    assert "Traceback" not in result.output
