"""Measure our speed and memory beside other libraries, in turn and in one process: one table, and a JSON file.

python examples/benchmark.py --quick                            # every case at smaller sizes
python examples/benchmark.py --cases ppo,gae --out speed.json   # some cases, in full
python examples/benchmark.py --device cuda --num_envs 4096,16384 --compile
"""

import argparse
import dataclasses
import json
import logging
from pathlib import Path

import torch
from benchmarks import CASES
from benchmarks.measuring import Row, Settings, machine

from edenrl.training import run_script

HEADER = ("case", "work", "unit", "ours", "spread", "peer", "theirs", "spread", "ratio", "better")
LAYOUT = "{:<11}  {:<48}  {:<15}  {:>10}  {:>19}  {:<30}  {:>10}  {:>19}  {:>6}  {:<6}"


def positive_integers(text):
    """Whole numbers, at least 1, separated by commas."""
    numbers = tuple(int(part) for part in text.split(","))
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers, at least 1, separated by commas")
    return numbers


def case_names(text):
    """Names of cases, separated by commas."""
    names = text.split(",")
    if unknown := [name for name in names if name not in CASES]:
        raise argparse.ArgumentTypeError(f"unknown case {', '.join(unknown)}; the cases are {', '.join(CASES)}")
    return names


def device_name(text):
    """The name of a device that is there: cpu, cuda or cuda:<index>."""
    kind, _, index = text.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r}: expected cpu, cuda or cuda:<index>")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f"{text!r}: torch does not see this CUDA device; use --device cpu")
    return text


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=case_names, default=list(CASES), help="names, such as ppo,gae; default: all")
    parser.add_argument("--device", type=device_name, default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and smaller sizes")
    parser.add_argument("--compile", action="store_true", help="our losses run through torch.compile")
    parser.add_argument("--num_envs", type=positive_integers, help="sizes of the PPO cases, such as 16,256,4096")
    parser.add_argument("--out", type=Path, help="a JSON file that receives the rows and the facts of the machine")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and end")
    return parser.parse_args(argv)


def make_settings(args):
    """Sizes and repetitions for the flags."""
    if torch.device(args.device).type == "cuda":
        sizes = (4096,) if args.quick else (4096, 16_384)
    else:
        sizes = (16, 256) if args.quick else (16, 256, 4096)
    return Settings(
        device=args.device,
        quick=args.quick,
        compile=args.compile,
        num_envs=args.num_envs or sizes,
        repeats=3 if args.quick else 7,
    )


def number(value):
    """Four significant digits, and no exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def columns(stat):
    """Median and spread as text."""
    if stat is None:
        return "-", "-"
    return number(stat.median), f"{number(stat.low)} to {number(stat.high)}"


def format_row(row: Row):
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    ours, theirs = columns(row.ours), columns(row.theirs)
    line = LAYOUT.format(row.case, row.work, row.unit, *ours, row.peer or "-", *theirs, ratio, row.better)
    return f"{line}  {row.note}".rstrip()


def save(path, settings, facts, rows):
    """Writes everything that has been measured so far."""
    content = {
        "settings": dataclasses.asdict(settings),
        "machine": facts,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def main(argv=None):
    args = parse(argv)
    if args.list:
        print("\n".join(CASES))
        return
    logging.getLogger("torchrl").setLevel(logging.WARNING)  # its remarks would stand between the rows
    settings, facts, rows = make_settings(args), machine(args.device), []
    print("{cpu}, {cores} cores, {threads} threads, device {device}, torch {torch}".format(**facts))
    print(LAYOUT.format(*HEADER))
    for name in args.cases:
        torch.manual_seed(0)
        for row in CASES[name](settings):
            rows.append(row)
            print(format_row(row), flush=True)
        if args.out:
            save(args.out, settings, facts, rows)  # after each case: the cases take long


if __name__ == "__main__":
    run_script(main)
