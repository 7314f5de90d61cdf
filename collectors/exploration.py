"""Action noise that stays the same for a random number of steps."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import Tensor
from torchrl.data import Unbounded
from torchrl.envs import TensorDictPrimer
from torchrl.modules import ProbabilisticActor

__all__ = ["RepeatedNoise", "exploring_policy", "zeta_cdf", "zeta_length"]


def zeta_cdf(exponent: float, longest: int) -> Tensor:
    """Cumulative probabilities of the lengths k = 1..``longest``, with P(k) proportional to ``k ** -exponent``.

    Examples:
        >>> [round(p, 4) for p in zeta_cdf(2.0, 3).tolist()]  # 36, 9 and 4 of 49
        [0.7347, 0.9184, 1.0]
    """
    weights = torch.arange(1, longest + 1, dtype=torch.float64) ** -exponent
    cdf = (weights / weights.sum()).cumsum(0).float()
    cdf[-1] = 1.0
    return cdf


def zeta_length(cdf: Tensor, uniform: Tensor) -> Tensor:
    """The length that each uniform number in [0, 1) selects.

    Examples:
        >>> zeta_length(torch.tensor([0.5, 1.0]), torch.tensor([0.1, 0.5, 0.9])).tolist()
        [1, 2, 2]
    """
    return 1 + torch.searchsorted(cdf, uniform, right=True)


class RepeatedNoise(TensorDictModuleBase):
    """Actions ``tanh(loc + scale * noise)`` in a box, where each environment keeps its noise for several steps.

    The number of steps follows a zeta law: mostly one, sometimes many, which gives correlated noise instead of jitter.
    The noise and its remaining steps are a recurrent state, under ``"noise"`` and ``"noise_steps"``. Therefore
    collectors save and restore them, and every episode begins with new noise. Environments need the primer that
    ``make_tensordict_primer`` returns; collectors add it themselves.

    While ``uniform`` is set, actions are uniform in the box instead. That is for the steps before training begins.

    Args:
        low: lower bounds of the action ``[a]``.
        high: upper bounds.
        exponent: exponent of the zeta law; larger values give shorter repetitions.
        longest: longest repetition.

    Raises:
        ValueError: for bounds that are not finite, or a setting out of range.

    Source: FlashSAC, arXiv:2604.04539.

    Examples:
        >>> from tensordict import TensorDict
        >>> explore = RepeatedNoise(torch.tensor([-1.0]), torch.tensor([3.0]))
        >>> td = TensorDict(loc=torch.zeros(4, 1), scale=torch.full((4, 1), 1e-6), batch_size=[4])
        >>> td = explore(td.update({"noise": torch.zeros(4, 1), "noise_steps": torch.zeros(4, 1, dtype=torch.long)}))
        >>> td["action"].round(decimals=3).flatten().tolist()
        [1.0, 1.0, 1.0, 1.0]
    """

    cdf: Tensor
    low: Tensor
    high: Tensor
    uniform: Tensor

    def __init__(self, low: Tensor, high: Tensor, *, exponent: float = 2.0, longest: int = 16) -> None:
        if not bool((low.isfinite() & high.isfinite() & (low < high)).all()):
            raise ValueError(f"RepeatedNoise needs finite bounds with low < high, got {low} and {high}.")
        if not exponent > 0 or longest < 1:
            raise ValueError(f"RepeatedNoise needs exponent > 0 and longest >= 1, got {exponent} and {longest}.")
        super().__init__()
        self.in_keys = ["loc", "scale", "noise", "noise_steps"]
        self.out_keys = ["action", ("next", "noise"), ("next", "noise_steps")]
        # Nothing here is learned. They are buffers so that they move with the module and reach workers.
        for name, value in (
            ("cdf", zeta_cdf(exponent, longest)),
            ("low", low.clone()),
            ("high", high.clone()),
            ("uniform", torch.zeros((), dtype=torch.bool)),
        ):
            self.register_buffer(name, value)

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """The transform that starts every episode without noise left."""
        device = self.low.device
        noise = Unbounded(self.low.shape, device=device, dtype=self.low.dtype)
        steps = Unbounded((1,), device=device, dtype=torch.long)
        return TensorDictPrimer({"noise": noise, "noise_steps": steps}, expand_specs=True)

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes the action and what is carried to the next step."""
        loc, scale = tensordict["loc"], tensordict["scale"]
        noise, steps = tensordict["noise"], tensordict["noise_steps"]
        fresh = steps <= 0
        # Drawn for every row at every step, so that one environment does not change the random numbers of the others.
        lengths = zeta_length(self.cdf, torch.rand(steps.shape, device=steps.device))
        noise = torch.where(fresh, torch.randn_like(loc), noise)
        steps = torch.where(fresh, lengths, steps) - 1
        unit = torch.where(self.uniform, 2 * torch.rand_like(loc) - 1, (loc + scale * noise).tanh())
        tensordict.set("action", self.low + (self.high - self.low) * (0.5 * (unit + 1)))
        return tensordict.set(("next", "noise"), noise).set(("next", "noise_steps"), steps)


def exploring_policy(actor: ProbabilisticActor, noise: RepeatedNoise) -> TensorDictSequential:
    """The actor's network followed by ``noise`` in place of its distribution; parameters are shared.

    Examples:
        >>> from torchrl.data import Bounded
        >>> from edenrl.modules import flash_actor
        >>> actor = flash_actor({"observation": 3}, Bounded(-1, 1, (2,)), hidden_dim=4)
        >>> exploring_policy(actor, RepeatedNoise(-torch.ones(2), torch.ones(2))).in_keys
        ['observation', 'noise', 'noise_steps']
    """
    return TensorDictSequential(actor.module[0], noise)
