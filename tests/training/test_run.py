import contextlib
import errno
import json
import math
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch

from edenrl._files import DiskFullError, write_atomic
from edenrl.config import RunConfig
from edenrl.training import Run, load_policy_weights, read_metrics, run_script, setup
from edenrl.training.checkpoint_files import StateDictFile
from edenrl.training.lock import DirectoryLock
from edenrl.training.loggers import MetricsTable


def test_setup_seeds_everything_and_names_a_device_that_is_not_there():
    import random

    import numpy as np

    draws = []
    for _ in range(2):
        setup(RunConfig(seed=5))
        draws.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert draws[0] == draws[1]
    with pytest.raises(ValueError, match="Set --device cpu"):
        setup(RunConfig(device="cuda:77"))


def test_a_run_of_ones_own(tmp_path):
    """The frame works without an environment or a policy: here it minimizes a parabola."""
    weight = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)

    def build(resume=None):
        cfg = RunConfig(run_dir=str(tmp_path / "run"), resume=resume, quiet=True)
        return Run(cfg, "Parabola", iterations=10, frames_per_iteration=1)

    with pytest.raises(SystemExit) as stopped, build() as run:
        run.keep(policy=weight, optimizer=optimizer)
        for iteration in run:
            loss = weight.weight.square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log({"loss": loss, "plain": 1.0})
            if iteration == 3:
                os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.code == 130 and run.iteration == 4 and run.remaining == 6
    with build(resume=str(tmp_path / "run")) as run:
        run.keep(policy=weight, optimizer=optimizer)
        seen = []
        for iteration in run:
            run.log({"loss": weight.weight.square().sum()})
            seen.append(iteration)
    assert seen == list(range(4, 10))
    assert [row["iteration"] for row in read_metrics(tmp_path / "run" / "metrics.csv")] == list(range(10))


def test_two_processes_cannot_train_in_one_directory(tmp_path):
    net = torch.nn.Linear(1, 1)
    cfg = RunConfig(run_dir=str(tmp_path / "run"), resume=str(tmp_path / "run"), quiet=True)

    def build():
        return Run(cfg, "Nothing", iterations=1, frames_per_iteration=1)

    with build() as run:
        run.keep(policy=net)
        run.begin()
        with pytest.raises(BlockingIOError, match="Another process is training in"), build() as other:
            other.begin()
        for _ in run:
            pass
    with build() as run:
        run.keep(policy=net)
        run.begin()  # free again


@contextlib.contextmanager
def frame(folder, resume=None, **options):
    """A run of three iterations that trains nothing."""
    cfg = RunConfig(run_dir=None if resume else str(folder), resume=resume, quiet=True)
    with Run(cfg, "Nothing", iterations=3, frames_per_iteration=1, **options) as run:
        run.keep(policy=torch.nn.Linear(1, 1))
        yield run


