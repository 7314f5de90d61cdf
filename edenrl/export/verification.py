"""Comparing exported graphs with the policy they were made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import set_recurrent_mode

from edenrl.export.formats import FORMATS, Runner
from edenrl.export.graph import PolicyGraph
from edenrl.export.spec import Verification

__all__ = ["Recording", "VerificationError", "record", "verify"]

_STEPS, _TOLERANCE, _PROBES = 4, 1e-4, (1, 7)
_KEPT = "Nothing was written; an earlier export is as it was."


class VerificationError(ValueError):
    """An exported graph computes something else than the policy; nothing was written."""


@dataclass
class Recording:
    """What the policy did: a list entry per step, rows first."""

    template: TensorDictBase
    """A TensorDict the policy can read, of the environment's rows."""
    obs: list[Tensor] = field(default_factory=list)
    began: list[Tensor] = field(default_factory=list)
    """Rows whose episode began at that step, boolean."""
    actions: list[Tensor] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)
    """Next states, in the layout of the graph."""
    decided: list[Tensor] = field(default_factory=list)
    """Rows whose action does not depend on rounding, boolean: the best two choices are no tie."""

    def add(self, obs: Tensor, began: Tensor, actions: Tensor, states: list[Tensor], decided: Tensor) -> None:
        """Adds one step."""
        self.obs.append(obs)
        self.began.append(began)
        self.actions.append(actions)
        self.states.append(states)
        self.decided.append(decided)


def record(policy: TensorDictModuleBase, graph: PolicyGraph, env: EnvBase) -> Recording:
    """Plays the deterministic policy for a few control steps."""
    td = env.reset()
    for entry in graph.states:
        start = td.get(entry.key, None)
        if start is not None and bool(start.any()):
            raise ValueError(
                f"The environment starts the state {entry.key!r} with values other than zero (its TensorDictPrimer's "
                "default_value or random); an exported policy starts it with zeros. Train with a primer of zeros."
            )
    rows = env.batch_size.numel()
    began = torch.ones(rows, dtype=torch.bool)
    state = [entry.zeros(rows) for entry in graph.states]
    out = Recording(td)
    for _ in range(_STEPS):
        flat = td.exclude("next").to("cpu").reshape(rows).apply(_single)
        try:
            actions, next_state, decided = _act(policy, graph, flat, state, began)
        except (RuntimeError, ValueError) as error:
            shapes = {key: tuple(shape) for key, shape in graph.groups.items()}
            raise ValueError(
                f"The policy cannot read this environment, whose groups have the shapes {shapes}: {error}. Export with "
                "the environment the policy was trained in."
            ) from error
        if not bool(actions.isfinite().all()):
            raise ValueError("The policy gives actions that are not finite: its weights or observations hold NaN.")
        out.template = flat
        out.add(graph.flatten(flat), began, actions, next_state, decided)
        leaf = env.action_spec
        action = actions.reshape(leaf.shape).to(device=leaf.device, dtype=leaf.dtype)
        stepped, td = env.step_and_maybe_reset(td.set(env.action_key, action))
        began = stepped["next", "done"].reshape(rows, -1).any(-1).cpu()
        state = next_state
    return out


