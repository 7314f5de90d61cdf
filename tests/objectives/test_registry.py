from collections.abc import Iterator

import pytest

from edenrl.modules import gaussian_actor
from edenrl.objectives import GRPOLoss, PPOLoss, make_loss, register_loss, registered_losses, registry


@pytest.fixture(autouse=True)
def _isolated_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    yield


def test_names_resolve_in_any_case_and_arguments_are_passed_on() -> None:
    actor = gaussian_actor({"observation": 3}, 2)
    loss = make_loss("gRPo", actor, kl_coeff=0.5, functional=False)
    assert type(loss) is GRPOLoss and loss.actor_network is actor and float(loss.kl_coeff) == 0.5


def test_the_algorithms_of_the_library_are_registered() -> None:
    known = registered_losses()
    assert known["PPO"] is PPOLoss and known["GRPO"] is GRPOLoss
    assert list(known) == sorted(known)


def test_what_is_returned_is_a_copy() -> None:
    registered_losses().clear()
    assert "PPO" in registered_losses()


def test_register_by_call_and_by_decorator() -> None:
    @register_loss("mine")
    class Mine(PPOLoss):
        pass

    assert register_loss("theirs", Mine) is Mine
    assert registered_losses()["mine"] is registered_losses()["theirs"] is Mine
    assert isinstance(make_loss("MINE", gaussian_actor({"observation": 3}, 2)), Mine)


def test_registering_twice_needs_override() -> None:
    class Mine(PPOLoss):
        pass

    with pytest.raises(ValueError, match="'PPO' is already registered; 'ppo' needs another name.*override=True"):
        register_loss("ppo", Mine)
    with pytest.raises(ValueError, match="already registered"):
        register_loss("ppo")  # a decorator is refused before the class is defined
    assert registered_losses()["PPO"] is PPOLoss
    register_loss("ppo", Mine, override=True)
    assert registered_losses()["ppo"] is Mine and "PPO" not in registered_losses()


def test_unknown_names_list_the_closest_and_all() -> None:
    with pytest.raises(ValueError, match=r"Unknown loss 'GPRO'. Closest names: GRPO[^.]*\. Registered: .*PPO"):
        make_loss("GPRO")


def test_wrong_classes_are_refused() -> None:
    with pytest.raises(TypeError, match="expected a LossModule class"):
        register_loss("function", lambda: None)
    with pytest.raises(ValueError, match="not empty"):
        register_loss("", PPOLoss)
