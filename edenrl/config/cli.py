"""Configurations from the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

from pydantic import ValidationError
from pydantic_settings import SettingsError

from edenrl.config.base import Config
from edenrl.config.fields import defaults, merge
from edenrl.config.files import describe_mistakes, load_config, read_config
from edenrl.config.flags import about_unknown, add_flags, flags_of, split_argv
from edenrl.config.help import add_general_flags, print_help, wanted_help
from edenrl.config.layers import layered
from edenrl.config.resume import refuse_changes
from edenrl.config.run import RunConfig

ConfigT = TypeVar("ConfigT", bound=Config)


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
    also becomes ``run_dir``. ``--init_from RUN_DIR`` starts a new run with the weights of another one.

    From lowest to highest precedence: class defaults, the preset of the environment (only without ``--config`` and
    ``--resume``), the file, the command line. A dictionary such as ``env.kwargs`` is replaced by a higher layer that
    names it; ``--env.kwargs.KEY`` changes one entry of what is there.

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
    add_general_flags(parser)
    try:
        tokens, whole, entries = split_argv(cls, sys.argv[1:] if argv is None else argv)
        if kind := wanted_help(tokens):
            print_help(kind, parser, cls, tokens, presets, profiles)
            raise SystemExit(0)
        source = add_flags(cls, parser)
        namespace, unknown = parser.parse_known_args(tokens)
        if unknown:
            raise ValueError("\n".join(about_unknown(token, [*flags_of(cls)]) for token in unknown[:10]))
        file, typed = namespace.config, merge(source(parsed_args=namespace)(), whole)
        cfg = cls.model_validate(merge(layered(cls, file, typed, presets, profiles), entries))
        if isinstance(cfg, RunConfig) and cfg.resume is not None:
            path = Path(cfg.resume) / "config.json"
            refuse_changes(cast("RunConfig", load_config(cls, path)), cfg, str(path))
        return cfg
    except ValidationError as error:
        message = _another_algorithm(cls, file, typed, error)
        parser.error(message or f"invalid configuration\n{describe_mistakes(error)}")
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
    algorithms = (saved, defaults(cls).get("algorithm"))
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
