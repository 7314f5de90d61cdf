"""Configurations as files and on the command line."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast, get_args, get_origin

from pydantic import (
    Field,
    ValidationError,
    create_model,
)
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

from edenrl._files import about_rsl_rl, write_atomic
from edenrl.config.base import Config, closest
from edenrl.config.resume import refuse_changes
from edenrl.config.run import RunConfig

ConfigT = TypeVar("ConfigT", bound=Config)

# Short names of what everyone sets, and the field that each stands for where the configuration has it.
_SHORT_NAMES = {"env": "env.name", "num_envs": "env.num_envs", "frames": "total_frames", "lr": "algorithm.lr"}
_ABOUT_HELP = "show the common flags; --help all shows every one"
_ABOUT_CONFIG = "JSON file to start from; other flags override it"
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
    "export": "BOOL",
    "quiet": "BOOL",
}


def save_config(cfg: Config, path: str | os.PathLike[str]) -> None:
    """Write `cfg` to `path` as JSON, atomically: a reader finds the old file or the new one, never half of one.

    Paths are stored as they were given. Missing folders are created.

    Examples:
        >>> import tempfile
        >>> from edenrl.config import EnvConfig, load_config, save_config
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_config(EnvConfig(num_envs=8), f"{folder}/env.json")
        ...     load_config(EnvConfig, f"{folder}/env.json").num_envs
        8
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, cfg.model_dump_json(indent=2) + "\n")


def load_config(cls: type[ConfigT], path: str | os.PathLike[str]) -> ConfigT:
    """Read what ``save_config`` wrote; fields the file does not name take their defaults.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not JSON, or not a valid `cls`; the message names the file and each wrong field.
    """
    values = read_config(path)
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{os.fspath(path)} is not a valid {cls.__name__}:\n{_describe(error)}") from None


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields in a file that ``save_config`` wrote, not yet checked: for a reader that must still find the class.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it does not hold one JSON object; the message names the file.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{os.fspath(path)}: no such file") from None
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} is not readable as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{os.fspath(path)} must hold one JSON object of fields, got {type(values).__name__}")
    return values


def _describe(error: ValidationError, limit: int = 10) -> str:
    """One line per mistake, with its dotted path: at most `limit` of them, so that they fit on one screen."""
    lines = []
    for item in error.errors(include_url=False):
        path, given = ".".join(map(str, item["loc"])), item["input"]
        value = f" = {given!r}" if isinstance(given, str | int | float | None) else ""
        for message in item["msg"].split("\n"):
            lines.append(f"  {path}{value}: {message}" if path else f"  {message}")
    more = [f"  ... and {len(lines) - limit} more"] if len(lines) > limit else []
    return "\n".join(lines[:limit] + more)


