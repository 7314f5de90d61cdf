"""Adversarial motion prior: the discriminator of motion windows and the reward it gives."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torchrl.data import Composite
from torchrl.envs import Transform

from edenrl.modules.episodes import whole_episode_ends
from edenrl.modules.finite import refuse_nonfinite
from edenrl.modules.groups import require_layers
from edenrl.modules.mlp import at_least
from edenrl.modules.normalization import RunningNorm, root

__all__ = ["AMPReward", "Discriminator", "FrameNorm", "SaturationWatch"]

_log = logging.getLogger("edenrl")


class FrameNorm(RunningNorm):
    """Normalizes single motion frames: ``(x - mean) / sqrt(var + eps^2)``, clipped.

    A ``RunningNorm`` with another formula. It starts as if it had seen 1e-4 frames of mean 0 and variance 1, so that
    the first batch almost replaces the start. Pass raw frames to ``update``.

    Args:
        frame_dim: width f of a frame.
        clip: bound on the magnitude of the normalized features. Default 10.
        eps: default 0.01.

    Source: the frame statistics of the HUSKY humanoid skateboarding project, there fed with normalized frames.

    Examples:
        >>> norm = FrameNorm(1)
        >>> norm.update(torch.tensor([[0.0], [2.0]]))
        >>> round(float(norm.mean), 3), round(float(norm.var), 3), round(float(norm.count), 4)
        (1.0, 1.0, 2.0001)
        >>> norm(torch.tensor([[3.0], [100.0]])).round(decimals=3).tolist()
        [[2.0], [10.0]]
    """

    def __init__(self, frame_dim: int, clip: float = 10.0, eps: float = 1e-2) -> None:
        super().__init__(frame_dim, clip=clip, eps=eps)
        self.count = torch.tensor(1e-4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalized frames ``(*batch, f)``."""
        self._require_shape(x)
        dtype = torch.promote_types(x.dtype, self.dtype)
        wide = torch.promote_types(dtype, torch.float32)
        out = (x.to(wide) - self.mean.to(wide)) / root(self.var, wide, self.eps**2)
        if self.clip is not None:
            out = out.clamp(-self.clip, self.clip)
        return out.to(dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrameNorm:
        exact = self.count
        super()._apply(fn, recurse)
        self.count = exact.to(self.count.device)
        return self


class Discriminator(nn.Module):
    """Tells windows of reference motion from windows of the policy: +1 for the one, -1 for the other.

    A window is K frames of width f, flattened, oldest first. Frames are normalized by running statistics
    (``FrameNorm``). Then come layers with spectral norm and ReLU, and a linear output with spectral norm. In training
    mode every forward pass makes one power iteration, which changes the singular vectors; these are buffers. ``score``
    changes nothing, in either mode.

    Args:
        frame_dim: width f of a frame.
        num_frames: frames K of a window. Default 5.
        hidden: widths of the hidden layers. Default (256, 256).
        normalize: whether frames are normalized. Default True.

    Source: Peng et al. 2021, "AMP", arXiv:2104.02180; spectral norm (Miyato et al. 2018, arXiv:1802.05957) and
    windows as in the HUSKY humanoid skateboarding project.

    Examples:
        >>> discriminator = Discriminator(frame_dim=12, hidden=(16,))
        >>> discriminator.score(torch.zeros(8, 24, 60)).shape
        torch.Size([8, 24, 1])
    """

    def __init__(
        self, frame_dim: int, num_frames: int = 5, hidden: Sequence[int] = (256, 256), normalize: bool = True
    ) -> None:
        super().__init__()
        require_layers("Discriminator", hidden=hidden)
        if frame_dim < 1 or num_frames < 2 or not hidden:
            raise ValueError(
                f"Discriminator was given frame_dim={frame_dim}, num_frames={num_frames}, hidden={tuple(hidden)}; "
                "expected frame_dim >= 1, num_frames >= 2 and at least one hidden width."
            )
        self.frame_dim, self.num_frames = frame_dim, num_frames
        self.norm = FrameNorm(frame_dim) if normalize else None
        layers: list[nn.Module] = []
        for width_in, width_out in pairwise([frame_dim * num_frames, *hidden]):
            layers += [spectral_norm(nn.Linear(width_in, width_out)), nn.ReLU()]
        self.trunk = nn.Sequential(*layers)
        self.head = spectral_norm(nn.Linear(hidden[-1], 1))

    @property
    def window_dim(self) -> int:
        """Width K * f of a window."""
        return self.frame_dim * self.num_frames

    def normalize(self, windows: Tensor) -> Tensor:
        """Normalizes the frames of raw windows ``(*batch, K * f)``, same shape."""
        if self.norm is None:
            return at_least(windows, next(self.parameters(), windows))
        normalized: Tensor = self.norm(windows.unflatten(-1, (self.num_frames, self.frame_dim)))
        return normalized.flatten(-2)

    def network(self, normalized: Tensor) -> Tensor:
        """Output ``(*batch, 1)`` for windows whose frames are normalized; the gradient penalty is taken here."""
        output: Tensor = self.head(self.trunk(normalized))
        return output

    def forward(self, windows: Tensor) -> Tensor:
        """Output ``(*batch, 1)`` for raw windows ``(*batch, K * f)``."""
        return self.network(self.normalize(windows))

    @torch.no_grad()
    def score(self, windows: Tensor) -> Tensor:
        """``forward`` without gradient and without a change of any buffer, whatever the mode."""
        training = self.training
        self.eval()  # no power iteration
        try:
            return self(windows)
        finally:
            self.train(training)

    def optimizer_groups(self, trunk_decay: float = 1e-3, head_decay: float = 1e-1) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer, with the weight decay of the hidden layers and of the output."""
        parts = ((self.trunk, trunk_decay), (self.head, head_decay))
        return [{"params": list(part.parameters()), "weight_decay": decay} for part, decay in parts]

    def update_normalization(self, *windows: Tensor) -> None:
        """Merges the last frame of each raw window ``(*batch, K * f)`` into the statistics, all arguments as one batch.

        Processes that train together must all call it, those without windows too.
        """
        if self.norm is not None:
            self.norm.update(torch.cat([part.reshape(-1, self.window_dim)[:, -self.frame_dim :] for part in windows]))


class AMPReward(TensorDictModuleBase):
    """Adds the style reward of a discriminator to the reward, over a whole rollout in one pass.

    With ``d`` the discriminator's output for the window *after* the step (at the end of an episode its true last one),
    the style reward is ``coeff * max(0, 1 - (d - 1)^2 / 4)``, in [0, coeff]. It is written as ``("next",
    "style_reward")``, and ``scale`` times it is added to ``("next", "reward")`` where ``("next", "amp_gate")`` is above
    0.5. Elsewhere the reward stays as it is, bit for bit.

    Use it in one of three ways: call it once on a collected rollout, before advantages are estimated; give it to a
    collector as ``postproc``; or append ``as_transform()`` to an environment, which scores step by step.

    Args:
        discriminator: the ``Discriminator``.
        coeff: largest style reward. Default 5.
        scale: factor on what is added. Default 0.02. With the control step in seconds ``coeff`` is per second, and the
            style return the same at every control rate.
        window_key: windows ``[*batch, K * f]``. Default ``("next", "amp_window")``.
        gate_key: gates ``[*batch, 1]``. Default ``("next", "amp_gate")``.
        reward_key: rewards ``[*batch, 1]``. Default ``("next", "reward")``.
        style_key: where the style reward is written. Default ``("next", "style_reward")``.

    Raises:
        ValueError: a negative ``coeff`` or ``scale``; windows or gates of another shape; windows, gates or rewards that
            are not finite.
        KeyError: data without one of the keys.

    Source: Peng et al. 2021, "AMP", arXiv:2104.02180.

    Examples:
        >>> from tensordict import TensorDict
        >>> reward = AMPReward(Discriminator(frame_dim=3, hidden=(8,)))
        >>> gate = torch.tensor([[1.0], [0.0]])
        >>> step = {"amp_window": torch.zeros(2, 15), "amp_gate": gate, "reward": torch.zeros(2, 1)}
        >>> out = reward(TensorDict(next=step, batch_size=[2]))["next"]
        >>> bool(torch.equal(out["reward"], 0.02 * out["style_reward"] * gate))
        True
    """

    def __init__(
        self,
        discriminator: Discriminator,
        *,
        coeff: float = 5.0,
        scale: float = 0.02,
        window_key: NestedKey = ("next", "amp_window"),
        gate_key: NestedKey = ("next", "amp_gate"),
        reward_key: NestedKey = ("next", "reward"),
        style_key: NestedKey = ("next", "style_reward"),
    ) -> None:
        super().__init__()
        if not (coeff >= 0 and scale >= 0):
            raise ValueError(f"AMPReward needs coeff >= 0 and scale >= 0, got coeff={coeff}, scale={scale}.")
        self.discriminator, self.coeff, self.scale = discriminator, coeff, scale
        self.in_keys = [window_key, gate_key, reward_key]
        self.out_keys = [reward_key, style_key]

    def style(self, windows: Tensor) -> Tensor:
        """Style reward ``[*batch, 1]`` of raw windows, neither gated nor scaled."""
        d = self.discriminator.score(windows)
        return self.coeff * (1.0 - 0.25 * (d - 1.0).square()).clamp_min(0.0)

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes both rewards into data of any batch shape and returns it."""
        window, gate, reward = self._read(tensordict)
        style = self.style(window).to(reward.dtype)
        # Where the gate is closed the style does not count, whatever it is.
        total = torch.where(gate > 0.5, reward + self.scale * style, reward)
        return tensordict.set(self.out_keys[0], total).set(self.out_keys[1], style)

    def as_transform(self) -> Transform:
        """The same as a transform of an environment: it changes each step's reward and publishes the style reward.

        Raises:
            ValueError: for keys that are not ``("next", name)``.

        Examples:
            >>> from torchrl.envs import TransformedEnv
            >>> from edenrl.envs import Quadruped
            >>> robot = Quadruped(2, groups=["policy", "amp"], seed=0, num_threads=1)
            >>> env = TransformedEnv(robot, AMPReward(Discriminator(frame_dim=12, hidden=(8,))).as_transform())
            >>> env.rollout(3)["next", "style_reward"].shape
            torch.Size([2, 3, 1])
        """
        return _StyleTransform(self)

    def episode_returns(self) -> _StyleReturns:
        """A function of rollouts ``[N, T]``: mean returns of the episodes that ended, as the learner sees them.

        Give it every rollout that ``forward`` has seen, in order: it sums over rollouts, and ``state_dict`` holds the
        sums of unfinished episodes. It needs ``("next", "done")`` and, from ``edenrl.envs.wrap_env``, ``("next",
        "step_count")``. Episodes that ``("next", "late_start")`` marks are left out. It returns two scalars, NaN when
        no episode ended:

        - ``episode/style_return``: the sum of what was added to the reward;
        - ``episode/total_return``: the sum of the reward with it.

        Examples:
            >>> reward = AMPReward(Discriminator(frame_dim=3, hidden=(8,)), scale=1.0)
            >>> step = {"amp_window": torch.zeros(4, 1, 15), "amp_gate": torch.ones(4, 1, 1)}
            >>> step |= {"done": torch.ones(4, 1, 1).bool(), "step_count": torch.ones(4, 1, 1)}
            >>> data = TensorDict(next={**step, "reward": torch.full((4, 1, 1), 2.0)}, batch_size=[4, 1])
            >>> means = reward.episode_returns()(reward(data))
            >>> round(float(means["episode/total_return"] - means["episode/style_return"]), 3)
            2.0
        """
        return _StyleReturns(self)

    def _read(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        values = {key: tensordict.get(key, None) for key in self.in_keys}
        if missing := [key for key, value in values.items() if value is None]:
            raise KeyError(
                f"AMPReward reads {self.in_keys}, of which the data lacks {missing}. The environment must publish a "
                "window of motion frames and a gate (on the quadruped: the group 'amp')."
            )
        window, gate, reward = values.values()
        width = self.discriminator.window_dim
        if window.shape != (*reward.shape[:-1], width) or gate.shape != reward.shape or reward.shape[-1:] != (1,):
            raise ValueError(
                f"AMPReward needs windows [*batch, {width}] ({self.discriminator.num_frames} frames of "
                f"{self.discriminator.frame_dim}), gates and rewards [*batch, 1]; got {tuple(window.shape)}, "
                f"{tuple(gate.shape)} and {tuple(reward.shape)}."
            )
        # The reward is checked as well, because the sum would no longer show that it was not finite.
        refuse_nonfinite(tensordict, self.in_keys)
        return window, gate, reward

    def added(self, tensordict: TensorDictBase) -> Tensor:
        """What ``forward`` added to the rewards ``[*batch, 1]`` of data that it has seen."""
        style = tensordict.get(self.out_keys[1])
        gate = (tensordict.get(self.in_keys[1]) > 0.5).to(style.dtype)
        return self.scale * gate * style

    def metrics(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        """What the style did in data that ``forward`` has seen, as scalars.

        - ``style_reward``: its mean where the gate is open; NaN when it is open nowhere.
        - ``style_gate``: the share of steps with an open gate.
        - ``style_share``: the mean magnitude of what was added, divided by that of the task reward plus its own.
        """
        reward, style = (tensordict.get(key) for key in self.out_keys)
        gate = (tensordict.get(self.in_keys[1]) > 0.5).to(style.dtype)
        added = self.added(tensordict)
        task, whole = (reward - added).abs().mean(), added.abs().mean()
        return {
            "style_reward": (gate * style).sum() / gate.sum(),
            "style_gate": gate.mean(),
            "style_share": whole / (task + whole).clamp_min(torch.finfo(style.dtype).tiny),
        }


class _StyleReturns:
    """See ``AMPReward.episode_returns``; the sums of unfinished episodes go on in the next rollout."""

    def __init__(self, reward: AMPReward) -> None:
        self.reward = reward
        self.sums = torch.zeros(0, 2, dtype=torch.float64)

    @torch.no_grad()
    def __call__(self, rollout: TensorDictBase) -> dict[str, Tensor]:
        both = torch.cat([self.reward.added(rollout), rollout.get(self.reward.out_keys[0])], -1).double()
        begins, ends = rollout["next", "step_count"] == 1, whole_episode_ends(rollout)
        sums = self.sums.to(both.device) if len(self.sums) else torch.zeros_like(both[:, 0])
        finished = []
        for step, first, last in zip(both.unbind(1), begins.unbind(1), ends.unbind(1), strict=True):
            sums = sums.where(~first, 0.0) + step
            finished.append(sums[last.squeeze(-1)])
        self.sums = sums
        style, total = torch.cat(finished).mean(0)
        return {"episode/style_return": style, "episode/total_return": total}

    def state_dict(self) -> dict[str, Tensor]:
        return {"sums": self.sums.cpu()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.sums = state["sums"]


class _StyleTransform(Transform):
    def __init__(self, reward: AMPReward) -> None:
        super().__init__(in_keys=[], out_keys=[])
        keys: list[Any] = [*reward.in_keys, *reward.out_keys]
        if strange := [key for key in keys if not isinstance(key, tuple) or len(key) != 2 or key[0] != "next"]:
            raise ValueError(f"As a transform AMPReward needs keys ('next', name), got {strange}.")
        self.reward = reward
        self.reward_name, self.style_name = (str(key[1]) for key in reward.out_keys)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        scored = self.reward(TensorDict(next=next_tensordict.copy(), batch_size=next_tensordict.batch_size))["next"]
        return next_tensordict.update(scored.select(self.reward_name, self.style_name))

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        # Zeros for all rows: TorchRL takes only those of the rows that are reset.
        assert self.parent is not None
        return tensordict_reset.set(self.style_name, self.parent.full_reward_spec[self.reward_name].zero())

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the style reward."""
        assert self.parent is not None
        observation_spec[self.style_name] = self.parent.full_reward_spec[self.reward_name].clone()
        return observation_spec


class SaturationWatch:
    """Warns, once, when a discriminator is saturated: when it tells nearly all windows apart for many iterations.

    Args:
        limit: accuracy above which an iteration counts. Default 0.99.
        patience: iterations in a row until the warning. Default 20.

    Examples:
        >>> watch = SaturationWatch(patience=2)
        >>> [watch(accuracy) for accuracy in (1.0, 0.7, 1.0, 1.0)]
        [False, False, False, True]
    """

    def __init__(self, limit: float = 0.99, patience: int = 20) -> None:
        self.limit, self.patience = limit, patience
        self._in_a_row = 0
        self._warned = False

    def __call__(self, accuracy: float) -> bool:
        """Takes the mean accuracy of an iteration; returns whether the discriminator is saturated.

        NaN, from an iteration in which the discriminator took no step, is ignored.
        """
        if not math.isnan(accuracy):
            self._in_a_row = self._in_a_row + 1 if accuracy > self.limit else 0
        saturated = self._in_a_row >= self.patience
        if saturated and not self._warned:
            self._warned = True
            _log.warning(
                "The discriminator's accuracy was above %g for %d iterations: it tells every window apart. While "
                "style_reward rises and d_expert - d_policy narrows that does no harm; with a style reward near 0, "
                "check that clips and environment agree in order and units of the frame, raise grad_penalty_coeff, or "
                "train the discriminator less often (discriminator_interval).",
                self.limit,
                self.patience,
            )
        return saturated
