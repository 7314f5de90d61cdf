"""Shuffled mini-batches of a rollout."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tensordict import TensorDictBase

__all__ = ["minibatches"]


def minibatches(data: TensorDictBase, epochs: int, num_minibatches: int) -> Iterator[TensorDictBase]:
    """Passes over a rollout in mini-batches, shuffled anew for every epoch.

    Args:
        data: transitions of any batch shape ``[*batch]``; they are flattened to ``[frames]``. What no loss reads, such
            as ``data.exclude("next", "collector")`` leaves out, costs a copy in every mini-batch.
        epochs: passes over the data.
        num_minibatches: mini-batches per pass; their sizes differ by at most one.

    Yields:
        Batches ``[frames / num_minibatches]``.

    Raises:
        ValueError: for more mini-batches than transitions.

    Examples:
        >>> from tensordict import TensorDict
        >>> data = TensorDict(observation=torch.zeros(4, 6, 3), batch_size=[4, 6])
        >>> [len(batch) for batch in minibatches(data, epochs=2, num_minibatches=3)]
        [8, 8, 8, 8, 8, 8]
    """
    data = data.reshape(-1)
    if num_minibatches > len(data):
        raise ValueError(
            f"num_minibatches={num_minibatches} were asked of {len(data)} transitions; expected at most as many "
            "mini-batches as transitions. Lower num_minibatches, or collect more steps."
        )
    device = next(iter(data.values(include_nested=True, leaves_only=True))).device
    for _ in range(epochs):
        for index in torch.randperm(len(data), device=device).tensor_split(num_minibatches):
            yield data[index]
