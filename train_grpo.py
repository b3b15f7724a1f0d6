"""Teach a video VLM to reason with GRPO: one file, one loop.

    python tests/toy.py && accelerate launch --quiet train_grpo.py configs/toy.yaml   # 2 CPU cores
    accelerate launch --quiet --num_processes 8 train_grpo.py configs/video_rl.yaml steps=100   # FSDP2 shards

Reads a Hugging Face model folder and JSON/JSONL/parquet records; writes a run folder: config.json,
provenance.json, scripts/ (what ran), metrics.jsonl (a line a step), rollouts/ (answers and scores of chosen
steps), validation/ (every answer), checkpoints/ (step_000100 ... and latest: the same command goes on there).

How it learns (fields of configs/fields.yaml choose, configs/algorithms.yaml has the published combinations):
1. Advantages per group or over the batch of all processes; std with ddof 1, eps 1e-6 (arXiv 2402.03300).
2. The loss is a mean over the optimizer batch of all processes: micro-batching never changes the result.
3. One forward for the n answers of a prompt: [prompt, answer 1 ... answer n] is one sequence in which every
   answer attends to the prompt and to itself.  The video is encoded once, forward and backward.
4. With one update per rollout the ratio is exactly 1: no second forward for old log-probabilities.  What the
   engine sampled with differs from the trainer by rounding; a truncated importance weight corrects it.
5. Groups whose advantages are all zero carry no gradient and skip the forward; they still count as tokens.

Shapes: P prompt tokens, R response tokens of a pack, T packed tokens, n responses of a group, V vocabulary.
"""

import argparse, contextlib, copy, dataclasses, datetime, difflib, functools, hashlib, itertools, json, math
import importlib.metadata, os, shutil, signal, subprocess, sys, time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import jsonschema, torch, yaml
import numpy as np
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from accelerate import Accelerator, init_empty_weights
from accelerate.tracking import get_available_trackers
from accelerate.utils import InitProcessGroupKwargs, gather_object
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForImageTextToText
from transformers.utils import is_flash_attn_2_available

import rewards, rollout, video_io
from video_io import DataError

# ---------------------------------------------------------------------------------------- config

FIELDS = video_io.read_yaml(video_io.CONFIGS / "fields.yaml")  # {name: JSON Schema with default}
JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
Config = dataclasses.make_dataclass("Config", [
    (name, type(f["default"]), field(default_factory=functools.partial(copy.copy, f["default"])))
    for name, f in FIELDS.items()])

def load_config(path, overrides=()):
    """YAML file plus `key=value` words, values in YAML.  Whatever is wrong raises DataError in one line."""
    try:
        values = yaml.safe_load(Path(path).read_text()) or {}
        values.update((key, yaml.safe_load(value)) for key, _, value in (w.partition("=") for w in overrides))
    except (OSError, yaml.YAMLError, AttributeError, ValueError) as e:
        reason = " ".join(str(e).split())
        raise DataError(f"{path}: not a file of `key: value` lines like configs/toy.yaml: {reason}")
    if algo := values.get("algo"):
        algorithms = video_io.read_yaml(video_io.CONFIGS / "algorithms.yaml")
        if algo not in algorithms:
            raise DataError(f"{path}: algo is {algo!r}, not one of {', '.join(algorithms)}")
        values = algorithms[algo] | values
        if os.environ.get("RANK", "0") == "0":
            print(f"algo {algo}: " + ", ".join(f"{k} {values[k]}" for k in algorithms[algo]), file=sys.stderr)
    cfg = Config(**check_fields({name: f["default"] for name, f in FIELDS.items()} | values, path))
    cfg.val = check_fields(cfg.val, f"{path}: val")
    check_config(cfg, path)
    return cfg

def check_fields(values, path):
    """Values of known names, in the type of the default and within the bounds of configs/fields.yaml."""
    checked = {}
    for key, value in values.items():
        if key not in FIELDS:
            near = difflib.get_close_matches(str(key), FIELDS, n=3, cutoff=0.5) or ["a field of fields.yaml"]
            raise DataError(f"{path}: unknown key {key!r}; did you mean {' or '.join(near)}?")
        schema, kind = FIELDS[key], type(FIELDS[key]["default"])
        if kind is list and isinstance(value, str):
            value = [value]
        if value is False and "off" in schema.get("enum", ()):  # what YAML makes of a bare off
            value = "off"
        if kind is float and isinstance(value, str):  # what YAML makes of 1e-6
            with contextlib.suppress(ValueError):
                value = float(value)
        check = jsonschema.Draft202012Validator(schema | {"type": JSON_TYPES[kind]})
        fault = next((error.message for error in check.iter_errors(value)), None)
        if fault or kind is float and not math.isfinite(value):
            fault = fault or "not a finite number"
            raise DataError(f"{path}: {key} is {value!r}: {fault} {schema.get('hint', '')}".rstrip())
        checked[key] = kind(value)
    return checked

def check_config(cfg, path):
    """Checks across fields that need no file; each message names the values and the fix."""
    limit, paid = cfg.max_response_length, cfg.kl == "reward"
    whole = cfg.max_prompt_length + limit
    for name, bad, why in (
            ("max_tokens_per_pack", cfg.max_tokens_per_pack < whole, f"below {whole}, prompt and response"),
            ("prompts_per_step", cfg.prompts_per_step < cfg.updates_per_rollout, "below updates_per_rollout"),
            ("temperature", cfg.temperature < 0.01, "but training needs 0.01 or more"),
            ("max_refills", cfg.max_refills and cfg.advantage == "reinforce_pp",
             "but reinforce_pp learns from groups without spread too"),
            ("kl_kind", cfg.kl_kind == "full" and paid, "which takes no kl=reward"),
            ("advantage", cfg.advantage == "gdpo" and paid, "which takes no kl=reward"),
            ("overlong_buffer", cfg.overlong_buffer >= limit, "not below max_response_length")):
        if bad:
            raise DataError(f"{path}: {name} is {getattr(cfg, name)}, {why}")
    if cfg.importance != "off" and (cfg.top_p < 1 or cfg.top_k > 0 or cfg.min_p > 0):
        print(f"{path}: importance is off: with top_p, top_k or min_p the engine's log-probabilities are of "
              "a truncated distribution, and the ratio would be biased", file=sys.stderr)
        cfg.importance = "off"

# ---------------------------------------------------------------------------------------- advantages and loss

def record_at(position, records, seed):
    """The record at a place of the endless training order: a permutation per epoch, fixed by the seed."""
    epoch, offset = divmod(position, len(records))
    return records[np.random.default_rng([seed, epoch]).permutation(len(records))[offset]]

LOGITS_ROWS = 1024  # of (rows, V) logits alive at a time
EQUAL = 5e-7  # rewards that differ by less are the same: float32 sums of weights are off by that much

def group_advantages(rewards, kind, greedy=0.0):
    """Advantages of one group.  rewards: (n,), greedy: reward of the greedy answer (remax); returns (n,).
    Numbers are arXiv's.  Those of reinforce_pp (2501.03262) are whitened over the batch afterwards."""
    n, centred = len(rewards), rewards - rewards.mean()
    if kind == "remax":  # 2310.10505
        return rewards - greedy
    if kind == "reinforce_pp":
        return rewards
    if rewards.max() - rewards.min() < EQUAL:  # rounding would be divided by eps
        return torch.zeros_like(rewards)
    if kind in ("dr_grpo", "reinforce_pp_baseline"):  # 2503.20783: a std favours easy and hard prompts
        return centred
    if kind == "rloo":  # 2402.14740: r - mean of the others
        return centred * n / (n - 1)
    if kind == "grpo_passk":  # 2503.19595: the best answer alone, by what it adds to the second
        (best, second), at = rewards.topk(2).values, rewards.argmax()
        centred = torch.zeros_like(rewards).index_fill(0, at, 1.0) * (best - second)
    return centred / (rewards.std(unbiased=True) + 1e-6)  # 2402.03300; ddof 1 and eps as in EasyR1 and verl

