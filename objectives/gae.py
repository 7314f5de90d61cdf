"""Generalized advantage estimation with one value pass per observation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModule, dispatch
from torch import Tensor
from torchrl.objectives import value as torchrl_value

from edenrl.modules import merge_moments, refuse_nonfinite, several_processes

__all__ = ["GAE"]


class GAE(torchrl_value.GAE):
    r"""TorchRL's GAE with half the value passes and a check for non-finite data.

    TorchRL evaluates the critic on every observation twice, once as ``obs`` and once as ``("next", obs)``. In a
    rollout ``("next", obs)`` at ``t`` is ``obs`` at ``t + 1`` except where an episode or the rollout ends. This class
    compares the two. It runs one pass over the observations and one over the next observations that differ.

    Time-outs bootstrap from the value of the true last observation, terminations from zero; ``done`` cuts the
    recursion. With ``auto_reset_env=True`` (a simulator that hides the last observation) a time-out bootstraps from the
    value of the observation before it, as rsl_rl does.

    Input: a rollout ``[*B, T]`` whose time dimension is named "time", given as ``time_dim``, or last. Writes
    ``state_value``, ``("next", "state_value")``, ``advantage`` and ``value_target``, each ``[*B, T, c]``. The c value
    heads are independent columns; rewards and flags of width 1 are shared by all of them. TorchRL's implementation is
    used for recurrent critics (with ``is_init`` among their inputs), n-step data, shifted values, and calls with
    ``params``.

    Args:
        gamma: discount in [0, 1].
        lmbda: trace decay in [0, 1].
        value_network: the critic, or ``None`` to read ``state_value`` and ``("next", "state_value")``.
        **kwargs: further options of TorchRL's class; ``average_gae=True`` standardizes the advantages over the whole
            rollout (of all processes that train together), each value head on its own.

    Raises:
        KeyError: for data without the next reward and done.
        ValueError: if a reward, observation or value is NaN, infinite or beyond 1e18, naming key, environment and step.
            The next observation of a terminated step may be NaN: nothing depends on it.

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
        self._time_axis = -1

    @dispatch
    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        params: Any = None,
        target_params: Any = None,
        time_dim: int | None = None,
    ) -> TensorDictBase:
        """Writes advantages and value targets into the rollout and returns it."""
        with self._checked(tensordict, time_dim):
            return super().forward(tensordict, params=params, target_params=target_params, time_dim=time_dim)

    def value_estimate(
        self,
        tensordict: TensorDictBase,
        params: Any = None,
        target_params: Any = None,
        time_dim: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The value targets of the rollout, without the advantages."""
        # Not TorchRL's method, which fails where gamma * lmbda is 0.
        out = self.forward(tensordict.copy(), params=params, target_params=target_params, time_dim=time_dim)
        return out.get(self.tensor_keys.value_target)

    @contextlib.contextmanager
    def _checked(self, data: TensorDictBase, time_dim: int | None) -> Iterator[None]:
        """Checks the rollout, and leaves the frozen layers of the critic frozen."""
        self._require_next(data)
        self._time_axis = self._get_time_dim(time_dim, data)
        self._refuse_flat_columns(data)
        refuse_nonfinite(data, self._inputs(data), time_axis=self._time_axis, absent=self._absent(data))
        # TorchRL sets requires_grad on every parameter of the critic when it is done, also on those of frozen layers.
        network = self.value_network
        frozen = [] if network is None else [p for p in network.parameters() if not p.requires_grad]
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

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
        special = single_call or params is not None or self.skip_existing or "is_init" in net.in_keys
        n_step = data.get(self.tensor_keys.steps_to_next_obs, None) is not None
        if special or n_step or self.value_chunk_size is not None or self.num_chunks is not None:
            value, next_value, valid = super()._call_value_nets(
                data, params, next_params, single_call, value_key, detach_next, vmap_randomness, value_net=value_net
            )
        else:
            valid = None
            value = net(data.select(*net.in_keys)).get(value_key)
            apart = self._has_own_next(data, net.in_keys)
            apart_value = net(data.get("next").select(*net.in_keys, strict=False)[apart]).get(value_key)
            next_value = value.roll(-1, self._time_axis)
            next_value = next_value.masked_scatter(self._expand_to_match(apart, value), apart_value)
            # A terminated step may have NaN as its next observation. Its value counts zero times, but 0 * NaN is NaN.
            absent = next_value.isnan() & self._expand_to_match(self._all_terminated(data), value)
            next_value = torch.where(absent, value, next_value)
        # TorchRL's path writes them into a copy where a next observation is NaN.
        data.set(value_key, value)
        data.set(("next", value_key), next_value)
        refuse_nonfinite(data, [value_key, ("next", value_key)], time_axis=self._time_axis)
        return value, next_value.detach() if detach_next else next_value, valid

    def _has_own_next(self, data: TensorDictBase, keys: list[NestedKey]) -> Tensor:
        """True, ``[*B, T]``, where the next observation is not the observation of the following row."""
        time, steps = self._time_axis, data.shape[self._time_axis]
        apart = data.get(("next", self.tensor_keys.done)).flatten(data.ndim).any(-1)
        apart.select(time, -1).fill_(True)
        inner = apart.narrow(time, 0, steps - 1)
        for key in keys:
            entry, following = data.get(key, None), data.get(unravel_key(("next", key)), None)
            if isinstance(entry, Tensor) and isinstance(following, Tensor):
                differs = following.narrow(time, 0, steps - 1) != entry.narrow(time, 1, steps - 1)
                inner |= differs.flatten(data.ndim).any(-1) if differs.ndim > data.ndim else differs
            else:
                inner.fill_(True)  # nothing to compare
        return apart

    def _all_terminated(self, data: TensorDictBase) -> Tensor:
        """True, ``[*B, T]``, where nothing bootstraps from the next observation."""
        done = data.get(("next", self.tensor_keys.done))
        return data.get(("next", self.tensor_keys.terminated), done).flatten(data.ndim).all(-1)

    def _prepare_signals(
        self, reward: Tensor, done: Tensor, terminated: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._terminated = terminated
        # A signal that lacks the dimension of the agents is left as it is: the parent refuses it.
        shared = [
            x.expand_as(value) if x.shape[-1] == 1 and x.ndim == value.ndim else x for x in (reward, done, terminated)
        ]
        return shared[0], shared[1], shared[2]

    def _broadcast_optional(self, tensor: Tensor, value: Tensor) -> Tensor:
        # A step that is both terminated and truncated is terminated.
        return (tensor & ~self._terminated).expand_as(value)

    def _normalize_advantage(self, adv: Tensor, valid: Tensor | None = None, groups: Tensor | None = None) -> Tensor:
        if valid is not None or groups is not None:
            return super()._normalize_advantage(adv, valid, groups)
        dims = list(range(adv.ndim - 1))
        if several_processes():
            own = adv.double()
            count, mean, var = merge_moments(
                adv[..., 0].numel(), own.mean(dims, keepdim=True), own.var(dims, correction=0, keepdim=True)
            )
            std = (var * count / (count - 1).clamp_min(1)).sqrt()  # with Bessel's correction, as below
            return ((own - mean) / std.clamp_min(1e-4)).to(adv.dtype)
        spread = adv.std(dims, keepdim=True) if adv[..., 0].numel() > 1 else torch.zeros_like(adv)
        return (adv - adv.mean(dims, keepdim=True)) / spread.clamp_min(1e-4)

    def _inputs(self, data: TensorDictBase) -> list[NestedKey]:
        """Entries that are read, in the order in which a step produces them."""
        network = self.value_network
        keys: list[Any] = [self.tensor_keys.value] if network is None else list(network.in_keys)
        keys += [unravel_key(("next", key)) for key in keys]
        return [*keys, ("next", self.tensor_keys.reward)]

    def _require_next(self, data: TensorDictBase) -> None:
        following = data.get("next", None)
        held = set() if following is None else set(following.keys(include_nested=True))
        if absent := [key for key in (self.tensor_keys.reward, self.tensor_keys.done) if unravel_key(key) not in held]:
            raise KeyError(
                f"{type(self).__name__} needs a rollout [*, T] with {absent} under 'next', the outcome of each step; "
                f"there it has {sorted(map(str, held)) or 'nothing'}. Give it the data of a collector or of "
                "env.rollout, or name the entries with set_keys(reward=..., done=...)."
            )

    def _refuse_flat_columns(self, data: TensorDictBase) -> None:
        for name in (self.tensor_keys.reward, self.tensor_keys.done, self.tensor_keys.terminated):
            entry = data.get(("next", name), None)
            if entry is not None and entry.shape == data.shape:
                raise ValueError(
                    f"('next', {name!r}) has the shape {tuple(entry.shape)} of the batch; GAE needs a last dimension "
                    f"of 1, {(*entry.shape, 1)}, as environments give it. Store entry.unsqueeze(-1)."
                )

    def _absent(self, data: TensorDictBase) -> dict[NestedKey, Tensor]:
        """Rows in which the critic's next inputs may be NaN: it is not asked about them."""
        if self.value_network is None:
            return {}
        terminated = self._all_terminated(data)
        return {unravel_key(("next", key)): terminated for key in self.value_network.in_keys}
