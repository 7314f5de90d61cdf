"""HiddenPointMass against the formulas of its docstring, step by step."""

import math

import pytest
import torch

from edenrl.envs import HiddenPointMass

DT = 0.05


@pytest.mark.parametrize("delay", [0, 2, 6])
def test_a_delayed_action_moves_the_point_as_the_formulas_say(place, delay):
    env = HiddenPointMass(2, seed=0, dtype=torch.float64)
    state = dict(mass=[2.0], gain=[4.0, 1.5], offset=[-0.25, 0.6], delay=[delay], turn_rate=[0.8], angle=[0.3])
    td = place(env, **state, position=[0.2, -0.1], velocity=[0.0, 0.5])
    position, velocity, angle = [0.2, -0.1], [0.0, 0.5], 0.3
    actions = [[0.0, 0.0]] * delay + [[0.5, -1.0], [2.0, 0.25], [0.0, 0.0], [-0.5, 0.5], [1.0, 1.0]]
    error = 0.0
    for step, action in enumerate(actions[delay:]):
        td = env.step(td.set("action", torch.tensor(action, dtype=torch.float64).expand(2, 2)))["next"]
        acting = [min(max(a, -1.0), 1.0) for a in actions[step]]
        for i, (gain, offset) in enumerate(((4.0, -0.25), (1.5, 0.6))):
            velocity[i] += DT * (gain * acting[i] + offset - 1.0 * velocity[i]) / 2.0
            position[i] += DT * velocity[i]
        angle += DT * 0.8
        goal = 0.5 * math.cos(angle), 0.5 * math.sin(angle)
        distance = math.dist(goal, position)
        error += distance
        expected = [goal[0] - position[0], goal[1] - position[1]]
        assert td["prop"][0, :2].tolist() == pytest.approx(expected)
        assert td["priv_explicit"][0].tolist() == pytest.approx(velocity)
        assert (
            td["reward"].item()
            if td["reward"].numel() == 1
            else td["reward"][0].item() == pytest.approx(1 / (1 + distance / 0.1))
        )
        assert td["metrics", "tracking_error"][0].item() == pytest.approx(error / (step + 1))
        towards = [-0.5 * 0.8 * math.sin(angle), 0.5 * 0.8 * math.cos(angle)]
        assert td["prop"][0, 4:].tolist() == pytest.approx([*towards, *(min(max(a, -1), 1) for a in action)])
    assert torch.equal(td["critic"], torch.cat([td[name] for name in ("prop", "priv_explicit", "priv_latent")], -1))
    assert td["priv_latent"][0].tolist() == pytest.approx([1.0, 2.0, math.log2(1.5), -0.25, 0.6, delay / 6])


def test_the_walls_stop_the_point(place):
    env = HiddenPointMass(1, seed=0)
    td = place(
        env, mass=[1.0], gain=[4.0, 4.0], offset=[0.0, 0.0], delay=[0], position=[0.99, 0.0], velocity=[2.0, 0.1]
    )
    td = env.step(td.set("action", torch.zeros(1, 2)))["next"]
    assert td["priv_explicit"][0, 0] == 0 and td["priv_explicit"][0, 1] > 0
    state = env.get_extra_state()["state"]
    assert state["position"][0, 0] == 1.0


def test_the_history_is_the_last_frames_and_begins_with_the_first():
    env = HiddenPointMass(3, seed=1, max_steps=7)
    data = env.rollout(20, break_when_any_done=False)
    for row in range(3):
        frames = []
        for t in range(20):
            if t % 7 == 0:
                frames = [data["prop"][row, t]] * 9
            frames = [*frames, data["prop"][row, t]][-10:]
            assert torch.equal(data["prop_history"][row, t], torch.cat(frames)), t
    assert torch.equal(data["next", "done"], data["next", "truncated"]) and not data["next", "terminated"].any()


def test_parameters_stay_in_an_episode_and_differ_between_them():
    env = HiddenPointMass(256, seed=2, max_steps=4)
    latent = env.rollout(8, break_when_any_done=False)["priv_latent"]
    assert torch.equal(latent[:, 0], latent[:, 3]) and torch.equal(latent[:, 4], latent[:, 7])
    assert not (latent[:, 3] == latent[:, 4]).all(-1).any()
    low, high = latent.flatten(0, 1).amin(0), latent.flatten(0, 1).amax(0)
    smallest, largest = torch.tensor([-1.0, 1, 1, -1.2, -1.2, 0]), torch.tensor([1.0, 2, 2, 1.2, 1.2, 1])
    assert (low >= smallest).all() and (high <= largest).all()
    assert (high - low > 0.95 * (largest - smallest)).all()


def test_hidden_shows_nothing_of_them_and_changes_nothing_else():
    shown, hidden = (HiddenPointMass(4, seed=3, hidden=flag).rollout(6) for flag in (False, True))
    for key in ("prop", "priv_explicit", "critic"):
        assert torch.equal(shown[key][:, 0], hidden[key][:, 0])
    assert not hidden["priv_latent"].any() and not hidden["prop_history"].any() and shown["priv_latent"].any()
