"""The quadruped on flat ground, and what its version on terrain shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from edenrl.envs.quadruped.contract import SPEC_VALUES, quadruped_contract
from edenrl.envs.quadruped.groups import GROUPS, POLICY_WIDTH, group_mirrors
from edenrl.envs.quadruped.model import DEFAULT_POSE, JOINT_NAMES
from edenrl.envs.quadruped.observations import ACTION_LIMIT, DEPTH_INTERVAL, QuadrupedObservations
from edenrl.envs.quadruped.randomization import NOMINAL, RANDOMIZATION, draw_parameters, merge_ranges
from edenrl.envs.quadruped.rewards import reward_matrix, reward_terms
from edenrl.envs.quadruped.simulation import DT
from edenrl.envs.quadruped.terrain import DepthCamera
from edenrl.envs.seeds import chosen_seed

__all__ = ["Quadruped"]

ACTION_SCALE = 0.25
COMMAND_PERIOD = 250  # control steps between new commands
STILL = 0.1  # a smaller command becomes zero: stand
_SETTLING = 50  # control steps at the start of an episode that velocity errors leave out
# Largest mean velocity error (m/s) and yaw error (rad/s) of an episode that counts as a success.
_FOLLOWING = 0.2
_PUSH_PERIOD = 4.0  # s, on average

COMMANDS = {"vx": (0.0, 1.0), "vy": (-0.3, 0.3), "yaw": (-0.5, 0.5)}

_ZERO_AT_RESET = (
    "last_action",
    "contact",
    "force",
    "air_time",
    "steps",
    "terminated",
    "truncated",
    "reward_groups",
    "success",
    "fallen",
    "diverged",
    "velocity_error",
    "yaw_error",
    "distance",
)


class Quadruped(QuadrupedObservations):
    """A batch of 12-joint robot dogs that follow velocity commands, simulated by MuJoCo on all CPU cores.

    One control step is 0.02 s, four physics steps. Actions move the joint targets around the default pose, ``target =
    default + 0.25 a`` with ``a`` clamped to ``[-4, 4]``; servos with limited torque follow them. The trunk should move
    with the command ``(vx, vy, yaw rate)``, in m/s and rad/s in its own frame; commands are drawn anew every 5 s, and
    one in five is zero: stand still.

    An episode ends by falling (``terminated``: the trunk tilts over 60 degrees or comes closer than 0.16 m to the
    ground), by ``episode_seconds`` (``truncated``), or when the simulation diverges (``terminated``, with reward 0; what
    is published is the robot at rest where it started, never the diverged state).

    Groups, root keys for ``N`` environments; only those named in ``groups`` are computed and published:

    | group | shape | entries |
    |---|---|---|
    | ``policy`` | ``[N, 45]`` | command 3 (times 2, 2, 0.5), angular velocity 3 (0.25), gravity direction 3, joint angles from the default pose 12, joint velocities 12 (0.05), last action 12 |
    | ``critic`` | ``[N, 48]`` | policy, linear velocity 3 (2) |
    | ``history`` | ``[N, H*45]`` | the last H policy frames, oldest first, the current one last |
    | ``prop`` | ``[N, 53]`` | angular velocity 3 (0.25), roll, pitch, zero, yaw angle to this and to the next way-point, command 3 (2, 2, 0.5), on terrain, on flat ground, joint angles 12, velocities 12 (0.05), last action 12, foot contacts 4 (+-0.5) |
    | ``scan`` | ``[N, 132]`` | trunk height above 12 x 11 ground points around it, less 0.3 m, in [-1, 1] |
    | ``priv_explicit`` | ``[N, 9]`` | linear velocity 3 (2), height above ground, foot forces 4 (0.01 per N, at most 3), difficulty |
    | ``priv_latent`` | ``[N, 29]`` | trunk mass offset (kg), centre offset 3 (m), friction, 12 kp and 12 kd factors |
    | ``prop_history`` | ``[N, H*53]`` | the last H prop frames, oldest first |
    | ``amp`` | | ``amp_window`` ``[N, 60]``: joint angles of 5 frames, oldest first; ``amp_gate`` ``[N, 1]``: 1 while commanded to move |
    | ``reward_groups`` | | ``task``, ``style``, ``penalty``, each ``[N, 1]``: the reward is their sum, or 0 when that is negative |
    | ``depth`` | | ``depth`` ``[N, 58, 87]`` in [-0.5, 0.5]: depth / 2.5 m - 0.5, a new image every 5 steps; ``delta_yaw_ok`` ``[N, 1]``: 1 where the way-point is less than 0.6 rad off |
    | ``metrics`` | | ``success`` (reached the end with mean errors of at most 0.2 m/s and 0.2 rad/s), ``fallen``, ``diverged``, ``velocity_error`` (m/s) and ``yaw_error`` (rad/s, means since the first second), ``distance`` (m), ``difficulty``, each ``[N, 1]`` |

    ``mirrors`` maps each of these keys and ``action`` to its left-right mirror (``SignedPermutation``).

    ``randomize`` draws for every episode, uniformly: ``friction``; ``trunk_mass`` offset (kg) and ``trunk_centre``
    offset per axis (m); factors on the whole torque and its limit per joint (``motor_strength``) and on its two parts
    (``kp``, ``kd``); ``joint_offset`` of the targets (rad); and pushes, about every 4 s, that add a velocity of a
    magnitude in ``push`` (m/s) to the trunk in a random direction.

    The simulation runs on the CPU; ``device`` is where tensors go. ``state_dict()`` holds everything that a run needs
    to continue bit for bit.

    Args:
        num_envs: Number of robots ``N``, at least 1.
        device: Device of the tensors. Default: CPU.
        seed: Seed of the environment's own generator. Default: drawn from torch's global generator.
        groups: Groups to publish. Default ``("policy", "critic")``.
        commands: Ranges that replace those of ``vx`` (0 to 1 m/s), ``vy`` (+-0.3 m/s) or ``yaw`` (+-0.5 rad/s).
        zero_commands: Share of commands that are zero. Default 0.2.
        episode_seconds: Time limit. Default 10 s.
        randomize: True: the ranges of ``RANDOMIZATION`` (no pushes); False: none; a mapping replaces the ranges it
            names.
        rewards: Weights that replace those of ``REWARD_WEIGHTS``, by the name of the term.
        term_groups: Groups (``task``, ``style`` or ``penalty``) that replace those of ``REWARD_WEIGHTS``, by the name
            of the term, for instance ``{"torque": "style"}``. The reward is the same whatever they are.
        history_length: Frames of ``history``. Default 6.
        prop_history_length: Frames of ``prop_history``. Default 10.
        num_threads: Threads of the simulation. Default: one per CPU this process may use. The results do not depend
            on it.

    Raises:
        ImportError: MuJoCo is missing or older than 3.17.
        ValueError: an unknown group, command, range or reward, or an unknown group for a reward; a number out of range;
            an action that is not finite.

    Source: model and rewards are ours, after Rudin et al. 2021, arXiv:2109.11978; groups after Kumar et al. 2021 (RMA)
    and Cheng et al. 2023, "Extreme Parkour with Legged Robots".

    Examples:
        >>> from edenrl.envs import Quadruped
        >>> env = Quadruped(num_envs=4, seed=0, num_threads=1)
        >>> data = env.rollout(3)
        >>> data["policy"].shape, data["next", "critic"].shape
        (torch.Size([4, 3, 45]), torch.Size([4, 3, 48]))
        >>> env.mirrors["policy"](data["policy"]).shape
        torch.Size([4, 3, 45])
    """  # noqa: E501

    returns_fresh_tensors = True
    history_layout = "oldest_first"
    critic_layout = (("policy", POLICY_WIDTH), ("linear_velocity", 3))
    depth_interval = DEPTH_INTERVAL
    control_dt = DT
    amp_joint_names = JOINT_NAMES

    def __init__(
        self,
        num_envs: int,
        *,
        device: torch.device | str | None = None,
        seed: int | None = None,
        groups: Sequence[str] = ("policy", "critic"),
        commands: Mapping[str, Sequence[float]] | None = None,
        zero_commands: float = 0.2,
        episode_seconds: float = 10.0,
        randomize: bool | Mapping[str, Sequence[float]] = True,
        rewards: Mapping[str, float] | None = None,
        term_groups: Mapping[str, str] | None = None,
        history_length: int = 6,
        prop_history_length: int = 10,
        num_threads: int | None = None,
    ) -> None:
        counts = dict(num_envs=num_envs, history_length=history_length, prop_history_length=prop_history_length)
        for name, value in counts.items():
            if value < 1:
                raise ValueError(f"{name}={value} was given to {type(self).__name__}; expected at least 1.")
        unknown = [group for group in groups if group not in GROUPS]
        if unknown:
            raise ValueError(f"groups names {unknown}, which do not exist; choose from {list(GROUPS)}.")
        if not 0.0 <= zero_commands <= 1.0 or not episode_seconds >= DT:
            raise ValueError(
                f"zero_commands={zero_commands} and episode_seconds={episode_seconds} were given; expected a share in "
                f"[0, 1] and at least {DT} s."
            )
        super().__init__(num_envs, num_threads, device=torch.device("cpu" if device is None else device))
        self.groups = tuple(dict.fromkeys(groups))
        self.zero_commands = zero_commands
        self.max_steps = round(episode_seconds / DT)
        self.history_length, self.prop_history_length = history_length, prop_history_length
        self.mirrors = group_mirrors(self.groups, history_length, prop_history_length)
        self._command_range = merge_ranges("commands", self._default_commands(), commands)
        if isinstance(randomize, Mapping):
            self._random = merge_ranges("randomize", RANDOMIZATION, randomize)
        else:
            fixed = {name: (value, value) for name, value in NOMINAL.items()}
            self._random = dict(RANDOMIZATION) if randomize else fixed
        self._reward_weights = reward_matrix(rewards, term_groups)
        self._camera = DepthCamera(self._field) if "depth" in self.groups else None
        self._make_specs()
        seed = chosen_seed(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._rows = self._empty_rows()
        self._clock = 0
        self._restart(np.arange(num_envs))
        # Starting above consumed numbers: seeding afterwards makes `Quadruped(seed=s)` and `set_seed(s)` agree.
        self._set_seed(seed)

    def _default_commands(self) -> dict[str, tuple[float, float]]:
        return dict(COMMANDS)

    def _empty_rows(self) -> SimpleNamespace:
        """Everything the environment itself remembers about its rows; arrays ``[N, ...]``."""
        n = self.num_envs

        def zeros(*shape: int, dtype: Any = np.float64) -> np.ndarray:
            return np.zeros((n, *shape), dtype)

        rows = SimpleNamespace(
            command=zeros(3),
            last_action=zeros(12),
            last_joint_velocity=zeros(12),
            contact=zeros(4, dtype=np.bool_),
            force=zeros(4),
            air_time=zeros(4),
            steps=zeros(dtype=np.int64),
            terminated=zeros(dtype=np.bool_),
            truncated=zeros(dtype=np.bool_),
            reward_groups=zeros(3),
            origin=zeros(2),
            success=zeros(),
            fallen=zeros(),
            diverged=zeros(),
            velocity_error=zeros(),
            yaw_error=zeros(),
            distance=zeros(),
            friction=zeros(),
            trunk_mass=zeros(),
            trunk_centre=zeros(3),
            motor_strength=zeros(12),
            kp=zeros(12),
            kd=zeros(12),
            joint_offset=zeros(12),
        )
        vars(rows).update(self._empty_histories())
        return rows

    def _set_seed(self, seed: int | None) -> None:
        self._generator.manual_seed(chosen_seed(seed))

    def _uniform(self, bounds: tuple[float, float], *shape: int) -> np.ndarray:
        low, high = bounds
        unit: np.ndarray = torch.rand(shape, generator=self._generator, dtype=torch.float64).numpy()
        return low + (high - low) * unit

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDict:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None:
            self._clock = 0
            self._restart(np.arange(self.num_envs))
        else:
            self._restart(np.flatnonzero(mask.reshape(-1).cpu().numpy()))
        return self._pack(self._kinematics())

    def _restart(self, ids: np.ndarray) -> None:
        if not len(ids):
            return
        rows, n = self._rows, len(ids)
        self._place(ids)
        draw_parameters(rows, ids, self._random, self._uniform)
        self._write_parameters(ids)
        self._stand(ids, DEFAULT_POSE + self._uniform((-0.1, 0.1), n, 12), self._uniform(self._start_yaw(), n))
        self._qvel[ids, :6] = self._uniform((-0.2, 0.2), n, 6)
        for name in _ZERO_AT_RESET:
            getattr(rows, name)[ids] = 0
        rows.last_joint_velocity[ids] = 0.0
        self._draw_commands(ids)
        k = self._kinematics()
        self._after_motion(k)
        self._remember(k, ids)

    def _place(self, ids: np.ndarray) -> None:
        """Choose where rows start: ``origin``."""
        self._rows.origin[ids] = 0.0

    def _start_yaw(self) -> tuple[float, float]:
        return -np.pi, np.pi

    def _draw_commands(self, ids: np.ndarray) -> None:
        ranges = self._command_range
        draw = np.stack([self._uniform(ranges[name], len(ids)) for name in ("vx", "vy", "yaw")], -1)
        still = self._uniform((0.0, 1.0), len(ids)) < self.zero_commands
        still |= np.linalg.norm(draw, axis=-1) < STILL
        self._rows.command[ids] = np.where(still[:, None], 0.0, draw)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        rows = self._rows
        action = tensordict.get("action").detach().cpu().numpy().astype(np.float64)
        if not np.isfinite(action).all():
            row = int(np.flatnonzero(~np.isfinite(action).all(-1))[0])
            raise ValueError(f"The action of env {row} is {action[row].tolist()}; expected finite numbers.")
        action = action.clip(-ACTION_LIMIT, ACTION_LIMIT)
        if self._random["push"][1] > 0.0:
            self._push()
        self._ctrl[:] = DEFAULT_POSE + ACTION_SCALE * action + rows.joint_offset
        diverged = self._simulate()
        self._clock += 1
        rows.steps += 1

        k = self._kinematics()
        rows.force[:] = self._touch
        rows.force[diverged] = 0.0
        contact = rows.force > 1.0
        self._after_motion(k)
        rows.reward_groups[:] = reward_terms(k, rows, self._ctrl, action, contact) @ self._reward_weights * DT
        rows.reward_groups[diverged] = 0.0
        reward = np.maximum(rows.reward_groups.sum(-1), 0.0)

        fallen = ~diverged & ((k.gravity[:, 2] > -0.5) | (k.height < 0.16))
        self._count(k, fallen, diverged)
        rows.last_action[:] = action
        rows.last_joint_velocity[:] = k.joint_velocity
        rows.air_time[:] = np.where(contact, 0.0, rows.air_time + DT)
        rows.contact[:] = contact
        self._judge(k, fallen | diverged)
        due = np.flatnonzero(rows.steps % COMMAND_PERIOD == 0)
        if len(due):
            self._draw_commands(due)
            self._after_motion(k)
        self._remember(k)
        return self._pack(k).set("reward", torch.from_numpy(reward.astype(np.float32)[:, None]).to(self.device))

    def _push(self) -> None:
        n = self.num_envs
        pushed = self._uniform((0.0, 1.0), n) < DT / _PUSH_PERIOD
        angle, speed = self._uniform((-np.pi, np.pi), n), self._uniform(self._random["push"], n) * pushed
        self._qvel[:, 0] += speed * np.cos(angle)
        self._qvel[:, 1] += speed * np.sin(angle)

    def _after_motion(self, k: SimpleNamespace) -> None:
        """Update what depends on where a row is."""

    def _judge(self, k: SimpleNamespace, failed: np.ndarray) -> None:
        """Set the flags of the step."""
        rows = self._rows
        rows.terminated[:] = failed
        rows.truncated[:] = rows.steps >= self.max_steps
        follows = (rows.velocity_error <= _FOLLOWING) & (rows.yaw_error <= _FOLLOWING)
        rows.success[:] = rows.truncated & ~failed & follows

    def _count(self, k: SimpleNamespace, fallen: np.ndarray, diverged: np.ndarray) -> None:
        rows = self._rows
        rows.fallen[:], rows.diverged[:] = fallen, diverged
        rows.distance += np.hypot(k.velocity[:, 0], k.velocity[:, 1]) * DT
        counted = rows.steps > _SETTLING
        share = counted / np.maximum(rows.steps - _SETTLING, 1)
        error = np.hypot(k.velocity[:, 0] - rows.command[:, 0], k.velocity[:, 1] - rows.command[:, 1])
        rows.velocity_error += share * (error - rows.velocity_error)
        rows.yaw_error += share * (np.abs(k.angular[:, 2] - rows.command[:, 2]) - rows.yaw_error)

    def policy_contract(self) -> dict[str, Any]:
        """What a deployed policy must know, for ``edenrl.export``: terms, histories, actions, rate, joints."""
        frames = {"history": self.history_length, "prop_history": self.prop_history_length}
        return quadruped_contract(self._random, frames, DT, DEPTH_INTERVAL, ACTION_SCALE)

    def set_nominal(self) -> None:
        """Switch off, also in the episodes under way, what is randomized of the values that a policy spec states."""
        for name in SPEC_VALUES:
            if self._random[name][0] != self._random[name][1]:
                self._random[name] = (NOMINAL[name], NOMINAL[name])
            getattr(self._rows, name)[:] = self._random[name][0]
        for name in ("kp", "kd"):
            getattr(self._rows, name)[:] *= self._rows.motor_strength
        self._write_parameters(np.arange(self.num_envs))

    def set_episode_steps(self, steps: torch.Tensor) -> None:
        """Set the steps that the running episodes have taken; nothing else of their state changes.

        Args:
            steps: ``[N]``, each less than ``max_steps``.
        """
        self._rows.steps[:] = steps.cpu().numpy()

    def get_extra_state(self) -> dict[str, Any]:
        """Everything needed to continue bit for bit; stored by ``state_dict()`` under ``"_extra_state"``."""
        rows = {name: torch.from_numpy(value.copy()) for name, value in vars(self._rows).items()}
        simulation = torch.from_numpy(self._state.copy())
        return {"rows": rows, "simulation": simulation, "clock": self._clock, "generator": self._generator.get_state()}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore what ``get_extra_state`` returned.

        Args:
            state: the saved mapping.

        Raises:
            ValueError: the state belongs to another number of environments or other groups.
        """
        found = {name: tuple(value.shape) for name, value in state["rows"].items()}
        expected = {name: value.shape for name, value in vars(self._rows).items()}
        if found != expected:
            raise ValueError(
                f"{type(self).__name__} state has entries {found}; expected {expected} for num_envs={self.num_envs} "
                f"and groups={self.groups}. Build the environment with the arguments of the saved run."
            )
        for name, value in state["rows"].items():
            getattr(self._rows, name)[:] = value.cpu().numpy()
        self._write_parameters(np.arange(self.num_envs))
        self._state[:] = state["simulation"].cpu().numpy()
        self._warnings[:] = 0
        self._clock = int(state["clock"])
        self._generator.set_state(state["generator"].cpu())
