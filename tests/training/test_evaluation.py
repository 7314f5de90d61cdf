import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import Binary, Bounded, Composite, Unbounded
from torchrl.envs import EnvBase

from edenrl.envs import make_env
from edenrl.modules import gaussian_actor
from edenrl.training import evaluate
from edenrl.training.evaluation import EvaluationBudget


class Countdown(EnvBase):
    """Row i ends after i + 1 steps and pays 1 each step; its metrics name the row."""

    def __init__(self, num_envs, endless=False):
        super().__init__(batch_size=[num_envs])
        self.endless = endless
        column = (num_envs, 1)
        self.observation_spec = Composite(
            observation=Unbounded(column),
            metrics=Composite(row=Unbounded(column), success=Unbounded(column), shape=[num_envs]),
            shape=[num_envs],
        )
        self.action_spec = Bounded(-1, 1, column)
        self.reward_spec = Unbounded(column)
        flag = Binary(1, shape=column, dtype=torch.bool)
        self.done_spec = Composite(done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=[num_envs])
        self.rows = torch.arange(num_envs).unsqueeze(-1)
        self.steps = torch.zeros(column, dtype=torch.long)

    def _metrics(self):
        return {"row": self.rows.float(), "success": (self.rows % 2 == 0).float()}

    def _reset(self, tensordict):
        mask = torch.ones_like(self.steps, dtype=torch.bool)
        if tensordict is not None and "_reset" in tensordict.keys():
            mask = tensordict["_reset"]
        self.steps = torch.where(mask, 0, self.steps)
        return TensorDict(observation=self.steps.float(), metrics=self._metrics(), batch_size=self.batch_size)

    def _step(self, tensordict):
        self.steps = self.steps + 1
        done = (self.steps > self.rows) & (not self.endless)
        return TensorDict(
            observation=self.steps.float(),
            reward=torch.ones_like(self.steps, dtype=torch.float32),
            metrics=self._metrics(),
            done=done,
            terminated=done.clone(),
            truncated=torch.zeros_like(done),
            batch_size=self.batch_size,
        )

    def _set_seed(self, seed):
        pass


@pytest.fixture
def policy():
    return TensorDictModule(torch.nn.Linear(1, 1), in_keys=["observation"], out_keys=["action"])


def test_each_environment_contributes_the_same_number_of_episodes(policy):
    result = evaluate(policy, lambda n: Countdown(4), num_episodes=12)
    # Quota 3 each of lengths 1, 2, 3, 4: mean 2.5. Counting the first 12 to finish would favour the short ones.
    assert result["return_mean"] == result["length_mean"] == 2.5
    assert (result["return_min"], result["return_max"], result["episodes"]) == (1.0, 4.0, 12.0)
    assert result["return_median"] == 2.5
    assert result["return_std"] == pytest.approx(np.std([1, 2, 3, 4]))
    assert result["row"] == 1.5 and result["success_rate"] == 0.5


def test_a_remainder_goes_to_the_first_rows(policy):
    result = evaluate(policy, lambda n: Countdown(4), num_episodes=6)
    # Quotas 2, 2, 1, 1 of lengths 1, 2, 3, 4.
    assert result["episodes"] == 6 and result["length_mean"] == pytest.approx((2 * 1 + 2 * 2 + 3 + 4) / 6)


def test_a_part_that_was_frozen_stays_frozen(policy):
    actor = gaussian_actor({"observation": 14}, 2)
    norm = actor.module[0].module.norm.eval()
    evaluate(actor, lambda n: make_env("PointMass", n, seed=0), 4)
    assert actor.training and not norm.training


def test_a_policy_that_is_no_module():
    env = make_env("PointMass", 2, seed=0)
    result = evaluate(lambda td: td.set("action", torch.zeros(2, 2)), lambda n: env, 2)
    assert result["path_length"] == 0


