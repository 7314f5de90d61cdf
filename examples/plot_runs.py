"""Draw the curves of one or several runs into a PNG: python examples/plot_runs.py RUN [RUN...] [--output runs.png]."""

import argparse
import math
from pathlib import Path

import numpy as np

from edenrl.training import read_metrics, run_script

PANELS = [
    ("return", [("episode/return", "-"), ("eval/return_mean", "o")]),
    ("success rate", [("episode/success_rate", "-"), ("eval/success_rate", "o")]),
    ("episode length", [("episode/length", "-")]),
    ("policy loss", [("loss_objective", "-")]),
    ("value loss", [("loss_critic", "-")]),
    ("explained variance", [("explained_variance", "-")]),
    ("entropy", [("entropy", "-")]),
    ("KL per update", [("kl", "-")]),
    ("learning rate", [("lr", "-")]),
    ("tracking error, m/s", [("episode/velocity_error", "-"), ("eval/velocity_error", "o")]),
    ("velocity estimate: error / deviation", [("fresh/velocity_error_relative", "-")]),
    ("mirror asymmetry of the actor", [("equivariance_error", "-")]),
    ("style reward", [("style_reward", "-")]),
    ("discriminator: expert, policy", [("d_expert", "-"), ("d_policy", "-")]),
    ("distance to the clips", [("motion_distance", "-")]),
]


def column(rows, name):
    """Frames and values of the rows that have the metric."""
    pairs = [(row["frames"], row[name]) for row in rows if name in row]
    return np.array(pairs).reshape(-1, 2).T


def smooth(values, width):
    """Centred moving average."""
    if width < 2 or len(values) < 2 * width:
        return values
    padded = np.pad(values, (width // 2, width - 1 - width // 2), mode="edge")
    return np.convolve(padded, np.ones(width) / width, mode="valid")


def short_names(paths):
    """The shortest ending of each path that no other path has."""
    names = {}
    for path in paths:
        others = [other.parts for other in paths if other != path]
        sizes = range(1, len(path.parts) + 1)
        size = next(n for n in sizes if all(parts[-n:] != path.parts[-n:] for parts in others))
        names[path] = str(Path(*path.parts[-size:]))
    return names


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories")
    parser.add_argument("--output", default="runs.png", help="picture to write (default runs.png)")
    args = parser.parse_args(argv)
    try:
        import matplotlib
    except ImportError:
        raise ImportError('Plotting needs matplotlib: pip install "edenrl[plot]"') from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter, MaxNLocator

    runs = {}
    for run, name in short_names([Path(run).expanduser().resolve() for run in args.runs]).items():
        if not (run / "metrics.csv").exists():
            raise FileNotFoundError(f"{run} has no metrics.csv: it is no run directory, or its run has not started.")
        runs[name] = read_metrics(run / "metrics.csv")
    names = {name for rows in runs.values() for row in rows for name in row}
    panels = [(title, [s for s in series if s[0] in names]) for title, series in PANELS]
    panels = [(title, series) for title, series in panels if series]
    if not panels:
        raise ValueError(f"No metric to draw in {', '.join(args.runs)}: the runs have not finished an iteration.")
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    size = (5 * columns, 3.2 * rows)
    figure, axes = plt.subplots(rows, columns, squeeze=False, constrained_layout=True, figsize=size)
    for axis, (title, series) in zip(axes.flat, panels, strict=False):
        for color, (run, table) in enumerate(runs.items()):
            for name, style in series:
                frames, values = column(table, name)
                if style == "-":
                    axis.plot(frames, values, color=f"C{color}", alpha=0.25, linewidth=0.8)
                    axis.plot(frames, smooth(values, len(values) // 25), color=f"C{color}", label=run)
                else:
                    axis.plot(frames, values, style, color=f"C{color}", markersize=4, label=f"{run} evaluated")
        axis.set_title(title)
        axis.grid(alpha=0.3)
        if title == "learning rate":
            axis.set_yscale("log")
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    for axis in axes.flat:
        axis.set_xlabel("frames")
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))  # 500k, 1M: long numbers would run into each other
    axes.flat[0].legend(fontsize="small")
    figure.savefig(Path(args.output).expanduser(), dpi=110)
    print(f"Wrote {args.output}")


if __name__ == "__main__":
    run_script(main)
