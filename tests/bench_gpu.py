"""Measure on one GPU, with random weights of real size and clips made on the spot, what the README states.

    python tests/bench_gpu.py clips                           # write the clips (needs PyAV; minutes)
    python tests/bench_gpu.py update step rollout sync memory soak [--sizes 2b 8b] [--work /tmp/bench]
    python tests/bench_gpu.py update step rollout sync --sizes tiny     # the same path on a CPU

Every ratio has both its sides in one run.  Sections:
    update   --groups prompts with n answers each, every prompt and its answers one shared-prefix sequence, against
             n separate sequences: the same train_grpo.update, kernels and packing budget; only the packs differ
    step     rollout + log-probabilities + update + sync in train_grpo's order against the usual one: no
             priming, old log-probabilities computed, separate sequences, frames in memory or clips decoded when
             each phase needs them; live: the clips of the next step are decoded during this one
    rollout  tokens/s of rollout.answers from clip files against LLM.generate on decoded clips
    sync     seconds and memory of weight sync, sleep and wake; engine-trainer gap around them
    memory   train_grpo.memory_estimate against the measured peak of an update with AdamW
    check    loss, log-probabilities and gradients of a small case on the GPU in bf16 against the CPU in float32
    soak     150 steps of the toy (toy/ must exist): accuracy, memory and mismatch over time

Model FLOPs: forward + backward = 6 per weight and token (embedding and recomputation left out, lm_head on
response tokens only) and 12 per layer, head dimension, head and query-key pair, of the text model and of the
vision tower (whose pairs are those inside a frame).  MFU relates them to a measured bf16 matrix product.
"""

import argparse
import dataclasses
import gc
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import rollout  # noqa: E402
import train_grpo  # noqa: E402
import video_io  # noqa: E402

TEXT = {"2b": dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16),
        "8b": dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32)}
VISION = {"2b": dict(depth=24, hidden_size=1024, intermediate_size=4096, deepstack_visual_indexes=[5, 11, 17]),
          "8b": dict(depth=27, hidden_size=1152, intermediate_size=4304, deepstack_visual_indexes=[8, 16, 24])}
