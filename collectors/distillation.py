"""Rollouts in which a depth student acts and its teacher says what it would have done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from edenrl.collectors.resume import env_state_dict, load_env_state_dict, load_step
from edenrl.modules import DepthPolicy, refuse_nonfinite, require_depth_interval

__all__ = ["DepthDistillationCollector"]

# What is kept of the next step: no observations, because images are large.
_KEPT = ("reward", "done", "terminated", "truncated", "episode_reward", "step_count", "metrics", "late_start")


class DepthDistillationCollector:
    """Collects rollouts ``[N, steps]`` whose student actions and yaw angles carry the graph of the whole rollout.

    At every step the teacher gives its action as the label and the student acts, both without noise. The student's
    encoder runs for all rows together at the steps with a new image: the first of a rollout and every
    ``update_interval``-th after it. In between its latent and yaw are held.

    The student acts on its own yaw angles where the gate is open (above 0.5), and on the true ones elsewhere. Only this
    collector reads the gate: evaluations and deployed policies always act on their own.

    Gradient flows back in time through the GRU to the first step of the rollout and no further, because the next
    rollout starts from the detached state. It does not cross the end of an episode either. A row that is reset starts
    with state, latent and yaw of zero and sees its first image when the next one is due.

    Each rollout holds ``[N, steps, ...]``

    - ``teacher_action``, ``student_action`` (with graph), and ``action``, the one of them that drove the robot;
    - ``yaw``, the true angles to the way-points in rad, and ``yaw_prediction`` (with graph);
    - ``delta_yaw_ok`` ``[N, steps, 1]``, boolean: the gate was open;
    - ``depth_new`` ``[N, steps, 1]``, boolean: the encoder ran and ``yaw_prediction`` is new;
    - reward, flags, episode return and length, and ``metrics`` under ``"next"``. Images are not kept.

    Compute the loss and run ``backward`` inside the loop: asking for the next rollout detaches this one in place.

    The teacher is frozen and put into ``eval`` mode. ``state_dict`` holds the simulation, so that a run resumes bit for
    bit; teacher and student are saved under their own names.

    Args:
        env: environment that declares ``depth_interval`` and publishes what both read.
        teacher: a TensorDict policy that writes ``action``, for example
            ``rma_policy(actor, latent="history")`` on the true scan and ``priv_explicit``.
        student: the student, which shares no parameter with the teacher.
        steps: steps per rollout, a multiple of ``update_interval``.
        update_interval: control steps between images, as the environment declares it; default the student's.
        num_pretrain_iters: how many rollouts the teacher drives before the student does. Default 0.
        gate: key of the gate, one number for each row. Default "delta_yaw_ok".

    Attributes:
        iterations: rollouts collected so far, over all resumptions.

    Raises:
        ValueError: for ``steps`` or an interval that does not fit, an environment that lacks an entry, a student that
            shares parameters with the teacher, or a teacher with other actions than the environment's; while it
            collects, for an observation that is not finite, naming group, row and step.

    Source: Cheng et al. 2023, "Extreme Parkour with Legged Robots", arXiv:2309.14341.

    Examples:
        >>> from edenrl.envs import QuadrupedTerrain, wrap_env
        >>> from edenrl.modules import DepthEncoder, DepthStudent, RMAActor, rma_policy
        >>> groups = ["prop", "scan", "priv_explicit", "priv_latent", "prop_history", "depth"]
        >>> env = wrap_env(QuadrupedTerrain(2, groups=groups, seed=0, num_threads=1))
        >>> actor = RMAActor(dict(prop=53, scan=132, priv_explicit=9, priv_latent=29, history=530), num_actions=12)
        >>> student = DepthPolicy(DepthStudent(actor, DepthEncoder(53, hidden=16)))
        >>> collector = DepthDistillationCollector(env, rma_policy(actor, latent="history"), student, steps=5)
        >>> rollout = next(iter(collector))
        >>> rollout["student_action"].shape, rollout["student_action"].requires_grad
        (torch.Size([2, 5, 12]), True)
    """

    def __init__(
        self,
        env: EnvBase,
        teacher: TensorDictModuleBase,
        student: DepthPolicy,
        steps: int,
        *,
        update_interval: int | None = None,
        num_pretrain_iters: int = 0,
        gate: NestedKey = "delta_yaw_ok",
    ) -> None:
        interval = student.update_interval if update_interval is None else update_interval
        require_depth_interval(env, interval)
        _check_steps(steps, interval, num_pretrain_iters)
        if {id(p) for p in teacher.parameters()} & {id(p) for p in student.parameters()}:
            raise ValueError(
                "Teacher and student share parameters: training the student would change the labels. DepthStudent "
                "copies the actor it is given; give the teacher's policy the original."
            )
        self.env, self.teacher, self.student = env, teacher, student
        self.steps, self.update_interval, self.num_pretrain_iters = steps, interval, num_pretrain_iters
        self.iterations = 0
        teacher.eval().requires_grad_(False)
        self.gate = gate
        # What is read at every step, and what is read at the steps with a new image.
        self._read = list(dict.fromkeys([student.groups["prop"], student.groups["history"], gate, *teacher.in_keys]))
        self._seen = [*self._read, student.groups["depth"]]
        _check_published(env, self._seen)
        _check_gate(env, gate)
        self._root = env.reset()
        self._hidden = student.module.encoder.start(env.batch_size.numel())
        label, wanted = self._label().shape, env.action_spec.shape
        if label != wanted:
            raise ValueError(
                f"The teacher gives actions of shape {tuple(label)}, the environment takes {tuple(wanted)}. Use the "
                "environment it was trained in."
            )

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Rollouts without end."""
        while True:
            data = self._collect()
            yield data
            # Backward has run. Neither the data nor this generator may keep the autograd graph alive.
            data.update(data.detach())

    @torch.no_grad()
    def _label(self) -> torch.Tensor:
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            action: torch.Tensor = self.teacher(self._root.select(*self.teacher.in_keys))["action"]
        return action

    def _collect(self) -> TensorDictBase:
        net, groups = self.student.module, self.student.groups
        slots = net.encoder.yaw_slots
        hidden = self._hidden
        _, latent, yaw = net.start(len(hidden))
        teacher_drives = self.iterations < self.num_pretrain_iters
        steps = []
        for t in range(self.steps):
            new = t % self.update_interval == 0
            # Here and not in the loss: the memory of the GRU and the simulation would carry it on.
            refuse_nonfinite(self._root, self._seen if new else self._read, what="observation", step=t)
            prop, history = self._root.get(groups["prop"]), self._root.get(groups["history"])
            gate = self._root.get(self.gate)
            if new:
                latent, yaw, hidden = net.encoder(self._root.get(groups["depth"]), prop, hidden)
            label, own = self._label(), net.act(prop, history, latent, yaw, gate)
            action = label if teacher_drives else own.detach()
            stepped, self._root = self.env.step_and_maybe_reset(self._root.set("action", action))
            entries = {
                "teacher_action": label,
                "student_action": own,
                "action": action,
                "yaw": prop[..., slots[0] : slots[1]],
                "yaw_prediction": yaw,
                "delta_yaw_ok": gate > 0.5,
                "depth_new": torch.full_like(stepped["next", "done"], new),
                "next": stepped["next"].select(*_KEPT, strict=False),
            }
            steps.append(TensorDict(entries, batch_size=self.env.batch_size, device=self.env.device))
            # A new episode remembers nothing, and no gradient enters the finished one.
            ended = stepped["next", "done"]
            hidden, latent, yaw = (torch.where(ended, 0.0, part) for part in (hidden, latent, yaw))
        # From here on only the data keeps the autograd graph alive.
        self._hidden = hidden.detach()
        self.iterations += 1
        data = TensorDict.stack(steps, self.env.batch_dims)
        data.names = [*[None] * self.env.batch_dims, "time"]
        return data

    def state_dict(self) -> dict[str, Any]:
        """Counter, state of the GRU, transforms, simulation state and the carried step."""
        return {
            "iterations": self.iterations,
            "hidden": self._hidden.clone(),
            **env_state_dict(self.env),
            "root": self._root.clone().to_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores ``state_dict``; the next rollout continues where the saved collector stopped.

        An environment whose own ``state_dict`` holds no ``"_extra_state"``, or one that is not exact, starts new
        episodes, with a warning; the student's memory of the old ones is not restored.
        """
        self.iterations = state["iterations"]
        if load_env_state_dict(self.env, state):
            self._hidden = state["hidden"].to(self._hidden.device)
            self._root = load_step(state["root"], self._root)


def _check_steps(steps: int, interval: int, num_pretrain_iters: int) -> None:
    if steps < 1 or steps % interval:
        raise ValueError(
            f"steps={steps} was given; expected a positive multiple of update_interval={interval}, such as "
            f"{max(round(steps / interval), 1) * interval}: a rollout begins with a new image."
        )
    if num_pretrain_iters < 0:
        raise ValueError(f"num_pretrain_iters={num_pretrain_iters} was given; expected at least 0.")


def _check_gate(env: EnvBase, gate: NestedKey) -> None:
    shape = tuple(env.observation_spec[gate].shape)
    if shape != (*env.batch_size, 1):
        raise ValueError(f"The gate {gate!r} has the shape {shape}; expected one number for each row.")


def _check_published(env: EnvBase, keys: list[NestedKey]) -> None:
    published = env.observation_spec.keys(True, True)
    if missing := [key for key in keys if key not in published]:
        raise ValueError(
            f"The environment does not publish {missing}, which teacher or student reads; it publishes "
            f"{sorted(map(str, published))}. Add the groups to --env.kwargs.groups."
        )
