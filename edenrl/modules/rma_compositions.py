"""The ways of running a rapid-motor-adaptation actor, with or without privileged information, as policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from torchrl.modules import ProbabilisticActor

from edenrl.modules.actor_critic import gaussian_actor
from edenrl.modules.rma import RMAActor

__all__ = ["RMAComposition", "rma_composition", "rma_policy"]


class RMAComposition(nn.Module):
    """One way of running an ``RMAActor``, and the keys under which its chunks are found. All weights are the actor's.

    ``rma_policy`` makes it. Its inputs are the entries of ``in_keys``.

    Args:
        actor: the actor.
        keys: the key of every chunk, or one key that holds all of them, laid out as ``RMA_CHUNKS``.
        latent: "privileged", "history", or "switched". The latter is one of the two, which ``use_history`` chooses.
        estimated: whether the estimator's prediction replaces ``priv_explicit``.

    Raises:
        ValueError: for a key of a chunk that the actor does not read; in ``forward`` for widths that do not fit.

    Examples:
        >>> widths = dict(prop=6, priv_explicit=3, priv_latent=5, history=60)
        >>> RMAComposition(RMAActor(widths, 4), latent="history", estimated=True).in_keys
        ['prop', 'prop_history']
        >>> net = RMAComposition(RMAActor(widths, 4), keys="policy")
        >>> net(torch.zeros(7, 74))[0].shape
        torch.Size([7, 4])
    """

    switch: Tensor

    def __init__(
        self,
        actor: RMAActor,
        keys: Mapping[str, NestedKey] | NestedKey | None = None,
        *,
        latent: Literal["privileged", "history", "switched"] = "privileged",
        estimated: bool = False,
    ) -> None:
        super().__init__()
        if latent not in ("privileged", "history", "switched"):
            raise ValueError(f"latent={latent!r} was given; expected 'privileged', 'history' or 'switched'.")
        self.actor, self.latent, self.estimated = actor, latent, estimated
        present = [name for name, width in actor.widths.items() if width]
        self.flat = keys if isinstance(keys, str | tuple) else None
        if keys is None or isinstance(keys, Mapping):
            given: dict[str, NestedKey] = {
                **{name: name for name in present},
                "history": "prop_history",
                **(keys or {}),
            }
            if unknown := set(given) - set(present):
                raise ValueError(f"keys names {sorted(unknown)}; this actor reads {present}.")
            self.keys = {name: given[name] for name in present}
        else:
            self.keys = dict.fromkeys(present, keys)
        unread = {"privileged": {"history"}, "history": {"priv_latent"}, "switched": set()}[latent]
        self.reads = [name for name in present if name not in unread | ({"priv_explicit"} if estimated else set())]
        if latent == "switched":
            # A buffer, so that copies of the policy in other processes receive it together with the weights.
            self.register_buffer("switch", torch.tensor(False))

    @property
    def privileged_groups(self) -> tuple[NestedKey, ...]:
        """The entries that a critic reads beside this actor: all of them, except a history under a separate key."""
        keys = [key for name, key in self.keys.items() if name != "history" or self.flat is not None]
        return tuple(dict.fromkeys(keys))

    @property
    def source(self) -> dict[str, NestedKey] | NestedKey:
        """The keys of the chunks, or the one key that holds all of them."""
        return self.keys if self.flat is None else self.flat

    @property
    def in_keys(self) -> list[NestedKey]:
        """The keys that this composition reads."""
        return list(dict.fromkeys(self.keys[name] for name in self.reads))

    @property
    def groups(self) -> dict[NestedKey, int]:
        """The width of each entry of ``in_keys``."""
        widths = self.actor.widths
        if self.flat is not None:
            return {self.flat: sum(widths.values())}
        return {self.keys[name]: widths[name] for name in self.reads}

    def use_history(self, on: bool) -> None:
        """Chooses the latent of a "switched" composition: the history's, or (at first) the privileged one."""
        self.switch.fill_(on)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Maps the entries of ``in_keys``, ``(*batch, width)``, to mean and standard deviation."""
        if self.flat is not None:
            chunks = self._split(inputs[0])
        else:
            chunks = dict(zip(self.reads, inputs, strict=True))
            self._check(chunks)
        read = {name: chunks[name] for name in self.reads}
        latent: Literal["privileged", "history"] | Tensor
        if self.latent == "switched":
            of_history = self.actor.encode("history", history=read.pop("history"))
            latent = torch.where(
                self.switch, of_history, self.actor.encode("privileged", priv_latent=read.pop("priv_latent"))
            )
        else:
            latent = self.latent
        mean, std = self.actor(**read, latent=latent, estimated=self.estimated)
        return mean, std

    def chunk(self, tensordict: TensorDictBase, name: str, key: NestedKey | None = None) -> Tensor:
        """One chunk of a TensorDict, also one that this composition does not read.

        Args:
            tensordict: the data.
            name: of ``RMA_CHUNKS``.
            key: where to find it, unless all chunks lie under one key. Default: as in ``keys``.
        """
        if self.flat is not None:
            return self._split(tensordict.get(self.flat))[name]
        chunk = tensordict.get(self.keys[name] if key is None else key)
        self._check({name: chunk})
        return chunk

    def _split(self, flat: Tensor) -> dict[str, Tensor]:
        widths = self.actor.widths
        if flat.shape[-1] != sum(widths.values()):
            raise ValueError(
                f"{self.flat!r} is {flat.shape[-1]} wide; expected {sum(widths.values())}, laid out as "
                f"{self._layout()}."
            )
        return dict(zip(widths, flat.split(list(widths.values()), -1), strict=True))

    def _check(self, chunks: Mapping[str, Tensor]) -> None:
        expected = self.actor.widths
        wrong = {name: chunk.shape[-1] for name, chunk in chunks.items() if chunk.shape[-1] != expected[name]}
        if wrong:
            raise ValueError(f"Chunks of the widths {wrong} were given; expected {self._layout()}.")

    def _layout(self) -> str:
        return " | ".join(f"{name} {width}" for name, width in self.actor.widths.items())


def rma_composition(policy: nn.Module) -> RMAComposition:
    """The composition inside a policy of ``rma_policy``.

    Raises:
        ValueError: if there is none.
    """
    for part in policy.modules() if isinstance(policy, nn.Module) else ():
        if isinstance(part, RMAComposition):
            return part
    raise ValueError(f"{type(policy).__name__} holds no RMAComposition; build the policy with rma_policy.")


def rma_policy(
    actor: RMAActor,
    keys: Mapping[str, NestedKey] | NestedKey | None = None,
    *,
    latent: Literal["privileged", "history", "switched"] = "privileged",
    estimated: bool = False,
) -> ProbabilisticActor:
    """A policy that runs an ``RMAActor`` in one composition; all compositions share the weights and the state dict.

    Writes ``loc``, ``scale``, ``action`` and ``action_log_prob``, and reads only the chunks that the composition uses.
    It changes no observation: a rollout keeps the true ``priv_explicit``.

    Args:
        actor: the actor.
        keys: where the chunks are: one flat key laid out as ``RMA_CHUNKS``, or the key of every chunk. Default: keys of
            their names, and "prop_history" for the history.
        latent: "privileged", "history", or "switched" for one that collects with either (see ``RMAComposition``), which
            has one entry more in its state dict.
        estimated: whether the estimator's prediction replaces ``priv_explicit``.

    Examples:
        >>> from tensordict import TensorDict
        >>> actor = RMAActor(dict(prop=6, priv_explicit=3, priv_latent=5, history=60), num_actions=4)
        >>> teacher = rma_policy(actor, estimated=True)
        >>> deployed = rma_policy(actor, latent="history", estimated=True)
        >>> td = TensorDict(prop=torch.zeros(2, 6), prop_history=torch.zeros(2, 60), batch_size=[2])
        >>> deployed(td)["action"].shape
        torch.Size([2, 4])
    """
    network = RMAComposition(actor, keys, latent=latent, estimated=estimated)
    return gaussian_actor(network.groups, actor.num_actions, build=lambda *_: network)
