"""What ``--help`` and ``--help all`` show."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from pydantic import Field, create_model

from edenrl.config.base import Config
from edenrl.config.fields import containers, defaults, leaves, merge
from edenrl.config.flags import add_flags, flags_of
from edenrl.config.layers import preset_layer

ConfigT = TypeVar("ConfigT", bound=Config)

# What --help shows: the field and the word for its value.
_COMMON = {
    "env.name": "NAME",
    "env.num_envs": "N",
    "profile": "NAME",
    "total_frames": "N",
    "algorithm.lr": "RATE",
    "seed": "N",
    "device": "DEVICE",
    "run_dir": "DIR",
    "resume": "DIR",
    "init_from": "DIR",
    "export": "BOOL",
    "quiet": "BOOL",
}


def add_general_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that are no field: ``--config`` and ``--help``, which may take a value."""
    parser.add_argument("--config", metavar="FILE", help="JSON file to start from; other flags override it")
    about = "show the common flags; --help all shows every one"
    parser.add_argument("--help", "-h", nargs="?", metavar="all", help=about)


def wanted_help(tokens: Sequence[str]) -> str | None:
    """Which help a command line asks for: "common", "all", or None for no help."""
    asked = [token.partition("=")[2] for token in tokens if token.partition("=")[0] == "--help"]
    if wrong := {*asked} - {"", "all"}:
        raise ValueError(f"--help {wrong.pop()}: --help shows the common flags, --help all every one")
    if not asked:
        return None
    return "all" if "all" in asked else "common"


def print_help(
    kind: str,
    parser: argparse.ArgumentParser,
    cls: type[Config],
    tokens: Sequence[str],
    presets: Mapping[str, Mapping[str, Any]],
    profiles: Mapping[str, Mapping[str, Any]],
) -> None:
    """Prints the help that ``wanted_help`` names.

    Args:
        kind: "common" or "all".
        parser: a parser without the flags of `cls`; it gets them.
        cls: the configuration class.
        tokens: the arguments of the command line, from ``split_argv``.
        presets: as for ``parse_cli``.
        profiles: as for ``parse_cli``.
    """
    shown, note = _help_class(cls, tokens, presets, profiles)
    parser.description = f"{parser.description}{note}"
    notes = "Dashes and underscores are the same in flags."
    if presets:
        notes += f" Presets (edenrl/config/presets.py): {', '.join(presets)}."
    if kind == "all":
        short = ", ".join(f"{flag} for {full}" for flag, full in flags_of(cls).items() if flag != full)
        notes += f" Short names: {short}."
        add_flags(shown, parser)
    parser.epilog = notes
    if kind == "common":
        parser = _common_parser(parser, shown)
    parser.print_help()


def _common_parser(parser: argparse.ArgumentParser, cls: type[Config]) -> argparse.ArgumentParser:
    """A parser for its help alone: the flags that everyone sets, each with the first sentence of its description."""
    short = argparse.ArgumentParser(
        prog=parser.prog,
        usage=parser.usage,
        description=parser.description,
        epilog=parser.epilog,
        add_help=False,
        formatter_class=partial(argparse.HelpFormatter, max_help_position=29),
    )
    names: dict[str, list[str]] = {}
    for flag, full in flags_of(cls).items():
        names.setdefault(full, []).append(flag)
    fields = dict(leaves(cls))
    for name, word in _COMMON.items():
        if name in fields:
            field = fields[name]
            sentence, _, _ = (field.description or "").partition(". ")
            mark = " [preset]" if (field.description or "").endswith("[preset]") else ""
            text = f"{sentence.rstrip('.')}.{mark} (default: {field.default})"
            flags = [*names[f"--{name}"][-1:], *names[f"--{name}"][:-1]]
            short.add_argument(*flags, metavar=word, help=text.replace("%", "%%"))
    add_general_flags(short)
    return short


def _help_class(
    cls: type[ConfigT],
    tokens: Sequence[str],
    presets: Mapping[str, Mapping[str, Any]],
    profiles: Mapping[str, Mapping[str, Any]],
) -> tuple[type[ConfigT], str]:
    """`cls` as ``--help`` shows it: with the preset of the environment on the command line, and a note on that."""
    typed = dict(token[2:].split("=", 1) for token in tokens if token.startswith("--") and "=" in token)
    values = defaults(cls)
    env_name = typed.get("env.name", values.get("env", {}).get("name", ""))
    profile = typed.get("profile", values.get("profile", ""))
    started = {"config", "resume"} & typed.keys()
    preset = {} if started else preset_layer(cls, profile, env_name, presets, profiles)
    note = f" Defaults marked [preset] are those of the preset for {env_name}." if preset else ""
    return _with_defaults(cls, merge(values, preset, containers(cls, dict)), preset), note


def _with_defaults(cls: type[ConfigT], values: Mapping[str, Any], preset: Mapping[str, Any]) -> type[ConfigT]:
    """`cls` with other defaults, marked where a preset names them; help shows the values of instances only."""
    fields: dict[str, Any] = {}
    for name, field in cls.model_fields.items():
        if name not in values:  # required
            continue
        annotation, value, text = field.annotation, values[name], field.description
        if isinstance(annotation, type) and issubclass(annotation, Config):
            annotation = _with_defaults(annotation, value, preset.get(name, {}))
            value = annotation.model_construct()
        elif name in preset:
            text = f"{text} [preset]"
        fields[name] = (annotation, Field(value, description=text))
    return create_model(cls.__name__, __base__=cls, __doc__=cls.__doc__, **fields)
