"""Generalized advantage estimation with one value pass per observation."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor
from torchrl.objectives import value as torchrl_value

__all__ = ["GAE"]

# Squared by the value loss, anything larger overflows float32.
_LARGEST = 1e18


class GAE(torchrl_value.GAE):
    r"""TorchRL's ``GAE`` with half the value passes and a check for non-finite data.

    TorchRL evaluates the critic on every observation twice, once as ``obs`` and once as ``("next", obs)``. In a
    rollout ``("next", obs)`` at ``t`` is ``obs`` at ``t + 1`` except where an episode or the rollout ends, so this
    class runs one pass over the observations and one over those final ones.

    Time-outs bootstrap from the value of the true last observation, terminations from zero; ``done`` cuts the
    recursion.

    Input: a rollout ``[*B, T]`` whose time dimension is named "time" or last. Writes ``state_value``,
    ``("next", "state_value")``, ``advantage`` and ``value_target``, each ``[*B, T, c]``. Recurrent critics (with
    ``is_init`` among their inputs) take TorchRL's own path.

    Args:
        gamma: discount in [0, 1].
        lmbda: trace decay in [0, 1].
        value_network: the critic, or ``None`` to read ``state_value`` and ``("next", "state_value")``.
        average_gae: standardize the advantages over the whole rollout.
        kwargs: further options of TorchRL's class.

    Raises:
        ValueError: if a reward, observation or value is NaN, infinite or beyond 1e18, naming key, environment and step.

    Source: Schulman et al. 2016, arXiv:1506.02438; Pardo et al. 2018, arXiv:1712.00378 (time limits).

    Examples:
        >>> from tensordict import TensorDict
        >>> from edenrl.modules import value_critic
        >>> done = torch.zeros(4, 8, 1, dtype=torch.bool)
        >>> rollout = TensorDict(
        ...     observation=torch.randn(4, 8, 3),
        ...     next=dict(observation=torch.randn(4, 8, 3), reward=torch.ones(4, 8, 1), done=done, terminated=done),
        ...     batch_size=[4, 8],
        ... )
        >>> gae = GAE(gamma=0.99, lmbda=0.95, value_network=value_critic({"observation": 3}))
        >>> gae(rollout)["advantage"].shape
        torch.Size([4, 8, 1])
    """

    def __init__(self, *, gamma: float, lmbda: float, value_network: TensorDictModule | None, **kwargs: Any) -> None:
        for name, value in (("gamma", gamma), ("lmbda", lmbda)):
            if not 0.0 <= float(value) <= 1.0:
                raise ValueError(f"GAE needs {name} in [0, 1], got {value}.")
        super().__init__(gamma=gamma, lmbda=lmbda, value_network=value_network, **kwargs)

    def forward(self, tensordict: TensorDictBase, **kwargs: Any) -> TensorDictBase:
        """Writes advantages and value targets into the rollout and returns it."""
        self._refuse_nonfinite(tensordict)
        return super().forward(tensordict, **kwargs)

    def _call_value_nets(
        self,
        data: TensorDictBase,
        params: Any,
        next_params: Any,
        single_call: bool,
        value_key: Any,
        detach_next: bool,
        vmap_randomness: str = "error",
        *,
        value_net: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        net = self.value_network if value_net is None else value_net
        if single_call or params is not None or "is_init" in net.in_keys:
            return super()._call_value_nets(
                data, params, next_params, single_call, value_key, detach_next, vmap_randomness, value_net=value_net
            )
        time_dim = self._get_time_dim(None, data)
        value = net(data.select(*net.in_keys)).get(value_key)
        ends = data.get(("next", self.tensor_keys.done)).squeeze(-1).clone()
        ends.select(time_dim, -1).fill_(True)
        final_value = net(data.get("next").select(*net.in_keys, strict=False)[ends]).get(value_key)
        next_value = value.roll(-1, time_dim).masked_scatter(ends.unsqueeze(-1).expand_as(value), final_value)
        data.set(value_key, value)
        data.set(("next", value_key), next_value)
        return value, next_value.detach() if detach_next else next_value, None

    def _refuse_nonfinite(self, data: TensorDictBase) -> None:
        """Raises on the first key that would poison the update; one host read when all is well."""
        observations = [] if self.value_network is None else list(self.value_network.in_keys)
        as_next = [("next", *key) if isinstance(key, tuple) else ("next", key) for key in observations]
        keys = [("next", self.tensor_keys.reward), *observations, *as_next]
        tensors = {key: tensor for key in keys if (tensor := data.get(key, None)) is not None}
        floats = {key: tensor for key, tensor in tensors.items() if tensor.is_floating_point()}
        # Comparisons with NaN are false, so one reduction covers NaN, infinity and overflow.
        good = torch.stack([(tensor.abs().amax() < _LARGEST) for tensor in floats.values()])
        if bool(good.all()):
            return
        key = list(floats)[int(good.long().argmin())]
        first = (~(floats[key].abs() < _LARGEST)).nonzero()[0].tolist()
        value = floats[key][tuple(first)].item()
        where = f"env {first[0]}, step {first[1]}" if data.ndim > 1 else f"step {first[0]}"
        raise ValueError(
            f"{key!r} holds {value:.6g} at {where} (index {first}): the rollout is refused before anything is "
            "trained on it. Fix the environment (or terminate a state that diverges) so that this entry stays finite "
            "and below 1e18."
        )
