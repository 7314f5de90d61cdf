"""Metrics of an iteration: means over its updates, and what its rollout says about behaviour."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from edenrl.envs import action_saturation
from edenrl.modules import whole_episode_ends
from edenrl.optim import GradientStep

__all__ = ["IterationMetrics", "average", "rollout_metrics"]

# What the metrics of an iteration need of its rollouts.
_ENDED = ("done", "episode_reward", "step_count", "metrics", "late_start")
_WATCHED = ("action", *(("next", name) for name in _ENDED))


@torch.no_grad()
def average(metrics: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Mean of every scalar over a list of dictionaries; the means stay on their device.

    Each name is averaged over the dictionaries that have it. Values that are not finite are left out: they come from
    updates that were dropped.

    Examples:
        >>> average([{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(3.0)}])
        {'loss': tensor(2.)}
    """
    values: dict[str, list[Tensor]] = {}
    for row in metrics:
        for name, value in row.items():
            values.setdefault(name, []).append(value.detach().float())
    stacked = {name: torch.stack(column) for name, column in values.items()}
    return {name: column.where(column.isfinite(), math.nan).nanmean() for name, column in stacked.items()}


@torch.no_grad()
def rollout_metrics(rollout: TensorDictBase, box: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
    """What a rollout says about behaviour, as scalar tensors.

    ``episode/return``, ``episode/length``, ``episode/success_rate`` and one entry per ``("next", "metrics", name)`` are
    means over the episodes that ended in the rollout (NaN when none did, or when an environment had not reported a
    metric yet); ``episode/count`` is their number. Episodes that ``("next", "late_start")`` marks are left out: they
    were shortened, see ``edenrl.envs.RandomStart``. With ``box``, ``action_saturation`` is the share of action
    components at or beyond a bound.

    Args:
        rollout: data of any batch shape with ``("next", "done")`` and, from ``edenrl.envs.wrap_env``,
            ``("next", "episode_reward")`` and ``("next", "step_count")``.
        box: bounds of the action as ``edenrl.envs.action_box`` returns them.

    Examples:
        >>> from tensordict import TensorDict
        >>> done = torch.tensor([[False], [True]])
        >>> rollout = TensorDict(next=dict(done=done, step_count=torch.tensor([[4], [7]])), batch_size=[2])
        >>> float(rollout_metrics(rollout)["episode/length"])
        7.0
    """
    ended = rollout["next"]
    done = whole_episode_ends(rollout).flatten()
    sources = {"return": ended.get("episode_reward", None), "length": ended.get("step_count", None)}
    if "metrics" in ended.keys():
        sources |= dict(ended["metrics"].items())
    out = {"episode/count": done.sum().float()}
    for name, value in sources.items():
        if value is not None and value.numel() == done.numel():
            shown = "success_rate" if name == "success" else name
            # A running episode may hold anything, NaN too; one that ended with NaN must show it.
            total = value.flatten().double().where(done, 0.0).sum()
            out[f"episode/{shown}"] = total / done.sum()
    if box is not None:
        out["action_saturation"] = action_saturation(rollout["action"], box)
    return out


def _joined(rollouts: Sequence[TensorDictBase]) -> TensorDictBase:
    """Rollouts joined along time; a metric that the first ones lack, because it came later, is NaN there."""
    if len(rollouts) == 1:
        return rollouts[0]
    published = [rollout.get(("next", "metrics"), None) for rollout in rollouts]
    leaves = {name: leaf for metrics in published if metrics is not None for name, leaf in metrics.items()}
    filled = []
    for rollout in rollouts:
        rollout = rollout.copy()
        for name, leaf in leaves.items():
            if rollout.get(("next", "metrics", name), None) is None:
                shape = (*rollout.batch_size, *leaf.shape[rollout.ndim :])
                rollout["next", "metrics", name] = leaf.new_full(shape, math.nan)
        filled.append(rollout)
    return torch.cat(filled, 1)


# Columns that are a run's alone. A script that counts updates gives the frames itself.
_OWN = {"iteration", "seconds"}


def _refuse_bad_metrics(metrics: Mapping[str, Any]) -> None:
    """Refuses what cannot stand in a row, by its name."""
    for name, value in metrics.items():
        if name in _OWN:
            raise ValueError(f"{name!r} is a column of the run itself; give the metric another name.")
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"The metric {name!r} has the shape {tuple(value.shape)}; expected a scalar. Give its mean."
            )


class IterationMetrics:
    """Collects the metrics of one iteration on their device, and moves them to the host in one transfer.

    Attributes:
        box: bounds of the action, for ``rollout_metrics``.
        steps: the gradient steps whose dropped updates are counted under ``skipped_updates``.

    Examples:
        >>> metrics = IterationMetrics()
        >>> metrics.record({"loss": torch.tensor(1.0)})
        >>> metrics.record({"loss": torch.tensor(2.0)})
        >>> metrics.log({"difficulty": 10})
        >>> metrics.row()
        {'loss': 1.5, 'difficulty': 10.0}
    """

    def __init__(self) -> None:
        self.box: tuple[Tensor, Tensor] | None = None
        self.steps: list[GradientStep] = []
        self.clear()

    def clear(self) -> None:
        """Forgets the metrics, for the next iteration."""
        self._rollouts: list[TensorDictBase] = []
        self._records: list[dict[str, Tensor]] = []
        self._logged: dict[str, Tensor | float] = {}

    def watch(self, rollout: TensorDictBase) -> None:
        """Adds a rollout ``[N, T]``, or a flat one; several of an iteration are joined along time."""
        self._rollouts.append(rollout.select(*_WATCHED, strict=False))

    def record(self, *metrics: Mapping[str, Tensor] | TensorDictBase) -> None:
        """Adds the metrics of one update; the row gets their mean."""
        given = {str(name): value for group in metrics for name, value in group.items()}
        _refuse_bad_metrics(given)
        self._records.append({name: torch.as_tensor(value).detach().reshape(()) for name, value in given.items()})

    def log(self, *metrics: Mapping[str, Tensor | float]) -> None:
        """Adds scalars that the row gets as they are."""
        for group in metrics:
            _refuse_bad_metrics(group)
            self._logged.update({str(name): value for name, value in group.items()})

    def mean(self, name: str) -> float:
        """Mean of a recorded metric so far; NaN without any."""
        found = average([{name: row[name]} for row in self._records if name in row])
        return float(found.get(name, math.nan))

    def row(self) -> dict[str, float]:
        """All metrics as numbers."""
        metrics: dict[str, Tensor | float] = {**average(self._records)}
        if self._rollouts:
            metrics |= rollout_metrics(_joined(self._rollouts), self.box)
        if self.steps:
            metrics["skipped_updates"] = float(sum(step.skipped for step in self.steps))
        metrics |= self._logged
        tensors = {name: value for name, value in metrics.items() if isinstance(value, Tensor)}
        if tensors:
            device = next(iter(tensors.values())).device
            stacked = [value.detach().reshape(()).to(device, torch.float64) for value in tensors.values()]
            metrics.update(zip(tensors, torch.stack(stacked).tolist(), strict=True))
        return {name: float(value) for name, value in metrics.items()}
