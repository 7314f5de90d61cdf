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
