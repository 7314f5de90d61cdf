"""The last observations of episodes, which a replay buffer keeps beside the steps."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, unravel_key
from torch import Tensor

__all__ = ["EpisodeEnds", "key_name", "named_key"]


class EpisodeEnds:
    """The last observations of episodes, in the order of the steps after which they were seen.

    The position of a step is ``time * num_envs + environment``, with time counted since the first step. The
    observations form a queue in one preallocated block: new ones are appended, old ones are removed at the front. When
    the block is full, the queue is copied to a block of twice the size.
    """

    def __init__(self) -> None:
        self.positions = torch.zeros(0, dtype=torch.long)
        self.values: dict[Any, Tensor] = {}
        self._front = self._back = 0

    def __len__(self) -> int:
        return self._back - self._front

    def add(self, positions: Tensor, values: dict[Any, Tensor]) -> None:
        """Adds ends behind the others: positions ``[n]`` and, by key, observations ``[n, ...]``."""
        count = len(positions)
        if not count:
            return
        if self._back + count > len(self.positions):
            self._move(2 * (len(self) + count), positions, values)
        place = slice(self._back, self._back + count)
        self.positions[place] = positions
        for key, value in values.items():
            self.values[key][place] = value
        self._back += count

    def _move(self, size: int, positions: Tensor, values: dict[Any, Tensor]) -> None:
        alive, count = slice(self._front, self._back), len(self)
        # Unused places sort behind everything.
        moved = torch.full((size,), torch.iinfo(torch.long).max, device=positions.device)
        moved[:count] = self.positions[alive]
        self.positions = moved
        for key, value in values.items():
            block = value.new_empty(size, *value.shape[1:])
            if count:
                block[:count] = self.values[key][alive]
            self.values[key] = block
        self._front, self._back = 0, count

    def sort(self) -> None:
        """Restores the order, after positions were added that are smaller than those before them."""
        alive = slice(self._front, self._back)
        order = self.positions[alive].argsort()
        for block in (self.positions, *self.values.values()):
            block[alive] = block[alive][order]

    def forget_before(self, position: int) -> None:
        """Forgets the ends at smaller positions."""
        if len(self):
            self._front = int(torch.searchsorted(self.positions[: self._back], position))
            self._front = min(self._front, self._back)

    def find(self, positions: Tensor) -> Tensor:
        """Where the values of ``positions`` lie. For a position without an end the answer means nothing."""
        return torch.searchsorted(self.positions, positions).clamp_max(self._back - 1)

    def state_dict(self) -> dict[str, Any]:
        """Positions and observations of all ends."""
        alive = slice(self._front, self._back)
        values = {key_name(key): value[alive].clone() for key, value in self.values.items()}
        return {"positions": self.positions[alive].clone(), "values": values}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restores ``state_dict`` on a device."""
        self.positions = state["positions"].to(device)
        self.values = {named_key(name): value.to(device) for name, value in state["values"].items()}
        self._front, self._back = 0, len(self.positions)


def key_name(key: NestedKey) -> str:
    """A nested key as one string.

    Examples:
        >>> key_name(("next", "reward")), named_key("next/reward")
        ('next/reward', ('next', 'reward'))
    """
    # A part may hold a slash itself, as dm_control's "walker/joints_pos" does.
    parts = (key,) if isinstance(key, str) else key
    return "/".join(str(part).replace("~", "~0").replace("/", "~1") for part in parts)


def named_key(name: str) -> Any:
    """The key that ``key_name`` wrote as ``name``."""
    return unravel_key(tuple(part.replace("~1", "/").replace("~0", "~") for part in name.split("/")))
