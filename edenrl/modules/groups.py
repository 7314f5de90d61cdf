"""Networks over named observation groups: checks of how they are described, and errors that name the group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import ValueOperator

__all__ = ["GroupModule", "GroupValue", "require_groups", "require_layers"]


def require_groups(builder: str, groups: Any) -> None:
    """Raises unless ``groups`` maps names of observation groups to widths.

    Args:
        builder: the function that was given them, for the message.
        groups: what was given.

    Raises:
        TypeError: for what is no mapping, or a width that is no integer.
        ValueError: for no group at all, or a width below 1.

    Examples:
        >>> require_groups("value_critic", {"policy": 45, "scan": 132})
    """
    advice = "such as {'policy': 45, 'scan': 132}. observation_groups(env.observation_spec) gives them"
    if not isinstance(groups, Mapping):
        raise TypeError(f"{builder} needs groups as a mapping of names to widths, {advice}; got {groups!r}.")
    if not groups:
        raise ValueError(f"{builder} needs at least one observation group, {advice}; got {groups!r}.")
    if wrong := {name: width for name, width in groups.items() if not isinstance(width, Integral)}:
        raise TypeError(f"{builder} needs the width of each group as an integer, {advice}; got {wrong}.")
    if wrong := {name: width for name, width in groups.items() if width < 1}:
        raise ValueError(f"{builder} needs groups of at least one feature, got {wrong}. Leave empty groups out.")


def require_layers(network: str, **widths: Any) -> None:
    """Raises unless every setting is a sequence of widths of layers.

    Args:
        network: the network that was given them, for the message.
        widths: the settings by name.

    Raises:
        TypeError: for what is no sequence of integers.
        ValueError: for a width below 1.

    Examples:
        >>> require_layers("GroupMLP", hidden=64)
        Traceback (most recent call last):
        TypeError: GroupMLP needs hidden as a sequence of widths, one per layer, got 64. Write hidden=(64,).
    """
    for name, value in widths.items():
        sequence = isinstance(value, Sequence) and not isinstance(value, str)
        if not sequence or not all(isinstance(width, Integral) for width in value):
            example = (value,) if isinstance(value, Integral) else (256, 128)
            raise TypeError(
                f"{network} needs {name} as a sequence of widths, one per layer, got {value!r}. Write {name}={example}."
            )
        if any(width < 1 for width in value):
            raise ValueError(f"{network} needs every width in {name} to be at least 1, got {tuple(value)}.")


class _NamesGroups:
    """Turns the error of a network that was given other inputs than it was built for into one that names the group.

    Nothing is looked at unless the network has raised.
    """

    widths: Mapping[Any, int]
    in_keys: list[Any]
    module: nn.Module

    def _call_module(self, tensors: Sequence[Any], **kwargs: Any) -> Any:
        try:
            return super()._call_module(tensors, **kwargs)  # type: ignore[misc]
        except Exception as error:
            problems = [] if any(tensor is None for tensor in tensors) else self._problems(tensors)
            if not problems:
                raise
            # A network that looks at its inputs itself may know more, such as the layout of a group.
            told = f" {error}" if isinstance(error, ValueError) else ""
            raise ValueError(
                f"{type(self.module).__name__} reads the groups {dict(self.widths)}, name to width: "
                f"{'; '.join(problems)}. Give it the entries that it was built for, or build it for these, with "
                f"observation_groups(env.observation_spec).{told}"
            ) from error

    def _problems(self, tensors: Sequence[Any]) -> list[str]:
        parameter = next(self.module.parameters(), None)
        dtype = torch.get_default_dtype() if parameter is None else parameter.dtype
        problems = []
        for key, tensor in zip(self.in_keys, tensors, strict=True):
            problem = _input_problem(tensor, self.widths.get(key), dtype)
            if problem:
                problems.append(f"{key!r} {problem}")
        shapes = {key: tuple(tensor.shape) for key, tensor in zip(self.in_keys, tensors, strict=True)}
        if not problems and len({shape[:-1] for shape in shapes.values()}) > 1:
            problems.append(f"the groups have different batch shapes, {shapes}")
        return problems


def _input_problem(tensor: Any, width: int | None, dtype: torch.dtype) -> str:
    """What is wrong with one input. Empty when nothing is."""
    if not isinstance(tensor, Tensor):
        return f"is a {type(tensor).__name__}, not a tensor"
    if not tensor.ndim or (width is not None and tensor.shape[-1] != width):
        return f"has the shape {tuple(tensor.shape)}, expected (*batch, {width})"
    if tensor.is_complex() or torch.promote_types(tensor.dtype, dtype) != dtype:
        return f"is {tensor.dtype}, but the parameters are {dtype} (convert with .to({dtype}), or the network)"
    return ""


class GroupModule(_NamesGroups, TensorDictModule):
    """A ``TensorDictModule`` whose errors about its inputs name the observation group.

    Args:
        module: the network.
        widths: width of each group by key.
        keys: ``in_keys`` and ``out_keys`` of ``TensorDictModule``.

    Raises:
        ValueError: when the network fails on inputs of other widths or dtypes than it was built for.

    Examples:
        >>> from tensordict import TensorDict
        >>> net = GroupModule(nn.Linear(3, 2), {"policy": 3}, in_keys=["policy"], out_keys=["action"])
        >>> net(TensorDict(policy=torch.zeros(4, 3), batch_size=[4]))["action"].shape
        torch.Size([4, 2])
    """

    def __init__(self, module: nn.Module, widths: Mapping[Any, int], **keys: Any) -> None:
        super().__init__(module, **keys)
        self.widths = dict(widths)


class GroupValue(_NamesGroups, ValueOperator):
    """A ``ValueOperator`` whose errors about its inputs name the observation group.

    Args:
        module: the network.
        widths: width of each group by key.

    Raises:
        ValueError: when the network fails on inputs of other widths or dtypes than it was built for.

    Examples:
        >>> GroupValue(nn.Linear(3, 1), {"policy": 3}).out_keys
        ['state_value']
    """

    def __init__(self, module: nn.Module, widths: Mapping[Any, int]) -> None:
        super().__init__(module, in_keys=list(widths))
        self.widths = dict(widths)