def _leaves(cls: type[Config], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field that holds a value rather than another config, by dotted name."""
    for name, field in cls.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Config):
            yield from _leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def _containers(cls: type[Config], kind: type) -> list[str]:
    """Dotted names of the fields that hold a `kind` (dict or tuple), or a `kind` or None."""
    return [
        name
        for name, field in _leaves(cls)
        if kind in (get_origin(field.annotation), *map(get_origin, get_args(field.annotation)))
    ]


def _defaults(cls: type[Config]) -> dict[str, Any]:
    """Class defaults as nested values, so that naming one field of a nested config keeps its siblings' defaults."""
    values = {name: field.get_default(call_default_factory=True) for name, field in cls.model_fields.items()}
    return {
        name: value.model_dump() if isinstance(value, Config) else value
        for name, value in values.items()
        if not cls.model_fields[name].is_required()
    }


def _merge(
    base: Mapping[str, Any], new: Mapping[str, Any], whole: Collection[str] = (), path: str = ""
) -> dict[str, Any]:
    """`base` overridden by `new`, key by key; dictionaries named in `whole` are values and are replaced entirely."""
    merged = dict(base)
    for key, value in new.items():
        old, here = merged.get(key), path + key
        nested = isinstance(value, Mapping) and isinstance(old, Mapping) and here not in whole
        merged[key] = _merge(cast("Mapping[str, Any]", old), value, whole, f"{here}.") if nested else value
    return merged


def _literal(text: str) -> Any:
    """A dictionary entry as typed: JSON when it is JSON, Python's True/False/None, otherwise the text."""
    named = {"true": True, "false": False, "none": None}
    try:
        return named[text.lower()] if text.lower() in named else json.loads(text)
    except ValueError:
        return text


def _flags(cls: type[Config]) -> dict[str, str]:
    """Every flag in underscores, and the one that it stands for: a field's flag for itself, a short name for a field.

    A field of the configuration keeps its name, even where that is a short name elsewhere.
    """
    own = {f"--{name}": f"--{name}" for name in ("config", "help", *(name for name, _ in _leaves(cls)))}
    short = {f"--{name}": f"--{field}" for name, field in _SHORT_NAMES.items() if f"--{field}" in own}
    return short | own


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


def _split_argv(cls: type[Config], argv: Sequence[str]) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """Prepare `argv` for the parser: (``--flag=value`` tokens, dictionaries and tuples, single dictionary entries).

    Joining a flag with its value lets argparse accept negative numbers. Containers are read here because the parser
    does not know ``--env.kwargs.KEY VALUE``, nor, in some versions, ``64,64``. Flags are spelled as the parser knows
    them from here on.
    """
    bools = {f"--{name}" for name, field in _leaves(cls) if field.annotation is bool}
    tuples = {f"--{name}" for name in _containers(cls, tuple)}
    dicts = [f"--{name}" for name in _containers(cls, dict)]
    flags = _flags(cls)
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
            whole = _merge(whole, _nest(flag, content))
        elif given and flag in dicts:
            content = _literal(value)
            if not isinstance(content, dict):
                raise ValueError(
                    f"{flag} expects a JSON object such as '{{\"key\": 1}}', got {value!r}; "
                    f"{flag}.KEY VALUE sets a single entry"
                )
            whole = _merge(whole, _nest(flag, content), [flag[2:]])
        elif given and any(flag.startswith(f"{name}.") for name in dicts):
            entries = _merge(entries, _nest(flag, _literal(value)))
        else:
            tokens.append(flag + given + value)
    return tokens, whole, entries


def _nest(flag: str, value: Any) -> dict[str, Any]:
    for key in reversed(flag[2:].split(".")):
        value = {key: value}
    return cast("dict[str, Any]", value)


def parse_cli(
    cls: type[ConfigT],
    argv: Sequence[str] | None = None,
    *,
    presets: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    profiles: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    prog: str | None = None,
) -> ConfigT:
    """Build a `cls` from the command line.

    Every field is a flag under its dotted name: ``--algorithm.gamma 0.98``, ``--algorithm.actor_hidden 64,64``,
    ``--env.kwargs.success_bonus 30``, ``--quiet``, ``--algorithm.clip_value false``, ``--run_dir None``. Dashes and
    underscores are the same: ``--run-dir``. Four fields have a short name: ``--env`` (``env.name``), ``--num_envs``,
    ``--frames`` (``total_frames``) and ``--lr``. ``--help`` shows the common flags, ``--help all`` every one.
    ``--config FILE`` starts from a saved configuration, ``--resume RUN_DIR`` from the one of a run to continue, which
    also becomes ``run_dir``. From lowest to highest precedence: class defaults, the preset of the environment (only
    without ``--config`` and ``--resume``), the file, the command line. A dictionary such as ``env.kwargs`` is replaced
    by a higher layer that names it; ``--env.kwargs.KEY`` changes one entry of what is there.

    A resumed run cannot change what its restored state would overrule, see ``refuse_changes``. The ``config.json`` of a
    run does not name its directory, so that ``--config RUN/config.json`` starts a new run beside it; ``resume`` and the
    ``run_dir`` of a file that names both are left out as well.

    Args:
        cls: the configuration class.
        argv: arguments without the program's name; default ``sys.argv[1:]``.
        presets: nested field values by environment name, matched without regard to case or a leading ``gym:``.
        profiles: nested field values by the value of the field ``profile``, below those of the preset.
        prog: program name in messages; default that of ``sys.argv[0]``.

    Raises:
        SystemExit: with code 2 after a short message on stderr for any wrong input; with code 0 after ``--help``.

    Examples:
        >>> from edenrl.config import RunConfig, parse_cli
        >>> presets = {"HalfCheetah-v5": {"total_frames": 1_000_000, "env": {"num_envs": 16}}}
        >>> config = parse_cli(RunConfig, ["--env.name", "HalfCheetah-v5", "--env.num_envs", "8"], presets=presets)
        >>> config.total_frames, config.env.num_envs
        (1000000, 8)
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [--config FILE | --resume RUN_DIR] [--FIELD VALUE ...]",
        description=(cls.__doc__ or "").split("\n")[0],
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--help", "-h", nargs="?", const="", metavar="all", help=_ABOUT_HELP)
    parser.add_argument("--config", metavar="FILE", help=_ABOUT_CONFIG)
    try:
        tokens, whole, entries = _split_argv(cls, sys.argv[1:] if argv is None else argv)
        shown, wanted = cls, _wanted_help(tokens)
        if wanted is not None:
            shown, note = _help_class(cls, tokens, presets, profiles)
            parser.description = f"{parser.description}{note}"
        if wanted == "common":
            _common_parser(parser, shown, presets).print_help()
            raise SystemExit(0)
        # The source turns fields into flags, and flags into values; it reads no environment variable.
        source: CliSettingsSource[Any] = CliSettingsSource(
            cast("type[BaseSettings]", shown), root_parser=parser, cli_avoid_json=True, cli_hide_none_type=True
        )
        if wanted == "all":
            short = ", ".join(f"{flag} for {full}" for flag, full in _flags(cls).items() if flag != full)
            parser.epilog = f"{_notes(presets)} Short names: {short}."
            parser.print_help()
            raise SystemExit(0)
        namespace, unknown = parser.parse_known_args(tokens)
        if unknown:
            raise ValueError("\n".join(_unknown_argument(token, [*_flags(cls)]) for token in unknown[:10]))
        file, typed = namespace.config, _merge(source(parsed_args=namespace)(), whole)
        cfg = cls.model_validate(_merge(_layers(cls, file, typed, presets, profiles), entries))
        if isinstance(cfg, RunConfig) and cfg.resume is not None:
            path = Path(cfg.resume) / "config.json"
            refuse_changes(cast("RunConfig", load_config(cls, path)), cfg, str(path))
        return cfg
    except ValidationError as error:
        parser.error(_another_algorithm(cls, file, typed, error) or f"invalid configuration\n{_describe(error)}")
    except (OSError, ValueError, SettingsError) as error:
        parser.error(str(error))


def _another_algorithm(
    cls: type[Config], file: str | None, typed: Mapping[str, Any], error: ValidationError
) -> str | None:
    """The message for a file or a run of another script: its fields would fill the screen with mistakes."""
    resume = typed.get("resume")
    given = file if resume is None else f"{resume}/config.json"
    source = Path(given) if given else None
    saved = read_config(source.expanduser()).get("algorithm") if source is not None else None
    algorithms = (saved, _defaults(cls).get("algorithm"))
    name, own = (part.get("name") if isinstance(part, dict) else None for part in algorithms)
    if source is None or not isinstance(name, str) or own is None or name == own:
        return None
    for item in error.errors(include_url=False):
        if item["loc"] == ("algorithm", "name") and item["type"] == "edenrl":  # the algorithm knows of that one
            return str(item["msg"])
    script = f"{'' if name.startswith('distill_') else 'train_'}{name.lower()}.py"
    if resume is not None:
        return f"{resume} is a run of {name}, this script trains {own}; resume it with examples/{script}"
    return f"{file} is a configuration of {name}, this script trains {own}; start from it with examples/{script}"


def _wanted_help(tokens: Sequence[str]) -> str | None:
    """Which help a command line asks for: "common", "all", or None for no help."""
    asked = [token.partition("=")[2] for token in tokens if token.partition("=")[0] == "--help"]
    if wrong := {*asked} - {"", "all"}:
        raise ValueError(f"--help {wrong.pop()}: --help shows the common flags, --help all every one")
    if not asked:
        return None
    return "all" if "all" in asked else "common"


def _common_parser(
    parser: argparse.ArgumentParser, cls: type[Config], presets: Mapping[str, Any]
) -> argparse.ArgumentParser:
    """A parser for its help alone: the flags that everyone sets, each with the first sentence of its description."""
    short = argparse.ArgumentParser(
        prog=parser.prog,
        usage=parser.usage,
        description=parser.description,
        epilog=_notes(presets),
        add_help=False,
        formatter_class=partial(argparse.HelpFormatter, max_help_position=29),
    )
    names: dict[str, list[str]] = {}
    for flag, full in _flags(cls).items():
        names.setdefault(full, []).append(flag)
    fields = dict(_leaves(cls))
    for name, word in _COMMON.items():
        if name in fields:
            field = fields[name]
            sentence, _, _ = (field.description or "").partition(". ")
            mark = " [preset]" if (field.description or "").endswith("[preset]") else ""
            text = f"{sentence.rstrip('.')}.{mark} (default: {field.default})"
            flags = [*names[f"--{name}"][-1:], *names[f"--{name}"][:-1]]
            short.add_argument(*flags, metavar=word, help=text.replace("%", "%%"))
    short.add_argument("--config", metavar="FILE", help=_ABOUT_CONFIG)
    short.add_argument("--help", "-h", nargs="?", metavar="all", help=_ABOUT_HELP)
    return short


def _notes(presets: Mapping[str, Any]) -> str:
    """What holds for all flags, and where the presets are."""
    notes = "Dashes and underscores are the same in flags."
    return f"{notes} Presets (edenrl/config/presets.py): {', '.join(presets)}." if presets else notes


def _help_class(
    cls: type[ConfigT],
    tokens: Sequence[str],
    presets: Mapping[str, Mapping[str, Any]],
    profiles: Mapping[str, Mapping[str, Any]],
) -> tuple[type[ConfigT], str]:
    """`cls` as ``--help`` shows it: with the preset of the environment on the command line, and a note on that."""
    typed = dict(token[2:].split("=", 1) for token in tokens if token.startswith("--") and "=" in token)
    values = _defaults(cls)
    env_name = typed.get("env.name", values.get("env", {}).get("name", ""))
    profile = profiles.get(typed.get("profile", values.get("profile", "")), {})
    started = {"config", "resume"} & typed.keys()
    preset = {} if started else _merge(profile, _preset(env_name, presets), _containers(cls, dict))
    note = f" Defaults marked [preset] are those of the preset for {env_name}." if preset else ""
    return _with_defaults(cls, _merge(values, preset, _containers(cls, dict)), preset), note


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


def _layers(
    cls: type[Config],
    file: str | None,
    typed: Mapping[str, Any],
    presets: Mapping[str, Mapping[str, Any]],
    profiles: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Class defaults, then the profile and the preset or the file, then what was typed."""
    whole, values = _containers(cls, dict), _defaults(cls)
    resume = typed.get("resume")
    if file is not None and resume is not None:
        raise ValueError("give --config or --resume, not both: a resumed run starts from its own config.json")
    if resume is not None:
        folder = Path(os.path.expanduser(resume))
        if not (folder / "config.json").is_file() and (about := about_rsl_rl(folder)):
            raise FileNotFoundError(f"--resume: {about}")
        if not folder.is_dir():
            raise FileNotFoundError(f"--resume {resume}: no such directory; give the directory of an earlier run")
        layer = read_config(folder / "config.json") | {"resume": resume, "run_dir": resume}
    elif file is not None:
        layer = read_config(os.path.expanduser(file))
        if layer.pop("resume", None) is not None:
            layer.pop("run_dir", None)
    else:
        named = _merge(values, typed)
        profile = profiles.get(named.get("profile", ""), {})
        layer = _merge(profile, _preset(named.get("env", {}).get("name", ""), presets), whole)
    return _merge(_merge(values, layer, whole), typed, whole)


def _preset(env_name: str, presets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return next((dict(preset) for name, preset in presets.items() if _env_key(name) == _env_key(env_name)), {})


def _env_key(name: str) -> str:
    return name.lower().removeprefix("gym:")


def _unknown_argument(token: str, flags: Sequence[str]) -> str:
    flag = token.partition("=")[0]
    if not flag.startswith("-"):
        return f"unexpected argument '{token}'; every value follows its flag, as in --seed 2"
    word = flag.lstrip("-").replace("-", "_")
    near = [name for score, name in closest(word, [name[2:] for name in flags])[:3] if score >= 0.5]
    hint = f"closest: {', '.join('--' + name for name in near)}" if near else "--help all lists every flag"
    return f"unknown flag {flag}; {hint}"
