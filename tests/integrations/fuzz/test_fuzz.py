"""Random runs of other people's trainers: the large batch's, or refused for a reason that is known."""

import itertools
import logging

import pytest
import transformers

from tests.fuzzing import for_a_while
from tests.integrations.fuzz import accelerate_runs, lightning_runs, trainer_runs
from tests.integrations.transformers.problems import MEANS, MODELS

KINDS = {"transformers": trainer_runs.wrong, "lightning": lightning_runs.wrong, "accelerate": accelerate_runs.wrong}
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

pytestmark = pytest.mark.filterwarnings("ignore")  # the trainers' own


@pytest.fixture(autouse=True)
def quiet():
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


SCENARIOS = {seed: trainer_runs.scenario(seed) for seed in range(450, -1, -1)}
OF_EACH_MODEL = {SCENARIOS[seed][0]: seed for seed in range(50, -1, -1)}
OF_EACH_LOSS = {(x["loss"], "func" in x): seed for seed, (*_, x) in SCENARIOS.items() if x.get("loss") in MEANS}
"""The first run of each; a loss is that of a subclass, or a compute_loss_func."""


def test_there_is_a_run_of_each_model_and_loss():
    assert OF_EACH_MODEL.keys() == MODELS.keys()
    assert OF_EACH_LOSS.keys() == {*itertools.product(MEANS, (False, True))}
    assert any("label_smoothing_factor" in SCENARIOS[seed][4] for seed in OF_EACH_MODEL.values())


@pytest.mark.parametrize(
    ("kind", "seeds"),
    [
        ("lightning", [*range(30), 98, 350]),  # the last two end epochs between windows
        ("accelerate", range(60)),
        ("transformers", OF_EACH_LOSS.values()),
        *(("transformers", [seed]) for seed in OF_EACH_MODEL.values()),
    ],
    ids=["lightning", "accelerate", "losses", *OF_EACH_MODEL],
)
def test_some_random_runs_are_the_large_batchs(kind, seeds, tmp_path):
    assert not [found for seed in seeds if (found := KINDS[kind](seed, str(tmp_path)))]


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", KINDS)
def test_random_runs_are_the_large_batchs(kind, tmp_path):
    for_a_while(lambda seed: KINDS[kind](seed, str(tmp_path)), kind)
