"""One collector or several workers, chosen by name."""

from __future__ import annotations

import atexit
import importlib.util
import io
import logging
import os
import random
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.checkpoint import GlobalRNGState
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import EnvBase
from torchrl.weight_update import SharedMemWeightSyncScheme

from edenrl.collectors.rollout import ClosingCollector, Collector, needs_primers
from edenrl.collectors.storage_space import require_rollout_space
from edenrl.envs.seeds import checked_seed, spawn_seeds
from edenrl.modules import several_processes

__all__ = ["make_collector"]

Maker = Callable[[], EnvBase]


def make_collector(
    env: EnvBase,
    policy: Any,
    *,
    frames_per_batch: int,
    kind: Literal["single", "multi_sync", "ray"] = "single",
    worker_env: Callable[[int], EnvBase] | None = None,
    num_workers: int = 1,
    seed: int = 0,
) -> ClosingCollector:
    """Builds an on-policy collector that yields ``[N, T]`` for ever. A ``with`` block shuts it down.

    The N rows are in a fixed order, the workers' rows one after another. Workers receive the learner's parameters and
    statistics before each batch. Each worker has its own random state. Workers ignore Ctrl-C and end with the learner.
    They resume bit for bit from ``state_dict`` under the same conditions as ``edenrl.collectors.Collector``.

    Args:
        env: the environment that "single" steps. With workers it may be None; if given, its specs tell whether a
            rollout fits the memory.
        policy: acts; workers get copies on the CPU.
        frames_per_batch: N * T.
        kind: "single" (``Collector``), "multi_sync" (TorchRL's ``MultiSyncCollector``: processes of this machine) or
            "ray" (TorchRL's ``RayCollector``: actors of the cluster at ``RAY_ADDRESS``, or of one started for the run).
        worker_env: builds the environment of worker i, with N / num_workers rows and the seed of that worker. It must
            be picklable. For Ray it must be defined in an importable module, not in the script.
        num_workers: number of workers; it divides N.
        seed: of the action samples. Each worker has an independent seed, see ``edenrl.envs.spawn_seeds``.

    Raises:
        ValueError: for an unknown kind, workers without ``worker_env``, workers under ``torchrun``, frames that do not
            split, a rollout that does not fit the free memory, or more Ray workers than the cluster has CPUs.
        ImportError: for "ray" when it is not installed.

    Examples:
        >>> from edenrl.envs import make_env
        >>> with make_collector(make_env("PointMass", 4, seed=0), None, frames_per_batch=32) as collector:
        ...     print(next(iter(collector)).batch_size)
        torch.Size([4, 8])
    """
    if kind == "single":
        return Collector(env, policy, frames_per_batch=frames_per_batch, total_frames=-1)
    if kind not in ("multi_sync", "ray"):
        raise ValueError(f"Unknown collector {kind!r}; choose 'single', 'multi_sync' or 'ray'.")
    if worker_env is None:
        raise ValueError(f"collector {kind!r} needs worker_env, which builds the environment of one worker.")
    if several_processes():
        raise ValueError(
            f"--collector {kind} cannot be combined with torchrun, whose processes collect by themselves. Use "
            "--collector single, or start one process without torchrun."
        )
    if frames_per_batch % num_workers:
        raise ValueError(f"frames_per_batch={frames_per_batch} does not split over num_workers={num_workers}.")
    if env is not None:
        require_rollout_space(env, frames_per_batch, torch.device("cpu"))
    seeds = spawn_seeds(checked_seed(seed), num_workers)
    makers: list[Maker] = [partial(_seeded, worker_env, seeds[worker], worker) for worker in range(num_workers)]
    build = _multi_sync if kind == "multi_sync" else _ray
    collector = build(makers, policy, frames_per_batch)
    # If the script ends with an error, Python and the workers would wait for each other without this. Calling
    # shutdown twice is harmless.
    atexit.register(collector.shutdown)
    return collector


