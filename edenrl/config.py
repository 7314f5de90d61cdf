"""Run configuration: typed, validated, saved as JSON, and read from the command line.

Every value is checked where it enters, and a mistake is answered with the dotted name of the field, the value that was
given and what to change. This module does not import torch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

from edenrl._files import write_atomic

__all__ = [
    "CheckpointConfig",
    "Config",
    "EnvConfig",
    "EvaluationConfig",
    "LoggerConfig",
    "PPOConfig",
    "RunConfig",
    "load_config",
    "parse_cli",
    "save_config",
]


def _refuse(message: str) -> PydanticCustomError:
    # A custom error keeps the message free of pydantic's "Value error," prefix and of its link.
    return PydanticCustomError("edenrl", "{message}", {"message": message})


def _number(value: Any) -> Any:
    """Read text such as ``"1e6"`` as a number, for whole numbers too; anything else is left for pydantic to judge."""
    if isinstance(value, bool):
        raise _refuse("expected a number, not a boolean")
    if isinstance(value, str):
        for convert in (int, float):  # int first: a large seed would lose digits as a float
            try:
                return convert(value)
            except ValueError:
                continue
    return value


def _json_values(value: dict[str, Any]) -> dict[str, Any]:
    """Copy `value` through JSON, so that what runs is exactly what ``config.json`` stores."""
    try:
        copied: dict[str, Any] = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise _refuse(
            f"not storable as JSON ({error}); use numbers, strings, booleans, null, lists and objects only"
        ) from None
    return copied


Count = Annotated[int, BeforeValidator(_number), Field(ge=1)]
Seed = Annotated[int, BeforeValidator(_number), Field(ge=0)]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0)]
NonNegative = Annotated[float, BeforeValidator(_number), Field(ge=0)]
Fraction = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1)]
Groups = Annotated[tuple[Name, ...] | None, Field(min_length=1)]  # None: every group
JsonDict = Annotated[dict[str, Any], AfterValidator(_json_values)]


def _closest(word: str, candidates: Iterable[str]) -> list[tuple[float, str]]:
    """Candidates with their similarity to `word` in [0, 1], closest first; the part after the last dot counts too."""

    def similarity(candidate: str) -> float:
        names = (candidate, candidate.rpartition(".")[2])
        return max(SequenceMatcher(None, word.lower(), name.lower()).ratio() for name in names)

    # The sort is stable: equally close candidates stay in the order of definition.
    return sorted(((similarity(candidate), candidate) for candidate in candidates), key=lambda pair: -pair[0])


class Config(BaseModel):
    """Base of every configuration class: no unknown field, checked on assignment, JSON round trip.

    A subclass lists its fields with a docstring under each; the docstring is the description that ``--help`` shows.
    A check that spans several fields runs when the object that owns it is built or one of its own fields is assigned.

    Raises:
        pydantic.ValidationError: (a ``ValueError``) for a value out of range, named by its dotted path, or for an
            unknown field, with the valid fields of that class, closest spelling first.

    Examples:
        >>> from edenrl.config import PPOConfig
        >>> PPOConfig(gamma=0.98).gamma
        0.98
        >>> PPOConfig.model_validate_json(PPOConfig(epochs=3).model_dump_json()).epochs
        3
        >>> PPOConfig().gama = 0.98  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: unknown field 'gama' in PPOConfig; did you mean 'gamma'? Valid fields: gamma, ...
    """

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @classmethod
    def _unknown_field(cls, name: str) -> str:
        ranked = _closest(name, cls.model_fields)
        hint = f"; did you mean '{ranked[0][1]}'?" if ranked and ranked[0][0] >= 0.6 else "."
        return f"unknown field '{name}' in {cls.__name__}{hint} Valid fields: {', '.join(field for _, field in ranked)}"

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, data: Any) -> Any:
        unknown = [key for key in data if key not in cls.model_fields] if isinstance(data, Mapping) else []
        if unknown:
            raise _refuse("\n".join(cls._unknown_field(str(key)) for key in unknown))
        return data

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in type(self).model_fields:
            raise ValueError(self._unknown_field(name))
        before = self.__dict__.copy()
        try:
            super().__setattr__(name, value)
        except ValidationError:
            self.__dict__.update(before)  # pydantic leaves the refused value in place when an after-check fails
            raise


class EnvConfig(Config):
    """Which environment, how many copies, and how rewards and actions are treated at its boundary."""

    name: Name = "PointMass"
    """Registered name, Gymnasium id ("HalfCheetah-v5" or "gym:HalfCheetah-v5"), or "mjlab:<task>"/"isaaclab:<task>"."""
    num_envs: Count = 256
    """Environments stepped together."""
    kwargs: JsonDict = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor, as JSON; --env.kwargs.KEY VALUE sets a single one."""
    vectorization: Literal["sync", "async"] = "sync"
    """How the copies are stepped (Gymnasium ids only): one after another, or one process each."""
    reward_scale: Positive = 1.0
    """Factor on the reward the learner sees; evaluation reports the unscaled return."""
    action_mode: Literal["clip", "squash", "none"] = "clip"
    """How an action reaches its bounds: clipped, squashed by tanh, or passed as it is."""


