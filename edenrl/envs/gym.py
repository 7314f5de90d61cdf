"""Gymnasium vector environments with true final observations and exact resume."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import signal
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

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

__all__ = ["GymVectorEnv", "make_gym_env"]

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
            return _mujoco_contract(env)
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
            bookkeeping = {name: _encode(getattr(vector, name)) for name in _VECTOR_STATE}
            return {
                "exact": True,
                "vector": bookkeeping,
                "envs": [_save_env(env) for env in vector.envs],
                "group_seeds": _encode(self._group_seeds),
            }
        except _OpaqueStateError as error:
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
            _load_env(env, saved)
        for name, value in state["vector"].items():
            setattr(vector, name, _decode(value))
        self._group_seeds = _decode(state["group_seeds"])


def make_gym_env(
    env_id: str,
    num_envs: int,
    *,
    vectorization: Literal["sync", "async"] = "sync",
    device: torch.device | str | None = None,
    seed: int | None = None,
    **env_kwargs: Any,
) -> GymVectorEnv:
    """Build ``num_envs`` copies of a Gymnasium environment as one ``GymVectorEnv``.

    Args:
        env_id: Gymnasium id, such as ``"HalfCheetah-v5"``.
        num_envs: Number of copies, at least 1.
        vectorization: ``"sync"`` steps them in this process, which is fastest for cheap environments and can be resumed
            exactly; ``"async"`` gives each its own process. Default ``"sync"``.
        device: Device of the returned tensors. Default: CPU.
        seed: Seed of the first copy; copy ``i`` gets ``seed + i``. Default: drawn from torch's global generator, so
            that ``torch.manual_seed`` makes a run repeatable.
        env_kwargs: Passed to ``gymnasium.make``.

    Returns:
        The environment, batch size ``[num_envs]``.

    Raises:
        ValueError: ``num_envs`` below 1, or an unknown ``vectorization``.
        ImportError: the environment needs ``mujoco`` and it is not installed.

    Examples:
        >>> from edenrl.envs import make_gym_env
        >>> env = make_gym_env("Pendulum-v1", 2, seed=0, g=9.0)
        >>> env.batch_size, env.action_spec.space.high.tolist()
        (torch.Size([2]), [[2.0], [2.0]])
    """
    if num_envs < 1:
        raise ValueError(f"num_envs={num_envs} was given for {env_id!r}; expected at least 1.")
    if vectorization not in ("sync", "async"):
        raise ValueError(f"vectorization={vectorization!r} was given; expected 'sync' or 'async'.")
    needs_mujoco = "mujoco" in str(gymnasium.spec(env_id).entry_point)
    if needs_mujoco and importlib.util.find_spec("mujoco") is None:
        raise ImportError(f'{env_id} needs the mujoco package, which is not installed: pip install "edenrl[mujoco]"')
    copies: list[Callable[[], gymnasium.Env]] = [
        functools.partial(_make_one, env_id, needs_mujoco, env_kwargs, os.getpid()) for _ in range(num_envs)
    ]
    vector: VectorEnv
    if vectorization == "sync":
        # copy=False: GymVectorEnv copies every array into a tensor anyway.
        vector = _QuietSyncVectorEnv(copies, copy=False, autoreset_mode=AutoresetMode.DISABLED)
    else:
        vector = AsyncVectorEnv(copies, copy=False, autoreset_mode=AutoresetMode.DISABLED)
    env = GymVectorEnv(vector, device=device)
    env.set_seed(int(torch.randint(2**31 - 1, ()).item()) if seed is None else seed)
    return env


class _QuietSyncVectorEnv(SyncVectorEnv):
    """A ``SyncVectorEnv`` that does not merge infos: nobody reads them, and merging costs up to a tenth of a step."""

    def _add_info(self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int) -> dict[str, Any]:
        return vector_infos


def _make_one(env_id: str, uses_mujoco: bool, kwargs: dict[str, Any], owner: int) -> gymnasium.Env:
    if os.getpid() != owner:
        # A terminal sends Ctrl-C to every process of a run; its owner decides when this one ends.
        # SIGTERM is what Gymnasium itself ends it with; a group of its own keeps the one away that is sent to all.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if hasattr(os, "setpgid"):
            os.setpgid(0, 0)
    if not uses_mujoco:
        return gymnasium.make(env_id, **kwargs)
    with _without_mass_warning():
        return gymnasium.make(env_id, **kwargs)


@contextmanager
def _without_mass_warning() -> Iterator[None]:
    """Drop MuJoCo's warning about ``settotalmass``, an attribute of Gymnasium's own model files.

    MuJoCo would print it for every copy and append it to a file in the working directory. Other warnings are logged.
    """
    import mujoco

    def report(message: str | bytes) -> None:
        text = message.decode() if isinstance(message, bytes) else message
        if "settotalmass" not in text:
            _logger.warning("mujoco: %s", text)

    previous = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(report)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(previous)


def _mujoco_contract(env: Any) -> dict[str, Any]:
    import mujoco

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
            "clip": bool(model.actuator_ctrllimited.all()),
            "names": driven,
            "meaning": "controls of MuJoCo's actuators, in the model's order",
        },
        "rate": {
            "control_dt": float(model.opt.timestep * env.frame_skip),
            "decimation": int(env.frame_skip),
            "sim_dt": float(model.opt.timestep),
        },
        "entities": [entity] if joints else [],
    }


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


# ---- runtime state -------------------------------------------------------------------------------------------------
# The state of a Python environment is the set of its attributes. Values are encoded as plain containers and tensors, so
# that a checkpoint needs no pickle; whatever is not understood makes the whole state inexact, never silently partial.

_VECTOR_STATE = ("_env_obs", "_observations", "_rewards", "_terminations", "_truncations", "_autoreset_envs")
# Constructor arguments that Gymnasium keeps to rebuild an environment.
_CONSTRUCTOR_ARGUMENTS = frozenset({"_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs"})
_MUJOCO_ATTRIBUTES = frozenset({("model", "MjModel"), ("data", "MjData")})
_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
_STRUCTURE = (gymnasium.Env, spaces.Space, gymnasium.envs.registration.EnvSpec, *_CODE)
_DRAWING_MODULES = ("pygame", "gymnasium.envs.mujoco.mujoco_rendering")


class _OpaqueStateError(Exception):
    """Some state cannot be encoded."""


def _encode(value: Any) -> Any:
    if value is None or type(value) in (bool, float, str):
        return value
    if type(value) is int:
        # The counters of numpy's generators have 128 bits; checkpoints hold 64.
        return value if abs(value) < 2**63 else {"kind": "int", "value": str(value)}
    if type(value) is list:
        return [_encode(item) for item in value]
    if type(value) is tuple:
        return tuple(_encode(item) for item in value)
    if isinstance(value, (np.ndarray, np.generic)):
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        try:
            return {"kind": kind, "value": torch.tensor(np.array(value, order="C"))}
        except TypeError as error:
            raise _OpaqueStateError(f"array of {value.dtype}") from error
    if isinstance(value, Tensor):
        return {"kind": "tensor", "value": value.detach().clone()}
    if isinstance(value, dict):
        return {"kind": "dict", "items": [[_encode(key), _encode(item)] for key, item in value.items()]}
    if isinstance(value, deque):
        return {"kind": "deque", "maxlen": value.maxlen, "items": [_encode(item) for item in value]}
    if isinstance(value, np.random.Generator):
        return {"kind": "generator", "value": _encode(value.bit_generator.state)}
    raise _OpaqueStateError(f"{type(value).__module__}.{type(value).__qualname__}")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    kind = value["kind"]
    if kind == "int":
        return int(value["value"])
    if kind == "array":
        return value["value"].cpu().numpy().copy()
    if kind == "scalar":
        return value["value"].cpu().numpy()[()]
    if kind == "tensor":
        return value["value"].clone()
    if kind == "dict":
        return {_decode(key): _decode(item) for key, item in value["items"]}
    if kind == "deque":
        return deque((_decode(item) for item in value["items"]), maxlen=value["maxlen"])
    if kind == "generator":
        state = _decode(value["value"])
        bit_generator = getattr(np.random, state["bit_generator"])()
        bit_generator.state = state
        return np.random.Generator(bit_generator)
    raise ValueError(f"unknown kind {kind!r} in the saved environment state; expected a state of this version.")


def _layers(env: gymnasium.Env) -> Iterator[gymnasium.Env]:
    """The wrapper chain, outermost first, ending with the environment itself."""
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
    yield env


def _save_env(env: gymnasium.Env) -> dict[str, Any]:
    layers = []
    for layer in _layers(env):
        attributes = {
            name: _encode(value)
            for name, value in vars(layer).items()
            if name not in _CONSTRUCTOR_ARGUMENTS and not _is_structure(name, value)
        }
        layers.append({"type": type(layer).__name__, "attributes": attributes})
    return {"layers": layers, "mujoco": _save_mujoco(env.unwrapped)}


def _is_structure(name: str, value: Any) -> bool:
    kind = type(value)
    # `data` is saved by _save_mujoco.
    is_mujoco = kind.__module__.startswith("mujoco.") and (name, kind.__name__) in _MUJOCO_ATTRIBUTES
    return is_mujoco or isinstance(value, _STRUCTURE) or kind.__module__.startswith(_DRAWING_MODULES)


def _load_env(env: gymnasium.Env, saved: Mapping[str, Any]) -> None:
    layers = list(_layers(env))
    expected, found = [type(layer).__name__ for layer in layers], [layer["type"] for layer in saved["layers"]]
    if expected != found:
        raise ValueError(
            f"The saved state is of an environment built as {found}, this one is {expected}. Build it with the id and "
            "options of the saved run."
        )
    for layer, entry in zip(layers, saved["layers"], strict=True):
        for name, value in entry["attributes"].items():
            setattr(layer, name, _decode(value))
    if saved["mujoco"] is not None:
        data = vars(env.unwrapped)["data"]
        data.time = saved["mujoco"]["time"]
        for name, value in saved["mujoco"]["arrays"].items():
            np.copyto(getattr(data, name), value.cpu().numpy())


def _save_mujoco(env: gymnasium.Env) -> dict[str, Any] | None:
    """Save a MuJoCo environment's ``MjData``, or None.

    Not only the integration state: observations and rewards read derived arrays (body positions, contact forces), and
    MuJoCo leaves those one substep behind the joint positions, so recomputing them would give other numbers.
    """
    data: Any = vars(env).get("data")
    if type(data).__name__ != "MjData":
        return None
    import mujoco

    if data.model.nplugin:
        raise _OpaqueStateError("MuJoCo plugin data")
    # Arrays whose size changes (contacts, constraints) live in the arena and are rebuilt by every step.
    empty = mujoco.MjData(data.model)
    arrays = {}
    for name in dir(data):
        value = None if name.startswith("_") else getattr(data, name)
        if isinstance(value, np.ndarray) and value.size and value.shape == getattr(empty, name).shape:
            arrays[name] = torch.tensor(value)
    return {"time": data.time, "arrays": arrays}
