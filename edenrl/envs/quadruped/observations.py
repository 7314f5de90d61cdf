"""What a quadruped sees: the observation groups, the histories behind them, and their specs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import Binary, Bounded, Composite, Unbounded

from edenrl.envs.quadruped.groups import AMP_FRAMES, CRITIC_WIDTH, POLICY_WIDTH, PROP_WIDTH, SCAN_X, SCAN_Y
from edenrl.envs.quadruped.rewards import NOMINAL_HEIGHT, REWARD_WEIGHTS
from edenrl.envs.quadruped.simulation import QuadrupedSimulation
from edenrl.envs.quadruped.terrain import DepthCamera

__all__ = ["ACTION_LIMIT", "DEPTH_INTERVAL", "METRICS", "QuadrupedObservations"]

ACTION_LIMIT = 4.0
DEPTH_INTERVAL = 5  # control steps between depth images
METRICS = ("success", "fallen", "diverged", "velocity_error", "yaw_error", "distance", "difficulty")
_COMMAND_SCALE = np.array([2.0, 2.0, 0.5])


class QuadrupedObservations(QuadrupedSimulation):
    """Computes the groups that are published, and only those; ``Quadruped`` describes each of them.

    Attributes:
        groups: names of the groups.
        history_length: frames of ``history``.
        prop_history_length: frames of ``prop_history``.
    """

    groups: tuple[str, ...]
    history_length: int
    prop_history_length: int
    _camera: DepthCamera | None
    _clock: int

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
            "metrics": {"metrics": composite(*METRICS)},
        }
        published = {key: spec for group in self.groups for key, spec in entries[group].items()}
        self.observation_spec = Composite(published, shape=shape, device=device)
        self.action_spec = Bounded(-ACTION_LIMIT, ACTION_LIMIT, (*shape, 12), device=device, dtype=torch.float32)
        self.reward_spec = vector(1)
        self.done_spec = Composite(
            done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=shape, device=device
        )

    def _empty_histories(self) -> dict[str, np.ndarray]:
        """The frames that the groups look back on, oldest first."""
        n, histories = self.num_envs, {}
        if "history" in self.groups:
            histories["history"] = np.zeros((n, self.history_length, POLICY_WIDTH), np.float32)
        if "prop_history" in self.groups:
            histories["prop_history"] = np.zeros((n, self.prop_history_length, PROP_WIDTH), np.float32)
        if "amp" in self.groups:
            histories["amp"] = np.zeros((n, AMP_FRAMES, 12), np.float32)
        if "depth" in self.groups:
            histories["depth"] = np.zeros((n, DepthCamera.HEIGHT, DepthCamera.WIDTH), np.float32)
        return histories

    def _yaw_to_waypoints(self, k: SimpleNamespace) -> np.ndarray:
        """Angles ``[N, 2]`` from the heading to this and to the next way-point."""
        return np.zeros((self.num_envs, 2))

    def _difficulty(self) -> np.ndarray:
        """Difficulty of the ground, ``[N]`` in [0, 1]."""
        return np.zeros(self.num_envs)

    def _policy(self, k: SimpleNamespace) -> np.ndarray:
        """The critic's frame, of which the policy's is the first part, ``[N, 48]``."""
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
        return np.clip(k.position[:, 2:] - NOMINAL_HEIGHT - ground, -1.0, 1.0).astype(np.float32)

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
        """The published groups as arrays, nested ones as dictionaries of columns."""
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
            out["metrics"] = {name: values[name][:, None] for name in METRICS}
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