class PPOConfig(Config):
    """PPO hyper-parameters.

    Defaults follow Rudin et al. 2021, "Learning to Walk in Minutes", arXiv:2109.11978: few steps from many environments
    and a learning rate driven by the KL divergence between the old and the new policy.
    """

    name: Literal["PPO"] = "PPO"
    """The algorithm; names the trainer script that rebuilds a run from its config.json."""
    gamma: Annotated[Positive, Field(le=1)] = 0.99
    """Discount per step, in (0, 1]."""
    lmbda: Fraction = 0.95
    """GAE lambda, in [0, 1]: 0 trusts the critic, 1 trusts the returns."""
    clip_epsilon: Positive = 0.2
    """Clip range of the probability ratio, and of the value when clip_value is set."""
    entropy_coeff: NonNegative = 0.01
    """Weight of the entropy bonus."""
    critic_coeff: Positive = 1.0
    """Weight of the value loss."""
    clip_value: bool = True
    """Clip the value loss around the values at collection."""
    epochs: Count = 5
    """Passes over each rollout."""
    num_minibatches: Count = 4
    """Mini-batches per pass; must divide env.num_envs * steps_per_env."""
    lr: Positive = 1e-3
    """Learning rate at the start."""
    lr_schedule: Literal["adaptive", "constant", "linear", "cosine", "step", "exponential", "warmup_cosine"] = (
        "adaptive"
    )
    """How the learning rate changes; adaptive follows desired_kl within [min_lr, max_lr]."""
    final_lr_fraction: Fraction = 0.0
    """Where linear and cosine schedules end, as a fraction of lr."""
    desired_kl: Positive = 0.01
    """KL divergence per update that the adaptive schedule aims at, in nats."""
    min_lr: Positive = 1e-5
    """Lower bound of the adaptive schedule."""
    max_lr: Positive = 1e-2
    """Upper bound of the adaptive schedule."""
    max_grad_norm: Positive = 1.0
    """Largest gradient norm; actor and critic are clipped separately."""
    steps_per_env: Count = 24
    """Steps each environment takes per iteration."""
    actor_hidden: tuple[Count, ...] = (256, 128, 64)
    """Widths of the actor's hidden layers, as 256,128,64."""
    critic_hidden: tuple[Count, ...] = (256, 128, 64)
    """Widths of the critic's hidden layers, as 256,128,64."""
    activation: Literal["elu", "relu", "tanh", "silu"] = "elu"
    """Activation between hidden layers."""
    init_std: Positive = 1.0
    """Standard deviation of the action noise at the start."""
    normalize_observations: bool = True
    """Normalize observations by their running mean and variance."""
    normalize_advantage: Literal["rollout", "minibatch", "none"] = "rollout"
    """Over what the advantages are brought to mean 0 and variance 1."""
    action_bound_coeff: NonNegative = 0.0
    """Weight of the penalty on action means outside [-1, 1]; 0 turns it off."""
    optimizer: Literal["adam", "adamw", "sgd", "rmsprop"] = "adam"
    """Optimizer of actor and critic."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """What a NaN or infinite gradient does: stop and name the parameter, or skip the step and count it."""
    actor_groups: Groups = None
    """Observation groups the actor reads, in this order; None: every group the environment publishes."""
    critic_groups: Groups = None
    """Observation groups the critic reads, in this order; None: every group the environment publishes."""

    def schedule_options(self) -> dict[str, float]:
        """Options of ``edenrl.optim.make_lr_schedule`` for ``lr_schedule``."""
        if self.lr_schedule == "adaptive":
            return {"target_kl": self.desired_kl, "min_lr": self.min_lr, "max_lr": self.max_lr}
        ends = self.lr_schedule in ("linear", "cosine", "warmup_cosine")
        return {"final_fraction": self.final_lr_fraction} if ends else {}

    @model_validator(mode="after")
    def _check_learning_rate(self) -> PPOConfig:
        if self.lr_schedule == "adaptive" and not self.min_lr <= self.lr <= self.max_lr:
            raise _refuse(
                f"lr_schedule 'adaptive' needs min_lr <= lr <= max_lr, got min_lr {self.min_lr:g}, lr {self.lr:g}, "
                f"max_lr {self.max_lr:g}; move lr inside, widen the bounds, or choose another lr_schedule"
            )
        return self


class EvaluationConfig(Config):
    """How a policy is evaluated: deterministic actions, whole episodes, a seed of its own."""

    num_episodes: Count = 20
    """Finished episodes per evaluation."""
    seed: Seed = 12345
    """Seed of the evaluation environments, apart from the training seed."""


class CheckpointConfig(Config):
    """When checkpoints are written and how many stay on disk."""

    interval_iterations: Count | None = None
    """Iterations between checkpoints; None: ten per run."""
    keep_last: Count = 2
    """Most recent checkpoints kept besides the best one."""


class LoggerConfig(Config):
    """Where metrics go, besides the run directory's metrics.csv."""

    kind: Literal["csv", "tensorboard", "wandb"] = "csv"
    """Logger."""
    wandb_mode: Literal["online", "offline", "disabled"] = "online"
    """How wandb runs; without an account or network it falls back to offline."""
    project: Name = "edenrl"
    """wandb project."""


