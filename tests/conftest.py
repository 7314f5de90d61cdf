"""What every test shares: the checkout, one seed, one thread."""

from pathlib import Path

import numpy as np
import pytest
import torch

from edenrl.envs.self_resetting import warn_once

# The tensors of the tests are tiny: more threads only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def root() -> Path:
    """The top folder of the checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state, whichever ran before it."""
    torch.manual_seed(0)
    np.random.seed(0)
    warn_once.cache_clear()
