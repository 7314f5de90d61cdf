"""Metrics that a simulator reports without having announced them, recorded beside the data of TorchRL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase, TransformedEnv

from edenrl.envs.self_resetting import SelfResettingEnv

__all__ = ["add_metrics", "recorded_metrics"]


@contextmanager
def recorded_metrics(env: EnvBase) -> Iterator[list[dict[str, Tensor]]]:
    """Records the metrics that the simulator did not announce, one dictionary of ``[N, 1]`` per step.

    TorchRL's collectors drop what no spec declares. Whoever steps the environment adds these to ``("next", "metrics")``
    afterwards; a name is absent in the steps before its first report.

    Args:
        env: the environment, transformed or not; the record of any but a ``SelfResettingEnv`` stays empty.

    Examples:
        >>> from edenrl.envs import PointMass
        >>> env = PointMass(2, seed=0)
        >>> with recorded_metrics(env) as steps:
        ...     _ = env.rollout(3)
        >>> steps
        []
    """
    while isinstance(env, TransformedEnv):
        env = env.base_env
    steps: list[dict[str, Tensor]] = []
    if not isinstance(env, SelfResettingEnv):
        yield steps
        return
    env._recording = steps
    try:
        yield steps
    finally:
        env._recording = None


def add_metrics(data: TensorDictBase, steps: Sequence[Mapping[str, Tensor]]) -> TensorDictBase:
    """``data`` ``[N, T]`` with the metrics that ``recorded_metrics`` recorded, NaN in the steps before they came.

    Args:
        data: a rollout of T steps; it is not changed.
        steps: the record of these steps.

    Examples:
        >>> from tensordict import TensorDict
        >>> data = TensorDict(next=dict(reward=torch.zeros(2, 2, 1)), batch_size=[2, 2])
        >>> add_metrics(data, [{}, {"height": torch.ones(2, 1)}])["next", "metrics", "height"].squeeze(-1)
        tensor([[nan, 1.],
                [nan, 1.]])
    """
    names = dict.fromkeys(name for step in steps for name in step)
    if not names:
        return data
    data = data.copy()
    absent = torch.full_like(data["next", "reward"][:, 0], torch.nan)
    for name in names:
        rows = [step.get(name, absent).to(absent.device) for step in steps]
        data["next", "metrics", name] = torch.stack(rows, 1)
    return data
