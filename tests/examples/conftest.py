"""What the tests of the scripts share."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from trainer_cases import Script


@pytest.fixture
def refuses(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``refuses(script, flags, expected)``: the script ends with a message that holds this, and leaves no run."""
    monkeypatch.chdir(tmp_path)

    def check(script: Script, flags: Sequence[str], expected: str) -> None:
        # A long message is wrapped at the width of the terminal.
        assert expected in " ".join(script.refused(capsys, *flags).split())
        assert not list(tmp_path.rglob("checkpoints"))

    return check