def whiten(advantages, lengths, everyone=lambda x: [x]):
    """(a - mean) / sqrt(var + 1e-8), var with ddof 1, as in verl; over the responses of all processes,
    weighted by lengths: tokens, or ones.  advantages: list of () or (R,); everyone: gather of a value."""
    mine = [(w, float(a.double().mean()) * w, float((a.double() ** 2).mean()) * w)
            for a, w in zip(advantages, lengths)]
    count, total, squares = np.array([row for part in everyone(mine) for row in part] or [(1, 0, 0)]).sum(0)
    mean = round(total / count, 12)  # groups without spread stay at exactly zero
    std = math.sqrt(max(0.0, squares - count * mean**2) / max(1, count - 1) + 1e-8)
    return [(a - mean) / std for a in advantages]

def set_advantages(cfg, groups, kl_coef=0.0, everyone=lambda x: [x]):
    """Fill in group.advantages: one () tensor per response, or (R,) where tokens differ (reinforce_pp with KL
    in the reward: what is still to come).  Over the batch of all processes where the formula says so."""
    for group in groups:
        scores = lambda key: torch.tensor([s[key] for s in group.scores], dtype=torch.float64)
        overall = scores("overall")
        if cfg.kl == "reward":  # per token, summed over the response
            kl = [kl_coef * kl_penalty(old, ref, cfg.kl_kind).double()
                  for old, ref in zip(group.old_logprobs, group.ref_logprobs)]
            overall = overall - torch.stack([k.sum() for k in kl])
        if cfg.advantage == "gdpo":  # arXiv 2601.05242: grpo of each part of the reward
            parts = {"accuracy": 1 - cfg.format_weight, "format": cfg.format_weight, "overlong": 1.0}
            group.advantages = sum(weight * group_advantages(scores(key), "grpo")
                                   for key, weight in parts.items() if key in group.scores[0])
        else:
            greedy = group.greedy_score["overall"] if cfg.advantage == "remax" else 0.0
            group.advantages = group_advantages(overall, cfg.advantage, greedy)
        if cfg.advantage == "reinforce_pp" and cfg.kl == "reward":  # what earlier tokens paid is past
            group.advantages = [a + k.cumsum(0) - k for a, k in zip(group.advantages, kl)]
    if cfg.advantage in ("reinforce_pp", "reinforce_pp_baseline", "gdpo"):
        lengths = [1 if cfg.advantage == "gdpo" else len(r.ids) for g in groups for r in g.responses]
        flat = iter(whiten([a for g in groups for a in g.advantages], lengths, everyone))
        for group in groups:
            group.advantages = [next(flat) for _ in group.responses]

def token_weights(lengths, kind, total_tokens, total_sequences, max_length):
    """(R,) What each response token's loss is multiplied by, so that the sum over packs and processes is the
    mean.  lengths: tokens of each response of a pack; totals: of the whole optimizer batch."""
    shares = ({"token": 1 / total_tokens,  # DAPO
               "sequence": 1 / (total_sequences * length),  # GRPO: mean over sequences of their token means
               "constant": 1 / (total_sequences * max_length)}[kind] for length in lengths)  # Dr. GRPO
    return torch.cat([torch.full((length,), share) for length, share in zip(lengths, shares)])

def policy_loss(logprobs, old_logprobs, advantages, lengths, kind="ppo", clip_low=0.2, clip_high=0.28,
                dual_clip=0.0, cispo_cap=5.0):
    """Loss per token (R,) and a mask of tokens whose gradient a clip removed.  lengths: of the responses."""
    delta = (logprobs - old_logprobs).clamp(-20, 20)
    if kind in ("gspo", "gspo_token"):  # arXiv 2507.18071: the geometric mean of the sequence's ratios
        mean = torch.cat([part.mean().expand(len(part)) for part in delta.split(lengths)])
        delta = mean if kind == "gspo" else mean.detach() + logprobs - logprobs.detach()
    ratio = delta.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    if kind == "cispo":  # 2506.13585
        bounded = (ratio.clamp(max=cispo_cap) if cispo_cap else clipped).detach()
        return -advantages * logprobs * bounded, bounded != ratio
    if kind == "sapo":  # 2511.20347
        tau = torch.where(advantages > 0, 1.0, 1.05)
        return -advantages * 4 / tau * torch.sigmoid(tau * (ratio - 1)), ratio != ratio
    loss = -torch.minimum(ratio * advantages, clipped * advantages)  # 1707.06347; two ranges: 2503.14476
    mask = clipped * advantages < ratio * advantages
    if dual_clip:  # 1912.09729
        bound = -dual_clip * advantages
        mask |= (advantages < 0) & (loss > bound)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return loss, mask

def offline_loss(logprobs, advantages, kind):
    """Loss per token of a given trajectory: sft: -logp; luffy: -A p/(p + 0.1) without clip (2504.14945)."""
    return -logprobs if kind == "sft" else -advantages * logprobs.exp() / (logprobs.exp() + 0.1)

def kl_penalty(logprobs, ref_logprobs, kind):
    """Estimators of KL(policy, reference) per token (joschu.net/blog/kl-approx.html), clamped as in verl."""
    d = (ref_logprobs - logprobs).clamp(-20, 20)
    return {"k1": -d, "abs": d.abs(), "k2": d**2 / 2, "k3": (d.exp() - d - 1).clamp(max=10)}[kind]

def importance_weights(trainer_logprobs, sampled_logprobs, cap, kind, lengths):
    """Weights (R,) without gradient that correct for the engine's slightly other probabilities.
    token: min(pi_trainer / pi_engine, cap).  sequence: 1, or 0 in responses whose whole ratio is over cap."""
    gap = (trainer_logprobs.detach() - sampled_logprobs).clamp(-20, 20)
    if kind == "token":
        return gap.exp().clamp(max=cap)
    whole = [(part.sum() <= math.log(cap)).expand(len(part)) for part in gap.split(lengths)]
    return torch.cat(whole).to(gap.dtype) if kind == "sequence" else torch.ones_like(gap)

# ---------------------------------------------------------------------------------------- attention

def varlen_attention(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale):
    """Attention of segments: queries [cu_q[i], cu_q[i+1]) see keys [cu_k[i], cu_k[i+1]).
    q: (Tq, H, D); k, v: (Tk, H_kv, D).  Causal is aligned at the ends (bottom-right): the first query of a
    response sees the whole prompt.  flash-attn if installed, else torch's varlen kernel; on CPU sdpa."""
    if q.is_cuda:
        if is_flash_attn_2_available():
            from flash_attn import flash_attn_varlen_func as flash
            return flash(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=scale, causal=causal)
        from torch.nn.attention.varlen import varlen_attn
        return varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale,
                           window_size=(-1, 0) if causal else (-1, -1))
    alike, parts, places = defaultdict(list), [], []  # segments of the same lengths go through sdpa together
    for i, lengths in enumerate(zip(cu_q.diff().tolist(), cu_k.diff().tolist())):
        alike[lengths].append(i)
    for (n_q, n_k), some in alike.items():
        at_q, at_k = ((cu[some, None] + torch.arange(n)).flatten() for cu, n in ((cu_q, n_q), (cu_k, n_k)))
        queries, keys, values = (x.index_select(0, at).unflatten(0, (len(some), -1)).transpose(1, 2)
                                 for x, at in ((q, at_q), (k, at_k), (v, at_k)))  # (segments, H, n, D)
        mask = torch.ones(n_q, n_k, dtype=torch.bool).tril(n_k - n_q) if causal else None
        parts.append(F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale,
                                                    enable_gqa=True).transpose(1, 2).flatten(0, 1))
        places.append(at_q)
    return torch.cat(parts).index_select(0, torch.cat(places).argsort())  # (Tq, H, D)

