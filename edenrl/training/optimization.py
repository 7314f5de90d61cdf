"""The gradient step that an algorithm's configuration describes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from edenrl.optim import GradientStep, make_lr_schedule, make_optimizer

__all__ = ["Trained", "build_gradient_step", "build_optimizers", "follow_rate"]

Trained = torch.optim.Optimizer | Iterable[nn.Parameter]


def build_optimizers(
    algo: Any, loss: nn.Module, given: Mapping[str, Trained] | None, lr: Mapping[str, float]
) -> dict[str, torch.optim.Optimizer]:
    """The optimizers of a step; parameters get the optimizer and the learning rate of ``algo``.

    Args:
        algo: the algorithm's configuration.
        loss: the LossModule.
        given: optimizers, or parameters to build one for, by name. Default: one, "optimizer", over everything in
            ``loss.parameter_groups()``.
        lr: learning rates, by name, that differ from ``algo.lr``.
    """
    options = {"lr": algo.lr, **algo.optimizer_options()}
    if given is None and algo.optimizer == "muon":
        # Muon needs the modules, to tell hidden weights from others.
        return {"optimizer": make_optimizer("muon", loss, **options)}
    if given is None:
        groups: Mapping[str, list[nn.Parameter]] = loss.parameter_groups()  # type: ignore[operator]
        given = {"optimizer": [parameter for group in groups.values() for parameter in group]}
    optimizers = {}
    for name, trained in given.items():
        if not isinstance(trained, torch.optim.Optimizer):
            trained = make_optimizer(algo.optimizer, trained, **{**options, "lr": lr.get(name, algo.lr)})
        optimizers[name] = trained
    return optimizers


def build_gradient_step(
    algo: Any,
    loss: nn.Module,
    trained: Mapping[str, Trained] | None = None,
    *,
    iterations: int,
    lr: Mapping[str, float] = MappingProxyType({}),
    schedule: bool = True,
    updates: int | None = None,
    every: int = 1,
    **options: Any,
) -> tuple[GradientStep, Callable[[int], None]]:
    """A ``GradientStep`` as ``algo`` describes it; see ``Run.gradient_step`` for the arguments.

    Returns:
        The step, and what restarts its learning rates for the iterations that are left.
    """
    optimizers = build_optimizers(algo, loss, trained, lr)
    first = next(iter(optimizers.values()))
    settings: dict[str, Any] = {"max_grad_norm": algo.max_grad_norm, "on_nonfinite": algo.on_nonfinite, **options}
    if schedule:
        total = iterations * algo.updates_per_iteration if updates is None else updates
        spanned = max(total // every, 1)
        settings["lr_schedule"] = make_lr_schedule(algo.lr_schedule, first, spanned, **algo.schedule_options())
    step = GradientStep(loss, optimizers, **settings)
    rates = [group["lr"] for group in _groups(step)]

    def restart(remaining: int) -> None:
        if schedule:
            left = remaining * algo.updates_per_iteration // every
            step.restart_schedule(algo.lr_schedule, algo.lr, left, **algo.schedule_options())
            return
        # The checkpoint has restored the rate that the earlier part of the run ended with.
        for group, rate in zip(_groups(step), rates, strict=True):
            group["lr"] = rate

    return step, restart


def follow_rate(follower: GradientStep, leader: GradientStep) -> None:
    """Gives all parameter groups of one step the learning rate of another, whose schedule may adapt it.

    Examples:
        >>> nets = nn.Linear(1, 1), nn.Linear(1, 1)
        >>> steps = [GradientStep(net, torch.optim.SGD(net.parameters(), lr=lr)) for net, lr in zip(nets, (0.1, 0.3))]
        >>> follow_rate(steps[0], steps[1])
        >>> steps[0].optimizers["optimizer"].param_groups[0]["lr"]
        0.3
    """
    rate = next(iter(leader.optimizers.values())).param_groups[0]["lr"]
    for group in _groups(follower):
        group["lr"] = rate


def _groups(step: GradientStep) -> list[dict[str, Any]]:
    """All parameter groups of a step's optimizers; a restored optimizer has new ones."""
    return [group for optimizer in step.optimizers.values() for group in optimizer.param_groups]
