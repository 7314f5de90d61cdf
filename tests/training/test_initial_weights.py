"""Runs that start from another run's weights, or go on from one of their own older checkpoints."""

import json
import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torchrl.checkpoint import CheckpointError

from edenrl.config import AMPConfig, RunConfig, parse_cli
from edenrl.modules import RunningNorm
from edenrl.training import Run, read_metrics
from edenrl.training.checkpoint_files import DamagedCheckpointError
from edenrl.training.initial_weights import InitialWeights


class Net(nn.Module):
    def __init__(self, inputs, width, outputs=2):
        super().__init__()
        self.norm = RunningNorm(inputs)
        self.norm.mean.normal_()
        self.norm.count.fill_(torch.randint(1, 99, ()))
        self.mlp = nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.head = spectral_norm(nn.Linear(width, outputs))


def train(path, seed, iterations=4, resume=None, best=None, **kept):
    """A run that saves every iteration; ``best`` is the step that scores highest. Returns what began."""
    where = {"resume": str(path)} if resume is not None else {"run_dir": str(path)}
    options = {"resume_checkpoint": resume} if resume is not None else {}
    options |= {name: kept.pop(name) for name in ("init_from", "init_checkpoint", "checkpoint") if name in kept}
    cfg = RunConfig(
        **where, seed=seed, quiet=True, **{"checkpoint": {"interval_iterations": 1, "keep_last": 9}, **options}
    )
    score = iter(range(1, 99))

    def evaluate():
        step = run.iteration
        return {"return_mean": 100.0 if step == best else float(next(score))}

    with Run(cfg, "Line", iterations=iterations, frames_per_iteration=1, evaluate=evaluate) as run:
        networks = {name: network() for name, network in kept.items()}
        run.keep(**networks)
        run.began = {name: {k: v.clone() for k, v in net.state_dict().items()} for name, net in networks.items()}
        for iteration in run:
            for network in networks.values():
                for parameter in network.parameters():
                    parameter.data.add_(1.0)
            run.log({"value": iteration + 100 * seed})
    run.ended = {name: net.state_dict() for name, net in networks.items()}
    return run


@pytest.mark.parametrize(("inputs", "width", "seed"), [(3, 5, 4), (1, 1, 9), (17, 32, 23)])
def test_networks_begin_with_the_statistics_and_weights_of_the_other_run(tmp_path, inputs, width, seed):
    nets = dict(policy=lambda: Net(inputs, width), critic=lambda: Net(inputs, width, 1))
    first = train(tmp_path / "first", seed, **nets)
    second = train(tmp_path / "second", seed + 1, init_from=str(tmp_path / "first"), init_checkpoint="latest", **nets)
    for name in nets:
        for key, value in first.ended[name].items():
            torch.testing.assert_close(second.began[name][key], value, rtol=0, atol=0)
    assert second.initial.report().count("all of it was taken") == 2


def test_the_best_is_taken_and_the_newest_where_none_was_scored(tmp_path):
    net = dict(policy=lambda: nn.Linear(1, 1))
    train(tmp_path / "first", 1, best=2, **net)
    for which, step in (("best", 2), ("latest", 4), ("checkpoint-000000000003", 3)):
        run = train(tmp_path / which, 2, 1, init_from=str(tmp_path / "first"), **net, init_checkpoint=which)
        assert run.initial.path.name == f"checkpoint-{step:012d}"
    assert json.loads((tmp_path / "best" / "config.json").read_text())["init_from"] == str(tmp_path / "first")


