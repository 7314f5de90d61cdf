"""Flags of the command line: how they may be spelled, and the arguments as the parser takes them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from pydantic_settings import BaseSettings, CliSettingsSource

from edenrl.config.base import Config, closest
from edenrl.config.fields import containers, leaves, merge

# Short names of what everyone sets, and the field that each stands for where the configuration has it.
_SHORT_NAMES = {"env": "env.name", "num_envs": "env.num_envs", "frames": "total_frames", "lr": "algorithm.lr"}


def add_flags(cls: type[Config], parser: argparse.ArgumentParser) -> CliSettingsSource[Any]:
    """Adds a flag for every field to `parser`; what it returns turns parsed flags into values."""
    # It reads no environment variable, unlike the settings that this class is made for.
    return CliSettingsSource(
        cast("type[BaseSettings]", cls), root_parser=parser, cli_avoid_json=True, cli_hide_none_type=True
    )


def flags_of(cls: type[Config]) -> dict[str, str]:
    """Every flag in underscores, and the one that it stands for: a field's flag for itself, a short name for a field.

    A field of the configuration keeps its name, even where that is a short name elsewhere.
    """
    own = {f"--{name}": f"--{name}" for name in ("config", "help", *(name for name, _ in leaves(cls)))}
    short = {f"--{name}": f"--{field}" for name, field in _SHORT_NAMES.items() if f"--{field}" in own}
    return short | own


def split_argv(cls: type[Config], argv: Sequence[str]) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """Prepare `argv` for the parser: (``--flag=value`` tokens, dictionaries and tuples, single dictionary entries).

    Joining a flag with its value lets argparse accept negative numbers. Containers are read here because the parser
    does not know ``--env.kwargs.KEY VALUE``, nor, in some versions, ``64,64``. Flags are spelled as the parser knows
    them from here on.
    """
    bools = {f"--{name}" for name, field in leaves(cls) if field.annotation is bool}
    tuples = {f"--{name}" for name in containers(cls, tuple)}
    dicts = [f"--{name}" for name in containers(cls, dict)]
    flags = flags_of(cls)
    tokens: list[str] = []
    whole: dict[str, Any] = {}
    entries: dict[str, Any] = {}
    queue = list(argv)
    while queue:
        flag, given, value = queue.pop(0).partition("=")
        if not flag.startswith("--") and flag != "-h":
            tokens.append(flag + given + value)
            continue
        flag = "--help" if flag == "-h" else _full_flag(flag, flags, dicts)
        if not given and queue and not queue[0].startswith("--"):
            given, value = "=", queue.pop(0)
        elif not given and flag in bools:
            given, value = "=", "true"
        if given and flag in tuples:
            content = _literal(value) if value.startswith("[") or value == "None" else value.split(",")
            whole = merge(whole, _nest(flag, content))
        elif given and flag in dicts:
            content = _literal(value)
            if not isinstance(content, dict):
                raise ValueError(
                    f"{flag} expects a JSON object such as '{{\"key\": 1}}', got {value!r}; "
                    f"{flag}.KEY VALUE sets a single entry"
                )
            whole = merge(whole, _nest(flag, content), [flag[2:]])
        elif given and any(flag.startswith(f"{name}.") for name in dicts):
            entries = merge(entries, _nest(flag, _literal(value)))
        else:
            tokens.append(flag + given + value)
    return tokens, whole, entries


def _full_flag(flag: str, flags: Mapping[str, str], dicts: Collection[str]) -> str:
    """The flag of a field as the parser knows it, for one with dashes or a short name; any other as it is.

    Of a dictionary's entries only the first key is a name of ours (an argument of a function); what is inside is data.
    """
    spelled = "--" + flag[2:].replace("-", "_")
    for name in dicts:
        if spelled.startswith(f"{name}."):
            key, dot, inside = flag[len(name) + 1 :].partition(".")
            return f"{name}.{key.replace('-', '_')}{dot}{inside}"
    return flags.get(spelled, flag)


def _literal(text: str) -> Any:
    """A dictionary entry as typed: JSON when it is JSON, Python's True/False/None, otherwise the text."""
    named = {"true": True, "false": False, "none": None}
    try:
        return named[text.lower()] if text.lower() in named else json.loads(text)
    except ValueError:
        return text


def _nest(flag: str, value: Any) -> dict[str, Any]:
    for key in reversed(flag[2:].split(".")):
        value = {key: value}
    return cast("dict[str, Any]", value)


def about_unknown(token: str, flags: Sequence[str]) -> str:
    """The message for an argument that the parser does not know, with the closest flags."""
    flag = token.partition("=")[0]
    if not flag.startswith("-"):
        return f"unexpected argument '{token}'; every value follows its flag, as in --seed 2"
    word = flag.lstrip("-").replace("-", "_")
    near = [name for score, name in closest(word, [name[2:] for name in flags])[:3] if score >= 0.5]
    hint = f"closest: {', '.join('--' + name for name in near)}" if near else "--help all lists every flag"
    return f"unknown flag {flag}; {hint}"