def test_random_states_mode_and_statistics_are_as_before():
    actor = gaussian_actor({"observation": 14}, 2)
    norm = actor.module[0].module.norm
    norm.update(torch.randn(64, 14))
    before = {k: v.clone() for k, v in actor.state_dict().items()}
    torch.manual_seed(3)
    np.random.seed(3)
    expected = torch.rand(3), np.random.rand(3)
    torch.manual_seed(3)
    np.random.seed(3)
    evaluate(actor, lambda n: make_env("PointMass", n, seed=0), 8)
    assert torch.equal(torch.rand(3), expected[0]) and (np.random.rand(3) == expected[1]).all()
    assert actor.training and all(torch.equal(before[k], v) for k, v in actor.state_dict().items())


def test_same_seed_same_result_and_the_mean_action_is_played():
    actor = gaussian_actor({"observation": 14}, 2, init_std=5.0)
    runs = [evaluate(actor, lambda n: make_env("PointMass", n, seed=4), 16) for _ in range(2)]
    assert runs[0] == runs[1]
    # With std 5 a sampled action costs and covers distance; the mean (gain 0.01) hardly moves.
    assert runs[0]["path_length"] < 0.5


def test_endless_episodes_are_reported(policy):
    with pytest.raises(RuntimeError, match="Only 0 of 4 evaluation episodes ended within 50 steps"):
        evaluate(policy, lambda n: Countdown(4, endless=True), 4, max_steps=50)
    with pytest.raises(ValueError, match="num_episodes >= 1"):
        evaluate(policy, lambda n: Countdown(4), 0)


@pytest.mark.parametrize(("rows", "episodes"), [(1, 1), (4, 6), (5, 12)])
def test_what_a_hook_measures_is_averaged_over_the_steps_of_each_counted_episode(policy, rows, episodes):
    def measure(step):
        # In an episode of n steps the observations after them are 1 to n: the last one is not that of the reset.
        last = step["next", "observation"]
        assert torch.equal(step["next", "done"], last == torch.arange(rows).unsqueeze(-1) + 1)
        return {"column": last, "flat": step["observation"].squeeze(-1), "numpy": np.ones(rows)}

    result = evaluate(policy, lambda n: Countdown(rows), episodes, on_step=measure)
    quota = episodes // rows + (np.arange(rows) < episodes % rows)
    lengths = np.repeat(np.arange(rows) + 1, quota)
    assert result["column"] == pytest.approx(((lengths + 1) / 2).mean())
    assert result["flat"] == pytest.approx(((lengths - 1) / 2).mean())
    assert result["numpy"] == 1.0


def test_a_hook_that_only_looks_changes_nothing():
    actor = gaussian_actor({"observation": 14}, 2)
    steps = []
    watched = evaluate(actor, lambda n: make_env("PointMass", n, seed=4), 16, on_step=steps.append)
    assert watched == evaluate(actor, lambda n: make_env("PointMass", n, seed=4), 16)
    assert len(steps) >= watched["length_max"]
    assert {"observation", "action", "next"} <= set(steps[0].keys()) and steps[0].batch_size == (16,)
    assert not steps[0]["action"].requires_grad


def test_the_step_that_a_hook_gets_is_read_only(policy):
    with pytest.raises(RuntimeError, match="locked"):
        evaluate(policy, lambda n: Countdown(3), 3, on_step=lambda step: step.set("mine", step["action"]))
    with pytest.raises(RuntimeError, match="locked"):
        evaluate(policy, lambda n: Countdown(3), 3, on_step=lambda step: step["next"].pop("reward"))


def test_an_error_of_a_hook_comes_out_as_it_is_and_the_environment_is_closed(policy):
    error, env = KeyError("mine"), Countdown(3)

    def measure(step):
        raise error

    with pytest.raises(KeyError) as caught:
        evaluate(policy, lambda n: env, 3, on_step=measure)
    assert caught.value is error and env.is_closed


