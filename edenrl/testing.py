"""The contract of a loss as one executable check, for the losses of this library and for yours."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, combinations
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, make_tensordict, unravel_key
from tensordict.nn import TensorDictModuleBase, TensorDictParams
from torch import Tensor, nn
from torchrl.objectives import LossModule
from torchrl.objectives.common import AUTO_LOSS_MASK_KEYS
from torchrl.objectives.value import ValueEstimatorBase

__all__ = ["check_loss_module"]

_Outputs = dict[Any, Tensor]


def check_loss_module(
    loss: LossModule, tensordict: TensorDictBase, *, reaches: Mapping[str, Collection[str]] | None = None
) -> None:
    """Asserts that a loss keeps the contract that trainers, optimizers and checkpoints of this library rely on.

    Checked, each on copies, so that ``loss`` and ``tensordict`` stay as they are:

    - outputs: ``loss_*`` entries carry gradient; the others are detached scalars whose names do not start with
      ``loss``; ``out_keys`` lists exactly what is returned; the losses have the parameters' dtype;
    - the input is not written to;
    - gradient: ``parameter_groups()`` are disjoint and hold exactly the parameters that the summed losses reach;
    - coefficients: each ``<x>_coeff`` is a schedulable buffer; doubling it doubles ``loss_<x>`` and no other loss;
    - reductions: ``"none"`` keeps the batch shape; its sum and mean (over the positions that count, where a loss zeroes
      the others) are those of ``"sum"`` and ``"mean"``;
    - batch shapes: the same steps as ``[B]``, ``[1, B]`` and ``[N, T]`` give the same losses;
    - keys: every entry read is in ``in_keys`` and is renamed by ``set_keys`` or read by a network; unknown names raise
      and ``None`` restores the default. A key that a network writes (``state_value``) is renamed in the network too
      where renaming the data alone does not do. Fields that hold a list of keys are not renamed;
    - keyword calls and ``select_out_keys`` agree with the TensorDict call (skipped where TorchRL infers another batch
      shape from the tensors, because they share a feature dimension);
    - state: what forward advances and what was perturbed come back from ``state_dict``; no plain tensor attributes;
    - ``.to(torch.float64)``, and ``.to(device)`` where there is an accelerator, give the same losses and still train
      the declared parameters;
    - extreme inputs: outputs and gradients stay finite, or ``ValueError`` or ``FloatingPointError`` is raised, when
      ``advantage`` and ``value_target`` are zero or times 1e6, and when the other floating entries that no network
      writes (observations, rewards, gates; not log-probabilities) are zero or times 1e3.

    Args:
        loss: the loss, in working order.
        tensordict: a valid batch of at least 2 steps, shape ``[B]`` or ``[N, T]``, with everything that ``loss`` reads.
        reaches: names of the parameter groups that each ``loss_*`` entry must reach, e.g.
            ``{"loss_critic": ["critic"]}``; entries that are left out may reach any group.

    Raises:
        AssertionError: for the first clause that is violated, saying how to fix it.
        ValueError: for a batch too small to tell the clauses apart, or unknown names in ``reaches``.

    Examples:
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
    _check_attributes(loss)
    _check_outputs(loss, tensordict)
    _check_input_unchanged(loss, tensordict)
    _check_gradients(loss, tensordict, reaches or {})
    _check_coefficients(loss, tensordict)
    _check_reductions(loss, tensordict)
    _check_batch_shapes(loss, tensordict)
    read = _entries_read(loss, tensordict)
    _check_keys(loss, tensordict, read)
    _check_keyword_call(loss, tensordict, read)
    _check_state(loss, tensordict)
    _check_casts(loss, tensordict)
    _check_extreme_inputs(loss, tensordict)


def _require(condition: bool, loss: LossModule, message: str) -> None:
    if not condition:
        raise AssertionError(f"{type(loss).__name__}: {message}")


def _fresh(loss: LossModule, **attributes: Any) -> LossModule:
    """A copy, because forward may advance counters and running statistics."""
    memo: dict[int, Any] = {}
    # deepcopy alone would give each functional network its own copy of the parameters that they share.
    for module in loss.modules():
        if isinstance(module, TensorDictParams):
            twin = module.apply(partial(copy.deepcopy, memo=memo), filter_empty=False)
            memo[id(module)] = TensorDictParams(twin, no_convert=True)
    probe = copy.deepcopy(loss, memo)
    for name, value in attributes.items():
        setattr(probe, name, value)
    return probe


