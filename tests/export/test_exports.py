"""Exported policies of every kind, run by other runtimes and by a process that has no torch."""

import json
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

import edenrl.export.runtime
from edenrl.export import PolicySpec, load_policy

KINDS = ("mlp", "squash", "discrete", "simba", "gru", "lstm")
STATES = {"gru": ["h"], "lstm": ["h", "c"]}


def play(entry, steps, rows):
    """Observations, deterministic actions and episode starts of the TensorDict policy, ``[T, rows, ...]``."""
    env, policy = entry.playing(rows)
    key = policy.in_keys[0] if "observation" not in policy.in_keys else "observation"
    observations, actions, began = [], [], []
    td, starts = env.reset(), torch.ones(rows, dtype=torch.bool)
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        for _ in range(steps):
            td = policy(td)
            observations.append(td[key].numpy().copy())
            actions.append(td["action"].numpy().copy())
            began.append(starts.numpy().copy())
            stepped, td = env.step_and_maybe_reset(td)
            starts = stepped["next", "done"].flatten()
    assert np.stack(began)[1:].any() and not np.stack(began)[1:].all(), "episodes should end in between"
    return np.stack(observations), np.stack(actions), np.stack(began)


WITHOUT_TORCH = """
import importlib.abc, json, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "torchrl", "tensordict", "pydantic", "gymnasium", "onnx"}:
            raise ImportError(f"{name} is not on this machine")

sys.meta_path.insert(0, Blocked())
import numpy as np
from edenrl.export import load_policy

worst = {}
for kind, folder in json.loads(sys.argv[1]).items():
    data = np.load(f"{folder}/replay.npz")
    policy = load_policy(folder)
    worst[kind] = 0.0
    for obs, expected, began in zip(data["observations"], data["actions"], data["began"]):
        policy.reset(began)
        worst[kind] = max(worst[kind], float(abs(policy(obs).astype(float) - expected).max()))
assert "torch" not in sys.modules and "pydantic" not in sys.modules
print(json.dumps(worst))
"""


def test_a_machine_without_torch_replays_two_hundred_steps(exported, tmp_path, capsys):
    folders = {}
    for kind, entry in exported.items():
        observations, actions, began = play(entry, 200, rows=3)
        folders[kind] = tmp_path / kind
        folders[kind].mkdir()
        for name in ("policy_spec.json", "policy.onnx"):  # as copied to a robot
            (folders[kind] / name).write_bytes((entry.folder / name).read_bytes())
        np.savez(folders[kind] / "replay.npz", observations=observations, actions=actions, began=began)
    argument = json.dumps({kind: str(folder) for kind, folder in folders.items()})
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, argument], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    worst = json.loads(done.stdout)
    with capsys.disabled():
        print(f"\n200 steps in onnxruntime, largest deviation: {worst}")
    assert set(worst) == set(KINDS) and max(worst.values()) < 1e-4 and worst["discrete"] == 0


def test_the_runtime_file_works_alone(exported, tmp_path):
    """Copied beside a robot's own code, without the package."""
    source = edenrl.export.runtime.__file__
    (tmp_path / "runtime.py").write_bytes(open(source, "rb").read())
    code = (
        "import sys; from runtime import load_policy; import numpy as np;"
        f"print(load_policy({str(exported['mlp'].folder)!r})(np.ones(14)).tolist());"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('edenrl', 'torch')]"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(json.loads(done.stdout), load_policy(exported["mlp"].folder)(np.ones(14)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_onnx_graph_is_what_its_spec_says(exported, kind):
    entry = exported[kind]
    model = onnx.load(entry.files["onnx"])
    onnx.checker.check_model(model, full_check=True)
    states = STATES.get(kind, [])
    assert [i.name for i in model.graph.input] == ["obs", *(f"{s}_in" for s in states)]
    assert [o.name for o in model.graph.output] == ["actions", *(f"{s}_out" for s in states)]
    assert [o.version for o in model.opset_import if o.domain == ""] == [18]
    operators = {node.op_type for node in model.graph.node}
    assert not {op for op in operators if op.startswith("Random") or op in ("Dropout", "Bernoulli", "Multinomial")}
    assert not [tensor for tensor in model.graph.initializer if tensor.external_data]
    spec = PolicySpec.model_validate_json((entry.folder / "policy_spec.json").read_text())
    assert [t.name for t in spec.model.inputs] == [i.name for i in model.graph.input]
    for tensor in spec.model.inputs[1:]:
        assert tensor.shape == [2, "batch", 16]  # layers, batch, hidden
    assert spec.model.normalization == "in the graph"
    assert spec.provenance.task == f"test-{kind}" and set(spec.model.verification.max_deviation) == {
        "onnx",
        "jit",
        "pt2",
    }
    text = (entry.folder / "policy_spec.json").read_text()
    assert "NaN" not in text and "Infinity" not in text and str(entry.folder.parent) not in text


