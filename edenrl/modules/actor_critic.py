"""Actors and critics over named observation groups.

Each network is a plain ``nn.Module`` on tensors; the functions beside it give its TensorDict form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, TensorSpec
from torchrl.modules import MLP, IndependentNormal, ProbabilisticActor, TanhNormal, ValueOperator

from edenrl.modules.normalization import RunningNorm

__all__ = [
    "GroupMLP",
    "GaussianMLP",
    "StateIndependentStd",
    "categorical_actor",
    "gaussian_actor",
    "make_actor",
    "observation_groups",
    "update_normalization",
    "value_critic",
]

_ACTIVATIONS: dict[str, type[nn.Module]] = {"elu": nn.ELU, "relu": nn.ReLU, "tanh": nn.Tanh, "silu": nn.SiLU}
_DISCRETE = (Categorical, OneHot, Binary, MultiCategorical, MultiOneHot)


def _is_one_categorical(spec: TensorSpec) -> bool:
    return isinstance(spec, Categorical) and not isinstance(spec, MultiCategorical)


def observation_groups(spec: Composite, names: Sequence[str] | None = None) -> dict[str, int]:
    """Observation groups and their widths, read from an environment's ``observation_spec``.

    A group is a root entry with floating-point features of shape ``(*env.batch_size, width)``.

    Args:
        spec: the observation spec of the environment without book-keeping transforms.
        names: the groups wanted, in order; ``None`` takes every floating-point vector, in the environment's order, and
            leaves images and integers out.

    Raises:
        ValueError: if a named group is missing or is not a vector, listing what the environment publishes.

    Examples:
        >>> from torchrl.data import Composite, Unbounded
        >>> spec = Composite(policy=Unbounded((8, 45)), scan=Unbounded((8, 132)), shape=(8,))
        >>> observation_groups(spec, ["scan"])
        {'scan': 132}
    """
    batch_dims = len(spec.shape)
    vectors = {
        name: int(leaf.shape[-1])
        for name, leaf in spec.items()
        if not isinstance(leaf, Composite) and leaf.dtype.is_floating_point and len(leaf.shape) == batch_dims + 1
    }
    wanted = list(vectors) if names is None else list(names)
    if not wanted:
        others = {name: f"{leaf.dtype} {tuple(leaf.shape[batch_dims:])}" for name, leaf in spec.items()}
        raise ValueError(
            f"No observation group to read: none of {others} is a floating-point vector. Convert them at the "
            "environment, for example with TorchRL's OneHot, FlattenObservation or ToTensorImage transforms."
        )
    for name in wanted:
        if name not in vectors:
            shape = tuple(spec[name].shape[batch_dims:]) if name in spec.keys() else None
            problem = "does not exist" if shape is None else f"has features of shape {shape}, not a vector"
            raise ValueError(f"Observation group {name!r} {problem}. Groups of this environment: {vectors}.")
    return {name: vectors[name] for name in wanted}


class GroupMLP(nn.Module):
    """Concatenates its inputs, normalizes them with running statistics and applies an MLP.

    Weights are orthogonal (gain sqrt(2), ``last_gain`` on the last layer), biases zero.

    Args:
        in_features: summed width of the inputs.
        out_features: width of the output.
        hidden: widths of the hidden layers.
        activation: "elu", "relu", "tanh" or "silu".
        normalize: whether a ``RunningNorm`` (clipped at 10) stands in front.
        last_gain: gain of the last layer's orthogonal initialization.

    Examples:
        >>> net = GroupMLP(5, 2, hidden=(16,))
        >>> net(torch.zeros(7, 3), torch.zeros(7, 2)).shape
        torch.Size([7, 2])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        hidden: Sequence[int] = (256, 128, 64),
        activation: str = "elu",
        normalize: bool = True,
        last_gain: float = 1.0,
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ValueError(f"Unknown activation {activation!r}; choose one of {sorted(_ACTIVATIONS)}.")
        self.norm = RunningNorm(in_features, clip=10.0) if normalize else None
        self.mlp = MLP(in_features, out_features, num_cells=list(hidden), activation_class=_ACTIVATIONS[activation])
        layers = [layer for layer in self.mlp if isinstance(layer, nn.Linear)]
        for layer in layers:
            nn.init.orthogonal_(layer.weight, last_gain if layer is layers[-1] else math.sqrt(2))
            nn.init.zeros_(layer.bias)

    def forward(self, *groups: Tensor) -> Tensor:
        """Maps groups of shape ``(*batch, width)`` to ``(*batch, out_features)``."""
        x = torch.cat(groups, -1) if len(groups) > 1 else groups[0]
        return self.mlp(x if self.norm is None else self.norm(x))

    def update_normalization(self, *groups: Tensor) -> None:
        """Merges a batch of inputs into the running statistics."""
        if self.norm is not None:
            self.norm.update(torch.cat(groups, -1) if len(groups) > 1 else groups[0])