class SharedPrefix(torch.autograd.Function):
    """On a GPU, what varlen_attention gives with each response's keys gathered as [prompt, response], without
    those copies: a flash call inside the segments and one of all responses to their prompts, merged by their
    log-sum-exps.  Backward hands both kernels the merged output and log-sum-exp, which make each recover its
    share of the one softmax (as in ring attention, arXiv 2310.01889)."""

    @staticmethod
    def forward(ctx, q, k, v, P, inside, across, scale):
        forward = functools.partial(torch.ops.aten._flash_attention_forward, dropout_p=0.0,
                                    return_debug_mask=False, scale=scale)
        out, lse, ctx.rng, ctx.unused, _ = forward(q, k, v, *inside, is_causal=True)  # lse: (H, T)
        more, lse_more, *_ = forward(q[P:], k[:P], v[:P], *across, is_causal=False)
        both = torch.logaddexp(lse[:, P:], lse_more)
        share, share_more = ((x - both).exp().T[..., None] for x in (lse[:, P:], lse_more))  # (R, H, 1)
        out[P:] = out[P:] * share + more * share_more
        lse[:, P:] = both
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.P, ctx.inside, ctx.across, ctx.scale = P, inside, across, scale
        return out

    @staticmethod
    def backward(ctx, grad):
        (q, k, v, out, lse), P, grad = ctx.saved_tensors, ctx.P, grad.contiguous()
        backward = functools.partial(torch.ops.aten._flash_attention_backward, dropout_p=0.0, scale=ctx.scale,
                                     rng_state=ctx.rng, unused=ctx.unused)
        dq, dk, dv = backward(grad, q, k, v, out, lse, *ctx.inside, is_causal=True)
        dq_more, dk_more, dv_more = backward(grad[P:], q[P:], k[:P], v[:P], out[P:], lse[:, P:].contiguous(),
                                             *ctx.across, is_causal=False)
        dq[P:] += dq_more
        dk[:P] += dk_more
        dv[:P] += dv_more
        return dq, dk, dv, None, None, None, None

@torch.compiler.disable
def text_attention(module, q, k, v, attention_mask, scaling=None, dropout=0.0, prompts=0, inside=None,
                   across=None, kv_index=None, cu_k=None, max_k=0, **unused):
    """Shared-prefix attention as transformers calls it.  q: (1, H, T, D); prompts: tokens of all prompts,
    which come first; inside, across: (cu_q, cu_k, max_q, max_k) of segments to themselves and of responses
    to their prompts.  On CPU kv_index: (Tk,) packed positions that each segment may see, [prompt] or [prompt,
    response i]; autograd through it adds the n responses' gradients into the prompt's keys and values."""
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    if q.is_cuda:
        return SharedPrefix.apply(q, k, v, prompts, inside, across, scaling)[None], None
    # index_select, not k[kv_index]: the backward of the latter sums in no fixed order on CPU
    k, v = (x.index_select(0, kv_index) for x in (k, v))
    return varlen_attention(q, k, v, inside[0], cu_k, inside[2], max_k, True, scaling)[None], None

def vision_attention(module, q, k, v, *, scaling, cu_seq_lens_q, max_length_q, **unused):
    """Attention inside each frame, all frames in one call.  q, k, v: (1, H, T, D)."""
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    cu, longest = cu_seq_lens_q.to(torch.int32), int(max_length_q)
    return varlen_attention(q, k, v, cu, cu, longest, longest, False, scaling)[None], None

# ---------------------------------------------------------------------------------------- policy

def load_policy(cfg, device, reference=False):
    """The model with our attention, in float32 (master weights); a reference in the dtype it computes in."""
    AttentionInterface.register("shared_prefix", text_attention)
    AttentionMaskInterface.register("shared_prefix", lambda *args, **kwargs: None)
    # Only a name with "flash" in it is handed all frames at once; other names get one call per frame.
    AttentionInterface.register("flash_frames", vision_attention)
    model = AutoModelForImageTextToText.from_pretrained(
        cfg.model, dtype=compute_dtype(device) if reference else torch.float32,
        local_files_only=os.path.isdir(cfg.model),
        attn_implementation={"text_config": "shared_prefix", "vision_config": "sdpa", "": "sdpa"})
    model.model.visual.config._attn_implementation = "flash_frames"  # from_pretrained asks for flash-attn
    if reference:
        model.requires_grad_(False)
    elif cfg.freeze_vision:
        model.model.visual.requires_grad_(False)
        keep_features(model.model.visual)
    layers = model.model.language_model.layers
    if cfg.gradient_checkpointing and not reference:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for i, layer in enumerate(layers):
            layer.gradient_checkpointing = i < cfg.gradient_checkpointing * len(layers)
    for layer in layers if cfg.compile else ():
        layer.compile(dynamic=True)
    model.token_values = torch.compile(token_values, dynamic=True) if cfg.compile else token_values
    model.train()
    # FSDP gathers the root's weights when the root's forward runs: the packed forward must be that forward.
    states_alone = reference and cfg.kl_kind == "full"
    model.forward = functools.partial(packed_states if states_alone else packed_logprobs, model)
    return model.to(device)

def keep_features(visual):
    """A frozen tower runs once per pack and step: later passes over the same pack reuse its output."""
    forward, visual.kept, visual.pack_key = visual.forward, {}, None

    @torch.no_grad()
    def once(*args, **kwargs):
        key = visual.pack_key and (*visual.pack_key[:2], next(visual.pack_key[2]))  # images, then clips
        if key is None or key not in visual.kept:
            visual.kept[key] = forward(*args, **kwargs)
        return type(visual.kept[key])(**visual.kept[key])  # callers change the object they get
    visual.forward = once

def shard(model, cfg, device, world):
    """FSDP2: each vision block and decoder layer, then the root; on a GPU also for a single process: it keeps
    float32 master weights and computes in bfloat16.  With shard_size, so many processes share one copy of the
    weights, and copies average gradients (HSDP)."""
    if world == 1 and device.type == "cpu":
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    if not dist.is_initialized():  # one process, started without a launcher
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    size = cfg.shard_size or world
    mesh = init_device_mesh(device.type, (world // size, size), mesh_dim_names=("replicate", "shard"))
    mesh = mesh["shard"] if size == world else mesh
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype(device), reduce_dtype=torch.float32)
    waits = cfg.cpu_offload and device.type == "cuda" and model.lm_head.weight.requires_grad  # no reference
    offload = CPUOffloadPolicy() if waits else OffloadPolicy()
    for block in [*model.model.visual.blocks, *model.model.language_model.layers, model]:
        fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=offload)
    return model

def packed_states(model, pack, *unused):
    """[(R, hidden)]: what the model makes of the positions that predict response tokens."""
    blind = sum(one_blank_patch(model) for _ in range(pack["blanks"]))
    hidden = model.model(
        input_ids=pack["input_ids"], position_ids=pack["position_ids"], attention_mask=None, use_cache=False,
        mm_token_type_ids=pack["mm_token_type_ids"], **pack["vision"], **pack["attention"]).last_hidden_state
    return [hidden[0].index_select(0, pack["predict_index"]) + blind]

def packed_logprobs(model, pack, temperature, banned):
    """Log-probability and entropy of every response token of a pack; with pack["reference"], its states and
    lm_head, the KL to it over the vocabulary as well: (R,) float32 tensors.  Logits exist only for positions
    that predict response tokens, LOGITS_ROWS at a time, anew in backward."""
    *theirs, head = pack.get("reference", [None])

    def rows(states, targets, *reference):
        logits = model.lm_head(states), *(F.linear(theirs, head) for theirs in reference)
        return model.token_values(logits, targets, temperature, banned)

    columns = [*packed_states(model, pack), pack["targets"], *theirs]
    out = [checkpoint(rows, *chunk, use_reentrant=False)
           for chunk in zip(*(column.split(LOGITS_ROWS) for column in columns))]
    return [torch.cat(parts) for parts in zip(*out)]

def token_values(logits, targets, temperature, banned):
    """(rows,) each: log-probability, entropy, KL to every reference.  logits: model, references (rows, V)."""
    masked = (torch.arange(logits[0].shape[-1], device=banned.device)[:, None] == banned).any(1)
    logp, *reference = ((x.float() / temperature).masked_fill(masked, -1e9).log_softmax(-1) for x in logits)
    exact = [(logp.exp() * (logp - theirs)).sum(-1) for theirs in reference]
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1), *exact

def one_blank_patch(model):
    """Zero, with all of the vision tower in its graph: the smallest image (2 x 2 patches) times nothing."""
    vision, device = model.config.vision_config, model.lm_head.weight.device
    side, channels = vision.spatial_merge_size, vision.in_channels * vision.temporal_patch_size
    pixels = torch.zeros(side**2, channels * vision.patch_size**2, device=device, dtype=compute_dtype(device))
    out = model.model.visual(pixels, grid_thw=torch.tensor([[1, side, side]], device=device))
    # FSDP reduces what has gradients: a part left out here would differ in size from those that saw a clip
    return sum(x.sum() for x in [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]) * 0

# ---------------------------------------------------------------------------------------- packing

def make_packs(groups, max_tokens, alone=False):
    """Fill packs of at most max_tokens with whole groups, largest first.  A pack is a list of (group, indices
    of its responses); a group larger than a pack is split by responses, its prompt repeated, never cut.
    alone: one response per pack, for models with recurrent layers, whose state would run into the next."""
    pieces, packs, max_tokens = [], [], 0 if alone else max_tokens
    for group in groups:
        for i, response in enumerate(group.responses):
            if not i or pieces[-1][0] + len(response.ids) > max_tokens:
                pieces.append([len(group.prompt_ids), group, []])
            pieces[-1][0] += len(response.ids)
            pieces[-1][2].append(i)
    for used, *piece in sorted(pieces, key=lambda piece: -piece[0]):
        pack = next((pack for pack in packs if pack[0] >= used), None)
        if pack is None:
            packs.append(pack := [max_tokens, []])  # [tokens left, contents]
        pack[0] -= used
        pack[1].append(tuple(piece))
    return [contents for _, contents in packs]

def build_pack(contents, vision, device):
    """Tensors of one shared-prefix forward.

    contents: [(group, response indices)]; vision(group): its video_io.model_inputs.  The packed order is all
    prompts, then all responses; a response continues at max(prompt positions) + 1 in all three M-RoPE rows.
    """
    prompts, answers, predict, media, T = [], [], [], defaultdict(list), 0
    for group, _ in contents:
        inputs, P = vision(group), len(group.prompt_ids)
        prompts.append((group.prompt_ids, inputs.pop("mm_token_type_ids")[0].cpu(),
                        inputs.pop("position_ids")[:, 0].cpu(), torch.arange(T, T + P)))  # positions: (4, P)
        T += P
        for key, tensor in inputs.items():  # pixels and grids of images and clips
            media[key].append(tensor)
    P_all = T
    for (group, indices), (_, _, positions, prompt_at) in zip(contents, prompts):
        P, following = len(prompt_at), positions[1:].max() + 1  # of the rows t, h, w; the first counts tokens
        for ids in (group.responses[i].ids for i in indices):
            row = torch.arange(len(ids))
            answers.append((ids, torch.zeros_like(row), torch.stack([P + row] + [following + row] * 3),
                            torch.cat([prompt_at, T + row])))
            predict += [prompt_at[-1:], T + row[:-1]]  # the last prompt token predicts the first of these
            T += len(ids)
    ids, types, positions, seen = zip(*prompts, *answers)
    responses = [group.responses[i].ids for group, indices in contents for i in indices]
    spans = dict(q=map(len, ids), k=map(len, seen), prompt=map(len, ids[:len(contents)]),
                 answers=(sum(len(g.responses[i].ids) for i in indices) for g, indices in contents))
    spans = {name: torch.tensor([0, *lengths]) for name, lengths in spans.items()}
    # at least 2: for one query the kernel takes another way
    longest = {name: max(2, int(lengths.max())) for name, lengths in spans.items()}
    cu = {name: lengths.cumsum(0).to(device, torch.int32) for name, lengths in spans.items()}
    attention = dict(prompts=P_all, kv_index=torch.cat(seen).to(device), cu_k=cu["k"], max_k=longest["k"],
                     inside=(cu["q"], cu["q"], longest["q"], longest["q"]),
                     across=(cu["answers"], cu["prompt"], longest["answers"], longest["prompt"]))
    pack = dict(input_ids=torch.tensor(sum(ids, []))[None],  # (1, T)
                mm_token_type_ids=torch.cat(types)[None], position_ids=torch.cat(positions, 1)[:, None],
                targets=torch.tensor(sum(responses, [])), predict_index=torch.cat(predict))  # (R,)
    vision = {key: torch.cat(x) for key, x in media.items()}
    pack, vision = ({key: x.to(device) for key, x in tensors.items()} for tensors in (pack, vision))
    return dict(pack, vision=vision, attention=attention, lengths=list(map(len, responses)))

# ---------------------------------------------------------------------------------------- update

@dataclass
class Run:
    """What the parts of a run share: settings, this process's place, and what reads, asks and scores."""
    cfg: Config
    rank: int
    world: int
    device: torch.device
    prompter: rollout.Prompter
    val_prompter: rollout.Prompter
    loader: video_io.MediaLoader
    val_loader: video_io.MediaLoader  # with the frame budget of cfg.val
    banned: torch.Tensor  # ids that are never sampled
    scorer: rewards.Scorer
    recurrent: bool = False  # each response is forwarded with its own prompt
    ref_head: torch.Tensor = None  # the reference's lm_head (V, hidden), for the KL over the vocabulary
    engine: rollout.Engine = None
    ahead: list = None  # the next prompts, their clips being decoded
    surplus: list = field(default_factory=list)  # groups that the last step had no room for
    saving: tuple = None  # a checkpoint that is still being written
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

def has_spread(group, key="overall"):
    values = [s[key] for s in group.scores]
    return max(values) - min(values) > EQUAL

def packed_passes(run, model, groups, part=0):
    """Forward every pack of this process's groups, then dummies (of no group) up to the count of the busiest
    process: collectives of sharded layers must match.  Groups whose advantages are all zero are left out.
    Yields ([(group, index of a response)], pack, logprobs (R,), entropy (R,), exact KL (R,) if asked for)."""
    cfg, dummy = run.cfg, rollout.Group({}, video_io.Media(), "", [0], [rollout.Response([0], [0.0], "", "")])
    every = cfg.entropy_bonus or cfg.kl == "loss" or cfg.offline == "sft"
    learning = [g for g in groups if every or g.advantages is None or any(a.any() for a in g.advantages)]
    packs = make_packs(learning, cfg.max_tokens_per_pack, run.recurrent)
    # the tower runs once for the images of a pack and once for its clips, so these passes must match, too
    kinds = gather([{kind for g, _ in contents for kind in ("images", "videos") if getattr(g.media, kind)}
                    for contents in packs])
    for i, (contents, *seen) in enumerate(itertools.zip_longest(packs, *kinds, fillvalue=())):
        pack = build_pack(contents or [(dummy, [0])], run.vision, run.device)
        pack["blanks"] = len(set().union(*seen).difference(seen[run.rank]))
        # packs are the same in every pass over a part, unless advantages were computed in between
        model.model.visual.pack_key = (part, i, itertools.count()) if cfg.kl != "reward" else None
        places = [(group, i) for group, indices in contents for i in indices]
        if places and run.ref_head is not None and torch.is_grad_enabled():
            pack["reference"] = torch.cat([g.ref_logprobs[j] for g, j in places]).to(run.device), run.ref_head
        yield places, pack, *model(pack, cfg.temperature, run.banned)

def fill_logprobs(run, model, groups, name, part=0):
    """Log-probabilities of a forward without gradient into group.<name>: one (R,) per response; where the KL
    is exact, the reference's states (R, hidden)."""
    for group in groups:
        setattr(group, name, [None] * len(group.responses))
    with torch.no_grad():
        for places, pack, values, *_ in packed_passes(run, model, groups, part):
            for (group, j), part_of in zip(places, values.cpu().split(pack["lengths"])):
                getattr(group, name)[j] = part_of

def check_engine(run, model, groups):
    """RuntimeError unless greedy tokens of a few prompts have the same log-probabilities in engine and
    trainer: the weights that sample are those that train.  Processes that share an engine skip it."""
    if run.cfg.tensor_parallel > 1:
        return
    probes = [dataclasses.replace(g, responses=[], advantages=None, old_logprobs=None) for g in groups[:4]]
    run.engine.generate(probes, temperature=0.0, max_tokens=min(64, run.cfg.max_response_length))
    probes = [dataclasses.replace(g, greedy=g.responses[0]) for g in probes if not g.error]
    plain = dataclasses.replace(run, cfg=dataclasses.replace(run.cfg, temperature=1.0))
    fill_logprobs(plain, model, probes, "old_logprobs", "check")
    if probes:
        tolerance = 0.1 if run.device.type == "cuda" else 1e-3  # bfloat16, float32
        rollout.self_check(probes, [g.old_logprobs[0] for g in probes], tolerance)

