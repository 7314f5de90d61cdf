"""The runtime state of Gymnasium environments, as plain containers and tensors.

The state of a Python environment is the set of its attributes. They are encoded without pickle, so that a checkpoint
can be read safely. Whatever is not understood makes the whole state inexact, never silently partial.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

__all__ = ["VECTOR_STATE", "OpaqueStateError", "decode", "encode", "load_env", "save_env"]

# What a vector environment remembers beside its environments.
VECTOR_STATE = ("_env_obs", "_observations", "_rewards", "_terminations", "_truncations", "_autoreset_envs")
# Constructor arguments that Gymnasium keeps to rebuild an environment.
_CONSTRUCTOR_ARGUMENTS = frozenset({"_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs"})
_MUJOCO_ATTRIBUTES = frozenset({("model", "MjModel"), ("data", "MjData")})
_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
_STRUCTURE = (gymnasium.Env, spaces.Space, gymnasium.envs.registration.EnvSpec, *_CODE)
_DRAWING_MODULES = ("pygame", "gymnasium.envs.mujoco.mujoco_rendering")


class OpaqueStateError(Exception):
    """Some state cannot be encoded."""


def encode(value: Any) -> Any:
    """A value as plain containers and tensors.

    Raises:
        OpaqueStateError: for what is not understood.

    Examples:
        >>> decode(encode({"steps": 3, "goal": np.array([1.0, 2.0])}))
        {'steps': 3, 'goal': array([1., 2.])}
    """
    if value is None or type(value) in (bool, float, str):
        return value
    if type(value) is int:
        # The counters of numpy's generators have 128 bits; checkpoints hold 64.
        return value if abs(value) < 2**63 else {"kind": "int", "value": str(value)}
    if type(value) is list:
        return [encode(item) for item in value]
    if type(value) is tuple:
        return tuple(encode(item) for item in value)
    if isinstance(value, (np.ndarray, np.generic)):
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        try:
            return {"kind": kind, "value": torch.tensor(np.array(value, order="C"))}
        except TypeError as error:
            raise OpaqueStateError(f"array of {value.dtype}") from error
    if isinstance(value, Tensor):
        return {"kind": "tensor", "value": value.detach().clone()}
    if isinstance(value, dict):
        return {"kind": "dict", "items": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, deque):
        return {"kind": "deque", "maxlen": value.maxlen, "items": [encode(item) for item in value]}
    if isinstance(value, np.random.Generator):
        return {"kind": "generator", "value": encode(value.bit_generator.state)}
    raise OpaqueStateError(f"{type(value).__module__}.{type(value).__qualname__}")


def decode(value: Any) -> Any:
    """What ``encode`` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if isinstance(value, tuple):
        return tuple(decode(item) for item in value)
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
        return {decode(key): decode(item) for key, item in value["items"]}
    if kind == "deque":
        return deque((decode(item) for item in value["items"]), maxlen=value["maxlen"])
    if kind == "generator":
        state = decode(value["value"])
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


def save_env(env: gymnasium.Env) -> dict[str, Any]:
    """The state of an environment and of the wrappers around it.

    Raises:
        OpaqueStateError: if an attribute is not understood.
    """
    layers = []
    for layer in _layers(env):
        attributes = {
            name: encode(value)
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


def load_env(env: gymnasium.Env, saved: Mapping[str, Any]) -> None:
    """Restores what ``save_env`` returned.

    Raises:
        ValueError: if the environment is built from other wrappers.
    """
    layers = list(_layers(env))
    expected, found = [type(layer).__name__ for layer in layers], [layer["type"] for layer in saved["layers"]]
    if expected != found:
        raise ValueError(
            f"The saved state is of an environment built as {found}, this one is {expected}. Build it with the id and "
            "options of the saved run."
        )
    for layer, entry in zip(layers, saved["layers"], strict=True):
        for name, value in entry["attributes"].items():
            setattr(layer, name, decode(value))
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
        raise OpaqueStateError("MuJoCo plugin data")
    # Arrays whose size changes (contacts, constraints) live in the arena and are rebuilt by every step.
    empty = mujoco.MjData(data.model)
    arrays = {}
    for name in dir(data):
        value = None if name.startswith("_") else getattr(data, name)
        if isinstance(value, np.ndarray) and value.size and value.shape == getattr(empty, name).shape:
            arrays[name] = torch.tensor(value)
    return {"time": data.time, "arrays": arrays}
