"""The update step: one backward, per-group clipping, and never a non-finite gradient."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from edenrl.optim.schedules import KLAdaptiveLR, make_lr_schedule

__all__ = ["GradientStep"]


def _several_processes() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _stepped_groups(
    groups: Mapping[str, list[nn.Parameter]],
    optimizers: Iterable[torch.optim.Optimizer],
    names: Mapping[int, str],
) -> dict[str, list[nn.Parameter]]:
    """The parameters of each group that an optimizer steps; groups without any are left out.

    Args:
        groups: the declared groups.
        optimizers: all optimizers.
        names: names of the loss's parameters, by id.

    Raises:
        ValueError: when an optimizer's parameter is in no group, or in several.
    """
    stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    kept = {name: [p for p in parameters if id(p) in stepped] for name, parameters in groups.items()}
    grouped = [id(p) for parameters in kept.values() for p in parameters]
    if len(set(grouped)) != len(grouped) or set(grouped) != stepped:
        stray = [names.get(i, "a parameter that is not the loss's") for i in stepped - set(grouped)]
        problem = f"undeclared: {', '.join(stray)}" if stray else "the groups overlap"
        raise ValueError(
            f"The optimizers' parameters must be in exactly one group of parameter_groups() {list(groups)}; {problem}."
        )
    return {name: parameters for name, parameters in kept.items() if parameters}


def _norm_limits(
    max_grad_norm: float | Mapping[str, float | None] | None, declared: list[str], stepped: list[str]
) -> dict[str, float | None]:
    """The clip norm of every group that is stepped.

    Raises:
        ValueError: for a group that the loss does not declare, or a norm that is not a positive number.
    """
    limits: dict[str, float | None]
    if isinstance(max_grad_norm, Mapping):
        if unknown := set(max_grad_norm) - set(declared):
            raise ValueError(f"max_grad_norm names {sorted(unknown)}; the loss trains {declared}.")
        limits = {name: max_grad_norm.get(name) for name in stepped}
    else:
        limits = dict.fromkeys(stepped, max_grad_norm)
    for name, norm in limits.items():
        if norm is not None and not (isinstance(norm, (int, float)) and 0 < norm < math.inf):
            raise ValueError(f"max_grad_norm of {name!r} must be a positive number or None, got {norm!r}.")
    return limits


class GradientStep:
    """Turns a loss TensorDict into one optimizer step.

    A call sums the ``loss_*`` entries, runs one backward, checks that every gradient is finite, clips each parameter
    group by its own norm, adapts the learning rate and steps. Metrics come back as tensors: copy them to the CPU
    once per iteration. Each call copies two booleans to the CPU for the check, and one number for a KL-adaptive
    schedule.

    A call is ``backward`` and then ``step``. Call the two apart to accumulate the gradient of several losses, for
    example of rollouts that are differentiated segment by segment. ``cancel_update`` drops what was accumulated.

    In processes that train together (``edenrl.distributed``) gradients, loss and KL are averaged over all of them. Each
    call makes one exchange per dtype, in a fixed order. A parameter without a gradient in some process counts as zero
    there. All processes then drop the same updates and change the learning rate alike.

    Args:
        loss: the LossModule. Its ``parameter_groups()`` names the groups, each of which is clipped on its own. A module
            without that method is one group "all".
        optimizers: an optimizer, or named ones. Parameters that the losses reach and no optimizer holds are warned of
            at the first step.
        max_grad_norm: clip norm of every group, or per group name; ``None`` does not clip.
        lr_schedule: a schedule of ``make_lr_schedule``. KL-adaptive ones read ``kl_key`` *before* the step, others
            advance after it.
        kl_key: entry of the loss TensorDict with the mean KL.
        on_nonfinite: "raise" names the parameter; "skip" drops the update and counts it in ``skipped``.
        max_norm_before_clip: drop the update, and count it in ``skipped_large``, when the gradient norm of a group is
            above this; ``None`` (default) drops none. Set it well above ``max_grad_norm``, to drop gradients that have
            exploded: their direction means nothing.
        amp_dtype: reduced precision of ``autocast``; float16 also gets a gradient scaler.

    Raises:
        ValueError: for an optimizer parameter that no group declares, an unknown group, a clip norm that is not a
            positive number, losses that are not scalars, or a ``scale`` of ``backward`` that is NaN or infinite.
        RuntimeError: for ``step`` without a ``backward`` before it.
        KeyError: for a KL-adaptive schedule without ``kl_key`` among the losses.
        FloatingPointError: for a non-finite gradient when ``on_nonfinite="raise"``; parameters are left as they were.
            With a gradient scaler only for twenty in a row, because it finds its scale by single overflows.

    Examples:
        >>> from tensordict import TensorDict
        >>> net = nn.Linear(2, 1)
        >>> step = GradientStep(net, torch.optim.SGD(net.parameters(), lr=0.1), max_grad_norm=1.0)
        >>> metrics = step(TensorDict(loss_mse=net(torch.ones(4, 2)).square().mean()))
        >>> sorted(metrics)
        ['grad_norm_all', 'loss', 'lr']
    """

    def __init__(
        self,
        loss: nn.Module,
        optimizers: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        *,
        max_grad_norm: float | Mapping[str, float | None] | None = None,
        lr_schedule: Any | None = None,
        kl_key: str = "kl",
        on_nonfinite: Literal["raise", "skip"] = "raise",
        max_norm_before_clip: float | None = None,
        amp_dtype: torch.dtype | None = None,
    ) -> None:
        if on_nonfinite not in ("raise", "skip"):
            raise ValueError(f"on_nonfinite must be 'raise' or 'skip', got {on_nonfinite!r}.")
        self.optimizers = {"optimizer": optimizers} if isinstance(optimizers, torch.optim.Optimizer) else {**optimizers}
        declared: Any = getattr(loss, "parameter_groups", lambda: {"all": loss.parameters()})
        groups: dict[str, list[nn.Parameter]] = {name: list(parameters) for name, parameters in declared().items()}
        self._names = {id(p): name for name, p in loss.named_parameters()}
        self.groups = _stepped_groups(groups, self.optimizers.values(), self._names)
        stepped = {id(p) for parameters in self.groups.values() for p in parameters}
        self._not_stepped = {name: [p for p in ps if id(p) not in stepped] for name, ps in groups.items()}
        self.max_grad_norm = _norm_limits(max_grad_norm, list(groups), list(self.groups))
        if max_norm_before_clip is not None and not 0 < max_norm_before_clip < math.inf:
            raise ValueError(f"max_norm_before_clip must be a positive number or None, got {max_norm_before_clip!r}.")
        self.lr_schedule, self.kl_key, self.on_nonfinite = lr_schedule, kl_key, on_nonfinite
        self.max_norm_before_clip = max_norm_before_clip
        self.amp_dtype = amp_dtype
        self.device_type = next(iter(self.groups.values()))[0].device.type
        self.scaler = torch.amp.GradScaler(self.device_type, enabled=amp_dtype == torch.float16)
        self.skipped = self.skipped_large = self.updates = 0
        self.applied = False
        self._skipped_in_a_row = 0
        self._restarted: dict[str, Any] | None = None
        self._pending: list[dict[str, Tensor]] = []

    def autocast(self) -> contextlib.AbstractContextManager:
        """Context for the forward pass: reduced precision when ``amp_dtype`` is set, nothing otherwise."""
        return torch.autocast(self.device_type, dtype=self.amp_dtype, enabled=self.amp_dtype is not None)

    def __call__(self, losses: TensorDictBase) -> dict[str, Tensor]:
        """Steps once; returns ``loss``, ``lr`` and ``grad_norm_<group>`` as detached scalars."""
        self.backward(losses)
        return self.step()

    def backward(self, losses: TensorDictBase, scale: float = 1.0) -> dict[str, Tensor]:
        """Adds the gradient of the summed ``loss_*``, times ``scale``, to what the next ``step`` applies.

        It runs whatever the values of the losses are, so that a simulator's tape is released; ``step`` checks them.

        Returns:
            The entries of ``losses``, detached.
        """
        if not math.isfinite(scale):
            raise ValueError(f"GradientStep.backward was given scale={scale}; expected a finite number.")
        terms = {str(name): value for name, value in losses.items() if str(name).startswith("loss_")}
        if not terms or any(value.numel() != 1 for value in terms.values()):
            shapes = {name: tuple(value.shape) for name, value in terms.items()}
            raise ValueError(f"GradientStep needs scalar loss_* entries, got {shapes}. Use reduction='mean' or 'sum'.")
        kl = losses.get(self.kl_key, None)
        if isinstance(self.lr_schedule, KLAdaptiveLR) and kl is None:
            raise KeyError(f"The KL-adaptive schedule needs {self.kl_key!r} among the losses; set kl_key to its name.")
        loss = torch.stack([value.reshape(()) for value in terms.values()]).sum() * scale
        self.scaler.scale(loss).backward()
        detached = {name: value.detach() for name, value in losses.items()}
        entries = {name: scale * detached[name].reshape(()) for name in terms}
        self._pending.append({**entries, "loss": loss.detach(), **({} if kl is None else {"kl": kl.detach()})})
        return detached

    def step(self) -> dict[str, Tensor]:
        """Checks, clips and applies the accumulated gradient; ``applied`` says whether the parameters changed.

        Returns:
            ``loss`` (the sum of what was accumulated), ``lr`` and ``grad_norm_<group>`` as detached scalars.
        """
        if not self._pending:
            raise RuntimeError("GradientStep.step() has no gradient to apply: call backward(losses) first.")
        self._warn_of_the_untrained()
        loss, kl, terms = self._take_pending()
        if _several_processes():
            loss, kl = self._average_processes(loss, loss.new_tensor(0.0) if kl is None else kl)
        if self.scaler.is_enabled():
            for optimizer in self.optimizers.values():
                self.scaler.unscale_(optimizer)
        norms = {
            name: get_total_norm([p.grad for p in params if p.grad is not None]) for name, params in self.groups.items()
        }
        metrics = {"loss": loss, **{f"grad_norm_{name}": norm for name, norm in norms.items()}}
        finite, too_large = self._judge(loss, norms)
        self.updates += 1
        self.applied = finite and not too_large
        if not finite:
            self._drop_update(terms)
        elif too_large:
            self.skipped_large += 1
        else:
            self._skipped_in_a_row = 0
            self._apply(norms, kl)
        self.scaler.update()
        self._clear_gradients()
        lr = next(iter(self.optimizers.values())).param_groups[0]["lr"]
        metrics["lr"] = torch.full((), float(lr), device=loss.device)
        return metrics

    def cancel_update(self) -> None:
        """Drops what ``backward`` has accumulated since the last step, gradients and losses. It counts as no update.

        Call it when the rest of an update cannot be computed, for example when a later segment fails. In processes that
        train together, all of them must cancel.

        Examples:
            >>> from tensordict import TensorDict
            >>> net = nn.Linear(2, 1)
            >>> step = GradientStep(net, torch.optim.SGD(net.parameters(), lr=0.1))
            >>> _ = step.backward(TensorDict(loss_mse=net(torch.ones(4, 2)).square().mean()))
            >>> step.cancel_update()
            >>> net.weight.grad is None, step.updates
            (True, 0)
        """
        self._pending = []
        self.applied = False
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)

    def _warn_of_the_untrained(self) -> None:
        """Warns, in the first step, of declared parameters that got a gradient and belong to no optimizer."""
        # Not in the constructor: parts of one loss may have steps of their own, and losses that reach only their part.
        left, self._not_stepped = self._not_stepped, {}
        reached = {name: sum(p.grad is not None for p in parameters) for name, parameters in left.items()}
        if reached := {name: count for name, count in reached.items() if count}:
            warnings.warn(
                f"The loss trains {list(left)}, but no optimizer of this step holds {reached} (by group) of the "
                "parameters that the gradient reaches: they stay as they are. Give an optimizer "
                "loss.parameters() or these groups of loss.parameter_groups(), or freeze them with "
                "requires_grad_(False).",
                stacklevel=4,
            )

    def _take_pending(self) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """The losses of all ``backward`` calls since the last step, summed, their mean KL, and the sums by entry."""
        pending, self._pending = self._pending, []
        terms = {name: torch.stack([entry[name] for entry in pending]).sum() for name in pending[0] if name != "kl"}
        loss = terms.pop("loss")
        kl = torch.stack([entry["kl"] for entry in pending]).mean() if "kl" in pending[0] else None
        return loss, kl, terms

    def _judge(self, loss: Tensor, norms: Mapping[str, Tensor]) -> tuple[bool, bool]:
        """Whether everything is finite, and whether a norm is too large to apply; one read of the device."""
        # A loss can be NaN while every gradient is finite (a masked term), so it is part of the check.
        checked = torch.stack([loss, *norms.values()])
        large = checked[1:].max() > (self.max_norm_before_clip or math.inf)
        finite, too_large = torch.stack([checked.isfinite().all(), large]).tolist()
        return finite, too_large

    def _apply(self, norms: Mapping[str, Tensor], kl: Tensor | None) -> None:
        """Clips each group and steps the optimizers, with a KL-adaptive schedule before and any other one after."""
        if isinstance(self.lr_schedule, KLAdaptiveLR) and kl is not None:
            self.lr_schedule.step(kl)
        for name, params in self.groups.items():
            if (largest := self.max_grad_norm[name]) is not None:
                clip_grads_with_norm_(params, largest, norms[name])
        for optimizer in self.optimizers.values():
            self.scaler.step(optimizer)
        if self.lr_schedule is not None and not isinstance(self.lr_schedule, KLAdaptiveLR):
            self.lr_schedule.step()

    def _average_processes(self, loss: Tensor, kl: Tensor) -> tuple[Tensor, Tensor]:
        """Averages all gradients, the loss and the KL over the processes, with one exchange per dtype."""
        parameters = [p for params in self.groups.values() for p in params]
        absent = [i for i, p in enumerate(parameters) if p.grad is None]
        has_gradient = loss.new_tensor([p.grad is not None for p in parameters])
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        loss, kl = loss.clone(), kl.reshape(()).clone()
        buckets: dict[torch.dtype, list[Tensor]] = {}
        for tensor in [*(p.grad for p in parameters if p.grad is not None), loss, kl, has_gradient]:
            buckets.setdefault(tensor.dtype, []).append(tensor)
        for tensors in buckets.values():
            flat = torch.cat([tensor.flatten() for tensor in tensors])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))
        # The optimizer must leave a parameter alone that has no gradient in any process. Such a one has none here
        # either, so the shares are read from the device only when something is absent here.
        if absent:
            shares = has_gradient.tolist()
            for i in absent:
                if shares[i] == 0:
                    parameters[i].grad = None
        return loss, kl

    def _drop_update(self, terms: Mapping[Any, Tensor]) -> None:
        """Counts an update that is not finite, and raises unless such updates are to be skipped."""
        self.skipped += 1
        self._skipped_in_a_row += 1
        searching = self.scaler.is_enabled() and self._skipped_in_a_row < 20
        if self.on_nonfinite == "skip" or searching:
            return
        bad = [
            self._names[id(p)]
            for params in self.groups.values()
            for p in params
            if p.grad is not None and not bool(p.grad.isfinite().all())
        ]
        self._clear_gradients()
        what = f"gradient in {', '.join(bad[:5])}" if bad else "gradient norm"
        if not bad and not all(bool(value.isfinite().all()) for value in terms.values()):
            what = "loss"
        elif _several_processes():
            what += " in at least one process"
        values = ", ".join(f"{name}={value.item():.4g}" for name, value in terms.items())
        raise FloatingPointError(
            f"Non-finite {what} ({values}) in update {self.updates}. No parameter was changed. Look for an exploding "
            "reward or value target, lower the learning rate, or set on_nonfinite='skip' to drop such updates and "
            "count them."
        )

    def restart_schedule(self, name: str, lr: float, remaining_updates: int, **kwargs: Any) -> None:
        """Replaces the schedule by one that starts at ``lr`` and ends with the remaining updates; momentum stays.

        Args:
            name: a name of ``make_lr_schedule``.
            lr: the rate to start at, of the first parameter group; the others keep their ratio to it.
            remaining_updates: updates left.
            kwargs: the schedule's options.
        """
        optimizer = next(iter(self.optimizers.values()))
        # The rates that the schedule began with give the ratio: the current ones may have ended at zero.
        began = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, began, strict=True):
            group["lr"] = group["initial_lr"] = lr * (rate / began[0] if began[0] > 0 else 1.0)
        self.lr_schedule = make_lr_schedule(name, optimizer, max(remaining_updates, 1), **kwargs)
        self._restarted = {"name": name, "lr": lr, "remaining_updates": remaining_updates, **kwargs}

    def state_dict(self) -> dict[str, Any]:
        """Counters, gradient scale and learning-rate schedule (the optimizers are saved on their own)."""
        state: dict[str, Any] = {
            "skipped": self.skipped,
            "skipped_large": self.skipped_large,
            "updates": self.updates,
            "scaler": self.scaler.state_dict(),
        }
        if self.lr_schedule is not None:
            state |= {"lr_schedule": self.lr_schedule.state_dict(), "kind": type(self.lr_schedule).__name__}
        if self._restarted is not None:
            state["restarted"] = dict(self._restarted)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores ``state_dict``.

        A saved schedule does not go into one of another class (adaptive or fixed): restart it, see
        ``restart_schedule``. One that was restarted before it was saved keeps its own length.
        """
        if "restarted" in state:
            groups = next(iter(self.optimizers.values())).param_groups
            rates = [group["lr"] for group in groups]
            self.restart_schedule(**state["restarted"])
            for group, rate in zip(groups, rates, strict=True):  # the optimizer's state says where the schedule stands
                group["lr"] = rate
        self.skipped, self.updates = state["skipped"], state["updates"]
        self.skipped_large = state["skipped_large"]
        self.scaler.load_state_dict(state["scaler"])
        if self.lr_schedule is not None and state.get("kind") == type(self.lr_schedule).__name__:
            self.lr_schedule.load_state_dict(state["lr_schedule"])