def _seeded(call: Callable[[], Any], seed: int = 0) -> Any:
    """Calls under a fixed seed: sampled entropies then agree, and the caller's generators stay where they are."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        return call()


def _outputs(
    probe: LossModule,
    tensordict: TensorDictBase,
    when: str = "on the given batch",
    fix: str = "give a batch with what it reads",
    seed: int = 0,
) -> _Outputs:
    """Every entry that ``probe``, which may be changed by it, returns for a batch that is not."""
    try:
        out = _seeded(lambda: probe(tensordict.clone()), seed)
    except Exception as error:
        message = f"{type(probe).__name__}: {when}, forward raises {type(error).__name__}: {error}; {fix}."
        raise AssertionError(message) from error
    _require(isinstance(out, TensorDictBase), probe, f"forward returned a {type(out).__name__}; return a TensorDict.")
    return dict(out.items(True, True))


def _losses(outputs: _Outputs) -> dict[str, Tensor]:
    return {key: value for key, value in outputs.items() if isinstance(key, str) and key.startswith("loss_")}


def _close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    if actual.shape != expected.shape:
        return False
    actual, expected = actual.detach().to("cpu", torch.float64), expected.detach().to("cpu", torch.float64)
    return torch.allclose(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def _difference(actual: _Outputs, expected: _Outputs, tolerance: float = 1e-5) -> str:
    """Describes the first entry that differs; empty when none does."""
    if missing := set(map(str, actual)) ^ set(map(str, expected)):
        return f"only one of them has {sorted(missing)}"
    for key, value in expected.items():
        if not _close(actual[key], value, tolerance):
            if actual[key].shape != value.shape:
                return f"{key!r} has shape {tuple(actual[key].shape)} instead of {tuple(value.shape)}"
            pair = torch.stack([tensor.detach().to("cpu", torch.float64).flatten() for tensor in (actual[key], value)])
            got, wanted = pair[:, (pair[0] - pair[1]).abs().argmax()].tolist()
            return f"{key!r} is {got:.6g} instead of {wanted:.6g}"
    return ""


def _check_attributes(loss: LossModule) -> None:
    _require(isinstance(loss, LossModule), loss, "not a LossModule; subclass torchrl.objectives.LossModule.")
    reduction = getattr(loss, "reduction", None)
    _require(
        reduction in ("mean", "sum", "none"),
        loss,
        f"`reduction` is {reduction!r}; store 'mean', 'sum' or 'none' in __init__ and end forward with `_reduce_loss`.",
    )
    tensors = [name for name, value in vars(loss).items() if isinstance(value, Tensor)]
    _require(
        not tensors,
        loss,
        f"the tensor attributes {tensors} neither move with .to() nor enter state_dict; use register_buffer.",
    )


def _check_outputs(loss: LossModule, tensordict: TensorDictBase) -> None:
    dtypes = {parameter.dtype for parameter in loss.parameters()}
    for reduction in ("mean", "sum", "none"):
        probe = _fresh(loss, reduction=reduction)
        under = f"under reduction={reduction!r}"
        outputs = _outputs(probe, tensordict, f"on the given batch {under}")
        losses = _losses(outputs)
        _require(bool(losses), loss, f"no entry starts with 'loss_' in {list(outputs)}; nothing would be trained.")
        for key, value in outputs.items():
            if key in losses:
                _require(
                    value.requires_grad,
                    loss,
                    f"{key!r} carries no gradient; a metric must have a name that does not start with 'loss'.",
                )
                _require(
                    len(dtypes) != 1 or {value.dtype} == dtypes,
                    loss,
                    f"{key!r} is {value.dtype}, the parameters are {dtypes}; create constants in the data's dtype.",
                )
                _require(
                    reduction == "none" or value.numel() == 1,
                    loss,
                    f"{key!r} has shape {tuple(value.shape)} {under}; reduce it with `_reduce_loss`.",
                )
                continue
            name = key[-1] if isinstance(key, tuple) else key
            _require(
                not name.startswith("loss"),
                loss,
                f"{key!r} would be optimized by trainers that sum names starting with 'loss'; name a loss 'loss_<x>' "
                "and rename a metric.",
            )
            _require(not value.requires_grad, loss, f"the metric {key!r} carries gradient; detach() it.")
            _require(
                value.numel() == 1 and value.dtype != torch.bool and not value.is_complex(),
                loss,
                f"the metric {key!r} is {value.dtype} of shape {tuple(value.shape)} {under}; "
                "return a real scalar whatever the batch shape.",
            )
        _require(hasattr(probe, "out_keys"), loss, "no `out_keys`; list what forward returns.")
        declared, returned = set(map(unravel_key, probe.out_keys)), set(outputs)
        _require(
            declared == returned,
            loss,
            f"`out_keys` promises {sorted(map(str, declared - returned))} that is not returned and leaves out "
            f"{sorted(map(str, returned - declared))} that is; make it list exactly what forward returns.",
        )


def _check_input_unchanged(loss: LossModule, tensordict: TensorDictBase) -> None:
    given = tensordict.clone()
    _seeded(lambda: _fresh(loss)(given))
    before, after = dict(tensordict.items(True, True)), dict(given.items(True, True))
    added, removed = set(after) - set(before), set(before) - set(after)
    changed = [
        key
        for key in set(before) & set(after)
        if isinstance(before[key], Tensor) and not torch.equal(_bits(before[key]), _bits(after[key]))
    ]
    _require(
        not (added or removed or changed),
        loss,
        f"forward changed its input: added {sorted(map(str, added))}, removed {sorted(map(str, removed))}, overwrote "
        f"{sorted(map(str, changed))}; work on `tensordict.clone(False)` and avoid in-place operations.",
    )


def _bits(tensor: Tensor) -> Tensor:
    """NaN equals NaN here: the input may hold some in rows that do not count."""
    return tensor.nan_to_num(nan=torch.finfo(tensor.dtype).max) if tensor.is_floating_point() else tensor


def _reached(value: Tensor) -> dict[int, Tensor]:
    """The leaves of the graph behind ``value``, by id: also parameters that the loss does not register."""
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


def _parameter_groups(loss: LossModule) -> dict[str, list[nn.Parameter]]:
    method = getattr(loss, "parameter_groups", None)
    _require(
        callable(method),
        loss,
        "no `parameter_groups()`; return a dict from group name ('policy', 'critic') to the parameters it trains.",
    )
    groups = {name: list(parameters) for name, parameters in method().items()}  # type: ignore[misc]
    _require(bool(groups), loss, "`parameter_groups()` is empty; name the groups of parameters that are trained.")
    return groups


def _check_gradients(loss: LossModule, tensordict: TensorDictBase, reaches: Mapping[str, Collection[str]]) -> None:
    probe = _fresh(loss)
    groups = _parameter_groups(probe)
    names = {id(parameter): name for name, parameter in probe.named_parameters()}
    ids = {group: {id(parameter) for parameter in parameters} for group, parameters in groups.items()}
    for one, other in combinations(groups, 2):
        both = sorted(names.get(i, "an unregistered parameter") for i in ids[one] & ids[other])
        _require(not both, loss, f"the parameter groups {one!r} and {other!r} share {both}; make them disjoint.")
    losses = _losses(_outputs(probe, tensordict))
    leaves = {key: _reached(value) for key, value in losses.items()}
    reached = {i: leaf for found in leaves.values() for i, leaf in found.items()}
    declared = set().union(*ids.values())
    stray = {
        names.get(i, f"an unregistered tensor {tuple(leaf.shape)}"): [key for key in losses if i in leaves[key]]
        for i, leaf in reached.items()
        if i not in declared
    }
    _require(
        not stray,
        loss,
        f"gradient reaches parameters outside of `parameter_groups()`, by loss entry: {stray}; detach what must not "
        "learn (parameters of a teacher or target included), or declare it.",
    )
    idle = sorted(names.get(i, "an unregistered parameter") for i in declared - set(reached))
    _require(
        not idle,
        loss,
        f"`parameter_groups()` declares {idle}, which no loss reaches; leave them out, or remove the detach or frozen "
        "flag that cuts them off.",
    )
    unregistered = [group for group in ids if not ids[group] <= set(names)]
    _require(
        not unregistered,
        loss,
        f"the groups {unregistered} hold parameters that are not in loss.parameters(); register their module.",
    )
    if unknown := (set(reaches) - set(losses)) | (set(chain.from_iterable(reaches.values())) - set(groups)):
        raise ValueError(
            f"`reaches` names {sorted(unknown)}; choose from {list(losses)} and the groups {list(groups)}."
        )
    for key, expected in reaches.items():
        actual = {group for group in groups if ids[group] & set(leaves[key])}
        _require(
            actual == set(expected),
            loss,
            f"{key!r} reaches the groups {sorted(actual)} instead of {sorted(expected)}; detach what must not learn.",
        )


def _check_coefficients(loss: LossModule, tensordict: TensorDictBase) -> None:
    buffers = dict(loss.named_buffers(recurse=False))
    names = [name for name in {**vars(loss), **buffers} if name.endswith("_coeff") and not name.startswith("_")]
    base = _losses(_outputs(_fresh(loss), tensordict))
    for name in names:
        term = f"loss_{name.removesuffix('_coeff')}"
        if name not in buffers:
            numeric = isinstance(getattr(loss, name), (int, float))
            _require(not numeric, loss, f"{name!r} is a plain number; use register_coeff_buffer, so that it is saved.")
            continue
        _require(
            name in type(loss)._all_schedulable_buffers,
            loss,
            f"{name!r} cannot be scheduled: `loss.{name} = 0.5` fails; add it to `_schedulable_buffers`.",
        )
        if term not in base or buffers[name].numel() != 1:
            continue
        value = float(buffers[name])
        # A coefficient of zero cannot be doubled: the loss must be zero under it.
        expected = {**base, term: 2 * base[term] if value else torch.zeros_like(base[term])}
        scaled = _losses(_outputs(_fresh(loss, **{name: 2 * value}), tensordict))
        difference = _difference(scaled, expected)
        _require(
            not difference,
            loss,
            f"{'doubling' if value else 'the zero'} {name!r} must scale {term!r} alone, but {difference}; multiply "
            f"{term!r}, and nothing else, by `self.{name}`.",
        )


def _check_reductions(loss: LossModule, tensordict: TensorDictBase) -> None:
    per = {name: _losses(_outputs(_fresh(loss, reduction=name), tensordict)) for name in ("none", "sum", "mean")}
    for key, steps in per["none"].items():
        _require(
            steps.shape == tensordict.shape,
            loss,
            f"{key!r} has shape {tuple(steps.shape)} under reduction='none' for a batch {tuple(tensordict.shape)}; "
            "keep one number per step until a last `self._reduce_loss(per_step, tensordict)`.",
        )
        total, mean = per["sum"][key].detach(), per["mean"][key].detach()
        _require(
            _close(steps.sum(), total.reshape(())),
            loss,
            f"{key!r} is {total.item():.6g} under reduction='sum', but 'none' sums to {steps.sum().item():.6g}; "
            "reduce once, with `_reduce_loss`.",
        )
        # Steps that do not count (masks, gates) are zero under 'none'.
        most, least = steps.numel(), max(int((steps != 0).sum()), 1)
        counts = torch.arange(least, most + 1, device=total.device)
        fits = [_close(total.reshape(()) / count, mean.reshape(())) for count in counts]
        _require(
            any(fits),
            loss,
            f"{key!r} is {mean.item():.6g} under reduction='mean', but 'none' sums to {total.item():.6g} over "
            f"{least if least == most else f'{least} to {most}'} steps; reduce once, with `_reduce_loss`.",
        )


def _check_batch_shapes(loss: LossModule, tensordict: TensorDictBase) -> None:
    steps = tensordict.numel()
    rows = next((n for n in range(2, steps) if steps % n == 0), steps)
    for reduction in ("mean", "sum"):
        base = _losses(_outputs(_fresh(loss, reduction=reduction), tensordict))
        for shape in ((steps,), (1, steps), (rows, steps // rows)):
            change = f"with the batch {tuple(tensordict.shape)} reshaped to {shape}"
            fix = "treat each step alone and reduce over all batch dimensions"
            probe = _fresh(loss, reduction=reduction)
            difference = _difference(_losses(_outputs(probe, tensordict.reshape(shape), change, fix)), base)
            _require(not difference, loss, f"{change}, {difference}; {fix}.")


def _networks(loss: nn.Module) -> Iterator[TensorDictModuleBase]:
    """The TensorDict modules inside a loss; functional losses hide theirs from ``children()``."""
    for root in [*vars(loss).values(), *loss.children()]:
        if isinstance(root, nn.Module) and not isinstance(root, ValueEstimatorBase):
            for module in root.modules():
                if isinstance(module, LossModule):
                    yield from _networks(module)
                elif isinstance(module, TensorDictModuleBase):
                    yield module


def _network_keys(loss: LossModule, side: str) -> set[NestedKey]:
    return {unravel_key(key) for network in _networks(loss) for key in getattr(network, side)}


def _entries_of(key: NestedKey) -> tuple[NestedKey, NestedKey]:
    """Where a key may stand: at the root, or in the next step (rewards, done flags, next observations)."""
    return key, unravel_key(("next", key))


def _anywhere(keys: Iterable[NestedKey]) -> set[NestedKey]:
    return set(chain.from_iterable(_entries_of(unravel_key(key)) for key in keys))


def _is_at(key: NestedKey, parents: Iterable[NestedKey]) -> bool:
    parts = key if isinstance(key, tuple) else (key,)
    roots = {parent if isinstance(parent, tuple) else (parent,) for parent in parents}
    return any(parts[:length] in roots for length in range(1, len(parts) + 1))


def _rename(tensordict: TensorDictBase, old: NestedKey, new: NestedKey) -> TensorDictBase:
    renamed = tensordict.exclude(*_entries_of(old))
    for source, target in zip(_entries_of(old), _entries_of(new), strict=True):
        if (value := tensordict.get(source, None)) is not None:
            renamed.set(target, value)
    return renamed


def _rename_in_networks(loss: LossModule, old: NestedKey, new: NestedKey) -> None:
    for network in _networks(loss):
        for side in ("in_keys", "out_keys"):
            keys = list(getattr(network, side))
            if old in keys:
                setattr(network, side, [new if key == old else key for key in keys])


def _entries_read(loss: LossModule, tensordict: TensorDictBase) -> list[NestedKey]:
    """The entries whose absence changes something."""
    base = _outputs(_fresh(loss), tensordict)
    read = []
    for key in tensordict.keys(True, True):
        try:
            same = not _difference(_outputs(_fresh(loss), tensordict.exclude(key)), base)
        except Exception:  # Whatever a loss raises for a missing entry shows that it is read.
            same = False
        if not same:
            read.append(key)
    return read


def _fields(loss: LossModule) -> dict[str, NestedKey]:
    accepted = loss._AcceptedKeys
    bare = [
        name
        for name, value in vars(accepted).items()
        if not name.startswith("_") and not callable(value) and name not in accepted.__dataclass_fields__
    ]
    _require(not bare, loss, f"`_AcceptedKeys` ignores {bare}; annotate each field, as in `name: NestedKey = ...`.")
    keys = {name: getattr(loss.tensor_keys, name) for name in accepted.__dataclass_fields__}
    return {name: unravel_key(key) for name, key in keys.items() if isinstance(key, (str, tuple))}


def _check_keys(loss: LossModule, tensordict: TensorDictBase, read: list[NestedKey]) -> None:
    fields = _fields(loss)
    lists = [getattr(loss.tensor_keys, name) for name in loss._AcceptedKeys.__dataclass_fields__ if name not in fields]
    named = [*fields.values(), *chain.from_iterable(keys for keys in lists if keys), *_network_keys(loss, "in_keys")]
    known = {*_anywhere(named), *AUTO_LOSS_MASK_KEYS}
    unnamed = [key for key in read if not _is_at(key, known)]
    _require(
        not unnamed, loss, f"forward reads {unnamed}, which set_keys cannot rename; add fields to `_AcceptedKeys`."
    )
    probe = _fresh(loss)
    try:
        probe.set_keys(no_such_field="x")
    except (ValueError, KeyError, TypeError):
        pass
    else:
        _require(False, loss, "set_keys accepts the unknown name 'no_such_field'; raise a ValueError.")
    base = _outputs(_fresh(loss), tensordict)
    for name, key in fields.items():
        if not any(_is_at(entry, _entries_of(key)) for entry in read):
            continue
        sharing = [other for other in fields if fields[other] == key]
        for new in (f"renamed_{name}", ("renamed", name)):
            problem = _rename_problem(loss, tensordict, base, sharing, key, new)
            _require(
                not problem,
                loss,
                f"set_keys({name}={new!r}) with the entry {key!r} renamed: {problem}; read it as "
                f"`tensordict.get(self.tensor_keys.{name})` wherever it is used.",
            )
        default = getattr(loss, "default_keys", None)
        _require(default is not None, loss, "no `default_keys`; set `default_keys = _AcceptedKeys` in the class.")
        probe = _fresh(loss)
        probe.set_keys(**{name: None})
        restored, expected = getattr(probe.tensor_keys, name), getattr(probe.default_keys(), name)
        _require(
            restored == expected,
            loss,
            f"set_keys({name}=None) gives {restored!r} instead of the default {expected!r}; let `default_keys` be "
            "`_AcceptedKeys`.",
        )


def _rename_problem(
    loss: LossModule, tensordict: TensorDictBase, base: _Outputs, names: list[str], old: NestedKey, new: NestedKey
) -> str:
    """What goes wrong when fields and data, and if need be the networks, use another key; empty when nothing does."""
    in_networks = old in _network_keys(loss, "in_keys") | _network_keys(loss, "out_keys")
    problem = ""
    for rename_networks in (False, True) if in_networks else (False,):
        probe = _fresh(loss)
        if rename_networks:
            _rename_in_networks(probe, old, new)
        try:
            probe.set_keys(**dict.fromkeys(names, new))
            problem = _difference(_outputs(probe, _rename(tensordict, old, new)), base)
        except Exception as error:  # Reported with what was tried.
            problem = f"{type(error).__name__}: {error}"
        if not problem:
            break
    return problem


def _check_keyword_call(loss: LossModule, tensordict: TensorDictBase, read: list[NestedKey]) -> None:
    _require(hasattr(loss, "in_keys"), loss, "no `in_keys`; list the entries that forward reads.")
    in_keys = list(map(unravel_key, loss.in_keys))
    missing = [key for key in read if not _is_at(key, {*in_keys, *AUTO_LOSS_MASK_KEYS})]
    _require(
        not missing,
        loss,
        f"forward reads {missing}, which `in_keys` leaves out: keyword calls cannot pass them; add them there.",
    )
    values = {key: value for key in in_keys if (value := tensordict.get(key, None)) is not None}
    if make_tensordict(values, auto_batch_size=True).batch_size != tensordict.batch_size:
        return
    # Masks are found in the data without being declared, and a keyword call cannot carry them.
    base = _outputs(_fresh(loss), tensordict.select(*values))
    keywords = {key if isinstance(key, str) else "_".join(key): value for key, value in values.items()}
    for selected in (list(base), list(_losses(base))[:1]):
        probe = _fresh(loss)
        if selected != list(base):
            probe.select_out_keys(*selected)
        try:
            results = _seeded(partial(probe, **{name: value.clone() for name, value in keywords.items()}))
        except TypeError as error:
            call = f"loss({', '.join(f'{name}=...' for name in keywords)})"
            raise AssertionError(
                f"{type(loss).__name__}: the keyword call {call} fails ({error}); decorate forward with "
                "@tensordict.nn.dispatch."
            ) from error
        results = results if isinstance(results, tuple) else (results,)
        returned = dict(zip(map(unravel_key, probe.out_keys), results, strict=True))
        difference = _difference(returned, {key: base[key] for key in selected})
        _require(not difference, loss, f"a keyword call for {selected} differs from the TensorDict call: {difference}.")


def _numbers(loss: LossModule) -> dict[str, Any]:
    """The plain numbers kept as attributes anywhere inside."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in loss.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, (int, float))
    }


