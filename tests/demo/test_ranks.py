"""gradaccum demo --ranks 2: the accumulated run on two processes is the large batch's on one."""

import numpy as np
import pytest
from click.testing import CliRunner

from gradaccum.cli.main import commands
from gradaccum.demo.data import Data
from gradaccum.demo.experiment import Setup, perform
from gradaccum.demo.progress import Progress
from tests.demo import fashion_mnist


def test_two_ranks_make_the_updates_of_one_process():
    # 7 micro-batches of 4 rows: in the last window the second rank has none
    train_x, train_y = fashion_mnist.pictures(44, 0)
    test_x, test_y = fashion_mnist.pictures(10, 1)
    x = [images.reshape(len(images), -1) for images in (train_x, test_x)]
    data = Data("FashionMNIST", "here", x[0], train_y.astype(np.int64), x[1], test_y.astype(np.int64), scale=255.0)
    with Progress() as progress:
        outcome = perform(Setup(batch_size=16, steps=4, epochs=2, dtype="float64", ranks=2), data, progress)
    assert outcome.ok
    assert outcome.difference <= 1e-12
    large, accumulated, _ = outcome.runs
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
