"""A TensorDict policy as one plain module on tensors, which every exporter understands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import Tensor, nn
from torchrl.data import Composite
from torchrl.modules import (
    Delta,
    GRUModule,
    IndependentNormal,
    LSTMModule,
    OneHotCategorical,
    TanhNormal,
)

from edenrl.modules import FlashActor, HIMActor, HIMLayout, RunningNorm

__all__ = ["PolicyGraph", "State"]

_HINT = "Give it a method export_module() that returns an equal TensorDict module made of parts that can be exported."


@dataclass(frozen=True)
class State:
    """One recurrent state: its name in the graph, its key in a TensorDict, its shape at batch size 1."""

    name: str
    key: NestedKey
    shape: tuple[int, ...]
    batch_axis: int

    def zeros(self, batch: int) -> Tensor:
        """The state an episode begins with, as the graph takes it."""
        return torch.zeros([batch if axis == self.batch_axis else size for axis, size in enumerate(self.shape)])

    def swap(self, value: Tensor) -> Tensor:
        """Converts between the layout of the graph and that of a TensorDict, which has the batch first."""
        return value.transpose(0, self.batch_axis)


class _Network(nn.Module):
    """A network of the policy, or what its ``export_module()`` returns in its place."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        hook = getattr(network, "export_module", None)
        self.network = network if hook is None else hook()

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        out = self.network(*inputs)
        return tuple(out) if isinstance(out, tuple | list) else (out,)


class _Recurrent(nn.Module):
    """One step of a GRU or LSTM; states are ``(layers, batch, hidden)``."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        y, out = self.rnn(x.unsqueeze(1), state if len(state) == 2 else state[0])
        return (y.squeeze(1), *(out if isinstance(out, tuple) else (out,)))


class _Deterministic(nn.Module):
    """The action that a distribution takes when it does not explore, from the distribution's parameters."""

    low: Tensor
    high: Tensor

    def __init__(self, module: ProbabilisticTensorDictModule) -> None:
        super().__init__()
        self.kind = kind = module.distribution_class
        self.names = [key if isinstance(key, str) else key[-1] for key in module.dist_keys]
        options = dict(module.distribution_kwargs)
        if kind not in _ACTION_OF:
            known = sorted(cls.__name__ for cls in _ACTION_OF)
            raise TypeError(
                f"The deterministic action of the distribution {kind.__name__} cannot be exported; known are {known}. "
                "Give the policy a method export_module() that returns an equal TensorDict module without it."
            )
        self.upscale = float(options.get("upscale", 5.0)) if options.get("tanh_loc") else None
        for name, default in (("low", -1.0), ("high", 1.0)):
            self.register_buffer(name, torch.as_tensor(options.get(name, default), dtype=torch.float32, device="cpu"))

    def forward(self, *parameters: Tensor) -> tuple[Tensor]:
        return (_ACTION_OF[self.kind](self, dict(zip(self.names, parameters, strict=True))),)

    def tanh(self, given: Mapping[str, Tensor]) -> Tensor:
        loc = given["loc"]
        if self.upscale is not None:
            loc = torch.tanh(loc / self.upscale) * self.upscale
        return torch.tanh(loc) * ((self.high - self.low) / 2) + (self.high + self.low) / 2

    def choice(self, given: Mapping[str, Tensor]) -> Tensor:
        return (given["logits"] if "logits" in given else given["probs"]).argmax(-1)

    def one_hot(self, given: Mapping[str, Tensor]) -> Tensor:
        scores = given["logits"] if "logits" in given else given["probs"]
        return nn.functional.one_hot(scores.argmax(-1), scores.shape[-1])


_ACTION_OF: dict[type, Any] = {
    IndependentNormal: lambda self, given: given["loc"],
    Delta: lambda self, given: given["param"],
    TanhNormal: _Deterministic.tanh,
    torch.distributions.Categorical: _Deterministic.choice,
    OneHotCategorical: _Deterministic.one_hot,
}


@dataclass
class _Step:
    """One tensor function of the policy, with what it reads and writes; ``scores`` rank the choices of an action."""

    module: nn.Module
    in_keys: list[NestedKey]
    out_keys: list[NestedKey]
    scores: NestedKey | None = None


def _keys(keys: Sequence[NestedKey]) -> list[NestedKey]:
    return [unravel_key(key) for key in keys]


