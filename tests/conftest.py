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
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """Folder with model/, clips/, images/, train.jsonl and val.jsonl, made by tests/toy.py."""
    out = tmp_path_factory.mktemp("toy") / "toy"
    subprocess.run([sys.executable, str(ROOT / "tests/toy.py"), str(out), "--clips", "60"], check=True)
    return out
