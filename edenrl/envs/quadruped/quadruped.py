"""The quadruped on flat ground, and what its version on terrain shares."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Binary, Bounded, Composite, Unbounded
from torchrl.envs import EnvBase

from edenrl.envs.quadruped.groups import (
    AMP_FRAMES,
    CRITIC_WIDTH,
    GROUPS,
    POLICY_WIDTH,
    PROP_WIDTH,
    SCAN_X,
    SCAN_Y,
    group_mirrors,
)
from edenrl.envs.quadruped.model import (
    DEFAULT_POSE,
    FOOT_RADIUS,
    HIP_X,
    HIP_Y,
    KP,
    KV,
    LINK,
    PHYSICS_DT,
    THIGH_Y,
    TORQUE_LIMIT,
    TRUNK_MASS,
    build_model,
    load_mujoco,
)
from edenrl.envs.quadruped.terrain import DepthCamera, HeightField

__all__ = ["RANDOMIZATION", "REWARD_WEIGHTS", "Quadruped"]

SUBSTEPS = 4
DT = SUBSTEPS * PHYSICS_DT  # s, one control step
ACTION_LIMIT, ACTION_SCALE = 4.0, 0.25
COMMAND_PERIOD = 250  # control steps between new commands
STILL = 0.1  # a smaller command becomes zero: stand
DEPTH_INTERVAL = 5  # control steps between depth images
_COMMAND_SCALE = np.array([2.0, 2.0, 0.5])
_SETTLING = 50  # control steps at the start of an episode that velocity errors leave out
_NOMINAL_HEIGHT = 0.30  # m

COMMANDS = {"vx": (0.0, 1.0), "vy": (-0.3, 0.3), "yaw": (-0.5, 0.5)}

RANDOMIZATION = {
    "friction": (0.5, 1.2),
    "trunk_mass": (-1.0, 2.0),
    "trunk_centre": (-0.02, 0.02),
    "motor_strength": (0.9, 1.1),
    "kp": (0.9, 1.1),
    "kd": (0.9, 1.1),
    "joint_offset": (-0.02, 0.02),
    "push": (0.0, 0.0),
}
_NOMINAL = {name: 1.0 if name in ("motor_strength", "kp", "kd") else 0.0 for name in RANDOMIZATION} | {"friction": 0.8}
_PUSH_PERIOD = 4.0  # s, on average

REWARD_WEIGHTS = {
    "task": {"track_velocity": 1.5, "track_yaw": 0.75, "alive": 0.1},
    "style": {"trot": 1.0, "air_time": 1.0, "stand": 1.0, "stand_pose": -0.5, "height": -20.0, "pose": -0.05},
    "penalty": {
        "vertical_velocity": -2.0,
        "roll_pitch_rate": -0.05,
        "tilt": -2.0,
        "torque": -2e-4,
        "action_rate": -0.01,
        "joint_acceleration": -2.5e-7,
    },
}


class Quadruped(EnvBase):
    """A batch of 12-joint robot dogs that follow velocity commands, simulated by MuJoCo on all CPU cores.

    One control step is 0.02 s, four physics steps. Actions move the joint targets around the default pose, ``target =
    default + 0.25 a`` with ``a`` clamped to ``[-4, 4]``; servos with limited torque follow them. The trunk should move
    with the command ``(vx, vy, yaw rate)``, in m/s and rad/s in its own frame; commands are drawn anew every 5 s, and
    one in ten is zero: stand still.

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
    | ``metrics`` | | ``success`` (reached the end), ``fallen``, ``diverged``, ``velocity_error`` (m/s) and ``yaw_error`` (rad/s, means since the first second), ``distance`` (m), ``difficulty``, each ``[N, 1]`` |

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
        zero_commands: Share of commands that are zero. Default 0.1.
        episode_seconds: Time limit. Default 10 s.
        randomize: True: the ranges of ``RANDOMIZATION`` (no pushes); False: none; a mapping replaces the ranges it
            names.
        rewards: Weights that replace those of ``REWARD_WEIGHTS``, by the name of the term.
        history_length: Frames of ``history``. Default 6.
        prop_history_length: Frames of ``prop_history``. Default 10.
        num_threads: Threads of the simulation. Default: one per CPU this process may use. The results do not depend
            on it.

    Raises:
        ImportError: MuJoCo is missing or older than 4.0.
        ValueError: an unknown group, command, range or reward; a number out of range; an action that is not finite.

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
    depth_interval = DEPTH_INTERVAL

    def __init__(
        self,
        num_envs: int,
        *,
        device: torch.device | str | None = None,
        seed: int | None = None,
        groups: Sequence[str] = ("policy", "critic"),
        commands: Mapping[str, Sequence[float]] | None = None,
        zero_commands: float = 0.1,
        episode_seconds: float = 10.0,
        randomize: bool | Mapping[str, Sequence[float]] = True,
        rewards: Mapping[str, float] | None = None,
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
        super().__init__(device=torch.device("cpu" if device is None else device), batch_size=[num_envs])
        self.num_envs = num_envs
        self.groups = tuple(dict.fromkeys(groups))
        self.zero_commands = zero_commands
        self.max_steps = round(episode_seconds / DT)
        self.history_length, self.prop_history_length = history_length, prop_history_length
        self.mirrors = group_mirrors(self.groups, history_length, prop_history_length)
        self._command_range = _ranges("commands", self._default_commands(), commands)
        if isinstance(randomize, Mapping):
            self._random = _ranges("randomize", RANDOMIZATION, randomize)
        else:
            fixed = {name: (value, value) for name, value in _NOMINAL.items()}
            self._random = dict(RANDOMIZATION) if randomize else fixed
        self._reward_weights = _reward_matrix(rewards)
        self._mujoco = load_mujoco()
        self._field = self._make_field()
        self.model = build_model(self._field)
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._make_batch(max(1, min(num_envs, threads if num_threads is None else num_threads)))
        self._camera = DepthCamera(self._field) if "depth" in self.groups else None
        self._make_specs()
        self._generator = torch.Generator()
        self._set_seed(seed)
        self._rows = self._empty_rows()
        self._clock = 0
        self._restart(np.arange(num_envs))

    # ---- construction ----------------------------------------------------------------------------------------------

    def _default_commands(self) -> dict[str, tuple[float, float]]:
        return dict(COMMANDS)

    def _make_field(self) -> HeightField | None:
        return None

    def _make_batch(self, threads: int) -> None:
        from mujoco.batch import Batch

        batch = Batch(self.model, self.num_envs, threads)
        self._batch = batch
        self._state, self._warnings = batch.state, batch.warning
        self._time, self._ctrl = batch.bind("time"), batch.bind("ctrl")
        self._qpos, self._qvel = batch.bind("qpos"), batch.bind("qvel")
        self._touch = batch.bind("sensordata")
        fields = "geom_friction body_mass body_ipos body_inertia actuator_gainprm actuator_biasprm actuator_forcerange"
        self._values = {name: batch.expand(name) for name in fields.split()}
        self._trunk = self.model.body("trunk").id

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
        if "history" in self.groups:
            rows.history = zeros(self.history_length, POLICY_WIDTH, dtype=np.float32)
        if "prop_history" in self.groups:
            rows.prop_history = zeros(self.prop_history_length, PROP_WIDTH, dtype=np.float32)
        if "amp" in self.groups:
            rows.amp = zeros(AMP_FRAMES, 12, dtype=np.float32)
        if "depth" in self.groups:
            rows.depth = zeros(DepthCamera.HEIGHT, DepthCamera.WIDTH, dtype=np.float32)
        return rows

    def _make_specs(self) -> None:
        shape, device = self.batch_size, self.device

        def vector(*width: int) -> Unbounded:
            return Unbounded((*shape, *width), device=device, dtype=torch.float32)

        def composite(*names: str) -> Composite:
            return Composite({name: vector(1) for name in names}, shape=shape, device=device)

        flag = Binary(1, shape=(*shape, 1), device=device, dtype=torch.bool)
        entries: dict[str, dict[str, Any]] = {
            "policy": {"policy": vector(POLICY_WIDTH)},
            "critic": {"critic": vector(CRITIC_WIDTH)},
            "history": {"history": vector(self.history_length * POLICY_WIDTH)},
            "prop": {"prop": vector(PROP_WIDTH)},
            "scan": {"scan": vector(len(SCAN_X) * len(SCAN_Y))},
            "priv_explicit": {"priv_explicit": vector(9)},
            "priv_latent": {"priv_latent": vector(29)},
            "prop_history": {"prop_history": vector(self.prop_history_length * PROP_WIDTH)},
            "amp": {"amp_window": vector(AMP_FRAMES * 12), "amp_gate": vector(1)},
            "reward_groups": {"reward_groups": composite(*REWARD_WEIGHTS)},
            "depth": {"depth": vector(DepthCamera.HEIGHT, DepthCamera.WIDTH), "delta_yaw_ok": vector(1)},
            "metrics": {"metrics": composite(*_METRICS)},
        }
        published = {key: spec for group in self.groups for key, spec in entries[group].items()}
        self.observation_spec = Composite(published, shape=shape, device=device)
        self.action_spec = Bounded(-ACTION_LIMIT, ACTION_LIMIT, (*shape, 12), device=device, dtype=torch.float32)
        self.reward_spec = vector(1)
        self.done_spec = Composite(
            done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=shape, device=device
        )

    # ---- randomness ------------------------------------------------------------------------------------------------

    def _set_seed(self, seed: int | None) -> None:
        self._generator.manual_seed(int(torch.randint(2**31 - 1, ()).item()) if seed is None else seed)

    def _uniform(self, bounds: tuple[float, float], *shape: int) -> np.ndarray:
        low, high = bounds
        unit: np.ndarray = torch.rand(shape, generator=self._generator, dtype=torch.float64).numpy()
        return low + (high - low) * unit

    def _randomize(self, ids: np.ndarray) -> None:
        """Draw the hidden parameters of some rows and write them into their models."""
        rows, n, ranges = self._rows, len(ids), self._random
        rows.friction[ids] = self._uniform(ranges["friction"], n)
        rows.trunk_mass[ids] = self._uniform(ranges["trunk_mass"], n)
        rows.trunk_centre[ids] = self._uniform(ranges["trunk_centre"], n, 3)
        rows.motor_strength[ids] = self._uniform(ranges["motor_strength"], n, 12)
        # What acts is the product; the factors published are the ones that act.
        rows.kp[ids] = self._uniform(ranges["kp"], n, 12) * rows.motor_strength[ids]
        rows.kd[ids] = self._uniform(ranges["kd"], n, 12) * rows.motor_strength[ids]
        rows.joint_offset[ids] = self._uniform(ranges["joint_offset"], n, 12)
        self._write_parameters(ids)

    def _write_parameters(self, ids: np.ndarray) -> None:
        rows, values, trunk = self._rows, self._values, self._trunk
        values["geom_friction"][ids, :, 0] = rows.friction[ids, None]
        mass = TRUNK_MASS + rows.trunk_mass[ids]
        values["body_mass"][ids, trunk] = mass
        values["body_inertia"][ids, trunk] = self.model.body_inertia[trunk] * (mass / TRUNK_MASS)[:, None]
        values["body_ipos"][ids, trunk] = self.model.body_ipos[trunk] + rows.trunk_centre[ids]
        values["actuator_gainprm"][ids, :, 0] = KP * rows.kp[ids]
        values["actuator_biasprm"][ids, :, 1] = -KP * rows.kp[ids]
        values["actuator_biasprm"][ids, :, 2] = -KV * rows.kd[ids]
        limit = TORQUE_LIMIT * rows.motor_strength[ids]
        values["actuator_forcerange"][ids, :, 0], values["actuator_forcerange"][ids, :, 1] = -limit, limit
        self._batch.set_const(ids)

    # ---- reset -----------------------------------------------------------------------------------------------------

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
        self._randomize(ids)
        self._stand(ids, DEFAULT_POSE + self._uniform((-0.1, 0.1), n, 12), self._uniform(self._start_yaw(), n))
        self._qvel[ids, :6] = self._uniform((-0.2, 0.2), n, 6)
        for name in _ZERO_AT_RESET:
            getattr(rows, name)[ids] = 0
        rows.last_joint_velocity[ids] = 0.0
        self._draw_commands(ids)
        k = self._kinematics()
        self._after_motion(k)
        self._remember(k, ids)

    def _stand(self, ids: np.ndarray, joints: np.ndarray, yaw: np.ndarray | float = 0.0) -> None:
        """Put rows at rest where they start, with the given joint angles and heading."""
        rows = self._rows
        self._state[ids] = 0.0
        self._warnings[ids] = 0
        self._ctrl[ids] = DEFAULT_POSE + rows.joint_offset[ids]
        self._qpos[ids, :2] = rows.origin[ids]
        # Feet touch the ground, which is flat at z = 0 wherever robots start.
        self._qpos[ids, 2] = FOOT_RADIUS + 0.002 - _foot_positions(joints)[..., 2].min(-1)
        self._qpos[ids, 3], self._qpos[ids, 6] = np.cos(0.5 * yaw), np.sin(0.5 * yaw)
        self._qpos[ids, 7:] = joints

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

    # ---- step ------------------------------------------------------------------------------------------------------

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        rows = self._rows
        action = tensordict.get("action").detach().cpu().numpy().astype(np.float64).clip(-ACTION_LIMIT, ACTION_LIMIT)
        if not np.isfinite(action).all():
            row = int(np.flatnonzero(~np.isfinite(action).all(-1))[0])
            raise ValueError(f"The action of env {row} is {action[row].tolist()}; expected finite numbers.")
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
        rows.reward_groups[:] = self._reward(k, action, contact)
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

    def _simulate(self) -> np.ndarray:
        """Advance the physics by one control step; returns which rows diverged, now back where they started."""
        mujoco = self._mujoco
        warned = self._warnings[:, :, 1].sum(-1)
        # MuJoCo would print every warning and append it to a file in the working directory.
        handler = mujoco.get_mju_user_warning()
        mujoco.set_mju_user_warning(_ignore)
        try:
            self._batch.step(nstep=SUBSTEPS)
        finally:
            mujoco.set_mju_user_warning(handler)
        # A row with a warning was silently reset by MuJoCo; one this fast is about to be. NaN compares false.
        sound = np.abs(self._state).max(-1) < 1e8
        sound &= (np.abs(self._qvel).max(-1) < 200.0) & (self._warnings[:, :, 1].sum(-1) == warned)
        diverged = ~sound
        if diverged.any():
            self._stand(np.flatnonzero(diverged), DEFAULT_POSE)
        return diverged

    def _push(self) -> None:
        n = self.num_envs
        pushed = self._uniform((0.0, 1.0), n) < DT / _PUSH_PERIOD
        angle, speed = self._uniform((-np.pi, np.pi), n), self._uniform(self._random["push"], n) * pushed
        self._qvel[:, 0] += speed * np.cos(angle)
        self._qvel[:, 1] += speed * np.sin(angle)

    def _judge(self, k: SimpleNamespace, failed: np.ndarray) -> None:
        """Set the flags of the step."""
        rows = self._rows
        rows.terminated[:] = failed
        rows.truncated[:] = rows.steps >= self.max_steps
        rows.success[:] = rows.truncated & ~failed

    def _count(self, k: SimpleNamespace, fallen: np.ndarray, diverged: np.ndarray) -> None:
        rows = self._rows
        rows.fallen[:], rows.diverged[:] = fallen, diverged
        rows.distance += np.hypot(k.velocity[:, 0], k.velocity[:, 1]) * DT
        counted = rows.steps > _SETTLING
        share = counted / np.maximum(rows.steps - _SETTLING, 1)
        error = np.hypot(k.velocity[:, 0] - rows.command[:, 0], k.velocity[:, 1] - rows.command[:, 1])
        rows.velocity_error += share * (error - rows.velocity_error)
        rows.yaw_error += share * (np.abs(k.angular[:, 2] - rows.command[:, 2]) - rows.yaw_error)

    def _reward(self, k: SimpleNamespace, action: np.ndarray, contact: np.ndarray) -> np.ndarray:
        """Weighted terms of a step, summed by group: ``[N, 3]``."""
        rows = self._rows
        command, moving = rows.command, np.abs(rows.command).max(-1) > 0.0
        velocity_error = np.square(k.velocity[:, :2] - command[:, :2]).sum(-1)
        yaw_error = np.square(k.angular[:, 2] - command[:, 2])
        # One diagonal pair carries while the other swings.
        trot = (contact[:, 0] == contact[:, 3]) & (contact[:, 1] == contact[:, 2]) & (contact[:, 0] != contact[:, 1])
        landed = contact & ~rows.contact
        air_time = (landed * (np.minimum(rows.air_time, 0.5) - 0.15)).sum(-1)
        pose = np.square(k.joint_offset).sum(-1)
        torque = np.clip(
            KP * rows.kp * (self._ctrl - k.joints) - KV * rows.kd * k.joint_velocity,
            -TORQUE_LIMIT * rows.motor_strength,
            TORQUE_LIMIT * rows.motor_strength,
        )
        acceleration = (k.joint_velocity - rows.last_joint_velocity) / DT
        terms = np.stack(
            [
                np.exp(-velocity_error / 0.1),
                np.exp(-yaw_error / 0.1),
                np.ones(self.num_envs),
                trot & moving,
                air_time * moving,
                contact.all(-1) & ~moving,
                np.abs(k.joint_offset).sum(-1) * ~moving,
                np.square(k.height - _NOMINAL_HEIGHT),
                pose,
                np.square(k.velocity[:, 2]),
                np.square(k.angular[:, :2]).sum(-1),
                np.square(k.gravity[:, :2]).sum(-1),
                np.square(torque).sum(-1),
                np.square(action - rows.last_action).sum(-1),
                np.square(acceleration).sum(-1),
            ],
            axis=-1,
        )
        return terms @ self._reward_weights * DT

    # ---- what is seen ----------------------------------------------------------------------------------------------

    def _kinematics(self) -> SimpleNamespace:
        """The state in the forms that rewards and observations need, copied."""
        qpos, qvel = self._qpos.copy(), self._qvel.copy()
        rotation = _rotations(qpos[:, 3:7])
        k = SimpleNamespace(
            position=qpos[:, :3],
            rotation=rotation,
            gravity=-rotation[:, 2],
            yaw=np.arctan2(rotation[:, 1, 0], rotation[:, 0, 0]),
            velocity=np.einsum("nji,nj->ni", rotation, qvel[:, :3]),
            angular=qvel[:, 3:6],
            joints=qpos[:, 7:],
            joint_offset=qpos[:, 7:] - DEFAULT_POSE,
            joint_velocity=qvel[:, 6:],
        )
        k.height = self._ground_clearance(k)
        return k

    def _ground_clearance(self, k: SimpleNamespace) -> np.ndarray:
        return k.position[:, 2]

    def _ground(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.zeros_like(x)

    def _after_motion(self, k: SimpleNamespace) -> None:
        """Update what depends on where a row is."""

    def _yaw_to_waypoints(self, k: SimpleNamespace) -> np.ndarray:
        """Angles ``[N, 2]`` from the heading to this and to the next way-point."""
        return np.zeros((self.num_envs, 2))

    def _difficulty(self) -> np.ndarray:
        return np.zeros(self.num_envs)

    def _policy(self, k: SimpleNamespace) -> np.ndarray:
        rows, out = self._rows, np.empty((self.num_envs, CRITIC_WIDTH), np.float32)
        out[:, 0:3] = rows.command * _COMMAND_SCALE
        out[:, 3:6] = 0.25 * k.angular
        out[:, 6:9] = k.gravity
        out[:, 9:21] = k.joint_offset
        out[:, 21:33] = 0.05 * k.joint_velocity
        out[:, 33:45] = rows.last_action
        out[:, 45:48] = 2.0 * k.velocity
        return out

    def _prop(self, k: SimpleNamespace) -> np.ndarray:
        rows, out = self._rows, np.zeros((self.num_envs, PROP_WIDTH), np.float32)
        out[:, 0:3] = 0.25 * k.angular
        out[:, 3] = np.arctan2(k.rotation[:, 2, 1], k.rotation[:, 2, 2])
        out[:, 4] = np.arcsin(np.clip(-k.rotation[:, 2, 0], -1.0, 1.0))
        out[:, 6:8] = self._yaw_to_waypoints(k)
        out[:, 8:11] = rows.command * _COMMAND_SCALE
        out[:, 11 if self._field is not None else 12] = 1.0
        out[:, 13:25] = k.joint_offset
        out[:, 25:37] = 0.05 * k.joint_velocity
        out[:, 37:49] = rows.last_action
        out[:, 49:53] = rows.contact - 0.5
        return out

    def _scan(self, k: SimpleNamespace) -> np.ndarray:
        x, y = (axis.ravel() for axis in np.meshgrid(SCAN_X, SCAN_Y, indexing="ij"))
        cos, sin = np.cos(k.yaw)[:, None], np.sin(k.yaw)[:, None]
        ground = self._ground(k.position[:, :1] + cos * x - sin * y, k.position[:, 1:2] + sin * x + cos * y)
        return np.clip(k.position[:, 2:] - _NOMINAL_HEIGHT - ground, -1.0, 1.0).astype(np.float32)

    def _priv_explicit(self, k: SimpleNamespace) -> np.ndarray:
        force = np.minimum(0.01 * self._rows.force, 3.0)  # an impact reaches thousands of newtons for one step
        parts = [2.0 * k.velocity, k.height[:, None], force, self._difficulty()[:, None]]
        return np.concatenate(parts, -1).astype(np.float32)

    def _priv_latent(self) -> np.ndarray:
        rows = self._rows
        parts = [rows.trunk_mass[:, None], rows.trunk_centre, rows.friction[:, None], rows.kp, rows.kd]
        return np.concatenate(parts, -1).astype(np.float32)

    def _depth(self, k: SimpleNamespace, ids: np.ndarray) -> np.ndarray:
        assert self._camera is not None
        position, rotation = (torch.from_numpy(part[ids]).float() for part in (k.position, k.rotation))
        image: np.ndarray = self._camera(position, rotation).numpy()
        return image / DepthCamera.FAR - 0.5

    def _remember(self, k: SimpleNamespace, fresh: np.ndarray | None = None) -> None:
        """Push a frame into the histories; rows that start (``fresh``) fill theirs with it instead."""
        frames = {}
        if "history" in self.groups:
            frames["history"] = self._policy(k)[:, :POLICY_WIDTH]
        if "prop_history" in self.groups:
            frames["prop_history"] = self._prop(k)
        if "amp" in self.groups:
            frames["amp"] = k.joints.astype(np.float32)
        for name, frame in frames.items():
            stack = getattr(self._rows, name)
            if fresh is not None:
                stack[fresh] = frame[fresh, None]
            else:
                stack[:, :-1] = stack[:, 1:].copy()
                stack[:, -1] = frame
        if "depth" in self.groups and (fresh is not None or self._clock % DEPTH_INTERVAL == 0):
            ids = np.arange(self.num_envs) if fresh is None else fresh
            self._rows.depth[ids] = self._depth(k, ids)

    def _observe(self, k: SimpleNamespace) -> dict[str, Any]:
        rows, groups = self._rows, self.groups
        out: dict[str, Any] = {}
        if "policy" in groups or "critic" in groups:
            both = self._policy(k)
            if "critic" in groups:
                out["critic"] = both
            if "policy" in groups:
                out["policy"] = both[:, :POLICY_WIDTH].copy()
        if "prop" in groups:
            out["prop"] = self._prop(k)
        if "scan" in groups:
            out["scan"] = self._scan(k)
        if "priv_explicit" in groups:
            out["priv_explicit"] = self._priv_explicit(k)
        if "priv_latent" in groups:
            out["priv_latent"] = self._priv_latent()
        for name in ("history", "prop_history"):
            if name in groups:
                out[name] = getattr(rows, name).reshape(self.num_envs, -1).copy()
        if "amp" in groups:
            out["amp_window"] = rows.amp.reshape(self.num_envs, -1).copy()
            out["amp_gate"] = (np.abs(rows.command).max(-1, keepdims=True) > 0.0).astype(np.float32)
        if "depth" in groups:
            out["depth"] = rows.depth.copy()
            out["delta_yaw_ok"] = (np.abs(self._yaw_to_waypoints(k)[:, :1]) < 0.6).astype(np.float32)
        if "reward_groups" in groups:
            out["reward_groups"] = dict(zip(REWARD_WEIGHTS, rows.reward_groups.T[:, :, None], strict=True))
        if "metrics" in groups:
            values = vars(rows) | {"difficulty": self._difficulty()}
            out["metrics"] = {name: values[name][:, None] for name in _METRICS}
        return out

    def _pack(self, k: SimpleNamespace) -> TensorDict:
        """Fresh tensors of observations and flags."""
        rows, entries = self._rows, self._observe(k)
        tensors: dict[str, Any] = {}
        for name, value in entries.items():
            if isinstance(value, dict):
                leaves = {key: torch.from_numpy(leaf.astype(np.float32)) for key, leaf in value.items()}
                tensors[name] = TensorDict(leaves, batch_size=self.batch_size)
            else:
                tensors[name] = torch.from_numpy(value)
        for name, flag in (("terminated", rows.terminated), ("truncated", rows.truncated)):
            tensors[name] = torch.from_numpy(flag[:, None].copy())
        tensors["done"] = tensors["terminated"] | tensors["truncated"]
        return TensorDict(tensors, batch_size=self.batch_size, device=self.device)

    # ---- state -----------------------------------------------------------------------------------------------------

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

    def simulation(self, row: int = 0) -> tuple[Any, Any]:
        """MuJoCo's model and data of one robot, as copies, for rendering and analysis.

        Args:
            row: which robot.

        Returns:
            ``(mujoco.MjModel, mujoco.MjData)`` with derived quantities computed.
        """
        model, data = self._batch.get_model(row), self._batch.get_data(row)
        self._mujoco.mj_forward(model, data)
        return model, data


_METRICS = ("success", "fallen", "diverged", "velocity_error", "yaw_error", "distance", "difficulty")
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


def _ignore(message: str | bytes) -> None:
    """Take a warning of MuJoCo: divergence is detected and handled where it happens."""


def _ranges(
    argument: str, defaults: Mapping[str, tuple[float, float]], given: Mapping[str, Sequence[float]] | None
) -> dict[str, tuple[float, float]]:
    ranges = dict(defaults)
    for name, value in (given or {}).items():
        if name not in ranges:
            raise ValueError(f"{argument} names {name!r}, which does not exist; choose from {list(defaults)}.")
        if len(value) != 2 or not float(value[0]) <= float(value[1]):
            raise ValueError(f"{argument} gives {name}={list(value)}; expected [low, high].")
        ranges[name] = (float(value[0]), float(value[1]))
    return ranges


def _reward_matrix(given: Mapping[str, float] | None) -> np.ndarray:
    """Weights ``[terms, groups]``, in the order of ``REWARD_WEIGHTS``."""
    columns = [
        (column, name, weight) for column, group in enumerate(REWARD_WEIGHTS.values()) for name, weight in group.items()
    ]
    unknown = [name for name in given or {} if name not in {name for _, name, _ in columns}]
    if unknown:
        raise ValueError(
            f"rewards names {unknown}, which do not exist; choose from {[name for _, name, _ in columns]}."
        )
    matrix = np.zeros((len(columns), len(REWARD_WEIGHTS)))
    for row, (column, name, weight) in enumerate(columns):
        matrix[row, column] = (given or {}).get(name, weight)
    return matrix


def _rotations(quaternion: np.ndarray) -> np.ndarray:
    """Rotation matrices ``[N, 3, 3]`` of unit quaternions ``[N, 4]``, w first."""
    w, x, y, z = quaternion.T
    out = np.empty((len(quaternion), 3, 3))
    out[:, 0, 0], out[:, 0, 1], out[:, 0, 2] = 1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)
    out[:, 1, 0], out[:, 1, 1], out[:, 1, 2] = 2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)
    out[:, 2, 0], out[:, 2, 1], out[:, 2, 2] = 2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)
    return out


def _foot_positions(joints: np.ndarray) -> np.ndarray:
    """Foot centres ``[N, 4, 3]`` in the trunk's frame, for joint angles ``[N, 12]``."""
    abduction, hip, knee = joints.reshape(-1, 4, 3).transpose(2, 0, 1)
    front, left = np.array([1.0, 1.0, -1.0, -1.0]), np.array([1.0, -1.0, 1.0, -1.0])
    x = -LINK * (np.sin(hip) + np.sin(hip + knee))
    z = -LINK * (np.cos(hip) + np.cos(hip + knee))
    cos, sin = np.cos(abduction), np.sin(abduction)
    side = left * THIGH_Y
    return np.stack([front * HIP_X + x, left * HIP_Y + cos * side - sin * z, sin * side + cos * z], -1)