def _steps(policy: Any, hooked: bool = False) -> list[_Step]:
    """The policy as a list of tensor functions, in the order in which they run."""
    # Asked of the class: an instance of TensorDictModule answers for its network as well.
    if not hooked and hasattr(type(policy), "export_module"):
        replacement = policy.export_module()
        if not isinstance(replacement, TensorDictModuleBase):
            raise TypeError(
                f"{type(policy).__name__}.export_module() returned a {type(replacement).__name__}; the hook of a "
                "TensorDict module returns a TensorDict module, with its in_keys and out_keys."
            )
        return _steps(replacement, hooked=True)
    if isinstance(policy, TensorDictSequential):
        return [step for part in policy._module_iter() for step in _steps(part)]
    if isinstance(policy, LSTMModule | GRUModule):
        rnn = policy.lstm if isinstance(policy, LSTMModule) else policy.gru
        # "is_init" stays out: a deployment starts an episode by zeroing the state.
        in_keys = [key for key in _keys(policy.in_keys) if key != "is_init"]
        return [_Step(_Recurrent(rnn), in_keys, _keys(policy.out_keys))]
    if isinstance(policy, ProbabilisticTensorDictModule):
        module = _Deterministic(policy)
        scores = policy.in_keys[0] if module.kind in (torch.distributions.Categorical, OneHotCategorical) else None
        return [_Step(module, _keys(policy.in_keys), _keys(policy.out_keys[:1]), scores)]
    if isinstance(policy, TensorDictModule) and isinstance(policy.module, nn.Module) and policy._kwargs is None:
        return [_Step(_Network(policy.module), _keys(policy.in_keys), _keys(policy.out_keys))]
    raise TypeError(f"{type(policy).__name__} cannot be exported as it is. {_HINT}")


def _needed_steps(steps: list[_Step], action_key: NestedKey) -> tuple[list[_Step], set[NestedKey]]:
    """The steps that the action and the carried state depend on, and the keys that these read from outside.

    Others, such as a value head, do not become part of the file.

    Raises:
        ValueError: when no step writes the action.
    """
    outputs = {key for step in steps for key in step.out_keys}
    wanted: set[NestedKey] = {action_key}
    while True:
        needed: set[NestedKey] = set(wanted)
        kept: list[_Step] = []
        for step in reversed(steps):
            if needed & set(step.out_keys):
                needed = needed - set(step.out_keys) | set(step.in_keys)
                kept.insert(0, step)
        # What is carried to the next step is wanted as well, also where this step's action does not need it.
        carried_on = {unravel_key(("next", key)) for key in needed} & outputs
        if carried_on <= wanted:
            break
        wanted |= carried_on
    if not any(action_key in step.out_keys for step in kept):
        raise ValueError(
            f"The policy writes {sorted(map(str, outputs))} and not the environment's action {action_key!r}. Name "
            "the action key of the environment in the policy's out_keys."
        )
    return kept, needed


