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
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Composite, TensorSpec, Unbounded
from torchrl.envs.libs.gym import GymWrapper

from edenrl.envs.groups import SameStateGroups
from edenrl.envs.gym_observation import GymObservation
from edenrl.envs.gym_state import VECTOR_STATE, OpaqueStateError, decode, encode, load_env, save_env
from edenrl.envs.seeds import chosen_seed, spawn_seeds

__all__ = ["GymVectorEnv"]

_logger = logging.getLogger(__name__)


class GymVectorEnv(SameStateGroups, GymWrapper):
    """TorchRL's ``GymWrapper`` over a Gymnasium vector environment, with the true last observation of every episode.

    What it adds: every tensor is a copy (Gymnasium may reuse its arrays); step infos are not read, which saves time;
    categorical actions are integers ``[N]``; the first step checks the flags the environment returns; and
    ``state_dict()`` holds the runtime state, so a run continues bit for bit.

    Observations become groups, root keys that networks can read: ``observation`` ``[N, d]``, or one for each entry of a
    ``Dict`` space. A nested entry is named by its path, such as ``robot.q``. Vectors are float32, of integers too.
    ``Discrete`` and ``MultiDiscrete`` are one-hot. Images keep shape and type.

    Other keys, for ``N`` environments:
    ``action`` ``[N, a]``, or ``[N]`` when discrete; ``("next", "reward")``, ``("next", "done")``,
    ``("next", "terminated")``, ``("next", "truncated")`` ``[N, 1]``. ``("next", ...)`` at the end of an episode is its
    true last observation; ``step_and_maybe_reset`` and collectors then reset just those rows.

    ``set_seed(s)`` gives every sub-environment its own seed (``edenrl.envs.spawn_seeds``). Gymnasium's own seeds
    ``s + i`` would make vectors of neighbouring seeds share most of their episodes.

    With groups (``edenrl.envs.set_group_size``) a full reset seeds the members of each group alike. They then share
    more than their first state: randomness inside the simulation, later resets included, comes from equal generators.

    The runtime state is exact when every sub-environment of a ``SyncVectorEnv`` keeps its state in plain attributes,
    numpy arrays and generators, or in MuJoCo's ``MjData``. Otherwise (sub-processes, Box2D, unknown objects)
    ``state_dict()`` says ``{"exact": False}`` and loading it warns that episodes start anew. MuJoCo *model* values
    changed while running are not part of it.

    Args:
        env: A vector environment, wrapped or not, built with ``autoreset_mode=AutoresetMode.DISABLED``, or with
            ``SAME_STEP``: then the last observations come from ``infos["final_obs"]``.
        device: Device of the returned tensors. Default: CPU.
        seed: As in ``set_seed(seed)``. Default: the environments' own choice.
        kwargs: Passed to TorchRL's ``GymWrapper``.

    Raises:
        TypeError: ``env`` is not a Gymnasium vector environment.
        ValueError: one of its spaces is not supported, a group has a name that is taken, or ``env`` resets ended rows
            in the next step (``NEXT_STEP``, Gymnasium's default).

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

    # Otherwise TorchRL wraps a vector that resets itself in its own transform.
    _is_batched = False

    def __init__(
        self,
        env: VectorEnv,
        *,
        device: torch.device | str | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(env, VectorEnv):
            raise TypeError(
                f"GymVectorEnv wraps a gymnasium.vector.VectorEnv, but {type(env).__name__} was given. Use "
                "make_gym_env(id, num_envs) to build one."
            )
        # Wrappers pass on the metadata, not the attribute.
        mode = env.metadata.get("autoreset_mode", getattr(env, "autoreset_mode", None))
        if mode not in (AutoresetMode.DISABLED, AutoresetMode.SAME_STEP):
            raise ValueError(
                f"The metadata of {env} say autoreset_mode={mode}; expected AutoresetMode.DISABLED or SAME_STEP: any "
                "other has steps that ignore the action. Build it with autoreset_mode=AutoresetMode.DISABLED."
            )
        _check_action_space(env.single_action_space)
        self._observations = GymObservation(env)
        super().__init__(
            env, categorical_action_encoding=True, device=torch.device("cpu" if device is None else device), **kwargs
        )
        self._resets_itself = mode == AutoresetMode.SAME_STEP
        self._flags_checked = False
        self._group_seeds = np.random.default_rng()
        # Where the rows stand now; those that wait have reset themselves, and hand it out when TorchRL resets them.
        self._current: dict[str, Tensor] = {}
        self._waiting = torch.zeros(self.batch_size, dtype=torch.bool)
        if seed is not None:
            self.set_seed(seed)

    def _make_specs(self, env: VectorEnv, batch_size: torch.Size | None = None) -> None:
        super()._make_specs(env, batch_size)
        self.observation_spec = self._observations.spec(self.device)
        if self.action_spec.dtype == torch.float64:
            self.action_spec = self.action_spec.to(torch.float32)
        self.reward_spec = Unbounded((*self.batch_size, 1), device=self.device, dtype=torch.float32)

    def _set_seed(self, seed: int | None) -> None:
        seed = chosen_seed(seed)
        seeds = spawn_seeds(seed, self.batch_size.numel())
        # Only Gymnasium's own vectors take one seed per environment; others share one stream among their rows.
        takes_list = isinstance(self._env.unwrapped, (SyncVectorEnv, AsyncVectorEnv))
        self._restart(None, seed=seeds if takes_list else seeds[0])
        self._group_seeds = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0,)))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDict:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None or not self._current:
            if self.group_size > 1:
                seeds = self._group_seeds.integers(2**31, size=self.batch_size.numel() // self.group_size)
                kwargs["seed"] = seeds.repeat(self.group_size).tolist()
            self._restart(None, **kwargs)
        else:
            rows = mask.reshape(self.batch_size).cpu()
            running = rows & ~self._waiting
            if bool(running.any()):  # Gymnasium refuses to reset no row
                self._restart(running, **kwargs)
            self._waiting = self._waiting & ~rows
        return self._pack(self._current)

    def _restart(self, rows: Tensor | None, **kwargs: Any) -> None:
        """Reset all rows (None) or some ``[N]``."""
        if rows is not None:
            kwargs["options"] = {**(kwargs.get("options") or {}), "reset_mask": rows.numpy()}
        observation = self._observations.read(self._env.reset(**kwargs)[0], self.batch_size.numel())
        if rows is None:
            self._current, self._waiting = observation, torch.zeros_like(self._waiting)
        else:
            self._current = _where(rows, observation, self._current)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        action = tensordict.get(self.action_key).detach().cpu().numpy()
        observation, reward, terminated, truncated, info = self._env.step(action)
        if not self._flags_checked:
            self._check_flag("terminated", terminated)
            self._check_flag("truncated", truncated)
            self._flags_checked = True
        self._current = self._observations.read(observation, self.batch_size.numel())
        done = torch.tensor(terminated | truncated)
        last = self._current
        if self._resets_itself:
            self._waiting = done
            if bool(done.any()):
                last = self._last_observations(info, done)
        out = self._pack(last)
        out["reward"] = torch.tensor(reward, dtype=torch.float32, device=self.device).unsqueeze(-1)
        flags = {"done": done, "terminated": torch.tensor(terminated), "truncated": torch.tensor(truncated)}
        return out.update({name: flag.unsqueeze(-1) for name, flag in flags.items()})

    def _last_observations(self, info: Any, ended: Tensor) -> dict[str, Tensor]:
        """The current observations, with the last ones of their episodes in the rows that ended."""
        final = info.get("final_obs") if isinstance(info, Mapping) else None
        if isinstance(final, np.ndarray) and final.dtype == object:  # one entry per environment, None where it runs on
            given = {row: final[row] for row in ended.nonzero().flatten().tolist() if final[row] is not None}
            last = {name: value.clone() for name, value in self._current.items()}
            for row, observation in given.items():
                for name, value in self._observations.read(observation, 1).items():
                    last[name][row] = value[0]
            if len(given) == int(ended.sum()):
                return last
        elif final is not None:
            return _where(ended, self._observations.read(final, self.batch_size.numel()), self._current)
        raise ValueError(
            f"{self._env} resets itself (autoreset_mode SAME_STEP) and gave no infos['final_obs'] for an episode that "
            "ended. Let it give the last observations, or build it with autoreset_mode=AutoresetMode.DISABLED."
        )

    def _pack(self, groups: dict[str, Tensor]) -> TensorDict:
        """The groups as copies: what is handed out may be written to."""
        copies = {name: value.clone() for name, value in groups.items()}
        return TensorDict(copies, batch_size=self.batch_size, device=self.device)

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
                "waiting": encode(self._waiting),
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
        # Checkpoints from before vectors that reset themselves were accepted have no such entry.
        self._waiting = decode(state["waiting"]) if "waiting" in state else torch.zeros_like(self._waiting)
        self._current = self._observations.read(vector._observations, vector.num_envs)


def _where(rows: Tensor, chosen: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``chosen`` in the rows ``[N]`` that are true, ``other`` elsewhere."""
    return {
        name: torch.where(rows.reshape(-1, *[1] * (value.dim() - 1)), value, other[name])
        for name, value in chosen.items()
    }


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


def _check_action_space(space: spaces.Space) -> None:
    if not isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        raise ValueError(
            f"The action space is {space}; expected Box, Discrete, MultiDiscrete or MultiBinary. Convert it with "
            "gymnasium.wrappers.TransformAction first."
        )
    if isinstance(space, spaces.Discrete) and space.start != 0:
        raise ValueError(f"The action space {space} starts at {space.start}; expected one that starts at 0.")
