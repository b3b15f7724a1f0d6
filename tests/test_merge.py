"""merge.py against checkpoints of one and of two processes; the oracle is the model that wrote them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

import merge

ROOT = Path(__file__).resolve().parent.parent
# What training does with several processes: shard every block and the root, save parameters and moments.
SHARDED_RUN = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForImageTextToText
model_dir, step_dir, reference = sys.argv[1:]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32)
with torch.no_grad():
    for p in model.parameters():
        p.add_(torch.randn_like(p) * 0.01)  # not the weights on disk; equal on both ranks
if dist.get_rank() == 0:
    torch.save(model.state_dict(), reference)
for module in model.modules():
    if type(module).__name__ in ("Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"):
        fully_shard(module)
fully_shard(model)
weights = dict(model.named_parameters())
moments = {f"{n}.exp_avg": torch.zeros_like(w) for n, w in weights.items()}
dcp.save({"model": weights, "optim": moments}, checkpoint_id=step_dir + "/dcp")
dist.destroy_process_group()
"""


def make_step(folder, model_dir):
    """A step folder without its weights, as training writes it."""
    (folder / "hf").mkdir(parents=True)
    for file in Path(model_dir).iterdir():
        if file.suffix in (".json", ".jinja", ".txt"):
            shutil.copy(file, folder / "hf")
    settings = {"model": "/gone", "fps": 4.0, "max_frames": 8, "prompt_form": "direct", "lr": 1e-3}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "state.json").write_text("{}")
    return folder


@pytest.fixture
def run(toy, tmp_path):
    """A run folder with one checkpoint of one process."""
    step = make_step(tmp_path / "run/checkpoints/step_000100", toy / "model")
    model = AutoModelForImageTextToText.from_pretrained(toy / "model", dtype=torch.float32)
    weights = dict(model.named_parameters())
    dcp.save({"model": weights, "optim": {}}, checkpoint_id=str(step / "dcp"), no_dist=True)
    (step.parent / "latest").write_text("step_000100\n")
    return tmp_path / "run"


def logits(folder_or_model):
    model = folder_or_model
    if not isinstance(model, torch.nn.Module):
        model = AutoModelForImageTextToText.from_pretrained(folder_or_model, dtype=torch.float32)
    with torch.no_grad():
        return model(input_ids=torch.arange(20, 60)[None]).logits


def command(*args):
    command = [sys.executable, str(ROOT / "merge.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_checkpoint_of_two_processes_becomes_the_model_that_was_trained(toy, tmp_path):
    step = make_step(tmp_path / "step_000007", toy / "model")
    script = tmp_path / "train.py"
    script.write_text(SHARDED_RUN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run([*torchrun, script, toy / "model", step, tmp_path / "reference.pt"], check=True,
                   env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert len(list((step / "dcp").glob("*.distcp"))) == 2

    merge.merge(step, tmp_path / "merged")

    reference = AutoModelForImageTextToText.from_pretrained(toy / "model", dtype=torch.float32)
    untouched = logits(reference)
    reference.load_state_dict(torch.load(tmp_path / "reference.pt"))
    assert torch.equal(logits(tmp_path / "merged"), logits(reference))
    assert not torch.allclose(logits(reference), untouched)  # else the test could not see a stale weight


def test_run_checkpoints_and_step_folder_name_the_same_checkpoint(run, tmp_path):
    names = [run, run / "checkpoints", run / "checkpoints/step_000100"]
    assert {merge.find_step(name) for name in names} == {run / "checkpoints/step_000100"}


def test_the_merged_folder_is_complete_and_keeps_the_original_files(run, toy, tmp_path):
    done = command(run, tmp_path / "merged")
    assert done.returncode == 0, done.stderr
    out = tmp_path / "merged"
    for file in ("generation_config.json", "tokenizer.json", "chat_template.jinja", "processor_config.json"):
        assert (out / file).read_bytes() == (toy / "model" / file).read_bytes()
    assert "lm_head.weight" not in load_file(out / "model.safetensors")  # tied: stored once
    assert AutoProcessor.from_pretrained(out).tokenizer("red")["input_ids"]
    settings = json.loads((out / "nanovideor1.json").read_text())
    assert settings["fps"] == 4.0 and settings["prompt_form"] == "direct" and "lr" not in settings
    assert torch.equal(logits(out), logits(toy / "model"))
    assert not list(tmp_path.glob(".*partial"))


def test_many_shards_hold_each_weight_once_and_load(run, toy, tmp_path, monkeypatch):
    monkeypatch.setattr(merge, "SHARD_BYTES", 400_000)
    merge.merge(run, tmp_path / "merged")
    index = json.loads((tmp_path / "merged/model.safetensors.index.json").read_text())
    shards = {file: load_file(tmp_path / "merged" / file) for file in set(index["weight_map"].values())}
    assert len(shards) > 3
    assert sorted(name for shard in shards.values() for name in shard) == sorted(index["weight_map"])
    total = sum(weight.nbytes for shard in shards.values() for weight in shard.values())
    assert index["metadata"]["total_size"] == total
    assert torch.equal(logits(tmp_path / "merged"), logits(toy / "model"))


def test_dtype_casts_the_weights_and_says_so_in_the_config(run, toy, tmp_path):
    merge.merge(run, tmp_path / "merged", "bfloat16")
    merged, original = (load_file(f / "model.safetensors") for f in (tmp_path / "merged", toy / "model"))
    assert all(torch.equal(tensor, original[name].bfloat16()) for name, tensor in merged.items())
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype="auto")
    assert model.dtype == torch.bfloat16


def test_merging_refuses_to_overwrite(run, tmp_path):
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged/mine.txt").write_text("keep")
    done = command(run, tmp_path / "merged")
    assert done.returncode == 2 and "exists" in done.stderr and done.stderr.count("\n") == 1
    assert [f.name for f in (tmp_path / "merged").iterdir()] == ["mine.txt"]


def damage_missing_file(step):
    next((step / "dcp").glob("*.distcp")).unlink()


def damage_short_file(step):
    file = next((step / "dcp").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def damage_index(step):
    (step / "dcp/.metadata").write_bytes(b"not an index")


def damage_no_index(step):
    (step / "dcp/.metadata").unlink()


def damage_config(step):
    config = json.loads((step / "hf/config.json").read_text())
    config["vision_config"]["intermediate_size"] = 96
    (step / "hf/config.json").write_text(json.dumps(config))


DAMAGES = [damage_missing_file, damage_short_file, damage_index, damage_no_index, damage_config]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_gives_one_clear_line_and_no_folder(run, tmp_path, damage):
    step = merge.find_step(run)
    damage(step)
    with pytest.raises(merge.MergeError) as caught:
        merge.merge(run, tmp_path / "merged")
    assert str(step) in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "merged").exists() and not list(tmp_path.glob(".*partial"))


def test_weights_that_are_not_finite_are_refused_by_name(toy, tmp_path):
    step = make_step(tmp_path / "step_000001", toy / "model")
    weights = dict(AutoModelForImageTextToText.from_pretrained(toy / "model").named_parameters())
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    weights[name].data[3, 4] = float("nan")
    dcp.save({"model": weights}, checkpoint_id=str(step / "dcp"), no_dist=True)
    with pytest.raises(merge.MergeError, match=name):
        merge.merge(step, tmp_path / "merged")
