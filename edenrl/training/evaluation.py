"""Evaluation of a policy over a fixed number of whole episodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.checkpoint import GlobalRNGState
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from edenrl.envs.recorded_metrics import recorded_metrics
from edenrl.envs.self_resetting import SelfResettingEnv

__all__ = ["EvaluationBudget", "announced_metrics", "evaluate", "may_report_more"]


# Environments stepped together; more do not make an evaluation faster on a CPU.
_ROWS = 128
# Steps of training for each step of an evaluation. With the updates between them, about a tenth of the time goes into
# evaluations at most.
_TRAINING_STEPS = 5


class EvaluationBudget:
    """Keeps the evaluations of a run to about a tenth of its time, without looking at a clock.

    An evaluation is affordable once training has made five times its steps since the last one. Both kinds of steps
    count: those of single environments, which take the time of a simulator that steps one after another, and those of
    the whole batch, which take the time of one that steps all at once. Episodes are taken to be as long as in the last
    evaluation; before the first, as long as those that ended in training last. While none has ended in training, an
    evaluation would take longer than the training so far.

    The decision follows from the run's own numbers alone. Equal seeds evaluate at the same iterations, and a resumed
    run goes on as it would have.

    Args:
        num_episodes: episodes of an evaluation.
        frames: environment steps of an iteration of training, all environments together.
        num_envs: environments of training.

    Examples:
        >>> budget = EvaluationBudget(num_episodes=10, frames=800, num_envs=8)
        >>> budget.observe(1, {"episode/length": 100.0})
        >>> budget.affords(6), budget.affords(7)  # 5 * 10 * 100 steps are 6.25 iterations
        (False, True)
        >>> budget.observe(7, {"eval/length_mean": 200.0})
        >>> budget.affords(19), budget.affords(20)
        (False, True)
    """

    def __init__(self, num_episodes: int, frames: int, num_envs: int) -> None:
        per_row = math.ceil(num_episodes / min(num_episodes, _ROWS))
        shares = num_episodes / frames, per_row * num_envs / frames
        self._iterations_per_step = _TRAINING_STEPS * max(shares)
        self._last = 0
        self._in_training = math.inf
        self._in_evaluation: float | None = None

    def affords(self, iteration: int) -> bool:
        """Whether an evaluation after so many iterations keeps within the budget."""
        length = self._in_training if self._in_evaluation is None else self._in_evaluation
        return iteration - self._last >= self._iterations_per_step * length

    def observe(self, iteration: int, row: Mapping[str, float]) -> None:
        """Learns the length of episodes from the metrics of an iteration."""
        # A loop that does not watch its episodes says nothing of their length: its first evaluation is free.
        length = row.get("episode/length", 0.0)
        if not math.isnan(length):
            self._in_training = length
        if "eval/length_mean" in row:
            self._in_evaluation, self._last = row["eval/length_mean"], iteration

    def state_dict(self) -> dict[str, Any]:
        """What is known so far."""
        return {"last": self._last, "in_training": self._in_training, "in_evaluation": self._in_evaluation}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what was known."""
        self._last, self._in_training = state["last"], state["in_training"]
        self._in_evaluation = state["in_evaluation"]


Policy = Callable[[TensorDictBase], TensorDictBase]
OnStep = Callable[[TensorDictBase], Mapping[str, Any] | None]


