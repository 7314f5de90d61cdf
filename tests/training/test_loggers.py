import builtins
import math
import sys
import time
import tracemalloc

import pytest

from edenrl.training import MetricsTable, RunLogger, read_metrics


def test_rows_columns_and_empty_cells(tmp_path):
    path = tmp_path / "metrics.csv"
    table = MetricsTable(path)
    table.write({"iteration": 0, "loss": 0.1, "return": math.nan})
    table.write({"iteration": 1, "loss": 0.2, "return": 5.0})
    table.write({"iteration": 2, "loss": 0.3, "new": 1e-7})
    assert path.read_text().splitlines() == ["iteration,loss,return,new", "0,0.1,,", "1,0.2,5,", "2,0.3,,1e-07"]
    assert read_metrics(path)[2] == {"iteration": 2.0, "loss": 0.3, "new": 1e-7}


def test_resume_drops_later_rows_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.csv"
    table = MetricsTable(path)
    for i in range(6):
        table.write({"iteration": i, "loss": i / 10})
    table.close()
    with open(path, "a") as file:
        file.write("6,0.")
    table = MetricsTable(path, first=4)
    table.write({"iteration": 4, "loss": 9.0})
    assert [(r["iteration"], r["loss"]) for r in read_metrics(path)] == [(0, 0), (1, 0.1), (2, 0.2), (3, 0.3), (4, 9.0)]


def test_columns_that_are_empty_in_every_kept_row_stay(tmp_path):
    path = tmp_path / "metrics.csv"
    table = MetricsTable(path)
    for i in range(4):
        table.write({"iteration": i, "return": math.nan if i < 3 else 1.0, "loss": 0.5})
    table.close()
    MetricsTable(path, first=2).close()
    assert path.read_text().splitlines() == ["iteration,return,loss", "0,,0.5", "1,,0.5"]


def test_floats_survive_the_file_exactly(tmp_path):
    values = [1 / 3, 1e300, -2.5e-308, 123456789.123456789]
    table = MetricsTable(tmp_path / "m.csv")
    for i, value in enumerate(values):
        table.write({"iteration": i, "x": value})
    assert [row["x"] for row in read_metrics(tmp_path / "m.csv")] == values


class Flaky:
    """Fails at each third call."""

    def __init__(self):
        self.calls, self.got = 0, []

    def log_metrics(self, metrics, step):
        self.calls += 1
        if self.calls % 3 == 0:
            raise ConnectionError("gone")
        self.got.append(step)

    def close(self):
        pass


def test_a_failing_logger_never_stops_the_run_and_is_counted(tmp_path, caplog):
    logger = RunLogger(tmp_path)
    logger.logger = Flaky()
    for i in range(9):
        logger.write(i, {"loss": 1.0})
    logger.close()
    assert logger.errors == 3 and logger.logger.got == [0, 1, 3, 4, 6, 7]
    assert [row["iteration"] for row in read_metrics(tmp_path / "metrics.csv")] == list(range(9))
    assert caplog.text.count("training goes on") == 1 and "3 call(s) to the logger failed" in caplog.text


def test_unknown_logger(tmp_path):
    with pytest.raises(ValueError, match="Unknown logger 'mlflow'; choose 'csv', 'tensorboard' or 'wandb'"):
        RunLogger(tmp_path, kind="mlflow")


def test_tensorboard_gets_every_scalar(tmp_path):
    logger = RunLogger(tmp_path, kind="tensorboard")
    logger.write(0, {"loss": 0.5, "return": math.nan})
    logger.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["loss"] and events.Scalars("loss")[0].value == 0.5


def test_tensorboard_shows_nested_settings_by_dotted_name(tmp_path, caplog):
    config = {"seed": 1, "run_dir": None, "env": {"name": "A", "kwargs": {"x": 2.5}}, "algorithm": {"hidden": [64, 32]}}
    logger = RunLogger(tmp_path, kind="tensorboard", config=config)
    logger.write(0, {"loss": 0.5})
    logger.close()
    assert logger.errors == 0 and not caplog.records
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    shown = {}
    for folder in {path.parent for path in (tmp_path / "tensorboard").rglob("events*")}:
        found = EventAccumulator(str(folder)).Reload().summary_metadata
        if "_hparams_/session_start_info" in found:
            data = HParamsPluginData.FromString(found["_hparams_/session_start_info"].plugin_data.content)
            shown = {k: getattr(v, v.WhichOneof("kind")) for k, v in data.session_start_info.hparams.items()}
    assert shown == {"seed": 1, "run_dir": "None", "env.name": "A", "env.kwargs.x": 2.5, "algorithm.hidden": "[64, 32]"}