def _seeded(worker_env: Callable[[int], EnvBase], seed: int, worker: int) -> EnvBase:
    """Runs in the worker, before anything there has drawn a random number."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    return worker_env(worker)


def _ignore_signals() -> None:
    """Leaves signals to the learner, which answers them by ending its iteration."""
    # A terminal or a job manager signals all processes of a group, so workers are in another group. SIGTERM keeps
    # its meaning: TorchRL sends it to the other workers when one has failed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)


class _Worker(Collector):
    """A ``Collector`` in a separate process: the random states of the process are part of its state."""

    def _recorded_metrics(self) -> AbstractContextManager[list[dict[str, Tensor]]]:
        # The memory that is shared with the learner has the entries of the specs only.
        return nullcontext([])

    def state_dict(self) -> OrderedDict[str, Any]:
        # One tensor of bytes, because the exchange of states between processes would drop or convert some entries.
        file = io.BytesIO()
        torch.save({"collector": dict(super().state_dict()), "rng": GlobalRNGState().state_dict()}, file)
        return OrderedDict(worker=torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8))

    def load_state_dict(self, state_dict: OrderedDict[str, Any], **kwargs: Any) -> None:
        state = torch.load(io.BytesIO(state_dict["worker"].cpu().numpy().tobytes()), weights_only=True)
        super().load_state_dict(OrderedDict(state["collector"]))
        GlobalRNGState().load_state_dict(state["rng"])


class _MultiSync(ClosingCollector, MultiSyncCollector):
    """Adds to TorchRL's error which worker failed."""

    def iterator(self) -> Iterator[TensorDictBase]:
        try:
            yield from super().iterator()
        except (RuntimeError, ValueError, OSError) as error:
            # Workers that TorchRL has ended itself are closed, and are not the ones that failed.
            ended = {i: p.exitcode for i, p in enumerate(self.procs) if not p._closed and p.exitcode is not None}
            if not ended:
                raise
            failed, status = next(iter(ended.items()))
            how = f"exit status {status}); its own message stands above"
            if status < 0:
                how = f"signal {-status}); the system or somebody killed it, for example for want of memory"
            raise ChildProcessError(f"Worker {failed} of the collector ended ({how}.") from error


class _SharedWeights(SharedMemWeightSyncScheme):
    """Weights in shared memory.

    TorchRL's class starts a thread when it is deleted. A traceback that is kept to the end of the program keeps it
    alive, and then the thread never starts and the program never ends.
    """

    def __del__(self) -> None:
        if not sys.is_finalizing():
            super().__del__()


_CPU: dict[str, Any] = {name: "cpu" for name in ("policy_device", "env_device", "storing_device")}


def _multi_sync(makers: list[Maker], policy: Any, frames: int) -> ClosingCollector:
    return _MultiSync(
        makers,
        policy,
        frames_per_batch=frames,
        total_frames=-1,
        collector_class=_Worker,
        update_at_each_batch=True,
        cat_results=0,
        use_buffers=True,
        num_threads=torch.get_num_threads(),
        init_fn=_ignore_signals,
        weight_sync_schemes={"policy": _SharedWeights()},
        auto_register_policy_transforms=needs_primers(policy),
        **_CPU,
    )


def _join(batches: TensorDictBase) -> TensorDictBase:
    return batches.flatten(0, 1)


def _ray(makers: list[Maker], policy: Any, frames: int) -> ClosingCollector:
    if importlib.util.find_spec("ray") is None:
        raise ImportError('--collector ray needs the ray package, which is not installed: pip install "edenrl[ray]"')
    import ray
    from torchrl.collectors.distributed import RayCollector

    class Ray(ClosingCollector, RayCollector):
        pass

    options: dict[str, Any] = dict(
        address=os.environ.get("RAY_ADDRESS"),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    started = not ray.is_initialized()
    if started:
        ray.init(**options)
    cpus = int(ray.cluster_resources().get("CPU", 0))
    if cpus < len(makers):
        if started:
            ray.shutdown()
        raise ValueError(
            f"--num_workers {len(makers)} Ray actors need as many CPUs, the cluster has {cpus}. Set --num_workers "
            f"{cpus} or fewer, or RAY_ADDRESS to a larger cluster."
        )
    collector = Ray(
        makers,
        policy,
        frames_per_batch=frames,
        total_frames=sys.maxsize,
        sync=True,
        update_after_each_batch=True,
        collector_class=_Worker,
        collector_kwargs={"auto_register_policy_transforms": needs_primers(policy)},
        remote_configs={"num_cpus": 1, "num_gpus": 0},
        ray_init_config=options,
        postproc=_join,
        **_CPU,
    )
    collector.update_policy_weights_()
    if started:
        collector.shutdown = partial(collector.shutdown, shutdown_ray=True)
    return collector
