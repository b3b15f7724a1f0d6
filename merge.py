"""Turn a training checkpoint into a Hugging Face folder.

    python merge.py runs/toy merged                          # a run's newest checkpoint, or one step folder
    python merge.py checkpoints/mine/global_step_80 merged   # of EasyVideoR1, EasyR1, verl (FSDP)

Reads   CKPT/dcp (any number of processes; its index is a pickle, and trusted), CKPT/hf, CKPT/config.json; or
        CKPT[/actor]/model_world_size_N_rank_R.pt (may name sharded tensors and no code) and huggingface/.
Writes  OUT: model*.safetensors, shard by shard; hf's files; nanovideor1.json for evaluate.py.  Only when
        names, shapes, finite values, files read back and transformers' view (logits if it fits) are right.
"""

import argparse, json, math, mmap, os, re, shutil, sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText as VLM, AutoProcessor

SHARD_BYTES = 2 * 1024**3  # of the output dtype
SETTINGS = re.compile(r"fps|timestamps|prompts|prompt_form|system_prompt|\w+_(frames|pixels|length)")
Sharded = type("Sharded", (torch.Tensor,), {"__torch_dispatch__": None})  # stands for DTensor, and
Spec = type("Spec", (), {"__init__": lambda self, *args: None})  # for what describes it: they run nothing
ALLOWED = re.compile(r"torch\..+\.(DTensor\w*|TensorMeta|DeviceMesh|_\w+Layout|Shard(OrderEntry)?|Replicate)")

class MergeError(Exception):
    """The checkpoint cannot become a model; the message is one line."""

def find_step(path):
    """The checkpoint that a run folder, its checkpoints folder or a step folder stands for."""
    for latest in [*Path(path).glob("latest"), *Path(path).glob("checkpoints/latest")]:
        path = latest.with_name(latest.read_text().strip())
    step = Path(path, "actor") if Path(path, "actor/huggingface").is_dir() else Path(path)
    if not (step / "dcp/.metadata").is_file() and not (step / "huggingface/config.json").is_file():
        raise MergeError(f"{step}: no dcp/.metadata; give a run or one of its checkpoints/step_* folders")
    return step

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
    files = [folder / f"model_world_size_{world[0]}_rank_{rank}.pt" for rank in range(int(world[0]))]
    torch.serialization.clear_safe_globals()  # torch's own DTensor among them: it wants a process group
    for name in filter(ALLOWED.fullmatch, torch.serialization.get_unsafe_globals_in_checkpoint(files[0])):
        torch.serialization.add_safe_globals([(Sharded if name.endswith(".DTensor") else Spec, name)])
    ranks = [torch.load(file, map_location="cpu", mmap=True, weights_only=True) for file in files]

    def read(name):
        if type(whole := ranks[0][name]) is not Sharded:
            return whole  # a buffer, the same everywhere
        [dim] = [vars(placement)["dim"] for placement in whole._spec.placements if vars(placement)] or [0]
        shards = math.ceil(whole.shape[dim] / whole._local_tensor.shape[dim])  # further ones are replicas
        return torch.cat([rank[name]._local_tensor for rank in ranks[:shards]], dim)
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

def merge(checkpoint, out, dtype="auto"):
    """Write the Hugging Face folder `out` from a checkpoint; returns the step folder."""
    step, out, part = find_step(checkpoint), Path(out), Path(out).with_name(f".{Path(out).name}.partial")
    hf = step / ("huggingface" if (step / "huggingface").is_dir() else "hf")
    if out.exists():
        raise MergeError(f"{out}: exists; nothing is overwritten, choose another folder or delete it")
    shutil.rmtree(part, ignore_errors=True)
    try:
        config, processor = AutoConfig.from_pretrained(hf), AutoProcessor.from_pretrained(hf)
        if not processor.chat_template or not processor.tokenizer.eos_token:
            raise ValueError(f"{hf}: no chat template or end token; copy the original's tokenizer files in")
        dtype = (config.dtype or torch.bfloat16) if dtype == "auto" else getattr(torch, dtype)
        with torch.device("meta"):  # a tied lm_head is the embedding, and not listed twice
            weights = dict(VLM.from_config(config, dtype=dtype).named_parameters())
        stored, read = open_dcp(step / "dcp") if hf.name == "hf" else open_ranks(step)
        for name in weights.keys() | stored.keys() - {"lm_head.weight"}:
            if stored.get(name) != (wanted := weights[name].shape if name in weights else None):
                raise ValueError(f"{name} is {stored.get(name)}, but {wanted} by {hf}/config.json")
        shutil.copytree(hf, part, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin*"))
        text, name = (hf / "config.json").read_text(), str(dtype).removeprefix("torch.")
        (part / "config.json").write_text(re.sub(r'("(?:torch_)?dtype": *)"\w+"', rf'\1"{name}"', text))
        if hf.name == "hf":
            run, _ = (json.loads((step / file).read_text()) for file in ("config.json", "state.json"))
            settings = {n: v for n, v in (run | run.get("val", {})).items() if SETTINGS.fullmatch(n)}
            (part / "nanovideor1.json").write_text(json.dumps(settings))  # as its validation asked
        write_weights(read, weights, part)
        fit = 1.2 * sum(w.nbytes for w in weights.values()) < mmap.PAGESIZE * os.sysconf("SC_AVPHYS_PAGES")
        model, info = VLM.from_pretrained(part, device_map="cpu" if fit else "meta", output_loading_info=True)
        if wrong := {kind: list(names)[:3] for kind, names in info.items() if names}:
            raise ValueError(f"transformers does not load it whole: {wrong}")
        logits = fit and model(torch.arange(1, 33)[None]).logits
        for name in weights if fit else []:
            model.get_parameter(name).data.copy_(read(name))
        if fit and not torch.equal(model(torch.arange(1, 33)[None]).logits, logits):
            raise ValueError("what was written computes other logits than the checkpoint's tensors")
        os.rename(part, out)
    except (Exception, dcp.CheckpointException) as error:
        text = re.sub(r"(?s).*GLOBAL (\S+).*", r"its pickle names \1: refused", str(error))
        raise MergeError(f"{step}: {type(error).__name__}: {' '.join(text.split())[:400]}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
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
    parser.add_argument("--push-check", action="store_true", help="list what the Hub would miss; exit code 1")
    args = parser.parse_args()
    try:
        step = merge(args.checkpoint, args.out, args.dtype)
    except (MergeError, OSError) as error:
        parser.exit(2, f"merge.py: {error}\n")
    print(f"{args.out}: merged from {step}; next: python evaluate.py run --model {args.out} --data FILE")
    if missing := list(push_check(args.out)) if args.push_check else []:
        sys.exit(print("not ready for the Hub:", *missing, sep="\n") or 1)

if __name__ == "__main__":
    main()
