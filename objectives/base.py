"""What every loss shares: input and output keys, the reduction, coefficients, and access to trained parameters."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import nn

from edenrl.modules import refuse_nonfinite
from edenrl.modules.finite import tensors_under

__all__ = [
    "LossMixin",
    "described",
    "require",
    "require_critic",
    "require_instance",
    "require_not_negative",
    "require_policy",
]

REDUCTIONS = ("mean", "sum", "none")


def require(owner: object, name: str, value: object, good: bool, wanted: str) -> None:
    """Raises unless a setting is good.

    Args:
        owner: the object that was given the setting; its class is named in the message.
        name: name of the setting.
        value: what was given.
        good: whether the value is allowed.
        wanted: the allowed values in words, which complete "needs <name> ...".

    Raises:
        ValueError: ``good`` is False.

    Examples:
        >>> require(nn.Identity(), "gamma", 1.5, 0 <= 1.5 <= 1, "in [0, 1]")
        Traceback (most recent call last):
        ValueError: Identity needs gamma in [0, 1], got 1.5.
    """
    if not good:
        raise ValueError(f"{type(owner).__name__} needs {name} {wanted}, got {value!r}.")


def require_not_negative(owner: object, **settings: Any) -> None:
    """Raises when a setting is a negative number or NaN; other values (``None``, tensors, mappings) pass.

    Args:
        owner: the object that was given the settings.
        settings: the settings by name.

    Raises:
        ValueError: for the first negative number or NaN.

    Examples:
        >>> require_not_negative(nn.Identity(), entropy_coeff=0.0, critic_coeff=-1.0)
        Traceback (most recent call last):
        ValueError: Identity needs critic_coeff >= 0, got -1.0.
    """
    for name, value in settings.items():
        if isinstance(value, (int, float)):
            require(owner, name, value, value >= 0, ">= 0")


def require_policy(owner: object, name: str, network: Any) -> None:
    """Raises unless a network is a policy that has a distribution.

    Args:
        owner: the object that was given the network; its class is named in the message.
        name: name of the argument.
        network: what was given.

    Raises:
        ValueError: for anything else.
    """
    if not (isinstance(network, nn.Module) and hasattr(network, "get_dist") and hasattr(network, "in_keys")):
        raise ValueError(
            f"{type(owner).__name__} needs {name} to be a probabilistic policy, with in_keys and get_dist, such as "
            f"gaussian_actor's; got {described(network)}."
        )


def require_critic(owner: object, name: str, network: Any) -> None:
    """Raises unless a network is a ``TensorDictModule`` that is no policy.

    Args:
        owner: the object that was given the network; its class is named in the message.
        name: name of the argument.
        network: what was given.

    Raises:
        ValueError: for anything else.
    """
    if not isinstance(network, TensorDictModuleBase) or hasattr(network, "get_dist"):
        raise ValueError(
            f"{type(owner).__name__} needs {name} to be a TensorDictModule that writes values, such as value_critic's; "
            f"got {described(network)}."
        )


def require_instance(owner: object, name: str, value: Any, *classes: type) -> None:
    """Raises unless an argument is of one of some classes.

    Args:
        owner: the object that was given the argument; its class is named in the message.
        name: name of the argument.
        value: what was given.
        classes: the classes.

    Raises:
        ValueError: for an object of another class.

    Examples:
        >>> require_instance(nn.Identity(), "layer", 3, nn.Linear)
        Traceback (most recent call last):
        ValueError: Identity needs layer to be a Linear, got 3.
    """
    if not isinstance(value, classes):
        wanted = " or ".join(f"a {kind.__name__}" for kind in classes)
        raise ValueError(f"{type(owner).__name__} needs {name} to be {wanted}, got {described(value)}.")


def described(value: Any) -> str:
    """A few words about an argument of the wrong kind, for a message."""
    if not isinstance(value, nn.Module):
        return repr(value)
    name = f"a {type(value).__name__}"
    if hasattr(value, "get_dist"):
        return f"{name}, which is a policy"
    if isinstance(value, TensorDictModuleBase):
        return f"{name}, which writes {list(value.out_keys)} and has no distribution"
    return f"{name}, which is no TensorDictModule"


class LossMixin:
    """Keys, reduction, coefficients and parameter groups of a loss. Put it before ``LossModule`` or a loss of TorchRL.

    A new loss writes:

    - ``_AcceptedKeys``, a dataclass with one annotated ``NestedKey`` per entry that ``set_keys`` can rename;
    - ``__init__``, which passes ``reduction`` on and registers the coefficients: with ``register_coeff_buffer``
      (TorchRL's), or with ``register_optional_coeff`` if the term can be left out. Add their names to
      ``_schedulable_buffers``, so that users can write ``loss.entropy_coeff = 0.01``;
    - ``_make_in_keys`` and ``_make_out_keys``, the entries that ``forward`` reads and returns;
    - ``parameter_groups``, the parameters that it trains;
    - ``forward`` under ``@dispatch``, which keeps one value per sample until ``_reduce_loss`` (TorchRL's).

    The mixin provides the properties ``in_keys`` and ``out_keys``, which follow ``set_keys`` and ``select_out_keys``;
    ``default_keys``; a check of ``reduction``; an error when someone sets the coefficient of a term that was left out;
    and ``_trained`` and ``_with_parameters`` for the networks. ``edenrl.testing.check_loss_module`` checks the result.

    Args:
        args: passed to the next class.
        reduction: "mean" (default) or "sum" over the batch, or "none": one value per sample, ``[*batch]``.
        kwargs: passed to the next class.

    Raises:
        ValueError: an unknown reduction.

    Examples:
        >>> from dataclasses import dataclass
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule, dispatch
        >>> from torchrl.objectives import LossModule
        >>> class ImitationLoss(LossMixin, LossModule):
        ...     @dataclass
        ...     class _AcceptedKeys:
        ...         action: NestedKey = "action"
        ...         expert_action: NestedKey = "expert_action"
        ...
        ...     _schedulable_buffers = frozenset({"imitation_coeff"})
        ...
        ...     def __init__(self, actor, *, imitation_coeff=1.0, reduction="mean"):
        ...         require_not_negative(self, imitation_coeff=imitation_coeff)
        ...         super().__init__(reduction=reduction)
        ...         self.actor = actor
        ...         self.register_coeff_buffer("imitation_coeff", imitation_coeff)
        ...
        ...     def _make_in_keys(self):
        ...         return [*self.actor.in_keys, self.tensor_keys.expert_action]
        ...
        ...     def _make_out_keys(self):
        ...         return ["loss_imitation", "imitation_error"]
        ...
        ...     def parameter_groups(self):
        ...         return {"policy": self._trained(self.actor)}
        ...
        ...     @dispatch
        ...     def forward(self, tensordict):
        ...         action = self.actor(tensordict.select(*self.actor.in_keys)).get(self.tensor_keys.action)
        ...         error = (action - tensordict.get(self.tensor_keys.expert_action)).square().mean(-1)
        ...         return TensorDict(
        ...             loss_imitation=self._reduce_loss(self.imitation_coeff * error, tensordict),
        ...             imitation_error=error.detach().mean(),
        ...         )
        >>> actor = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["action"])
        >>> loss = ImitationLoss(actor, imitation_coeff=0.5)
        >>> batch = TensorDict(observation=torch.randn(8, 3), expert_action=torch.zeros(8, 2), batch_size=[8])
        >>> loss(batch)["loss_imitation"].backward()
        >>> from edenrl.testing import check_loss_module
        >>> check_loss_module(loss, batch)
    """

    # From torch.nn.Module and LossModule.
    register_buffer: Callable[..., None]
    register_coeff_buffer: Callable[..., None]

    _AcceptedKeys: Any
    default_keys: Any
    _in_keys: list[NestedKey] | None
    _out_keys: list[NestedKey] | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # What set_keys(name=None) goes back to.
        if "_AcceptedKeys" in vars(cls):
            cls.default_keys = cls._AcceptedKeys

    def __init__(self, *args: Any, reduction: str | None = "mean", **kwargs: Any) -> None:
        reduction = "mean" if reduction is None else reduction  # as in TorchRL
        require(self, "reduction", reduction, reduction in REDUCTIONS, "'mean', 'sum' or 'none'")
        super().__init__(*args, **kwargs)
        self.reduction = reduction
        self._in_keys = self._out_keys = None
        self._not_built: dict[str, str] = {}

    def register_optional_coeff(self, name: str, value: float | None, *, needs: str | None = None) -> None:
        """Registers the coefficient of a term that is left out when ``value`` is ``None``.

        In that case ``self.<name>`` is ``None``. Assigning a value raises an error, because it would have no effect.

        Args:
            name: name of the coefficient, which belongs into ``_schedulable_buffers``.
            value: the coefficient, or ``None`` for a loss without the term.
            needs: the setting that enables the term, named in the error message. Default "<name> > 0".

        Raises:
            AttributeError: later, at ``loss.<name> = ...`` for a term that was left out.
        """
        if value is not None:
            self.register_coeff_buffer(name, float(value))
            return
        self.register_buffer(name, None)
        self._not_built[name] = needs or f"{name} > 0"

    def __setattr__(self, name: str, value: Any) -> None:
        # Some attributes are assigned before the constructor comes to _not_built.
        needs = self.__dict__.get("_not_built", {}).get(name)
        if needs is not None:
            raise AttributeError(
                f"This {type(self).__name__} was built without the term that {name} weighs; build it with {needs} to "
                "change it later."
            )
        super().__setattr__(name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the losses; an entry that the batch lacks, or that is not finite, is named."""
        batch = args[0] if args and isinstance(args[0], TensorDictBase) else TensorDict()
        self._refuse_nonfinite(batch, self._finite_keys())
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        except (AttributeError, TypeError) as error:
            # TensorDict.get gives None for an absent entry, and what comes after fails without naming it.
            held = set(batch.keys(include_nested=True))
            absent = [key for key in self._read_keys() if unravel_key(key) not in held]
            if not args or not absent:
                raise
            raise KeyError(
                f"{type(self).__name__} reads {absent}, which the batch lacks; it has {sorted(map(str, held))}. Keep "
                "these entries in the data, or name them with set_keys."
            ) from error

    def _read_keys(self) -> list[NestedKey]:
        """The entries that are read: ``in_keys``, without what a loss reads only where another entry is absent."""
        return self.in_keys

    def _finite_keys(self) -> list[NestedKey]:
        """The entries that must be finite: all that are read, unless a loss leaves some of their steps out."""
        return self._read_keys()

    @staticmethod
    def _refuse_nonfinite(batch: TensorDictBase, keys: Sequence[NestedKey]) -> None:
        # Only where looking costs nothing. On an accelerator it would wait for the device in each mini-batch, and
        # GradientStep finds the loss that is not finite before it changes a parameter.
        on_host = [key for key, entry in tensors_under(batch, keys).items() if entry.is_cpu]
        if not torch.compiler.is_compiling():
            refuse_nonfinite(batch, on_host, what="batch")

    @property
    def in_keys(self) -> list[NestedKey]:
        """The entries that ``forward`` reads."""
        if self._in_keys is None:
            self._in_keys = self._make_in_keys()
        return self._in_keys

    @in_keys.setter
    def in_keys(self, values: list[NestedKey] | None) -> None:
        self._in_keys = values

    @property
    def out_keys(self) -> list[NestedKey]:
        """The entries that ``forward`` returns."""
        if self._out_keys is None:
            self._out_keys = self._make_out_keys()
        return self._out_keys

    @out_keys.setter
    def out_keys(self, values: list[NestedKey] | None) -> None:
        self._out_keys = values

    def _set_in_keys(self) -> None:
        # TorchRL calls this when set_keys has renamed entries.
        self._in_keys = None

    def _make_in_keys(self) -> list[NestedKey]:
        raise NotImplementedError(f"{type(self).__name__} needs _make_in_keys(): the entries that forward reads.")

    def _make_out_keys(self) -> list[NestedKey]:
        raise NotImplementedError(f"{type(self).__name__} needs _make_out_keys(): the entries that forward returns.")

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """The trained parameters by group; no parameter is in two groups.

        Returns:
            Group name ("policy", "critic", ...) to the parameters that the losses reach and that require a gradient.
        """
        raise NotImplementedError(f"{type(self).__name__} needs parameter_groups(): the parameters that it trains.")

    def reset_parameters_recursive(self) -> None:
        """Resets the layers of the functional networks, as TorchRL does; a loss without such networks warns.

        Only layers of torch are reset, with torch's own initialization. A network of this library begins otherwise: to
        start anew, build the networks and the loss again.
        """
        if not any(isinstance(value, nn.Module) for value in vars(self).values()):
            warnings.warn(
                f"{type(self).__name__} holds no functional network, so reset_parameters_recursive() resets nothing. "
                "Build the networks and the loss again.",
                stacklevel=2,
            )
        super().reset_parameters_recursive()  # type: ignore[misc]

    @staticmethod
    def _trained(*modules: nn.Module) -> list[nn.Parameter]:
        """The parameters of the modules that require a gradient."""
        return [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]

    def _parameters_of(self, network: str) -> nn.Module:
        """The holder of the parameters of ``self.<network>``: in a functional loss ``<network>_params``."""
        parameters: nn.Module | None = getattr(self, f"{network}_params", None)
        module: nn.Module = getattr(self, network)
        return module if parameters is None else parameters

    def _with_parameters(self, network: str) -> contextlib.AbstractContextManager[Any]:
        """A context in which ``self.<network>`` holds its parameters.

        In a loss that is not functional they are in the network anyway.
        """
        module, parameters = getattr(self, network), self._parameters_of(network)
        if parameters is module:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = parameters.to_module(module)  # type: ignore[operator]
        return context