def evaluate(
    policy: Policy,
    make_env: Callable[[int], EnvBase],
    num_episodes: int = 20,
    *,
    max_steps: int = 100_000,
    on_step: OnStep | None = None,
) -> dict[str, float]:
    """Plays the deterministic policy for exactly ``num_episodes`` finished episodes.

    Every environment of the batch contributes a quota fixed beforehand, so that short episodes are not favoured. The
    environment is built for the purpose and closed; global random states, the policy's mode and its running statistics
    are as before afterwards.

    Args:
        policy: a TensorDict policy; stochastic ones act with their deterministic exploration type. A recurrent one
            needs an environment with its primer and ``InitTracker``.
        make_env: builds an environment of the given number of rows, e.g.
            ``lambda n: make_env("PointMass", n, seed=0)``.
        num_episodes: how many episodes count.
        max_steps: bound on the steps of the whole evaluation.
        on_step: called after every step, before ended rows are reset, with the step of all environments ``[rows]`` on
            their device: what the policy read and wrote, and under "next" the true outcome, last observations included.
            The TensorDict is locked and must not be changed; clone what you keep. For metrics of your own it returns
            numbers by name, one per row (``[rows]`` or ``[rows, 1]``), and the same names in every step: each is
            averaged over the steps of an episode. For a recording it returns None. Rows that have played their quota
            step on until all have; their further episodes reach ``on_step``, but no metric. Its errors end the
            evaluation as they are.

    Returns:
        ``return_mean``, ``return_std``, ``return_median``, ``return_min``, ``return_max``, ``length_mean``,
        ``length_min``, ``length_max``, ``episodes``; and for every ``("next", "metrics", name)`` with one number per
        row the mean at the episodes' ends as ``name``, with ``success`` reported as ``success_rate``; and the metrics
        of ``on_step``, as means over the episodes.

    Raises:
        RuntimeError: if the episodes have not ended after ``max_steps``.
        TypeError: if ``on_step`` returns neither None nor a dictionary.
        ValueError: if ``on_step`` returns other names than before, a name that is measured already, or not one number
            per row.

    Examples:
        >>> from edenrl.envs import make_env
        >>> from edenrl.modules import gaussian_actor
        >>> actor = gaussian_actor({"observation": 14}, 2)
        >>> result = evaluate(actor, lambda n: make_env("PointMass", n, seed=0), num_episodes=8)
        >>> result["episodes"], result["length_max"] <= 100
        (8.0, True)

        A metric of one's own, and a recording of the first row:

        >>> path = []
        >>> def effort(step):
        ...     path.append(step["next", "observation"][0].clone())
        ...     return {"effort": step["action"].square().mean(-1)}
        >>> result = evaluate(actor, lambda n: make_env("PointMass", n, seed=0), num_episodes=8, on_step=effort)
        >>> 0 < result["effort"] < 1, len(path) >= result["length_mean"]
        (True, True)
    """
    if num_episodes < 1:
        raise ValueError(f"evaluate needs num_episodes >= 1, got {num_episodes}.")
    rng = GlobalRNGState()
    saved_rng = rng.state_dict()
    # Module by module: a part that was frozen with eval() must not wake up.
    modes = {part: part.training for part in policy.modules()} if isinstance(policy, nn.Module) else {}
    env = None
    try:
        env = make_env(min(num_episodes, _ROWS))
        for part in modes:
            part.training = False
        with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
            with recorded_metrics(env) as unannounced:
                finished = _play(policy, env, num_episodes, max_steps, unannounced, on_step)
    finally:
        for part, mode in modes.items():
            part.training = mode
        if env is not None:
            env.close(raise_if_closed=False)
        rng.load_state_dict(saved_rng)
    return _summarize(finished)


def announced_metrics(env: EnvBase | None = None) -> list[str]:
    """Names of what ``evaluate`` returns for an environment, as far as its specs tell.

    Args:
        env: the environment as its simulator made it; None: what every evaluation returns.

    Examples:
        >>> from edenrl.envs import make_env
        >>> announced_metrics(make_env("PointMass", 1))[-4:]
        ['success_rate', 'final_distance', 'path_length', 'collisions']
    """
    names = [*_summarize({"return": torch.zeros(1), "length": torch.zeros(1)})]
    if env is None:
        return names
    spec = env.observation_spec
    if "metrics" in spec.keys():
        names += [_reported(name) for name in spec["metrics"].keys()]
    if "reward_groups" in spec.keys():  # wrap_env sums each of them over the episode
        names += [f"{name}_return" for name in spec["reward_groups"].keys()]
    return names


def may_report_more(env: EnvBase) -> bool:
    """Whether the simulator may report metrics that it has not announced in the specs."""
    return isinstance(env, SelfResettingEnv)


def _reported(name: str) -> str:
    name = name.removeprefix("metrics/")
    return "success_rate" if name == "success" else name


