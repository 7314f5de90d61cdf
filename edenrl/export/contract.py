"""What an environment says about itself: observations, actions, rate and joints of the spec."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import ValidationError
from tensordict import NestedKey, unravel_key
from torchrl.data import Categorical, MultiCategorical, MultiOneHot, OneHot
from torchrl.envs import (
    ActionScaling,
    CatFrames,
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
from edenrl.export.spec import ActionContract, ActionSpec, EnvContract, History, ObservationSpec, Term

__all__ = ["actions_of", "contract_of", "declared", "nominal_env", "observations_of"]


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


def _stacked(key: NestedKey, transforms: list[Transform]) -> tuple[NestedKey, CatFrames] | None:
    """The group whose frames a ``CatFrames`` stacks into ``key``, and that transform; None for any other group."""
    for transform in reversed(transforms):
        outs = [unravel_key(k) for k in transform.out_keys or []]
        if key not in outs:
            continue
        if isinstance(transform, CatFrames) and transform.dim == -1:
            return unravel_key(transform.in_keys[outs.index(key)]), transform
        return None
    return None


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
    """What the innermost environment declares in ``policy_contract()``, and its transforms of their groups.

    Empty where nothing has that method.

    Raises:
        ValueError: if the declaration is not an ``EnvContract``, or if values in it are randomized per environment.
    """
    contract = declared(env)
    if contract.randomized:
        raise ValueError(
            f"{type(_unwrap(env)[0]).__name__} randomizes {contract.randomized} per environment: no single policy spec "
            "is true of it. Export with nominal_env(env), which switches these randomizations off."
        )
    return contract


def declared(env: EnvBase) -> EnvContract:
    """As ``contract_of``, also where values are randomized.

    Raises:
        ValueError: if the declaration is not an ``EnvContract``, or out of reach in another process.
    """
    base, transforms = _unwrap(env)
    contract = _contract(base) if hasattr(base, "policy_contract") else EnvContract()
    for transform in transforms:
        # Asked of the class: an instance answers for the environment behind it.
        if hasattr(type(transform), "policy_contract"):
            contract.observations |= _contract(transform).observations
    return contract


def _contract(source: Any) -> EnvContract:
    try:
        return EnvContract.model_validate(source.policy_contract())
    except ValidationError as error:
        raise ValueError(f"{type(source).__name__}.policy_contract() is not a valid EnvContract: {error}") from None


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
    names = declared(env).randomized
    if names and not hasattr(base, "set_nominal"):
        raise ValueError(
            f"{type(base).__name__} randomizes {names} and has no set_nominal() to switch that off. Build it without "
            "these randomizations."
        )
    if names:
        base.set_nominal()
        if left := declared(env).randomized:
            raise ValueError(f"{type(base).__name__}.set_nominal() left {left} randomized.")
    return env


def observations_of(graph: PolicyGraph, env: EnvBase, contract: EnvContract) -> list[ObservationSpec]:
    """The groups of ``obs``.

    Raises:
        ValueError: if a transform of the environment normalizes a group, or terms do not add up to its width.
    """
    transforms = _unwrap(env)[1]
    statistics, unread = graph.statistics(), graph.unread_features()
    out, start = [], 0
    for (key, shape), width in zip(graph.groups.items(), graph.widths, strict=True):
        name = _name(key)
        writers = _path_to(key, transforms)
        if norm := next((t for t in writers if isinstance(t, ObservationNorm | VecNorm | VecNormV2)), None):
            raise ValueError(
                f"The environment's transform {type(norm).__name__} normalizes {name!r}; an exported policy would miss "
                "it. Train with normalization inside the policy (normalize=True), which is exported with it."
            )
        terms, history = _layout(key, graph, contract, transforms)
        if writers and history is None and sum(term.width for term in terms) != width:
            terms = []  # a transform has made something else of the group
        _check_widths(name, width, terms, history)
        out.append(
            ObservationSpec(
                key=name,
                start=start,
                stop=start + width,
                width=width,
                shape=list(shape),
                terms=terms,
                history=history,
                unread=unread.get(key),
                interval=contract.intervals.get(name),
                mean=None if statistics is None else _short(statistics[0][start : start + width]),
                std=None if statistics is None else _short(statistics[1][start : start + width]),
                transforms=[type(t).__name__ for t in writers],
            )
        )
        start += width
    return out


def _name(key: NestedKey) -> str:
    return key if isinstance(key, str) else ".".join(key)


def _layout(
    key: NestedKey, graph: PolicyGraph, contract: EnvContract, transforms: list[Transform]
) -> tuple[list[Term], History | None]:
    """Terms of a group, or of one frame of it, and how it stacks frames."""
    name = _name(key)
    stacked = _stacked(key, transforms) if len(graph.groups[key]) == 1 else None
    if stacked is None:
        terms, history = contract.observations.get(name, []), contract.histories.get(name)
        return terms, _known_to(graph, key) if history is None and not terms else history
    source, transform = _name(stacked[0]), stacked[1]
    padding: Literal["repeat", "zeros"] | None = "repeat" if transform.padding == "same" else None
    if transform.padding == "constant" and transform.padding_value == 0:
        padding = "zeros"
    if source in contract.histories or _stacked(stacked[0], transforms[: transforms.index(transform)]) is not None:
        return [], None  # frames of frames: the names of the transforms must do
    frame_of = None if source == name else source
    history = History(frames=transform.N, order="oldest_first", at_reset=padding, frame_of=frame_of)
    return contract.observations.get(source, []), history


def _known_to(graph: PolicyGraph, key: NestedKey) -> History | None:
    """The layout of a history that the environment does not declare and the policy was built for."""
    layout = graph.history_layouts().get(key)
    return None if layout is None else History(frames=layout.frames, order=layout.order)


def _check_widths(name: str, width: int, terms: list[Term], history: History | None) -> None:
    frames = 1 if history is None else history.frames
    listed = sum(term.width for term in terms)
    if width % frames:
        raise ValueError(f"{name!r} has {width} features, no multiple of the {frames} frames of its history.")
    if terms and listed * frames != width:
        stacked = "" if history is None else f" a frame, in {frames} frames,"
        raise ValueError(f"policy_contract() lists {listed} features{stacked} for {name!r}, which has {width}.")


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
    name = _name(key)
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
    # Never invented: scaling around an unknown scale is unknown as well.
    known = contract.scale is not None and contract.bias is not None
    scale = torch.tensor(contract.scale if known else [1.0] * dim, dtype=torch.float64)
    bias = torch.tensor(contract.bias if known else [0.0] * dim, dtype=torch.float64)
    box = action_box(base)
    low, high = (torch.full((dim,), s) for s in (-torch.inf, torch.inf)) if box is None else (b.cpu() for b in box)
    clip, others = contract.clip, []
    # From the simulator outwards: each transform changes how box and scale look to those around it.
    for transform in on_action:
        if isinstance(transform, ClipAction) and transform.limit is not None:
            limit = torch.full_like(low, transform.limit)
            if clip or bool(((low <= -limit) & (limit <= high)).all()):
                low, high, clip = (-limit).clamp(low, high), limit.clamp(low, high), True
            else:  # between a box that nobody clips to and actions beyond it, one clip cannot tell
                others.append(f"ClipAction(limit={transform.limit})")
        elif isinstance(transform, ClipAction):
            clip = True
        elif isinstance(transform, ActionScaling) and transform.standard_normal:
            loc, factor = transform.loc.cpu().double(), transform.scale.cpu().double()
            bias, scale = bias + scale * loc, scale * factor
            ends = torch.stack([(low - loc) / factor, (high - loc) / factor])
            low, high = ends.amin(0), ends.amax(0)
            if not known:
                others.append(type(transform).__name__)
        else:
            others.append(type(transform).__name__)
    bounded = bool((low.isfinite() | high.isfinite()).any())
    return {
        "low": _finite(low) if bounded else None,
        "high": _finite(high) if bounded else None,
        "clip": clip and bounded,
        "scale": scale.tolist() if known else None,
        "bias": bias.tolist() if known else None,
        "transforms": others,
    }


def _short(values: torch.Tensor) -> list[float]:
    # Decimal values of float32 numbers: 0.4 and not 0.4000000059604645.
    return [float(f"{value:.7g}") for value in values.tolist()]


def _finite(values: torch.Tensor) -> list[float | None]:
    return [number if abs(number) != torch.inf else None for number in _short(values)]
