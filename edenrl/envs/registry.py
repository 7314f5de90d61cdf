"""Environments by name."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import gymnasium
import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase, IsaacLabWrapper, MJLabEnv, TransformedEnv

from edenrl.envs.make_gym import make_gym_env
from edenrl.envs.random_start import SimulatorClock
from edenrl.envs.transforms import FillFinalObservation

__all__ = ["make_env", "register_env", "registered_envs"]

EnvFactory = Callable[..., EnvBase | gymnasium.Env]

_FACTORIES = (
    "A factory takes num_envs and the keywords device and seed; one that returns a single Gymnasium environment takes "
    "none of the three."
)
# Lower-case name -> (name as registered, factory).
_REGISTRY: dict[str, tuple[str, EnvFactory]] = {}


def register_env(name: str, factory: EnvFactory | None = None, *, override: bool = False) -> Any:
    """Make an environment available to ``make_env`` under a name.

    Args:
        name: The name; upper and lower case are the same. It must not contain a colon.
        factory: ``factory(num_envs, *, device, seed, **kwargs) -> EnvBase`` with batch size ``[num_envs]``: a class or
            a function. Or a Gymnasium environment, ``factory(**kwargs) -> gymnasium.Env``, of which ``num_envs`` copies
            are made. Omit it to use ``register_env(name)`` as a decorator.
        override: Replace an earlier registration. Default False.

    Returns:
        The factory, or a decorator that returns it.

    Raises:
        ValueError: the name is taken and ``override`` is False, or it is empty or contains a colon.

    Examples:
        >>> from edenrl.envs import PointMass, make_env, register_env
        >>> @register_env("ShortPointMass", override=True)
        ... def short(num_envs, *, device, seed):
        ...     return PointMass(num_envs, device=device, seed=seed, max_steps=10)
        >>> make_env("shortpointmass", num_envs=2).max_steps
        10
    """
    key = name.lower()
    if not name or ":" in name:
        raise ValueError(f"{name!r} cannot be registered; expected a name without ':' (prefixes are reserved).")
    if key in _REGISTRY and not override:
        raise ValueError(
            f"An environment named {_REGISTRY[key][0]!r} is already registered; {name!r} needs another name, or pass "
            "override=True to replace it."
        )

    def register(function: EnvFactory) -> EnvFactory:
        _REGISTRY[key] = (name, function)
        return function

    return register if factory is None else register(factory)


def registered_envs() -> list[str]:
    """Names given to ``register_env``, sorted.

    Examples:
        >>> from edenrl.envs import registered_envs
        >>> "PointMass" in registered_envs()
        True
    """
    return sorted(name for name, _ in _REGISTRY.values())


def make_env(
    name: str, num_envs: int, device: torch.device | str = "cpu", seed: int | None = None, **kwargs: Any
) -> EnvBase:
    """Build a batch of environments from a name.

    Args:
        name: In this order: a registered name (any case); ``mjlab:<task>``; ``isaaclab:<task>`` (with Isaac's app
            launched before); ``<module>:<factory>``, a class or function as ``register_env`` takes it, in an installed
            module or one in the working directory; ``<module>:<id>``, a Gymnasium id that this module registers;
            ``gym:<id>`` or a bare Gymnasium id.
        num_envs: Number of environments, at least 1.
        device: Device of the tensors. Default ``"cpu"``.
        seed: Seed of the environment's own generator. Default: the environment's choice.
        kwargs: Passed to the factory; for Gymnasium see ``edenrl.envs.make_gym_env``.

    Returns:
        An environment with batch size ``[num_envs]`` that keeps the true last observation of every episode in
        ``("next", ...)`` and resets rows through ``"_reset"``. Isaac Lab is the exception: it cannot leave its resets
        to the caller and hides the last observation; the one acted on stands in for it, see ``FillFinalObservation``.

    Raises:
        ValueError: ``num_envs`` below 1, an unknown name (the message lists the closest), a class that is no
            environment, or an argument that the environment's constructor does not take.
        ImportError: a package is missing; the message says how to install it.

    Examples:
        >>> from edenrl.envs import make_env
        >>> make_env("PointMass", num_envs=4, seed=0).batch_size
        torch.Size([4])
        >>> make_env("gym:CartPole-v1", num_envs=2).reset()["observation"].shape
        torch.Size([2, 4])
    """
    if not isinstance(num_envs, int) or isinstance(num_envs, bool) or num_envs < 1:
        raise ValueError(f"num_envs={num_envs!r} was given for {name!r}; expected a whole number, at least 1.")
    env = _build(name, num_envs, device, seed, kwargs)
    if not isinstance(env, EnvBase) or env.batch_size != (num_envs,):
        found = f"batch size {list(env.batch_size)}" if isinstance(env, EnvBase) else f"a {type(env).__name__}"
        raise ValueError(
            f"The factory of {name!r} returned {found}; expected an EnvBase of batch size [{num_envs}]. {_FACTORIES}"
        )
    return env


def _build(name: str, num_envs: int, device: torch.device | str, seed: int | None, kwargs: dict[str, Any]) -> EnvBase:
    if name.lower() in _REGISTRY:
        return _call(name, _REGISTRY[name.lower()][1], num_envs, device, seed, kwargs)
    module, colon, rest = name.partition(":")
    prefix = module.lower()
    if colon and prefix in ("mjlab", "isaaclab"):
        _refuse_vectorization(name, kwargs)
    if colon and prefix == "mjlab":
        return _make_mjlab(rest, num_envs, device, seed, kwargs)
    if colon and prefix == "isaaclab":
        return _make_isaaclab(rest, num_envs, device, seed, kwargs)
    env_id = rest if colon and prefix == "gym" else name
    module, colon, attribute = env_id.partition(":")
    if not colon:
        _check_gymnasium_id(name, env_id)
        return _make_gymnasium(name, env_id, num_envs, device, seed, kwargs)
    found = getattr(_import_module(name, module), attribute, None)
    if callable(found):
        return _call(name, found, num_envs, device, seed, kwargs)
    if attribute in gymnasium.registry:
        return _make_gymnasium(name, env_id, num_envs, device, seed, kwargs)
    names = [key for key, value in vars(sys.modules[module]).items() if callable(value) and not key.startswith("_")]
    close = difflib.get_close_matches(attribute, [*names, *gymnasium.registry], n=5, cutoff=0.5)
    raise ValueError(
        f"Unknown environment {name!r}: {module!r} has no function or class {attribute!r} and registers no such "
        f"Gymnasium id. Closest names: {', '.join(close) or 'none'}."
    )


def _call(
    name: str, factory: EnvFactory, num_envs: int, device: torch.device | str, seed: int | None, kwargs: dict[str, Any]
) -> EnvBase:
    """Build from a factory of this library or one of single Gymnasium environments."""
    _refuse_other_class(name, factory)
    if _makes_one_environment(factory):
        return _make_gymnasium(name, factory, num_envs, device, seed, kwargs)
    _check_arguments(name, factory, num_envs, device, seed, kwargs)
    return factory(num_envs, device=device, seed=seed, **kwargs)


def _refuse_other_class(name: str, factory: Any) -> None:
    """Refuses a class that is no environment."""
    if isinstance(factory, type) and not issubclass(factory, (EnvBase, gymnasium.Env)):
        raise ValueError(
            f"{name!r} is the class {factory.__qualname__}, which is no environment; expected a subclass of TorchRL's "
            "EnvBase or of gymnasium.Env, or a function that returns one."
        )


def _makes_one_environment(factory: EnvFactory) -> bool:
    """Whether it is a Gymnasium class, or a function that does not ask for what a factory of this library is given."""
    if isinstance(factory, type):
        return issubclass(factory, gymnasium.Env)
    parameters = list(inspect.signature(factory).parameters.values())
    if {"num_envs", "device", "seed"} & {parameter.name for parameter in parameters}:
        return False
    kinds = {parameter.kind for parameter in parameters}
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return False
    # `def reacher(n, **kwargs)` asks for a number; `def reacher(width=2, **kwargs)` does not.
    first = parameters[0] if parameters else None
    asks = first is not None and first.kind is first.POSITIONAL_OR_KEYWORD and first.default is first.empty
    return not (asks and inspect.Parameter.VAR_KEYWORD in kinds)


def _make_gymnasium(
    name: str,
    env: str | EnvFactory,
    num_envs: int,
    device: torch.device | str,
    seed: int | None,
    kwargs: dict[str, Any],
) -> EnvBase:
    try:
        return make_gym_env(env, num_envs, device=device, seed=seed, **kwargs)
    except (ImportError, ValueError):
        raise
    except gymnasium.error.DependencyNotInstalled as error:
        raise ImportError(f"{name!r} needs a package that is not installed: {error}") from error
    except Exception as error:  # whatever a constructor makes of its arguments; the cause stays attached
        if "unexpected keyword argument" in str(error):
            raise ValueError(f"{name!r} does not take the arguments {kwargs}: {error}") from error
        what = f"with the arguments {kwargs}" if kwargs else "here"
        raise ValueError(f"{name!r} cannot be built {what}: {type(error).__name__}: {error}") from error


def _refuse_vectorization(name: str, kwargs: dict[str, Any]) -> None:
    if "vectorization" in kwargs:
        raise ValueError(
            f"{name!r} steps its environments together as one batch: --env.vectorization {kwargs['vectorization']} is "
            "for Gymnasium ids. Leave it out."
        )


def _import_module(name: str, module: str) -> ModuleType:
    """The module of an environment's name; one beside the caller is found as ``python -m`` finds it."""
    here = os.getcwd()
    if here not in sys.path:
        # Last, so that a file in the working directory hides no installed package.
        sys.path.append(here)
    if not all(module.split(".")):
        raise ValueError(
            f"Unknown environment {name!r}: {module!r} is no module name. Expected <module>:<factory>, such as "
            "my_robots:reacher for the function reacher in my_robots.py."
        )
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise ValueError(
            f"Unknown environment {name!r}: there is no module {module!r} in {here} or among the installed packages. "
            "Expected <module>:<factory>, with the module importable from here."
        ) from error