def eager(entry, obs, states):
    """The TensorDict policy on given observations and states ``(layers, batch, hidden)``."""
    names = ["h", "c"][: len(states)]
    td = TensorDict({"observation": obs, "is_init": torch.zeros(len(obs), 1, dtype=torch.bool)}, batch_size=[len(obs)])
    td.update({name: state.transpose(0, 1) for name, state in zip(names, states, strict=True)})
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        td = entry.policy.eval()(td)
    return td["action"], [td["next", name].transpose(0, 1) for name in names]


@pytest.mark.parametrize("batch", [1, 7, 4096])
@pytest.mark.parametrize("kind", KINDS)
def test_any_batch_size(exported, kind, batch):
    entry = exported[kind]
    width = 4 if kind == "discrete" else 14
    obs = 5 + 3 * torch.randn(batch, width)
    states = [torch.randn(2, batch, 16) for _ in STATES.get(kind, [])]
    expected, expected_states = eager(entry, obs, states)
    session = onnxruntime.InferenceSession(entry.files["onnx"], providers=["CPUExecutionProvider"])
    names = [f"{s}_in" for s in STATES.get(kind, [])]
    got = session.run(None, {"obs": obs.numpy(), **{n: s.numpy() for n, s in zip(names, states, strict=True)}})
    program = torch.export.load(entry.files["pt2"]).module()(obs, *states)
    for result in (map(torch.from_numpy, got), program if states else (program,)):
        for value, reference in zip(result, [expected, *expected_states], strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-5)
    if not states:
        torch.testing.assert_close(torch.jit.load(str(entry.files["jit"]))(obs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_recurrent_torchscript_keeps_its_state_and_resets(exported, kind):
    entry = exported[kind]
    script = torch.jit.load(str(entry.files["jit"]))
    states = [torch.zeros(2, 3, 16) for _ in STATES[kind]]
    for step in range(50):
        if step == 25:
            script.reset()
            states = [torch.zeros_like(state) for state in states]
        obs = 5 + 3 * torch.randn(3, 14)
        expected, states = eager(entry, obs, states)
        torch.testing.assert_close(script(obs), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(Exception, match="call reset"):
        script(torch.zeros(4, 14))
    script.reset()
    assert script(torch.zeros(4, 14)).shape == (4, 2)
    fresh = torch.jit.load(str(entry.files["jit"]))
    script.reset()
    torch.testing.assert_close(script(torch.zeros(1, 14)), fresh(torch.zeros(1, 14)))


def test_export_leaves_the_policy_alone(exported):
    entry = exported["gru"]
    before = {name: value.clone() for name, value in entry.policy.state_dict().items()}
    entry.policy.train()
    from edenrl.export import export_policy

    export_policy(entry.policy, entry.make(), entry.folder.with_name("again"), formats=["jit"])
    assert all(part.training for part in entry.policy.modules())
    assert all(parameter.requires_grad for parameter in entry.policy.parameters())
    for name, value in entry.policy.state_dict().items():
        assert torch.equal(value, before[name])


def test_loading_reads_rows_groups_and_single_observations(exported):
    policy = load_policy(exported["lstm"].folder)
    obs = np.random.default_rng(0).normal(5, 3, (2, 14)).astype(np.float32)
    first = policy(obs)
    assert first.shape == (2, 2) and first.dtype == np.float32
    second = policy({"observation": obs})
    assert abs(second - first).max() > 1e-4, "the state should matter"
    policy.reset([1])  # the second row begins anew, the first goes on
    third = policy(obs)
    np.testing.assert_allclose(third[1], first[1], atol=1e-6)
    assert abs(third[0] - first[0]).max() > 1e-4
    policy.reset(np.array([True, True]))
    np.testing.assert_allclose(policy(obs), first, atol=1e-6)
    with pytest.raises(ValueError, match=r"1 observations were given .* 2 rows\. Call reset"):
        policy(obs[0])
    policy.reset()
    alone = policy(obs[0])
    assert alone.shape == (2,)
    np.testing.assert_allclose(alone, first[0], atol=1e-6)
    with pytest.raises(
        ValueError, match=r"shape \(2, 13\); expected \[14\] or \[batch, 14\], made of {'observation': 14}"
    ):
        policy(obs[:, 1:])
    with pytest.raises(KeyError, match="were not given"):
        policy({"policy": obs})
    with pytest.raises(ValueError, match=r"widths \[13\]; the policy was exported with \[14\]"):
        policy({"observation": obs[:, 1:]})
    latency = policy.latency(calls=50)
    assert 0 < latency["p50"] <= latency["p99"] and policy.state == {}


def broken(folder, tmp_path, change):
    """A copy of an export with its spec changed."""
    for name in ("policy_spec.json", "policy.onnx"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    spec = json.loads((tmp_path / "policy_spec.json").read_text())
    change(spec)
    (tmp_path / "policy_spec.json").write_text(json.dumps(spec))
    return tmp_path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["model"]["files"][0].update(sha256="0" * 64), r"policy\.onnx and policy_spec\.json do not belong"),
        (lambda s: s.update(schema_version=2), "schema_version 2; this loader reads 1"),
        (lambda s: s.pop("schema_version"), "is not a policy spec"),
        (lambda s: s["model"]["files"].pop(0), r"was exported as \['jit', 'pt2'\] only"),
        (
            lambda s: s["model"]["inputs"][0].update(shape=["batch", 13]),
            "The graph's inputs are .*14.* the spec says .*13",
        ),
    ],
)
def test_a_spec_that_does_not_fit_is_refused(exported, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        load_policy(broken(exported["mlp"].folder, tmp_path, change))


def test_a_graph_that_does_not_fit_is_refused(exported, tmp_path):
    folder = broken(exported["mlp"].folder, tmp_path, lambda spec: None)
    load_policy(folder)
    content = (folder / "policy.onnx").read_bytes()
    (folder / "policy.onnx").write_bytes(content[:-1] + b"x")
    with pytest.raises(ValueError, match="sha256 is .* the spec says"):
        load_policy(folder)
    (folder / "policy.onnx").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks policy\.onnx, which policy_spec\.json names"):
        load_policy(folder)
    (folder / "policy_spec.json").write_text("{")
    with pytest.raises(ValueError, match="is not a policy spec"):
        load_policy(folder)


def test_one_observation_is_judged_at_a_time(exported):
    policy = load_policy(exported["mlp"].folder)
    (key,) = policy.groups
    row = np.full(policy.width, 1e4, np.float32)
    assert policy.unusual({key: row}) == policy.unusual(row) != {}
    with pytest.raises(ValueError, match=r"One observation \[14\] can be judged at a time"):
        policy.unusual(row[None])


def test_without_onnxruntime_loading_says_what_to_install(exported, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match="pip install onnxruntime"):
        load_policy(exported["mlp"].folder)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise ImportError('libonnx.so: cannot open')", "ImportError: libonnx.so: cannot open"),
        ("raise OSError('bad ELF')", "OSError: bad ELF"),
        ("import no_such_package_of_its_own", "ModuleNotFoundError: No module named 'no_such_package_of_its_own'"),
    ],
)
def test_an_onnxruntime_that_cannot_be_imported_is_not_called_missing(exported, monkeypatch, tmp_path, source, message):
    (tmp_path / "onnxruntime.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
    with pytest.raises(ImportError, match="installed but cannot be imported") as caught:
        load_policy(exported["mlp"].folder)
    assert message in str(caught.value)
