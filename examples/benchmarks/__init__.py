"""The cases of ``examples/benchmark.py``, by name. Each takes the settings and yields rows of the table."""

from collections.abc import Callable, Iterator

from benchmarks import algorithms, flashsac, halfcheetah, memory, on_policy, simulation, start
from benchmarks.measuring import Row, Settings

CASES: dict[str, Callable[[Settings], Iterator[Row]]] = {
    "ppo": on_policy.iteration,
    "collection": on_policy.collection,
    "gae": on_policy.advantages,
    "algorithms": algorithms.iterations,
    "flashsac": flashsac.update,
    "replay": flashsac.replay,
    "apg": simulation.apg,
    "quadruped": simulation.quadruped,
    "depth": simulation.depth,
    "import": start.import_time,
    "halfcheetah": halfcheetah.training,
    "memory": memory.peak,
}
