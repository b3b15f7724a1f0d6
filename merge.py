"""Turn a training checkpoint into a Hugging Face folder.

    python merge.py runs/toy merged                          # a run's newest checkpoint, or one step folder
    python merge.py checkpoints/mine/global_step_80 merged   # of EasyVideoR1, EasyR1, verl (FSDP)

Reads   CKPT/dcp, tensors sharded over any number of processes (its index is a pickle, and trusted); CKPT/hf,
        the original's config, tokenizer and so on; CKPT/config.json, the run's settings.  Or CKPT[/actor]:
        model_world_size_N_rank_R.pt, whose pickles may name sharded tensors and no code, and huggingface/.
Writes  OUT/model*.safetensors; hf/'s files (config.json: new dtype); nanovideor1.json, for evaluate.py.
One shard is in memory.  OUT appears when all is checked: names, shapes, finite values, files read back,
and transformers loads it whole, to the logits of the checkpoint's tensors where memory allows.
"""

import argparse, json, os, re, shutil, sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

SHARD_BYTES = 2 * 1024**3  # of the output dtype
SETTINGS = """fps min_frames max_frames min_pixels max_pixels total_pixels image_max_pixels timestamps prompts
    prompt_form system_prompt max_prompt_length max_response_length val_max_response_length""".split()
Sharded = type("Sharded", (torch.Tensor,), {"__torch_dispatch__": None})  # stands for DTensor, and
Spec = type("Spec", (), {"__init__": lambda self, *args: None})  # for what describes it: they run nothing
ALLOWED = [(Sharded, "torch.distributed.tensor.DTensor"), *((Spec, f"torch.distributed.{name}") for name in
    """device_mesh.DeviceMesh _mesh_layout._MeshLayout _mesh_layout._FlatLayout tensor.placement_types.Shard
    tensor.placement_types.Replicate tensor._dtensor_spec.DTensorSpec tensor._dtensor_spec.TensorMeta
    tensor._dtensor_spec.ShardOrderEntry""".split())]

class MergeError(Exception):
    """The checkpoint cannot become a model; the message is one line."""

def find_step(path):
    """The checkpoint that a run folder, its checkpoints folder or a step folder stands for."""
    path = Path(path)
    latest = [*path.glob("latest"), *path.glob("checkpoints/latest")]
    path = latest[0].with_name(latest[0].read_text().strip()) if latest else path
    path = path / "actor" if (path / "actor/huggingface").is_dir() else path
    if not any((path / mark).is_file() for mark in ("dcp/.metadata", "huggingface/config.json")):
        raise MergeError(f"{path}: no dcp/.metadata; give a run or one of its checkpoints/step_* folders")
    return path

def open_dcp(folder):
    """({name: shape}, read(name) -> tensor) of a DCP folder, whatever its sharding."""
    entries = dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata

    def read(name):
        weight = torch.empty(entries[f"model.{name}"].size, dtype=entries[f"model.{name}"].properties.dtype)
        dcp.load({"model": {name: weight}}, checkpoint_id=str(folder), no_dist=True)
        return weight
    return {name[6:]: entry.size for name, entry in entries.items() if name.startswith("model.")}, read

def open_ranks(folder):
    """open_dcp for files of one state dict per process."""
    world = [file.name.split("_")[3] for file in folder.glob("model_world_size_*_rank_0.pt")]
    if len(world) != 1:
        raise ValueError(f"wants model_world_size_N_rank_0.pt of one N, has N in {world}")
    torch.serialization.clear_safe_globals()  # torch's own DTensor among them: it wants a process group
    torch.serialization.add_safe_globals(ALLOWED)
    ranks = [torch.load(folder / f"model_world_size_{world[0]}_rank_{rank}.pt", map_location="cpu", mmap=True,
                        weights_only=True) for rank in range(int(world[0]))]

    def read(name):
        whole, parts = ranks[0][name], []
        if type(whole) is not Sharded:
            return whole  # a buffer, the same everywhere
        dims = [vars(placement)["dim"] for placement in whole._spec.placements if vars(placement)]
        for part in (rank[name]._local_tensor for rank in ranks):  # of several replicas the first comes whole
            if not parts or dims and sum(p.shape[dims[0]] for p in parts) < whole.shape[dims[0]]:
                parts.append(part)
        return torch.cat(parts, *dims)  # TypeError where several dimensions are sharded: tensor parallelism
    return {name: tensor.shape for name, tensor in ranks[0].items()}, read

def write_weights(read, weights, out):
    """Read, cast, write and read back, shard by shard.  weights: {name: tensor without data}."""
    split = split_torch_state_dict_into_shards(weights, max_shard_size=SHARD_BYTES)
    for file, names in split.filename_to_tensors.items():
        shard = {name: read(name).to(weights[name].dtype).contiguous() for name in names}
        save_file(shard, out / file, metadata={"format": "pt"})
        for name, weight in load_file(out / file).items():
            if not weight.isfinite().all() or not torch.equal(weight, shard[name]):
                raise ValueError(f"{name} is not finite, or not read back as it was written")
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))

