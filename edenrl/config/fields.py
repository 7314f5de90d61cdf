"""The fields of a configuration class by dotted name, and their values as nested dictionaries."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from edenrl.config.base import Config


def leaves(cls: type[Config], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field that holds a value rather than another config, by dotted name."""
    for name, field in cls.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Config):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def containers(cls: type[Config], kind: type) -> list[str]:
    """Dotted names of the fields that hold a `kind` (dict or tuple), or a `kind` or None."""
    return [
        name
        for name, field in leaves(cls)
        if kind in (get_origin(field.annotation), *map(get_origin, get_args(field.annotation)))
    ]


def defaults(cls: type[Config]) -> dict[str, Any]:
    """Class defaults as nested values, so that naming one field of a nested config keeps its siblings' defaults."""
    values = {name: field.get_default(call_default_factory=True) for name, field in cls.model_fields.items()}
    return {
        name: value.model_dump() if isinstance(value, Config) else value
        for name, value in values.items()
        if not cls.model_fields[name].is_required()
    }


def merge(
    base: Mapping[str, Any], new: Mapping[str, Any], whole: Collection[str] = (), path: str = ""
) -> dict[str, Any]:
    """`base` overridden by `new`, key by key; dictionaries named in `whole` are values and are replaced entirely."""
    merged = dict(base)
    for key, value in new.items():
        old, here = merged.get(key), path + key
        if isinstance(value, Mapping) and isinstance(old, Mapping) and here not in whole:
            value = merge(old, value, whole, f"{here}.")
        merged[key] = value
    return merged
