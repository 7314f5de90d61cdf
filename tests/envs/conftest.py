"""What the tests of the built-in tasks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from edenrl.envs import TensorStateEnv


@pytest.fixture
def place() -> Callable[..., TensorDict]:
    """``place(env, **values)``: resets, overwrites parts of the state, and returns the root."""

    def placed(env: TensorStateEnv, **values: Any) -> TensorDict:
        env.reset()
        extra = env.get_extra_state()
        for name, value in values.items():
            old = extra["state"][name]
            extra["state"][name] = torch.as_tensor(value, dtype=old.dtype).expand_as(old)
        env.set_extra_state(extra)
        return env.detach_state()

    return placed
