"""Calling a loss on copies, and comparing what it returns: the tools of every check."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictParams
from torch import Tensor
from torchrl.objectives import LossModule

__all__ = [
    "Outputs",
    "Violations",
    "call",
    "close",
    "compare",
    "fresh_copy",
    "losses_of",
    "require",
    "seeded",
    "without_nan",
]

Outputs = dict[Any, Tensor]
"""What a loss returned, by key."""


def require(condition: bool, loss: LossModule, message: str) -> None:
    """Raises an ``AssertionError`` that begins with the name of the loss, unless ``condition`` holds."""
    if not condition:
        raise AssertionError(f"{type(loss).__name__}: {message}")


class Violations:
    """Collects what independent checks find, so that all of it is reported at once.

    Examples:
        >>> violations = Violations()
        >>> for number in (1, -2, -3):
        ...     with violations.collect():
        ...         assert number > 0, f"{number} is negative"
        >>> violations.report()
        Traceback (most recent call last):
        AssertionError: -2 is negative
        -3 is negative
    """

    def __init__(self) -> None:
        self._found: dict[str, AssertionError] = {}

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Keeps the ``AssertionError`` of the block, once for each message."""
        try:
            yield
        except AssertionError as error:
            self._found.setdefault(str(error), error)
        except Exception:
            # A loss that is known to be broken may break a check. What was found is the thing to mend first.
            if not self._found:
                raise

    def report(self) -> None:
        """Raises one ``AssertionError`` for all that was found, if anything was."""
        if self._found:
            first = next(iter(self._found.values()))
            raise AssertionError("\n".join(self._found)) from first.__cause__


def seeded(function: Callable[[], Any], seed: int = 0) -> Any:
    """Calls under a fixed seed, so that sampled entropies agree. The caller's random state is not changed."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        return function()


def fresh_copy(loss: LossModule, **attributes: Any) -> LossModule:
    """A copy of the loss with some attributes set. Forward may advance counters and statistics of the copy."""
    memo: dict[int, Any] = {}
    # deepcopy alone would give each functional network its own copy of the parameters that they share.
    for module in loss.modules():
        if isinstance(module, TensorDictParams):
            twin = module.apply(partial(copy.deepcopy, memo=memo), filter_empty=False)
            memo[id(module)] = TensorDictParams(twin, no_convert=True)
    probe = copy.deepcopy(loss, memo)
    for name, value in attributes.items():
        setattr(probe, name, value)
    return probe


def call(
    probe: LossModule,
    tensordict: TensorDictBase,
    when: str = "on the given batch",
    fix: str = "give a batch with what it reads",
    seed: int = 0,
) -> Outputs:
    """Every entry that ``probe`` returns for a copy of the batch.

    Args:
        probe: a copy of the loss; the call may change its buffers.
        tensordict: the batch, which stays as it is.
        when: what was done before, for the message when forward raises.
        fix: what to do about it, for the same message.
        seed: of the random numbers that forward draws.
    """
    try:
        out = seeded(lambda: probe(tensordict.clone()), seed)
    except Exception as error:
        message = f"{type(probe).__name__}: {when}, forward raises {type(error).__name__}: {error}; {fix}."
        raise AssertionError(message) from error
    require(isinstance(out, TensorDictBase), probe, f"forward returned a {type(out).__name__}; return a TensorDict.")
    return dict(out.items(True, True))


def losses_of(outputs: Outputs) -> dict[str, Tensor]:
    """The ``loss_*`` entries among what a loss returned."""
    return {key: value for key, value in outputs.items() if isinstance(key, str) and key.startswith("loss_")}


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    """Whether two tensors have one shape and nearly the same values, on any device and in any precision."""
    if actual.shape != expected.shape:
        return False
    actual, expected = actual.detach().to("cpu", torch.float64), expected.detach().to("cpu", torch.float64)
    return torch.allclose(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def without_nan(tensor: Tensor) -> Tensor:
    """The tensor with every NaN replaced by one number, because NaN never equals itself."""
    return tensor.nan_to_num(nan=torch.finfo(tensor.dtype).max) if tensor.is_floating_point() else tensor


def compare(actual: Outputs, expected: Outputs, tolerance: float = 1e-5) -> str:
    """Describes the first entry that differs. Empty when all agree."""
    if missing := set(map(str, actual)) ^ set(map(str, expected)):
        return f"only one of them has {sorted(missing)}"
    for key, value in expected.items():
        if not close(actual[key], value, tolerance):
            if actual[key].shape != value.shape:
                return f"{key!r} has shape {tuple(actual[key].shape)} instead of {tuple(value.shape)}"
            pair = torch.stack([tensor.detach().to("cpu", torch.float64).flatten() for tensor in (actual[key], value)])
            got, wanted = pair[:, (pair[0] - pair[1]).abs().argmax()].tolist()
            return f"{key!r} is {got:.6g} instead of {wanted:.6g}"
    return ""
