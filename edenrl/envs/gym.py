"""Gymnasium vector environments with true final observations and exact resume."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite, TensorSpec, Unbounded
from torchrl.envs.libs.gym import GymWrapper

from edenrl.envs.groups import SameStateGroups
from edenrl.envs.gym_state import VECTOR_STATE, OpaqueStateError, decode, encode, load_env, save_env

__all__ = ["GymVectorEnv"]

_logger = logging.getLogger(__name__)


class GymVectorEnv(SameStateGroups, GymWrapper):
    """TorchRL's ``GymWrapper`` over a Gymnasium vector environment that leaves resets to TorchRL.

    What it adds: floating-point entries are float32; every tensor is a copy (Gymnasium may reuse its arrays); step
    infos are not read, which saves time; categorical actions are integers ``[N]``; the first step checks the flags the
    environment returns; and ``state_dict()`` holds the runtime state, so a run continues bit for bit.

    Keys, for ``N`` environments: ``observation`` ``[N, d]``, or one root key per entry of a ``Dict`` observation space;
    ``action`` ``[N, a]``, or ``[N]`` when discrete; ``("next", "reward")``, ``("next", "done")``,
    ``("next", "terminated")``, ``("next", "truncated")`` ``[N, 1]``. ``("next", ...)`` at the end of an episode is its
    true last observation; ``step_and_maybe_reset`` and collectors then reset just those rows.

    ``set_seed(s)`` seeds sub-environment ``i`` with ``s + i``, as Gymnasium does; use the value it returns (or seeds
    far apart) for the next vector, not ``s + 1``.

    With groups (``edenrl.envs.set_group_size``) a full reset seeds the members of each group alike. They then share
    more than their first state: randomness inside the simulation, later resets included, comes from equal generators.

    The runtime state is exact when every sub-environment of a ``SyncVectorEnv`` keeps its state in plain attributes,
    numpy arrays and generators, or in MuJoCo's ``MjData``. Otherwise (sub-processes, Box2D, unknown objects)
    ``state_dict()`` says ``{"exact": False}`` and loading it warns that episodes start anew. MuJoCo *model* values
    changed while running are not part of it.

    Args:
        env: A vector environment built with ``autoreset_mode=AutoresetMode.DISABLED``.
        device: Device of the returned tensors. Default: CPU.

    Raises:
        TypeError: ``env`` is not a Gymnasium vector environment.
        ValueError: one of its spaces is not supported, or ``env`` resets itself.

    Examples:
        >>> import gymnasium
        >>> from edenrl.envs import GymVectorEnv
        >>> vector = gymnasium.make_vec(
        ...     "CartPole-v1", 2, vectorization_mode="sync", vector_kwargs={"autoreset_mode": "Disabled"}
        ... )
        >>> env = GymVectorEnv(vector)
        >>> env.rollout(4)["observation"].shape
        torch.Size([2, 4, 4])
    """

    # TorchRL's loop over skipped frames is in the `_step` that is replaced here; this makes it use a transform instead.
    _has_frame_skip = False
    returns_fresh_tensors = True
    observation_spec: Composite
    action_spec: TensorSpec

    def __init__(self, env: VectorEnv, *, device: torch.device | str | None = None, **kwargs: Any) -> None:
        if not isinstance(env, VectorEnv):
            raise TypeError(
                f"GymVectorEnv wraps a gymnasium.vector.VectorEnv, but {type(env).__name__} was given. Use "
                "make_gym_env(id, num_envs) to build one."
            )
        mode = getattr(env, "autoreset_mode", None)
        if mode != AutoresetMode.DISABLED:
            raise ValueError(
                f"The vector environment has autoreset_mode={mode}; expected AutoresetMode.DISABLED, because an "
                "environment that resets itself hides the last observation of its episodes. Build it with "
                "autoreset_mode=AutoresetMode.DISABLED."
            )
        _check_space("observation", env.single_observation_space, allow_dict=True)
        _check_space("action", env.single_action_space, allow_dict=False)
        super().__init__(
            env, categorical_action_encoding=True, device=torch.device("cpu" if device is None else device), **kwargs
        )
        self._flags_checked = False
        self._group_seeds = np.random.default_rng()

    def _make_specs(self, env: VectorEnv, batch_size: torch.Size | None = None) -> None:
        super()._make_specs(env, batch_size)
        observation_spec = self.observation_spec.clone()
        for key, leaf in list(observation_spec.items(True, True)):
            if leaf.dtype == torch.float64:
                observation_spec[key] = leaf.to(torch.float32)
        self.observation_spec = observation_spec
        if self.action_spec.dtype == torch.float64:
            self.action_spec = self.action_spec.to(torch.float32)
        self.reward_spec = Unbounded((*self.batch_size, 1), device=self.device, dtype=torch.float32)

    def _set_seed(self, seed: int | None) -> None:
        self._env.reset(seed=seed)
        self._group_seeds = np.random.default_rng(seed)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDict:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is not None:
            options = {**(kwargs.pop("options", None) or {}), "reset_mask": mask.reshape(-1).cpu().numpy()}
            kwargs["options"] = options
        elif self.group_size > 1:
            seeds = self._group_seeds.integers(2**31, size=self.batch_size.numel() // self.group_size)
            kwargs["seed"] = seeds.repeat(self.group_size).tolist()
        observation, _ = self._env.reset(**kwargs)
        return self._pack(self._read(observation))

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        action = tensordict.get(self.action_key).detach().cpu().numpy()
        observation, reward, terminated, truncated, _ = self._env.step(action)
        if not self._flags_checked:
            self._check_flag("terminated", terminated)
            self._check_flag("truncated", truncated)
            self._flags_checked = True
        out = self._read(observation)
        out["reward"] = torch.tensor(reward, dtype=torch.float32).unsqueeze(-1)
        out["terminated"] = torch.tensor(terminated).unsqueeze(-1)
        out["truncated"] = torch.tensor(truncated).unsqueeze(-1)
        out["done"] = out["terminated"] | out["truncated"]
        return self._pack(out)

    def _read(self, observation: Any) -> dict[str, Any]:
        """Copy observation arrays into tensors of the spec's type and shape."""
        if not isinstance(observation, Mapping):
            key, leaf = next(iter(self.observation_spec.items()))
            return {key: torch.tensor(observation, dtype=leaf.dtype).reshape(leaf.shape)}
        return _read_dict(observation, self.observation_spec)

    def _pack(self, entries: dict[str, Any]) -> TensorDict:
        return TensorDict(entries, batch_size=self.batch_size, device=self.device)

    def _check_flag(self, name: str, value: Any) -> None:
        expected = tuple(self.batch_size)
        if not isinstance(value, np.ndarray) or value.dtype != np.bool_ or value.shape != expected:
            given = f"{value.dtype} array of shape {value.shape}" if isinstance(value, np.ndarray) else repr(value)
            raise TypeError(
                f"{self._env} returned {name}={given} from step; expected a bool numpy array of shape {expected}, one "
                "flag per environment. Put time limits around each sub-environment, not around the vector."
            )

    def policy_contract(self) -> dict[str, Any]:
        """What Gymnasium tells about a deployment, for ``edenrl.export``: the rate, and MuJoCo's joints and actuators.

        Empty for sub-processes, whose environments cannot be looked into.
        """
        env = self._env.envs[0].unwrapped if isinstance(self._env, SyncVectorEnv) else None
        if hasattr(env, "model") and hasattr(env, "frame_skip") and hasattr(env, "init_qpos"):
            return _mujoco_contract(self._env.envs[0])
        # Classic control calls it dt, cart-pole tau.
        dt = getattr(env, "dt", None) or getattr(env, "tau", None)
        return {"rate": {"control_dt": dt}} if isinstance(dt, float) else {}

    def get_extra_state(self) -> dict[str, Any]:
        """Return the runtime state as plain containers and tensors, for ``state_dict()``.

        Returns:
            ``{"exact": True, ...}``, or ``{"exact": False}`` when some state cannot be read.
        """
        vector = self._env
        if not isinstance(vector, SyncVectorEnv):
            return {"exact": False}
        try:
            bookkeeping = {name: encode(getattr(vector, name)) for name in VECTOR_STATE}
            return {
                "exact": True,
                "vector": bookkeeping,
                "envs": [save_env(env) for env in vector.envs],
                "group_seeds": encode(self._group_seeds),
            }
        except OpaqueStateError as error:
            _logger.debug("runtime state of %s is not saved: %s", vector, error)
            return {"exact": False}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore what ``get_extra_state`` returned.

        Args:
            state: The saved mapping. ``{"exact": False}`` restores nothing and warns.

        Raises:
            ValueError: the state belongs to another number or another kind of environments.
        """
        vector = self._env
        if not state["exact"] or not isinstance(vector, SyncVectorEnv):
            warnings.warn(
                f"The state inside {vector} cannot be restored: its episodes start anew, so the resumed run is not "
                "identical to an uninterrupted one.",
                stacklevel=2,
            )
            return
        if len(state["envs"]) != vector.num_envs:
            raise ValueError(
                f"The saved state has {len(state['envs'])} environments, this one has {vector.num_envs}. Build it with "
                f"num_envs={len(state['envs'])}."
            )
        for env, saved in zip(vector.envs, state["envs"], strict=True):
            load_env(env, saved)
        for name, value in state["vector"].items():
            setattr(vector, name, decode(value))
        self._group_seeds = decode(state["group_seeds"])


def _mujoco_contract(wrapped: Any) -> dict[str, Any]:
    import mujoco

    env = wrapped.unwrapped
    # Gymnasium's own robots pass the action on as it is; what others and wrappers do with it is not known.
    direct = type(env).__module__.startswith("gymnasium.envs.mujoco") and not _changes_actions(wrapped)
    model, one_dof = env.model, (int(mujoco.mjtJoint.mjJNT_HINGE), int(mujoco.mjtJoint.mjJNT_SLIDE))
    joints = [joint for joint in range(model.njnt) if int(model.jnt_type[joint]) in one_dof]
    on_joints = bool((model.actuator_trntype == int(mujoco.mjtTrn.mjTRN_JOINT)).all())
    driven = [model.joint(joint).name for joint in model.actuator_trnid[:, 0]] if on_joints else None
    entity = {
        "name": model.names.split(b"\0")[0].decode() or type(env).__name__,
        "joint_names": [model.joint(joint).name for joint in joints],
        "default_positions": [float(env.init_qpos[model.jnt_qposadr[joint]]) for joint in joints],
    }
    return {
        "actions": {
            "clip": bool(model.actuator_ctrllimited.all()) if direct else None,
            "scale": [1.0] * model.nu if direct else None,
            "bias": [0.0] * model.nu if direct else None,
            "names": driven if direct else None,
            "meaning": "controls of MuJoCo's actuators, in the model's order" if direct else None,
        },
        "rate": {
            "control_dt": float(model.opt.timestep * env.frame_skip),
            "decimation": int(env.frame_skip),
            "sim_dt": float(model.opt.timestep),
        },
        "entities": [entity] if joints else [],
    }


def _changes_actions(env: Any) -> bool:
    """Whether a Gymnasium wrapper stands between the actions and the environment."""
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, gymnasium.ActionWrapper):
            return True
        env = env.env
    return False


def _check_space(role: str, space: spaces.Space, *, allow_dict: bool) -> None:
    if allow_dict and isinstance(space, spaces.Dict):
        for name, entry in space.spaces.items():
            _check_space(f"{role} {name!r}", entry, allow_dict=True)
        return
    if not isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        expected = "Box, Discrete, MultiDiscrete, MultiBinary" + (" or Dict of these" if allow_dict else "")
        raise ValueError(
            f"The {role} space is {space}; expected {expected}. Convert it with a gymnasium wrapper first, for example "
            "FlattenObservation."
        )
    if isinstance(space, spaces.Discrete) and space.start != 0:
        raise ValueError(f"The {role} space {space} starts at {space.start}; expected one that starts at 0.")


def _read_dict(observation: Mapping[str, Any], spec: Composite) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, leaf in spec.items():
        # TorchRL calls a lone "state" entry "observation".
        value = observation[key] if key in observation else observation["state"]
        if isinstance(leaf, Composite):
            out[key] = TensorDict(_read_dict(value, leaf), batch_size=leaf.shape)
        else:
            out[key] = torch.tensor(value, dtype=leaf.dtype).reshape(leaf.shape)
    return out
