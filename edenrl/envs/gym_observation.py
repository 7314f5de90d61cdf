"""How the observations of a Gymnasium vector become observation groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv, VectorEnv
from torch import Tensor
from torch.nn.functional import one_hot
from torchrl.data import Bounded, Composite, TensorSpec, Unbounded
from torchrl.data.utils import numpy_to_torch_dtype_dict

from edenrl.envs.observations import check_group_names, leaf_spaces

__all__ = ["GymObservation"]


class GymObservation:
    """The observation groups of a Gymnasium vector environment: their spec, and their values.

    A lone space is the group ``observation``. Each entry of a ``Dict`` space is a group; a nested one is named by its
    path, such as ``robot.q``.

    | space of one environment | group |
    |---|---|
    | ``Box`` with at most one dimension | ``[N, d]`` float32, integers too |
    | ``MultiBinary`` | ``[N, *shape]`` float32 |
    | ``Box`` with more dimensions, such as an image | ``[N, *shape]`` in its own type; float64 becomes float32 |
    | ``Discrete``, ``MultiDiscrete`` | ``[N, d]`` float32, one-hot, one block per number |

    Args:
        env: the vector environment, with ``N`` environments.

    Raises:
        ValueError: a space of another kind, a type that TorchRL does not know, such as uint16, or a group whose name
            is taken.

    Examples:
        >>> import gymnasium
        >>> env = gymnasium.make_vec("FrozenLake-v1", 2, vectorization_mode="sync")
        >>> GymObservation(env).read(env.reset(seed=0)[0], 2)["observation"].shape
        torch.Size([2, 16])
    """

    def __init__(self, env: VectorEnv) -> None:
        single, batch = env.single_observation_space, env.observation_space
        inner = env.unwrapped
        owner = type(inner.envs[0].unwrapped).__name__ if isinstance(inner, SyncVectorEnv) else str(env)
        self._num_envs = env.num_envs
        if isinstance(single, spaces.Dict) and isinstance(batch, spaces.Dict):
            leaves, batches = leaf_spaces(owner, single), leaf_spaces(owner, batch)
            entries = {name: _Entry(path, leaf, batches[name][1]) for name, (path, leaf) in leaves.items()}
        else:
            entries = {"observation": _Entry((), single, batch)}
        for name, entry in entries.items():
            entry.check(name)
        check_group_names(owner, entries)
        # TorchRL's wrapper calls an entry "state" "observation"; policies trained on it know it by this name.
        if "state" in entries and "observation" not in entries:
            entries = {"observation" if name == "state" else name: entry for name, entry in entries.items()}
        self._entries = entries

    def spec(self, device: torch.device) -> Composite:
        """Spec of the groups, batch size ``[N]``."""
        leaves = {name: entry.spec(self._num_envs, device) for name, entry in self._entries.items()}
        return Composite(leaves, shape=[self._num_envs], device=device)

    def read(self, observation: Any, rows: int) -> dict[str, Tensor]:
        """Copies of the groups ``[rows, *]`` in an observation, on the CPU.

        Args:
            observation: what the vector returned, or the observation of one of its environments.
            rows: the number of environments, or 1.
        """
        return {name: entry.read(observation, rows) for name, entry in self._entries.items()}


@dataclass
class _Entry:
    """One observation space and where its values stand."""

    path: tuple[str, ...]
    space: spaces.Space
    batch: spaces.Space

    def check(self, name: str) -> None:
        if not isinstance(self.space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
            raise ValueError(
                f"The space of the observation {name!r} is {self.space}; expected Box, Discrete, MultiDiscrete, "
                "MultiBinary or a Dict of these. Convert it with a gymnasium wrapper first, for example "
                "FlattenObservation."
            )
        if self.space.dtype not in numpy_to_torch_dtype_dict:
            raise ValueError(
                f"The observation {name!r} is {self.space.dtype}, which TorchRL does not know. Convert it first, for "
                "example with gymnasium.wrappers.DtypeObservation(env, np.float32)."
            )

    def spec(self, num_envs: int, device: torch.device) -> TensorSpec:
        if isinstance(self.space, (spaces.Discrete, spaces.MultiDiscrete)):
            return Bounded(0.0, 1.0, (num_envs, sum(self._counts)), device=device)
        shape = (num_envs, *(self.space.shape or (1,)))
        if isinstance(self.space, spaces.MultiBinary):
            return Bounded(0.0, 1.0, shape, device=device)
        assert isinstance(self.batch, spaces.Box)
        low, high = self.batch.low, self.batch.high
        if len(shape) > 2 or not (np.isfinite(low).any() or np.isfinite(high).any()):
            return Unbounded(shape, device=device, dtype=self._dtype)
        bounds = (torch.tensor(bound, dtype=self._dtype, device=device).reshape(shape) for bound in (low, high))
        return Bounded(*bounds, shape, device=device, dtype=self._dtype)

    def read(self, observation: Any, rows: int) -> Tensor:
        for key in self.path:
            observation = observation[key]
        if isinstance(self.space, (spaces.Discrete, spaces.MultiDiscrete)):
            numbers = torch.tensor(observation, dtype=torch.int64).reshape(rows, -1)
            numbers = numbers - torch.tensor(np.atleast_1d(self.space.start).ravel())
            blocks = [one_hot(number, count) for number, count in zip(numbers.unbind(1), self._counts, strict=True)]
            return torch.cat(blocks, 1).to(torch.float32)
        return torch.tensor(observation, dtype=self._dtype).reshape(rows, *(self.space.shape or (1,)))

    @property
    def _counts(self) -> list[int]:
        """How many values each number of a discrete space has."""
        space: Any = self.space
        return [int(space.n)] if isinstance(space, spaces.Discrete) else space.nvec.ravel().tolist()

    @property
    def _dtype(self) -> torch.dtype:
        """Vectors are what networks read; images keep their bytes until a policy converts them."""
        is_image = isinstance(self.space, spaces.Box) and len(self.space.shape) > 1
        if not is_image or np.issubdtype(self.space.dtype, np.floating):
            return torch.float32
        return torch.from_numpy(np.empty(0, self.space.dtype)).dtype
