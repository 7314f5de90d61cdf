"""The last motion windows of the policy, which a discriminator compares with the reference."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer, TensorStorage

from edenrl.collectors.storage_space import require_space
from edenrl.envs.seeds import checked_seed
from edenrl.modules import refuse_nonfinite

__all__ = ["WindowBuffer"]


class WindowBuffer(TensorDictReplayBuffer):
    """A ``TensorDictReplayBuffer`` of the policy's most recent motion windows with ``amp_gate`` above 0.5.

    Samples have the windows under ``"amp_window"``. The buffer draws them from its own generator, whose state is
    part of ``state_dict``.

    Args:
        capacity: number of windows kept; the oldest make room.
        window_dim: width K * f of a window.
        batch_size: windows per sample.
        seed: seed of the generator. Default 0.
        device: where the windows are kept. Default CPU.

    Raises:
        ValueError: for a buffer that does not fit the free memory, before it is allocated.

    Examples:
        >>> buffer = WindowBuffer(100, window_dim=15, batch_size=8)
        >>> step = {"amp_window": torch.randn(4, 6, 15), "amp_gate": torch.ones(4, 6, 1)}
        >>> buffer.add_rollout(TensorDict(next=step, batch_size=[4, 6])).shape, len(buffer)
        (torch.Size([24, 15]), 24)
        >>> buffer.sample()["amp_window"].shape
        torch.Size([8, 15])
    """

    def __init__(
        self, capacity: int, window_dim: int, batch_size: int, *, seed: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        # A window and its index.
        needed = capacity * (window_dim * torch.get_default_dtype().itemsize + 8)
        advice = "capacity (window_buffer_size of a run)"
        require_space("A buffer", capacity, needed, advice, unit="window", device=torch.device(device))
        # Allocated here and not on the first call, so that checkpoints have one layout from the start.
        rows = TensorDict(
            amp_window=torch.zeros(capacity, window_dim, device=device),
            index=torch.zeros(capacity, dtype=torch.int64, device=device),
            batch_size=[capacity],
        )
        super().__init__(storage=TensorStorage(rows, device=device), batch_size=batch_size)
        self.empty()
        self.capacity = capacity
        self.set_rng(torch.Generator(device).manual_seed(checked_seed(seed)))

    def add_rollout(
        self,
        rollout: TensorDictBase,
        *,
        window_key: NestedKey = ("next", "amp_window"),
        gate_key: NestedKey = ("next", "amp_gate"),
        missing_key: NestedKey = ("next", "final_obs_missing"),
    ) -> Tensor:
        """Takes the windows after each step where the gate is open; returns them, ``[n, K * f]``.

        Windows at ends of episodes whose last observation the simulator does not give (marked by ``missing_key``) are
        left out.

        Args:
            rollout: data of any batch shape.
            window_key: windows ``[*batch, K * f]``.
            gate_key: gates ``[*batch, 1]``; open above 0.5.
            missing_key: marks ``[*batch, 1]``; optional.
        """
        counts = rollout.get(gate_key).squeeze(-1) > 0.5
        if (missing := rollout.get(missing_key, None)) is not None:
            counts = counts & ~missing.squeeze(-1)
        windows: Tensor = rollout.get(window_key)[counts]
        if len(kept := windows[-self.capacity :]):
            rows = TensorDict(amp_window=kept, batch_size=[len(kept)])
            refuse_nonfinite(rows, ["amp_window"])
            self.extend(rows)
        return windows

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores ``state_dict``."""
        state, device = state_dict["_rng"]
        super().load_state_dict({**state_dict, "_rng": (state.cpu(), device)})
