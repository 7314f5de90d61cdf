"""Draw the curves of one or several runs into a PNG: python examples/plot_runs.py RUN [RUN...] [--output runs.png]."""

import argparse
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

    runs = {}
    for run in args.runs:
        path = Path(run) / "metrics.csv"
        if not path.exists():
            raise FileNotFoundError(f"{run} has no metrics.csv: it is not a run directory, or has not begun.")
        runs[Path(run).name or run] = read_metrics(path)
    names = {name for rows in runs.values() for row in rows for name in row}
    panels = [(title, [s for s in series if s[0] in names]) for title, series in PANELS]
    panels = [(title, series) for title, series in panels if series]
    if not panels:
        raise ValueError(f"No metric to draw in {', '.join(args.runs)}: the runs have not finished an iteration.")
    columns = min(3, len(panels))
    figure, axes = plt.subplots(
        -(-len(panels) // columns), columns, squeeze=False, constrained_layout=True,
        figsize=(5 * columns, 3.2 * -(-len(panels) // columns)),
    )  # fmt: skip
    for axis, (title, series) in zip(axes.flat, panels, strict=False):
        for color, (run, rows) in enumerate(runs.items()):
            for name, style in series:
                frames, values = column(rows, name)
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
    axes.flat[0].legend(fontsize="small")
    figure.savefig(args.output, dpi=110)
    print(f"Wrote {args.output}")


if __name__ == "__main__":
    run_script(main)