def _single(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def _act(
    policy: TensorDictModuleBase, graph: PolicyGraph, td: TensorDictBase, state: list[Tensor], began: Tensor
) -> tuple[Tensor, list[Tensor], Tensor]:
    """One step of the TensorDict policy itself: actions, next states and decided rows."""
    td = td.copy()
    if graph.states:
        td["is_init"] = began.unsqueeze(-1)
        for entry, value in zip(graph.states, _restarted(graph, state, began), strict=True):
            td.set(entry.key, entry.swap(value).contiguous())
    with set_exploration_type(ExplorationType.DETERMINISTIC), set_recurrent_mode(False):
        td = policy(td)
    states = [entry.swap(td.get(unravel_key(("next", entry.key)))).contiguous() for entry in graph.states]
    decided = torch.ones(len(began), dtype=torch.bool)
    if graph.scores_key is not None:
        best = td.get(graph.scores_key).topk(2, dim=-1).values
        decided = best[:, 0] - best[:, 1] > _TOLERANCE * (1 + best[:, 0].abs())
    return td.get(graph.action_key), states, decided


def _restarted(graph: PolicyGraph, state: list[Tensor], began: Tensor) -> list[Tensor]:
    out = []
    for entry, value in zip(graph.states, state, strict=True):
        zeroed = entry.swap(value).clone()
        zeroed[began] = 0.0
        out.append(entry.swap(zeroed).contiguous())
    return out


def _probe(policy: TensorDictModuleBase, graph: PolicyGraph, recording: Recording, rows: int) -> Recording:
    """Two steps on random observations around the recorded ones, some far out, for another batch size."""
    generator = torch.Generator().manual_seed(rows)
    seen = torch.cat(recording.obs)
    spread = seen.std(0, correction=0) + 1.0
    template = recording.template[torch.arange(rows) % len(recording.template)]
    out = Recording(template)
    state = [entry.zeros(rows) for entry in graph.states]
    for step in range(2):
        pick = torch.randint(len(seen), (rows,), generator=generator)
        obs = seen[pick] + 3.0 * spread * torch.randn(rows, graph.width, generator=generator)
        td = template.copy()
        for (key, shape), part in zip(graph.groups.items(), obs.split(graph.widths, -1), strict=True):
            td.set(key, part.reshape(rows, *shape))
        began = torch.full((rows,), step == 0)
        actions, state, decided = _act(policy, graph, td, state, began)
        out.add(obs, began, actions, state, decided)
    return out


def verify(
    policy: TensorDictModuleBase, graph: PolicyGraph, recording: Recording, staged: Path, formats: Sequence[str]
) -> Verification:
    """Compares every staged file with the policy; raises ``VerificationError`` for the first that differs."""
    probes = [_probe(policy, graph, recording, rows) for rows in _PROBES]
    cases = [("control step", recording)]
    cases += [(f"random observations, batch size {len(probe.obs[0])}, step", probe) for probe in probes]
    worst = {}
    for name in formats:
        run = FORMATS[name].run(staged / FORMATS[name].file, graph.states)
        worst[name] = max(_compare(name, where, run, graph, expected) for where, expected in cases)
    return Verification(
        control_steps=_STEPS,
        rows=len(recording.began[0]),
        probes=sum(len(obs) for probe in probes for obs in probe.obs),
        tolerance=_TOLERANCE,
        max_deviation={name: float(f"{value:.3g}") for name, value in worst.items()},
    )


def _compare(name: str, where: str, run: Runner, graph: PolicyGraph, expected: Recording) -> float:
    """Largest deviation of a format over a recording."""
    largest = 0.0
    state = [entry.zeros(len(expected.obs[0])) for entry in graph.states]
    for step, obs in enumerate(expected.obs):
        try:
            actions, state = run(obs, _restarted(graph, state, expected.began[step]))
        except Exception as error:  # whatever the runtime of a format raises
            raise VerificationError(f"The {name} export fails at {where} {step}: {error}. {_KEPT}") from error
        pairs = [("actions", actions, expected.actions[step])]
        pairs += [
            (entry.name, got, want) for entry, got, want in zip(graph.states, state, expected.states[step], strict=True)
        ]
        for what, got, want in pairs:
            if got.shape != want.shape:
                raise VerificationError(
                    f"The {name} export gives {what} of shape {tuple(got.shape)} at {where} {step}; the policy gives "
                    f"{tuple(want.shape)}. {_KEPT}"
                )
            if what == "actions":
                got, want = got[expected.decided[step]], want[expected.decided[step]]
            deviation, close = _deviation(got, want)
            if not close:
                raise VerificationError(
                    f"The {name} export differs from the policy at {where} {step}: largest deviation {deviation:.3g} "
                    f"in {what}, tolerance {_TOLERANCE:g}. {_KEPT}"
                )
            largest = max(largest, deviation)
    return largest


def _deviation(got: Tensor, want: Tensor) -> tuple[float, bool]:
    """Largest difference, and whether every one is within the tolerance."""
    difference = (got.double() - want.double()).abs()
    # A comparison with NaN is false, so NaN is never close.
    close = difference <= _TOLERANCE + _TOLERANCE * want.double().abs()
    largest = float(difference.nan_to_num(nan=np.inf).max()) if difference.numel() else 0.0
    return largest, bool(close.all())
