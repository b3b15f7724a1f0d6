"""python tests/bench_presets.py [PRESET ...] [--steps 60] [--toy toy]: does every algorithm learn?

Trains the toy (tests/toy.py) by `accelerate launch --quiet train_grpo.py configs/toy.yaml algo=PRESET` from the same
weights with each preset of configs/algorithms.yaml, or with those named, and prints held-out accuracy on colour and
direction, 1/4 by chance, before and after.  Two optimizer steps per rollout: in the second the ratios are not 1, and
what tells the losses apart is at work.  A preset takes two minutes on two CPU cores.
"""

import argparse
import json
import math
import subprocess
import tempfile
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
TASKS = ("toy-color", "toy-direction")
OVERRIDES = {}  # {preset: {field: value}}


def with_solutions(toy, folder):
    """The training records, each with a right answer as its offline_output: what luffy learns from."""
    lines = []
    for line in open(toy / "train.jsonl"):
        record = json.loads(line)
        record.update(has_offline_trajectory=True, offline_output=f"<answer>{record['answer']}</answer>")
        lines.append(json.dumps(record))
    file = folder / "solved.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def accuracy(file):
    """(mean accuracy, its standard error) of the answers to both tasks in a file of validation/."""
    values = [row["accuracy"] for row in map(json.loads, open(file)) if row["data_source"] in TASKS]
    mean = sum(values) / len(values)
    return mean, math.sqrt(mean * (1 - mean) / len(values))


def train(preset, steps, toy, folder):
    """One run; returns its row of the table."""
    fields = dict(model=toy / "model", train_files=toy / "train.jsonl", val_files=toy / "val.jsonl", data_root=toy,
                  output=folder / preset, steps=steps, val_every=steps, save_every=0, log_rollouts_every=0,
                  updates_per_rollout=2, algo=preset, **OVERRIDES.get(preset, {}))
    if preset == "luffy":
        fields["train_files"] = with_solutions(toy, folder)
    start = time.perf_counter()
    done = subprocess.run(
        ["accelerate", "launch", "--quiet", str(ROOT / "train_grpo.py"), str(ROOT / "configs/toy.yaml"),
         *(f"{key}={value}" for key, value in fields.items())], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{preset}:\n{done.stderr[-3000:]}")
    before, after = (accuracy(folder / preset / f"validation/step_{step:06d}.jsonl") for step in (0, steps))
    return before, after, time.perf_counter() - start


def main():
    presets = yaml.safe_load((ROOT / "configs/algorithms.yaml").read_text())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", metavar="PRESET", choices=[*presets, []], default=list(presets))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--toy", type=Path, default=ROOT / "toy")
    args = parser.parse_args()
    print(f"{'preset':24}{'steps':>6}{'before':>8}{'after':>8}{'rise':>8}{'2 s.e.':>8}{'seconds':>9}  overrides")
    with tempfile.TemporaryDirectory() as folder:
        for preset in args.presets:
            before, after, seconds = train(preset, args.steps, args.toy.resolve(), Path(folder))
            more = " ".join(f"{key}={value}" for key, value in OVERRIDES.get(preset, {}).items())
            print(f"{preset:24}{args.steps:6}{before[0]:8.3f}{after[0]:8.3f}{after[0] - before[0]:8.3f}"
                  f"{2 * math.hypot(before[1], after[1]):8.3f}{seconds:9.0f}  {more}", flush=True)


if __name__ == "__main__":
    main()
