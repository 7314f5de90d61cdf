"""Refusal of data that is not finite, by key, row and step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.utils import expand_as_right
from torch import Tensor

__all__ = ["refuse_nonfinite"]

# Squared by a loss, anything larger overflows float32.
LARGEST = 1e18


def refuse_nonfinite(
    data: TensorDictBase,
    keys: Iterable[NestedKey],
    *,
    time_axis: int | None = None,
    what: str = "rollout",
    absent: Mapping[NestedKey, Tensor] | None = None,
    step: int | Tensor | None = None,
) -> None:
    """Raises on the first entry that is NaN, infinite or beyond 1e18.

    Reads the device once when all is well. Entries that are absent, empty or not floating-point are left out.

    Args:
        data: data of any batch shape.
        keys: the entries to look at, in the order in which a step produces them.
        time_axis: batch dimension that counts steps. Default: the last of two or more, none of a single one.
        what: what is refused, for the message. Default "rollout".
        absent: per key, the rows in which a NaN is allowed because nothing reads it, bool of the batch's shape.
        step: number of the step that data without a time axis belongs to, for the message; one for all rows, or one for
            each row ``[N, 1]``.

    Raises:
        ValueError: naming key, row and step. Of several entries it is the one that went wrong first.

    Examples:
        >>> from tensordict import TensorDict
        >>> data = TensorDict(reward=torch.zeros(4, 6, 1), batch_size=[4, 6])
        >>> refuse_nonfinite(data, ["reward"])
        >>> data["reward"][2, 5] = torch.nan
        >>> refuse_nonfinite(data, ["reward"])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: 'reward' holds nan at env 2, step 5 (index [2, 5, 0]): the rollout is refused before anything ...
    """
    entries = tensors_under(data, keys)
    floats = {key: entry.detach() for key, entry in entries.items() if entry.is_floating_point() and entry.numel()}
    if not floats:
        return
    # Comparisons with NaN are false, so one reduction covers NaN, infinity and overflow.
    good = [entry.abs().amax() < LARGEST for entry in floats.values()]
    if bool(torch.stack(good).all()):
        return
    if time_axis is None and data.ndim > 1:
        time_axis = data.ndim - 1
    elif time_axis is not None:
        time_axis %= data.ndim
    found = []
    for order, (key, entry) in enumerate(floats.items()):
        poisons = ~(entry.abs() < LARGEST)
        if absent is not None and key in absent:
            poisons &= ~(entry.isnan() & expand_as_right(absent[key], entry))
        bad = poisons.nonzero()
        if len(bad):
            first = (bad[0] if time_axis is None else bad[bad[:, time_axis].argmin()]).tolist()
            found.append((0 if time_axis is None else first[time_axis], order, key, first))
    if not found:
        return
    # What went wrong first, in time and within a step, is the cause of the rest.
    _, _, key, first = min(found)
    value = floats[key][tuple(first)].item()
    raise ValueError(
        f"{key!r} holds {value:.6g} at {_place(first[: data.ndim], time_axis, step)}(index {first}): the {what} is "
        "refused before anything uses it. Fix the environment (or terminate a state that diverges) so that this entry "
        "stays finite and below 1e18."
    )


def tensors_under(data: TensorDictBase, keys: Iterable[NestedKey]) -> dict[NestedKey, Tensor]:
    """The tensors of the keys that are there; a nested entry, such as an action of several parts, gives all of its."""
    found: dict[NestedKey, Tensor] = {}
    for key in keys:
        entry = data.get(key, None)
        if isinstance(entry, TensorDictBase):
            found |= {unravel_key((key, name)): leaf for name, leaf in entry.items(True, True)}
        elif entry is not None:
            found[key] = entry
    return found


def _place(index: list[int], time_axis: int | None, step: int | Tensor | None) -> str:
    if time_axis is None:
        if not index:
            return ""
        number = step[index[0]].item() if isinstance(step, Tensor) else step
        return f"row {index[0]} " if number is None else f"row {index[0]}, step {number} "
    names = [f"step {i}" if axis == time_axis else f"env {i}" for axis, i in enumerate(index)]
    names.append(names.pop(time_axis))
    return ", ".join(names) + " "
