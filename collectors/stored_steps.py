"""The steps that a replay buffer stores, made from the batches that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor

__all__ = [
    "REWARD",
    "TERMINATED",
    "TRUNCATED",
    "in_precision",
    "observations_differ",
    "select_steps",
    "truncate_breaks",
]

REWARD, TERMINATED, TRUNCATED = ("next", "reward"), ("next", "terminated"), ("next", "truncated")


def select_steps(data: TensorDictBase, observations: Sequence[NestedKey], action_key: NestedKey) -> TensorDictBase:
    """The entries of a batch that the buffer reads, with ``truncated`` set at every end that is no termination.

    Args:
        data: what a collector yields, ``[N, T]``; it is not changed.
        observations: keys of the observations.
        action_key: key of the action.

    Raises:
        KeyError: if the data does not say where episodes are truncated.
    """
    ends: list[Any] = [unravel_key(("next", key)) for key in observations]
    kept = data.select(*observations, action_key, *ends, REWARD, TERMINATED).copy()
    truncated = data.get(TRUNCATED, None)
    done = data.get(("next", "done"), None)
    if truncated is None and done is None:
        raise KeyError("The data has neither ('next', 'truncated') nor ('next', 'done'): write all three flags.")
    if done is not None:
        over = done & ~kept[TERMINATED]
        truncated = over if truncated is None else truncated | over
    return kept.set(TRUNCATED, truncated.clone())


def truncate_breaks(data: TensorDictBase, after: TensorDictBase) -> None:
    """Truncates steps whose next observation is not what the following step began with: the collector was reset there.

    Args:
        data: steps ``[N, T]`` from ``select_steps``; the flags are changed in place.
        after: the observations after each of them.
    """
    open_ended = ~(data[TERMINATED] | data[TRUNCATED]).squeeze(-1)
    broken = torch.zeros_like(open_ended)
    broken[:, :-1] = observations_differ(after[:, :-1], data[:, 1:])
    data[TRUNCATED].squeeze(-1).logical_or_(broken & open_ended)


def observations_differ(after: TensorDictBase, following: TensorDictBase) -> Tensor:
    """In which rows of a batch an observation is not the one that followed. NaN equals NaN.

    Args:
        after: observations after a step, of any batch size.
        following: what the next step began with; entries that are not in ``after`` are not compared.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> after = TensorDict({"a": torch.tensor([[1.0, torch.nan], [2.0, 0.0]])}, [2])
        >>> following = TensorDict({"a": torch.tensor([[1.0, torch.nan], [3.0, 0.0]])}, [2])
        >>> observations_differ(after, following)
        tensor([False,  True])
    """
    dims = following.batch_dims
    differ = torch.zeros(following.batch_size, dtype=torch.bool, device=following.device)
    for key, then in after.items(True, True):
        now = following.get(key)
        different = (now != then) & ((now == now) | (then == then))
        differ |= different.flatten(dims).any(-1) if now.dim() > dims else different
    return differ


def in_precision(value: Tensor, dtype: torch.dtype, key: NestedKey) -> Tensor:
    """An observation in a floating-point type; one that has no floating-point numbers keeps its own.

    Args:
        value: the observation.
        dtype: the type.
        key: its key, for the message.

    Raises:
        ValueError: if the type is float16 and the observation holds a larger number than it can represent.
    """
    if not value.is_floating_point():
        return value
    out = value.to(dtype)
    if dtype == torch.float16 and bool((out.isinf() & value.isfinite()).any()):
        raise ValueError(
            f"{key!r} holds {float(value.abs().max()):.3g}, which float16 cannot (65504 is its largest). Use "
            "observation_dtype=torch.bfloat16, or scale the observation."
        )
    return out
