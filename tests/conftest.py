"""Shared by all tests: the repository on the path, quiet libraries, and one small toy per test run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """Folder with model/, clips/, images/, train.jsonl and val.jsonl, made by tests/toy.py."""
    out = tmp_path_factory.mktemp("toy") / "toy"
    subprocess.run([sys.executable, str(ROOT / "tests/toy.py"), str(out), "--clips", "60"], check=True)
    return out


RUN = dict(prompts_per_step=4, n=4, steps=6, save_every=2, keep=6, val_every=3, log_rollouts_every=1, decode_workers=1,
           max_refills=1)


def train_command(toy, output, **changes):
    """Command line of a short training run on the toy."""
    fields = dict(RUN, model=toy / "model", train_files=toy / "train.jsonl", val_files=toy / "val.jsonl", output=output)
    return [sys.executable, str(ROOT / "train_grpo.py"), str(ROOT / "configs/toy.yaml"),
            *(f"{key}={value}" for key, value in {**fields, **changes}.items())]


@pytest.fixture(scope="session")
def trained(toy, tmp_path_factory):
    """(run folder, printed text) of six uninterrupted steps."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    done = subprocess.run(train_command(toy, out), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return out, done.stdout
