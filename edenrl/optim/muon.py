"""Muon for hidden weight matrices and AdamW for everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDictParams
from torch import Tensor, nn
from torchrl.objectives import LossModule

__all__ = ["MuonAdamW"]

# Children of these run side by side, not one after the other: each has its own first and last layer.
_PARALLEL = (nn.ModuleDict, LossModule)


def _named(networks: nn.Module | Iterable[nn.Module]) -> dict[str, nn.Module]:
    """The networks by the prefix of their parameters' names: nothing for a single one, otherwise the index."""
    named: dict[str, nn.Module]
    if isinstance(networks, nn.Module) and not isinstance(networks, nn.ModuleList):
        named = {"": networks}
    else:
        named = {str(i): network for i, network in enumerate(networks)}
    for network in named.values():
        if not isinstance(network, nn.Module) or any(isinstance(m, TensorDictParams) for m in network.modules()):
            raise TypeError(
                f"MuonAdamW tells hidden weights from others by their modules, which {type(network).__name__} does "
                "not show. Pass the networks, as MuonAdamW([actor, critic])."
            )
    return named


def _matrices(module: nn.Module) -> list[Tensor]:
    """The trainable weight matrices of a linear or recurrent layer. Empty for any other module."""
    own = module.parameters(recurse=False) if isinstance(module, (nn.Linear, nn.RNNBase)) else iter(())
    return [p for p in own if p.ndim == 2 and p.requires_grad]


def _end_layers(module: nn.Module, end: int) -> Iterator[nn.Module]:
    """The first (``end`` 0) or last (-1) layers of a network, children in the order they were registered."""
    if _matrices(module):
        yield module
    children = [child for child in module.children() if any(map(_matrices, child.modules()))]
    for child in children if isinstance(module, _PARALLEL) else children[end:][:1]:
        yield from _end_layers(child, end)


def _partition(networks: Mapping[str, nn.Module]) -> dict[str, dict[str, nn.Parameter]]:
    """All trainable parameters by name, split into the parts "muon" and "adamw"."""
    parameters: dict[int, tuple[str, nn.Parameter]] = {}
    hidden: set[int] = set()
    kept: set[int] = set()
    for prefix, network in networks.items():
        for name, p in network.named_parameters(prefix=prefix):
            if p.requires_grad:
                parameters.setdefault(id(p), (name, p))
        hidden |= {id(p) for layer in network.modules() for p in _matrices(layer)}
        # The recurrent weights of a first layer (weight_hh) are hidden ones, those on its input are not.
        kept |= {id(p) for layer in _end_layers(network, 0) for p in _matrices(layer)[:1]}
        kept |= {id(p) for layer in _end_layers(network, -1) for p in _matrices(layer)[-1:]}
    parts: dict[str, dict[str, nn.Parameter]] = {"muon": {}, "adamw": {}}
    for key, (name, p) in parameters.items():
        parts["muon" if key in hidden - kept else "adamw"][name] = p
    return parts


class MuonAdamW(torch.optim.Optimizer):
    """``torch.optim.Muon`` on hidden weight matrices and ``torch.optim.AdamW`` on every other parameter.

    Hidden are the 2-D weights of linear and recurrent layers that are neither the first nor the last of their network.
    Everything else goes to AdamW: first and last layers, biases, scalers, standard deviations, embeddings, convolutions
    and parameters that a module holds directly. ``partition`` lists the parameters of both.

    There are two ``param_groups``, "muon" and "adamw", and schedules act on both. ``step`` and ``state_dict`` are those
    of one optimizer.

    Args:
        networks: one network, several, or a loss that holds them. Each has its own first and last layer, in the
            order in which layers were registered. Each entry of an ``nn.ModuleDict`` counts as a network.
        lr: learning rate of both.
        weight_decay: decoupled weight decay of AdamW.
        muon_weight_decay: decoupled weight decay of Muon.
        momentum: Muon's momentum, of Nesterov's kind.
        adjust_lr_fn: how Muon's step depends on the shape (rows, columns) of a matrix: "original", by
            sqrt(max(1, rows / columns)); "match_rms_adamw", by 0.2 sqrt(max(rows, columns)), about the size of an AdamW
            step.
        betas: AdamW's.
        eps: AdamW's.

    Raises:
        TypeError: for parameters instead of networks, or a loss with ``functional=True``: the split needs the modules.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".

    Examples:
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> optimizer = MuonAdamW(net, lr=1e-4)
        >>> optimizer.partition["muon"]
        ['2.weight']
        >>> optimizer.partition["adamw"]
        ['0.weight', '0.bias', '2.bias', '4.weight', '4.bias']
    """

    def __init__(
        self,
        networks: nn.Module | Iterable[nn.Module],
        lr: float = 1e-4,
        *,
        weight_decay: float = 0.01,
        muon_weight_decay: float = 0.1,
        momentum: float = 0.95,
        adjust_lr_fn: str | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        parts = _partition(_named(networks))
        groups: list[dict[str, Any]] = [
            {"params": list(part.values()), "param_names": list(part), "method": method}
            for method, part in parts.items()
        ]
        every = [p for group in groups for p in group["params"]]
        if not every:
            raise ValueError("MuonAdamW was given networks without a trainable parameter.")
        fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in every)
        # Each optimizer fills its group with its own options. The groups are then shared with this one, not copied.
        muon = torch.optim.Muon(
            groups[:1], lr, weight_decay=muon_weight_decay, momentum=momentum, adjust_lr_fn=adjust_lr_fn
        )
        adamw = torch.optim.AdamW(groups[1:], lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)
        super().__init__([*muon.param_groups, *adamw.param_groups], {"lr": lr})
        self._link()

    def _link(self) -> None:
        """Builds the two optimizers on this one's groups and state, of which they keep no copies."""
        muon, adamw = self.param_groups
        self._parts = (torch.optim.Muon([muon]), torch.optim.AdamW([adamw]))
        for part in self._parts:
            part.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._link()

    @property
    def partition(self) -> dict[str, list[str]]:
        """Parameter names by method, "muon" and "adamw"; with several networks each name starts with its index."""
        return {group["method"]: list(group["param_names"]) for group in self.param_groups}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps both parts once; ``closure`` is evaluated once, before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss
