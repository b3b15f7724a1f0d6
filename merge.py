"""Turn a training checkpoint into a Hugging Face folder.

    python merge.py runs/toy merged                                  # the newest checkpoint of a run
    python merge.py runs/toy/checkpoints/step_000100 merged --dtype bfloat16

Reads   CKPT/dcp          sharded tensors of any number of processes: {"model": {name: tensor}, ...}
        CKPT/hf           config, generation config, tokenizer, processor, chat template of the original
        CKPT/config.json  settings of the run
Writes  OUT/model*.safetensors and, if several, their index; the files of CKPT/hf as they were (config.json's
        dtype follows --dtype); nanovideor1.json, media and prompt settings: evaluate.py's defaults.
One process, one output shard in memory at a time. OUT appears when all checks have passed: names and shapes
against the config's model, every weight finite, the files hold what was read, and transformers finds every
weight. DCP's index is a pickle: merge only checkpoints that you trust.
"""

import argparse, json, os, pickle, shutil, sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

SHARD_BYTES = 2 * 1024**3  # of the output dtype
SETTINGS = """fps min_frames max_frames min_pixels max_pixels total_pixels image_max_pixels timestamps prompts
    prompt_form system_prompt max_prompt_length max_response_length val_max_response_length""".split()
DAMAGE = (CheckpointException, RuntimeError, OSError, EOFError, ValueError, LookupError, AttributeError,
          ImportError, pickle.UnpicklingError)  # what torch raises on cut, missing and foreign files

class MergeError(Exception):
    """The checkpoint cannot become a model; the message is one line."""

def find_step(path):
    """The step folder that a run folder, its checkpoints folder or a step folder stands for."""
    path = Path(path)
    for folder in (path, path / "checkpoints"):
        if (folder / "latest").is_file():
            path = folder / (folder / "latest").read_text().strip()
    for name in ("dcp/.metadata", "hf/config.json", "config.json"):
        if not (path / name).is_file():
            raise MergeError(f"{path}: no {name}; give a run folder or one of its checkpoints/step_* folders")
    return path

def stored_weights(step):
    """{name: (shape, dtype)} of the checkpoint's model, without reading a tensor."""
    try:
        entries = dcp.FileSystemReader(str(step / "dcp")).read_metadata().state_dict_metadata
    except DAMAGE as error:
        raise MergeError(f"{step}/dcp/.metadata: damaged: {' '.join(str(error).split())}") from None
    return {name.removeprefix("model."): (tuple(entry.size), entry.properties.dtype)
            for name, entry in entries.items() if name.startswith("model.")}

def read_weights(step, weights):
    """Fill {name: empty tensor} from the checkpoint, whatever its sharding, without a process group."""
    try:
        dcp.load({"model": weights}, checkpoint_id=str(step / "dcp"), no_dist=True)
    except DAMAGE as error:
        raise MergeError(f"{step}/dcp: damaged: {' '.join(str(error).split())[:300]}") from None
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise MergeError(f"{step}/dcp: {name} is not finite everywhere; merge an earlier checkpoint")

def expected_weights(config):
    """{name: shape} of the config's model; a tied output layer is the embedding and not listed."""
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    if config.tie_word_embeddings or config.get_text_config().tie_word_embeddings:
        shapes.pop("lm_head.weight")
    return shapes

def write_weights(step, shapes, stored, dtype, out):
    """Read, cast, write and read back, shard by shard."""
    sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, shape in shapes.items()}
    shards, files, room = [], {}, 0
    for name, size in sizes.items():
        if size > room:
            shards, room = [*shards, []], SHARD_BYTES
        shards[-1].append(name)
        room -= size
    for i, names in enumerate(shards, 1):
        weights = {name: torch.empty(shapes[name], dtype=stored[name][1]) for name in names}
        read_weights(step, weights)
        weights = {name: weights.pop(name).to(dtype) for name in names}
        file = "model.safetensors" if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(weights, out / file, metadata={"format": "pt"})
        with safe_open(out / file, "pt") as written:
            for name, weight in weights.items():
                if not torch.equal(written.get_tensor(name), weight):
                    raise MergeError(f"{out / file}: {name} does not read back as written; check the disk")
        files.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))

def merge(checkpoint, out, dtype="auto"):
    """Write the Hugging Face folder `out` from a checkpoint; returns the step folder."""
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    step, out = find_step(checkpoint), Path(out)
    if out.exists():
        raise MergeError(f"{out}: exists; nothing is overwritten, choose another folder or delete it")
    config = AutoConfig.from_pretrained(step / "hf")
    dtype = (config.dtype or torch.bfloat16) if dtype == "auto" else getattr(torch, dtype)
    shapes, stored = expected_weights(config), stored_weights(step)
    for name, shape in shapes.items():
        if (found := stored.get(name, ("missing",))[0]) != shape:
            raise MergeError(f"{step}/dcp: {name} is {found}, the config wants {shape}")
    for name in stored.keys() - shapes.keys() - {"lm_head.weight"}:
        raise MergeError(f"{step}/dcp: {name} is no weight of the model of {step}/hf/config.json")

    partial = out.parent / f".{out.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        shutil.copytree(step / "hf", partial)
        write_weights(step, shapes, stored, dtype, partial)
        raw = json.loads((step / "hf/config.json").read_text())
        for part in filter(lambda part: isinstance(part, dict), [raw, *raw.values()]):
            part.update({key: str(dtype)[len("torch."):] for key in {"dtype", "torch_dtype"} & part.keys()})
        (partial / "config.json").write_text(json.dumps(raw, indent=2))
        run = json.loads((step / "config.json").read_text())
        settings = {name: run[name] for name in SETTINGS if name in run}
        (partial / "nanovideor1.json").write_text(json.dumps(settings, indent=1))
        _, info = AutoModelForImageTextToText.from_pretrained(partial, dtype="auto", output_loading_info=True)
        if wrong := {kind: list(names)[:3] for kind, names in info.items() if names}:
            raise MergeError(f"{partial}: transformers does not load it whole: {wrong}")
        AutoProcessor.from_pretrained(partial)
        os.rename(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return step

def main():
    parser = argparse.ArgumentParser(description="Turn a training checkpoint into a Hugging Face folder.")
    parser.add_argument("checkpoint", help="run folder, its checkpoints folder, or one step folder")
    parser.add_argument("out", help="folder to create")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    args = parser.parse_args()
    try:
        step = merge(args.checkpoint, args.out, args.dtype)
    except (MergeError, OSError) as error:
        print(f"merge.py: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{args.out}: merged from {step}; next: python evaluate.py run --model {args.out} --data FILE")

if __name__ == "__main__":
    main()
