"""A run: what every training script needs around its networks, its loss and its update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.envs import EnvBase, TransformedEnv

from edenrl import distributed
from edenrl.config import RunConfig
from edenrl.envs import action_box, process_seed
from edenrl.optim import GradientStep
from edenrl.training.environment import build_env, collector_options, evaluate_run, is_new, training_env
from edenrl.training.exporting import export_run, require_export
from edenrl.training.folder import RunFolder, run_directory
from edenrl.training.initial_weights import InitialWeights
from edenrl.training.metrics import IterationMetrics
from edenrl.training.optimization import Trained, build_gradient_step
from edenrl.training.progress import print_line
from edenrl.training.reports import run_banner, run_summary, run_table, starting_point
from edenrl.training.run_evaluations import RunEvaluations
from edenrl.training.startup import check_components, setup
from edenrl.training.stopping import StopRequest, shut_down

__all__ = ["Run"]


class Run:
    """The frame of a training script. The script builds networks and a loss and writes the update; a run does the rest.

    Entering the run sets seeds, threads and the device. The script then builds its parts: ``env`` gives the
    environment, ``keep`` names what a checkpoint must hold, ``gradient_step`` adds an optimizer with its schedule.
    The first iteration creates the run directory or, with ``cfg.resume``, restores a checkpoint: wrong input
    that the parts refuse leaves no directory behind. After each iteration the run writes metrics and progress. Ten
    times a run, by default, it saves a checkpoint and evaluates the policy; less often where evaluations would take
    more than about a tenth of the time.

    The first Ctrl-C (or SIGTERM) ends the iteration, saves, and leaves with exit status 130. The second ends at once. A
    run that is killed at any moment resumes from the checkpoint before.

    Processes that train together (``torchrun``) start with the first one's parameters and stop at the same iteration.
    Each resumes in its own state. Metrics are averaged over them; only the first evaluates, prints and writes.

    Args:
        cfg: the configuration.
        algorithm: the name that checkpoints are stamped with. Default ``cfg.algorithm_name``.
        iterations: iterations of the whole run. Default: as many as ``cfg.total_frames`` asks for.
        frames_per_iteration: environment steps per iteration, all environments of this process together. Default
            ``cfg.frames_per_rollout``.
        evaluate: returns evaluation metrics; ``cfg.evaluation.metric`` decides which checkpoint is the best. Default:
            the component "policy" plays episodes of the environment, if ``env`` was asked for.

    Attributes:
        device: the device of networks and environments.
        seed: the seed of this process.
        dir: the run directory, once the run has begun.
        leads: whether this process is the one that writes, prints and evaluates.
        iteration: iterations that are done.
        evaluations: what is evaluated, and when.
        initial: the weights of another run that this one starts from; None without ``cfg.init_from``, and on resume.

    Raises:
        ValueError: for a device that cannot be used, or what ``cfg.resume`` cannot change.
        FileExistsError: when the run directory already holds a run.
        BlockingIOError: when another process trains in the run directory.

    Examples:
        ``examples/train_ppo.py`` is one. Without an environment, a loop of one's own:

        >>> import tempfile, torch
        >>> cfg = RunConfig(run_dir=tempfile.mkdtemp(), quiet=True)
        >>> with Run(cfg, "Parabola", iterations=3, frames_per_iteration=1) as run:
        ...     net = run.keep(net=nn.Linear(1, 1))
        ...     optimizer = run.keep(optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
        ...     for iteration in run:
        ...         optimizer.zero_grad()
        ...         loss = net(torch.ones(1)).square().sum()
        ...         loss.backward()
        ...         optimizer.step()
        ...         run.record({"loss": loss})
    """

    def __init__(
        self,
        cfg: RunConfig,
        algorithm: str | None = None,
        *,
        iterations: int | None = None,
        frames_per_iteration: int | None = None,
        evaluate: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        self.cfg: Any = cfg  # a script's configuration has an ``algorithm``, which RunConfig does not declare
        self.algorithm = cfg.algorithm_name if algorithm is None else algorithm
        self.evaluations = RunEvaluations(cfg, evaluate)
        self._asked = iterations, frames_per_iteration
        self.unit, self.iteration, self.elapsed = "frames", 0, 0.0
        self._env: EnvBase | None = None
        self._components: dict[str, Any] = {}
        self._restarts: list[Callable[[int], None]] = []
        self._batches: dict[int, Iterator[TensorDictBase]] = {}
        self._metrics = IterationMetrics()
        self.exported: Mapping[str, Path] = {}
        self._begun = self._ending = False

    def __enter__(self) -> Run:
        cfg = self.cfg
        self._began = time.monotonic()
        if cfg.export:
            require_export()
        self.device = setup(cfg)
        self.initial = InitialWeights.of(cfg) if self.is_new else None
        self.seed = process_seed(cfg.seed, distributed.rank())
        self.leads = distributed.rank() == 0
        iterations, frames = self._asked
        processes = distributed.world_size()
        self.iterations = cfg.num_iterations(processes) if iterations is None else iterations
        self.frames_per_iteration = (cfg.frames_per_rollout if frames is None else frames) * processes
        cfg.warn(self.device.type, self.iterations)
        self.interval = cfg.checkpoint.interval_iterations or max(self.iterations // 10, 1)
        self.evaluations.interval = cfg.evaluation.interval_iterations or self.interval
        return self

    def env(self) -> EnvBase:
        """The environment of ``cfg.env`` as its simulator made it: networks are built from its exact specs."""
        self._env = env = build_env(self.cfg, self.device)
        self.evaluations.play(env, self.frames_per_iteration, self._evaluate_policy)
        return env

    def training_env(self, env: EnvBase) -> TransformedEnv:
        """The environment as a learner sees it: actions within bounds, scaled rewards, episode statistics.

        Where ``cfg.env.random_start`` allows it, a new run begins at random steps of the time limits.
        """
        wrapped = training_env(self.cfg, env, self.seed)
        self._metrics.box = action_box(wrapped)
        return wrapped

    def collector_options(self, steps: int | None = None) -> dict[str, Any]:
        """Options of ``edenrl.collectors.make_collector`` for the workers of ``cfg``.

        Args:
            steps: steps of each environment per batch. Default: ``cfg.algorithm.steps_per_env``, a whole rollout.
        """
        frames = self.cfg.frames_per_rollout if steps is None else self.cfg.env.num_envs * steps
        return {"frames_per_batch": frames, **collector_options(self.cfg)}

    def keep(self, **components: Any) -> Any:
        """Names the parts that must continue on resume, and moves networks to the run's device.

        Random states, counters and what ``gradient_step`` makes are kept by themselves. With ``cfg.init_from`` networks
        get the other run's weights here, so that all that is built from them afterwards has them, too.

        Args:
            components: networks, optimizers, collectors, buffers: anything with ``state_dict`` and
                ``load_state_dict``. The one called "policy" is evaluated and exported.

        Returns:
            The components in the given order; a single one by itself.
        """
        if self._begun:
            raise RuntimeError(f"keep({', '.join(components)}) comes too late: name components before the first step.")
        if taken := components.keys() & self._components.keys():
            raise ValueError(f"The run already keeps {sorted(taken)}; give the new ones other names.")
        for name, component in components.items():
            if isinstance(component, nn.Module):
                component.to(self.device)
                if self.initial is not None:
                    self.initial.give(name, component)
        self._components.update(components)
        kept = tuple(components.values())
        return kept[0] if len(kept) == 1 else kept

    def gradient_step(
        self,
        loss: nn.Module,
        trained: Mapping[str, Trained] | None = None,
        *,
        name: str = "step",
        **options: Any,
    ) -> GradientStep:
        """A ``GradientStep`` with the optimizer, schedule and clipping of ``cfg.algorithm``, kept in checkpoints.

        With ``--resume_schedule restart`` the schedule starts anew over the updates that are left, and an optimizer
        without a schedule returns to the rate it was built with.

        Args:
            loss: the LossModule.
            trained: by the name that its optimizer has in a checkpoint: an optimizer, or parameters that get one as
                ``cfg.algorithm`` says. Default: all of ``loss.parameter_groups()`` in one, "optimizer".
            name: the step's name in a checkpoint.
            options: ``lr``, learning rates by name of optimizers that do not begin with ``cfg.algorithm.lr``;
                ``schedule``, whether the first optimizer follows ``cfg.algorithm.lr_schedule`` (default True);
                ``updates``, which the schedule spans in the whole run (default: those of ``cfg.algorithm``);
                ``every``, for a step that is taken at one of so many of them; and options of ``GradientStep`` that
                differ from ``cfg.algorithm``'s.
        """
        step, restart = build_gradient_step(self.cfg.algorithm, loss, trained, iterations=self.iterations, **options)
        self._restarts.append(restart)
        self._metrics.steps.append(step)
        self.keep(**step.optimizers, **{name: step})
        return step

    def add_evaluation(self, measure: Callable[[], dict[str, float]], *names: str) -> None:
        """Adds metrics of one's own to those of each evaluation.

        Args:
            measure: returns them by name.
            names: the names, for ``cfg.evaluation.metric`` to be checked before the run begins; without them it is
                checked at the first evaluation.
        """
        self.evaluations.add(measure, *names)

    def count_updates(self) -> None:
        """Gives the budget in updates and not in frames, for environments that schedule their rollouts themselves."""
        self.unit, self.frames_per_iteration = "updates", 1

    @property
    def components(self) -> Mapping[str, Any]:
        """What ``keep`` and ``gradient_step`` have named so far."""
        return dict(self._components)

    @property
    def is_new(self) -> bool:
        """Whether the run starts from the beginning: there is no checkpoint to continue from."""
        return is_new(self.cfg)

    @property
    def remaining(self) -> int:
        """Iterations still to do."""
        return max(self.iterations - self.iteration, 0)

    def begin(self) -> None:
        """Creates the run directory, or restores a checkpoint; the first iteration does it where nobody has.

        Call it to look at restored parts, or to write into the run directory, before the first iteration.
        """
        if self._begun:
            return
        cfg = self.cfg
        check_components(cfg, self._components, evaluates_policy=self.evaluations.plays)
        self.evaluations.refuse_unknown_metric()
        if self.initial is not None:
            self.initial.require_some()
        self.dir = run_directory(cfg, self.algorithm)
        size = self.iterations, self.frames_per_iteration
        self.folder = RunFolder(cfg, self.algorithm, self.dir, self._components, {"run": self}, size, self._env)
        self.folder.acquire()
        try:
            resumed = self.folder.restore()
            self._began = time.monotonic()
            distributed.broadcast_modules([c for c in self._components.values() if isinstance(c, nn.Module)])
            self.folder.open_outputs(self.iteration, self.unit)
            self.folder.say(run_banner(self))
            for line in starting_point(self, resumed):
                self.folder.say(line)
            self._stop = StopRequest(self.folder.say)
            self._stop.catch_signals()
            if cfg.resume and cfg.resume_schedule == "restart":
                for restart in self._restarts:
                    restart(self.remaining)
        except BaseException as error:
            self.folder.close("failed", error, self.iteration)
            raise
        self._begun = True

    def __iter__(self) -> Iterator[int]:
        self.begin()
        while self.iteration < self.iterations and not self._ending:
            self._metrics.clear()
            yield self.iteration
            self._finish_iteration()

    def rollouts(self, collector: Iterable[TensorDictBase]) -> Iterator[TensorDictBase]:
        """One rollout per iteration, until the run is complete.

        Args:
            collector: yields rollouts for ever, ``[N, T]`` each. What it must be restored to is kept with ``keep``.
        """
        for _ in self:
            yield self.collect(collector)

    def collect(self, collector: Iterable[TensorDictBase]) -> TensorDictBase:
        """The next rollout of a collector; its episodes and actions enter the metrics of this iteration."""
        if id(collector) not in self._batches:
            self._batches[id(collector)] = iter(collector)
        rollout = next(self._batches[id(collector)])
        self.watch(rollout)
        return rollout

    def watch(self, rollout: TensorDictBase) -> None:
        """Adds the episodes and actions of a rollout to the metrics of this iteration; ``collect`` does it itself."""
        self._metrics.watch(rollout)

    def record(self, *metrics: Mapping[str, Tensor] | TensorDictBase, **named: Tensor) -> None:
        """Adds the metrics of one update. The row of the iteration gets the mean of each name over the updates."""
        self._metrics.record(*metrics, named)

    def mean(self, name: str) -> float:
        """Mean of a recorded metric over the updates of this iteration so far, on the host; NaN without any."""
        return self._metrics.mean(name)

    def log(self, *metrics: Mapping[str, Tensor | float]) -> None:
        """Adds scalars to the row of this iteration as they are. Tensors move to the host when it ends, all at once."""
        self._metrics.log(*metrics)

    def state_dict(self) -> dict[str, Any]:
        """Counters (the checkpoint's "run" component)."""
        return {"iteration": self.iteration, "elapsed": self.seconds, **self.evaluations.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the counters."""
        self.iteration, self.elapsed = state["iteration"], state["elapsed"]
        self.evaluations.load_state_dict(state)

    def _finish_iteration(self) -> None:
        row = self._metrics.row()
        self.iteration += 1
        last = self.iteration == self.iterations
        evaluated = self.evaluations.is_due(self.iteration, last)
        due = last or evaluated or self.iteration % self.interval == 0
        if evaluated and self.leads:
            try:
                row |= {f"eval/{name}": value for name, value in self.evaluations.run().items()}
            except Exception:
                self._write(row)  # the iteration itself is done
                raise
        self._stop.check_launcher()
        # One exchange for the metrics and for the decision to stop, which all processes must take together.
        everyone = distributed.exchange((row, self._stop.reason))
        self._ending = any(reason is not None for _, reason in everyone)
        row = distributed.average_rows([row for row, _ in everyone])
        self.evaluations.observe(self.iteration, row)
        # The row is written before the checkpoint: a crash between the two is mended by dropping rows on resume.
        self._write(row)
        if due or self._ending:
            self.folder.save(self.iteration, self.evaluations.latest if evaluated else None)
        self.folder.show(self.iteration, row)

    def _write(self, row: Mapping[str, float]) -> None:
        self.folder.write(self.iteration, {"seconds": round(self.seconds, 2), **row})

    def _evaluate_policy(self) -> dict[str, float]:
        return evaluate_run(self.cfg, self._components["policy"], self.device)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._begun:
            if isinstance(error, Exception):
                self.folder.rescue(error, self.iteration)
            self._close(error)
        shut_down(self._components, error)
        if not self._begun or error is not None:
            return
        if self.leads and not self.cfg.quiet:
            print_line(self.summary())
        # torchrun ends the others as soon as one has left with an error status: let the first one finish.
        distributed.exchange(None)
        if self._ending and self.remaining:
            raise SystemExit(130)

    def _close(self, error: BaseException | None) -> None:
        # The end has been asked for; what torchrun passes on late must not disturb it.
        self._stop.release_signals(ignore=distributed.world_size() > 1 and self._ending)
        complete = error is None and not self.remaining
        try:
            if complete and self.cfg.export and self.leads:
                self.exported = export_run(self.cfg, self._components["policy"], self.dir)
        except Exception as failure:
            error = failure
            raise
        finally:
            state = "complete" if complete and error is None else "interrupted"
            self.folder.close(state if error is None else "failed", error, self.iteration)

    @property
    def seconds(self) -> float:
        """Wall time of the run over all resumptions."""
        return self.elapsed + time.monotonic() - self._began

    def summary(self) -> str:
        """The table a run ends with."""
        return "\n" + run_table(self)

    def summary_dict(self) -> dict[str, Any]:
        """What that table says, for a program to read; ``json.dumps`` takes it.

        ``done`` and ``total`` count in ``unit``, ``rate`` is per second of this process, and ``evaluation`` holds the
        metrics of the latest evaluation. ``best_checkpoint`` is None before the first one.
        """
        return run_summary(self)