def update(run, model, optimizer, groups, part=0, kl_coef=0.0):
    """One optimizer step on this process's share of an optimizer batch; returns metrics of all processes.
    What is not finite stops the run before the step."""
    cfg, sums, worst_gap = run.cfg, Counter(), 0.0
    counted = lambda response: not cfg.mask_truncated or response.finish_reason != "length"
    sizes = gather([len(r.ids) for g in groups for r in g.responses if counted(r)])
    total_tokens, total_sequences = max(1, sum(map(sum, sizes))), max(1, sum(map(len, sizes)))
    optimizer.zero_grad()
    for places, pack, logprobs, entropy, *exact in packed_passes(run, model, groups, part):
        if not places:
            (logprobs.sum() * 0).backward()
            continue
        lengths = pack["lengths"]

        def per_token(value):  # value(group, j): a number for each response, or one for each of its tokens
            return torch.cat([torch.as_tensor(value(*place), dtype=torch.float32).expand(length)
                              for place, length in zip(places, lengths)]).to(run.device)
        advantages = per_token(lambda g, j: g.advantages[j])
        old = logprobs.detach() if places[0][0].old_logprobs is None else per_token(
            lambda g, j: g.old_logprobs[j])
        loss, clipped = policy_loss(logprobs, old, advantages, lengths, cfg.loss, cfg.clip_low, cfg.clip_high,
                                    cfg.dual_clip, cfg.cispo_cap)
        given = per_token(lambda g, j: g.responses[j].finish_reason == "offline").bool()
        sampled = torch.where(given, old, per_token(lambda g, j: g.responses[j].logprobs))
        correction = importance_weights(old, sampled, cfg.importance_cap, cfg.importance, lengths)
        loss = loss * correction
        if cfg.offline in ("luffy", "sft"):
            loss = torch.where(given, offline_loss(logprobs, advantages, cfg.offline), loss)
        loss = torch.where(given, cfg.offline_weight * loss, loss) - cfg.entropy_bonus * entropy
        fresh = per_token(lambda g, j: not g.record.get("stale"))
        terms = dict(entropy=entropy, clip_share=clipped, engine_kl=(sampled - old) * fresh,
                     offline_share=given, logprob_gap=(sampled - old).abs() * fresh,
                     corrected_share=(correction == 0) | (correction >= cfg.importance_cap))
        if cfg.kl != "off":
            terms["kl"] = exact[0] if exact else kl_penalty(
                logprobs, per_token(lambda g, j: g.ref_logprobs[j]), cfg.kl_kind)
            loss = loss + kl_coef * (cfg.kl == "loss") * terms["kl"]
        weights = token_weights(lengths, cfg.aggregate, total_tokens, total_sequences,
                                cfg.max_response_length).to(run.device)
        loss = (loss * weights * per_token(lambda g, j: counted(g.responses[j]))).sum()
        if not torch.isfinite(loss):
            where = sorted({g.record["where"] for g, _ in places})
            raise FloatingPointError(f"loss is {loss.item()} on {where}")
        (loss * run.world).backward()  # FSDP averages gradients over processes; the weights are global
        worst_gap = max(worst_gap, terms["logprob_gap"].max().item())
        sums.update({key: value.sum().item() for key, value in dict(terms, loss=loss).items()},
                    trained_tokens=len(logprobs), packed_tokens=pack["input_ids"].shape[1])
    gathered, sums = gather((sums, worst_gap)), Counter()
    for theirs, _ in gathered:
        sums.update(theirs)
    if not sums:
        return {}  # no group of any process had spread: nothing to learn from
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
    norm = float(whole(norm))
    if not math.isfinite(norm):
        raise FloatingPointError(f"gradient norm is {norm} on {[g.record['where'] for g in groups]}")
    optimizer.step()
    for key in sums.keys() - {"loss", "trained_tokens", "packed_tokens"}:
        sums[key] /= sums["trained_tokens"]
    return dict(sums, grad_norm=norm, logprob_gap_max=max(gap for _, gap in gathered))

def learning_rate(cfg, step):
    """Linear warmup, then constant, linear or cosine decay to zero.  step counts from 1."""
    if step <= cfg.warmup_steps:
        return cfg.lr * step / cfg.warmup_steps
    done = (step - 1 - cfg.warmup_steps) / max(1, cfg.steps - cfg.warmup_steps)
    decay = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return cfg.lr * decay[cfg.schedule]

# ---------------------------------------------------------------------------------------- rollouts

def my_share(run, items):
    """This process's part of [(position, record)], dealt out so that the engines' costs are even: tokens, and
    query-key pairs of attention as 1 / (6 hidden) tokens each.  Every process computes the same."""
    cfg, hidden = run.cfg, run.prompter.model_config.get_text_config().hidden_size
    loads, mine = [0.0] * (run.world // cfg.tensor_parallel), []

    def cost(record):
        P, R = record["tokens"], cfg.max_response_length / 2
        return P + cfg.n * R + (P * P / 2 + cfg.n * R * (P + R / 2)) / (6 * hidden)
    for position, record in sorted(items, key=lambda item: (-cost(item[1]), item[0])):
        place = loads.index(min(loads))
        loads[place] += cost(record)
        if place == run.rank // cfg.tensor_parallel:
            mine.append(dict(record, position=position))
    return sorted(mine, key=lambda record: record["position"])

def prefetch(run, train, position):
    """The batch of prompts at a position of the training order, [(record, Future or None)]: clips that fit
    prefetch_bytes start to decode, the others when their turn comes."""
    places, used, waiting = range(position, position + run.cfg.prompts_per_step), 0, []
    for record in my_share(run, [(p, record_at(p, train, run.cfg.seed)) for p in places]):
        used += record["frame_bytes"]
        waiting.append((record, run.loader.submit(record) if used <= run.cfg.prefetch_bytes else None))
    return waiting

def collect(run, waiting, training=True):
    """Ask and score [(record, Future or None)].  Returns groups in the order of their positions, and those
    that could not be asked (their .error says why).  Frames are kept for training alone."""
    cfg = run.cfg
    if cfg.tensor_parallel > 1:  # processes that share an engine must ask the same, in the same order
        waiting = [(r, f or run.loader.submit(r)) for r, f in waiting]
        failed = set().union(*gather({r["where"] for r, f in waiting if f.exception()}))
        waiting = [(r, f) for r, f in waiting if f.exception() or r["where"] not in failed]
    # seeds depend on the position alone: a resumed run draws the same responses
    feed = ((r, f or run.loader.submit(r), hash((cfg.seed, r["position"])) % 2**31) for r, f in waiting)
    groups = []
    with run.timer("rollout"):
        for group in rollout.answers(
                run.engine, run.prompter, feed, cfg.n, queue_bytes=cfg.prefetch_bytes,
                max_tokens=cfg.max_response_length, temperature=cfg.temperature, top_p=cfg.top_p,
                top_k=cfg.top_k, min_p=cfg.min_p, greedy=cfg.advantage == "remax"):
            group.media = group.media if training else None
            groups.append(group)
    groups.sort(key=lambda group: group.record["position"])
    good, bad = [g for g in groups if not g.error], [g for g in groups if g.error]
    assert len(good) + len(bad) == len(waiting)
    with run.timer("reward"):
        for group in good:
            group.responses += offline_response(cfg, group.record, run.prompter.processor.tokenizer)
        asked = [(g, r) for g in good for r in [*g.responses, *([g.greedy] if g.greedy else [])]]
        scores = iter(run.scorer.score_many([g.record for g, _ in asked], [r.text for _, r in asked],
                                            [len(r.ids) for _, r in asked]))
        for group in good:
            group.scores = [next(scores) for _ in group.responses]
            group.greedy_score = next(scores) if group.greedy else None
            if group.responses[-1].finish_reason == "offline":  # takes the last answer's place if good enough
                given, score = group.responses.pop(), group.scores.pop()
                if score["overall"] >= cfg.offline_threshold:
                    group.responses[-1], group.scores[-1] = given, score
    return good, bad

def offline_response(cfg, record, tokenizer):
    """[rollout.Response] of a record's given trajectory, ended as a model would; [] without one that fits."""
    if cfg.offline == "off" or not record.get("has_offline_trajectory"):
        return []
    ids = tokenizer.encode(record["offline_output"], add_special_tokens=False) + [tokenizer.eos_token_id]
    fits = len(ids) <= cfg.max_response_length
    return [rollout.Response(ids, [0.0] * len(ids), record["offline_output"], "offline")] if fits else []

def next_batch(run, train, state, last):
    """Groups of one optimizer batch of this process, all groups asked for it, and those that failed.  Dynamic
    sampling (DAPO) drops groups without spread before any forward and asks further prompts; what is then over
    waits for the next step, whose importance weights correct for the older policy."""
    cfg, kept, asked, lost = run.cfg, run.surplus, [], []
    for _ in range(1 + cfg.max_refills):
        if sum(gather(len(kept))) >= cfg.prompts_per_step:
            break
        waiting = run.ahead or prefetch(run, train, state["position"])
        state["position"] += cfg.prompts_per_step
        run.ahead = None if last else prefetch(run, train, state["position"])  # decodes while this step runs
        good, bad = collect(run, waiting)
        good = good[run.rank % cfg.tensor_parallel::cfg.tensor_parallel]
        asked, lost = asked + good, lost + bad
        kept = kept + [g for g in good if not cfg.max_refills or has_spread(g, cfg.filter_key)]
    positions = sorted(sum(gather([g.record["position"] for g in kept]), []))[:cfg.prompts_per_step]
    run.surplus = [g for g in kept if g.record["position"] not in positions]
    for group in run.surplus:
        group.record["stale"] = True  # by then the engine will have moved on
    return [g for g in kept if g.record["position"] in positions], asked, lost

def validate(run, records, state):
    """Answers to every validation record, greedy unless cfg.val says otherwise, go to validation/step_*.jsonl
    and their accuracies into the state; returns {"val/...": accuracy}.  What could not be asked is wrong."""
    cfg = dataclasses.replace(run.cfg, **{"n": 1, "temperature": 0.0, "advantage": "grpo", "offline": "off",
                                          **run.cfg.val})
    mine = [(dict(record, position=i), None) for i, record in enumerate(records)]
    mine = mine[run.rank // cfg.tensor_parallel::run.world // cfg.tensor_parallel]
    reader = dataclasses.replace(run, cfg=cfg, loader=run.val_loader, prompter=run.val_prompter)
    good, bad = collect(reader, mine, training=False)
    rows = rollout.rows_of(good)
    rows += [dict(rollout.about(g.record), accuracy=0.0, status="failed", reason=g.error) for g in bad]
    rows = sum(gather(rows)[::cfg.tensor_parallel], [])
    assert len(rows) == len(records), f"{len(rows)} of {len(records)} validation records came back"
    state["validation"][str(state["step"])] = result = accuracies(rows)
    if state["step"] and result["all"] > state["best"][0]:
        state["best"] = [result["all"], state["step"]]
    if run.rank == 0:
        rollout.write_jsonl(Path(cfg.output, "validation", f"step_{state['step']:06d}.jsonl"), rows)
        tqdm.write(f"step {state['step']}: " + "  ".join(f"{name} {x:.3f}" for name, x in result.items()))
    return {f"val/{name}": value for name, value in result.items()}

def accuracies(rows):
    """{"all" or data_source or problem_type: mean accuracy}"""
    by_name = defaultdict(list)
    for row in rows:
        for name in ("all", row.get("data_source") or row["problem_type"]):
            by_name[name].append(row["accuracy"])
    return {name: mean(values) for name, values in by_name.items()}

def mean(values):
    return sum(values) / max(1, len(values))

def step_metrics(run, groups, asked, lost, updates, seconds):
    """(metrics, rows of all responses) of all processes; each is a mean over responses, groups or tokens as
    its name says."""
    rows, spread, dropped, batch, surplus = (sum(parts, []) for parts in zip(*gather((
        rollout.rows_of(asked), [has_spread(g) for g in asked],
        [dict(key=g.record["key"], where=g.record["where"], reason=g.error) for g in lost],
        [len(groups)], [len(run.surplus)]))))
    column = lambda key: [row[key] for row in rows if key in row]
    out = {key: mean(column(key)) for key in ("accuracy", "format", "overlong") if column(key)}
    out |= {f"accuracy/{name}": value for name, value in accuracies(rows).items()}
    out |= dict(reward=mean(column("overall")), response_length=mean(column("response_tokens")),
                truncated_share=mean([end == "length" for end in column("finish_reason")]),
                spread_share=mean(spread), n_asked=len(spread), n_groups=sum(batch), n_surplus=sum(surplus),
                n_dropped=len(dropped), dropped=dropped)
    if offline := [row["overall"] for row in rows if row["finish_reason"] == "offline"]:
        out["reward_offline"] = mean(offline)
    if trained := [u for u in updates if u]:
        out |= {key: mean([u[key] for u in trained]) for key in trained[0]}
    out |= {f"seconds/{phase}": spent for phase, spent in run.seconds.items()}
    tokens = sum(column("response_tokens")) + sum(column("prompt_tokens")) / run.cfg.n
    out |= dict(step_s=seconds, tokens_per_s=tokens / seconds,
                host_gib=int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**30)
    if run.device.type == "cuda":
        out["gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return out, rows

# ---------------------------------------------------------------------------------------- files

def start_run_folder(cfg, run_folder):
    """What ran, to trace a result: config, versions, git hash, the scripts themselves."""
    here = Path(__file__).resolve().parent
    git = shutil.which("git") and subprocess.run(
        ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40"],
        capture_output=True, text=True).stdout.strip() or None
    write_json(run_folder / "config.json", vars(cfg))
    write_json(run_folder / "provenance.json", dict(
        command=sys.argv, python=sys.version.split()[0], git=git, started=time.strftime("%F %T %z"),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        packages={d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}))
    shutil.copytree(here / "configs", run_folder / "scripts/configs", dirs_exist_ok=True)
    for script in here.glob("*.py"):
        shutil.copy(script, run_folder / "scripts")

def write_json(path, value):
    rollout.write_text(path, json.dumps(value, indent=1))

def training_state(model, optimizer):
    """{"model": {name: weight}, "optim": {name.field: tensor}} of live tensors, shards where sharded.
    Creates optimizer state that does not exist yet, so the same call describes what to load."""
    tensors = {"model": dict(model.named_parameters()), "optim": {}}
    for name, p in tensors["model"].items():
        if p.requires_grad:
            state = optimizer.state[p] = optimizer.state[p] or dict(
                step=torch.tensor(0.0), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            tensors["optim"].update({f"{name}.{key}": value for key, value in state.items()})
    return tensors

def save_checkpoint(run, model, optimizer, state):
    """Sharded checkpoint: a temporary folder, renamed when complete; then `latest`; then old ones go."""
    finish_save(run)
    cfg, final = run.cfg, Path(run.cfg.output, "checkpoints", f"step_{state['step']:06d}")
    temporary = final.with_name(f".{final.name}.tmp")
    surplus = gather([dict(position=g.record["position"], scores=g.scores,
                           responses=list(map(vars, g.responses))) for g in run.surplus])
    if run.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        kept = (".json", ".jinja", ".txt", ".model")  # config, tokenizer, processor, template; no weights
        shutil.copytree(cfg.model, temporary / "hf", ignore=lambda _, names: [
            name for name in names if not name.endswith(kept) or name.endswith(".index.json")])
        write_json(temporary / "config.json", vars(cfg))
        write_json(temporary / "state.json", dict(state, surplus=sum(surplus, [])))
    gather(None)  # a barrier: the folder exists
    save = dcp.async_save if cfg.async_save else dcp.save
    future = save(training_state(model, optimizer), checkpoint_id=str(temporary / "dcp"))
    run.saving = future, temporary, final, state["best"][1]
    if not cfg.async_save:
        finish_save(run)

def finish_save(run):
    """Wait for the checkpoint that is being written, if any, and make it the latest."""
    if run.saving is None:
        return
    (future, temporary, final, best), run.saving = run.saving, None
    if run.cfg.async_save:
        future.result()
    gather(None)
    if run.rank == 0:
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        rollout.write_text(final.parent / "latest", final.name)
        if (best := final.with_name(f"step_{best:06d}")).exists():
            rollout.write_text(final.parent / "best", best.name)
        for old in sorted(final.parent.glob("step_*"))[:-run.cfg.keep]:
            if old != best:
                shutil.rmtree(old)
    gather(None)

def load_checkpoint(run, model, optimizer, data):
    """Put the newest checkpoint into model and optimizer; returns its state.json, None without one.  Settings
    or data that have changed since are an error that shows them, unless resume is force."""
    cfg, latest = run.cfg, Path(run.cfg.output, "checkpoints", "latest")
    if not latest.exists():
        return load_weights(cfg.init_from, model) if cfg.init_from else None
    if cfg.resume == "never":
        raise DataError(f"{cfg.output} holds checkpoints and resume is never: choose another output")
    folder = latest.parent / latest.read_text().strip()
    try:
        state, before = (json.loads((folder / name).read_text()) for name in ("state.json", "config.json"))
        with torch.no_grad():
            dcp.load(training_state(model, optimizer), checkpoint_id=str(folder / "dcp"))
    except (OSError, ValueError, dcp.api.CheckpointException) as e:
        raise DataError(f"{folder}: no whole checkpoint ({' '.join(str(e).split())[:200]}): write another "
                        f"step_* folder's name into {latest}, or choose another output")
    changed = [f"{key} was {before.get(key)!r}, is {value!r}" for key, value in sorted(vars(cfg).items())
               if before.get(key) != value and not FIELDS[key].get("change")]
    changed += [f"{path} has changed" for path in data if state["data"].get(path) not in (None, data[path])]
    if changed and cfg.resume != "force":
        raise DataError(f"{folder}: this run differs from the one that it would go on with: "
                        f"{'; '.join(changed)}: undo that, add resume=force, or choose another output")
    return dict(state, data=data)

def load_weights(checkpoint, model):
    """The weights of a checkpoint folder (init_from), without optimizer and position."""
    if not Path(checkpoint, "dcp", ".metadata").is_file():
        raise DataError(f"init_from {checkpoint!r}: no checkpoint folder (…/checkpoints/step_000100)")
    with torch.no_grad():
        dcp.load({"model": dict(model.named_parameters())}, checkpoint_id=str(Path(checkpoint, "dcp")))

# ---------------------------------------------------------------------------------------- the run

def prepare(cfg, rank=0, world=1, device=torch.device("cpu")):
    """All that can be wrong with the input, before a model is loaded.  Returns (run, train, val records)."""
    for name in ("tensor_parallel", "shard_size"):
        if world % (getattr(cfg, name) or 1):
            raise DataError(f"{name} is {getattr(cfg, name)}, which does not divide the {world} processes")
    try:
        Path(cfg.output).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise DataError(f"output {cfg.output!r}: cannot be a folder ({e.strerror}); choose another")
    if missing := set(cfg.trackers) - set(map(str, get_available_trackers())):
        raise DataError(f"trackers: {', '.join(sorted(missing))} not installed: pip install it or drop it")
    prompts = video_io.load_prompts(cfg.prompts or None)
    scorer = rewards.Scorer(rewards.RewardSettings(
        1 - cfg.format_weight, cfg.format_weight, cfg.reward or None, cfg.on_reward_error,
        allow_code_execution=cfg.allow_code_execution, overlong_buffer=cfg.overlong_buffer,
        overlong_limit=cfg.max_response_length if cfg.overlong_buffer else 0))
    check = functools.partial(rewards.check_record, settings=scorer.settings)
    train, val = ([record for path in files for record in video_io.load_records(
        path, cfg.data_root or None, prompts, check)] for files in (cfg.train_files, cfg.val_files))
    cfg.model = rollout.model_folder(cfg.model)
    processor = video_io.load_processor(cfg.model)
    model_config = AutoConfig.from_pretrained(cfg.model)

    def reader(cfg):
        spec = video_io.media_spec(model_config, **{name: getattr(cfg, name) or None for name in (
            "fps", "min_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels", "image_max_pixels",
            "timestamps")})
        loader = video_io.MediaLoader(spec, cfg.decode_workers, cache_dir=cfg.cache_dir or None)
        return loader, rollout.Prompter(processor, model_config, prompts, cfg.prompt_form,
                                        cfg.system_prompt or None, cfg.max_prompt_length)
    loader, prompter = reader(cfg)
    val_loader, val_prompter = reader(dataclasses.replace(cfg, **cfg.val)) if cfg.val else (loader, prompter)
    train, val = usable(train, loader, prompter, cfg), usable(val, val_loader, val_prompter, cfg)
    banned = video_io.vision_token_ids(model_config)
    for record in (r for r in train if cfg.offline != "off" and r.get("has_offline_trajectory")):
        given = offline_response(cfg, record, processor.tokenizer)
        if given and set(given[0].ids) & set(banned):
            raise DataError(f"{record['where']}: offline_output holds a vision placeholder: remove it")
        if not given and rank == 0:
            print(f"{record['where']}: offline_output is over max_response_length; not used", file=sys.stderr)
    layers = getattr(model_config.get_text_config(), "layer_types", None) or ()
    if "sliding_attention" in layers:
        raise DataError(f"model {cfg.model}: its config.json asks for sliding-window attention, which is not "
                        "there in the packed forward; set use_sliding_window to false")
    recurrent = any("attention" not in kind or "linear" in kind for kind in layers)
    if recurrent and rank == 0:
        print("recurrent layers: each response is forwarded with its own prompt", file=sys.stderr)
    return Run(cfg, rank, world, device, prompter, val_prompter, loader, val_loader,
               torch.tensor(banned, device=device), scorer, recurrent), train, val

def usable(records, loader, prompter, cfg):
    """Open every clip once and count its tokens, without decoding.  What cannot be used stops the run, or is
    dropped (on_bad_media).  The others get `tokens` of their prompt and `frame_bytes`."""
    rows = list(video_io.survey(records, loader, prompter.prompts, prompter.processor, prompter.form,
                                cfg.max_prompt_length, cfg.system_prompt or None))
    problems = [f"{record['where']}: {reason}" for record, _, _, reason, _ in rows if reason]
    if problems and (cfg.on_bad_media == "stop" or len(problems) == len(records)):
        problems[20:] = [f"{len(problems)} of {len(records)} records cannot be used: repair them, or set "
                         "on_bad_media=drop"]
        raise DataError("\n".join(problems))
    if problems:
        print(f"dropped {len(problems)} of {len(records)} records, the first: {problems[0]}", file=sys.stderr)
    per_token = 3 * loader.spec.temporal_patch_size * loader.spec.token
    return [dict(record, tokens=visual + text, frame_bytes=visual * per_token)
            for record, visual, text, reason, _ in rows if not reason]

def plan(cfg, run, train, val):
    """dry_run: what a step is made of, what memory it takes, and one sample as the model sees it."""
    with init_empty_weights():
        model = AutoModelForImageTextToText.from_config(run.prompter.model_config)
    lengths = sorted(record["tokens"] for record in train)
    pack = min(cfg.max_tokens_per_pack, lengths[-1] + cfg.n * cfg.max_response_length)
    parts = memory_estimate(cfg, run, sum(p.numel() for p in model.parameters()), pack)
    print(f"{len(train)} training, {len(val)} validation records; {cfg.steps} steps of "
          f"{cfg.prompts_per_step} prompts x {cfg.n} answers, "
          f"{cfg.steps * cfg.prompts_per_step / len(train):.1f} epochs\n"
          f"tokens: median prompt {lengths[len(lengths) // 2]}, longest {lengths[-1]}, largest pack {pack}\n"
          "GiB of a process, vLLM apart: " + ", ".join(f"{k} {v / 2**30:.1f}" for k, v in parts.items()))
    (group,), _ = run.prompter.groups([(train[0], run.loader.submit(train[0]))])
    print(f"\nthe first record, {len(group.prompt_ids)} tokens:\n{group.text}")

def memory_estimate(cfg, run, n_params, pack):
    """Bytes of one process at the peak of an update on packs of so many tokens, by part.  A layer keeps 15
    hidden + 4 intermediate sizes a token for its backward, a recomputed one its input alone.  AdamW's step,
    when these are gone, needs the size of the weights once more."""
    text, width = run.prompter.model_config.get_text_config(), 2 if run.device.type == "cuda" else 4
    hidden, layers, again = text.hidden_size, text.num_hidden_layers, cfg.gradient_checkpointing
    share = n_params / (cfg.shard_size or run.world)
    layer = pack * width * (15 * hidden + 4 * text.intermediate_size)
    parts = {"weights, gradients, AdamW (float32)": 16 * share, "AdamW's step": 4 * share,
             "gathered layers": width * (2 * n_params / layers + text.vocab_size * hidden),
             "activations": again * layers * pack * hidden * width + max(1, (1 - again) * layers) * layer,
             "logits": 12 * LOGITS_ROWS * text.vocab_size}
    state, step, *rest = parts.values()
    return dict(parts, together=state + max(step, sum(rest)))

def main(cfg):
    cuda, launched = torch.cuda.is_available(), "LOCAL_RANK" in os.environ
    # tensors in host memory are gathered as well; else accelerate chooses
    backend = "cuda:nccl,cpu:gloo" if cuda and launched and (cfg.async_save or cfg.cpu_offload) else "nccl"
    accelerator = Accelerator(
        cpu=not cuda, log_with=cfg.trackers or None, project_dir=cfg.output,
        kwargs_handlers=[InitProcessGroupKwargs(backend, timeout=datetime.timedelta(minutes=30))])
    started, folder, stop = time.time(), Path(cfg.output), []
    run, train, val = prepare(cfg, accelerator.process_index, accelerator.num_processes, accelerator.device)
    if cfg.dry_run:
        return run.rank == 0 and plan(cfg, run, train, val)
    if run.rank == 0:
        start_run_folder(cfg, folder)
    accelerator.init_trackers("nanovideor1", {  # none unless cfg.trackers names some
        name: str(value) if isinstance(value, (list, dict)) else value for name, value in vars(cfg).items()})
    model = shard(load_policy(cfg, run.device), cfg, run.device, run.world)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], cfg.lr,
                                  betas=(0.9, cfg.beta2), weight_decay=cfg.weight_decay)
    data = {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in cfg.train_files}
    state = load_checkpoint(run, model, optimizer, data) or dict(
        step=0, position=0, validation={}, best=[-1.0, 0], kl_coef=cfg.kl_coef, data=data)
    reference = None
    if cfg.kl != "off":
        reference = shard(load_policy(cfg, run.device, reference=True), cfg, run.device, run.world)
        cfg.init_from and load_weights(cfg.init_from, reference)
        run.ref_head = whole(reference.lm_head.weight) if cfg.kl_kind == "full" else None
        reference.to("cpu")
    longest = cfg.max_prompt_length + max(cfg.max_response_length, cfg.val.get("max_response_length", 0))
    run.engine = rollout.Engine(
        cfg.model, dtype=compute_dtype(run.device), max_model_len=longest, banned=run.banned.tolist(),
        max_num_seqs=cfg.engine_max_seqs, memory_share=cfg.engine_memory, tensor_parallel=cfg.tensor_parallel,
        sleep_level=cfg.sleep_level, eager=cfg.eager, seed=cfg.seed,
        lockstep=run.device.type == "cpu")  # a resumed run repeats every bit
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    if state["step"] or cfg.init_from:
        run.engine.sync(full_parameters(model))
    if state["step"]:
        accelerator.print(f"going on with {folder} after step {state['step']}")
        if run.rank == 0:  # metrics of steps after the checkpoint come again
            rows = rollout.stored_rows(folder / "metrics.jsonl", "step")
            rollout.write_jsonl(folder / "metrics.jsonl", [rows[i] for i in rows if i <= state["step"]])
        for row in state.pop("surplus")[run.rank::run.world]:
            record = record_at(row["position"], train, cfg.seed) | dict(position=row["position"], stale=True)
            group = run.prompter.group(record, run.loader.submit(record))
            group.responses, group.scores = [rollout.Response(**r) for r in row["responses"]], row["scores"]
            run.surplus += [group] * (not group.error)  # its clip may have gone in the meantime
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))  # pre-emption: save after this step, exit 0

    if val and not state["step"]:
        validate(run, val, state)
    first = state["step"] + 1
    bar = tqdm(range(first, cfg.steps + 1), initial=first - 1, total=cfg.steps, disable=run.rank > 0,
               dynamic_ncols=True)
    for step in bar:
        run.seconds.clear()
        begin, last, state["step"] = time.perf_counter(), step == cfg.steps, step
        due = lambda every: every and step % every == 0
        groups, asked, lost = next_batch(run, train, state, last)
        if step == first:
            check_engine(run, model, groups)
        run.engine.sleep()
        getattr(model.model.visual, "kept", {}).clear()
        parts = [groups[i::cfg.updates_per_rollout] for i in range(cfg.updates_per_rollout)]
        with run.timer("logprobs"):
            if cfg.kl != "reward":
                set_advantages(cfg, groups, 0.0, gather)
            if len(parts) * cfg.ppo_epochs > 1 or cfg.kl == "reward":
                for i, part in enumerate(parts):
                    fill_logprobs(run, model, part, "old_logprobs", i)
            if reference is not None:
                fill_logprobs(run, reference.to(run.device), groups, "ref_logprobs")
                reference.to("cpu")
            if cfg.kl == "reward":
                set_advantages(cfg, groups, state["kl_coef"], gather)
        with run.timer("update"):
            for param_group in optimizer.param_groups:
                param_group["lr"] = learning_rate(cfg, step)
            updates = [update(run, model, optimizer, part, i, state["kl_coef"])
                       for _ in range(cfg.ppo_epochs) for i, part in enumerate(parts)]
        with run.timer("sync"):
            run.engine.sync(full_parameters(model, () if run.engine.needs_all else frozen), frozen)

        measured, rows = step_metrics(run, groups, asked, lost, updates, time.perf_counter() - begin)
        metrics = dict(step=step, lr=learning_rate(cfg, step), kl_coef=state["kl_coef"], **measured)
        if cfg.kl_target and "kl" in metrics:  # proportional controller of arXiv 1909.08593, horizon 10,000
            error = min(0.2, max(-0.2, metrics["kl"] / cfg.kl_target - 1))
            state["kl_coef"] *= 1 + error * metrics["n_groups"] * cfg.n / 10_000
        if run.rank == 0 and due(cfg.log_rollouts_every):
            rollout.write_jsonl(folder / "rollouts" / f"step_{step:06d}.jsonl", rows)
        stopping = any(gather(bool(stop)))
        if val and (last or due(cfg.val_every)):
            metrics |= validate(run, val, state)
        save = last or stopping or due(cfg.save_every) or state["best"][1] == step
        if run.rank == 0:
            with open(folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps(metrics) + "\n")
        accelerator.log({k: v for k, v in metrics.items() if k != "dropped"}, step=step)
        spent = " ".join(f"{phase} {seconds:.2f}" for phase, seconds in run.seconds.items())
        bar.set_postfix_str(f"reward {metrics['reward']:.2f} acc {metrics.get('accuracy', 0):.2f} {spent} ok "
                            f"{len(asked)} lost {len(lost)} {metrics['tokens_per_s']:.0f} tok/s", False)
        if save:
            save_checkpoint(run, model, optimizer, state)
        if stopping:
            break

    finish_save(run)
    for part in (run.loader, run.val_loader, run.scorer, run.engine):
        part.close()
    accelerator.end_training()
    if run.rank == 0:
        report(cfg, state, time.time() - started)

