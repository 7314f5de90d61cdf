"""Checks of what a loss returns: names, shapes, gradients, coefficients, reductions, batch shapes."""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.objectives import LossModule

from edenrl.testing.calls import (
    Outputs,
    Violations,
    call,
    close,
    compare,
    fresh_copy,
    losses_of,
    require,
    seeded,
    without_nan,
)

__all__ = [
    "check_attributes",
    "check_batch_shapes",
    "check_coefficients",
    "check_input_unchanged",
    "check_outputs",
    "check_reductions",
]


def check_attributes(loss: LossModule) -> None:
    """Requires a ``LossModule`` with a ``reduction`` and without plain tensors as attributes."""
    require(isinstance(loss, LossModule), loss, "not a LossModule; subclass torchrl.objectives.LossModule.")
    reduction = getattr(loss, "reduction", None)
    require(
        reduction in ("mean", "sum", "none"),
        loss,
        f"`reduction` is {reduction!r}; store 'mean', 'sum' or 'none' in __init__ and end forward with `_reduce_loss`.",
    )
    tensors = [name for name, value in vars(loss).items() if isinstance(value, Tensor)]
    require(
        not tensors,
        loss,
        f"the tensor attributes {tensors} neither move with .to() nor enter state_dict; use register_buffer.",
    )


def check_outputs(loss: LossModule, tensordict: TensorDictBase) -> None:
    """Requires losses with gradient, detached scalar metrics, and ``out_keys`` that list both, in every reduction."""
    for reduction in ("mean", "sum", "none"):
        probe = fresh_copy(loss, reduction=reduction)
        under = f"under reduction={reduction!r}"
        outputs = call(probe, tensordict, f"on the given batch {under}")
        losses = losses_of(outputs)
        require(bool(losses), loss, f"no entry starts with 'loss_' in {list(outputs)}; nothing would be trained.")
        violations = Violations()
        for key, value in outputs.items():
            with violations.collect():
                if key in losses:
                    _check_loss(loss, key, value, reduction)
                else:
                    _check_metric(loss, key, value, under)
        with violations.collect():
            _check_out_keys(loss, probe, outputs)
        violations.report()


def _check_loss(loss: LossModule, key: str, value: Tensor, reduction: str) -> None:
    require(
        value.requires_grad,
        loss,
        f"{key!r} carries no gradient; a metric must have a name that does not start with 'loss'.",
    )
    dtypes = {parameter.dtype for parameter in loss.parameters()}
    require(
        len(dtypes) != 1 or {value.dtype} == dtypes,
        loss,
        f"{key!r} is {value.dtype}, the parameters are {dtypes}; create constants in the data's dtype.",
    )
    require(
        reduction == "none" or value.numel() == 1,
        loss,
        f"{key!r} has shape {tuple(value.shape)} under reduction={reduction!r}; reduce it with `_reduce_loss`.",
    )


def _check_metric(loss: LossModule, key: NestedKey, value: Tensor, under: str) -> None:
    name = key[-1] if isinstance(key, tuple) else key
    require(
        not name.startswith("loss"),
        loss,
        f"{key!r} would be optimized by trainers that sum names starting with 'loss'; name a loss 'loss_<x>' "
        "and rename a metric.",
    )
    require(not value.requires_grad, loss, f"the metric {key!r} carries gradient; detach() it.")
    require(
        value.numel() == 1 and value.dtype != torch.bool and not value.is_complex(),
        loss,
        f"the metric {key!r} is {value.dtype} of shape {tuple(value.shape)} {under}; "
        "return a real scalar whatever the batch shape.",
    )


def _check_out_keys(loss: LossModule, probe: LossModule, outputs: Outputs) -> None:
    require(hasattr(probe, "out_keys"), loss, "no `out_keys`; list what forward returns.")
    declared, returned = set(map(unravel_key, probe.out_keys)), set(outputs)
    require(
        declared == returned,
        loss,
        f"`out_keys` promises {sorted(map(str, declared - returned))} that is not returned and leaves out "
        f"{sorted(map(str, returned - declared))} that is; make it list exactly what forward returns.",
    )


def check_input_unchanged(loss: LossModule, tensordict: TensorDictBase) -> None:
    """Requires that forward adds, removes and overwrites nothing in its input."""
    given = tensordict.clone()
    seeded(lambda: fresh_copy(loss)(given))
    before, after = dict(tensordict.items(True, True)), dict(given.items(True, True))
    added, removed = set(after) - set(before), set(before) - set(after)
    changed = [
        key
        for key in set(before) & set(after)
        # The input may hold NaN in rows that do not count.
        if isinstance(before[key], Tensor) and not torch.equal(without_nan(before[key]), without_nan(after[key]))
    ]
    require(
        not (added or removed or changed),
        loss,
        f"forward changed its input: added {sorted(map(str, added))}, removed {sorted(map(str, removed))}, overwrote "
        f"{sorted(map(str, changed))}; work on `tensordict.clone(False)` and avoid in-place operations.",
    )