def _check_arguments(name: str, factory: EnvFactory, *call: Any) -> None:
    num_envs, device, seed, kwargs = call
    # The metaclass of EnvBase hides the constructor's own signature.
    function: Any = factory.__init__ if isinstance(factory, type) else factory  # type: ignore[misc]
    signature = inspect.signature(function)
    try:
        signature.bind(*([] if function is factory else [None]), num_envs, device=device, seed=seed, **kwargs)
    except TypeError as error:
        _refuse_vectorization(name, kwargs)
        raise ValueError(
            f"The factory of {name!r} takes {signature} and was called with {['num_envs', 'device', 'seed', *kwargs]}: "
            f"{error}. {_FACTORIES} What else it takes goes in as keyword arguments (env.kwargs of a run)."
        ) from error


def _check_gymnasium_id(name: str, env_id: str) -> None:
    try:
        gymnasium.spec(env_id)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        known = [*registered_envs(), *gymnasium.registry]
        spelling = {candidate.lower(): candidate for candidate in known}
        close = [spelling[match] for match in difflib.get_close_matches(env_id.lower(), spelling, n=5, cutoff=0.5)]
        raise ValueError(
            f"Unknown environment {name!r}. Closest names: {', '.join(close) or 'none'}. Registered: "
            f"{', '.join(registered_envs())}. Otherwise expected a Gymnasium id, gym:<id>, mjlab:<task>, "
            "isaaclab:<task> or <module>:<factory>."
        ) from error


