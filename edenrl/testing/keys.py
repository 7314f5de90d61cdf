"""Checks of the entries that a loss reads: renaming them, and passing them by keyword."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain

from tensordict import NestedKey, TensorDictBase, make_tensordict, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.objectives import LossModule
from torchrl.objectives.common import AUTO_LOSS_MASK_KEYS
from torchrl.objectives.value import ValueEstimatorBase

from edenrl.testing.calls import Outputs, Violations, call, compare, fresh_copy, losses_of, require, seeded

__all__ = ["anywhere", "check_keys", "check_keyword_call", "entries_read", "is_at", "key_fields", "network_keys"]


def entries_read(loss: LossModule, tensordict: TensorDictBase) -> list[NestedKey]:
    """The entries that forward reads: without one of them it raises, or returns something else."""
    base = call(fresh_copy(loss), tensordict)
    read = []
    for key in tensordict.keys(True, True):
        try:
            same = not compare(call(fresh_copy(loss), tensordict.exclude(key)), base)
        except Exception:  # Whatever a loss raises for a missing entry shows that it is read.
            same = False
        if not same:
            read.append(key)
    return read


def check_keys(loss: LossModule, tensordict: TensorDictBase, read: list[NestedKey]) -> None:
    """Requires that ``set_keys`` renames every entry that is read, refuses unknown names, and restores defaults.

    Args:
        loss: the loss.
        tensordict: a valid batch.
        read: the entries that forward reads.
    """
    fields = key_fields(loss)
    lists = [getattr(loss.tensor_keys, name) for name in loss._AcceptedKeys.__dataclass_fields__ if name not in fields]
    named = [*fields.values(), *chain.from_iterable(keys for keys in lists if keys), *network_keys(loss, "in_keys")]
    known = {*anywhere(named), *AUTO_LOSS_MASK_KEYS}
    unnamed = [key for key in read if not is_at(key, known)]
    violations = Violations()
    with violations.collect():
        advice = "add fields to `_AcceptedKeys`"
        require(not unnamed, loss, f"forward reads {unnamed}, which set_keys cannot rename; {advice}.")
    with violations.collect():
        _check_unknown_name(loss)
    base = call(fresh_copy(loss), tensordict)
    for name, key in fields.items():
        if any(is_at(entry, _entries_of(key)) for entry in read):
            with violations.collect():
                _check_field(loss, tensordict, base, name)
    violations.report()


def _check_field(loss: LossModule, tensordict: TensorDictBase, base: Outputs, name: str) -> None:
    """Requires that one field of ``tensor_keys`` can be renamed and goes back to its default."""
    fields = key_fields(loss)
    key = fields[name]
    sharing = [other for other in fields if fields[other] == key]
    for new in (f"renamed_{name}", ("renamed", name)):
        problem = _rename_problem(loss, tensordict, base, sharing, key, new)
        require(
            not problem,
            loss,
            f"set_keys({name}={new!r}) with the entry {key!r} renamed: {problem}; read it as "
            f"`tensordict.get(self.tensor_keys.{name})` wherever it is used.",
        )
    _check_default(loss, name)


def _check_unknown_name(loss: LossModule) -> None:
    probe = fresh_copy(loss)
    try:
        probe.set_keys(no_such_field="x")
    except (ValueError, KeyError, TypeError):
        return
    require(False, loss, "set_keys accepts the unknown name 'no_such_field'; raise a ValueError.")


def _check_default(loss: LossModule, name: str) -> None:
    default = getattr(loss, "default_keys", None)
    require(default is not None, loss, "no `default_keys`; set `default_keys = _AcceptedKeys` in the class.")
    probe = fresh_copy(loss)
    probe.set_keys(**{name: None})
    restored, expected = getattr(probe.tensor_keys, name), getattr(probe.default_keys(), name)
    require(
        restored == expected,
        loss,
        f"set_keys({name}=None) gives {restored!r} instead of the default {expected!r}; let `default_keys` be "
        "`_AcceptedKeys`.",
    )


def key_fields(loss: LossModule) -> dict[str, NestedKey]:
    """The fields of ``tensor_keys`` that hold one key, by name. Fields that hold a list of keys are left out."""
    accepted = loss._AcceptedKeys
    bare = [
        name
        for name, value in vars(accepted).items()
        if not name.startswith("_") and not callable(value) and name not in accepted.__dataclass_fields__
    ]
    require(not bare, loss, f"`_AcceptedKeys` ignores {bare}; annotate each field, as in `name: NestedKey = ...`.")
    keys = {name: getattr(loss.tensor_keys, name) for name in accepted.__dataclass_fields__}
    return {name: unravel_key(key) for name, key in keys.items() if isinstance(key, (str, tuple))}


def _rename_problem(
    loss: LossModule, tensordict: TensorDictBase, base: Outputs, names: list[str], old: NestedKey, new: NestedKey
) -> str:
    """What goes wrong when fields and data use another key. Empty when nothing does.

    When the networks use the key as well, renaming it in them too is also a way to make the loss work.

    Args:
        loss: the loss.
        tensordict: a valid batch, with the entry under ``old``.
        base: what the loss returns for it.
        names: the fields that hold ``old``.
        old: the key as it is.
        new: the key to use instead.
    """
    in_networks = old in network_keys(loss, "in_keys") | network_keys(loss, "out_keys")
    problem = ""
    for rename_networks in (False, True) if in_networks else (False,):
        probe = fresh_copy(loss)
        if rename_networks:
            _rename_in_networks(probe, old, new)
        try:
            probe.set_keys(**dict.fromkeys(names, new))
            problem = compare(call(probe, _rename(tensordict, old, new)), base)
        except Exception as error:  # Reported with what was tried.
            problem = f"{type(error).__name__}: {error}"
        if not problem:
            break
    return problem


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


def check_keyword_call(loss: LossModule, tensordict: TensorDictBase, read: list[NestedKey]) -> None:
    """Requires that ``in_keys`` lists what is read and that keyword calls give the same numbers.

    Args:
        loss: the loss.
        tensordict: a valid batch.
        read: the entries that forward reads.
    """
    require(hasattr(loss, "in_keys"), loss, "no `in_keys`; list the entries that forward reads.")
    in_keys = list(map(unravel_key, loss.in_keys))
    missing = [key for key in read if not is_at(key, {*in_keys, *AUTO_LOSS_MASK_KEYS})]
    require(
        not missing,
        loss,
        f"forward reads {missing}, which `in_keys` leaves out: keyword calls cannot pass them; add them there.",
    )
    values = {key: value for key in in_keys if (value := tensordict.get(key, None)) is not None}
    if make_tensordict(values, auto_batch_size=True).batch_size != tensordict.batch_size:
        return
    # Masks are found in the data without being declared, and a keyword call cannot carry them.
    base = call(fresh_copy(loss), tensordict.select(*values))
    keywords = {key if isinstance(key, str) else "_".join(key): value for key, value in values.items()}
    for selected in (list(base), list(losses_of(base))[:1]):
        probe = fresh_copy(loss)
        if selected != list(base):
            probe.select_out_keys(*selected)
        try:
            results = seeded(partial(probe, **{name: value.clone() for name, value in keywords.items()}))
        except TypeError as error:
            written = f"loss({', '.join(f'{name}=...' for name in keywords)})"
            raise AssertionError(
                f"{type(loss).__name__}: the keyword call {written} fails ({error}); decorate forward with "
                "@tensordict.nn.dispatch."
            ) from error
        results = results if isinstance(results, tuple) else (results,)
        returned = dict(zip(map(unravel_key, probe.out_keys), results, strict=True))
        difference = compare(returned, {key: base[key] for key in selected})
        require(not difference, loss, f"a keyword call for {selected} differs from the TensorDict call: {difference}.")


def _networks(loss: nn.Module) -> Iterator[TensorDictModuleBase]:
    """The TensorDict modules inside a loss, without its value estimator."""
    # Functional losses keep theirs out of children(), as plain attributes.
    for root in [*vars(loss).values(), *loss.children()]:
        if isinstance(root, nn.Module) and not isinstance(root, ValueEstimatorBase):
            for module in root.modules():
                if isinstance(module, LossModule):
                    yield from _networks(module)
                elif isinstance(module, TensorDictModuleBase):
                    yield module


def network_keys(loss: LossModule, side: str) -> set[NestedKey]:
    """The keys that the networks of a loss read (``side`` "in_keys") or write ("out_keys")."""
    return {unravel_key(key) for network in _networks(loss) for key in getattr(network, side)}


def _entries_of(key: NestedKey) -> tuple[NestedKey, NestedKey]:
    """Where a key may stand: at the root, or in the next step (rewards, done flags, next observations)."""
    return key, unravel_key(("next", key))


def anywhere(keys: Iterable[NestedKey]) -> set[NestedKey]:
    """Every place where the keys may stand: at the root and in the next step."""
    return set(chain.from_iterable(_entries_of(unravel_key(key)) for key in keys))


def is_at(key: NestedKey, parents: Iterable[NestedKey]) -> bool:
    """Whether ``key`` is one of ``parents``, or lies below one."""
    parts = key if isinstance(key, tuple) else (key,)
    roots = {parent if isinstance(parent, tuple) else (parent,) for parent in parents}
    return any(parts[:length] in roots for length in range(1, len(parts) + 1))
