"""The base of every configuration class, the types of its fields, and the wording of errors."""

from __future__ import annotations

import json
from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError


def refuse(message: str) -> PydanticCustomError:
    """An error that pydantic reports with this message alone."""
    # A custom error keeps the message free of pydantic's "Value error," prefix and of its link.
    return PydanticCustomError("edenrl", "{message}", {"message": message})


def _number(value: Any) -> Any:
    """Read text such as ``"1e6"`` as a number, also for integer fields. Anything else is left to pydantic."""
    if isinstance(value, bool):
        raise refuse("expected a number, not a boolean")
    if isinstance(value, str):
        for convert in (int, float):  # int first: a large seed would lose digits as a float
            try:
                return convert(value)
            except ValueError:
                continue
    return value


def _json_values(value: dict[str, Any]) -> dict[str, Any]:
    """Copy `value` through JSON, so that the run uses exactly what ``config.json`` stores."""
    try:
        copied: dict[str, Any] = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise refuse(
            f"not storable as JSON ({error}); use numbers, strings, booleans, null, lists and objects only"
        ) from None
    return copied


def _seed(value: Any) -> Any:
    """Refuse a whole number out of range; pydantic's own words for a very large one do not say the range."""
    value = _number(value)
    whole = isinstance(value, int) or isinstance(value, float) and value.is_integer()
    if whole and not 0 <= value < _SEEDS:
        raise refuse("expected a whole number from 0 to 2**62 - 1")
    return value


# Generators take 64 bits; the seeds of processes and workers are counted on from this one.
_SEEDS = 2**62
Count = Annotated[int, BeforeValidator(_number), Field(ge=1)]
Seed = Annotated[int, BeforeValidator(_seed)]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0)]
NonNegative = Annotated[float, BeforeValidator(_number), Field(ge=0)]
Fraction = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1)]
Groups = Annotated[tuple[Name, ...] | None, Field(min_length=1)]  # None: every group
JsonDict = Annotated[dict[str, Any], AfterValidator(_json_values)]


def closest(word: str, candidates: Iterable[str]) -> list[tuple[float, str]]:
    """Candidates with their similarity to `word` in [0, 1], closest first. Also compares the last dotted part."""

    def similarity(candidate: str) -> float:
        names = (candidate, candidate.rpartition(".")[2])
        return max(SequenceMatcher(None, word.lower(), name.lower()).ratio() for name in names)

    # The sort is stable: equally close candidates stay in the order of definition.
    return sorted(((similarity(candidate), candidate) for candidate in candidates), key=lambda pair: -pair[0])


class Config(BaseModel):
    """Base of every configuration class. It refuses unknown fields, checks assignments and converts to and from JSON.

    A subclass lists its fields with a docstring under each. ``--help`` shows this docstring as the description.
    A check of several fields runs when the object is built, and when one of the object's own fields is assigned.

    Raises:
        pydantic.ValidationError: (a ``ValueError``) for a value out of range; the message names its dotted path. Also
            for an unknown field; the message lists the valid fields of that class, closest spelling first.

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

    def pick(self, *names: str) -> dict[str, Any]:
        """The named fields as keyword arguments, for a class whose arguments have the same names.

        Examples:
            >>> from edenrl.config import PPOConfig
            >>> PPOConfig().pick("gamma", "lmbda")
            {'gamma': 0.99, 'lmbda': 0.95}
        """
        return {name: getattr(self, name) for name in names}

    @classmethod
    def _unknown_field(cls, name: str) -> str:
        ranked = closest(name, cls.model_fields)
        hint = f"; did you mean '{ranked[0][1]}'?" if ranked and ranked[0][0] >= 0.6 else "."
        return f"unknown field '{name}' in {cls.__name__}{hint} Valid fields: {', '.join(field for _, field in ranked)}"

    @model_validator(mode="wrap")
    @classmethod
    def _name_unknown_fields(cls, data: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        """Reports unknown fields beside all other mistakes, with the closest names in place of pydantic's words."""
        try:
            return handler(data)
        except ValidationError as error:
            mistakes = [cls._in_our_words(item, data) for item in error.errors(include_url=False)]
            raise ValidationError.from_exception_data(error.title, mistakes) from None

    @classmethod
    def _in_our_words(cls, item: ErrorDetails, data: Any) -> InitErrorDetails:
        if item["type"] == "extra_forbidden" and len(item["loc"]) == 1:  # those of nested configs are worded there
            return InitErrorDetails(type=refuse(cls._unknown_field(str(item["loc"][0]))), loc=(), input=data)
        kind = refuse(item["msg"]) if item["type"] == "edenrl" else item["type"]
        return InitErrorDetails(type=kind, loc=item["loc"], input=item["input"], ctx=item.get("ctx", {}))

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in type(self).model_fields:
            raise ValueError(self._unknown_field(name))
        before = self.__dict__.copy()
        try:
            super().__setattr__(name, value)
        except ValidationError:
            self.__dict__.update(before)  # pydantic leaves the refused value in place when an after-check fails
            raise
