"""How long an import takes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.measuring import Row, Settings, alternate, in_process, make_row, seconds

# `import edenrl` alone loads no networks and no torch; a training script imports these.
EVERYTHING = "edenrl.training, edenrl.objectives, edenrl.collectors"


def import_time(settings: Settings) -> Iterator[Row]:
    """Seconds of new processes that import one thing each."""
    names = ("edenrl", EVERYTHING, "torchrl")
    cases = {name: seconds(partial(in_process, f"import {name}")) for name in names}
    times = alternate(cases, settings.repeats)
    milliseconds = {name: [1e3 * value for value in values] for name, values in times.items()}
    for name, work in (
        ("edenrl", "Python and import edenrl"),
        (EVERYTHING, "Python and training, objectives, collectors"),
    ):
        yield make_row("import", work, "ms", milliseconds[name], "torchrl", milliseconds["torchrl"], better="lower")
