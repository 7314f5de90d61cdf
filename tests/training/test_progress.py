"""Progress is for whoever reads it; nobody who stops reading ends a run."""

import json
import os
import subprocess
import sys

import pytest

from edenrl.training import Progress, format_table

SCRIPT = """
import sys, time
from pathlib import Path
from edenrl.training import progress
progress._SECONDS_PER_LINE = 0.0
bar = progress.Progress(Path(sys.argv[1]) / "progress.json", 1000)
for step in range(1, 1001):
    bar.update(step, {"episode/return": float(step)})
bar.say("a last word")
progress.print_line("the table")
bar.close("complete")
"""


def test_a_table_is_aligned():
    assert format_table({"a": 1, "longer": 2}, "title") == "title\n-----\na       1\nlonger  2"


def test_a_reader_that_leaves_ends_nothing(tmp_path):
    command = f"{sys.executable} -c '{SCRIPT}' {tmp_path} | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("1 / 1,000 frames")
    assert json.loads((tmp_path / "progress.json").read_text())["state"] == "complete"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_behind_the_output_ends_nothing(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "progress.json").read_text())["step"] == 1000


def test_a_file_that_cannot_be_written_is_told_once(tmp_path, caplog):
    bar = Progress(tmp_path / "gone" / "progress.json", 10, quiet=True)
    bar.write("running")
    bar.write("running")
    assert len(caplog.records) == 1 and "training goes on" in caplog.text


def lines_of(tmp_path, capsys, rows, monkeypatch, **kwargs):
    monkeypatch.setattr("edenrl.training.progress._SECONDS_PER_LINE", 0.0)
    shown = {"episode/return": "return", "episode/success_rate": "success", "eval/return_mean": "evaluated"}
    bar = Progress(tmp_path / "progress.json", 1000, shown=shown, **kwargs)
    for step, row in enumerate(rows, 1):
        bar.update(step, row)
    bar.close("complete")
    return capsys.readouterr().out.splitlines()


def episodes(count, value, **other):
    return {"episode/count": float(count), "episode/return": value, **other}


@pytest.mark.parametrize("size", [1, 7, 60])
def test_returns_are_means_over_the_last_hundred_finished_episodes_with_their_number(
    tmp_path, capsys, monkeypatch, size
):
    values = [float(i * i % 17) for i in range(150)]
    lines = lines_of(tmp_path, capsys, [episodes(size, value) for value in values], monkeypatch)
    for i in (0, 1, 50, 149):
        iterations = min(i + 1, -(-100 // size))  # as few as finished a hundred together
        recent = values[: i + 1][-iterations:]
        assert f"return {sum(recent) / len(recent):.4g} (last {size * iterations} episodes)" in lines[i]


def test_iterations_weigh_as_many_episodes_as_they_finished_and_those_without_any_leave_no_gap(
    tmp_path, capsys, monkeypatch
):
    nothing = episodes(0, float("nan"))
    rows = [nothing, episodes(2, 53.5), nothing, episodes(30, -69.0), episodes(256, -70.0), nothing]
    lines = lines_of(tmp_path, capsys, rows, monkeypatch)
    assert "return" not in lines[0]
    assert lines[1].endswith("return 53.5 (last 2 episodes)") and lines[2].endswith("return 53.5 (last 2 episodes)")
    assert f"return {(2 * 53.5 - 30 * 69.0) / 32:.4g} (last 32 episodes)" in lines[3]
    assert "return -70 (last 256 episodes)" in lines[4] and "return -70 (last 256 episodes)" in lines[5]


def test_a_metric_that_some_iterations_lack_is_averaged_over_the_others(tmp_path, capsys, monkeypatch):
    rows = [episodes(10, 1.0, **{"episode/success_rate": float("nan")}), episodes(30, 5.0)]
    rows += [episodes(10, 1.0, **{"episode/success_rate": 0.5})]
    lines = lines_of(tmp_path, capsys, rows, monkeypatch)
    assert "success" not in lines[1] and "return 3.4, success 0.5 (last 50 episodes)" in lines[2]


def test_lines_show_loss_kl_and_learning_rate(tmp_path, capsys, monkeypatch):
    row = episodes(3, 2.0, loss=0.25, kl=0.0123456, lr=3e-4, **{"eval/return_mean": 7.0})
    (line,) = lines_of(tmp_path, capsys, [row], monkeypatch)
    assert line.endswith("return 2 (last 3 episodes), evaluated 7, loss 0.25, KL 0.01235, lr 0.0003")
