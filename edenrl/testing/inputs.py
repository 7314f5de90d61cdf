"""Checks on other inputs than the given ones: another dtype, another device, extreme values."""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.objectives import LossModule

from edenrl.testing.calls import call, close, compare, fresh_copy, losses_of, require
from edenrl.testing.gradients import check_gradients
from edenrl.testing.keys import anywhere, is_at, key_fields, network_keys

__all__ = ["check_casts", "check_extreme_inputs"]


def check_casts(loss: LossModule, tensordict: TensorDictBase) -> None:
    """Requires the same losses and gradients in float64, and on the accelerator where there is one."""
    base = losses_of(call(fresh_copy(loss), tensordict))
    other_seed = losses_of(call(fresh_copy(loss), tensordict, seed=1))
    # Losses that draw random numbers are not compared: another dtype or device draws others.
    sampled = {key for key, value in base.items() if not close(other_seed[key], value)}
    casts: list[torch.dtype | torch.device] = [torch.float64]
    if torch.accelerator.is_available():
        casts.append(torch.accelerator.current_accelerator())  # type: ignore[arg-type]
    for cast in casts:
        data = tensordict.to(cast) if isinstance(cast, torch.device) else tensordict.apply(_double)
        probe = fresh_copy(loss).to(cast)
        fix = "register tensors as buffers and create constants with the dtype and device of the data"
        losses = losses_of(call(probe, data, f"after .to({cast}) on such data", fix))
        if isinstance(cast, torch.dtype):
            narrow = {key: value.dtype for key, value in losses.items() if value.dtype != cast}
            require(not narrow, loss, f"after .to({cast}) on such data the dtypes are {narrow}; do not cast inside.")
        difference = compare(
            {key: value for key, value in losses.items() if key not in sampled},
            {key: value for key, value in base.items() if key not in sampled},
            tolerance=1e-4,
        )
        require(not difference, loss, f"after .to({cast}): {difference}.")
        check_gradients(fresh_copy(loss).to(cast), data, {})


def _double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def check_extreme_inputs(loss: LossModule, tensordict: TensorDictBase) -> None:
    """Requires finite outputs and gradients, or a refusal, for inputs that are zero or very large."""
    written = anywhere(network_keys(loss, "out_keys"))
    targets = anywhere(key for name, key in key_fields(loss).items() if name in ("advantage", "value_target"))
    scaled: dict[str, list[NestedKey]] = {"targets": [], "observations": []}
    for key, value in tensordict.items(True, True):
        floating = isinstance(value, Tensor) and value.is_floating_point()
        if floating and "log_prob" not in str(key) and not is_at(key, written):
            kind = "targets" if is_at(key, targets) else "observations"
            scaled[kind].append(key)
    for kind, factor in (("observations", 0.0), ("observations", 1e3), ("targets", 0.0), ("targets", 1e6)):
        data = tensordict.clone()
        for key in scaled[kind]:
            data.set(key, data.get(key) * factor)
        where = f"with {scaled[kind]} times {factor:g}"
        probe = fresh_copy(loss)
        fix = "guard divisions, logarithms and roots, or raise a ValueError"
        try:
            outputs = call(probe, data, where, fix)
        except AssertionError as error:
            if isinstance(error.__cause__, (ValueError, FloatingPointError)):
                continue
            raise
        bad = [key for key, value in outputs.items() if not bool(value.isfinite().all())]
        require(not bad, loss, f"{where}, {bad} is not finite; {fix}.")
        torch.stack([value.sum() for value in losses_of(outputs).values()]).sum().backward()
        bad = [name for name, p in probe.named_parameters() if p.grad is not None and not bool(p.grad.isfinite().all())]
        require(
            not bad,
            loss,
            f"{where}, the gradient of {bad} is not finite; guard derivatives too (a root's is infinite at zero).",
        )
