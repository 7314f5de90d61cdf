"""The contract of a loss as one executable check, for the losses of this library and for yours."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

from tensordict import TensorDictBase
from torchrl.objectives import LossModule

from edenrl.testing.calls import Violations, call, fresh_copy, require
from edenrl.testing.gradients import check_gradients
from edenrl.testing.inputs import check_casts, check_extreme_inputs
from edenrl.testing.keys import check_keys, check_keyword_call, entries_read
from edenrl.testing.results import (
    check_attributes,
    check_batch_shapes,
    check_coefficients,
    check_input_unchanged,
    check_outputs,
    check_reductions,
)
from edenrl.testing.state import check_state

__all__ = ["check_loss_module"]


def check_loss_module(
    loss: LossModule, tensordict: TensorDictBase, *, reaches: Mapping[str, Collection[str]] | None = None
) -> None:
    """Asserts that a loss keeps the contract that trainers, optimizers and checkpoints of this library rely on.

    Every check works on copies, so ``loss`` and ``tensordict`` stay as they are. The clauses, in this order:

    - outputs: ``loss_*`` entries carry gradient and have the parameters' dtype. The others are detached scalars whose
      names do not start with ``loss``. ``out_keys`` lists exactly what is returned.
    - input: forward does not write to it.
    - gradient: the groups of ``parameter_groups()`` are disjoint. Together they hold exactly the parameters that the
      summed losses reach.
    - coefficients: each ``<x>_coeff`` is a schedulable buffer. Doubling it doubles ``loss_<x>`` and no other loss.
    - reductions: ``"none"`` keeps the batch shape. Its sum is that of ``"sum"`` and its mean that of ``"mean"``; where
      a loss is zero at steps that do not count, the mean may leave them out.
    - batch shapes: the same steps as ``[B]``, ``[1, B]`` and ``[N, T]`` give the same losses.
    - keys: every entry that is read is in ``in_keys``, and ``set_keys`` renames it, or a network reads it. Unknown
      names raise; ``None`` restores the default. When a network writes the entry (``state_value``), it may have to be
      renamed there too. Fields that hold a list of keys are not renamed.
    - keyword calls and ``select_out_keys`` agree with the TensorDict call. This is skipped where TorchRL infers another
      batch shape, because the tensors share a feature dimension.
    - state: ``state_dict`` restores what forward advances, and every value that was changed. No attribute is a plain
      tensor.
    - casts: ``.to(torch.float64)``, and ``.to(device)`` where there is an accelerator, give the same losses and still
      train the declared parameters.
    - extreme inputs: outputs and gradients stay finite, or the loss raises ``ValueError`` or ``FloatingPointError``.
      ``advantage`` and ``value_target`` are set to zero and multiplied by 1e6, the other floating entries that no
      network writes (observations, rewards, gates, but no log-probabilities) to zero and by 1e3.

    Args:
        loss: the loss, in working order.
        tensordict: a valid batch of at least 2 steps, shape ``[B]`` or ``[N, T]``, with everything that ``loss`` reads.
        reaches: names of the parameter groups that each ``loss_*`` entry must reach, e.g.
            ``{"loss_critic": ["critic"]}``; entries that are left out may reach any group.

    Raises:
        AssertionError: for all clauses that are violated, one per line, saying how to fix each. A loss that is no
            ``LossModule``, or that cannot be called on the batch, is the only thing reported.
        ValueError: for a batch too small to tell the clauses apart, or unknown names in ``reaches``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from edenrl.modules import gaussian_actor, value_critic
        >>> from edenrl.objectives import PPOLoss
        >>> actor = gaussian_actor({"observation": 3}, 2, hidden=(8,))
        >>> critic = value_critic({"observation": 3}, hidden=(8,))
        >>> batch = critic(actor(TensorDict(observation=torch.randn(4, 5, 3), batch_size=[4, 5]))).detach()
        >>> batch = batch.update({"advantage": torch.randn(4, 5, 1), "value_target": torch.randn(4, 5, 1)})
        >>> reaches = {"loss_objective": ["policy"], "loss_entropy": ["policy"], "loss_critic": ["critic"]}
        >>> check_loss_module(PPOLoss(actor, critic), batch, reaches=reaches)
    """
    if not isinstance(tensordict, TensorDictBase) or tensordict.batch_dims < 1 or tensordict.numel() < 2:
        given = tuple(tensordict.shape) if isinstance(tensordict, TensorDictBase) else type(tensordict).__name__
        raise ValueError(
            f"check_loss_module needs a TensorDict of shape [B] or [N, T] with 2 steps or more, got {given}."
        )
    require(isinstance(loss, LossModule), loss, "not a LossModule; subclass torchrl.objectives.LossModule.")
    call(fresh_copy(loss), tensordict)  # without which no check can run
    read = entries_read(loss, tensordict)
    violations = Violations()
    checks: tuple[Callable[[LossModule, TensorDictBase], None], ...] = (
        check_outputs,
        check_input_unchanged,
        partial(check_gradients, reaches=reaches or {}),
        check_coefficients,
        check_reductions,
        check_batch_shapes,
        partial(check_keys, read=read),
        partial(check_keyword_call, read=read),
        check_state,
        check_casts,
        check_extreme_inputs,
    )
    with violations.collect():
        check_attributes(loss)
    for check in checks:
        with violations.collect():
            check(loss, tensordict)
    violations.report()