@pytest.mark.parametrize(("inputs", "width", "outputs"), [(4, 5, 2), (3, 6, 2), (3, 5, 7), (9, 5, 1)])
def test_layers_of_another_shape_are_left_out_whole_and_named_with_both(tmp_path, inputs, width, outputs):
    train(tmp_path / "first", 3, policy=lambda: Net(3, 5))
    torch.manual_seed(11)
    fresh = Net(inputs, width, outputs).state_dict()

    def seeded():
        torch.manual_seed(11)
        return Net(inputs, width, outputs)

    fits = {
        "norm": inputs == 3,
        "mlp.0": inputs == 3 and width == 5,
        "mlp.2": width == 5,
        "head": width == 5 and outputs == 2,
    }
    where = dict(init_from=str(tmp_path / "first"), init_checkpoint="latest")
    if not any(fits.values()):
        pytest.skip("nothing fits")
    run = train(tmp_path / "second", 4, **where, policy=seeded)
    saved = train(tmp_path / "copy", 4, **where, policy=lambda: Net(3, 5)).began["policy"]
    for layer, fitting in fits.items():
        for key, value in run.began["policy"].items():
            if key.startswith(f"{layer}."):
                torch.testing.assert_close(value, saved[key] if fitting else fresh[key], rtol=0, atol=0)
    report = run.initial.report()
    if inputs != 3:
        assert f"norm.mean (({inputs},) here, (3,) there)" in report
    if not fits["mlp.0"]:
        assert f"mlp.0.weight (({width}, {inputs}) here, (5, 3) there)" in report


def test_a_component_that_is_not_there_stays_new_and_is_named(tmp_path):
    train(tmp_path / "first", 3, policy=lambda: Net(3, 5))
    run = train(
        tmp_path / "second", 4, init_from=str(tmp_path / "first"), policy=lambda: Net(3, 5), critic=lambda: Net(3, 5)
    )
    assert "critic: nothing was taken; new are norm, mlp.0, mlp.2, head (not there)" in run.initial.report()


def test_the_same_layers_in_another_wrapper_are_found(tmp_path):
    class Inner(nn.Module):
        def __init__(self, **parts):
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)

    def plain():
        return Inner(module=nn.Sequential(Inner(module=Net(3, 5))))

    def nested():
        return Inner(module=nn.Sequential(Inner(module=Inner(actor=Net(3, 5), estimator=nn.Linear(2, 2)))))

    first = train(tmp_path / "first", 3, policy=plain)
    second = train(tmp_path / "second", 4, init_from=str(tmp_path / "first"), init_checkpoint="latest", policy=nested)
    for key, value in first.ended["policy"].items():
        assert torch.equal(second.began["policy"][key.replace("0.module.", "0.module.actor.")], value)
    assert "new are estimator (not there)" in second.initial.report()


def test_what_is_not_trained_is_not_taken(tmp_path):
    def frozen():
        return nn.Linear(2, 2).requires_grad_(False)

    first = train(tmp_path / "first", 3, policy=lambda: nn.Linear(2, 2), reference=frozen)
    run = train(
        tmp_path / "second", 4, init_from=str(tmp_path / "first"), policy=lambda: nn.Linear(2, 2), reference=frozen
    )
    assert not torch.equal(run.began["reference"]["weight"], first.ended["reference"]["weight"])
    assert "reference" not in run.initial.report()


def test_nothing_in_common_is_an_error_that_names_both_and_leaves_no_run(tmp_path):
    train(tmp_path / "first", 3, policy=lambda: nn.Linear(2, 2))
    with pytest.raises(
        CheckpointError, match=r"No weights of .*first.*\(Line\) fit.*policy: bias, weight.*needs is critic"
    ):
        train(tmp_path / "second", 4, init_from=str(tmp_path / "first"), critic=lambda: nn.Linear(2, 2))
    assert not (tmp_path / "second").exists()


def test_a_resumed_run_has_its_own_weights(tmp_path):
    net = dict(policy=lambda: nn.Linear(1, 1))
    train(tmp_path / "first", 3, **net)
    train(tmp_path / "second", 4, 2, init_from=str(tmp_path / "first"), **net)
    where = {"init_from": str(tmp_path / "first")}
    (tmp_path / "first").rename(tmp_path / "gone")  # the other run is not needed any more
    assert train(tmp_path / "second", 4, 3, resume="latest", **where, **net).initial is None


