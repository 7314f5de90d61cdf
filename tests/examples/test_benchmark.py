"""The benchmark script at tiny sizes: rows, file, missing peers, wrong flags. Times never decide a test."""

from __future__ import annotations

import json
import math
from pathlib import Path

import benchmark
import pytest
import torch
from benchmarks import CASES, algorithms, flashsac, measuring, simulation
from benchmarks.measuring import Settings, Stat, alternate, make_row
from torch.testing import assert_close

TINY = Settings(quick=True, num_envs=(4,), repeats=2)


def run(tmp_path: Path, *flags: str) -> dict:
    """What the script writes."""
    out = tmp_path / "results" / "speed.json"
    benchmark.main(["--quick", "--num_envs", "4", "--out", str(out), *flags])
    return json.loads(out.read_text())


def test_the_file_holds_rows_settings_and_machine(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("rsl_rl")
    written = run(tmp_path, "--cases", "ppo,gae")
    assert [row["case"] for row in written["rows"]] == ["ppo", "ppo", "ppo", "gae"]
    facts = written["machine"]
    assert facts["cpu"] and facts["cores"] >= 1 and facts["threads"] == torch.get_num_threads()
    assert facts["torch"] == torch.__version__ and facts["device"] == "cpu"
    assert {"commit", "versions", "python", "load"} <= facts.keys()
    assert written["settings"] == {"device": "cpu", "quick": True, "compile": False, "num_envs": [4], "repeats": 3}
    for row in written["rows"]:
        for side in ("ours", "theirs"):
            assert 0 < row[side]["low"] <= row[side]["median"] <= row[side]["high"]
        assert math.isclose(row["ratio"], row["ours"]["median"] / row["theirs"]["median"])
    iteration, collect, learn = written["rows"][:3]
    assert (iteration["unit"], iteration["better"], collect["unit"]) == ("frames/s", "higher", "ms")
    # Frames and milliseconds tell of the same iterations; medians of three need not add up exactly.
    both = collect["ours"]["low"] + learn["ours"]["low"], collect["ours"]["high"] + learn["ours"]["high"]
    assert both[0] <= 1e3 * 4 * 24 / iteration["ours"]["median"] <= both[1]
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].startswith("case") and len(printed) == 2 + len(written["rows"])


@pytest.mark.parametrize("case", ["ppo", "collection"])
def test_a_missing_peer_leaves_a_row_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    found = measuring.importlib.util.find_spec
    monkeypatch.setattr(
        measuring.importlib.util, "find_spec", lambda name, *rest: None if name == "rsl_rl" else found(name, *rest)
    )
    rows = [row for row in run(tmp_path, "--cases", case)["rows"] if row["peer"] == "rsl_rl"]
    assert rows
    for row in rows:
        assert row["ours"]["median"] > 0 and row["theirs"] is None and row["ratio"] is None
        assert "pip install rsl-rl-lib" in row["note"]


@pytest.mark.parametrize("case", ["quadruped", "depth", "halfcheetah"])
def test_without_mujoco_a_case_is_one_row(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(measuring.importlib.util, "find_spec", lambda name, *rest: None)
    [row] = CASES[case](TINY)
    assert row.ours is None and "pip install" in row.note
    assert "pip install" in benchmark.format_row(row)


def test_an_unknown_case_is_refused_with_the_list(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as refused:
        benchmark.main(["--cases", "ppo,gea"])
    assert refused.value.code == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "unknown case gea" in message
    assert all(name in message for name in CASES)


@pytest.mark.parametrize(("flag", "value"), [("--num_envs", "16,0"), ("--num_envs", "many"), ("--device", "tpu9")])
def test_wrong_values_are_refused(flag: str, value: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        benchmark.main([flag, value])
    assert f"{flag}" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_refused(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(["--device", "cuda"])
    assert "use --device cpu" in capsys.readouterr().err


def test_the_list_names_every_case(capsys: pytest.CaptureFixture, root: Path) -> None:
    benchmark.main(["--list"])
    names = capsys.readouterr().out.split()
    assert names == list(CASES)
    page = (root / "docs" / "pages" / "performance.md").read_text()
    assert [name for name in names if f"| `{name}` |" not in page] == []


def test_cases_take_turns_and_the_first_rounds_do_not_count() -> None:
    calls: list[str] = []

    def case(name: str) -> int:
        calls.append(name)
        return len(calls)

    results = alternate({"a": lambda: case("a"), "b": lambda: case("b")}, repeats=2, warmups=1)
    assert calls == ["a", "b"] * 3
    assert results == {"a": [3, 5], "b": [4, 6]}


def test_the_ratio_is_that_of_the_medians() -> None:
    row = make_row("case", "work", "ms", [1.0, 9.0, 2.0], "peer", [4.0, 5.0, 100.0], better="lower")
    assert row.ours == Stat(2.0, 1.0, 9.0) and row.theirs == Stat(5.0, 4.0, 100.0)
    assert row.ratio == pytest.approx(0.4)


def test_operations_are_counted_as_by_hand() -> None:
    """A linear layer of 3 to 5 on 7 rows: 2 * 7 * 3 * 5; its backward, without the input's gradient, as many again."""
    layer = torch.nn.Linear(3, 5)
    with algorithms.FlopCount() as count:
        layer(torch.randn(7, 3)).sum().backward()
    assert count.total == 2 * 210
    with torch.inference_mode(), algorithms.FlopCount() as count:
        layer(torch.randn(7, 3))
    assert count.total == 210


@pytest.mark.parametrize("size", [32, 65])
@pytest.mark.parametrize("blocks", [1, 2])
def test_plain_flashsac_computes_our_loss(size: int, blocks: int) -> None:
    """The peer does the same work; otherwise its time would mean nothing."""
    ours = flashsac.FlashSAC(TINY, actor_dim=16, critic_dim=24, actor_blocks=blocks, critic_blocks=blocks)
    plain, batch = ours.plain(), flashsac.random_batch(size, "cpu")
    torch.manual_seed(1)
    expected = ours.loss.critic_loss(batch)["loss_critic"]
    torch.manual_seed(1)
    assert_close(plain.critic_loss(batch), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["PPO", "GRPO", "RMA", "RMA with DAgger", "HIM", "AMP", "CMDP"])
def test_an_iteration_of_each_algorithm_learns(name: str) -> None:
    trainer = algorithms.build(8, TINY)[name]
    before = [parameter.detach().clone() for parameter in trainer.loss.parameters()]
    trainer.iterate()
    changed = [not torch.equal(*pair) for pair in zip(before, trainer.loss.parameters(), strict=True)]
    assert any(changed)


def test_an_update_of_apg_learns() -> None:
    trainer = simulation.APG(4, TINY)
    before = [parameter.detach().clone() for parameter in trainer.policy.parameters()]
    trainer.learn()
    assert trainer.frames == 4 * 100
    assert any(not torch.equal(*pair) for pair in zip(before, trainer.policy.parameters(), strict=True))


@pytest.mark.extended
def test_every_case_runs(tmp_path: Path) -> None:
    written = run(tmp_path)
    assert {row["case"] for row in written["rows"]} == set(CASES)
