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
# What training does with several processes: shard every block and the root, save parameters and moments; and
# what EasyR1 and verl write: one file a process, of FSDP2's or FSDP1's sharded state dict.
SHARDED_RUN = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardedStateDictConfig, StateDictType
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import AutoModelForImageTextToText
model_dir, step_dir, reference, kind = sys.argv[1:]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32)
with torch.no_grad():
    for p in model.parameters():
        p.add_(torch.randn_like(p) * 0.01)  # not the weights on disk; equal on both ranks
if dist.get_rank() == 0:
    torch.save(model.state_dict(), reference)
blocks = [module for module in model.modules()
          if type(module).__name__ in ("Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock")]
world = dist.get_world_size()
mesh = init_device_mesh("cpu", (2, world // 2) if kind.endswith("replicas") else (world,),
                        mesh_dim_names=("ddp", "fsdp") if kind.endswith("replicas") else ("fsdp",))
if kind.startswith("fsdp1"):
    from torch.distributed.fsdp import ShardingStrategy
    strategy = ShardingStrategy.HYBRID_SHARD if kind.endswith("replicas") else ShardingStrategy.FULL_SHARD
    model = FSDP(model, device_id=torch.device("cpu"), sharding_strategy=strategy, use_orig_params=False,
                 auto_wrap_policy=ModuleWrapPolicy({type(block) for block in blocks}),
                 device_mesh=None if kind == "fsdp1 without mesh" else mesh)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()):
        weights = model.state_dict()
else:
    for module in [*blocks, model]:
        fully_shard(module, mesh=mesh)
    weights = dict(model.named_parameters()) if kind == "dcp" else model.state_dict()
if kind == "dcp":
    moments = {f"{n}.exp_avg": torch.zeros_like(w) for n, w in weights.items()}
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=step_dir + "/dcp")
else:
    torch.save(weights, f"{step_dir}/model_world_size_{world}_rank_{dist.get_rank()}.pt")