def _check_state(loss: LossModule, tensordict: TensorDictBase) -> None:
    # What forward advances must travel with the checkpoint.
    advanced = _fresh(loss)
    before = _numbers(advanced)
    for _ in range(2):
        _outputs(advanced, tensordict)
    moved = [name for name, value in _numbers(advanced).items() if name not in before or before[name] != value]
    _require(
        not moved, loss, f"forward changes {moved}, absent from state_dict; keep it in a buffer, changed in place."
    )
    restored = _fresh(loss)
    restored.load_state_dict(copy.deepcopy(advanced.state_dict()))
    difference = _difference(_outputs(restored, tensordict), _outputs(advanced, tensordict))
    _require(
        not difference,
        loss,
        f"state_dict does not restore the loss after two calls: {difference}; keep what changes in persistent buffers.",
    )
    # And every saved value must come back over whatever was there.
    saved = {name: value.clone() for name, value in loss.state_dict().items() if isinstance(value, Tensor)}
    probe = _fresh(loss)
    with torch.no_grad():
        for tensor in chain(probe.parameters(), probe.buffers()):
            tensor.copy_(~tensor if tensor.dtype == torch.bool else tensor + 1)
    probe.load_state_dict(copy.deepcopy(loss.state_dict()))
    loaded = probe.state_dict()
    wrong = [name for name, value in saved.items() if not torch.equal(_bits(loaded[name]), _bits(value))]
    _require(not wrong, loss, f"load_state_dict does not restore {wrong}; drop the override or make it complete.")
    difference = _difference(_outputs(probe, tensordict), _outputs(_fresh(loss), tensordict))
    _require(
        not difference,
        loss,
        f"parameters and buffers were changed and state_dict loaded again, but {difference}; register what is missing "
        "from state_dict as a persistent buffer.",
    )