def test_a_run_that_fails_to_begin_leaves_its_directory_free(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("edenrl.training.folder.RunLogger", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError), frame(tmp_path) as run:
            run.begin()
    assert not (tmp_path / ".lock").exists() and "1 / 0" in (tmp_path / "error.txt").read_text()
    with frame(tmp_path, resume=str(tmp_path)) as run:  # the same process may try again
        run.begin()
        assert not (tmp_path / "error.txt").exists()


def test_a_lock_on_a_file_that_its_owner_removed_counts_for_nothing(tmp_path, monkeypatch):
    """Between a newcomer's open and its lock, the owner ends and a third process begins."""
    from edenrl.training import lock as module

    path, held, flock = tmp_path / ".lock", [], module.fcntl.flock

    def late(file, flags):
        if not held:
            path.unlink()
            held.append(open(path, "w"))
            flock(held[0], flags)
        flock(file, flags)

    monkeypatch.setattr(module.fcntl, "flock", late)
    with pytest.raises(BlockingIOError, match="Another process"):
        module.DirectoryLock(tmp_path).acquire()
    held[0].close()


def test_a_foreseen_error_is_one_message_and_its_traceback_a_file(tmp_path, capsys):
    def main():
        with frame(tmp_path) as run:
            for iteration in run:
                if iteration == 2:
                    raise ValueError("the cause")

    with pytest.raises(SystemExit) as stopped:
        run_script(main)
    message = capsys.readouterr().err
    assert stopped.value.code == 1
    told = f"error: the cause\n(iteration 2; the full traceback is in {tmp_path / 'error.txt'}; continue with python "
    assert message.startswith(told) and message.endswith(f"--resume {tmp_path})\n")
    report = (tmp_path / "error.txt").read_text()
    assert report.startswith("Iteration 2 of 3\nTraceback") and 'raise ValueError("the cause")' in report


def test_an_unforeseen_error_keeps_its_traceback(tmp_path):
    def main():
        with frame(tmp_path) as run:
            for _ in run:
                raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run_script(main)
    assert "RuntimeError: a bug" in (tmp_path / "error.txt").read_text()


def test_what_a_run_cannot_change_is_refused_without_a_command_line_too(tmp_path):
    with frame(tmp_path) as run:
        run.begin()
    config = (tmp_path / "config.json").read_text()
    cfg = RunConfig(resume=str(tmp_path), seed=5, quiet=True)
    with pytest.raises(ValueError, match=r"cannot change seed \(was 1, now 5\)"):
        with Run(cfg, "Nothing", iterations=3, frames_per_iteration=1) as run:
            run.begin()
    assert not (tmp_path / "error.txt").exists()  # the run is healthy
    assert (tmp_path / "config.json").read_text() == config


def test_a_script_without_workers_refuses_the_flag_that_asks_for_them(tmp_path):
    cfg = RunConfig(run_dir=str(tmp_path / "run"), collector="multi_sync")
    with pytest.raises(ValueError, match="Set --collector single"):
        with Run(cfg, "Nothing", iterations=1, frames_per_iteration=1) as run:
            run.keep(policy=torch.nn.Linear(1, 1))
            run.begin()
    assert not (tmp_path / "run").exists()


def run_with_scores(tmp_path, scores, **sections):
    """A run of as many iterations as there are scores; its evaluation reports the score and its return."""
    net = torch.nn.Linear(1, 1)
    cfg = RunConfig(run_dir=str(tmp_path / "run"), quiet=True, **sections)

    def evaluate():
        done.append(run.iteration)
        net.bias.data.fill_(run.iteration)
        names = ("return_mean", "return_std", "return_median", "return_min", "return_max", "length_mean", "episodes")
        return {**dict.fromkeys(names, float(run.iteration)), "distance": scores[run.iteration - 1]}

    done = []
    with Run(cfg, "Scored", iterations=len(scores), frames_per_iteration=2, evaluate=evaluate) as run:
        run.keep(policy=net)
        for _ in run:
            pass
    return done, net


@pytest.mark.parametrize(("metric", "mode", "best"), [("distance", "min", 4), ("distance", "max", 2), (None, None, 8)])
def test_the_best_checkpoint_is_chosen_by_the_metric_that_was_named(tmp_path, metric, mode, best):
    options = {"interval_iterations": 2} | ({} if metric is None else {"metric": metric, "mode": mode})
    scores = [9.0, 5.0, 0.0, 1.0, 9.0, 2.0, 9.0, 3.0]
    done, net = run_with_scores(tmp_path, scores, evaluation=options, checkpoint={"interval_iterations": 3})
    assert done == [2, 4, 6, 8]
    path = load_policy_weights(net, tmp_path / "run", "best")
    assert net.bias.item() == best and path.name.endswith(f"{best:012d}")
    table = read_metrics(tmp_path / "run" / "metrics.csv")
    assert [row["iteration"] for row in table if "eval/distance" in row] == [1, 3, 5, 7]


def test_saving_and_evaluating_have_intervals_of_their_own(tmp_path):
    options = dict(evaluation={"interval_iterations": 4}, checkpoint={"interval_iterations": 3, "keep_last": 9})
    run_with_scores(tmp_path, [1.0] * 8, **options)
    saved = sorted(int(path.name.split("-")[1]) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == [3, 4, 6, 8]


def test_an_unknown_metric_lists_what_there_is(tmp_path):
    with pytest.raises(ValueError, match=r"evaluation.metric is 'succes'; this evaluation measures \['distance'"):
        run_with_scores(tmp_path, [1.0] * 4, evaluation={"metric": "succes", "interval_iterations": 2})
    # What was trained until then can be continued under another name.
    assert (tmp_path / "run" / "checkpoints" / f"checkpoint-{2:012d}").is_dir()


def test_a_budget_in_updates(tmp_path, capsys):
    cfg = RunConfig(run_dir=str(tmp_path / "run"))
    with Run(cfg, "Nothing", iterations=3, frames_per_iteration=5) as run:
        run.keep(policy=torch.nn.Linear(1, 1))
        run.count_updates()
        for iteration in run:
            run.log({"frames": 100 * (iteration + 1)})
    assert [row["frames"] for row in read_metrics(tmp_path / "run" / "metrics.csv")] == [100, 200, 300]
    out = capsys.readouterr().out
    assert "3 of 3" in out and "updates/s" in out and "frames" not in out


def test_components_have_one_name_each_and_are_named_before_the_first_step(tmp_path):
    with frame(tmp_path / "run") as run:
        with pytest.raises(ValueError, match=r"already keeps \['policy'\]"):
            run.keep(policy=torch.nn.Linear(1, 1))
        first, second = run.keep(first=torch.nn.Linear(1, 1), second=torch.nn.Linear(2, 2))
        assert (first.in_features, second.in_features) == (1, 2)
        run.begin()
        with pytest.raises(RuntimeError, match=r"keep\(late\) comes too late"):
            run.keep(late=first)


def test_a_run_that_never_begins_leaves_no_directory(tmp_path):
    with pytest.raises(ValueError, match="wrong input"), frame(tmp_path / "run"):
        raise ValueError("wrong input")
    with frame(tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()


class Counting:
    """A collector that counts how often it was shut down."""

    def __init__(self, fails=False):
        self.fails, self.downs = fails, 0

    def shutdown(self):
        self.downs += 1
        if self.fails:
            raise RuntimeError("a worker hangs")

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("begun", [True, False])
def test_a_collector_is_shut_down_however_the_run_ends(tmp_path, begun):
    collector = Counting(fails=True)
    with pytest.raises(ValueError, match="the cause"), frame(tmp_path / "failed") as run:
        run.keep(collector=collector)
        if begun:
            run.begin()
        raise ValueError("the cause")
    assert collector.downs == 1
    with frame(tmp_path / "done") as run:
        collector = run.keep(collector=Counting())
        for _ in run:
            pass
    assert collector.downs == 1


def test_own_metrics_join_the_evaluation(tmp_path):
    names = ("return_mean", "return_std", "return_median", "return_min", "return_max", "length_mean", "episodes")
    with frame(tmp_path / "run", evaluate=lambda: dict.fromkeys(names, 1.0)) as run:
        run.add_evaluation(lambda: {"updates": 4.0})
        for _ in run:
            pass
    assert read_metrics(tmp_path / "run" / "metrics.csv")[-1]["eval/updates"] == 4.0


def test_a_run_with_an_environment_needs_a_policy_to_evaluate(tmp_path):
    with pytest.raises(ValueError, match=r"evaluates its component 'policy'.*keeps \['actor'\]"):
        with Run(RunConfig(run_dir=str(tmp_path / "run")), iterations=1, frames_per_iteration=1) as run:
            run.env()
            run.keep(actor=torch.nn.Linear(1, 1))
            run.begin()


def test_runs_that_begin_in_one_second_get_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda *_: "20300101-000000")
    for _ in range(3):
        with Run(RunConfig(seed=7, quiet=True), "PPO", iterations=1, frames_per_iteration=1) as run:
            for _ in run:
                pass
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == [f"ppo-PointMass-s7-20300101-000000{suffix}" for suffix in ("", "-2", "-3")]


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs SIGHUP")
@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_saves_and_ends_unless_it_is_ignored(tmp_path, ignored):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with contextlib.suppress(SystemExit), frame(tmp_path / "run") as run:
            for iteration in run:
                if iteration == 1:
                    os.kill(os.getpid(), signal.SIGHUP)
        assert run.iteration == (3 if ignored else 2)
        assert signal.getsignal(signal.SIGHUP) == (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert load_policy_weights(torch.nn.Linear(1, 1), tmp_path / "run", "latest").name.endswith(f"{run.iteration:012d}")


def test_the_second_interruption_names_the_run_to_continue(tmp_path, capsys):
    def main():
        with frame(tmp_path / "run") as run:
            for _ in run:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(SystemExit) as stopped:
        run_script(main)
    assert stopped.value.code == 130 and f"--resume {tmp_path / 'run'}" in capsys.readouterr().err


def parabola(path, *, fail_at=None, error=None, resume=False, poison=False, iterations=10, **options):
    """A run that minimizes a parabola and saves every third iteration; returns the iterations that it did."""
    torch.manual_seed(0)
    net, seen = torch.nn.Linear(2, 1), []
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    where = {"resume": str(path)} if resume else {"run_dir": str(path)}
    cfg = RunConfig(**where, quiet=True, checkpoint={"interval_iterations": 3})
    with Run(cfg, "Parabola", iterations=iterations, frames_per_iteration=1, **options) as run:
        run.keep(policy=net, optimizer=optimizer)
        for iteration in run:
            seen.append(iteration)
            optimizer.zero_grad()
            net(torch.ones(2)).square().sum().backward()
            optimizer.step()
            if iteration == fail_at:
                if poison:
                    net.weight.data[0, 1] = torch.nan
                raise error
            run.log({"iteration done": iteration})
    return seen


def saved_steps(path):
    return sorted(int(folder.name[-4:]) for folder in (path / "checkpoints").iterdir())


@pytest.mark.parametrize("error", [ValueError("bad data"), RuntimeError("a bug"), OSError(5, "the drive is gone")])
@pytest.mark.parametrize(("fail_at", "kept"), [(5, [3, 5]), (7, [6, 7]), (1, [1])])
def test_an_error_saves_what_was_trained_since_the_last_checkpoint(tmp_path, error, fail_at, kept):
    path = tmp_path / "run"
    with pytest.raises(type(error), match=re.escape(str(error))):
        parabola(path, fail_at=fail_at, error=error)
    assert saved_steps(path) == kept
    assert json.loads((path / "progress.json").read_text())["state"] == "failed"
    assert parabola(path, resume=True) == list(range(fail_at, 10))
    assert [row["iteration"] for row in read_metrics(path / "metrics.csv")] == list(range(10))


@pytest.mark.parametrize("fail_at", [0, 3, 6])
def test_an_error_right_after_a_checkpoint_saves_nothing_more(tmp_path, fail_at):
    path = tmp_path / "run"
    with pytest.raises(ValueError, match="now"):
        parabola(path, fail_at=fail_at, error=ValueError("now"))
    assert not fail_at or saved_steps(path)[-1] == fail_at
    assert fail_at or not (path / "checkpoints").exists()


def test_parameters_that_are_not_finite_are_not_saved_by_an_error(tmp_path):
    path = tmp_path / "run"
    with pytest.raises(ValueError, match="diverged"):
        parabola(path, fail_at=4, error=ValueError("diverged"), poison=True)
    assert saved_steps(path) == [3]


class Simulator:
    """A component that is no network; its state may be NaN."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"nested": [{"q": torch.tensor([self.value, 1.0])}]}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(("value", "saved"), [(math.nan, False), (math.inf, True), (2.0, True)])
def test_a_simulation_that_diverged_is_not_saved_by_an_error(tmp_path, capsys, value, saved):
    cfg = RunConfig(run_dir=str(tmp_path / "run"), checkpoint={"interval_iterations": 50})
    with pytest.raises(ValueError, match="stop"), Run(cfg, "X", iterations=100, frames_per_iteration=1) as run:
        run.keep(simulator=Simulator(value))
        for iteration in run:
            if iteration == 2:
                raise ValueError("stop")
    told = capsys.readouterr().out
    assert ("Saved the state after iteration 2" in told) == saved
    assert ("are not saved: the state of 'simulator' holds NaN" in told) != saved


def test_ctrl_c_twice_saves_nothing(tmp_path):
    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        parabola(path, fail_at=4, error=KeyboardInterrupt())
    assert saved_steps(path) == [3]


@pytest.mark.parametrize("iteration", [2, 5])
def test_an_evaluation_that_fails_loses_no_iteration(tmp_path, iteration):
    path, count = tmp_path / "run", iter(range(100))

    def measure():
        if next(count) == iteration // 3:
            raise ValueError("the evaluation failed")
        return {"return_mean": 0.0}

    with pytest.raises(ValueError, match="the evaluation failed"):
        parabola(path, evaluate=measure)
    assert saved_steps(path)[-1] == iteration + 1
    assert parabola(path, resume=True, evaluate=lambda: {"return_mean": 1.0}) == list(range(iteration + 1, 10))
    assert [row["iteration"] for row in read_metrics(path / "metrics.csv")] == list(range(10))


@pytest.mark.parametrize(("name", "value"), [("processes", 3), ("step", 77), ("config", {"seed": 9})])
def test_a_manifest_that_is_damaged_decides_nothing(tmp_path, name, value):
    path = tmp_path / "run"
    parabola(path, iterations=6)
    manifest = max((path / "checkpoints").iterdir()) / "manifest.json"
    content = json.loads(manifest.read_text())
    content["metadata"][name] = value
    manifest.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="manifest.json is damaged"):
        assert parabola(path, resume=True)[-1] == 9


@pytest.mark.parametrize("error", [KeyError("sensor"), KeyError(3), ValueError(), ValueError("sensor")])
def test_the_message_of_a_terse_error_names_its_kind(capsys, error):
    def main():
        raise error

    with pytest.raises(SystemExit):
        run_script(main)
    assert capsys.readouterr().err.startswith(f"error: {type(error).__name__}")


@pytest.mark.parametrize("name", ["config.json", "observations.json", "other.txt"])
def test_a_file_that_does_not_fit_the_disk_is_named(tmp_path, monkeypatch, name):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    write_atomic(tmp_path / name, "before")
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(DiskFullError, match=f"{name} could not be written"):
        write_atomic(tmp_path / name, "after")
    assert [file.name for file in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == "before"


@pytest.mark.parametrize("where", ["save", "write", "config", "lock", "open"])
def test_a_full_disk_ends_the_run_with_one_message_and_the_run_continues(tmp_path, capsys, monkeypatch, where):
    path, no_space = tmp_path / "run", OSError(errno.ENOSPC, "No space left on device")
    calls, after = iter(range(100)), {"save": 1, "write": 4, "config": 0, "lock": 0, "open": 0}[where]
    target = {
        "save": (StateDictFile, "save"),
        "write": (MetricsTable, "write"),
        "config": (Path, "write_text"),
        "lock": (DirectoryLock, "acquire"),
        "open": (MetricsTable, "__init__"),
    }[where]
    real = getattr(*target)

    def full(*args, **kwargs):
        if next(calls) >= after:
            raise no_space
        return real(*args, **kwargs)

    monkeypatch.setattr(*target, full)
    with pytest.raises(SystemExit) as stopped:
        run_script(lambda: parabola(path))
    message = capsys.readouterr().err
    what = {"save": "the checkpoint", "config": "config.json", "lock": "the run directory"}.get(where, "metrics.csv")
    assert stopped.value.code == 1 and message.startswith(f"error: The disk of {path}") and what in message
    assert " are free. " in message and "Traceback" not in message
    monkeypatch.undo()
    if where in ("save", "write"):
        assert json.loads((path / "progress.json").read_text())["state"] == "failed"
    assert parabola(path, resume=(path / "config.json").exists())[-1] == 9
    assert [row["iteration"] for row in read_metrics(path / "metrics.csv")] == list(range(10))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env": {"num_envs": 7}}, r"env.num_envs \(was 256, now 7\)"),
        ({"seed": 5, "env": {"reward_scale": 0.5}}, r"seed \(was 1, now 5\).*env.reward_scale \(was 1.0, now 0.5\)"),
    ],
)
def test_settings_that_were_edited_in_the_file_of_a_run_are_refused(tmp_path, changes, message):
    path = tmp_path / "run"
    parabola(path, iterations=3)
    config = path / "config.json"
    before = config.read_text()
    edited = json.loads(before)
    for name, value in changes.items():
        edited[name] = {**edited[name], **value} if isinstance(value, dict) else value
    config.write_text(json.dumps(edited))
    with pytest.raises(ValueError, match=message) as refused:
        resumed(path)
    assert str(config) in str(refused.value) and "was edited" in str(refused.value)
    assert "Put the old values back" in str(refused.value)
    config.write_text(before)
    assert resumed(path) == list(range(3, 10))


def resumed(path):
    """Continues a run with what its file says now."""
    saved = json.loads((path / "config.json").read_text())
    cfg = RunConfig(**{**saved, "resume": str(path)})
    seen = []
    with Run(cfg, "Parabola", iterations=10, frames_per_iteration=1) as run:
        net = run.keep(policy=torch.nn.Linear(2, 1))
        run.keep(optimizer=torch.optim.Adam(net.parameters()))
        seen.extend(run)
    return seen


@pytest.mark.parametrize(("done", "asked"), [(5, 4), (9, 1)])
def test_a_run_that_has_done_more_than_is_asked_for_is_refused(tmp_path, done, asked):
    path = tmp_path / "run"
    parabola(path, iterations=done)
    before = sorted(path.rglob("*"))
    with pytest.raises(ValueError, match=rf"has done {done} iterations \({done} steps\) and is asked for {asked}\."):
        parabola(path, iterations=asked, resume=True)
    assert sorted(path.rglob("*")) == before


@pytest.mark.parametrize("lost", [[2], [0, 1, 4]])
def test_a_gap_in_the_metrics_is_said_and_a_complete_run_is_called_so(tmp_path, capsys, lost):
    path = tmp_path / "run"
    parabola(path, iterations=6)
    lines = (path / "metrics.csv").read_text().splitlines(keepends=True)
    (path / "metrics.csv").write_text("".join(lines[:1] + [line for i, line in enumerate(lines[1:]) if i not in lost]))
    cfg = RunConfig(resume=str(path), checkpoint={"interval_iterations": 3})
    for iterations, told in ((8, f"metrics.csv lacks {len(lost)} of the 6 rows so far"), (8, f"{path} is complete.")):
        with Run(cfg, "Parabola", iterations=iterations, frames_per_iteration=1) as run:
            net = run.keep(policy=torch.nn.Linear(2, 1))
            run.keep(optimizer=torch.optim.Adam(net.parameters()))
            for _ in run:
                pass
        assert told in capsys.readouterr().out


@pytest.mark.parametrize(("iterations", "done"), [(3, 3), (5, 2)])
def test_the_summary_is_a_dictionary_too(tmp_path, iterations, done):
    cfg = RunConfig(run_dir=str(tmp_path / "run"), quiet=True)
    measured = {"return_mean": 2.5, "return_std": 0.0, "return_median": 2.5, "return_min": 2.5, "return_max": 2.5}
    measured |= {"length_mean": 7.0, "episodes": 4.0}
    with contextlib.suppress(SystemExit):
        with Run(cfg, "Parabola", iterations=iterations, frames_per_iteration=8, evaluate=lambda: measured) as run:
            run.keep(net=torch.nn.Linear(1, 1))
            for iteration in run:
                if iteration + 1 == done < iterations:
                    os.kill(os.getpid(), signal.SIGTERM)
    summary = run.summary_dict()
    assert json.loads(json.dumps(summary)) == summary
    assert summary["algorithm"] == "Parabola" and summary["environment"] == cfg.env.name
    assert (summary["unit"], summary["done"], summary["total"]) == ("frames", 8 * done, 8 * iterations)
    assert summary["complete"] == (done == iterations) and summary["evaluation"] == measured
    assert summary["run_dir"] == str(tmp_path / "run") and summary["exported"] == {}
    assert summary["best_checkpoint"] == str(run.folder.checkpoints.best()) and summary["rate"] > 0
    assert f"{8 * done} of {8 * iterations}" in run.summary() and summary["best_checkpoint"] in run.summary()


@pytest.mark.parametrize("leave", ["removed", "renamed", "file"])
@pytest.mark.parametrize(("interval", "at"), [(1, 2), (100, 1), (100, 4), (3, 5), (1, 5)])
def test_a_run_directory_that_is_gone_ends_the_run_with_its_name(tmp_path, capsys, caplog, interval, at, leave):
    run_dir = tmp_path / "run"

    def main():
        cfg = RunConfig(run_dir=str(run_dir), quiet=True, checkpoint={"interval_iterations": interval})
        with Run(cfg, "Parabola", iterations=6, frames_per_iteration=1) as run:
            run.keep(net=torch.nn.Linear(1, 1))
            for iteration in run:
                run.log({"loss": 1.0, **({"late": 2.0} if iteration > 3 else {})})
                if iteration == at and leave == "removed":
                    shutil.rmtree(run_dir)
                elif iteration == at and leave == "renamed":
                    run_dir.rename(tmp_path / "elsewhere")
                elif iteration == at:
                    (run_dir / "config.json").unlink()

    with pytest.raises(SystemExit) as ended:
        run_script(main)
    assert ended.value.code == 1
    assert f"The run directory {run_dir} is gone" in capsys.readouterr().err
    assert leave == "file" or not run_dir.exists()
    assert "training goes on" not in caplog.text


@pytest.mark.parametrize("kind", [RuntimeError, OSError])
def test_a_run_directory_that_vanishes_while_it_is_saved_is_named(tmp_path, monkeypatch, kind):
    run_dir = tmp_path / "run"

    def vanish(self, *args, **kwargs):
        shutil.rmtree(run_dir)
        raise kind("Parent directory does not exist.")

    monkeypatch.setattr(StateDictFile, "save", vanish)
    with pytest.raises(FileNotFoundError, match="is gone"):
        with Run(RunConfig(run_dir=str(run_dir), quiet=True), "P", iterations=2, frames_per_iteration=1) as run:
            run.keep(net=torch.nn.Linear(1, 1))
            list(run)


def test_a_run_directory_that_vanishes_after_the_last_iteration_is_named(tmp_path):
    run_dir = tmp_path / "run"
    with pytest.raises(FileNotFoundError, match="is gone"):
        with Run(RunConfig(run_dir=str(run_dir), quiet=True), "P", iterations=2, frames_per_iteration=1) as run:
            run.keep(net=torch.nn.Linear(1, 1))
            list(run)
            shutil.rmtree(run_dir)