class _FreshMJLabEnv(SimulatorClock, MJLabEnv):
    """mjlab writes its rewards and flags into the same buffers every step, so each step is copied."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super()._step(tensordict).clone()

    def _simulator(self) -> Any:
        return self._env


class _FreshIsaacLabEnv(SimulatorClock, IsaacLabWrapper):
    """Isaac Lab reuses its buffers as mjlab does."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super()._step(tensordict).clone()

    def _simulator(self) -> Any:
        return self._env


def _require(package: str, name: str, hint: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"{name!r} needs the {package} package, which is not installed: {hint}")


def _make_mjlab(
    task: str, num_envs: int, device: torch.device | str, seed: int | None, kwargs: dict[str, Any]
) -> EnvBase:
    _require("mjlab", f"mjlab:{task}", "pip install mjlab")
    env = _FreshMJLabEnv(task, num_envs=num_envs, device=device, native_autoreset=False, **kwargs)
    if seed is not None:
        env.set_seed(seed)
    return env


def _make_isaaclab(
    task: str, num_envs: int, device: torch.device | str, seed: int | None, kwargs: dict[str, Any]
) -> EnvBase:
    hint = "see https://isaac-sim.github.io/IsaacLab for its installation"
    _require("isaaclab_tasks", f"isaaclab:{task}", hint)
    tasks = importlib.import_module("isaaclab_tasks.utils")

    cfg = tasks.parse_env_cfg(task, device=str(device), num_envs=num_envs)
    if seed is not None:
        cfg.seed = seed
    env = _FreshIsaacLabEnv(
        gymnasium.make(task, cfg=cfg, **kwargs), device=torch.device(device), native_autoreset=False
    )
    # Isaac Lab resets inside `step`; TorchRL's wrapper writes NaN where the last observation would be.
    return TransformedEnv(env, FillFinalObservation(), auto_unwrap=True)