def _squareplus(x: Tensor) -> Tensor:
    # Both forms are of the magnitude, so that neither cancels: the gradient of the one that is not taken must be finite
    # too. Not abs(), whose gradient at zero is zero.
    magnitude = torch.where(x > 0, x, -x)
    large = 0.5 * (magnitude + (x.square() + 1.0).sqrt())
    return torch.where(x > 0, large, 0.25 / large)


class StateIndependentStd(nn.Module):
    """A learned standard deviation that cannot leave its bounds and never loses its gradient.

    The raw parameter is a log standard deviation softly bounded by the square-root form of softplus. Its gradient
    decays like ``1 / distance**2`` outside the bounds, where a clamp's is zero and softplus' underflows.

    Args:
        dim: number of actions.
        init_std: initial standard deviation, exact.
        min_std: lower bound.
        max_std: upper bound, soft by a few percent; larger than ``init_std``.

    Examples:
        >>> std = StateIndependentStd(2, init_std=0.5)
        >>> [round(v, 4) for v in std().tolist()]
        [0.5, 0.5]
    """

    def __init__(self, dim: int, init_std: float = 1.0, min_std: float = 1e-3, max_std: float = 20.0) -> None:
        super().__init__()
        if not 0 < min_std < init_std < max_std:
            raise ValueError(f"Need 0 < min_std < init_std < max_std, got {min_std}, {init_std}, {max_std}.")
        self.low, self.high = math.log(min_std), math.log(max_std)
        # Inverse of forward(): squareplus(x) = y at x = y - 1 / (4 y), undone for the lower bound, then the upper.
        lower = math.log(init_std) - self.low
        upper = self.high - (self.low + lower - 0.25 / lower)
        self.raw_log_std = nn.Parameter(torch.full((dim,), self.high - (upper - 0.25 / upper)))

    def forward(self) -> Tensor:
        """Returns the standard deviation, shape ``(dim,)``."""
        log_std = self.high - _squareplus(self.high - self.raw_log_std)
        # The lower bound comes last, so that it holds exactly.
        return (self.low + _squareplus(log_std - self.low)).exp()


