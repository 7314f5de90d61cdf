"""Configuration of RMA."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from edenrl.config.base import Count, Groups, NonNegative, Positive, refuse
from edenrl.config.ppo import PPOSettings

_log = logging.getLogger("edenrl")

_NAMES = ("prop", "scan", "priv_explicit", "priv_latent", "history")


def _robot() -> dict[str, int]:
    return {"prop": 53, "scan": 132, "priv_explicit": 9, "priv_latent": 29, "history": 530}


class RMAConfig(PPOSettings):
    """RMA: PPO trains a privileged teacher, DAgger trains a history encoder, regression trains an estimator.

    Defaults follow Cheng et al. 2023, "Extreme Parkour with Legged Robots", arXiv:2309.14341.
    """

    name: Literal["rma"] = "rma"
    """Name of the algorithm. It selects the trainer script that rebuilds a run from its config.json."""
    lr: Positive = 2e-4
    """Learning rate of actor and critic at the start, and of the history encoder for the whole run."""
    estimator_lr: Positive = 1e-4
    """Learning rate of the estimator."""
    normalize_observations: bool = False
    """Normalize the critic's observations by their running mean and variance. The actor's are never normalized."""
    actor_groups: Groups = None
    """Groups of prop, scan (optional), priv_explicit, priv_latent, history; or one group of all. None: these names."""
    widths: dict[str, Count] = Field(default_factory=_robot)
    """Widths of the parts, if actor_groups is one group that holds all of them."""
    critic_groups: Groups = None
    """Observation groups that the critic reads, in this order. None: the actor's groups without the history."""
    train_with_estimated_states: bool = True
    """Collect with the estimator's prediction instead of the true priv_explicit."""
    dagger_update_freq: Count = 20
    """Interval, in iterations, at which the history latent collects and the history encoder is trained."""
    priv_reg_start: NonNegative = 0.0
    """Weight of the distance between the two latents, up to update priv_reg_begin."""
    priv_reg_end: NonNegative = 0.1
    """Weight of the distance between the two latents at the end of the ramp."""
    priv_reg_begin: Annotated[int, Field(ge=0)] = 2000
    """Updates before the weight begins to change. PPO or DAgger on one rollout counts as one update."""
    priv_reg_length: Count = 3000
    """Updates over which the weight changes from priv_reg_start to priv_reg_end."""
    actor_hidden: tuple[Count, ...] = (512, 256, 128)
    """Widths of the backbone's hidden layers, such as 512,256,128."""
    scan_hidden: tuple[Count, ...] = Field((128, 64, 32), min_length=1)
    """Widths of the scan encoder. The last one is the width of its latent."""
    priv_hidden: tuple[Count, ...] = Field((64, 20), min_length=1)
    """Widths of the privileged encoder. The last one is the width of the privileged and the history latent."""
    estimator_hidden: tuple[Count, ...] = (128, 64)
    """Widths of the estimator's hidden layers."""
    critic_hidden: tuple[Count, ...] = (512, 256, 128)
    """Widths of the critic's hidden layers."""
    activation: Literal["elu", "relu", "tanh", "silu"] = "elu"
    """Activation of the critic."""
    actor_activation: Literal["elu", "relu", "tanh", "silu"] = "elu"
    """Activation of the actor: its encoders, estimator and backbone. The scan encoder always ends in a tanh."""
    tanh: bool = False
    """Bound the action mean with a tanh."""
    symmetry: Literal["none", "augment", "loss"] = "none"
    """Use of the environment's mirrors. augment: add mirrored rollouts. loss: penalize asymmetric actions."""
    symmetry_coeff: NonNegative = 1.0
    """Weight of the penalty on asymmetric actions, with symmetry loss."""
    optimizer: Literal["adam", "adamw", "sgd", "rmsprop"] = "adam"
    """Optimizer of all networks."""

    def layout(self, published: Mapping[str, int]) -> tuple[dict[str, int], dict[str, str] | str]:
        """Widths of the actor's parts, and the group of each part or the one group that holds all parts.

        Args:
            published: the environment's groups and their widths.

        Raises:
            ValueError: for a group that the environment lacks, or that has another width. The message shows the layout.

        Examples:
            >>> published = {"prop": 6, "priv_explicit": 3, "priv_latent": 5, "prop_history": 60}
            >>> RMAConfig().layout(published)[0]
            {'prop': 6, 'priv_explicit': 3, 'priv_latent': 5, 'history': 60}
        """
        if self.actor_groups is not None and len(self.actor_groups) == 1:
            group, widths = self.actor_groups[0], {name: self.widths[name] for name in _NAMES if name in self.widths}
            text = " | ".join(f"{name} {width}" for name, width in widths.items())
            if published.get(group) != sum(widths.values()):
                raise ValueError(
                    f"algorithm.actor_groups is the one group {group!r}, expected to be {sum(widths.values())} wide, "
                    f"laid out as {text}; groups of this environment: {dict(published)}. Set algorithm.widths to the "
                    "environment's layout, or name the groups of the parts."
                )
            return widths, group
        if self.actor_groups is None:
            names = [name for name in _NAMES if name != "scan" or "scan" in published]
            groups = [*names[:-1], "prop_history"]
        else:
            groups = list(self.actor_groups)
            names = [name for name in _NAMES if name != "scan" or len(groups) == len(_NAMES)]
        if missing := [group for group in groups if group not in published]:
            raise ValueError(
                f"RMA reads {dict(zip(names, groups, strict=True))}, of which this environment lacks {missing}; its "
                f"groups are {dict(published)}. Publish them (the quadruped: env.kwargs.groups), or name others in "
                "algorithm.actor_groups."
            )
        keys = dict(zip(names, groups, strict=True))
        return {name: published[group] for name, group in keys.items()}, keys

    @staticmethod
    def num_actions(spec: Any, action_mode: str) -> int:
        """Width of an environment's unbatched action spec.

        Raises:
            ValueError: if an unsquashed Gaussian cannot give such actions.
        """
        if action_mode == "squash" or len(spec.shape) != 1 or not spec.dtype.is_floating_point:
            raise ValueError(
                f"RMA's actor is an unsquashed Gaussian; got env.action_mode {action_mode!r} and actions of shape "
                f"{tuple(spec.shape)}, {spec.dtype}. Use continuous actions that are clipped; --algorithm.tanh True "
                "bounds their mean."
            )
        return int(spec.shape[0])

    def network_options(self) -> dict[str, Any]:
        """Options of ``edenrl.modules.RMAActor``."""
        encoders = self.pick("scan_hidden", "priv_hidden", "estimator_hidden")
        actor = {"hidden": self.actor_hidden, "activation": self.actor_activation}
        return {**actor, **encoders, **self.pick("tanh", "init_std")}

    def acting_options(self) -> dict[str, Any]:
        """Options of ``edenrl.modules.rma_policy`` for the policy that collects."""
        return {"latent": "switched", "estimated": self.train_with_estimated_states}

    def warn(self, device: str, iterations: int) -> None:
        """Warns if the run ends before the history encoder, a part of the deployed policy, is trained once."""
        if iterations < self.dagger_update_freq:
            _log.warning(
                "This run has %d iterations and the history encoder is trained once in %d: the policy that is "
                "evaluated and exported keeps a random one. Set algorithm.dagger_update_freq to at most %d, or train "
                "longer.",
                iterations,
                self.dagger_update_freq,
                iterations,
            )

    def ramp_options(self) -> dict[str, Any]:
        """Options of ``edenrl.objectives.LinearRamp``."""
        names = ("start", "end", "begin", "length")
        return {name: getattr(self, f"priv_reg_{name}") for name in names}

    @model_validator(mode="after")
    def _check_groups(self) -> RMAConfig:
        if self.actor_groups is not None and len(self.actor_groups) not in (1, 4, 5):
            raise refuse(
                f"actor_groups names {len(self.actor_groups)} groups {list(self.actor_groups)}; expected those of "
                f"{', '.join(_NAMES)}, in this order (scan may be left out), or the one that holds all of them"
            )
        names = self.actor_groups or ()
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise refuse(f"actor_groups names {repeated} more than once; each part is a group of its own")
        if unknown := set(self.widths) - set(_NAMES):
            raise refuse(f"widths names {sorted(unknown)}; expected {', '.join(_NAMES)}")
        return self
