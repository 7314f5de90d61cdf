"""Check of which parameters the gradient of a loss reaches."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain, combinations

from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.objectives import LossModule

from edenrl.testing.calls import Violations, call, fresh_copy, losses_of, require

__all__ = ["check_gradients"]


def _parameter_groups(loss: LossModule) -> dict[str, list[nn.Parameter]]:
    method = getattr(loss, "parameter_groups", None)
    require(
        callable(method),
        loss,
        "no `parameter_groups()`; return a dict from group name ('policy', 'critic') to the parameters it trains.",
    )
    groups = {name: list(parameters) for name, parameters in method().items()}  # type: ignore[misc]
    require(bool(groups), loss, "`parameter_groups()` is empty; name the groups of parameters that are trained.")
    return groups


def check_gradients(loss: LossModule, tensordict: TensorDictBase, reaches: Mapping[str, Collection[str]]) -> None:
    """Requires that the losses reach exactly the parameters of ``parameter_groups()``.

    Args:
        loss: the loss.
        tensordict: a valid batch.
        reaches: the groups that each ``loss_*`` entry must reach; entries that are left out may reach any.

    Raises:
        ValueError: for an entry or a group in ``reaches`` that does not exist.
    """
    probe = fresh_copy(loss)
    groups = _parameter_groups(probe)
    names = {id(parameter): name for name, parameter in probe.named_parameters()}
    ids = {group: {id(parameter) for parameter in parameters} for group, parameters in groups.items()}
    for one, other in combinations(groups, 2):
        both = sorted(names.get(i, "an unregistered parameter") for i in ids[one] & ids[other])
        require(not both, loss, f"the parameter groups {one!r} and {other!r} share {both}; make them disjoint.")
    losses = losses_of(call(probe, tensordict))
    leaves = {key: leaves_behind(value) for key, value in losses.items()}
    _check_all_declared(loss, leaves, set().union(*ids.values()), names)
    unregistered = [group for group in ids if not ids[group] <= set(names)]
    require(
        not unregistered,
        loss,
        f"the groups {unregistered} hold parameters that are not in loss.parameters(); register their module.",
    )
    if unknown := (set(reaches) - set(losses)) | (set(chain.from_iterable(reaches.values())) - set(groups)):
        raise ValueError(
            f"`reaches` names {sorted(unknown)}; choose from {list(losses)} and the groups {list(groups)}."
        )
    violations = Violations()
    for key, expected in reaches.items():
        actual = sorted(group for group in groups if ids[group] & set(leaves[key]))
        with violations.collect():
            require(
                actual == sorted(set(expected)),
                loss,
                f"{key!r} reaches the groups {actual} instead of {sorted(expected)}; detach what must not learn.",
            )
    violations.report()


def _check_all_declared(
    loss: LossModule, leaves: Mapping[str, Mapping[int, Tensor]], declared: set[int], names: Mapping[int, str]
) -> None:
    """Requires that the tensors reached by any loss are the declared parameters.

    Args:
        loss: the loss.
        leaves: the tensors that each ``loss_*`` entry reaches, by id.
        declared: ids of the parameters in all groups.
        names: names of the registered parameters, by id.
    """
    reached = {i: leaf for found in leaves.values() for i, leaf in found.items()}
    stray = {
        names.get(i, f"an unregistered tensor {tuple(leaf.shape)}"): [key for key in leaves if i in leaves[key]]
        for i, leaf in reached.items()
        if i not in declared
    }
    require(
        not stray,
        loss,
        f"gradient reaches parameters outside of `parameter_groups()`, by loss entry: {stray}; detach what must not "
        "learn (parameters of a teacher or target included), or declare it.",
    )
    idle = sorted(names.get(i, "an unregistered parameter") for i in declared - set(reached))
    require(
        not idle,
        loss,
        f"`parameter_groups()` declares {idle}, which no loss reaches; leave them out, or remove the detach or frozen "
        "flag that cuts them off.",
    )


def leaves_behind(value: Tensor) -> dict[int, Tensor]:
    """The leaves of the graph behind ``value``, by id. Parameters that the loss does not register are among them."""
    leaves, seen, pending = {}, set(), [value.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
        pending.extend(parent for parent, _ in node.next_functions)
    return leaves
