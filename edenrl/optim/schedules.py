"""Optimizers and learning-rate schedules by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchrl import objectives as torchrl_objectives

from edenrl.optim.muon import MuonAdamW

__all__ = ["KLAdaptiveLR", "make_lr_schedule", "make_optimizer"]

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "muon": MuonAdamW,
}


def make_optimizer(name: str, params: Iterable[Any] | nn.Module, lr: float, **kwargs: Any) -> torch.optim.Optimizer:
    """Builds an optimizer: "adam", "adamw", "sgd", "rmsprop" or "muon" (``MuonAdamW``).

    Adam, AdamW and SGD use torch's fused kernels where parameters allow it.

    Args:
        name: the optimizer's name.
        params: parameters, parameter groups, or a module; "muon" needs the module, or a list of networks.
        lr: learning rate.
        kwargs: options of the class.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> type(make_optimizer("adam", [weight], lr=1e-3)).__name__
        'Adam'
    """
    if name not in _OPTIMIZERS:
        raise ValueError(f"Unknown optimizer {name!r}; choose one of {sorted(_OPTIMIZERS)}.")
    if name == "muon":
        return MuonAdamW(params, lr, **kwargs)
    if isinstance(params, nn.Module):
        params = params.parameters()
    if name != "rmsprop" and not {"fused", "foreach"} & kwargs.keys():
        # Generators become lists, because they are read here and again by torch.
        params = [{**p, "params": list(p["params"])} if isinstance(p, dict) else p for p in params]
        flat = [p for item in params for p in (item["params"] if isinstance(item, dict) else [item])]
        tensors = [p[-1] if isinstance(p, tuple) else p for p in flat]
        kwargs["fused"] = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in tensors) or None
    return _OPTIMIZERS[name](params, lr=lr, **kwargs)


class KLAdaptiveLR(torchrl_objectives.KLAdaptiveLR):
    """TorchRL's KL-adaptive learning rate that survives a few non-finite KL values.

    A non-finite KL leaves the rate as it is and is counted; ``max_nonfinite`` of them in a row raise.

    Args:
        optimizer: the rates of its parameter groups are changed in place and kept nowhere else.
        target_kl: desired KL per update. Above twice this value the rate is divided by ``factor``, below half of it
            multiplied.
        max_nonfinite: consecutive non-finite values that are tolerated.
        kwargs: ``factor`` (1.5), ``min_lr`` (1e-5), ``max_lr`` (1e-2).

    Examples:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
        >>> schedule = KLAdaptiveLR(optimizer, target_kl=0.01)
        >>> schedule.step(0.004)
        >>> round(optimizer.param_groups[0]["lr"], 6)
        0.0015
    """

    def __init__(self, optimizer: torch.optim.Optimizer, target_kl: float, *, max_nonfinite: int = 10, **kwargs: Any):
        super().__init__(optimizer, target_kl, **kwargs)
        self.max_nonfinite = max_nonfinite
        self.nonfinite = 0
        self._nonfinite_in_a_row = 0

    def step(self, kl: float | Tensor) -> None:
        """Adapts the rate to the mean KL of the current update."""
        kl = float(kl)
        if math.isfinite(kl):
            self._nonfinite_in_a_row = 0
            super().step(kl)
            return
        self.nonfinite += 1
        self._nonfinite_in_a_row += 1
        if self._nonfinite_in_a_row > self.max_nonfinite:
            raise FloatingPointError(
                f"The KL divergence was {kl} in {self._nonfinite_in_a_row} updates in a row. The policy's mean or "
                "standard deviation has diverged: lower the learning rate or desired_kl."
            )

    def state_dict(self) -> dict[str, Any]:
        """Schedule state without the optimizer's."""
        return {**super().state_dict(), "nonfinite": self.nonfinite, "in_a_row": self._nonfinite_in_a_row}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores ``state_dict``."""
        super().load_state_dict(dict(state_dict))
        self.nonfinite, self._nonfinite_in_a_row = state_dict["nonfinite"], state_dict["in_a_row"]


def _constant(step: int) -> float:
    return 1.0


def _linear(step: int, total: int, final: float) -> float:
    return 1.0 + (final - 1.0) * min(step / total, 1.0)


def _cosine(step: int, total: int, final: float) -> float:
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * min(step / total, 1.0)))


def _step(step: int, every: int, gamma: float) -> float:
    return gamma ** (step // every)


def _warmup_cosine(step: int, total: int, final: float, warmup: int, initial: float | None) -> float:
    if step < warmup:
        return (step + 1) / warmup if initial is None else initial + (1.0 - initial) * step / warmup
    return _cosine(step - warmup, max(total - warmup, 1), final)


def _factor(name: str, total: int, **kw: Any) -> Callable[[int], float]:
    """The factor on the rate as a function of the number of updates done."""
    final = kw.pop("final_fraction", 0.0)
    for option, good, wanted in (
        ("final_fraction", 0 <= final <= 1, "in [0, 1]"),
        ("every", kw.get("every", 1) >= 1, ">= 1"),
        ("gamma", 0 < kw.get("gamma", 1) <= 1, "in (0, 1]"),
        ("warmup", kw.get("warmup", 1) >= 1, ">= 1"),
        ("initial_fraction", (kw.get("initial_fraction") or 0) >= 0, ">= 0"),
    ):
        if not good:
            raise ValueError(f"The {name!r} schedule needs {option} {wanted}.")
    if name == "constant":
        factor: Callable[[int], float] = _constant
    elif name in ("linear", "cosine"):
        factor = partial({"linear": _linear, "cosine": _cosine}[name], total=total, final=final)
    elif name == "step":
        factor = partial(_step, every=kw.pop("every", max(total // 3, 1)), gamma=kw.pop("gamma", 0.1))
    elif name == "exponential":
        factor = partial(_step, every=1, gamma=kw.pop("gamma", 0.01 ** (1 / total)))
    elif name == "warmup_cosine":
        warmup = kw.pop("warmup", max(total // 20, 1))
        initial = kw.pop("initial_fraction", None)
        factor = partial(_warmup_cosine, total=total, final=final, warmup=warmup, initial=initial)
    else:
        raise ValueError(
            f"Unknown learning-rate schedule {name!r}; choose one of 'adaptive', 'constant', 'linear', 'cosine', "
            "'step', 'exponential', 'warmup_cosine'."
        )
    if kw:
        raise ValueError(f"The {name!r} schedule has no option {sorted(kw)}.")
    return factor


def make_lr_schedule(
    name: str, optimizer: torch.optim.Optimizer, total_updates: int, **kwargs: Any
) -> KLAdaptiveLR | LambdaLR:
    """Builds a learning-rate schedule that advances once per optimizer update.

    Args:
        name: the schedule, with its options:

            - "adaptive": options of ``KLAdaptiveLR``;
            - "constant";
            - "linear" and "cosine": down to ``final_fraction`` (0) of the rate over the whole budget;
            - "step": times ``gamma`` (0.1) every ``every`` updates (a third of the budget);
            - "exponential": times ``gamma`` each update (default: down to 1 % over the budget);
            - "warmup_cosine": linear for ``warmup`` updates (5 % of the budget), then as "cosine". It starts at
              ``initial_fraction`` of the rate, by default at ``1 / warmup`` of it.
        optimizer: every parameter group is scheduled.
        total_updates: the training budget in updates.
        kwargs: the options above.

    Examples:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> schedule = make_lr_schedule("linear", optimizer, total_updates=4, final_fraction=0.5)
        >>> optimizer.step(); schedule.step(); optimizer.param_groups[0]["lr"]
        0.875
    """
    if total_updates < 1:
        raise ValueError(f"A schedule needs total_updates >= 1, got {total_updates}.")
    if name == "adaptive":
        return KLAdaptiveLR(optimizer, **kwargs)
    return LambdaLR(optimizer, _factor(name, total_updates, **kwargs))