class RunConfig(Config):
    """What every training run shares; a script's configuration adds ``algorithm``.

    Examples:
        >>> from pydantic import Field
        >>> from edenrl.config import PPOConfig, RunConfig, parse_cli
        >>> class TrainPPO(RunConfig):
        ...     algorithm: PPOConfig = Field(default_factory=PPOConfig)
        >>> config = parse_cli(TrainPPO, ["--env.num_envs", "64", "--algorithm.gamma", "0.98"])
        >>> config.env.num_envs, config.algorithm.gamma
        (64, 0.98)
    """

    seed: Seed = 1
    """Seed of networks, environments and sampling."""
    total_frames: Count = 2_000_000
    """Environment steps to train for, summed over environments; 1e6 and 1_000_000 are read as well."""
    device: Name = "auto"
    """Torch device such as cpu or cuda:0; auto takes the accelerator when there is one."""
    run_dir: Name | None = None
    """Directory of this run; None: runs/<algorithm>-<env>-s<seed>-<time>."""
    resume: Name | None = None
    """Run directory to continue: its config.json is the base, and it becomes run_dir."""
    resume_schedule: Literal["restore", "restart"] = "restore"
    """On resume, restore the learning-rate schedule or restart it over the remaining updates."""
    quiet: bool = False
    """No progress output."""
    num_threads: Count | None = None
    """CPU threads torch may use; None leaves torch's own choice."""
    env: EnvConfig = Field(default_factory=EnvConfig)
    """Environment."""
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """Evaluation."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Checkpoints."""
    logger: LoggerConfig = Field(default_factory=LoggerConfig)
    """Logging."""

    @model_validator(mode="after")
    def _check_minibatches(self) -> RunConfig:
        algorithm = getattr(self, "algorithm", None)
        steps, parts = getattr(algorithm, "steps_per_env", None), getattr(algorithm, "num_minibatches", None)
        if steps is None or parts is None or self.env.num_envs * steps % parts == 0:
            return self
        frames = self.env.num_envs * steps
        fewer = next(n for n in range(min(parts, frames), 0, -1) if frames % n == 0)
        unit = parts // math.gcd(steps, parts)
        raise _refuse(
            f"env.num_envs * algorithm.steps_per_env = {self.env.num_envs} * {steps} = {frames} frames do not split "
            f"into algorithm.num_minibatches = {parts} equal parts; set algorithm.num_minibatches to {fewer}, or "
            f"env.num_envs to a multiple of {unit} such as {math.ceil(self.env.num_envs / unit) * unit}"
        )


ConfigT = TypeVar("ConfigT", bound=Config)


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
    values = _read_json(path)
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{os.fspath(path)} is not a valid {cls.__name__}:\n{_describe(error)}") from None


def _read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
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