@pytest.mark.parametrize("mode", ["online", "offline", "disabled"])
def test_wandb_without_account_or_network(tmp_path, mode, caplog, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nothing listens there
    logger = RunLogger(tmp_path, kind="wandb", wandb_mode=mode, name="t", config={"lr": 0.1})
    for i in range(3):
        logger.write(i, {"loss": i / 2})
    logger.close()
    monkeypatch.delenv("WANDB_MODE", raising=False)  # TorchRL's logger sets it
    assert len(read_metrics(tmp_path / "metrics.csv")) == 3 and logger.errors == 0
    assert caplog.text.count("logging offline") == (1 if mode == "online" else 0)
    offline_runs = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(offline_runs) == (0 if mode == "disabled" else 1)


def test_wandb_not_installed(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    real = builtins.__import__
    assert real is builtins.__import__
    logger = RunLogger(tmp_path, kind="wandb")
    logger.write(0, {"loss": 1.0})
    logger.close()
    assert caplog.text.count('pip install "edenrl[wandb]"') == 1
    assert read_metrics(tmp_path / "metrics.csv")[0]["loss"] == 1.0


@pytest.mark.parametrize("columns", [3, 40])
def test_memory_does_not_grow_with_the_iterations(tmp_path, columns):
    table = MetricsTable(tmp_path / "metrics.csv")

    def write(first, last):
        for i in range(first, last):
            table.write({"iteration": i, **{f"metric {k}": i + k / 7 for k in range(columns)}})

    write(0, 100)
    tracemalloc.start()
    write(100, 1500)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    table.write({"iteration": 1500, "new": 0.5})
    assert grown < 50_000
    rows = read_metrics(tmp_path / "metrics.csv")
    assert [row["iteration"] for row in rows] == list(range(1501)) and rows[1500]["new"] == 0.5
    assert rows[1234]["metric 2"] == 1234 + 2 / 7


def test_a_new_column_keeps_holes_and_drops_what_is_no_row(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("iteration,loss,return\r\n0,0.5,\r\n1,,2\r\nnonsense,1,1\r\n2,0.25,3\r\n3,0.1")
    table = MetricsTable(path, first=3)
    table.write({"iteration": 3, "kl": 0.125, "loss": math.nan})
    table.close()
    assert path.read_text().splitlines() == ["iteration,loss,return,kl", "0,0.5,,", "1,,2,", "2,0.25,3,", "3,,,0.125"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.csv"]


@pytest.mark.parametrize(("crash", "first", "end"), [(10, 6, 12), (4, 0, 3), (7, 7, 9), (5, 1, 5)])
def test_tensorboard_draws_the_repeated_iterations_of_a_resumed_run_once(tmp_path, crash, first, end):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for begin, stop in ((0, crash), (first, end)):
        logger = RunLogger(tmp_path, kind="tensorboard", first=begin)
        for i in range(begin, stop):
            logger.write(i, {"loss": float(i), "kl": i / 2})
        logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    for name in ("loss", "kl"):
        assert [event.step for event in events.Scalars(name)] == list(range(end))


class FakeWandbRun:
    """What ``wandb.init`` returns."""

    def __init__(self):
        self.config, self.logged = {}, []

    def log(self, payload, step=None):
        self.logged.append((step, payload))

    def finish(self):
        pass


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_resumed_run_continues_its_wandb_run(tmp_path, monkeypatch, mode):
    wandb = pytest.importorskip("wandb")
    begun, run = [], FakeWandbRun()
    monkeypatch.setattr(wandb, "init", lambda **options: begun.append(options) or run)
    monkeypatch.setenv("WANDB_MODE", mode)
    for folder in ("a", "a", "b"):
        (tmp_path / folder).mkdir(exist_ok=True)
        logger = RunLogger(tmp_path / folder, kind="wandb", wandb_mode=mode, name=folder)
        logger.write(7, {"loss": 0.5})
        logger.close()
    first, resumed, other = begun
    assert first["id"] == resumed["id"] != other["id"] and first["id"] and resumed["resume"] == "allow"
    # With wandb's own step the repeated iterations after a crash are dropped and not drawn twice.
    assert [step for step, _ in run.logged] == [7, 7, 7]


def test_a_resumed_run_continues_its_wandb_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for begin, end in ((0, 3), (2, 5)):
        logger = RunLogger(tmp_path, kind="wandb", wandb_mode="offline", name="run", first=begin)
        for i in range(begin, end):
            logger.write(i, {"loss": i / 2})
        logger.close()
        assert logger.errors == 0
        time.sleep(1.1)  # wandb names its folders by the second
    folders = sorted(path.name for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert len(folders) == 2 and len({name.rpartition("-")[2] for name in folders}) == 1