@pytest.mark.parametrize("seed", [2, 8])
def test_damaged_checkpoints_are_refused_with_the_intact_ones(tmp_path, seed):
    net = dict(policy=lambda: nn.Linear(3, 1))
    train(tmp_path / "first", seed, **net)
    newest = tmp_path / "first" / "checkpoints" / "checkpoint-000000000004"
    file = next((newest / "components").glob("*policy")) / "state.tdc"
    content = bytearray(file.read_bytes())
    content[seed] ^= 1
    file.write_bytes(content)
    for which in ("latest", newest.name):
        with pytest.raises(DamagedCheckpointError, match=r"state.tdc is damaged.*Intact are: \S+03, \S+02, \S+01"):
            train(tmp_path / "second", 4, init_from=str(tmp_path / "first"), init_checkpoint=which, **net)
        assert not (tmp_path / "second").exists()
    (newest / "manifest.json").write_text("{")
    with pytest.raises(DamagedCheckpointError, match=r"manifest.json is damaged.*Intact are"):
        InitialWeights(str(tmp_path / "first"), newest.name)


def test_names_and_directories_that_are_not_there(tmp_path):
    train(tmp_path / "first", 1, 2, policy=lambda: nn.Linear(1, 1))
    first, checkpoints = str(tmp_path / "first"), tmp_path / "first" / "checkpoints"
    there = r"which holds checkpoint-000000000001, checkpoint-000000000002"
    with pytest.raises(FileNotFoundError, match=there):
        InitialWeights(first, "checkpoint-000000000007")
    for wrong, expected in (
        (tmp_path / "none", "no such directory"),
        (tmp_path, "not a run directory"),
        (checkpoints / "checkpoint-000000000001", f"give the run, {first}, and the checkpoint by its name"),
        (checkpoints, f"give the run, {first}, and the checkpoint by its name"),
    ):
        with pytest.raises(FileNotFoundError, match=re.escape(expected)):
            InitialWeights(str(wrong))
    with pytest.raises(FileNotFoundError, match=there):
        train(tmp_path / "first", 1, 5, resume="checkpoint-000000000007", policy=lambda: nn.Linear(1, 1))
    with pytest.raises(ValueError, match="is a file; give the path of a directory"):
        RunConfig(init_from=f"{first}/config.json")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--resume={run}", "--init_from={run}"], "give --resume or --init_from, not both"),
        (["--resume={run}/checkpoints/checkpoint-000000000001"], "--resume_checkpoint checkpoint-000000000001"),
        (["--resume_checkpoint=best"], "set resume"),
        (["--init_checkpoint=latest"], "set init_from"),
        (["--init_from={run}/config.json"], "is a file"),
    ],
)
def test_flags_that_do_not_go_together(tmp_path, capsys, flags, expected):
    train(tmp_path / "run", 1, 1, policy=lambda: nn.Linear(1, 1))
    with pytest.raises(SystemExit):
        parse_cli(RunConfig, [flag.format(run=tmp_path / "run") for flag in flags])
    assert expected in " ".join(capsys.readouterr().err.split())


def test_help_shows_the_common_flag_and_help_all_every_one(capsys):
    for kind, names in (
        ("--help", ["init_from"]),
        ("--help=all", ["init_from", "init_checkpoint", "resume_checkpoint"]),
    ):
        with pytest.raises(SystemExit):
            parse_cli(RunConfig, [kind])
        shown = capsys.readouterr().out
        assert all(f"--{name}" in shown for name in names)


def test_runs_of_amp_from_before_init_from_are_still_read():
    assert AMPConfig.model_validate({"warm_start": None, "num_frames": 3}).num_frames == 3
    with pytest.raises(ValueError, match="valid dictionary"):
        AMPConfig.model_validate(3)


