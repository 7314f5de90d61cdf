"""A constraint on the task return, and the weight between task and style that keeps it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from edenrl.modules.moments import several_processes

__all__ = ["TaskConstraint"]


class TaskConstraint(nn.Module):
    """Dual controller of "maximize style subject to a task return of at least ``alpha`` times the best one".

    ``weight`` is the share of the task in the advantage, ``w = sigmoid(lambda)``. ``update``, once after each policy
    update, computes

    ```
    J_hat  = mean task return of the last vg_window finished episodes
    J_star = largest J_hat of the last vg_star_window updates, this one included
    ratio  = 1 - (J_star - J_hat) / (|J_star| + 1e-8)
    lambda <- lambda + lambda_lr (alpha - ratio)
    ```

    so that the next policy update uses the new weight. For positive returns the ratio is ``J_hat / J_star``. It is
    smaller for worse returns also when these are negative: -20 with -10 as the best gives 0.

    During the first ``warmup_iters`` updates the weight is 1 and lambda does not change, but J_hat already counts for
    J_star. Nothing changes before the first episode has ended. Returns that are NaN or infinite are left out of the
    mean. A window without any finite return is skipped, and counted in ``skipped``.

    J_star covers its window only. A policy that gives up its task slowly enough therefore lowers the return that it is
    compared with, and with the default window lambda settles only where giving up more no longer helps the style. A
    window as long as the run compares with the best return ever.

    Everything that changes is in buffers: a checkpoint continues in the middle of a window. Processes that train
    together (``edenrl.distributed``) see the episodes of all, so every one of them must call ``update``.

    Args:
        alpha: share of the best task return that is to be kept, in (0, 1]. Default 0.9.
        lambda_lr: step size of lambda. Default 0.05.
        lambda_init: lambda after warm-up. Default 0, a weight of one half.
        warmup_iters: updates on the task alone. Default 0.
        vg_window: finished episodes in J_hat. Default 100.
        vg_star_window: updates in J_star. Default 20.

    Raises:
        ValueError: for a number out of range, or entries that are not ``[N, T, 1]``.

    Source: ConTrack, "Constrained Hand Motion Tracking with Adaptive Trade-off Control", 2026. Its release divides
    J_hat by J_star, which counts a return of -20 with -10 as the best as twice as good as it.

    Examples:
        >>> import torch
        >>> from edenrl.modules import TaskConstraint
        >>> constraint = TaskConstraint(alpha=0.9, vg_window=1)
        >>> done = torch.ones(1, 1, 1, dtype=torch.bool)
        >>> constraint.update(torch.full((1, 1, 1), 10.0), done)
        >>> constraint.update(torch.full((1, 1, 1), 5.0), done)
        >>> round(float(constraint.ratio), 4), round(float(constraint.weight), 4)
        (0.5, 0.5037)
    """

    multiplier: Tensor
    updates: Tensor
    skipped: Tensor
    episodes: Tensor
    measured: Tensor
    returns: Tensor
    finite: Tensor
    history: Tensor

    def __init__(
        self,
        alpha: float = 0.9,
        *,
        lambda_lr: float = 0.05,
        lambda_init: float = 0.0,
        warmup_iters: int = 0,
        vg_window: int = 100,
        vg_star_window: int = 20,
    ) -> None:
        super().__init__()
        if not 0.0 < alpha <= 1.0:
            raise ValueError(f"TaskConstraint needs alpha in (0, 1], a share of the best task return; got {alpha}.")
        if not 0.0 < lambda_lr < float("inf") or lambda_init - lambda_init != 0.0:
            raise ValueError(
                f"TaskConstraint needs lambda_lr > 0 and a finite lambda_init, got {lambda_lr} and {lambda_init}."
            )
        for name, value, least in (
            ("warmup_iters", warmup_iters, 0),
            ("vg_window", vg_window, 1),
            ("vg_star_window", vg_star_window, 1),
        ):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"TaskConstraint needs {name} as a whole number of at least {least}, got {value!r}.")
        self.alpha, self.lambda_lr, self.warmup_iters = alpha, lambda_lr, warmup_iters
        self.register_buffer("multiplier", torch.tensor(float(lambda_init)))
        for name in ("updates", "skipped", "episodes", "measured"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))
        # Newest last. Unused places hold zero and not NaN, so that a checkpoint holds finite numbers only.
        self.register_buffer("returns", torch.zeros(vg_window))
        self.register_buffer("finite", torch.zeros(vg_window, dtype=torch.bool))
        self.register_buffer("history", torch.zeros(vg_star_window))

    @property
    def weight(self) -> Tensor:
        """Share of the task in the advantage of the next policy update, a scalar in [0, 1]."""
        return torch.where(self.updates < self.warmup_iters, 1.0, self.multiplier.sigmoid())

    @property
    def task_return(self) -> Tensor:
        """J_hat of the last update that had one; NaN before."""
        return self.history[-1].where(self.measured > 0, torch.nan)

    @property
    def task_return_best(self) -> Tensor:
        """J_star of the last update that had one; NaN before."""
        size = len(self.history)
        known = torch.arange(size, device=self.history.device) >= size - self.measured
        return self.history.where(known, -torch.inf).max().where(self.measured > 0, torch.nan)

    @property
    def ratio(self) -> Tensor:
        """The task return relative to the best one: 1 when it is the best, otherwise smaller; NaN at first."""
        best = self.task_return_best
        return 1.0 - (best - self.task_return) / (best.abs() + 1e-8)

    def metrics(self) -> dict[str, Tensor]:
        """``task_weight``, ``lambda``, ``task_return`` (J_hat), ``task_return_best`` (J_star) and ``task_ratio``."""
        return {
            "task_weight": self.weight,
            "lambda": self.multiplier.clone(),
            "task_return": self.task_return,
            "task_return_best": self.task_return_best,
            "task_ratio": self.ratio,
        }

    @torch.no_grad()
    def update(self, task_return: Tensor, done: Tensor) -> None:
        """Takes in the episodes that ended in a rollout, then changes lambda by one step.

        Args:
            task_return: undiscounted task reward since the episode's start, ``[N, T, 1]``; read where ``done`` is set.
                ``edenrl.envs.wrap_env`` publishes it as ``("next", "metrics", "task_return")``.
            done: whether the episode ended with the step, ``[N, T, 1]``; see ``edenrl.modules.whole_episode_ends``.
        """
        if task_return.ndim != 3 or task_return.shape[-1] != 1 or task_return.shape != done.shape:
            raise ValueError(
                "TaskConstraint.update needs task_return and done of a rollout, both [N, T, 1], got "
                f"{tuple(task_return.shape)} and {tuple(done.shape)}."
            )
        finished = self._finished(task_return, done).to(self.returns)
        warm = self.updates < self.warmup_iters
        self.updates += 1
        self.episodes += len(finished)
        known = finished.isfinite()
        for buffer, new in ((self.returns, finished.where(known, 0.0)), (self.finite, known)):
            buffer.copy_(torch.cat([buffer, new])[-len(buffer) :])
        # The only read of the device in an iteration.
        if not bool(self.finite.any()):
            self.skipped += self.episodes > 0
            return
        mean = self.returns.sum() / self.finite.sum()
        self.history.copy_(torch.cat([self.history[1:], mean[None]]))
        self.measured += 1
        self.multiplier += torch.where(warm, 0.0, self.lambda_lr * (self.alpha - self.ratio))

    @staticmethod
    def _finished(task_return: Tensor, done: Tensor) -> Tensor:
        """Returns of the episodes that ended, by step, then by process and environment."""
        steps, envs = done.squeeze(-1).T.nonzero(as_tuple=True)
        ended = task_return[envs, steps, 0]
        if not several_processes():
            return ended
        # Exchanged as objects, because their number differs between processes.
        everyone: list[tuple[Tensor, Tensor]] = [None] * dist.get_world_size()  # type: ignore[list-item]
        dist.all_gather_object(everyone, (steps.cpu(), ended.cpu()))
        order = torch.cat([own for own, _ in everyone]).argsort(stable=True)
        return torch.cat([own for _, own in everyone])[order]

    def extra_repr(self) -> str:
        """Options for ``repr``."""
        return (
            f"alpha={self.alpha}, lambda_lr={self.lambda_lr}, warmup_iters={self.warmup_iters}, "
            f"vg_window={len(self.returns)}, vg_star_window={len(self.history)}"
        )
