"""Several processes that train one policy, each on environments of its own (``torchrun``).

Every process runs the same script. ``edenrl.training.setup`` joins them, and ``Run`` gives all of them the parameters
of the first one. They stay equal, because everything that changes them is averaged or merged where it is computed:
gradients, loss and KL in ``GradientStep``, observation statistics in ``RunningNorm``, advantage statistics in ``GAE``
and ``PPOLoss``. Without ``torchrun`` nothing in this module does anything.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from edenrl.modules import several_processes

__all__ = [
    "PerProcess",
    "average_rows",
    "broadcast_modules",
    "exchange",
    "failing_together",
    "from_first",
    "local_device",
    "rank",
    "start",
    "stop",
    "world_size",
]

_FAILURE = "edenrl/first_failure"


def rank() -> int:
    """This process's number, from 0; 0 without ``torchrun``.

    Examples:
        >>> rank()
        0
    """
    return dist.get_rank() if several_processes() else 0


def world_size() -> int:
    """How many processes train together; 1 without ``torchrun``.

    Examples:
        >>> world_size()
        1
    """
    return dist.get_world_size() if several_processes() else 1


def local_device(name: str) -> str:
    """The device that ``name`` means in this process.

    "auto" is "cuda" where there is a GPU and "cpu" elsewhere. Under ``torchrun``, "cuda" is the GPU of this process:
    each process of a machine takes the one of its ``LOCAL_RANK``.

    Args:
        name: "auto" or a torch device.

    Examples:
        >>> local_device("cpu")
        'cpu'
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and _asked_for() > 1:
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return name


def _asked_for() -> int:
    """How many processes ``torchrun`` started; they may not be joined yet."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def start(device: torch.device, timeout: float = 600.0) -> None:
    """Joins the processes that ``torchrun`` started; does nothing without it, or when they are joined already.

    CPU tensors are exchanged by gloo, CUDA tensors by NCCL.

    Args:
        device: this process's device.
        timeout: seconds to wait for the others in any exchange before giving up. An evaluation must not take longer.

    Raises:
        ValueError: if ``WORLD_SIZE`` is set without the other variables of ``torchrun``.
    """
    if _asked_for() < 2 or dist.is_initialized():
        return
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ValueError(
            f"WORLD_SIZE={_asked_for()} is set in the environment but {', '.join(missing)} is not. Start the script "
            "with torchrun --nproc_per_node N, or unset WORLD_SIZE to train in one process."
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))


def stop() -> None:
    """Leaves the group of processes that ``start`` joined."""
    if several_processes():
        dist.destroy_process_group()


def exchange(value: Any) -> list[Any]:
    """Every process's ``value``, in the order of their ranks; all processes must call it.

    Values are pickled, so they need not have one type or size.

    Examples:
        >>> exchange(3)
        [3]
    """
    if not several_processes():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_first(value: Any) -> Any:
    """The first process's ``value``; all processes must call it.

    Examples:
        >>> from_first("runs/a")
        'runs/a'
    """
    values = [value]
    if several_processes():
        dist.broadcast_object_list(values, src=0)
    return values[0]


@torch.no_grad()
def broadcast_modules(modules: Iterable[nn.Module]) -> None:
    """Gives all processes the first one's parameters and buffers, in place."""
    if not several_processes():
        return
    for module in modules:
        for tensor in [*module.parameters(), *module.buffers()]:
            # An expanded or transposed tensor is not contiguous, which the exchange needs.
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, src=0)
            tensor.copy_(whole)


def average_rows(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One row of metrics from the rows of all processes.

    Values are averaged over the processes that have them and are not NaN there. Metrics of episodes (``episode/...``)
    are weighted by ``episode/count``, which is summed.

    Args:
        rows: metrics by name, one mapping per process.

    Examples:
        >>> row = {"loss": 1.0, "episode/count": 3.0, "episode/return": 10.0}
        >>> average_rows([row, {"loss": 3.0, "episode/count": 1.0, "episode/return": 2.0}])
        {'loss': 2.0, 'episode/count': 4.0, 'episode/return': 8.0}
    """
    if len(rows) == 1:
        return dict(rows[0])
    out = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        if name == "episode/count":
            out[name] = sum(row.get(name, 0.0) for row in rows)
            continue
        total, weight = 0.0, 0.0
        for row in rows:
            share = row.get("episode/count", 1.0) if name.startswith("episode/") else 1.0
            if share > 0 and not math.isnan(row.get(name, math.nan)):
                total, weight = total + share * row[name], weight + share
        out[name] = total / weight if weight else math.nan
    return out


class PerProcess:
    """A component of a checkpoint whose state differs between processes, such as a collector or the random states.

    The first process writes the checkpoint with the states of all processes; each process restores its own. With one
    process the state is the component's.

    Args:
        component: anything with ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, component: Any) -> None:
        self.component = component
        self._collected: dict[str, Any] = {}

    def collect(self) -> None:
        """Brings the states to the first process; all processes must call it before that one saves."""
        if not several_processes():
            return
        states: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(self.component.state_dict(), states)
        self._collected = {str(number): state for number, state in enumerate(states or [])}

    def state_dict(self) -> Any:
        """The collected states by rank (the component's own in a single process)."""
        return self._collected if several_processes() else self.component.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Restores this process's own."""
        self.component.load_state_dict(state[str(rank())] if several_processes() else state)


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """Wraps a script, so that an error in one process ends all of them, and each says where it came from.

    The process that fails first leaves its message where the others find it, and raises its error. The others notice at
    their next exchange with it. They exit with status 1 and that message, instead of an error of the network. Without
    an error the processes leave their group at the end.
    """
    try:
        yield
    except Exception as error:
        if not several_processes():
            raise
        # gloo raises a bare RuntimeError that begins with the place in its source.
        lost = isinstance(error, dist.DistError) or type(error) is RuntimeError and "/gloo/" in str(error)
        first = _first_failure(None if lost else error)
        if not lost:
            raise
        raise SystemExit(f"Process {dist.get_rank()} stops because of {first or _silent_failure(error)}") from None
    except SystemExit:
        stop()
        raise
    stop()


def _first_failure(own: Exception | None) -> str | None:
    """The message of the process that failed first, if one left it; otherwise leaves that of this process's error."""
    store = dist.distributed_c10d._get_default_store()
    # The store may be gone with the process that held it.
    with contextlib.suppress(Exception):
        if store.check([_FAILURE]):
            return store.get(_FAILURE).decode()
        if own is not None:
            store.set(_FAILURE, f"process {dist.get_rank()}: {type(own).__name__}: {own}")
    return None


def _silent_failure(error: Exception) -> str:
    """What an error of the network says about another process that left no message."""
    if "timed out" in str(error).lower() or "timeout" in str(error).lower():
        return (
            "another process that did not answer in time. Raise --process_timeout if it was busy, with a long "
            f"evaluation for example; otherwise it hangs ({error})"
        )
    return f"another process ended without a message; it may have been killed ({error})"