def _check_casts(loss: LossModule, tensordict: TensorDictBase) -> None:
    base = _losses(_outputs(_fresh(loss), tensordict))
    other_seed = _losses(_outputs(_fresh(loss), tensordict, seed=1))
    # Another dtype or device draws other random numbers.
    sampled = {key for key, value in base.items() if not _close(other_seed[key], value)}
    casts: list[torch.dtype | torch.device] = [torch.float64]
    if torch.accelerator.is_available():
        casts.append(torch.accelerator.current_accelerator())  # type: ignore[arg-type]
    for cast in casts:
        data = tensordict.to(cast) if isinstance(cast, torch.device) else tensordict.apply(_double)
        probe = _fresh(loss).to(cast)
        fix = "register tensors as buffers and create constants with the dtype and device of the data"
        losses = _losses(_outputs(probe, data, f"after .to({cast}) on such data", fix))
        if isinstance(cast, torch.dtype):
            narrow = {key: value.dtype for key, value in losses.items() if value.dtype != cast}
            _require(not narrow, loss, f"after .to({cast}) on such data the dtypes are {narrow}; do not cast inside.")
        difference = _difference(
            {key: value for key, value in losses.items() if key not in sampled},
            {key: value for key, value in base.items() if key not in sampled},
            tolerance=1e-4,
        )
        _require(not difference, loss, f"after .to({cast}): {difference}.")
        _check_gradients(_fresh(loss).to(cast), data, {})


