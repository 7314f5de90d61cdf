"""Rollouts that keep the autograd path through policy and environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from edenrl.collectors.resume import env_state_dict, load_env_state_dict, load_step, simulator_of
from edenrl.collectors.storage_space import require_rollout_space
from edenrl.envs import DifferentiableEnv, RolloutPlan, ScheduledEnv
from edenrl.envs.recorded_metrics import add_metrics, recorded_metrics

__all__ = ["AdjointClip", "DifferentiableCollector"]


class AdjointClip:
    """A tensor hook that bounds the gradient of each environment, row by row, and counts what it did.

    A row whose L2 norm is above ``max_norm`` is scaled down to it. A row with an infinite or NaN entry becomes zero.
    Norms are computed in units of the row's largest entry, so that rows whose squares overflow are clipped correctly.

    Args:
        max_norm: largest norm of a row; 0 passes every gradient on as it is, uncounted.
        batch_dims: leading dimensions that number the rows; the norm is over the others. Default 1.

    Raises:
        ValueError: a negative or non-finite ``max_norm``.

    Source: the adjoint clipping of the EmbodiChain differentiable trainer.

    Examples:
        >>> clip = AdjointClip(1.0)
        >>> clip(torch.tensor([[3.0, 4.0], [0.1, 0.2], [float("inf"), 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.1000, 0.2000],
                [0.0000, 0.0000]])
        >>> {name: value.item() for name, value in clip.metrics().items() if name.endswith("rows")}
        {'adjoint_rows': 3.0, 'adjoint_clipped_rows': 1.0, 'adjoint_nonfinite_rows': 1.0}
    """

    def __init__(self, max_norm: float, batch_dims: int = 1) -> None:
        if not 0 <= max_norm < float("inf"):
            raise ValueError(f"AdjointClip was given max_norm={max_norm}; expected a number >= 0 (0 turns it off).")
        self.max_norm, self.batch_dims = max_norm, batch_dims
        self._counts: Tensor | None = None

    def __call__(self, gradient: Tensor) -> Tensor:
        """Returns the bounded gradient, same shape."""
        if self.max_norm == 0:
            return gradient
        rows = gradient.flatten(self.batch_dims) if gradient.dim() > self.batch_dims else gradient.unsqueeze(-1)
        finite = rows.isfinite().all(-1, keepdim=True)
        rows = rows.where(finite, 0.0)
        largest = rows.abs().amax(-1, keepdim=True)
        unit = rows / largest.where(largest > 0, 1.0)
        # From 1 up to the root of the row's length; 0 for a row of zeros.
        unit_norm = torch.linalg.vector_norm(unit, dim=-1, keepdim=True)
        norm = largest * unit_norm
        bounded = torch.where(norm > self.max_norm, unit * (self.max_norm / unit_norm), rows)
        measured = finite & norm.isfinite()
        norm = norm.where(measured, 0.0)
        self._count(measured, norm)
        return bounded.reshape(gradient.shape)

    def _count(self, measured: Tensor, norm: Tensor) -> None:
        """Counts rows, rows with a finite norm and clipped rows, sums the norms, and tracks the largest norm."""
        sums = [torch.ones_like(norm), measured, norm > self.max_norm, norm]
        counts = torch.stack([*(value.sum(dtype=norm.dtype) for value in sums), norm.max()]).detach()
        if self._counts is not None:
            counts = torch.cat([self._counts[:4] + counts[:4], torch.maximum(self._counts[4:], counts[4:])])
        self._counts = counts

    def metrics(self) -> dict[str, Tensor]:
        """Counts and norms before clipping since the last call, as scalars; empty when nothing was counted.

        ``adjoint_norm_mean`` and ``adjoint_norm_max`` are over the rows with a finite norm.
        """
        if self._counts is None:
            return {}
        rows, measured, clipped, total, largest = self._counts
        self._counts = None
        return {
            "adjoint_rows": rows,
            "adjoint_clipped_rows": clipped,
            "adjoint_nonfinite_rows": rows - measured,
            "adjoint_norm_mean": total / measured.clamp(min=1),
            "adjoint_norm_max": largest,
        }


class DifferentiableCollector:
    """Collects rollouts whose rewards, actions and observations still carry the graph; it resumes bit for bit.

    TorchRL's collectors cut the graph by design. This one yields ``[*env.batch_size, T]`` TensorDicts as they do, and

    - continues episodes from one segment to the next, starting each from a detached state; with
      ``reset_at_each_iter=True`` every rollout starts from a reset of all rows instead;
    - resets finished rows by TorchRL's partial reset, so that no gradient enters a finished episode;
    - writes ``elapsed`` ``[*env.batch_size, T, 1]``, the steps since the row's episode or the current update began,
      whichever was later. It is the exponent of the discount and goes on from segment to segment of one update;
    - detaches the segment in place, and the simulator, when the loop asks for the next segment or ends. Run
      ``backward`` inside the loop body. You may keep segments; afterwards they are plain data without a graph;
    - asks an environment with ``prepare_rollout`` (see ``ScheduledEnv``) how long each rollout is, and writes
      ``objective_scale`` ``[*env.batch_size, T, 1]``.

    Actions are clipped differentiably by the environment's own clamp or by ``edenrl.envs.ClipAction``.

    Args:
        env: differentiable environment; the innermost one has ``detach_state``.
        policy: TensorDict policy. Stochastic ones must sample by reparameterization.
        steps: steps per segment, or per rollout when the environment does not schedule them.
        reset_at_each_iter: every rollout starts from a reset. Default False.
        action_adjoint_max_norm: bound on the gradient of every action, per environment and step; see ``AdjointClip``.
            Default 0, off.
        exploration_type: RANDOM samples actions (default), DETERMINISTIC takes the policy's mean or mode.
        action_key: the action the policy writes. Default "action".

    Raises:
        ValueError: an environment without ``detach_state``, ``steps`` below 1, a scheduled environment without
            ``reset_at_each_iter``, or a rollout that does not fit the free memory.
        RuntimeError: when collecting without autograd, or from a policy or an environment that cuts the graph.

    Source: the differentiable trainer of EmbodiChain, which has adjoint clipping and segments.

    Examples:
        >>> from edenrl.envs import PointMass
        >>> from edenrl.modules import gaussian_actor
        >>> actor = gaussian_actor({"observation": 14}, 2, hidden=(8,))
        >>> collector = DifferentiableCollector(PointMass(3, seed=0), actor, steps=4)
        >>> for segment in collector.update(segments=2):
        ...     (-segment["next", "reward"].sum()).backward()
        >>> segment.batch_size, segment["elapsed"][0, :, 0].tolist(), segment["next", "reward"].requires_grad
        (torch.Size([3, 4]), [4, 5, 6, 7], False)
    """

    def __init__(
        self,
        env: EnvBase,
        policy: TensorDictModuleBase,
        steps: int,
        *,
        reset_at_each_iter: bool = False,
        action_adjoint_max_norm: float = 0.0,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        action_key: NestedKey = "action",
    ) -> None:
        simulator = simulator_of(env)
        name = type(simulator).__name__
        if not isinstance(simulator, DifferentiableEnv):
            raise ValueError(
                f"{name} has no detach_state() and cannot be differentiated through in segments. Use a differentiable "
                "environment such as PointMass, or train it with PPO."
            )
        if steps < 1:
            raise ValueError(f"DifferentiableCollector was given steps={steps}; expected at least 1.")
        self._scheduler = simulator if isinstance(simulator, ScheduledEnv) else None
        if self._scheduler is not None and not reset_at_each_iter:
            raise ValueError(
                f"{name} schedules complete rollouts (it has prepare_rollout). Pass reset_at_each_iter=True and use "
                "mode='complete'."
            )
        require_rollout_space(env, env.batch_size.numel() * steps)
        self.env, self.policy, self.steps = env, policy, steps
        self.reset_at_each_iter, self.action_key = reset_at_each_iter, action_key
        self.exploration_type = exploration_type
        self.adjoint_clip = AdjointClip(action_adjoint_max_norm, env.batch_dims)
        self.frames = 0
        self.rollouts = 0
        self.plan = RolloutPlan(steps)
        self._simulator: Any = simulator
        self._root = env.reset()
        self._elapsed = torch.zeros(*env.batch_size, 1, dtype=torch.int64, device=env.device)

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Updates of one segment each, without end."""
        while True:
            yield from self.update()

    def update(self, segments: int = 1) -> Iterator[TensorDictBase]:
        """Yields the segments, or complete rollouts, of one update; the discount starts at 1.

        Args:
            segments: how many.
        """
        self._elapsed = torch.zeros_like(self._elapsed)
        for _ in range(segments):
            data = self._collect()
            yield data
            # Backward has run. Neither the data nor the simulator may keep the autograd graph alive.
            data.update(data.detach())
            self._simulator.detach_state()

    def _collect(self) -> TensorDictBase:
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "DifferentiableCollector was asked for data under torch.no_grad or inference mode, where the graph is "
                "missing. Collect outside of it."
            )
        self._begin()
        steps: list[TensorDictBase] = []
        with set_exploration_type(self.exploration_type), recorded_metrics(self.env) as metrics:
            for _ in range(self.plan.num_steps):
                stepped, self._root = self.env.step_and_maybe_reset(self._act(self._root))
                steps.append(stepped.set("elapsed", self._elapsed))
                self._elapsed = (self._elapsed + 1) * ~stepped["next", "done"]
        # The graph stays alive only in the data, and in the simulator until update() detaches it after backward.
        self._root = self._root.detach()
        self.rollouts += 1
        self.frames += self.plan.num_steps * self.env.batch_size.numel()
        data = add_metrics(TensorDict.stack(steps, self.env.batch_dims), metrics)
        data.names = [*[None] * self.env.batch_dims, "time"]
        self._require_graph(data)
        if self._scheduler is not None:
            scale = torch.as_tensor(self.plan.objective_scale, device=self.env.device).to(data["next", "reward"])
            rows = scale.expand(self.env.batch_size)[..., None, None]
            data.set("objective_scale", rows.expand(*data.batch_size, 1).clone())
        return data

    def _act(self, root: TensorDictBase) -> TensorDictBase:
        """Lets the policy act; the gradient of its action is bounded on the way back."""
        acted = self.policy(root)
        action = acted.get(self.action_key)
        if not action.requires_grad:
            raise RuntimeError(
                f"The policy's {self.action_key!r} carries no gradient. Either it samples without "
                "reparameterization (use a distribution with rsample, such as gaussian_actor's, or "
                "exploration_type=DETERMINISTIC), or its parameters are frozen."
            )
        if self.adjoint_clip.max_norm > 0:
            action.register_hook(self.adjoint_clip)
        return acted

    def _begin(self) -> None:
        """Starts the rollout from a detached state, or from a reset."""
        if self._scheduler is not None:
            self.plan = self._scheduler.prepare_rollout(self.rollouts)
        if self.reset_at_each_iter:
            self._root = self.env.reset()
            self._elapsed = torch.zeros_like(self._elapsed)
        self._simulator.detach_state()
        self._root = self._root.detach()

    def _require_graph(self, data: TensorDictBase) -> None:
        name = type(self._simulator).__name__
        if not data["next", "reward"].requires_grad:
            raise RuntimeError(
                f"The rewards of {name} carry no gradient: its step runs under no_grad or detaches what it computes. "
                "Analytic policy gradients need the path from action to reward."
            )
        read = [value for key in self.policy.in_keys if (value := data.get(("next", key), None)) is not None]
        if read and not any(value.requires_grad for value in read):
            raise RuntimeError(
                f"The next observations {self.policy.in_keys} of {name} carry no gradient, so that no reward would "
                "reach an earlier action. Keep the path from action to observation in its step."
            )

    def metrics(self) -> dict[str, Tensor]:
        """Adjoint statistics since the last call, see ``AdjointClip.metrics``, and the labels of the last plan."""
        labels = {f"plan/{name}": torch.as_tensor(float(value)) for name, value in self.plan.metadata.items()}
        return self.adjoint_clip.metrics() | labels

    def state_dict(self) -> dict[str, Any]:
        """Counters, transforms, simulation state and the carried step; the policy is saved under its own name."""
        return {
            "frames": self.frames,
            "rollouts": self.rollouts,
            **env_state_dict(self.env),
            "elapsed": self._elapsed.clone(),
            "root": self._root.detach().clone().to_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores ``state_dict``; the next segment continues where the saved collector stopped.

        An environment whose own ``state_dict`` holds no ``"_extra_state"``, or one that is not exact, starts new
        episodes, with a warning.
        """
        self.frames, self.rollouts = state["frames"], state["rollouts"]
        if load_env_state_dict(self.env, state, warn=not self.reset_at_each_iter):
            self._elapsed = state["elapsed"].to(self._elapsed.device)
            self._root = load_step(state["root"], self._root)