def full_parameters(model, skip=()):
    """(name, whole tensor) of every parameter but those named, gathered one at a time."""
    for name, p in model.named_parameters():
        if name not in skip:
            yield name, whole(p)

def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

def report(cfg, state, seconds):
    """The end of a run: accuracy before and after, where things are, what to do next."""
    print(f"\nfinished {state['step']} steps in {seconds:.0f} s")
    if done := list(state["validation"].items()):
        shown = dict([done[0], done[-1]])  # before and after
        print(f"{'validation accuracy (greedy)':32s}" + "".join(f"{f'step {step}':>10s}" for step in shown))
        for name in sorted(done[-1][1]):
            print(f"  {name:30s}" + "".join(f"{part.get(name, math.nan):10.3f}" for part in shown.values()))
    print(f"outputs: {cfg.output} (metrics.jsonl, rollouts/, validation/, checkpoints/)\nnext:\n"
          f"  python merge.py {cfg.output} {cfg.output}/merged\n"
          f"  python evaluate.py run --model {cfg.output}/merged --data "
          f"{' '.join(cfg.val_files) or 'YOURS.jsonl'}\n"
          f"  accelerate launch --quiet train_grpo.py configs/video_rl.yaml model=M train_files=YOURS.jsonl")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="YAML file with fields of configs/fields.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields that win over the file")
    args = parser.parse_args()
    try:
        main(load_config(args.config, args.overrides))
    except (DataError, rewards.RewardError) as e:
        parser.exit(2, f"{e}\n")