def _split_argv(cls: type[Config], argv: Sequence[str]) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """Prepare `argv` for the parser: (``--flag=value`` tokens, dictionaries and tuples, single dictionary entries).

    Joining a flag with its value lets argparse accept negative numbers. Containers are read here because the parser
    does not know ``--env.kwargs.KEY VALUE``, nor, in some versions, ``64,64``.
    """
    bools = {f"--{name}" for name, field in _leaves(cls) if field.annotation is bool}
    tuples = {f"--{name}" for name in _containers(cls, tuple)}
    dicts = [f"--{name}" for name in _containers(cls, dict)]
    tokens: list[str] = []
    whole: dict[str, Any] = {}
    entries: dict[str, Any] = {}
    queue = list(argv)
    while queue:
        flag, given, value = queue.pop(0).partition("=")
        if not flag.startswith("--") or flag == "--help":
            tokens.append(flag + given + value)
            continue
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
    prog: str | None = None,
) -> ConfigT:
    """Build a `cls` from the command line.

    Every field is a flag under its dotted name: ``--algorithm.gamma 0.98``, ``--algorithm.actor_hidden 64,64``,
    ``--env.kwargs.success_bonus 30``, ``--quiet``, ``--algorithm.clip_value false``, ``--run_dir None``.
    ``--config FILE`` starts from a saved configuration, ``--resume RUN_DIR`` from the one of a run to continue, which
    also becomes ``run_dir``. From lowest to highest precedence: class defaults, the preset of the environment (only
    without ``--config`` and ``--resume``), the file, the command line. A dictionary such as ``env.kwargs`` is replaced
    by a higher layer that names it; ``--env.kwargs.KEY`` changes one entry of what is there.

    A file that a resumed run wrote names that run's directory; ``--config`` leaves ``resume`` and ``run_dir`` of such a
    file out, so that a new run never writes into the old one.

    Args:
        cls: the configuration class.
        argv: arguments without the program's name; default ``sys.argv[1:]``.
        presets: nested field values by environment name, matched without regard to case or a leading ``gym:``.
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
    )
    parser.add_argument("--config", metavar="FILE", help="JSON file to start from; other flags override it")
    # The source turns fields into flags, and flags into values; it reads no environment variable.
    source: CliSettingsSource[Any] = CliSettingsSource(
        _with_shown_defaults(cls), root_parser=parser, cli_avoid_json=True, cli_hide_none_type=True
    )
    try:
        tokens, whole, entries = _split_argv(cls, sys.argv[1:] if argv is None else argv)
        namespace, unknown = parser.parse_known_args(tokens)
        if unknown:
            flags = ["--config", *(f"--{name}" for name, _ in _leaves(cls))]
            raise ValueError("\n".join(_unknown_argument(token, flags) for token in unknown[:10]))
        file, typed = namespace.config, _merge(source(parsed_args=namespace)(), whole)
        return cls.model_validate(_merge(_layers(cls, file, typed, presets), entries))
    except ValidationError as error:
        parser.error(f"invalid configuration\n{_describe(error)}")
    except (OSError, ValueError, SettingsError) as error:
        parser.error(str(error))


def _with_shown_defaults(cls: type[Config]) -> type[BaseSettings]:
    """`cls` with its factories already called, because ``--help`` shows the values of instances only."""
    shown: dict[str, Any] = {
        name: (field.annotation, Field(field.get_default(call_default_factory=True), description=field.description))
        for name, field in cls.model_fields.items()
        if field.default_factory is not None
    }
    # The source only looks at the fields, so any model serves as its settings class.
    return cast("type[BaseSettings]", create_model(cls.__name__, __base__=cls, **shown))


def _layers(
    cls: type[Config], file: str | None, typed: Mapping[str, Any], presets: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Class defaults, then the preset or the file, then what was typed."""
    whole, values = _containers(cls, dict), _defaults(cls)
    resume = typed.get("resume")
    if file is not None and resume is not None:
        raise ValueError("give --config or --resume, not both: a resumed run starts from its own config.json")
    if resume is not None:
        if not Path(resume).is_dir():
            raise FileNotFoundError(f"--resume {resume}: no such directory; give the directory of an earlier run")
        layer = _read_json(Path(resume) / "config.json") | {"resume": resume, "run_dir": resume}
    elif file is not None:
        layer = _read_json(file)
        if layer.pop("resume", None) is not None:
            layer.pop("run_dir", None)
    else:
        env_name = _merge(values, typed).get("env", {}).get("name", "")
        layer = next((dict(preset) for name, preset in presets.items() if _env_key(name) == _env_key(env_name)), {})
    return _merge(_merge(values, layer, whole), typed, whole)


def _env_key(name: str) -> str:
    return name.lower().removeprefix("gym:")


def _unknown_argument(token: str, flags: Sequence[str]) -> str:
    flag = token.partition("=")[0]
    if not flag.startswith("-"):
        return f"unexpected argument '{token}'; every value follows its flag, as in --seed 2"
    closest = [name for score, name in _closest(flag.lstrip("-"), [name[2:] for name in flags])[:3] if score >= 0.5]
    hint = f"closest: {', '.join('--' + name for name in closest)}" if closest else "--help lists every flag"
    return f"unknown flag {flag}; {hint}"