dist.destroy_process_group()
"""


def make_step(folder, model_dir):
    """A step folder without its weights, as training writes it."""
    (folder / "hf").mkdir(parents=True)
    for file in Path(model_dir).iterdir():
        if file.suffix in (".json", ".jinja", ".txt"):
            shutil.copy(file, folder / "hf")
    settings = {"model": "/gone", "fps": 4.0, "max_frames": 8, "prompt_form": "direct", "lr": 1e-3,
                "max_response_length": 24, "val": {"max_frames": 16, "temperature": 1.0}}
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


def shard(toy, tmp_path, step, kind, processes=2):
    """Let processes write a checkpoint of a kind into a step folder; the model that they had."""
    script = tmp_path / "train.py"
    script.write_text(SHARDED_RUN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
                str(processes)]
    subprocess.run([*torchrun, script, toy / "model", step, tmp_path / "reference.pt", kind], check=True,
                   env={**os.environ, "OMP_NUM_THREADS": "1"})
    reference = AutoModelForImageTextToText.from_pretrained(toy / "model", dtype=torch.float32)
    untouched = logits(reference)
    reference.load_state_dict(torch.load(tmp_path / "reference.pt"))
    assert not torch.allclose(logits(reference), untouched)  # else the tests could not see a stale weight
    return reference


def test_a_checkpoint_of_two_processes_becomes_the_model_that_was_trained(toy, tmp_path):
    step = make_step(tmp_path / "step_000007", toy / "model")
    reference = shard(toy, tmp_path, step, "dcp")
    assert len(list((step / "dcp").glob("*.distcp"))) == 2
    merge.merge(step, tmp_path / "merged")
    assert torch.equal(logits(tmp_path / "merged"), logits(reference))


def other_step(folder, toy):
    """The actor folder of an EasyR1 checkpoint, without its weights."""
    actor = folder / "global_step_80/actor"
    shutil.move(make_step(folder / "made", toy / "model") / "hf", actor / "huggingface")
    return actor


@pytest.mark.parametrize("kind, processes", [("fsdp2", 2), ("fsdp1", 2), ("fsdp1 replicas", 4)])
def test_a_checkpoint_of_easyvideor1_becomes_the_model_that_was_trained(toy, tmp_path, kind, processes):
    actor = other_step(tmp_path, toy)
    reference = shard(toy, tmp_path, actor, kind, processes)
    merge.merge(actor.parent, tmp_path / "merged")
    assert torch.equal(logits(tmp_path / "merged"), logits(reference))
    assert AutoProcessor.from_pretrained(tmp_path / "merged").tokenizer("red")["input_ids"]
    (actor / f"model_world_size_{processes}_rank_{1}.pt").unlink()
    with pytest.raises(merge.MergeError, match="rank_1.pt"):
        merge.merge(actor.parent, tmp_path / "again")


def test_one_process_wrote_a_plain_state_dict_with_the_names_of_this_model(toy, tmp_path):
    actor = other_step(tmp_path, toy)
    model = AutoModelForImageTextToText.from_pretrained(toy / "model", dtype=torch.float32)
    torch.save(model.state_dict(), actor / "model_world_size_1_rank_0.pt")
    merge.merge(actor, tmp_path / "merged", "bfloat16")
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert {weight.dtype for weight in merged.values()} == {torch.bfloat16}
    torch.save({"stray": torch.zeros(2)} | model.state_dict(), actor / "model_world_size_1_rank_0.pt")
    with pytest.raises(merge.MergeError, match="stray"):
        merge.merge(actor, tmp_path / "again")


class Harm:
    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def test_a_pickle_that_would_run_code_is_refused_and_does_not(toy, tmp_path):
    actor, harm = other_step(tmp_path, toy), Harm()
    harm.file = tmp_path / "harm was done"
    torch.save({"lm_head.weight": harm}, actor / "model_world_size_1_rank_0.pt")
    done = command(actor, tmp_path / "merged")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and ".system" in done.stderr
    assert not harm.file.exists() and not (tmp_path / "merged").exists()


def test_tensors_without_a_mesh_are_refused_by_the_name_of_their_class(toy, tmp_path):
    actor = other_step(tmp_path, toy)
    shard(toy, tmp_path, actor, "fsdp1 without mesh")
    with pytest.raises(merge.MergeError, match="ShardedTensor"):
        merge.merge(actor, tmp_path / "merged")


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
    assert settings == {"fps": 4.0, "prompt_form": "direct", "max_response_length": 24, "max_frames": 16}
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


def damage_state(step):
    (step / "state.json").write_text('{"step": ')


def damage_tokenizer(step):
    (step / "hf/tokenizer.json").unlink()


def damage_chat_template(step):
    (step / "hf/chat_template.jinja").unlink()


def damage_config(step):
    config = json.loads((step / "hf/config.json").read_text())
    config["vision_config"]["intermediate_size"] = 96
    (step / "hf/config.json").write_text(json.dumps(config))


DAMAGES = [damage_missing_file, damage_short_file, damage_index, damage_no_index, damage_state,
           damage_tokenizer, damage_chat_template, damage_config]


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


def test_logits_of_a_folder_that_is_not_the_checkpoint_are_noticed(run, toy, tmp_path, monkeypatch):
    write = merge.write_weights

    def stale(read, weights, out):
        write(lambda name: read(name) * (2 if name.endswith("norm.weight") else 1), weights, out)

    monkeypatch.setattr(merge, "write_weights", stale)
    with pytest.raises(merge.MergeError, match="logits"):
        merge.merge(run, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_push_check_lists_what_the_hub_would_miss(run, tmp_path):
    done = command(run, tmp_path / "merged", "--push-check")
    assert done.returncode == 1 and "README.md" in done.stdout
    (tmp_path / "merged/README.md").write_text("---\nlicense: apache-2.0\n---\n# Mine\n")
    assert list(merge.push_check(tmp_path / "merged")) == []
    (tmp_path / "merged/optimizer.pt").write_text("")
    (tmp_path / "merged/link.json").symlink_to("config.json")
    assert [Path(line.split(":")[0]).name for line in merge.push_check(tmp_path / "merged")] == [
        "link.json", "optimizer.pt"]
