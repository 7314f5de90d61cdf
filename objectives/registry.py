"""Losses by name."""

from __future__ import annotations

import difflib
from typing import Any, TypeVar

from torchrl.objectives import LossModule

__all__ = ["make_loss", "register_loss", "registered_losses"]

LossClass = TypeVar("LossClass", bound=type[LossModule])

# Lower-case name -> (name as registered, class).
_REGISTRY: dict[str, tuple[str, type[LossModule]]] = {}


def register_loss(name: str, cls: Any = None, *, override: bool = False) -> Any:
    """Make a loss available to ``make_loss`` under a name.

    Args:
        name: the name; upper and lower case are the same.
        cls: the ``LossModule`` class. Omit it to use ``register_loss(name)`` as a decorator.
        override: replace an earlier registration. Default False.

    Returns:
        The class, or a decorator that returns it.

    Raises:
        ValueError: the name is empty, or taken and ``override`` is False.
        TypeError: ``cls`` is not a ``LossModule`` class.

    Examples:
        >>> from edenrl.objectives import PPOLoss, make_loss, register_loss
        >>> @register_loss("TwicePPO", override=True)
        ... class TwicePPO(PPOLoss):
        ...     pass
        >>> from edenrl.modules import gaussian_actor
        >>> type(make_loss("twiceppo", gaussian_actor({"observation": 3}, 2))).__name__
        'TwicePPO'
    """
    if not name:
        raise ValueError("A loss needs a name that is not empty.")
    if name.lower() in _REGISTRY and not override:
        raise ValueError(
            f"A loss named {_REGISTRY[name.lower()][0]!r} is already registered; {name!r} needs another name, or pass "
            "override=True to replace it."
        )

    def register(loss: LossClass) -> LossClass:
        if not isinstance(loss, type) or not issubclass(loss, LossModule):
            raise TypeError(f"register_loss({name!r}) was given {loss!r}; expected a LossModule class.")
        _REGISTRY[name.lower()] = (name, loss)
        return loss

    return register if cls is None else register(cls)


def registered_losses() -> dict[str, type[LossModule]]:
    """The registered classes by the name given to ``register_loss``, sorted by name.

    Examples:
        >>> from edenrl.objectives import registered_losses
        >>> registered_losses()["PPO"].__name__
        'PPOLoss'
    """
    return dict(sorted(_REGISTRY.values(), key=lambda entry: entry[0]))


def make_loss(name: str, *args: Any, **kwargs: Any) -> LossModule:
    """Build a loss from its name.

    Args:
        name: a name of ``registered_losses``, in any case.
        args: passed to the class.
        kwargs: passed to the class.

    Raises:
        ValueError: an unknown name; the message lists the closest and all known ones.

    Examples:
        >>> from edenrl.modules import gaussian_actor
        >>> from edenrl.objectives import make_loss
        >>> float(make_loss("grpo", gaussian_actor({"observation": 3}, 2), clip_epsilon=0.1).clip_epsilon)
        0.10000000149011612
    """
    if name.lower() not in _REGISTRY:
        matches = difflib.get_close_matches(name.lower(), _REGISTRY, n=3, cutoff=0.4)
        closest = ", ".join(_REGISTRY[match][0] for match in matches) or "none"
        raise ValueError(
            f"Unknown loss {name!r}. Closest names: {closest}. Registered: {', '.join(registered_losses())}. Add your "
            "own with register_loss."
        )
    return _REGISTRY[name.lower()][1](*args, **kwargs)
