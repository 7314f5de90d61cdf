"""Actors and critics over named observation groups, in TensorDict form."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.data import Bounded, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, TensorSpec
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator

from edenrl.modules.groups import GroupModule, GroupValue, require_groups
from edenrl.modules.mlp import GaussianMLP, GroupMLP
from edenrl.modules.squash import SquashedActor

__all__ = [
    "categorical_actor",
    "gaussian_actor",
    "make_actor",
    "observation_groups",
    "update_normalization",
    "value_critic",
    "vector_groups",
]

# What environments publish for the log and for losses, not for a policy.
_NOT_OBSERVED = ("metrics", "reward_groups")


def vector_groups(spec: Composite) -> dict[str, int]:
    """Every group that is a floating-point vector, with its width, for networks that choose among them.

    As ``observation_groups``, without a warning about what else the environment publishes.

    Args:
        spec: the observation spec of the environment without book-keeping transforms.

    Examples:
        >>> from torchrl.data import Composite, Unbounded
        >>> vector_groups(Composite(prop=Unbounded((8, 45)), depth=Unbounded((8, 58, 87)), shape=(8,)))
        {'prop': 45}
    """
    batch_dims = len(spec.shape)
    return {
        name: int(leaf.shape[-1])
        for name, leaf in spec.items()
        if not isinstance(leaf, Composite) and leaf.dtype.is_floating_point and len(leaf.shape) == batch_dims + 1
    }


def observation_groups(spec: Composite, names: Sequence[str] | None = None) -> dict[str, int]:
    """Observation groups and their widths, read from an environment's ``observation_spec``.

    A group is a root entry with floating-point features of shape ``(*env.batch_size, width)``.

    Args:
        spec: the observation spec of the environment without book-keeping transforms.
        names: the groups wanted, in order; ``None`` takes every floating-point vector, in the environment's order, and
            warns about what it leaves out: images, integers, nested entries.

    Raises:
        ValueError: if a named group is missing or is not a vector, listing what the environment publishes.

    Examples:
        >>> from torchrl.data import Composite, Unbounded
        >>> spec = Composite(policy=Unbounded((8, 45)), scan=Unbounded((8, 132)), shape=(8,))
        >>> observation_groups(spec, ["scan"])
        {'scan': 132}
    """
    batch_dims, vectors = len(spec.shape), vector_groups(spec)
    wanted = list(vectors) if names is None else list(names)
    others = {
        key if isinstance(key, str) else ".".join(key): f"{leaf.dtype} {tuple(leaf.shape[batch_dims:])}"
        for key, leaf in spec.items(True, True)
        if key not in vectors and leaf.dtype != torch.bool and (isinstance(key, str) or key[0] not in _NOT_OBSERVED)
    }
    if not wanted:
        raise ValueError(
            f"No observation group to read: none of {others} is a floating-point vector. Convert them at the "
            "environment, for example with TorchRL's OneHot, FlattenObservation or ToTensorImage transforms."
        )
    if names is None and others:
        warnings.warn(
            f"The networks read the observation groups {vectors}. They do not read {others}: only floating-point "
            "vectors at the root are read. Convert the others at the environment, or write a network that reads them.",
            stacklevel=2,
        )
    for name in wanted:
        if name not in vectors:
            shape = tuple(spec[name].shape[batch_dims:]) if name in spec.keys() else None
            problem = "does not exist" if shape is None else f"has features of shape {shape}, not a vector"
            raise ValueError(f"Observation group {name!r} {problem}. Groups of this environment: {vectors}.")
    return {name: vectors[name] for name in wanted}


def gaussian_actor(
    groups: Mapping[str, int],
    action_spec: TensorSpec | int,
    *,
    squash: bool = False,
    build: Callable[..., nn.Module] | None = None,
    **network: Any,
) -> ProbabilisticActor:
    """Diagonal Gaussian actor with state-independent standard deviation.

    Writes ``loc``, ``scale``, ``action`` and ``action_log_prob``. Without ``squash`` the action is unbounded (clip it
    at the environment, see ``edenrl.envs.ClipAction``). With it a tanh maps the action into the box of ``action_spec``,
    and the actor also writes ``pre_squash_action``, the sample before the tanh. Losses need it: a saturated action does
    not tell which sample it came from.

    Args:
        groups: observation groups and widths, e.g. ``{"policy": 45, "scan": 132}``, concatenated in this order.
        action_spec: the environment's unbatched action spec, or the number of actions.
        squash: map actions into the spec's box with a tanh.
        build: makes another network with outputs ``(loc, scale)`` from the groups, the number of actions and
            ``network``; default a ``GaussianMLP``.
        network: options of ``GaussianMLP``: hidden, activation, normalize, init_std.

    Raises:
        TypeError: for groups that are no mapping of names to widths.
        ValueError: for an action spec that is not a floating-point vector, or ``squash`` without finite bounds; later,
            for observations of another width or dtype, naming the group.

    Examples:
        >>> from tensordict import TensorDict
        >>> actor = gaussian_actor({"policy": 45}, 12)
        >>> td = actor(TensorDict(policy=torch.zeros(4, 45), batch_size=[4]))
        >>> td["action"].shape, td["action_log_prob"].shape
        (torch.Size([4, 12]), torch.Size([4]))
    """
    require_groups("gaussian_actor", groups)
    dim = _action_width(action_spec)
    bounds = None
    if squash:
        bounds = tanh_bounds(action_spec, "or do without the tanh: squash=False (--env.action_mode clip)")
    net = GaussianMLP(sum(groups.values()), dim, **network) if build is None else build(groups, dim, **network)
    module = GroupModule(net, groups, in_keys=list(groups), out_keys=["loc", "scale"])
    if bounds is not None:
        return SquashedActor(module, bounds)
    return ProbabilisticActor(
        module,
        in_keys=["loc", "scale"],
        out_keys=["action"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
        log_prob_key="action_log_prob",
    )


def _action_width(action_spec: TensorSpec | int) -> int:
    """The number of actions, of a spec that a Gaussian can fill."""
    if isinstance(action_spec, int):
        return action_spec
    if is_one_categorical(action_spec):
        raise ValueError(
            f"A Gaussian actor cannot drive the discrete action space {type(action_spec).__name__}"
            f"(shape {tuple(action_spec.shape)}). Use categorical_actor, or make_actor to choose from the spec."
        )
    refuse_several_discrete(action_spec)
    if isinstance(action_spec, Composite) or len(action_spec.shape) != 1 or not action_spec.dtype.is_floating_point:
        raise ValueError(
            f"A Gaussian actor needs a floating-point action vector, got {type(action_spec).__name__} of shape "
            f"{tuple(action_spec.shape)}. Pass env.action_spec_unbatched, or the number of actions."
        )
    return int(action_spec.shape[-1])


def refuse_several_discrete(action_spec: TensorSpec) -> None:
    """Refuses actions of several integers: no actor draws them, but one discrete action can stand for all."""
    if isinstance(action_spec, OneHot) and not isinstance(action_spec, MultiOneHot):
        raise ValueError(
            "No actor of this library draws one-hot actions; it takes one discrete action as an integer. Build the "
            "environment with categorical_action_encoding=True."
        )
    if not isinstance(action_spec, Composite) and not action_spec.dtype.is_floating_point:
        raise ValueError(
            f"No actor of this library draws {type(action_spec).__name__} actions of shape {tuple(action_spec.shape)} "
            f"and {action_spec.dtype}: it takes one discrete action, or a vector of real numbers. Number the "
            "combinations and let PPO draw one of them: gymnasium.wrappers.TransformAction(env, lambda action: "
            "np.stack(np.unravel_index(action, shape)), spaces.Discrete(math.prod(shape))), where shape has the number "
            "of values of each component."
        )


def tanh_bounds(action_spec: TensorSpec | int, advice: str) -> dict[str, Tensor]:
    """The bounds of an action that a tanh can fill, as tensors on their device: TanhNormal broadcasts them.

    Args:
        action_spec: the unbatched action spec.
        advice: what else a user can do, for the message: "or ...".

    Raises:
        ValueError: no bounds, or components whose bounds are infinite or equal.
    """
    if not isinstance(action_spec, Bounded):
        raise ValueError(
            "A policy that ends in a tanh needs finite action bounds, and the environment declares none. Declare "
            f"them, {advice}."
        )
    low, high = action_spec.space.low, action_spec.space.high
    bounds = list(zip(low.flatten().tolist(), high.flatten().tolist(), strict=True))
    # In the precision of the actions, in which the width of a box such as [-3e38, 3e38] is infinite.
    widths = (high - low).flatten().tolist()
    wrong = [i for i, width in enumerate(widths) if not (math.isfinite(width) and width > 0)]
    if wrong:
        found = ", ".join(f"component {i} has [{bounds[i][0]:g}, {bounds[i][1]:g}]" for i in wrong)
        raise ValueError(
            f"A policy that ends in a tanh needs finite action bounds with low < high; {found}. Change the bounds of "
            f"the environment (a component that cannot move does not belong to the action), {advice}."
        )
    return {"low": low, "high": high}


def categorical_actor(groups: Mapping[str, int], action_spec: Categorical | int, **network: Any) -> ProbabilisticActor:
    """Categorical actor; actions are integers of shape ``(*batch,)``.

    Writes ``logits``, ``action`` and ``action_log_prob``.

    Args:
        groups: observation groups and widths, concatenated in this order.
        action_spec: a ``Categorical`` spec, or the number of actions.
        network: options of ``GroupMLP``: hidden, activation, normalize.

    Raises:
        ValueError: for any other action spec.

    Examples:
        >>> from tensordict import TensorDict
        >>> actor = categorical_actor({"observation": 4}, 2)
        >>> actor(TensorDict(observation=torch.zeros(5, 4), batch_size=[5]))["action"].shape
        torch.Size([5])
    """
    require_groups("categorical_actor", groups)
    if not isinstance(action_spec, int) and not is_one_categorical(action_spec):
        refuse_several_discrete(action_spec)
        raise ValueError(
            f"A categorical actor needs one discrete action, got {type(action_spec).__name__} of shape "
            f"{tuple(action_spec.shape)}. Use gaussian_actor for continuous actions."
        )
    num_actions = action_spec if isinstance(action_spec, int) else int(action_spec.space.n)
    net = GroupMLP(sum(groups.values()), num_actions, last_gain=0.01, **network)
    return ProbabilisticActor(
        GroupModule(net, groups, in_keys=list(groups), out_keys=["logits"]),
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
        log_prob_key="action_log_prob",
    )


def make_actor(
    groups: Mapping[str, int],
    action_spec: TensorSpec,
    *,
    init_std: float = 1.0,
    squash: bool = False,
    **network: Any,
) -> ProbabilisticActor:
    """``categorical_actor`` for one discrete action, ``gaussian_actor`` otherwise.

    Examples:
        >>> from torchrl.data import Categorical
        >>> make_actor({"observation": 4}, Categorical(2)).out_keys
        ['logits', 'action', 'action_log_prob']
    """
    if is_one_categorical(action_spec):
        return categorical_actor(groups, action_spec, **network)
    return gaussian_actor(groups, action_spec, init_std=init_std, squash=squash, **network)


def is_one_categorical(spec: TensorSpec) -> bool:
    """Whether an unbatched action spec is one discrete action, as an integer."""
    # A MultiCategorical, which is several actions at once, is a Categorical too; so is a batch of them.
    return isinstance(spec, Categorical) and not isinstance(spec, MultiCategorical) and not spec.shape


def value_critic(groups: Mapping[str, int], num_values: int = 1, **network: Any) -> ValueOperator:
    """State-value critic; writes ``state_value`` of shape ``(*batch, num_values)``.

    Args:
        groups: observation groups and widths, concatenated in this order.
        num_values: number of independent value heads.
        network: options of ``GroupMLP``: hidden, activation, normalize.

    Examples:
        >>> from tensordict import TensorDict
        >>> critic = value_critic({"critic": 48})
        >>> critic(TensorDict(critic=torch.zeros(4, 48), batch_size=[4]))["state_value"].shape
        torch.Size([4, 1])
    """
    require_groups("value_critic", groups)
    return GroupValue(GroupMLP(sum(groups.values()), num_values, **network), groups)


@torch.no_grad()
def update_normalization(module: nn.Module, tensordict: TensorDictBase) -> None:
    """Feeds a rollout to the running statistics of every network inside ``module``.

    Call it once per iteration *after* the update: the policy that is optimized is then exactly the one that acted.
    Networks that share a trunk go in together, as ``nn.ModuleList([actor, critic])``: it counts the data once.

    Args:
        module: an actor, critic or any module that holds some.
        tensordict: data holding the networks' inputs, any batch shape.

    Raises:
        KeyError: if an input is not in the data.

    Examples:
        >>> from tensordict import TensorDict
        >>> critic = value_critic({"critic": 2})
        >>> update_normalization(critic, TensorDict(critic=torch.ones(6, 2), batch_size=[6]))
        >>> int(critic.module.norm.count)
        6
    """
    for part in module.modules():
        if isinstance(part, TensorDictModule) and hasattr(part.module, "update_normalization"):
            inputs = [tensordict.get(key, None) for key in part.in_keys]
            if any(entry is None for entry in inputs):
                missing = [key for key, entry in zip(part.in_keys, inputs, strict=True) if entry is None]
                raise KeyError(
                    f"A normalized network reads {part.in_keys}, of which the data lacks {missing}. Keep them in the "
                    "rollout, or build the network with normalize=False."
                )
            part.module.update_normalization(*inputs)