def check_coefficients(loss: LossModule, tensordict: TensorDictBase) -> None:
    """Requires that each ``<x>_coeff`` can be scheduled and scales ``loss_<x>`` alone."""
    buffers = dict(loss.named_buffers(recurse=False))
    names = [name for name in {**vars(loss), **buffers} if name.endswith("_coeff") and not name.startswith("_")]
    base = losses_of(call(fresh_copy(loss), tensordict))
    violations = Violations()
    for name in names:
        with violations.collect():
            _check_coefficient(loss, tensordict, name, base)
    violations.report()


def _check_coefficient(loss: LossModule, tensordict: TensorDictBase, name: str, base: Outputs) -> None:
    """Checks one coefficient; ``base`` are the losses as they are."""
    buffer, term = dict(loss.named_buffers(recurse=False)).get(name), f"loss_{name.removesuffix('_coeff')}"
    if buffer is None:
        numeric = isinstance(getattr(loss, name), (int, float))
        require(not numeric, loss, f"{name!r} is a plain number; use register_coeff_buffer, so that it is saved.")
        return
    require(
        name in type(loss)._all_schedulable_buffers,
        loss,
        f"{name!r} cannot be scheduled: `loss.{name} = 0.5` fails; add it to `_schedulable_buffers`.",
    )
    if term not in base or buffer.numel() != 1:
        return
    value = float(buffer)
    # A coefficient of zero cannot be doubled: the loss must be zero under it.
    expected = {**base, term: 2 * base[term] if value else torch.zeros_like(base[term])}
    difference = compare(losses_of(call(fresh_copy(loss, **{name: 2 * value}), tensordict)), expected)
    require(
        not difference,
        loss,
        f"{'doubling' if value else 'the zero'} {name!r} must scale {term!r} alone, but {difference}; multiply "
        f"{term!r}, and nothing else, by `self.{name}`.",
    )


def check_reductions(loss: LossModule, tensordict: TensorDictBase) -> None:
    """Requires one number per step under ``"none"``, whose sum and mean are those of ``"sum"`` and ``"mean"``."""
    per = {name: losses_of(call(fresh_copy(loss, reduction=name), tensordict)) for name in ("none", "sum", "mean")}
    violations = Violations()
    for key, steps in per["none"].items():
        with violations.collect():
            require(
                steps.shape == tensordict.shape,
                loss,
                f"{key!r} has shape {tuple(steps.shape)} under reduction='none' for a batch {tuple(tensordict.shape)}; "
                "keep one number per step until a last `self._reduce_loss(per_step, tensordict)`.",
            )
            _check_reduced(loss, key, steps, per["sum"][key].detach(), per["mean"][key].detach())
    violations.report()


def _check_reduced(loss: LossModule, key: str, steps: Tensor, total: Tensor, mean: Tensor) -> None:
    require(
        close(steps.sum(), total.reshape(())),
        loss,
        f"{key!r} is {total.item():.6g} under reduction='sum', but 'none' sums to {steps.sum().item():.6g}; "
        "reduce once, with `_reduce_loss`.",
    )
    # Steps that do not count (masks, gates) are zero under 'none'.
    most, least = steps.numel(), max(int((steps != 0).sum()), 1)
    counts = torch.arange(least, most + 1, device=total.device)
    fits = [close(total.reshape(()) / count, mean.reshape(())) for count in counts]
    require(
        any(fits),
        loss,
        f"{key!r} is {mean.item():.6g} under reduction='mean', but 'none' sums to {total.item():.6g} over "
        f"{least if least == most else f'{least} to {most}'} steps; reduce once, with `_reduce_loss`.",
    )


def check_batch_shapes(loss: LossModule, tensordict: TensorDictBase) -> None:
    """Requires the same losses when the same steps come in another batch shape."""
    steps = tensordict.numel()
    rows = next((n for n in range(2, steps) if steps % n == 0), steps)
    for reduction in ("mean", "sum"):
        base = losses_of(call(fresh_copy(loss, reduction=reduction), tensordict))
        for shape in ((steps,), (1, steps), (rows, steps // rows)):
            change = f"with the batch {tuple(tensordict.shape)} reshaped to {shape}"
            fix = "treat each step alone and reduce over all batch dimensions"
            probe = fresh_copy(loss, reduction=reduction)
            difference = compare(losses_of(call(probe, tensordict.reshape(shape), change, fix)), base)
            require(not difference, loss, f"{change}, {difference}; {fix}.")