class _StepMeans:
    """What a caller measures in every step, as means over the steps of the running episodes."""

    def __init__(self, on_step: OnStep, rows: int) -> None:
        self._on_step, self._rows = on_step, rows
        self._sums: dict[str, torch.Tensor] | None = None

    def add(self, step: TensorDictBase, length: torch.Tensor, taken: set[str]) -> dict[str, torch.Tensor]:
        """Measures one step; returns the means so far, ``[rows]``, of episodes of that length."""
        # Locked, so that a hook that adds to the step or takes from it is told so.
        given = self._on_step(step.copy().lock_())
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(
                f"on_step returned a {type(given).__name__}; expected None or a dictionary of numbers, one per row."
            )
        measured = {str(name): self._numbers(name, value, length) for name, value in (given or {}).items()}
        if both := sorted(name for name in measured if name in taken or _reported(name) in taken):
            raise ValueError(f"on_step measures {both}, which evaluations report already. Choose other names.")
        if self._sums is None:
            self._sums = {name: torch.zeros_like(length) for name in measured}
        if measured.keys() != self._sums.keys():
            raise ValueError(
                f"on_step returned {sorted(measured)} and, in the first step, {sorted(self._sums)}; expected the same "
                "names in every step."
            )
        began = length == 1
        self._sums = {name: total.where(~began, 0.0) + measured[name] for name, total in self._sums.items()}
        return {name: total / length for name, total in self._sums.items()}

    def _numbers(self, name: str, value: Any, like: torch.Tensor) -> torch.Tensor:
        numbers = torch.as_tensor(value).detach().to(like)
        if numbers.shape not in ((self._rows,), (self._rows, 1)):
            raise ValueError(
                f"on_step measures {name!r} with the shape {tuple(numbers.shape)}; expected one number per row, "
                f"[{self._rows}] or [{self._rows}, 1]."
            )
        return numbers.reshape(self._rows)


def _play(
    policy: Policy,
    env: EnvBase,
    num_episodes: int,
    max_steps: int,
    unannounced: list[dict[str, torch.Tensor]],
    on_step: OnStep | None,
) -> dict[str, torch.Tensor]:
    """Steps until every row finished its quota of episodes; returns the values at the end of each."""
    td = env.reset()
    rows = env.batch_size.numel()
    # Fixed before anything is played; the remainder goes to the first rows.
    quota = num_episodes // rows + (torch.arange(rows, device=td.device) < num_episodes % rows)
    total = torch.zeros(rows, dtype=torch.float64, device=td.device)
    length = torch.zeros_like(total)
    count = torch.zeros(rows, dtype=torch.long, device=td.device)
    ended: dict[str, list[torch.Tensor]] = {"return": [], "length": []}
    own = None if on_step is None else _StepMeans(on_step, rows)
    usual = {*ended, *announced_metrics()}
    for _ in range(max_steps):
        stepped, td = env.step_and_maybe_reset(policy(td))
        result = stepped["next"]
        metrics = dict(result["metrics"].items()) if "metrics" in result.keys() else {}
        if unannounced:
            metrics |= unannounced.pop()
        total += result["reward"].reshape(rows)
        length += 1
        if own is not None:
            metrics |= own.add(stepped, length, {*usual, *map(_reported, metrics)})
        done = result["done"].reshape(rows)
        if not bool(done.any()):
            continue
        counted = done & (count < quota)
        ended["return"].append(total[counted])
        ended["length"].append(length[counted])
        for name, value in metrics.items():
            ended.setdefault(name, []).append(value.reshape(rows)[counted].double())
        count += done
        total[done], length[done] = 0.0, 0.0
        if bool((count >= quota).all()):
            return {name: torch.cat(values) for name, values in ended.items()}
    raise RuntimeError(
        f"Only {int(torch.minimum(count, quota).sum())} of {num_episodes} evaluation episodes ended within {max_steps} "
        "steps. Give the environment a time limit (for example TorchRL's StepCounter(max_steps=...))."
    )


def _summarize(finished: dict[str, torch.Tensor]) -> dict[str, float]:
    returns, lengths = finished.pop("return"), finished.pop("length")
    summary = {
        "return_mean": returns.mean(),
        "return_std": returns.std(correction=0),
        "return_median": returns.quantile(0.5),
        "return_min": returns.min(),
        "return_max": returns.max(),
        "length_mean": lengths.mean(),
        "length_min": lengths.min(),
        "length_max": lengths.max(),
        "episodes": torch.tensor(float(len(returns))),
    }
    for key, values in finished.items():
        summary[_reported(key)] = values.mean()
    return {name: float(value) for name, value in summary.items()}
