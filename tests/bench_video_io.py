"""Measures video_io against what it replaces (qwen-vl-utils comes with the extra `test`):

    python tests/bench_video_io.py [--rounds 3] [--only decode|patchify|cached|workers]

Each pair runs in one go, alternating, in fresh processes where memory is measured; the best of the rounds counts, so that
a busy machine does both sides the same wrong. Goals: decode >= 1.5x and <= 0.35x memory, patchify >= 3x, cached load <= 1/4,
two workers >= 1.7x one (needs two free cores).
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

import video_io
from video_io import MediaLoader, MediaSpec

SPEC = MediaSpec(nframes=64, max_pixels=262144)


def write_clip(path, n, size, fps=30, preset="veryfast"):
    """H.264 of a noisy pan over smooth texture: not the easy case of a test card."""
    import av
    from PIL import Image

    rng = np.random.RandomState(0)
    w, h = size
    big = np.asarray(Image.fromarray(rng.randint(0, 255, (h // 8, w // 8, 3), dtype=np.uint8)).resize((2 * w, 2 * h), 3))
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"preset": preset, "crf": "23"})
        stream.width, stream.height, stream.pix_fmt = w, h, "yuv420p"
        for i in range(n):
            pixels = np.ascontiguousarray(big[i % h:i % h + h, 3 * i % w:3 * i % w + w])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


def one_decode(who, path):
    """In a process of its own: seconds and peak memory beyond the imports, as JSON."""
    if who == "qwen-vl-utils":
        os.environ["FORCE_QWENVL_VIDEO_READER"] = "decord"
        from qwen_vl_utils.vision_process import fetch_video
    else:
        import decord  # noqa: F401  both sides start with their imports done
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    if who == "qwen-vl-utils":
        frames = fetch_video({"video": path, "nframes": 64, "max_pixels": 262144}, image_patch_size=16)
    else:
        frames = video_io.decode(path, SPEC).frames
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"s": seconds, "MB": peak / 1024, "added MB": (peak - before) / 1024, "shape": list(frames.shape)}))


def timed(function, repeat=1):
    start = time.perf_counter()
    for _ in range(repeat):
        function()
    return (time.perf_counter() - start) / repeat


def show(what, ours, theirs, unit, ratio, goal, ok):
    print(f"{what:<34} {ours:>9.3f} {theirs:>9.3f} {unit:<4} {ratio:>6.2f}x  goal {goal}  {'ok' if ok else 'MISSED'}", flush=True)


def bench_decode(folder, rounds):
    path = str(folder / "hd.mp4")
    write_clip(path, 1800, (1920, 1080))
    best = {}
    for _ in range(rounds):
        for who in ("qwen-vl-utils", "video_io"):
            out = subprocess.run([sys.executable, __file__, "--decode", who, path], capture_output=True, text=True, check=True).stdout
            got = json.loads(out.strip().splitlines()[-1])
            best.setdefault(who, []).append(got)
    (ours, theirs), small = ({k: min(g[k] for g in best[who]) for k in ("s", "MB", "added MB")} for who in ("video_io", "qwen-vl-utils")), None
    show("decode+resize 64 of 60 s 1080p", ours["s"], theirs["s"], "s", theirs["s"] / ours["s"], ">= 1.5", theirs["s"] >= 1.5 * ours["s"])
    show("  peak memory of the process", ours["MB"], theirs["MB"], "MB", ours["MB"] / theirs["MB"], "<= 0.35", ours["MB"] <= 0.35 * theirs["MB"])
    show("  of it added by decoding", ours["added MB"], theirs["added MB"], "MB", ours["added MB"] / theirs["added MB"], "<= 0.35",
         ours["added MB"] <= 0.35 * theirs["added MB"])


def bench_patchify(folder, rounds):
    from types import SimpleNamespace

    from transformers import Qwen3VLVideoProcessor

    frames = torch.randint(0, 256, (128, 3, 384, 672), dtype=torch.uint8)
    processor = Qwen3VLVideoProcessor()
    config = SimpleNamespace(model_type="qwen3_vl", image_token_id=1, video_token_id=2, vision_config=SimpleNamespace(
        patch_size=16, spatial_merge_size=2, temporal_patch_size=2))
    media = video_io.Media([video_io.Clip(frames, 2.0, list(range(128)), 128, 64.0)])
    ours, theirs = [], []
    for _ in range(rounds + 1):
        ours.append(timed(lambda: video_io.model_inputs([0], media, config, [0.5] * 3, [0.5] * 3, "cpu", torch.bfloat16)))
        theirs.append(timed(lambda: processor(videos=[frames], do_resize=False, do_sample_frames=False, return_tensors="pt")
                            ["pixel_values_videos"].to(torch.bfloat16)))
    show("patchify 128 frames 384x672", min(ours), min(theirs), "s", min(theirs) / min(ours), ">= 3", min(theirs) >= 3 * min(ours))


def bench_cached_load(folder, rounds):
    path = str(folder / "vga.mp4")
    write_clip(path, 256, (1280, 720))
    spec = MediaSpec(nframes=128, max_pixels=262144)
    clip, file = video_io.load_item({"kind": "video", "path": path}, spec, folder / "cache")
    torch.save(clip.frames.float(), folder / "float32.pt")
    ours, theirs = [], []
    for _ in range(rounds + 1):  # both read every byte: a mapping alone would cost nothing
        ours.append(timed(lambda: video_io.read_clip(file).frames.view(-1).view(torch.int64).amax()))
        theirs.append(timed(lambda: torch.load(folder / "float32.pt", weights_only=True)))
    show(f"cached load {tuple(clip.frames.shape)}", min(ours), min(theirs), "s", min(ours) / min(theirs), "<= 0.25", min(ours) <= min(theirs) / 4)


def bench_workers(folder, rounds):
    for i in range(8):
        write_clip(folder / f"w{i}.mp4", 200 + i, (1280, 720))
    write_clip(folder / "warm.mp4", 8, (1280, 720))
    records = [{"videos": [str(folder / f"w{i}.mp4")], "images": []} for i in range(8)]
    best = {1: [], 2: []}
    for round_ in range(rounds):
        for workers in (1, 2):
            loader = MediaLoader(MediaSpec(max_pixels=262144), workers, cache_dir=folder / f"cache-{round_}-{workers}")
            warm = [loader.submit({"videos": [str(folder / "warm.mp4")], "images": [], "n": i}) for i in range(2 * workers)]
            [future.result() for future in warm]  # the workers have imported torch
            best[workers].append(timed(lambda: [future.result() for future in [loader.submit(record) for record in records]]))
            loader.close()
    one, two = min(best[1]), min(best[2])
    show("cache 8 clips, 2 workers against 1", two, one, "s", one / two, ">= 1.7", one >= 1.7 * two)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["decode", "patchify", "cached", "workers"])
    parser.add_argument("--decode", nargs=2)
    args = parser.parse_args()
    if args.decode:
        one_decode(*args.decode)
        sys.exit()
    print(f"{'':<34} {'video_io':>9} {'other':>9}       ratio   ({os.cpu_count()} cores, load {os.getloadavg()[0]:.1f})")
    with tempfile.TemporaryDirectory() as temp:
        for name, bench in dict(decode=bench_decode, patchify=bench_patchify, cached=bench_cached_load,
                                workers=bench_workers).items():
            if args.only in (None, name):
                bench(Path(temp), args.rounds)