FRAMES = {"4k": (64, 256 * 512), "7k": (128, 256 * 448), "16k": (128, 512 * 512)}  # frames, pixels of each
CLIPS = 24
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def write_clips(folder, count, seconds=40, fps=30, width=1280, height=720):
    """Real H.264 clips with a moving square on noise that differs from clip to clip."""
    import av

    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        rng = np.random.default_rng(i)
        ground = np.kron(rng.integers(0, 90, (height // 16, width // 16, 3)), np.ones((16, 16, 1))).astype(np.uint8)
        with av.open(str(folder / f"{i:03d}.mp4"), "w") as out:
            stream = out.add_stream("libx264", fps, options={"preset": "veryfast", "crf": "40"})
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            for t in range(seconds * fps):
                frame = ground.copy()
                x, y = (37 * i + 5 * t) % (width - 64), (91 * i + 3 * t) % (height - 64)
                frame[y:y + 64, x:x + 64] = rng.integers(0, 255, 3) if t % 300 == 0 else 255 - frame[y, x]
                for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                    out.mux(packet)
            for packet in stream.encode():
                out.mux(packet)


def model_folder(size, work):
    """A folder with random bf16 weights of a real size and the toy's tokenizer and processor."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    if size == "tiny":
        return str(ROOT / "toy/model")
    out = work / size
    if not (out / "config.json").exists():
        shutil.copytree(ROOT / "toy/model", out, ignore=shutil.ignore_patterns("*.safetensors"))
        config = AutoConfig.from_pretrained(ROOT / "toy/model")
        tied = size == "2b"
        for part, values in ((config.text_config, TEXT[size] | dict(
                vocab_size=151936, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
                tie_word_embeddings=tied, rope_parameters=dict(
                    rope_type="default", rope_theta=5e6, mrope_section=[24, 20, 20], mrope_interleaved=True))),
                (config.vision_config, VISION[size] | dict(
                    num_heads=16, out_hidden_size=TEXT[size]["hidden_size"], num_position_embeddings=2304)),
                (config, dict(tie_word_embeddings=tied))):
            for key, value in values.items():
                setattr(part, key, value)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        with DEVICE:
            model = AutoModelForImageTextToText.from_config(config)
        torch.set_default_dtype(torch.float32)
        model.save_pretrained(out)
        del model
        free()
    return str(out)


def free():
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def now():
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak():
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else math.nan


def matmul_rate():
    """FLOP/s of a large bf16 matrix product here."""
    size = 8192 if torch.cuda.is_available() else 512
    a = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16)
    for _ in range(3):
        a @ a
    start = now()
    for _ in range(10):
        a @ a
    return 10 * 2 * size**3 / (now() - start)


def setup(args, size, frames, pixels, responses, device=DEVICE, **changes):
    """(run, records) of train_grpo on the bench's clips, `frames` frames of `pixels` sampled from each."""
    data = args.work / "data.jsonl"
    rows = [dict(problem="What moves?", answer="A", options=["a square", "nothing"], data_type="video",
                 problem_type="multiple choice", videos=[str(clip.resolve())])
            for clip in sorted(args.clips.glob("*.mp4"))]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = train_grpo.Config(**dict(dict(
        model=model_folder(size, args.work), train_files=[str(data)], output=str(args.work / "run"), fps=2.0,
        min_frames=frames, max_frames=frames, min_pixels=pixels, max_pixels=pixels, max_prompt_length=17408 if size != "tiny" else 2048,
        max_response_length=responses, max_tokens_per_pack=65536, decode_workers=8 if DEVICE.type == "cuda" else 1,
        prompt_form="direct", max_grad_norm=1e9), **changes))
    run, records, _ = train_grpo.prepare(cfg, device=device)
    return run, records


def decode(run, records):
    groups, lost = run.prompter.groups([(r, run.loader.submit(r)) for r in records])
    assert not lost, lost[0]
    return groups


def answered(group, n, length, rng, vocabulary):
    """A group with random answers and advantages."""
    responses = [rollout.Response(rng.integers(20, vocabulary, length).tolist(), [-5.0] * length, "", "stop")
                 for _ in range(n)]
    return dataclasses.replace(group, responses=responses, scores=[dict(overall=float(i)) for i in range(n)],
                               advantages=torch.linspace(-1, 1, n))


def apart(groups):
    """The same answers as n groups of one answer each: every sequence carries its own prompt."""
    return [dataclasses.replace(g, responses=[r], scores=[s], advantages=g.advantages[i:i + 1], old_logprobs=(
        None if g.old_logprobs is None else [g.old_logprobs[i]]))
        for g in groups for i, (r, s) in enumerate(zip(g.responses, g.scores))]


def flops(run, model, groups):
    """Model FLOPs of forward and backward over groups (module docstring)."""
    config = run.prompter.model_config
    text, vision, total = config.get_text_config(), config.vision_config, 0
    weights = sum(p.numel() for name, p in model.model.language_model.named_parameters() if "embed" not in name)
    tower = sum(p.numel() for p in model.model.visual.parameters())
    for g in groups:
        P, lengths = len(g.prompt_ids), [len(r.ids) for r in g.responses]
        pairs = P * P / 2 + sum(R * (P + R / 2) for R in lengths)
        total += 6 * weights * (P + sum(lengths)) + 6 * text.hidden_size * text.vocab_size * sum(lengths)
        total += 12 * text.num_hidden_layers * text.num_attention_heads * text.head_dim * pairs
        for clip in g.media.videos:
            T, _, H, W = clip.frames.shape
            patches, inside = T // 2 * (H // 16) * (W // 16), (H // 16) * (W // 16)
            total += 6 * tower * patches + 12 * vision.depth * vision.hidden_size * patches * inside
    return total


def policy(run, optimizer=None):
    model = train_grpo.load_policy(run.cfg, run.device)
    if run.device.type == "cuda":
        train_grpo.shard(model, run.cfg, run.device, 1)
    return model, (optimizer or torch.optim.SGD)(model.parameters(), 0.0)


def timed_update(run, model, optimizer, groups, repeats):
    """(fastest seconds, peak GiB, metrics) of train_grpo.update."""
    metrics = train_grpo.update(run, model, optimizer, groups[:2])  # warm
    free()
    seconds = []
    for _ in range(repeats):
        start = now()
        metrics = train_grpo.update(run, model, optimizer, groups)
        seconds.append(now() - start)
    return min(seconds), peak(), metrics


def bench_update(args):
    rate, rng = matmul_rate(), np.random.default_rng(0)
    print(f"update: bf16 matrix product {rate / 1e12:.0f} TFLOP/s")
    print(f"{'size':>5} {'P':>6} {'n':>3} {'R':>5} | {'shared s':>8} {'tok/s':>7} {'MFU':>4} {'GiB':>4} | "
          f"{'apart s':>8} {'GiB':>4} | {'ratio':>5} {'FLOPs':>5} {'share':>5} | loss shared, apart")
    for size in args.sizes:
        model = None
        for name in args.prompts:
            frames, pixels = FRAMES[name] if size != "tiny" else (8, 4096)
            run, records = setup(args, size, frames, pixels, 2048, gradient_checkpointing=args.checkpointing,
                                 compile=args.compile, max_tokens_per_pack=args.pack if size != "tiny" else 4096)
            model, optimizer = (model, optimizer) if model else policy(run)
            decoded = decode(run, records[:args.groups])
            for n, length, both in args.cells:
                groups = [answered(g, n, length, rng, 250 if size == "tiny" else 150000) for g in decoded]
                tokens = sum(len(g.prompt_ids) + n * length for g in groups)
                a, gib, metrics = timed_update(run, model, optimizer, groups, 2)
                fast = flops(run, model, groups)
                line = (f"{size:>5} {len(groups[0].prompt_ids):>6} {n:>3} {length:>5} | {a:8.2f} {tokens / a:7.0f} "
                        f"{fast / a / rate:4.0%} {gib:4.0f} |")
                if both:
                    b, gib, other = timed_update(run, model, optimizer, apart(groups), 1)
                    slow = flops(run, model, apart(groups))
                    line += (f" {b:8.2f} {gib:4.0f} | {b / a:5.2f} {slow / fast:5.2f} {b / a / (slow / fast):5.0%} | "
                             f"{metrics['loss']:.4f} {other['loss']:.4f}")
                print(line, flush=True)
            run.loader.close()
        del model, optimizer
        free()


def engine_for(run, **options):
    cfg = run.cfg
    return rollout.Engine(cfg.model, dtype=train_grpo.compute_dtype(DEVICE), banned=run.banned.tolist(),
                          max_model_len=cfg.max_prompt_length + cfg.max_response_length, max_num_seqs=128,
                          memory_share=0.3, **options)


def sample(run, records, n, **sampling):
    feed = ((r, run.loader.submit(r), i * n) for i, r in enumerate(records))
    return list(rollout.answers(run.engine, run.prompter, feed, n, max_tokens=run.cfg.max_response_length,
                                min_tokens=run.cfg.max_response_length, **sampling))


def bench_step(args):
    size, n, length = args.sizes[0], 8, 256 if args.sizes[0] != "tiny" else 16
    frames, pixels = (64, 256 * 448) if size != "tiny" else (8, 4096)
    run, records = setup(args, size, frames, pixels, length, n=n)
    per = min(8, len(records) // 3)
    model, optimizer = policy(run, torch.optim.AdamW)
    run.engine, rng = engine_for(run, prime=True), np.random.default_rng(0)

    def submit(records):
        return [(r, run.loader.submit(r)) for r in records]

    def one_step(waiting, old, again):
        """Seconds by phase of one step on [(record, Future of its frames)]."""
        run.engine.prime, phases, mark = not old, {}, now()

        def phase(name):
            nonlocal mark
            phases[name], mark = now() - mark, now()

        feed = ((r, future, i * n) for i, (r, future) in enumerate(waiting))
        groups = list(rollout.answers(run.engine, run.prompter, feed, n, max_tokens=length, min_tokens=length))
        phase("rollout")
        for g in groups:
            g.scores = [dict(overall=float(x)) for x in rng.random(n)]
            g.advantages = train_grpo.group_advantages(torch.tensor([s["overall"] for s in g.scores]), "grpo")
        if old:
            for what in ("logprobs", "update"):
                if again:  # each worker of the trainer reads the clips anew
                    for g, fresh in zip(groups, decode(run, [g.record for g in groups]), strict=True):
                        g.media = fresh.media
                    phase(f"decode for {what}")
                parts = apart(groups)
                if what == "logprobs":
                    train_grpo.fill_logprobs(run, model, parts, "old_logprobs")
                    for i, g in enumerate(groups):
                        g.old_logprobs = [p.old_logprobs[0] for p in parts[i * n:(i + 1) * n]]
                    phase("logprobs")
        train_grpo.update(run, model, optimizer, apart(groups) if old else groups)
        phase("update")
        run.engine.sync(train_grpo.full_parameters(model))
        phase("sync")
        return phases

    def ready(waiting):
        [future.result() for _, future in waiting]
        return waiting

    batches = [records[i * per:(i + 1) * per] for i in range(3)]  # new to the engine in each step: sync empties its caches
    one_step(ready(submit(batches[0])), True, False)  # warm
    ahead = submit(batches[1])
    one_step(ready(submit(batches[0])), False, False)  # while it runs, the clips of the next are decoded
    following = submit(batches[2])  # and during that those of the one after, as in training
    rows = {"ours, clips decoded live": one_step(ahead, False, False)}
    rows["ours, frames in memory"] = one_step(ready(following), False, False)
    rows["usual, frames in memory"] = one_step(ready(submit(batches[0])), True, False)
    start = now()
    ready(submit(batches[1]))
    alone = now() - start
    rows["usual, decoded in each phase"] = one_step(submit(batches[2]), True, True)
    print(f"step: {size}, {per} clips of {frames} frames (decoded alone {alone:.1f} s), n={n}, {length} tokens an answer; "
          "seconds")
    for name, phases in rows.items():
        print(f"  {name:30s} {sum(phases.values()):7.2f}  " + "  ".join(f"{k} {v:.2f}" for k, v in phases.items()))
    whole = {name: sum(phases.values()) for name, phases in rows.items()}
    live, memory, kept, again = whole.values()
    print(f"  usual/ours: frames in memory {kept / live:.2f}, decoded in each phase {again / live:.2f}; "
          f"live decode/frames in memory {live / memory:.3f}", flush=True)
    run.engine.close()
    run.loader.close()
    del model, optimizer
    free()


def bench_rollout(args):
    from vllm import SamplingParams

    size, n = args.sizes[0], 8
    length = 256 if size != "tiny" else 16
    run, records = setup(args, size, *((64, 256 * 448) if size != "tiny" else (8, 4096)), length, n=n)
    run.engine, half = engine_for(run, prime=True), len(records) // 2
    sample(run, records[:2], n)  # warm
    run.engine.reset_caches()
    groups = decode(run, records[:half])
    start = now()
    outputs = run.engine.llm.generate([video_io.vllm_inputs(g.text, g.media) for g in groups], SamplingParams(
        n=n, max_tokens=length, min_tokens=length, logprobs=0), use_tqdm=False)
    plain = sum(len(c.token_ids) for out in outputs for c in out.outputs) / (now() - start)
    run.engine.reset_caches()
    start = now()
    groups = sample(run, records[half:2 * half], n)
    ours = sum(len(r.ids) for g in groups for r in g.responses) / (now() - start)
    print(f"rollout: {size}, {half} new clips each, n={n}, {length} tokens: LLM.generate on decoded clips {plain:.0f} "
          f"tokens/s, answers() from files {ours:.0f} tokens/s, ratio {ours / plain:.2f}", flush=True)
    run.engine.close()
    run.loader.close()
    free()


def bench_sync(args):
    for size in args.sizes:
        run, records = setup(args, size, *((64, 256 * 448) if size != "tiny" else (8, 4096)), 64)
        model, _ = policy(run)
        levels = (1, 2) if DEVICE.type == "cuda" else ()
        run.engine = engine_for(run, sleep_level=2 if levels else 0)
        groups = decode(run, records[:4])
        sync = lambda: run.engine.sync(train_grpo.full_parameters(model))
        used = lambda: (lambda free, total: (total - free) / 2**30)(*torch.cuda.mem_get_info()) if levels else math.nan

        def gap():
            """Engine against trainer on greedy answers."""
            run.engine.generate(groups, 1, max_tokens=64, temperature=0.0)
            for g in groups:
                g.advantages = None
            train_grpo.fill_logprobs(run, model, groups, "old_logprobs")
            d = torch.cat([(g.old_logprobs[0] - torch.tensor(g.responses[0].logprobs)).abs() for g in groups])
            return f"{d.mean():.1e} mean {d.max():.1e} max"

        sync()
        free()
        before = used()
        start = now()
        sync()
        print(f"sync: {size}: {now() - start:.2f} s, extra memory {peak() - torch.cuda.memory_allocated() / 2**30 if levels else math.nan:.1f} GiB; "
              f"gap {gap()}", flush=True)
        for level in levels:
            start = now()
            run.engine.sleep(level)
            asleep, down = used(), now() - start
            start = now()
            sync()
            print(f"  sleep {level}: {down:.2f} s, wake with sync {now() - start:.2f} s, card {before:.0f} GiB awake, "
                  f"{asleep:.0f} asleep; gap {gap()}", flush=True)
        run.engine.close()
        run.loader.close()
        del model
        free()


def bench_memory(args):
    rng = np.random.default_rng(0)
    for size in args.sizes:
        for name, n, length, kept in (("7k", 8, 512, 1.0), ("16k", 8, 2048, 1.0), ("7k", 8, 512, 0.5)):
            frames, pixels = FRAMES[name] if size != "tiny" else (8, 4096)
            run, records = setup(args, size, frames, pixels, length, gradient_checkpointing=kept)
            model, optimizer = policy(run, torch.optim.AdamW)
            g = answered(decode(run, records[:1])[0], n, length, rng, 150000 if size != "tiny" else 250)
            try:
                _, gib, _ = timed_update(run, model, optimizer, [g], 1)
            except torch.cuda.OutOfMemoryError:
                gib = math.inf
            pack = len(g.prompt_ids) + n * length
            guess = train_grpo.memory_estimate(run.cfg, run, sum(p.numel() for p in model.parameters()), pack)
            print(f"memory: {size}, pack of {pack}, checkpointing {kept}: estimate {guess['together'] / 2**30:.1f} "
                  f"GiB, measured {gib:.1f}", flush=True)
            run.loader.close()
            del model, optimizer, run
            free()


def bench_check(args):
    found = []
    for device in (torch.device("cpu"), DEVICE):
        run, records = setup(args, "tiny", 8, 4096, 64, device, decode_workers=1)
        model, optimizer = policy(run)
        rng = np.random.default_rng(0)
        groups = [answered(g, n, length, rng, 250)
                  for g, n, length in zip(decode(run, records[:3]), (4, 8, 1), (24, 7, 1))]
        train_grpo.fill_logprobs(run, model, groups, "old_logprobs")
        logprobs = torch.cat([x.flatten() for g in groups for x in g.old_logprobs])
        for g in groups:
            g.old_logprobs = None
        metrics = train_grpo.update(run, model, optimizer, groups)
        grads = torch.cat([(p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).flatten().cpu()
                           for p in model.parameters() if p.grad is not None]).double()
        found.append((metrics["loss"], logprobs, grads))
        run.loader.close()
    (loss, logprobs, grads), (loss_gpu, logprobs_gpu, grads_gpu) = found
    print(f"check: loss {loss:.5f} and {loss_gpu:.5f}; log-probabilities differ by {(logprobs - logprobs_gpu).abs().mean():.1e} "
          f"mean, {(logprobs - logprobs_gpu).abs().max():.1e} max; gradients by {(grads - grads_gpu).norm() / grads.norm():.1e} "
          f"of their norm, cosine {torch.cosine_similarity(grads, grads_gpu, 0):.5f}", flush=True)


def bench_soak(args):
    out = args.work / "soak"
    cfg = train_grpo.load_config(ROOT / "configs/toy.yaml", [
        f"output={out}", "steps=150", "val_every=0", "save_every=0", "engine_memory=0.05", "decode_workers=4"])
    train_grpo.main(cfg)
    rows = [json.loads(line) for line in open(out / "metrics.jsonl")]
    for i in (5, 50, 100, 149):
        r = rows[i]
        print(f"soak step {i + 1}: reward {r['reward']:.2f} accuracy {r['accuracy']:.2f} gap {r.get('logprob_gap', 0):.1e} "
              f"host {r['host_gib']:.2f} GiB card {r.get('gpu_gib', 0):.2f} GiB, {r['step_s']:.2f} s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = dict(update=bench_update, step=bench_step, rollout=bench_rollout, sync=bench_sync,
                    memory=bench_memory, check=bench_check, soak=bench_soak)
    parser.add_argument("sections", nargs="+", choices=["clips", *sections])
    parser.add_argument("--sizes", nargs="+", default=["2b"], choices=["tiny", "2b", "8b"])
    parser.add_argument("--prompts", nargs="+", default=list(FRAMES), choices=list(FRAMES))
    parser.add_argument("--cells", nargs="+", default=["8x512+", "16x512", "8x2048+"], metavar="nxR[+]",
                        help="answers x tokens of the update; +: also as separate sequences")
    parser.add_argument("--work", type=Path, default=Path("/tmp/bench"))
    parser.add_argument("--clips", type=Path, help="folder of clips (default WORK/clips)")
    parser.add_argument("--checkpointing", type=float, default=1.0, help="share of layers recomputed")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--groups", type=int, default=4, help="prompts of an update")
    parser.add_argument("--pack", type=int, default=33792, help="max_tokens_per_pack of the update")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    tiny = args.sizes == ["tiny"]
    args.cells = [(8, 16, True)] if tiny else [(*map(int, c.strip("+").split("x")), "+" in c) for c in args.cells]
    args.prompts = ["4k"] if tiny else args.prompts
    args.clips = args.clips or args.work / "clips"
    args.work.mkdir(parents=True, exist_ok=True)
    for section in args.sections:
        if section == "clips":
            write_clips(args.clips, 8 if tiny else CLIPS, *((8, 8, 128, 128) if tiny else ()))
        else:
            start = time.time()
            sections[section](args)
            print(f"({section}: {time.time() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
