"""What every test shares: the checkout, one seed, one thread."""

from pathlib import Path

import numpy as np
import pytest
import torch

from edenrl.envs import registered_envs
from edenrl.envs.self_resetting import warn_once
from edenrl.objectives import registered_losses

GOLDEN = Path(__file__).parent / "golden"
# The tensors of the tests are tiny: more threads only wait for each other.
torch.set_num_threads(1)


# As the library registers them: tests and docstring examples add names of their own to the same process.
_ENVIRONMENTS, _LOSSES = frozenset(registered_envs()), frozenset(registered_losses())


@pytest.fixture(scope="session")
def built_in_environments() -> frozenset[str]:
    """Names of the environments that come with the library."""
    return _ENVIRONMENTS


@pytest.fixture(scope="session")
def built_in_losses() -> frozenset[str]:
    """Names of the losses that come with the library."""
    return _LOSSES


@pytest.fixture(scope="session")
def root() -> Path:
    """The top folder of the checkout."""
    return Path(__file__).resolve().parent.parent


class Golden:
    """The published numbers of one file; it remembers which of them were read."""

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as file:
            self._arrays = {name: file[name] for name in file.files}
        self.path, self.read = path, set[str]()

    @property
    def names(self) -> list[str]:
        """Every name in the file."""
        return list(self._arrays)

    def __getitem__(self, name: str) -> torch.Tensor:
        self.read.add(name)
        return torch.tensor(self._arrays[name])

    def under(self, prefix: str) -> dict[str, torch.Tensor]:
        """What begins with a prefix, by the rest of its name."""
        return {name.removeprefix(prefix): self[name] for name in self.names if name.startswith(prefix)}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes ``golden`` runs on every set of the file that its module names in ``GOLDEN``."""
    if "golden" in metafunc.fixturenames:
        paths = sorted(GOLDEN.rglob(f"{metafunc.module.GOLDEN}.npz"))
        metafunc.parametrize("golden", paths, indirect=True, ids=[path.parent.name for path in paths])


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Published numbers."""
    return Golden(request.param)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Benchmarks run one after another in this process, which prints their times; other tests in one per core."""
    return 0 if config.option.markexpr == "benchmark" else None


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state, whichever ran before it."""
    torch.manual_seed(0)
    np.random.seed(0)
    warn_once.cache_clear()