class GaussianMLP(GroupMLP):
    """A ``GroupMLP`` mean with a ``StateIndependentStd``; returns ``(loc, scale)``.

    Examples:
        >>> loc, scale = GaussianMLP(4, 2)(torch.zeros(3, 4))
        >>> loc.shape, scale.shape
        (torch.Size([3, 2]), torch.Size([3, 2]))
    """

    def __init__(self, in_features: int, out_features: int, *, init_std: float = 1.0, **kwargs: Any) -> None:
        super().__init__(in_features, out_features, last_gain=0.01, **kwargs)
        self.std = StateIndependentStd(out_features, init_std)

    def forward(self, *groups: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Maps groups of shape ``(*batch, width)`` to mean and standard deviation ``(*batch, out_features)``."""
        std = self.std()
        # Distribution maths stays in the parameter's precision also when the trunk runs in a reduced one.
        loc = super().forward(*groups).to(std.dtype)
        return loc, std.expand_as(loc)


def gaussian_actor(
    groups: Mapping[str, int],
    action_spec: TensorSpec | int,
    *,
    squash: bool = False,
    **network: Any,
) -> ProbabilisticActor:
    """Diagonal Gaussian actor with state-independent standard deviation.

    Writes ``loc``, ``scale``, ``action`` and ``action_log_prob``. Without ``squash`` the action is unbounded (clip it
    at the environment, see ``edenrl.envs.ClipAction``); with it a tanh maps it into the box of ``action_spec``.

    Args:
        groups: observation groups and widths, e.g. ``{"policy": 45, "scan": 132}``, concatenated in this order.
        action_spec: the environment's unbatched action spec, or the number of actions.
        squash: map actions into the spec's box with a tanh.
        network: options of ``GaussianMLP``: hidden, activation, normalize, init_std.

    Raises:
        ValueError: for an action spec that is not a floating-point vector, or ``squash`` without finite bounds.

    Examples:
        >>> from tensordict import TensorDict
        >>> actor = gaussian_actor({"policy": 45}, 12)
        >>> td = actor(TensorDict(policy=torch.zeros(4, 45), batch_size=[4]))
        >>> td["action"].shape, td["action_log_prob"].shape
        (torch.Size([4, 12]), torch.Size([4]))
    """
    if isinstance(action_spec, _DISCRETE):
        raise ValueError(
            f"A Gaussian actor cannot drive the discrete action space {type(action_spec).__name__}"
            f"(shape {tuple(action_spec.shape)}). Use categorical_actor, or make_actor to choose from the spec."
        )
    if isinstance(action_spec, int):
        dim = action_spec
    elif isinstance(action_spec, Composite) or len(action_spec.shape) != 1 or not action_spec.dtype.is_floating_point:
        raise ValueError(
            f"A Gaussian actor needs a floating-point action vector, got {type(action_spec).__name__} of shape "
            f"{tuple(action_spec.shape)}. Pass env.action_spec_unbatched, or the number of actions."
        )
    else:
        dim = int(action_spec.shape[-1])
    kwargs: dict[str, Any] = {}
    if squash:
        bounds = [action_spec.space.low, action_spec.space.high] if isinstance(action_spec, Bounded) else []
        if not bounds or not all(bool(bound.isfinite().all()) for bound in bounds):
            raise ValueError(
                f"squash=True needs an action spec with finite bounds, got {action_spec}. Set squash=False."
            )
        # Kept as tensors on the spec's device: TanhNormal broadcasts them over the batch.
        kwargs = dict(zip(("low", "high"), bounds, strict=True))
    net = GaussianMLP(sum(groups.values()), dim, **network)
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=list(groups), out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        out_keys=["action"],
        distribution_class=TanhNormal if squash else IndependentNormal,
        distribution_kwargs=kwargs,
        return_log_prob=True,
        log_prob_key="action_log_prob",
    )


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
    # A MultiCategorical is a Categorical too, of several actions at once.
    if not isinstance(action_spec, int) and not _is_one_categorical(action_spec):
        raise ValueError(
            f"A categorical actor needs one discrete action, got {type(action_spec).__name__} of shape "
            f"{tuple(action_spec.shape)}. Use gaussian_actor for continuous actions."
        )
    num_actions = action_spec if isinstance(action_spec, int) else int(action_spec.space.n)
    net = GroupMLP(sum(groups.values()), num_actions, last_gain=0.01, **network)
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=list(groups), out_keys=["logits"]),
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
    if _is_one_categorical(action_spec):
        return categorical_actor(groups, action_spec, **network)
    return gaussian_actor(groups, action_spec, init_std=init_std, squash=squash, **network)


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
    return ValueOperator(GroupMLP(sum(groups.values()), num_values, **network), in_keys=list(groups))


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
