"""What a resumed run may change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from edenrl.config.run import RunConfig

# Everything else is part of the state that is restored, or of the problem that was learned.
_FREE = (
    "total_frames",
    "max_iterations",
    "algorithm.updates",
    "algorithm.motion",
    "resume",
    "resume_checkpoint",
    "run_dir",
    "export",
    "quiet",
    "num_threads",
    "process_timeout",
    "device",
    "logger",
    "checkpoint",
    "evaluation",
)
_FREE_ON_RESTART = tuple(
    f"algorithm.{name}"
    for name in ("lr", "lr_schedule", "initial_lr_fraction", "final_lr_fraction", "desired_kl", "min_lr", "max_lr")
)


def refuse_changes(
    saved: RunConfig, given: RunConfig, source: str, *, edited: bool = False, restart: bool = False
) -> None:
    """Raises for settings of a resumed run that its restored state would overrule, or that would break it.

    Length, output, device, logger, checkpoints and evaluation may change; with ``resume_schedule="restart"`` also the
    learning rate and its schedule.

    Args:
        saved: the configuration of the run that is continued.
        given: the configuration it is to be continued with.
        source: path of the saved configuration, for the message.
        edited: ``given`` is what now stands in ``source``, and ``saved`` is what the checkpoint was trained with.
        restart: the schedule begins anew, even if ``given`` does not say so.

    Raises:
        ValueError: naming every changed setting with its old and its new value.
    """
    restart = restart or given.resume_schedule == "restart"
    free = {*_FREE, "resume_schedule", *(_FREE_ON_RESTART if restart else ())}
    changed = [
        (name, was, now)
        for name, was, now in _differences(saved.model_dump(mode="json"), given.model_dump(mode="json"))
        if name not in free and name.partition(".")[0] not in free
    ]
    if not changed:
        return
    settings = ", ".join(f"{name} (was {was!r}, now {now!r})" for name, was, now in changed)
    schedule = not restart and any(name in _FREE_ON_RESTART for name, _, _ in changed)
    what, remedy = f"A resumed run cannot change {settings}.", "Leave them out"
    if edited:
        what, remedy = f"{source} was edited. {what}", "Put the old values back"
    raise ValueError(
        f"{what} {remedy}, or start a new run with --config {source}"
        f"{'; --resume_schedule restart lets the learning rate and its schedule change' if schedule else ''}."
    )


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted name, old and new value of each entry that differs; an absent one counts as None."""
    for key in dict.fromkeys([*old, *new]):
        was, now = old.get(key), new.get(key)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            yield from _differences(was, now, f"{prefix}{key}.")
        elif was != now:
            yield prefix + key, was, now
