"""What an environment says about itself: observations, actions, rate and joints of the spec."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import ValidationError
from tensordict import NestedKey, unravel_key
from torchrl.data import Categorical, MultiCategorical, MultiOneHot, OneHot
from torchrl.envs import (
    ActionScaling,
    Compose,
    EnvBase,
    ObservationNorm,
    ParallelEnv,
    SerialEnv,
    Transform,
    TransformedEnv,
    VecNorm,
    VecNormV2,
)

from edenrl.envs import ClipAction, action_box
from edenrl.export.graph import PolicyGraph
from edenrl.export.spec import ActionContract, ActionSpec, EnvContract, ObservationSpec

__all__ = ["actions_of", "contract_of", "nominal_env", "observations_of"]


def _unwrap(env: EnvBase) -> tuple[EnvBase, list[Transform]]:
    """The innermost environment and the transforms around it, the one next to it first."""
    transforms: list[Transform] = []
    while isinstance(env, TransformedEnv | SerialEnv):
        if isinstance(env, TransformedEnv):
            transforms, env = [*_flat(env.transform), *transforms], env.base_env
        else:
            if env.is_closed:
                env.start()
            env = env._envs[0]  # all of them are alike
    if isinstance(env, ParallelEnv):
        raise ValueError(
            f"{type(env).__name__} keeps its environments in other processes, where what they declare and transform "
            "cannot be read. Export with one of them, or with a SerialEnv."
        )
    return env, transforms


def _flat(transform: Transform) -> list[Transform]:
    if isinstance(transform, Compose):
        return [part for inner in transform.transforms for part in _flat(inner)]
    return [transform]


def _path_to(key: NestedKey, transforms: list[Transform]) -> list[Transform]:
    """The transforms that a group has passed through, also where it had another name before."""
    keys = {key}
    path: list[Transform] = []
    for transform in reversed(transforms):
        ins, outs = ([unravel_key(k) for k in side or []] for side in (transform.in_keys, transform.out_keys))
        if not keys & set(outs):
            continue
        path.insert(0, transform)
        paired = len(ins) == len(outs)
        sources = {i for i, o in zip(ins, outs, strict=True) if o in keys} if paired else set(ins)
        keys = keys - set(outs) | sources
    return path


def contract_of(env: EnvBase) -> EnvContract:
    """What the innermost environment declares in ``policy_contract()``; empty when it has no such method.

    Raises:
        ValueError: if the declaration is not an ``EnvContract``, or if values in it are randomized per environment.
    """
    contract = _declared(env)
    if contract.randomized:
        raise ValueError(
            f"{type(_unwrap(env)[0]).__name__} randomizes {contract.randomized} per environment: no single policy spec "
            "is true of it. Export with nominal_env(env), which switches these randomizations off."
        )
    return contract


def _declared(env: EnvBase) -> EnvContract:
    base = _unwrap(env)[0]
    if not hasattr(base, "policy_contract"):
        return EnvContract()
    try:
        return EnvContract.model_validate(base.policy_contract())
    except ValidationError as error:
        raise ValueError(f"{type(base).__name__}.policy_contract() is not a valid EnvContract: {error}") from None


def nominal_env(env: EnvBase) -> EnvBase:
    """Switches off, in place, what an environment randomizes of the values a policy spec states.

    Args:
        env: an environment, transformed or not.

    Returns:
        The same environment.

    Raises:
        ValueError: if it declares randomized values and has no ``set_nominal()``, or still randomizes afterwards.

    Examples:
        >>> from edenrl.envs import PointMass
        >>> env = PointMass(2)
        >>> nominal_env(env) is env
        True
    """
    base = _unwrap(env)[0]
    names = _declared(env).randomized
    if names and not hasattr(base, "set_nominal"):
        raise ValueError(
            f"{type(base).__name__} randomizes {names} and has no set_nominal() to switch that off. Build it without "
            "these randomizations."
        )
    if names:
        base.set_nominal()
        if left := _declared(env).randomized:
            raise ValueError(f"{type(base).__name__}.set_nominal() left {left} randomized.")
    return env


def observations_of(graph: PolicyGraph, env: EnvBase, contract: EnvContract) -> list[ObservationSpec]:
    """The groups of ``obs``.

    Raises:
        ValueError: if a transform of the environment normalizes a group, or terms do not add up to its width.
    """
    transforms = _unwrap(env)[1]
    statistics = graph.statistics()
    out, start = [], 0
    for (key, shape), width in zip(graph.groups.items(), graph.widths, strict=True):
        name = key if isinstance(key, str) else ".".join(key)
        writers = _path_to(key, transforms)
        if norm := next((t for t in writers if isinstance(t, ObservationNorm | VecNorm | VecNormV2)), None):
            raise ValueError(
                f"The environment's transform {type(norm).__name__} normalizes {name!r}; an exported policy would miss "
                "it. Train with normalization inside the policy (normalize=True), which is exported with it."
            )
        terms = contract.observations.get(name, [])
        if terms and sum(term.width for term in terms) != width:
            raise ValueError(
                f"policy_contract() lists {sum(term.width for term in terms)} features for {name!r}, which has {width}."
            )
        out.append(
            ObservationSpec(
                key=name,
                start=start,
                stop=start + width,
                width=width,
                shape=list(shape),
                terms=terms,
                mean=None if statistics is None else _short(statistics[0][start : start + width]),
                std=None if statistics is None else _short(statistics[1][start : start + width]),
                transforms=[type(t).__name__ for t in writers],
            )
        )
        start += width
    return out


def actions_of(env: EnvBase, key: NestedKey, contract: ActionContract) -> ActionSpec:
    """What the environment and its transforms do with an action.

    Raises:
        TypeError: if the action is neither one vector nor one choice.
        ValueError: if the declared scale, bias or names do not fit the action.
    """
    base, transforms = _unwrap(env)
    leaf = env.action_spec_unbatched
    discrete = isinstance(leaf, Categorical | OneHot) and not isinstance(leaf, MultiCategorical | MultiOneHot)
    if not discrete and (len(leaf.shape) != 1 or not leaf.dtype.is_floating_point):
        raise TypeError(f"Expected a floating-point action vector or one discrete action to export, got {leaf}.")
    name = key if isinstance(key, str) else ".".join(key)
    on_action = [t for t in transforms if key in map(unravel_key, t.in_keys_inv or [])]
    common: dict[str, Any] = {"key": name, "unit": contract.unit, "meaning": contract.meaning, "names": contract.names}
    if discrete:
        others = [type(t).__name__ for t in on_action]
        return ActionSpec(kind="discrete", dim=int(leaf.space.n), transforms=others, **common)
    dim = int(leaf.shape[-1])
    given = {"scale": contract.scale, "bias": contract.bias, "names": contract.names}
    if wrong := {k: len(v) for k, v in given.items() if v is not None and len(v) != dim}:
        raise ValueError(f"policy_contract() declares actions with {wrong} entries; the action has {dim} components.")
    return ActionSpec(kind="continuous", dim=dim, **_treatment(base, dim, contract, on_action), **common)


def _treatment(base: EnvBase, dim: int, contract: ActionContract, on_action: list[Transform]) -> dict[str, Any]:
    """What the simulator and the transforms do with a continuous action, as fields of an ``ActionSpec``."""
    scale = torch.tensor(contract.scale or [1.0] * dim, dtype=torch.float64)
    bias = torch.tensor(contract.bias or [0.0] * dim, dtype=torch.float64)
    box = action_box(base)
    low, high = (torch.full((dim,), s) for s in (-torch.inf, torch.inf)) if box is None else (b.cpu() for b in box)
    clip, others = contract.clip, []
    # From the simulator outwards: each transform changes how box and scale look to those around it.
    for transform in on_action:
        if isinstance(transform, ClipAction):
            clip = True
        elif isinstance(transform, ActionScaling) and transform.standard_normal:
            loc, factor = transform.loc.cpu().double(), transform.scale.cpu().double()
            bias, scale = bias + scale * loc, scale * factor
            ends = torch.stack([(low - loc) / factor, (high - loc) / factor])
            low, high = ends.amin(0), ends.amax(0)
        else:
            others.append(type(transform).__name__)
    bounded = bool((low.isfinite() | high.isfinite()).any())
    return {
        "low": _finite(low) if bounded else None,
        "high": _finite(high) if bounded else None,
        "clip": clip and bounded,
        "scale": scale.tolist(),
        "bias": bias.tolist(),
        "transforms": others,
    }


def _short(values: torch.Tensor) -> list[float]:
    # Decimal values of float32 numbers: 0.4 and not 0.4000000059604645.
    return [float(f"{value:.7g}") for value in values.tolist()]


def _finite(values: torch.Tensor) -> list[float | None]:
    return [number if abs(number) != torch.inf else None for number in _short(values)]