class PolicyGraph(nn.Module):
    """The deterministic policy as ``forward(obs, *state) -> actions`` or ``(actions, *next_state)``.

    ``obs`` is ``[batch, width]``: the observation groups that the action depends on, flattened and concatenated in the
    order in which the policy reads them, un-normalized. States are those of TorchRL's ``LSTMModule`` and ``GRUModule``
    (named ``h`` and ``c``, ``(layers, batch, hidden)``), and those of any module that reads a key ``k`` and writes
    ``("next", k)``. The environment's primer declares the shape of the latter (``(batch, ...)``).

    A policy may be made of sequences, ``TensorDictModule``s around an ``nn.Module``, recurrent modules, and
    distributions whose deterministic action is known. A part that cannot be exported as it is, or should look
    different, has a method ``export_module()``. That of a network returns an ``nn.Module`` to call in its place, that
    of a TensorDict module a TensorDict module. Either must compute the same; ``export_policy`` compares.

    Args:
        policy: the TensorDict policy, in ``eval()`` mode and on the CPU.
        spec: observation spec of the environment, batch dimensions included.
        action_key: key of the action.

    Raises:
        TypeError: if a part of the policy cannot be exported.
        ValueError: if the policy reads a group that the environment does not publish as floating-point features, or
            does not write the action.

    Examples:
        >>> from edenrl.envs import PointMass
        >>> from edenrl.modules import gaussian_actor
        >>> graph = PolicyGraph(gaussian_actor({"observation": 14}, 2).eval(), PointMass(1).observation_spec)
        >>> graph(torch.zeros(5, graph.width)).shape
        torch.Size([5, 2])
    """

    def __init__(self, policy: nn.Module, spec: Composite, action_key: NestedKey = "action") -> None:
        super().__init__()
        action_key = unravel_key(action_key)
        kept, needed = _needed_steps(_steps(policy), action_key)
        written = {key for step in kept for key in step.out_keys}
        read = list(dict.fromkeys(key for step in kept for key in step.in_keys if key in needed))
        carried = [key for key in read if unravel_key(("next", key)) in written]
        self.action_key = action_key
        self.scores_key = next((step.scores for step in reversed(kept) if step.scores is not None), None)
        self.states = _states(kept, carried, spec)
        self.groups = {key: _group_shape(spec, key) for key in read if key not in carried}
        self.width = sum(self.widths)
        self.steps = nn.ModuleList(step.module for step in kept)
        self.keys = [(step.in_keys, step.out_keys) for step in kept]

    @property
    def widths(self) -> list[int]:
        """Widths of the groups in ``obs``."""
        return [math.prod(shape) for shape in self.groups.values()]

    def statistics(self) -> tuple[Tensor, Tensor] | None:
        """Mean and standard deviation of ``obs`` in training, when one network normalizes all of it."""
        for network, in_keys in self._networks():
            moments = _moments(network)
            if moments is not None and in_keys == list(self.groups) and moments[0].shape == (self.width,):
                return moments[0], moments[1].sqrt()
        return None

    def history_layouts(self) -> dict[NestedKey, HIMLayout]:
        """How the stacked frames are laid out that a network was built for, by group."""
        return {keys[0]: network.layout for network, keys in self._networks() if isinstance(network, HIMActor)}

    def unread_features(self) -> dict[NestedKey, tuple[int, int]]:
        """Start and stop of what a network does not read, by group; of stacked frames, in each frame."""
        found = {}
        for network, keys in self._networks():
            for place, features in getattr(network, "unread", {}).items():
                found[keys[place]] = features
        return found

    def _networks(self) -> list[tuple[nn.Module, list[NestedKey]]]:
        """The networks of the policy with what they read."""
        steps = zip(self.steps, self.keys, strict=True)
        return [(step.network, in_keys) for step, (in_keys, _) in steps if isinstance(step, _Network)]

    def flatten(self, tensordict: TensorDictBase) -> Tensor:
        """The observation groups of a TensorDict of batch size ``[batch]`` as ``obs``."""
        return torch.cat([tensordict.get(key).flatten(1).float() for key in self.groups], -1)

    def forward(self, obs: Tensor, *state: Tensor) -> Any:
        """Maps ``[batch, width]`` and the states to the actions and, if there are states, the next ones."""
        parts = obs.split(self.widths, -1)
        values: dict[NestedKey, Tensor] = {
            key: part if len(shape) == 1 else part.unflatten(-1, shape)
            for part, (key, shape) in zip(parts, self.groups.items(), strict=True)
        }
        values.update(zip([entry.key for entry in self.states], state, strict=True))
        for step, (in_keys, out_keys) in zip(self.steps, self.keys, strict=True):
            values.update(zip(out_keys, step(*[values[key] for key in in_keys]), strict=True))
        actions = values[self.action_key]
        if not self.states:
            return actions
        return actions, *(values[unravel_key(("next", entry.key))] for entry in self.states)


def _moments(network: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Running mean and variance with which a network normalizes what it reads; None for one that does not."""
    if isinstance(network, FlashActor):
        return network.trunk.bn.running_mean, network.trunk.bn.running_var
    norm = getattr(network, "norm", None)
    return (norm.mean, norm.var) if isinstance(norm, RunningNorm) else None


def _group_shape(spec: Composite, key: NestedKey) -> tuple[int, ...]:
    batch = len(spec.shape)
    leaves = {unravel_key(name): leaf for name, leaf in spec.items(True, True)}
    if key in leaves and leaves[key].dtype.is_floating_point and len(leaves[key].shape) > batch:
        return tuple(leaves[key].shape[batch:])
    groups = {
        name: tuple(leaf.shape[batch:])
        for name, leaf in leaves.items()
        if leaf.dtype.is_floating_point and not str(name).startswith(("metrics", "('metrics"))
    }
    raise ValueError(
        f"The policy reads the observation group {key!r}, which this environment does not publish as floating-point "
        f"features; it publishes {groups}. Export with the environment the policy was trained in."
    )


def _states(steps: list[_Step], carried: list[NestedKey], spec: Composite) -> tuple[State, ...]:
    states = []
    for key in carried:
        step = next(step for step in steps if key in step.in_keys)
        if isinstance(step.module, _Recurrent):
            rnn: Any = step.module.rnn
            name = "hc"[step.in_keys.index(key) - 1]
            size = (name == "h" and rnn.proj_size) or rnn.hidden_size
            directions = 2 if rnn.bidirectional else 1
            states.append(State(name, key, (rnn.num_layers * directions, 1, size), 1))
        elif key in spec.keys(True, True):
            name = key if isinstance(key, str) else "_".join(key)
            states.append(State(name, key, (1, *spec[key].shape[len(spec.shape) :]), 0))
        else:
            raise ValueError(
                f"The policy carries {key!r} from step to step and the environment does not declare its shape. Append "
                "a TensorDictPrimer for it to the environment."
            )
    names = [state.name for state in states]
    if len(set(names)) < len(names):
        raise ValueError(f"The policy holds several recurrent modules (states {carried}); one can be exported. {_HINT}")
    return tuple(states)