def _double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def _check_extreme_inputs(loss: LossModule, tensordict: TensorDictBase) -> None:
    written = _anywhere(_network_keys(loss, "out_keys"))
    targets = _anywhere(key for name, key in _fields(loss).items() if name in ("advantage", "value_target"))
    outside: dict[str, list[NestedKey]] = {"targets": [], "observations": []}
    for key, value in tensordict.items(True, True):
        floating = isinstance(value, Tensor) and value.is_floating_point()
        if floating and "log_prob" not in str(key) and not _is_at(key, written):
            outside["targets" if _is_at(key, targets) else "observations"].append(key)
    for kind, factor in (("observations", 0.0), ("observations", 1e3), ("targets", 0.0), ("targets", 1e6)):
        data = tensordict.clone()
        for key in outside[kind]:
            data.set(key, data.get(key) * factor)
        where = f"with {outside[kind]} times {factor:g}"
        probe = _fresh(loss)
        fix = "guard divisions, logarithms and roots, or raise a ValueError"
        try:
            outputs = _outputs(probe, data, where, fix)
        except AssertionError as error:
            if isinstance(error.__cause__, (ValueError, FloatingPointError)):
                continue
            raise
        bad = [key for key, value in outputs.items() if not bool(value.isfinite().all())]
        _require(not bad, loss, f"{where}, {bad} is not finite; {fix}.")
        torch.stack([value.sum() for value in _losses(outputs).values()]).sum().backward()
        bad = [name for name, p in probe.named_parameters() if p.grad is not None and not bool(p.grad.isfinite().all())]
        _require(
            not bad,
            loss,
            f"{where}, the gradient of {bad} is not finite; guard derivatives too (a root's is infinite at zero).",
        )