@pytest.mark.parametrize(
    ("returned", "kind", "message"),
    [
        (lambda step: 3.0, TypeError, "on_step returned a float"),
        (lambda step: {"a": 3.0}, ValueError, r"'a' with the shape \(\); expected one number per row, \[3\]"),
        (lambda step: {"a": torch.zeros(3, 2)}, ValueError, r"the shape \(3, 2\)"),
        (lambda step: {"return_mean": torch.zeros(3)}, ValueError, "'return_mean'.* report already"),
        (lambda step: {"length": torch.zeros(3)}, ValueError, "'length'.* report already"),
        (lambda step: {"row": torch.zeros(3)}, ValueError, "'row'.* report already"),
        (lambda step: {"success": torch.zeros(3)}, ValueError, "'success'.* report already"),
        (lambda step: {f"a{step['observation'][-1].item():g}": torch.zeros(3)}, ValueError, r"\['a1'\] .*\['a0'\]"),
    ],
)
def test_what_a_hook_cannot_measure_is_refused(policy, returned, kind, message):
    with pytest.raises(kind, match=message):
        evaluate(policy, lambda n: Countdown(3), 3, on_step=returned)


def evaluated_by(budget, iterations, interval, length_of, first=1):
    """Iterations at which a run with that budget evaluates; its evaluations play episodes of 100 steps."""
    done = []
    for iteration in range(first, iterations + 1):
        row = {"episode/length": length_of(iteration)}
        if iteration % interval == 0 and budget.affords(iteration):
            done.append(iteration)
            row["eval/length_mean"] = 100.0
        budget.observe(iteration, row)
    return done


@pytest.mark.parametrize(
    ("episodes", "frames", "envs", "interval", "expected"),
    [
        (10, 6400, 64, 1, [*range(5, 51, 5)]),  # 5 * 10 * 100 frames are 0.8 iterations, 5 * 100 steps are 5
        (10, 6400, 640, 1, [50]),  # 5 * 100 steps of the batch are 50 iterations of 10
        (200, 6400, 64, 1, [16, 32, 48]),  # 5 * 200 * 100 frames are 15.6 iterations, 2 episodes a row are 10
        (10, 64000, 64, 10, [10, 20, 30, 40, 50]),  # affordable every time
    ],
)
def test_evaluations_wait_until_training_has_made_five_times_their_steps(episodes, frames, envs, interval, expected):
    budget = EvaluationBudget(episodes, frames, envs)
    assert evaluated_by(budget, 50, interval, lambda i: 100.0) == expected


def test_while_no_episode_has_ended_in_training_none_is_played():
    budget = EvaluationBudget(2, 6400, 64)
    nan = float("nan")
    assert evaluated_by(budget, 30, 5, lambda i: nan if i < 12 else 100.0) == [15, 20, 25, 30]
    assert evaluated_by(EvaluationBudget(2, 6400, 64), 30, 5, lambda i: nan) == []


def test_a_loop_that_does_not_watch_its_episodes_learns_their_length_from_its_first_evaluation():
    budget = EvaluationBudget(10, 640, 64)
    budget.observe(1, {"loss": 1.0})
    assert budget.affords(2)
    budget.observe(2, {"loss": 1.0, "eval/length_mean": 20.0})
    assert not budget.affords(11) and budget.affords(12)


@pytest.mark.parametrize("cut", [1, 11, 17, 29])
def test_a_restored_budget_goes_on_as_before(cut):
    whole = evaluated_by(EvaluationBudget(20, 640, 64), 90, 1, lambda i: 100.0 + i)
    first = EvaluationBudget(20, 640, 64)
    begun = evaluated_by(first, cut, 1, lambda i: 100.0 + i)
    second = EvaluationBudget(20, 640, 64)
    second.load_state_dict(first.state_dict())
    assert begun + evaluated_by(second, 90, 1, lambda i: 100.0 + i, first=cut + 1) == whole
