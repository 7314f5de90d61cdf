"""A depth student as a TensorDict policy: its state, and when it gets a new image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModule, dispatch
from torch import Tensor
from torchrl.data import Composite, Unbounded
from torchrl.envs import Compose, EnvBase, TensorDictPrimer, Transform, TransformedEnv

from edenrl.modules.depth import DepthStudent
from edenrl.modules.finite import refuse_nonfinite

__all__ = ["DEPTH_STATES", "DepthPolicy", "DepthRefresh", "require_depth_interval"]

DEPTH_STATES = ("depth_hidden", "depth_latent", "depth_yaw")
"""Keys of what a ``DepthPolicy`` carries from step to step."""


class DepthPolicy(TensorDictModule):
    """A ``DepthStudent`` as a TensorDict policy; its state is carried under ``DEPTH_STATES``.

    Reads ``prop``, ``prop_history``, ``depth``, ``depth_new`` and the state. Writes the action mean under ``action``,
    and the next state. It acts on its own yaw angles and never on the true ones.

    The environment needs the transforms that ``make_tensordict_primer`` returns; ``edenrl.training.evaluate_run``
    appends them. They publish the zeros that episodes begin with, and ``depth_new``, which says when the image is new.
    A row that was reset between two images acts on a latent and yaw of zero until the next image.

    Args:
        student: the network.
        keys: other names for any of ``prop``, ``history``, ``depth``.
        update_interval: control steps between images. Default 5.

    Attributes:
        groups: the names of ``prop``, ``history`` and ``depth``.

    Raises:
        ValueError: for a key of something else; in ``forward`` for an observation that is not finite, naming group, row
            and, where the environment counts them (``step_count``), the step of the episode.

    Examples:
        >>> from torchrl.modules.utils import get_primers_from_module
        >>> from edenrl.modules import DepthEncoder, RMAActor
        >>> teacher = RMAActor(dict(prop=53, scan=132, priv_explicit=9, priv_latent=29, history=530), num_actions=12)
        >>> policy = DepthPolicy(DepthStudent(teacher, DepthEncoder(53, hidden=16)))
        >>> policy.in_keys[:4]
        ['prop', 'prop_history', 'depth', 'depth_new']
        >>> [type(transform).__name__ for transform in get_primers_from_module(policy)]
        ['DepthRefresh', 'TensorDictPrimer']
    """

    module: DepthStudent

    def __init__(
        self, student: DepthStudent, keys: Mapping[str, NestedKey] | None = None, *, update_interval: int = 5
    ) -> None:
        default: dict[str, NestedKey] = dict(prop="prop", history="prop_history", depth="depth")
        if unknown := set(keys or {}) - set(default):
            raise ValueError(f"keys names {sorted(unknown)}; a DepthPolicy reads {list(default)}.")
        self.update_interval = update_interval
        self.groups = {**default, **(keys or {})}
        super().__init__(
            student,
            in_keys=[*self.groups.values(), "depth_new", *DEPTH_STATES],
            out_keys=["action", *(("next", name) for name in DEPTH_STATES)],
        )

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> TensorDictBase:
        """Acts on one step of an environment."""
        old = tensordict["depth_new"][..., 0] <= 0.5
        refuse_nonfinite(
            tensordict,
            self.groups.values(),
            what="observation",
            absent={self.groups["depth"]: old},  # between two images nobody looks
            step=tensordict.get("step_count", None),
        )
        return super().forward(tensordict, *args, **kwargs)

    def make_tensordict_primer(self) -> Compose:
        """The transforms that an environment needs for this policy."""
        states = zip(DEPTH_STATES, self.module.start(1), strict=True)
        primers = {name: Unbounded(shape=state.shape[1:], device=state.device) for name, state in states}
        return Compose(DepthRefresh(self.update_interval), TensorDictPrimer(primers, expand_specs=True))


class DepthRefresh(Transform):
    """Publishes ``depth_new`` ``[N, 1]``: 1 at the steps at which the environment's images are new, otherwise 0.

    Images are new in all rows together, every ``interval`` steps since the whole batch was reset. When one row alone is
    reset, its first image is not announced: the policy sees one when the next is due for all.

    Args:
        interval: control steps between images; the environment must declare the same ``depth_interval``.

    Raises:
        ValueError: on attachment to an environment with another interval.

    Examples:
        >>> from edenrl.envs import Quadruped
        >>> env = TransformedEnv(Quadruped(2, groups=["prop", "depth"], seed=0, num_threads=1), DepthRefresh(5))
        >>> env.rollout(7)["depth_new"][0, :, 0].tolist()
        [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    """

    steps: Tensor

    def __init__(self, interval: int = 5) -> None:
        super().__init__(in_keys=[], out_keys=["depth_new"])
        self.interval = interval
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def set_container(self, container: Any) -> None:
        """Attach to an environment, after checking its interval."""
        super().set_container(container)
        if self.parent is not None:
            require_depth_interval(self.parent, self.interval)

    def _mark(self, tensordict: TensorDictBase) -> TensorDictBase:
        new = (self.steps % self.interval == 0).float().to(tensordict.device or "cpu")
        return tensordict.set("depth_new", new.expand(*tensordict.batch_size, 1).clone())

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        self.steps += 1
        return self._mark(next_tensordict)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        if tensordict.get("_reset", None) is None:
            self.steps.zero_()
        return self._mark(tensordict_reset)

    def policy_contract(self) -> dict[str, Any]:
        """What a deployed policy must know of ``depth_new``, for ``edenrl.export``."""
        meaning = f"1 when the image is new, every {self.interval} steps from the first on, otherwise 0"
        return {"observations": {"depth_new": [{"name": "new image", "width": 1, "meaning": meaning}]}}

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the mark."""
        shape = (*observation_spec.shape, 1)
        observation_spec["depth_new"] = Unbounded(shape, device=observation_spec.device, dtype=torch.float32)
        return observation_spec


def require_depth_interval(env: EnvBase, interval: int) -> None:
    """Refuses an environment unless it declares ``interval`` as its ``depth_interval``.

    Raises:
        ValueError: naming what it declares, if anything.
    """
    while isinstance(env, TransformedEnv):
        env = env.base_env
    declared = getattr(env, "depth_interval", None)
    if declared is None:
        raise ValueError(
            f"{type(env).__name__} does not declare depth_interval, the control steps between depth images. Give it "
            "this attribute, or choose an environment with a depth camera such as QuadrupedTerrain."
        )
    if declared != interval:
        raise ValueError(
            f"The depth encoder is to run every update_interval={interval} steps; {type(env).__name__} makes a new "
            f"image every {declared}. Set update_interval={declared}."
        )
