"""What a run evaluates, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchrl.envs import EnvBase

from edenrl import distributed
from edenrl.config import RunConfig
from edenrl.config.base import closest
from edenrl.training.evaluation import EvaluationBudget, announced_metrics, may_report_more

__all__ = ["RunEvaluations"]

Measure = Callable[[], dict[str, float]]


class RunEvaluations:
    """The evaluations of a run.

    Args:
        cfg: the configuration; it reads ``env`` and ``evaluation``.
        measure: returns the metrics of an evaluation. Default: nothing is evaluated until ``play`` is called.

    Attributes:
        interval: iterations between two evaluations at least, once the run has set it.
        budget: what bounds the time of evaluations, unless the configuration sets their interval or the caller measures
            something else.
        latest: the metrics of the latest evaluation.

    Examples:
        ``edenrl.training.Run`` uses one.
    """

    def __init__(self, cfg: RunConfig, measure: Measure | None) -> None:
        self.cfg, self.interval = cfg, 1
        self.budget: EvaluationBudget | None = None
        self.latest: dict[str, float] = {}
        self._measure, self._plays = measure, False
        self._env: EnvBase | None = None
        self._more: Measure | None = None
        self._names: tuple[str, ...] = ()

    @property
    def measures(self) -> bool:
        """Whether there is something to evaluate."""
        return self._measure is not None

    @property
    def plays(self) -> bool:
        """Whether the component "policy" plays episodes of the environment."""
        return self._plays

    def play(self, env: EnvBase, frames_per_iteration: int, measure: Measure) -> None:
        """Evaluates the policy in the environment, unless the caller measures something else.

        Args:
            env: the environment as its simulator made it.
            frames_per_iteration: environment steps of an iteration, all processes together.
            measure: plays the episodes.
        """
        self._env = env
        if self.measures:
            return
        self._measure, self._plays = measure, True
        if self.cfg.evaluation.interval_iterations is None:
            frames = frames_per_iteration // distributed.world_size()
            self.budget = EvaluationBudget(self.cfg.evaluation.num_episodes, frames, self.cfg.env.num_envs)

    def add(self, measure: Measure, *names: str) -> None:
        """Adds metrics, with their names if they are known."""
        self._more, self._names = measure, names

    def is_due(self, iteration: int, last: bool) -> bool:
        """Whether to evaluate after so many iterations."""
        if not self.measures or last:
            return self.measures
        return iteration % self.interval == 0 and (self.budget is None or self.budget.affords(iteration))

    def run(self) -> dict[str, float]:
        """Evaluates now."""
        assert self._measure is not None
        self.latest = self._measure()
        if self._more is not None:
            self.latest |= self._more()
        return self.latest

    def refuse_unknown_metric(self) -> None:
        """Refuses an ``evaluation.metric`` that no evaluation will measure, where that is known.

        Raises:
            ValueError: with the names that are measured, the closest first.
        """
        if self.metric_is_unknown and self._names_are_complete():
            metric = self.cfg.evaluation.metric
            names = ", ".join(name for _, name in closest(metric, self._announced()))
            raise ValueError(
                f"evaluation.metric is {metric!r}; an evaluation of {self.cfg.env.name} measures {names} (the closest "
                "name comes first)."
            )

    @property
    def metric_is_unknown(self) -> bool:
        """Whether ``evaluation.metric`` is none of the metrics that are known so far."""
        return self.measures and self.cfg.evaluation.metric not in self._announced()

    def _announced(self) -> list[str]:
        return [*announced_metrics(self._env), *self._names]

    def _names_are_complete(self) -> bool:
        """Whether the specs tell all that an evaluation will measure."""
        unnamed = self._more is not None and not self._names
        if not self._plays or unnamed or self._env is None:
            return False
        return not (may_report_more(self._env) or self.cfg.evaluation.kwargs)

    def observe(self, iteration: int, row: Mapping[str, float]) -> None:
        """Learns the length of episodes from the metrics of an iteration."""
        if self.budget is not None:
            self.budget.observe(iteration, row)

    def state_dict(self) -> dict[str, Any]:
        """What the next decisions depend on."""
        return {} if self.budget is None else {"evaluation": self.budget.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores ``state_dict``."""
        if self.budget is not None and "evaluation" in state:
            self.budget.load_state_dict(state["evaluation"])