def saved_steps(path):
    return sorted(int(folder.name[-4:]) for folder in (path / "checkpoints").glob("checkpoint-*"))


@pytest.mark.parametrize(("which", "step"), [("checkpoint-000000000002", 2), ("best", 3), ("latest", 6)])
@pytest.mark.parametrize("keep_last", [1, 3])
def test_a_run_goes_on_from_the_checkpoint_that_is_named(tmp_path, which, step, keep_last, capsys):
    net = dict(policy=lambda: nn.Linear(1, 1))
    path, few = tmp_path / "run", {"interval_iterations": 1, "keep_last": keep_last}
    train(path, 1, 6, best=3, **net)
    run = train(path, 1, 8, resume=which, checkpoint=few, **net)
    table = read_metrics(path / "metrics.csv")
    assert [row["iteration"] for row in table] == list(range(8)) and run.iteration == 8
    kept = set(saved_steps(path))
    assert set(range(9 - keep_last, 9)) <= kept and kept <= {3, 6, 7, 8}
    assert json.loads((path / "config.json").read_text())["resume_checkpoint"] == "latest"


def test_later_checkpoints_stay_until_the_run_has_saved_one_of_its_own(tmp_path):
    net = dict(policy=lambda: nn.Linear(1, 1))
    path = tmp_path / "run"
    train(path, 1, 6, **net)
    cfg = RunConfig(resume=str(path), seed=1, resume_checkpoint="checkpoint-000000000002")
    with Run(cfg, "Line", iterations=7, frames_per_iteration=1, evaluate=lambda: {"return_mean": 0.0}) as run:
        run.keep(policy=nn.Linear(1, 1))
        run.begin()
        assert run.iteration == 2 and saved_steps(path) == [1, 2, 3, 4, 5, 6]
        run.folder.save(3, None)
        assert saved_steps(path) == [2, 3] or saved_steps(path) == [1, 2, 3]


@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_newer_damaged_checkpoint_does_not_push_out_the_next_ones(tmp_path, keep_last):
    net = dict(policy=lambda: nn.Linear(1, 1))
    path, few = tmp_path / "run", {"interval_iterations": 1, "keep_last": keep_last}
    train(path, 1, 6, **net)
    for step in (5, 6):
        file = next((path / "checkpoints" / f"checkpoint-{step:012d}" / "components").glob("*policy")) / "state.tdc"
        file.write_bytes(b"")
    cfg = RunConfig(resume=str(path), seed=1, checkpoint=few, quiet=True)
    with pytest.warns(UserWarning, match="newest intact one"):
        with Run(cfg, "Line", iterations=9, frames_per_iteration=1, evaluate=lambda: {"return_mean": 0.0}) as run:
            run.keep(**{name: make() for name, make in net.items()})
            run.begin()
            assert run.iteration == 4
            run.folder.save(5, None)
            assert 5 in saved_steps(path) and 6 not in saved_steps(path)


def test_a_named_checkpoint_that_is_damaged_or_of_another_run_is_refused(tmp_path):
    net = dict(policy=lambda: nn.Linear(1, 1))
    for name in ("run", "other"):
        train(tmp_path / name, 1, 3, **net)
    folder = tmp_path / "run" / "checkpoints"
    with pytest.raises(CheckpointError, match="is no checkpoint of this run.*--init_from"):
        train(tmp_path / "other", 1, 5, resume=str(folder / "checkpoint-000000000002"), **net)
    next(folder.glob("*2/components/*policy/state.tdc")).write_bytes(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DamagedCheckpointError, match=r"state.tdc is damaged.*Intact are: \S+3, \S+1\."):
            train(tmp_path / "run", 1, 5, resume="checkpoint-000000000002", **net)
    assert saved_steps(tmp_path / "run") == [1, 2, 3] and not (tmp_path / "run" / "error.txt").exists()
