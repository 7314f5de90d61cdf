"""On-policy collection that resumes in the middle of an episode."""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl import collectors
from torchrl.modules.utils import get_primers_from_module

from edenrl.collectors.resume import env_state_dict, load_env_state_dict, load_step
from edenrl.collectors.storage_space import require_rollout_space
from edenrl.envs.recorded_metrics import add_metrics, recorded_metrics

__all__ = ["Collector"]

_log = logging.getLogger("edenrl")
_Closing = TypeVar("_Closing", bound="ClosingCollector")


def needs_primers(policy: Any) -> bool:
    """Whether a policy carries a state from step to step, so that its environment needs a primer for it.

    TorchRL would add an ``InitTracker`` to every environment; only such policies read it.
    """
    return isinstance(policy, nn.Module) and get_primers_from_module(policy, warn=False) is not None


class ClosingCollector(collectors.BaseCollector):
    """A TorchRL collector that a ``with`` block shuts down, however the block ends."""

    def __enter__(self: _Closing) -> _Closing:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()


class Collector(ClosingCollector, collectors.Collector):
    """TorchRL's ``Collector`` with a ``state_dict`` from which a run continues bit for bit.

    TorchRL restores counters and transforms, but resets every environment. This class also saves the current step and
    the simulation state. The environment must return that state in its own ``state_dict`` under ``"_extra_state"``, as
    ``PointMass`` and synchronous Gymnasium environments do. Other environments start new episodes, with a warning. The
    policy is not part of the state: checkpoint it under its own name.

    It also warns, once, when the first twenty episodes all ended by termination and at the same length. That is
    probably a time limit that is declared as a termination, and then nothing is bootstrapped at its end.

    Takes the arguments of TorchRL's class and yields ``[*env.batch_size, T]``. A ``with`` block shuts it down.

    Raises:
        ValueError: for a rollout that does not fit the free memory, with the number of bytes, before it is collected.

    Examples:
        >>> from edenrl.envs import make_env
        >>> env = make_env("PointMass", 4, seed=0)
        >>> with Collector(env, None, frames_per_batch=32, total_frames=-1) as collector:
        ...     print(next(iter(collector)).batch_size)
        torch.Size([4, 8])
    """

    _carrier: TensorDictBase

    def __init__(self, create_env_fn: Any, policy: Any = None, **kwargs: Any) -> None:
        kwargs.setdefault("auto_register_policy_transforms", needs_primers(policy))
        self._first_lengths: list[int] | None = []
        super().__init__(create_env_fn, policy, **kwargs)

    def _maybe_make_final_rollout(self, make_rollout: bool) -> None:
        if make_rollout:
            require_rollout_space(self.env, self.requested_frames_per_batch, self.storing_device)
        super()._maybe_make_final_rollout(make_rollout)

    def rollout(self) -> TensorDictBase | None:
        """Collects one batch; see TorchRL's class. Metrics that no spec declares are added, NaN before they come."""
        with self._recorded_metrics() as steps:
            data = super().rollout()
        if data is not None:
            data = add_metrics(data, steps)
        if self._first_lengths is not None and data is not None:
            self._suspect_time_limits(data["next"])
        return data

    def _recorded_metrics(self) -> AbstractContextManager[list[dict[str, Tensor]]]:
        return recorded_metrics(self.env)

    def _suspect_time_limits(self, ended: TensorDictBase) -> None:
        """Watches finished episodes for a time limit that is reported as a termination.

        Warns after twenty that terminated at the same length, stops at the first that did not.
        """
        lengths, truncated = ended.get("step_count", None), ended.get("truncated", None)
        if lengths is None or self._first_lengths is None:
            self._first_lengths = None
            return
        done = ended["done"]
        self._first_lengths += lengths[done].tolist()
        truncates = truncated is not None and bool(truncated[done].any())
        if truncates or len(set(self._first_lengths)) > 1:
            self._first_lengths = None
        elif len(self._first_lengths) >= 20:
            _log.warning(
                "All %d episodes so far were terminated at step %d and none was truncated. If that is a time limit, "
                "the environment must report it as truncated: a termination is not bootstrapped.",
                len(self._first_lengths),
                self._first_lengths[0],
            )
            self._first_lengths = None

    def state_dict(self) -> OrderedDict[str, Any]:
        """Counters, transforms, simulation state and the carried step."""
        state: OrderedDict[str, Any] = OrderedDict(
            frames=self._frames,
            iter=self._iter,
            trajectories=self._traj_pool.state_dict() if self.track_traj_ids else None,
            **env_state_dict(self.env),
            carrier=self._carrier.clone().to_dict(),
        )
        if self.policy_version_tracker is not None:
            state["policy_version"] = self.policy_version
        return state

    def load_state_dict(self, state_dict: OrderedDict[str, Any], **kwargs: Any) -> None:
        """Restores ``state_dict``; the next batch continues where the saved collector stopped."""
        self._frames, self._iter = state_dict["frames"], state_dict["iter"]
        if self.track_traj_ids:
            self._traj_pool.load_state_dict(state_dict["trajectories"])
        if self.policy_version_tracker is not None and "policy_version" in state_dict:
            self.policy_version_tracker.version = state_dict["policy_version"]
        if not load_env_state_dict(self.env, state_dict):
            # The carried step belongs to episodes that are lost: keep the fresh reset, under new trajectory ids.
            if self.track_traj_ids:
                ids = self._traj_pool.get_traj_and_increment(self.n_env, device=self.storing_device)
                self._carrier.set(("collector", "traj_ids"), ids.view(self.env.batch_size))
            return
        self._carrier = load_step(state_dict["carrier"], self._carrier)
        if self._carrier_has_no_device:
            self._carrier.clear_device_()