def verify(out, read, weights):
    """transformers loads OUT whole; where that fits, it computes what the checkpoint's tensors compute."""
    free, prompt = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), torch.arange(1, 33)[None]
    fits = 1.2 * sum(weight.nbytes for weight in weights.values()) < free
    model, info = AutoModelForImageTextToText.from_pretrained(
        out, dtype="auto", device_map="cpu" if fits else "meta", output_loading_info=True)
    if wrong := {kind: list(names)[:3] for kind, names in info.items() if names}:
        raise ValueError(f"transformers does not load it whole: {wrong}")
    with torch.no_grad():
        logits, state = fits and model(input_ids=prompt).logits, model.state_dict()
        for name in weights if fits else []:
            state[name].copy_(read(name))
        if fits and not torch.equal(model(input_ids=prompt).logits, logits):
            raise ValueError("what was written computes other logits than the checkpoint's tensors")

def merge(checkpoint, out, dtype="auto"):
    """Write the Hugging Face folder `out` from a checkpoint; returns the step folder."""
    step, out = find_step(checkpoint), Path(out)
    hf = step / ("huggingface" if (step / "huggingface").is_dir() else "hf")
    partial = out.with_name(f".{out.name}.partial")
    if out.exists():
        raise MergeError(f"{out}: exists; nothing is overwritten, choose another folder or delete it")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        config, processor = AutoConfig.from_pretrained(hf), AutoProcessor.from_pretrained(hf)
        if not processor.chat_template or not processor.tokenizer.eos_token:
            raise ValueError(f"{hf}: no chat template or end token; copy the original's tokenizer files in")
        dtype = (config.dtype or torch.bfloat16) if dtype == "auto" else getattr(torch, dtype)
        with torch.device("meta"):  # a tied lm_head is the embedding, and not listed twice
            weights = dict(AutoModelForImageTextToText.from_config(config).to(dtype).named_parameters())
        stored, read = open_dcp(step / "dcp") if hf.name == "hf" else open_ranks(step)
        for name in weights.keys() | stored.keys() - {"lm_head.weight"}:
            if stored.get(name) != (wanted := weights[name].shape if name in weights else None):
                raise ValueError(f"{name} is {stored.get(name)}, but {wanted} by {hf}/config.json")
        shutil.copytree(hf, partial, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin*"))
        text, name = (hf / "config.json").read_text(), str(dtype).removeprefix("torch.")
        (partial / "config.json").write_text(re.sub(r'("(?:torch_)?dtype": *)"\w+"', rf'\1"{name}"', text))
        if hf.name == "hf":
            run, _ = (json.loads((step / file).read_text()) for file in ("config.json", "state.json"))
            (partial / "nanovideor1.json").write_text(json.dumps({n: run[n] for n in SETTINGS if n in run}))
        write_weights(read, weights, partial)
        verify(partial, read, weights)
        os.rename(partial, out)
    except (Exception, dcp.CheckpointException) as error:
        text = re.sub(r"(?s).*GLOBAL (\S+).*", r"its pickle names \1: refused", str(error))
        raise MergeError(f"{step}: {type(error).__name__}: {' '.join(text.split())[:400]}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return step

def push_check(out):
    """What the Hub would refuse or miss in a merged folder, one line each."""
    for file in sorted(Path(out).rglob("*")):
        known = re.search(r"^[^.].*\.(json|jinja|txt|model|safetensors)$|^README\.md$|^LICENSE", file.name)
        if not known or not file.is_file() or file.is_symlink() or file.stat().st_size > 50e9:
            yield f"{file}: a stray file, or over 50 GB, the Hub's limit"
    card = Path(out, "README.md")
    if not card.is_file() or not re.match(r"---\n(?s:.*?)license:", card.read_text()):
        yield f"{card}: missing, or without `license:` at its head; begin from the original's"

def main():
    parser = argparse.ArgumentParser(description="Turn a training checkpoint into a Hugging Face folder.")
    parser.add_argument("checkpoint", help="run folder, its checkpoints folder, or one step folder")
    parser.add_argument("out", help="folder to create")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--push-check", action="store_true", help="""offline: stray files, files
        over 50 GB, no model card or license (exit code 1); that all loads is checked in any case""")
    args = parser.parse_args()
    try:
        step = merge(args.checkpoint, args.out, args.dtype)
    except (MergeError, OSError) as error:
        sys.exit(print(f"merge.py: {error}", file=sys.stderr) or 2)
    print(f"{args.out}: merged from {step}; next: python evaluate.py run --model {args.out} --data FILE")
    if missing := list(push_check(args.out)) if args.push_check else []:
        sys.exit(print("not ready for the Hub:", *missing, sep="\n") or 1)

if __name__ == "__main__":
    main()
