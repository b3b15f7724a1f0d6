"""Every clip in: records, prompts, sampling, decode, cache, workers, model inputs, token maths, data doctor.

    python video_io.py probe  clip.mp4 ...              # codec, size, fps, what would be sampled, tokens
    python video_io.py tokens data.jsonl --model M      # what the data costs in tokens, activations and cache
    python video_io.py check  data.jsonl                # opens every clip; data.clean.jsonl has the good ones
    python video_io.py cache  data.jsonl --cache-dir D  # decodes everything once, in parallel, resumable
    python video_io.py clip   data.jsonl OUT            # cuts the segments that the records name

A record: {"problem": "What is in <video>?", "answer": "B", "problem_type": "multiple choice", "options":
["cat", "dog"], "videos": ["1.mp4"], "video_start": 2.0, "video_end": 8.5}; a video may be a folder or list of
images, shown at "video_fps". Indices, sizes and budgets are those of qwen-vl-utils 0.0.14 with the right
patch size; where it is wrong (frame lists, variable rates, edit lists, one frame, extreme ratios) the file's
presentation times count, and no side is without a token.
"""
import argparse, atexit, contextlib, ctypes, difflib, fractions, hashlib, importlib.util, json, math, os, re
import select, shutil, subprocess, sys, tempfile, threading, time, uuid
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

SCHEMA = 2  # part of every cache key: raise it when decode or resize change their result
CHUNK = 8  # frames held at full size at a time
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
VISION_TRIPLE = "<|vision_start|><|video_pad|><|vision_end|>"
WORKER = [sys.executable, os.path.abspath(__file__), "_worker"]

class DataError(ValueError):
    """Bad input. The message is ready to print: one line per problem."""

class MediaError(Exception):
    """One clip or image that cannot be used: its path and a reason of one line."""
    def __init__(self, path, reason):
        self.path, self.reason = str(path), " ".join(str(reason).split())[:500]
        super().__init__(f"{self.path}: {self.reason}")

@dataclass(frozen=True)
class MediaSpec:
    """How media become tensors. Pixels are per frame, after the resize; None: a default in tokens."""
    fps: float = 2.0  # frames per second to sample
    nframes: int | None = None  # a fixed number of frames instead
    min_frames: int = 4
    max_frames: int = 768
    min_pixels: int | None = None  # 128 tokens
    max_pixels: int | None = None  # 768 tokens
    total_pixels: int | None = None  # per clip, counted after the merge of 2 frames: 115,200 tokens
    image_min_pixels: int | None = None  # 4 tokens
    image_max_pixels: int | None = None  # 16,384 tokens
    patch_size: int = 16  # pixels; 14 for Qwen2-VL and Qwen2.5-VL
    merge_size: int = 2  # patches per token and side
    temporal_patch_size: int = 2  # frames per token
    timestamps: str = "segment"  # count from the segment's start, as in a cut file; "source": the file's

    def __post_init__(self):
        for low in ("min_frames", "min_pixels", "image_min_pixels"):
            least, most = getattr(self, low), getattr(self, low.replace("min", "max"))
            if least and most and least > most:
                raise DataError(f"{low} {least} is above {low.replace('min', 'max')} {most}; lower it")
        if self.fps <= 0 or self.max_frames < 2 or self.timestamps not in ("segment", "source"):
            raise DataError(f"need fps > 0, max_frames >= 2, timestamps segment or source; got {self}")

    @property
    def token(self):  # pixels of a merged patch
        return (self.patch_size * self.merge_size) ** 2

def media_spec(model_config, **settings):
    """The spec with the patch sizes of a Hugging Face config."""
    v = model_config.vision_config
    return MediaSpec(**settings, patch_size=v.patch_size, merge_size=v.spatial_merge_size,
                     temporal_patch_size=v.temporal_patch_size)

@dataclass
class Clip:
    frames: torch.Tensor  # (T, 3, H, W) uint8, contiguous, T even; T = 1 for an image
    fps: float  # frame i was shown at frames_indices[i] / fps seconds
    frames_indices: list
    total_num_frames: int  # of the segment, in the unit of frames_indices
    duration: float  # of the segment, seconds
    key: str = ""  # hash of content and settings

@dataclass
class Media:
    videos: list = field(default_factory=list)  # of Clip
    images: list = field(default_factory=list)  # of (3, H, W) uint8
    image_keys: list = field(default_factory=list)

    @property
    def nbytes(self):
        return sum(x.nbytes for x in [clip.frames for clip in self.videos] + self.images)

# ---------------------------------------------------------------- records
def load_prompts(path=None):
    """{problem_type: {"reason": str, "direct": str}} from configs/prompts.yaml."""
    import yaml
    path = Path(path or Path(__file__).parent / "configs" / "prompts.yaml")
    try:
        prompts = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise DataError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())}") from error
    if bad := [kind for kind, forms in prompts.items() if set(forms) != {"reason", "direct"}]:
        raise DataError(f"{path}: entry '{bad[0]}' needs exactly the forms 'reason' and 'direct'")
    return prompts

def read_rows(path):
    """[(line, row)] of a JSON list, JSONL or parquet file; what is no JSON comes as a text that says so."""
    try:
        if Path(path).suffix == ".parquet":
            import pyarrow.parquet
            return list(enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1))
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # pyarrow's errors are among them
        raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    rows, at, line, between = [], 0, 1, re.compile(r"[\s,\[\]]*")
    while (end := between.match(text, at).end()) < len(text):  # value by value: each has its line number
        line += text.count("\n", at, end)
        try:
            row, at = json.JSONDecoder().raw_decode(text, end)
        except json.JSONDecodeError as error:
            row, at = f"no valid JSON: {error}", text.find("\n", end) % (len(text) + 1)
        rows.append((line, row))
        line += text.count("\n", end, at)
    return rows

def letter_options(options):
    """["A. text", ...] from a list, a dict {letter: text} or None. Letters that each option has are kept."""
    if isinstance(options, dict):
        return [f"{letter}. {text}" for letter, text in options.items() if text is not None]
    options = [str(option).strip() for option in options or []]
    marks = [re.match(r"\(?([A-Z])[.:)]\s*", option) for option in options]
    if all(marks) and len({mark[1] for mark in marks}) == len(marks):
        return [f"{mark[1]}. {option[mark.end():]}" for mark, option in zip(marks, options)]
    return [f"{chr(65 + i)}. {option}" for i, option in enumerate(options)]

def squash(name):
    return re.sub(r"[\s_-]+", "", str(name).lower())

def is_time(value, after):
    return value is None or {type(value), type(after)} == {float} and value > after

def media_fit(record, kind):
    n, marks = len(record[f"{kind}s"]), record["problem"].count(f"<{kind}>")
    return marks in (0, n) and (n or record["data_type"] != kind)

CHECKS = (  # field, what holds for a good record, what to do about the others
    ("problem_type", lambda r: r["problem_type"], "unknown; nearest: {nearest}; or add a prompt for it"),
    ("problem", lambda r: r["problem"].strip() or r["problem_type"] == "video description", "is missing"),
    ("problem", lambda r: not re.search(r"<\|(video|image|vision|im)_\w+\|>", r["problem"]),
     "holds a model's special token; use <video> and <image>"),
    ("answer", lambda r: r["answer"] not in ("", "null", "[]"), "give the answer as 'answer' or 'solution'"),
    ("data_source", lambda r: isinstance(r["data_source"], (str, type(None))), "must be text"),
    ("data_type", lambda r: r["data_type"] in ("video", "image", "text"), "must be video, image or text"),
    ("videos", lambda r: media_fit(r, "video"), "a video sample needs one, or one for each <video> mark"),
    ("images", lambda r: media_fit(r, "image"), "an image sample needs one, or one for each <image> mark"),
    ("options", lambda r: r["options"] or r["problem_type"] != "multiple choice", "needs a list of options"),
    ("video_start", lambda r: is_time(r["video_start"], -1e-9), "must be seconds, 0 or more"),
    ("video_end", lambda r: is_time(r["video_end"], r["video_start"] or 0.0), "must be after start {start}"),
    ("offline_output", lambda r: r["offline_output"] or not r["has_offline_trajectory"], "is missing"))

def make_record(row, where, root, kinds):
    """(record, problems) of a row of the training or evaluation layout. kinds: {squashed name: type}."""
    def first(*names):  # the value of the first field that has one
        return next((row[name] for name in names if row.get(name) not in (None, "", [])), None)

    def resolve(value):
        if isinstance(value, list):
            return [resolve(v) for v in value]
        file = os.path.normpath(os.path.join(root, str(value).removeprefix("file://")))
        if not os.path.exists(file):
            problems.append(f"{where}: no file {file}; fix the path or say where the data is (data_root)")
        return file

    problems, name, is_image = [], squash(row.get("problem_type")), row.get("data_type") == "image"
    videos = first("videos", *["path"] * (not is_image), "video") or []
    images = first("images", *["path"] * is_image, "image_path", "image") or []
    videos, images = (resolve(files if isinstance(files, list) else [files]) for files in (videos, images))
    if videos and all(str(file).lower().endswith(IMAGE_SUFFIXES) for file in videos):
        videos = [videos]  # a flat list of images is one clip, given as its frames
    answer = first("solution", "answer")
    answer = answer if isinstance(answer, str) else json.dumps(answer)
    # Charades-STA as published has <think>gold</think><[a placeholder]> where the answer tags were lost.
    lost = r"\s*<think>(.*?)</think>\s*(?:<\[[^\]]*\]>)?\s*"
    tagged = re.search(r"<answer>(.*?)</answer>", answer, re.S) or re.fullmatch(lost, answer, re.S)
    times = {"video_start": first("video_start", "start"), "video_end": first("video_end", "end")}
    stored, (source, _, line) = row.get("preprocessed_video"), where.rpartition(":")
    record = {"data_source": Path(source).stem, "problem_id": line, "offline_output": None} | row | {
        "where": where, "problem_type": kinds.get(name), "problem": str(first("problem", "question") or ""),
        "answer": (tagged[1] if tagged else answer).strip(), "videos": videos, "images": images,
        "data_type": row.get("data_type") or ("video" if videos else "image" if images else "text"),
        **{name: float(value) if type(value) is int else value for name, value in times.items()},
        "options": letter_options(row.get("options")),
        "has_offline_trajectory": bool(row.get("has_offline_trajectory")),
        "preprocessed_video": os.path.normpath(os.path.join(root, stored)) if stored else None}
    for key, holds, remedy in CHECKS:
        if not holds(record):
            near = [kinds[n] for n in difflib.get_close_matches(name, kinds, cutoff=0.5) or sorted(kinds)]
            remedy = remedy.format(nearest=", ".join(near), start=record["video_start"])
            value = json.dumps(record[key] or row.get(key), default=str)[:80]
            problems.append(f"{where}: {key} is {value}: {remedy}")
    return record, problems

def read_records(path, data_root=None, prompts=None, check=None):
    """(records without fault, problems as printable lines, {where: source row})."""
    root, seen, rows, records, problems = os.path.abspath(data_root or Path(path).parent), {}, {}, [], []
    kinds = {squash(kind): kind for kind in (load_prompts() if prompts is None else prompts)}
    kinds.setdefault("caption", kinds.get("videodescription"))  # Video-MMLU's name for it
    for line, row in read_rows(path):
        where = f"{Path(path).name}:{line}"
        rows[where] = row
        if not isinstance(row, dict):
            problems.append(f"{where}: {row if isinstance(row, str) else 'not a JSON object with fields'}")
            continue
        record, faults = make_record(row, where, root, kinds)
        # Of the source row, not the resolved one: a moved dataset keeps its keys.
        key = hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()[:16]
        seen[key] = seen.get(key, 0) + 1
        record["key"] = key if seen[key] == 1 else f"{key}:{seen[key]}"
        try:
            if check and not faults:
                check(record)
        except ValueError as error:
            faults = [f"{where}: " + str(error).removeprefix(f"{where}: ")]
        problems += faults
        records += [record] * (not faults)
    return records, problems, rows

def load_records(path, data_root=None, prompts=None, check=None):
    """All records of a JSON, JSONL or parquet file. DataError lists the faults; check may add some."""
    records, problems, rows = read_records(path, data_root, prompts, check)
    if problems or not rows:
        problems[20:] = [f"... and {len(problems) - 20} more problems"] * (len(problems) > 20)
        raise DataError("\n".join(problems) or f"{path}: holds no records")
    return records

# ---------------------------------------------------------------- prompts
def build_messages(record, prompts, form="reason", system=None):
    """Chat messages of the Hugging Face kind: media where their marks are, else before the text."""
    letters, text = [option[0] for option in record["options"]], record["problem"].strip()
    for mark, media in (("<image>", record["images"]), ("<video>", record["videos"])):
        text = mark * len(media) * (mark not in text) + text
    options = ["Options:\n" + "\n".join(record["options"])] if letters else []
    named = " or ".join([", ".join(letters[:-1])] * (len(letters) > 1) + letters[-1:])  # "A, B or C"
    text = "\n".join([text, *options, prompts[record["problem_type"]][form].replace("{letters}", named)])
    # Time stamps are tokenized apart by vLLM: "<" must not merge with what stands before the video.
    text = re.sub(r"(?<!<video>)(?<!<image>)(?<!^)\s*<video>", "\n<video>", text)
    content = [{"type": part[1:-1]} if part in ("<video>", "<image>") else {"type": "text", "text": part}
               for part in re.split("(<video>|<image>)", text) if part]
    system = [{"role": "system", "content": [{"type": "text", "text": system}]}] if system else []
    return system + [{"role": "user", "content": content}]

def prompt_text(record, prompts, processor, form="reason", system=None):
    """The templated prompt, media unexpanded, ready for the answer."""
    messages = build_messages(record, prompts, form, system)
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    # Qwen3-VL was released with "<time><vision_start>frame<vision_end>" per merged frame and nothing around
    # them; newer transformers expand the bare token only, so that the template's own wrapper would stay.
    qwen3 = type(processor).__name__.startswith("Qwen3")
    return text.replace(VISION_TRIPLE, "<|video_pad|>") if qwen3 else text

def load_processor(model_dir):
    """AutoProcessor; DataError in one line if there is none."""
    from transformers import AutoProcessor, ProcessorMixin
    try:
        processor = AutoProcessor.from_pretrained(model_dir)
        if not isinstance(processor, ProcessorMixin):
            raise ValueError("a tokenizer only; copy preprocessor_config.json")
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{model_dir}: no processor can be loaded: {reason}") from error
    return processor

# ---------------------------------------------------------------- sampling and sizes
def smart_resize(height, width, factor, min_pixels, max_pixels):
    """(height, width) in multiples of factor, the shape kept, the area within the bounds if it can be."""
    if max(height, width) > 200 * min(height, width):
        raise ValueError(f"{width}x{height} has an aspect ratio above 200")
    h, w = (max(factor, round(side / factor) * factor) for side in (height, width))
    if h * w > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        h, w = (max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))
        if h * w > max_pixels:  # one side is at its least: the other one gives way
            h, w = (min(side, max(factor, math.floor(max_pixels / factor**2) * factor)) for side in (h, w))
    elif h * w < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        h, w = (math.ceil(side * scale / factor) * factor for side in (height, width))
    return h, w

def segment(times, start, end):
    """(first, last) index of the frames shown from start to end, both included. ValueError if none."""
    start, end = start or 0, math.inf if end is None else end
    inside = np.flatnonzero((times >= start - 1e-4) & (times <= end + 1e-4))
    if not len(inside):
        raise ValueError(f"no frame from {start} s to {end} s; the last one is at {max(times):.2f} s")
    return int(inside[0]), int(inside[-1])

def sample_indices(timestamps_s, spec, start=None, end=None, fps=None):
    """An even number of frame indices from ascending times in seconds; fps: the rate that the file states.

    Evenly spaced frames: as qwen-vl-utils, linspace with both ends. Else the frames nearest to evenly spaced
    times. A lone frame is taken twice, nframes above the count is lowered to it. ValueError: none there."""
    times = np.asarray(timestamps_s, dtype=np.float64)
    low, high = segment(times, start, end)
    if (count := high - low + 1) == 1:
        return [low, low]
    step = (times[high] - times[low]) / (count - 1)
    even = np.abs(times[low:high + 1] - times[low] - step * np.arange(count)).max() < step / 4
    n = round((spec.nframes or 0) / 2) * 2
    if not n:
        seconds = count / fps if fps and even else count * step
        n = round(seconds * spec.fps, 4)  # 19.99999 is 20: times are float32
        n = min(max(n, math.ceil(spec.min_frames / 2) * 2), math.floor(spec.max_frames / 2) * 2)
    n = max(2, math.floor(min(n, count) / 2) * 2)
    if even:
        return torch.linspace(low, high, n).round().long().tolist()
    wanted = np.linspace(times[low], times[high], n)
    after = np.clip(np.searchsorted(times, wanted), low + 1, high)
    return np.where(wanted - times[after - 1] <= times[after] - wanted, after - 1, after).tolist()

def plan(found, spec):
    """(indices to decode, (height, width), Clip without frames) of a probed file. ValueError: none can be."""
    times, rate, stored = np.array(found["times"]), found["fps"], found["stored"]
    image = found["kind"] == "image"
    if image or stored:  # what was sampled when it was stored stays; the last frame fills up
        indices = list(range(len(times))) + [len(times) - 1] * (not image and len(times) % 2)
    else:
        indices = sample_indices(times, spec, found.get("start"), found.get("end"), rate)
    low, total = spec.min_pixels or 128 * spec.token, spec.total_pixels or 115200 * spec.token
    high = max(min(768 * spec.token, total / len(indices) * 2), int(low * 1.05))
    high = min(spec.max_pixels or high, high)
    if image:
        low, high = spec.image_min_pixels or 4 * spec.token, spec.image_max_pixels or 16384 * spec.token
    factor = spec.patch_size * spec.merge_size
    size = smart_resize(found["height"], found["width"], factor, min(low, high), high)

    first, last, count = indices[0], indices[-1], indices[-1] - indices[0] + 1
    shown = times[indices] - (0 if stored or spec.timestamps == "source" else times[first])
    seconds = stored or (times[last] - times[first]) * count / max(count - 1, 1) or 1 / rate
    # Both engines compute a time as index / fps. Where that is not true, milliseconds carry the truth.
    if np.abs(shown - np.round(shown * rate) / rate).max() > 2e-3:
        rate = 1000.0
    ticks = np.round(shown * rate).astype(int).tolist()
    return indices, size, Clip(None, rate, ticks, round(seconds * rate), seconds)

# ---------------------------------------------------------------- decode
# times: seconds from frame 0; read(ascending indices) -> (n, H, W, 3) uint8; stored: an artifact's seconds
Reader = namedtuple("Reader", "name times fps read stored", defaults=[0])

def decord_reader(files, fps):
    import decord
    decord.logging.set_level(decord.logging.QUIET)
    video = decord.VideoReader(files[0], num_threads=min(2, torch.get_num_threads()),
                               fault_tol=1e-6)  # a lost frame is an error, not the one before it once more
    times = video.get_frame_timestamp(list(range(len(video))))[:, 0].astype(np.float64)
    if times[0] < -1e-3:
        raise ValueError("an edit list hides frames before time 0, which decord would show")
    return Reader("decord", times - times[0], video.get_avg_fps(), lambda i: video.get_batch(i).asnumpy())

def pyav_reader(files, fps):
    import av
    container = av.open(files[0])
    stream = container.streams.video[0]
    packets = [(p.pts, p.is_discard) for p in container.demux(stream) if p.pts is not None]
    if not packets or len(packets) < stream.frames:
        raise ValueError(f"truncated: {len(packets)} of {stream.frames} frames are there")
    pts = sorted(pts for pts, hidden in packets if not hidden)
    times = np.array([float((p - pts[0]) * stream.time_base) for p in pts])
    container.seek(min(packets)[0], stream=stream)
    stream.thread_type = "AUTO"
    frames, held = container.decode(stream), []

    def read_one(i):
        while not held or held[0].pts < pts[i]:
            held[:] = [next(frames, None)]
            if held[0] is None:
                raise ValueError(f"can be decoded up to {times[i]:.2f} s of {times[-1]:.2f} s only")
        return np.rot90(held[0].to_ndarray(format="rgb24"), held[0].rotation // 90)

    rate = float(stream.average_rate or 1 / np.diff(times).mean())
    return Reader("PyAV", times, rate, lambda indices: np.stack([read_one(i) for i in indices]))

def stills_reader(files, fps):
    def read_one(i):  # (H, W, 3) uint8, upright, transparency on white
        from PIL import Image, ImageOps
        with Image.open(files[i]) as image:
            image = ImageOps.exif_transpose(image)
            if image.has_transparency_data:
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
            return np.array(image.convert("RGB"))

    times = np.arange(len(files)) / fps
    return Reader("images", times, fps, lambda indices: np.stack([read_one(i) for i in indices]))

def stored_reader(files, fps):
    """EasyVideoR1's .pt files: {frames (T, 3, H, W) 0..255, metadata, sample_fps}; no code in them runs."""
    data = torch.load(files[0], weights_only=True, map_location="cpu", mmap=True)
    if not isinstance(data, dict) or not {"frames", "metadata"} <= set(data):
        raise ValueError("is no stored clip of frames, metadata, sample_fps")
    meta, read = data["metadata"], lambda i: data["frames"][i].round().clamp(0, 255).byte()
    return Reader("stored", np.asarray(meta["frames_indices"]) / meta["fps"], meta["fps"],
                  lambda i: read(i).permute(0, 2, 3, 1).numpy(), meta["total_num_frames"] / meta["fps"])

READERS = {  # module: (its reader, its errors)
    "decord": (decord_reader, ["DECORDError", "DECORDLimitReachedError"]),
    "av": (pyav_reader, ["FFmpegError"]), "PIL.Image": (stills_reader, ["DecompressionBombError"]),
    "pickle": (stored_reader, ["UnpicklingError"])}

def files_of(path):
    """What is behind a path: a list of frames, the images of a folder (2 before 10), or the path itself."""
    if isinstance(path, (list, tuple)):
        return list(path)
    if not os.path.isdir(path):
        return [os.fspath(path)]
    names = [str(p) for p in Path(path).iterdir() if p.suffix.lower() in IMAGE_SUFFIXES]
    if not names:
        raise MediaError(path, "is a folder without images")
    return sorted(names, key=lambda name: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", name)])

def cut_short(path):
    """Whether a box of an mp4 or mov file ends behind the end of the file: decord may then show a last frame
    over and over instead of failing."""
    at, end = 0, os.path.getsize(path)
    with open(path, "rb") as file:
        while at + 8 <= end:
            file.seek(at)
            size, kind, long = (head := file.read(16))[:4], head[4:8], head[8:]
            size = int.from_bytes(long if size == b"\0\0\0\1" else size, "big")
            if size < 8 or at == 0 and kind not in (b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip"):
                return False  # the box reaches to the end, or this is no such file
            at += size
    return at > end

def with_reader(item, spec, use):
    """use(reader, probe of the item); PyAV where decord fails (AV1, GIF, damaged heads) or is missing."""
    files, reasons = files_of(item["path"]), []
    here = [name for name in READERS if importlib.util.find_spec(name)]
    errors = (OSError, ValueError, LookupError, RuntimeError, EOFError, SyntaxError,  # the last is Pillow's
              *[getattr(importlib.import_module(name), error) for name in here for error in READERS[name][1]])
    stills = item["kind"] == "image" or files != [item["path"]]
    if not stills and os.path.isfile(files[0]) and cut_short(files[0]):
        raise MediaError(files[0], "cannot be decoded: the file is cut short")
    names = ["pickle"] if files[0].endswith(".pt") else ["PIL.Image"] if stills else ["decord", "av"]
    for name in [name for name in names if name in here]:
        try:
            reader = READERS[name][0](files, item.get("fps") or spec.fps)
            height, width = reader.read([0]).shape[1:3]
            return use(reader, item | {"height": height, "width": width, "fps": float(reader.fps), "times":
                                       reader.times.tolist(), "stored": reader.stored, "reader": reader.name})
        except errors as error:
            reasons.insert(0, str(error).strip().split("\n")[-1][:200])
        finally:
            reader = None  # at once: an idle decord reader decodes ahead without bound
    reasons = dict.fromkeys(reasons or ["install decord or av"])
    raise MediaError(files[0], "cannot be decoded: " + "; ".join(reasons))

def probe(item, spec=MediaSpec(), codec=False):
    """What a file is, ready for JSON, from headers and first frame. item: a path or one of media_items()."""
    item = item if isinstance(item, dict) else {"kind": "video", "path": os.fspath(item)}
    item_key(item, spec)  # says what is missing or unreadable
    found = with_reader(item, spec, lambda reader, found: plan(found, spec) and found)
    if codec:  # for people; known to PyAV alone
        found |= {"codec": "?", "rotation": "?"}
        if importlib.util.find_spec("av") and found["reader"] in ("decord", "PyAV"):
            import av
            with contextlib.suppress(av.FFmpegError), av.open(item["path"]) as container:
                stream = container.streams.video[0]
                found["codec"] = f"{stream.codec_context.name} {stream.format.name}"
                found["rotation"] = next(container.decode(stream)).rotation
    return found

def decode(path, spec, start=None, end=None, fps=None, kind="video"):
    """Samples, decodes and resizes one clip in this process. MediaError if it cannot.

    path: a video, a folder or list of images (at fps, default spec.fps), an image (kind), a .pt artifact."""
    def sample(reader, found):
        indices, size, clip = plan(found, spec)
        clip.frames = torch.empty(len(indices), 3, *size, dtype=torch.uint8)
        for at in range(0, len(indices), CHUNK):
            raw = torch.from_numpy(np.ascontiguousarray(reader.read(indices[at:at + CHUNK])))
            raw = raw.permute(0, 3, 1, 2)  # (n, 3, H, W)
            clip.frames[at:at + CHUNK] = F.interpolate(raw, size, mode="bicubic", antialias=True)
        return clip

    return with_reader({"kind": kind, "path": path, "start": start, "end": end, "fps": fps}, spec, sample)

# ---------------------------------------------------------------- items and cache
def media_items(record, cache_mode="prefer_cache"):
    """What to load for a record: [{kind, path, ...}], videos first."""
    stored = record.get("preprocessed_video")
    common = {"kind": "video"} | {name: record.get(f"video_{name}") for name in ("fps", "start", "end")}
    videos = [common | {"path": path} for path in record["videos"]]
    if stored and cache_mode != "realtime" and len(videos) == 1 and os.path.exists(stored):
        videos = [{"kind": "video", "path": stored}]
    return videos + [{"kind": "image", "path": path} for path in record["images"]]

def item_key(item, spec):
    """Hash of content (size, first and last 64 KiB) and of all that shapes the tensor; not of the path."""
    options = [item.get(name) for name in ("kind", "start", "end", "fps")]
    digest = hashlib.sha256(json.dumps([SCHEMA, "bicubic", asdict(spec), *options]).encode())
    for file in files_of(item["path"]):
        if not os.path.isfile(file):  # a pipe would block for ever
            raise MediaError(file, "is not a file" if os.path.exists(file) else "does not exist")
        try:
            with open(file, "rb") as f:
                size = os.fstat(f.fileno()).st_size
                digest.update(str(size).encode() + f.read(65536))
                f.seek(max(size - 65536, 0))
                digest.update(f.read(65536))
        except OSError as error:
            raise MediaError(file, error.strerror) from error
    return digest.hexdigest()[:32]

def write_atomic(file, write):
    """write(temp), then rename: readers see nothing or the whole file; the last writer wins."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temp = file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")
    try:
        write(temp)
        with open(temp, "rb+") as f:
            os.fsync(f.fileno())
        os.replace(temp, file)
    finally:
        temp.unlink(missing_ok=True)

def read_clip(file):
    """Memory-mapped; None if the file is absent or damaged."""
    from safetensors import SafetensorError, safe_open
    try:
        with safe_open(file, framework="pt") as f:
            clip = Clip(f.get_tensor("frames"), **{k: json.loads(v) for k, v in f.metadata().items()})
    except (OSError, SafetensorError, TypeError, ValueError, AttributeError):
        return None
    return clip if clip.frames.dtype == torch.uint8 and clip.frames.shape[1] == 3 else None

def load_item(item, spec, cache_dir=None, cache_mode="prefer_cache"):
    """(Clip, its cache file or None). Broken files are remembered too, as KEY.bad."""
    from safetensors.torch import save_file
    key = item_key(item, spec)
    if not cache_dir or cache_mode == "realtime":
        return replace(decode(**item, spec=spec), key=key), None
    file = Path(cache_dir, key[:2], key + ".safetensors")
    broken = file.with_suffix(".bad")
    if clip := read_clip(file):
        os.utime(file)  # the least recently used go first
        return clip, file
    if broken.exists():
        raise MediaError(item["path"], f"{broken.read_text()} (remembered in {broken})")
    if cache_mode == "cache_only":
        raise MediaError(item["path"], f"is not in {cache_dir}; fill it with: python video_io.py cache")
    try:
        clip = replace(decode(**item, spec=spec), key=key)
    except MediaError as error:
        write_atomic(broken, lambda temp: temp.write_text(error.reason))
        raise
    header = {name: json.dumps(value) for name, value in vars(clip).items() if name != "frames"}
    write_atomic(file, lambda temp: save_file({"frames": clip.frames}, temp, header))
    return clip, file

def evict(cache_dir, limit_bytes):
    """Deletes the least recently used entries until the cache fits, and leftovers of killed writers."""
    stats = []
    for file in Path(cache_dir).glob("*/*"):
        with contextlib.suppress(FileNotFoundError):  # another process evicts too
            stats.append((file.stat().st_mtime, file.stat().st_size, file))
    total = sum(size for _, size, _ in stats)
    for modified, size, file in sorted(stats):
        if total > limit_bytes or file.suffix == ".tmp" and modified < time.time() - 3600:
            file.unlink(missing_ok=True)
            total -= size

def load_media(record, spec, cache_dir=None, cache_mode="prefer_cache", load=None):
    """Every clip and image of a record, in this process unless load (item -> Clip) does it elsewhere."""
    load = load or (lambda item: load_item(item, spec, cache_dir, cache_mode)[0])
    clips = [(item["kind"], load(item)) for item in media_items(record, cache_mode)]
    images = [clip for kind, clip in clips if kind == "image"]
    return Media([clip for kind, clip in clips if kind == "video"], [clip.frames[0] for clip in images],
                 [clip.key for clip in images])

# ---------------------------------------------------------------- worker processes
def perform(job, item, spec, cache_dir, cache_mode):
    """What a worker can be asked for: load (into the cache folder), probe, describe, cut. Ready for JSON."""
    spec = MediaSpec(**spec)
    try:
        if job == "load":
            clip, file = load_item(item, spec, cache_dir, cache_mode)
            return {"file": str(file), "bytes": clip.frames.nbytes}
        return cut(**item) if job == "cut" else probe(item, spec, codec=job == "describe")
    except MediaError as error:
        return {"error": error.reason, "path": error.path}

def serve():
    """A worker: one JSON request per line in, one JSON answer per line out."""
    torch.set_num_threads(1)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: none is left behind when the trainer is killed
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    print("ready", file=answers)
    for line in sys.stdin:
        print(json.dumps(perform(*json.loads(line))), file=answers)

class MediaLoader:
    """Decodes in worker processes: a clip that hangs or crashes the decoder costs one sample, never the run.

    One thread per worker asks, waits and replaces. Workers start by exec, safe beside the threads of vLLM and
    torch; frames come back as mapped files. workers=0: in this process, no timeout. n_ok, n_bad count files;
    each bad one is appended to bad_file."""
    def __init__(self, spec, workers=2, timeout_s=60, cache_dir=None, cache_mode="prefer_cache",
                 bad_file=None, cache_gb=None):
        if cache_mode not in ("prefer_cache", "realtime") and (cache_mode != "cache_only" or not cache_dir):
            raise DataError(f"cache_mode {cache_mode}: prefer_cache, realtime, or cache_only and a cache_dir")
        self.spec, self.workers, self.timeout_s, self.bad_file = spec, workers, timeout_s, bad_file
        self.cache_dir = str(cache_dir) if cache_dir and cache_mode != "realtime" else None
        self.cache_mode, self.cache_gb = cache_mode, cache_gb
        self.n_ok, self.n_bad, self.closed, self.lock, self.processes = 0, 0, False, threading.Lock(), {}
        self.pool = ThreadPoolExecutor(max(workers, 1), thread_name_prefix="media")
        roomy = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 2**31
        self.spill = tempfile.mkdtemp(prefix="frames-", dir="/dev/shm" if roomy else None)
        atexit.register(shutil.rmtree, self.spill, True)  # whatever ends this process

    def submit(self, record):
        """A Future of Media, or of a MediaError."""
        load = lambda item: self.load(item, record.get("where"))
        return self.pool.submit(load_media, record, self.spec, None, self.cache_mode, load)

    def load(self, item, where=None):
        """Clip of one item, through the cache or through one that lasts for a moment."""
        folder = self.cache_dir or tempfile.mkdtemp(dir=self.spill)
        clip = read_clip(self.ask("load", item, where, folder)["file"])
        if not self.cache_dir:
            shutil.rmtree(folder)  # the mapping keeps the pages
        if clip is None:
            raise MediaError(item["path"], "was evicted from the cache before it was read; raise the limit")
        return clip

    def ask(self, job, item, where=None, folder=None):
        """The answer of perform(), from this thread's worker if there are any. Counts."""
        request = [job, item, asdict(self.spec), folder, self.cache_mode.replace("realtime", "prefer_cache")]
        answer = self.ask_worker(request) if self.workers else perform(*request)
        with self.lock:
            if "error" not in answer:
                self.n_ok += 1
            elif not self.closed:  # a clip is not to blame when close() stops its worker
                self.n_bad += 1
                if self.bad_file:
                    with open(self.bad_file, "a", encoding="utf-8") as f:
                        row = {"path": answer["path"], "reason": answer["error"], "where": where}
                        f.write(json.dumps(row) + "\n")
            if self.cache_dir and self.cache_gb and self.n_ok % 64 == 1:
                evict(self.cache_dir, self.cache_gb * 1e9)
        if "error" in answer:
            raise MediaError(answer["path"], answer["error"])
        return answer

    def ask_worker(self, request):
        process = self.processes.get(threading.get_ident())
        if process is None or process.poll() is not None:
            process = subprocess.Popen(WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                       start_new_session=True)
            self.processes[threading.get_ident()] = process
            process.stdout.readline()  # "ready": imports do not count as decoding
        with contextlib.suppress(BrokenPipeError):  # then its answers have ended too
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        answered = select.select([process.stdout], [], [], self.timeout_s)[0]
        if line := answered and process.stdout.readline():
            return json.loads(line)
        process.kill()
        died = f"crashed the decoder (exit code {process.wait()})"
        return {"error": died if answered else f"hung for {self.timeout_s:g} s; decoder killed",
                "path": files_of(request[1]["path"])[0]}

    def ask_all(self, job, items, what, folder=None):
        """{JSON of the item: answer or MediaError}, with a progress bar; what is shared is asked for once."""
        from tqdm import tqdm
        answers, unique = {}, {json.dumps(item): item for item in items}
        futures = {self.pool.submit(self.ask, job, item, None, folder): key for key, item in unique.items()}
        for future in tqdm(as_completed(futures), total=len(futures), desc=what, unit="file"):
            try:
                answers[futures[future]] = future.result()
            except MediaError as error:
                answers[futures[future]] = error
        return answers

    def close(self):
        """Stops at once: what is not decoded yet is cancelled."""
        self.closed = True
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in list(self.processes.values()):
            process.kill()
            process.wait()
        shutil.rmtree(self.spill, ignore_errors=True)

# ---------------------------------------------------------------- model inputs
def vision_token_ids(model_config):
    """Ids that must never be sampled: positions and features are counted by them."""
    c = model_config
    return [c.image_token_id, c.video_token_id, c.vision_start_token_id, c.vision_end_token_id]

def vllm_inputs(text, media):
    """One request of vLLM's generate. The pixels are final: vLLM neither samples nor resizes."""
    from PIL import Image
    data, uuids, settings = {}, {}, {"do_resize": False}
    if media.videos:
        if VISION_TRIPLE not in text:  # Qwen3
            from vllm.model_executor.models.qwen3_vl import Qwen3VLMultiModalProcessor as Expander
            # Up to 0.2x vLLM looks for the template's whole block and gives the released layout itself.
            if not hasattr(Expander, "_expands_only_video_token"):
                text = text.replace("<|video_pad|>", VISION_TRIPLE)
        names, final = ("fps", "frames_indices", "total_num_frames", "duration"), {"do_sample_frames": False}
        data["video"] = [(clip.frames, {name: getattr(clip, name) for name in names} | final)
                         for clip in media.videos]
        uuids["video"], settings = [clip.key for clip in media.videos], settings | final
    if media.images:
        data["image"] = [Image.fromarray(x.permute(1, 2, 0).contiguous().numpy()) for x in media.images]
        uuids["image"] = list(media.image_keys)
    found = {"multi_modal_data": data, "multi_modal_uuids": uuids, "mm_processor_kwargs": settings}
    return {"prompt": text} | (found if data else {})

def stamps(clip, temporal_patch_size=2):
    """["<0.2 seconds>", ...], one per merged group of frames: the mean of its first and last time."""
    times = [i / clip.fps for i in clip.frames_indices]
    groups = [times[i:i + temporal_patch_size] for i in range(0, len(times), temporal_patch_size)]
    return [f"<{(group[0] + group[-1]) / 2:.1f} seconds>" for group in groups]

def grids(media, model_config):
    """Patch grids (t, h, w) of the videos and of the images."""
    p, tp = model_config.vision_config.patch_size, model_config.vision_config.temporal_patch_size
    return ([(-(-len(c.frames) // tp), c.frames.shape[2] // p, c.frames.shape[3] // p) for c in media.videos],
            [(1, image.shape[1] // p, image.shape[2] // p) for image in media.images])

def layout(media, model_config):
    """{placeholder id: [blocks of each clip or image]}; a block: (time stamp, (t, h, w) in tokens, pace)."""
    c, v, merge = model_config, model_config.vision_config, model_config.vision_config.spatial_merge_size
    videos, images = ([(t, h // merge, w // merge) for t, h, w in found] for found in grids(media, c))
    clips = []
    for clip, (t, h, w) in zip(media.videos, videos):
        pace = 1  # positions from one merged frame to the next
        if c.model_type == "qwen2_5_vl":  # seconds per merged frame are float32 in vLLM
            rate = len(clip.frames_indices) / clip.total_num_frames * clip.fps
            pace = float(np.float32(v.temporal_patch_size / rate)) * v.tokens_per_second
        # Qwen3: every merged frame is a block of its own behind its time
        clips.append([(stamp, (1, h, w), 1) for stamp in stamps(clip, v.temporal_patch_size)]
                     if c.model_type.startswith("qwen3") else [("", (t, h, w), pace)])
    return {c.video_token_id: clips, c.image_token_id: [[("", grid, 1)] for grid in images]}

def expand_prompt(text, media, processor, model_config):
    """Prompt ids with placeholders expanded: what vLLM reports as prompt_token_ids."""
    c, ids = model_config, []
    encode = lambda text: processor.tokenizer.encode(text, add_special_tokens=False)
    blocks = {token: iter(found) for token, found in layout(media, c).items()}
    for token in encode(text):
        for stamp, grid, _ in next(blocks[token]) if token in blocks else [("", (1,), 1)]:
            pads = [token] * math.prod(grid)
            ids += encode(stamp) + [c.vision_start_token_id, *pads, c.vision_end_token_id] if stamp else pads
    return ids

def position_ids(ids, media, model_config):
    """(4, L): the text position 0..L-1, then time, height, width (M-RoPE, arXiv 2409.12191, section 2.1).

    Text goes on at the largest position so far plus 1: vLLM, transformers 4.57 (5.17 to 5.19 do not)."""
    ids, parts, at, start = list(ids), [], 0, 0
    blocks = {token: sum(found, []) for token, found in layout(media, model_config).items()}
    while at < len(ids):
        if blocks.get(ids[at]):
            _, grid, pace = blocks[ids[at]].pop(0)
            part = np.indices(grid).reshape(3, -1)  # (3, n)
            part[0] = part[0] * pace  # rounds down
        else:
            n = next((i for i in range(at + 1, len(ids)) if blocks.get(ids[i])), len(ids)) - at
            part = np.tile(np.arange(n), (3, 1))
        parts.append(part + start)
        at, start = at + part.shape[1], parts[-1].max() + 1
    return torch.from_numpy(np.concatenate([np.arange(len(ids))[None], np.concatenate(parts, 1)]))

def patchify(frames, patch_size, merge_size, temporal_patch_size):
    """(T, 3, H, W) uint8 -> (patches, 3 * tp * p * p), patches of a merge block side by side."""
    tp, p, m = temporal_patch_size, patch_size, merge_size
    if len(frames) % tp:  # the last frame fills up
        frames = torch.cat([frames, frames[-1:].expand(-len(frames) % tp, -1, -1, -1)])
    t, h, w = len(frames) // tp, frames.shape[2] // p, frames.shape[3] // p
    # A row of a patch moves as wide words, 8 or 2 bytes each: several times faster than byte by byte.
    wide = frames.contiguous().view(torch.int64 if p % 8 == 0 else torch.int16)
    patches = wide.view(t, tp, 3, h // m, m, p, w // m, m, -1).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return patches.reshape(t * h * w, -1).view(torch.uint8)

def model_inputs(prompt_ids, media, model_config, image_mean, image_std, device, dtype):
    """What the Hugging Face model takes besides input_ids; keys of media that the prompt lacks are absent."""
    c, v, ids = model_config, model_config.vision_config, torch.tensor(prompt_ids)
    tp, width = v.temporal_patch_size, 3 * v.temporal_patch_size * v.patch_size**2
    mean, std = ((torch.tensor(x) * 255.0).repeat_interleave(width // 3).to(device)
                 for x in (image_mean, image_std))  # (3 * tp * p * p,)
    types = (ids == c.image_token_id).int() + 2 * (ids == c.video_token_id).int()
    inputs = {"mm_token_type_ids": types[None].to(device),
              "position_ids": position_ids(prompt_ids, media, c)[:, None].to(device)}  # (1, P), (4, 1, P)
    kinds = (("pixel_values_videos", "video_grid_thw", [clip.frames for clip in media.videos]),
             ("pixel_values", "image_grid_thw", [image[None] for image in media.images]))
    for (pixels, grid, stacks), found in zip(kinds, grids(media, c)):
        if not stacks:
            continue
        inputs[grid] = torch.tensor(found, device=device)  # (n, 3)
        counts = [math.prod(g) for g in found]  # patches of each clip or image
        inputs[pixels] = torch.empty(sum(counts), width, dtype=dtype, device=device)
        for frames, part, (_, h, w) in zip(stacks, inputs[pixels].split(counts), found):
            scratch = torch.empty(h * w, width, device=device)  # float32, reused: fresh memory costs the most
            for group, out in zip(frames.to(device).split(tp), part.split(h * w)):
                patches = patchify(group, v.patch_size, v.spatial_merge_size, tp)  # uint8
                out.copy_(torch.sub(patches, mean, out=scratch).div_(std))
    return inputs

# ---------------------------------------------------------------- token maths without decoding
def count_tokens(found, spec, tokenizer=None):
    """(visual tokens, tokens of time stamps and frame marks) that a probed file adds to a prompt.

    Without a tokenizer a time stamp counts as Qwen's does: one token per character, " seconds" one."""
    _, (height, width), clip = plan(found, spec)
    texts = stamps(clip, spec.temporal_patch_size)
    length = lambda s: len(tokenizer.encode(s, add_special_tokens=False)) if tokenizer else len(s) - 7
    timed = spec.patch_size != 14 and found["kind"] == "video"  # Qwen2-VL and 2.5-VL (patch 14) show no times
    return len(texts) * (height * width // spec.token), sum(length(s) + 2 for s in texts) if timed else 0

def fit_budget(max_tokens, found, spec, tokenizer=None):
    """spec with the most pixels per frame that fit for a probed clip; where none do, fewer frames."""
    low, high = ((pixels or n * spec.token) // spec.token
                 for pixels, n in ((spec.min_pixels, 4), (spec.max_pixels, 768)))
    for frames in range(len(plan(found, spec)[0]), 1, -2):
        for tokens in range(high, low - 1, -1):
            tried = replace(spec, nframes=frames, min_frames=min(spec.min_frames, frames), max_frames=frames,
                            min_pixels=low * spec.token, max_pixels=tokens * spec.token)
            if sum(count_tokens(found, tried, tokenizer)) <= max_tokens:
                return tried
    raise DataError(f"{found['path']}: 2 frames of {low} tokens exceed {max_tokens}; raise the budget")

def survey(records, loader, prompts, processor=None, form="reason", max_prompt_length=math.inf, system=None):
    """[(record, visual tokens, text tokens, why it cannot be used or None, its probes)] without decoding.

    Prompts over max_prompt_length are reported, never truncated: a cut through vision tokens is no prompt."""
    groups = [media_items(record, loader.cache_mode) for record in records]
    answers = loader.ask_all("probe", [item for group in groups for item in group], "opening")
    tokenizer, rows = processor and processor.tokenizer, []
    for record, group in zip(records, groups):
        text = len(json.dumps(build_messages(record, prompts, form, system))) // 4
        if processor:
            prompt = prompt_text(record, prompts, processor, form, system)
            text = len(tokenizer.encode(prompt, add_special_tokens=False)) - len(group)
        found = [answers[json.dumps(item)] for item in group]
        reasons = [str(answer) for answer in found if isinstance(answer, MediaError)]
        probes = [answer for answer in found if isinstance(answer, dict)]
        costs = [(0, text)] + [count_tokens(p, loader.spec, tokenizer) for p in probes]
        visual, text = (sum(cost) for cost in zip(*costs))
        if visual + text > max_prompt_length:
            reasons.append(f"prompt of {visual + text} tokens is over max_prompt_length {max_prompt_length}")
        rows.append((record, visual, text, reasons[0] if reasons else None, probes))
    return rows

# ---------------------------------------------------------------- commands
def cut(path, out, start, end, copy=False):
    """Writes the segment to out, or nothing. Frame-exact; copy: packets from the key frame before start."""
    import av
    def write(reader, found, temp):
        (low, high), tick = segment(reader.times, start, end), fractions.Fraction(1, 90000)
        with av.open(path) as source, av.open(str(temp), "w", format="mp4") as target:
            stream = source.streams.video[0]
            if copy:
                written, zero, first = target.add_stream_from_template(stream), stream.start_time or 0, None
                source.seek(zero + int(start / stream.time_base), stream=stream)
                for packet in source.demux(stream):
                    if packet.dts is None or (packet.dts - zero) * stream.time_base > end:
                        break
                    first = packet.dts if first is None else first
                    packet.pts, packet.dts, packet.stream = packet.pts - first, packet.dts - first, written
                    target.mux(packet)
                return
            rate = fractions.Fraction(found["fps"]).limit_denominator(1001)
            written = target.add_stream("libx264", rate=rate, options={"crf": "16"})
            width, height = written.width, written.height = found["width"], found["height"]
            written.time_base = tick
            written.pix_fmt = "yuv444p" if width % 2 or height % 2 else "yuv420p"
            for i in range(low, high + 1):
                image = av.VideoFrame.from_ndarray(np.ascontiguousarray(reader.read([i])[0]), format="rgb24")
                image.pts, image.time_base = round((reader.times[i] - reader.times[low]) / tick), tick
                target.mux(written.encode(image))
            target.mux(written.encode())

    with_reader({"kind": "video", "path": path}, MediaSpec(),
                lambda reader, found: write_atomic(Path(out), lambda temp: write(reader, found, temp)))
    return {"file": out}

def segment_of(row, root, index):
    """A job for cut() from a row; ODV-Bench and LiveSports say in the name of the file what to cut."""
    name = os.path.basename(str(row.get("path") or ""))
    named = (re.fullmatch(r"\d+_(.+)_s([\d.]+)_e([\d.]+)\.mp4", name)
             or re.fullmatch(r"(.+)_([\d.]+)_([\d.]+)\.mp4", name))
    video = row.get("video") or (row.get("videos") or [row.get("path")])[0]
    start, end = (row.get(key, row.get(f"video_{key}")) for key in ("start", "end"))
    if named and end is None:
        stem, start, end = named.groups()
        path = index.get(stem, os.path.join(root, f"{stem}.mp4"))
    elif isinstance(video, str) and end is not None:
        start, path = float(start or 0), os.path.join(root, video)
        name = f"{Path(video).stem}_{start:.3f}_{float(end):.3f}.mp4"
    else:
        raise ValueError("names no segment: needs video, start and end, or a path like ID_START_END.mp4")
    return {"path": path, "out": name, "start": float(start), "end": float(end)}

def finish(answers, summary):
    """Prints the first problems among the answers, and the summary; the exit code."""
    problems = [answer for answer in answers if not isinstance(answer, dict)]
    print(*problems[:20], *[f"... and {len(problems) - 20} more"] * (len(problems) > 20), summary, sep="\n")
    return int(bool(problems))

def probe_files(args, loader):
    kinds = ["image" if file.lower().endswith(IMAGE_SUFFIXES) else "video" for file in args.data]
    items = [{"kind": kind, "path": file} for kind, file in zip(kinds, args.data)]
    answers = loader.ask_all("describe", items, "opening").values()
    for found in [answer for answer in answers if isinstance(answer, dict)]:
        (indices, (height, width), _), times = plan(found, loader.spec), np.array(found["times"])
        visual, text = count_tokens(found, loader.spec, args.tokenizer)
        steady = np.abs(times * found["fps"] - np.arange(len(times))).max() <= 0.5
        print("{path}: {codec}, {width}x{height}, {n} frames, {fps:.3f} fps{vfr}, {seconds:.2f} s, rotation "
              "{rotation}, read by {reader}".format(n=len(times), vfr="" if steady else " (variable)",
                                                    seconds=times[-1] + 1 / found["fps"], **found))
        print(f"  sampled: {len(indices)} frames of {width}x{height}, {visual} visual + {text} text tokens")
    return finish(answers, f"{len(answers)} files")

def survey_data(args, loader):
    prompts, limit = load_prompts(), args.max_prompt_length
    records, problems, source = read_records(args.data, args.data_root, prompts)
    rows = survey(records, loader, prompts, args.processor, args.form, limit)
    problems += [f"{record['where']}: {reason}" for record, _, _, reason, _ in rows if reason]
    good = [source[record["where"]] for record, _, _, reason, _ in rows if not reason]
    summary = f"{len(source)} records = {len(good)} good + {len(source) - len(good)} left out"
    if args.command == "check":
        clean = Path(args.data).with_suffix(".clean.jsonl")
        text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in good)
        write_atomic(clean, lambda temp: temp.write_text(text, encoding="utf-8"))
        print(*problems[20:], f"the good ones are in {clean}", sep="\n")
        return finish(problems, summary)

    visual, text = np.array([row[1:3] for row in rows] or [(0, 0)]).T
    for name, values in {"visual": visual, "text": text, "prompt": visual + text}.items():
        low, mid, high, most = np.percentile(values, [0, 50, 95, 100]).astype(int)
        print(f"{name:>7} tokens: least {low}, median {mid}, 95 % {high}, most {most}, sum {sum(values)}")
    counts, edges = np.histogram(visual + text, 12)
    for n, left, right in zip(counts, edges, edges[1:]):
        print(f"{int(left):>8}-{int(right):<8} {'#' * math.ceil(50 * n / counts.max())} {n}")
    plans = {str(found): plan(found, loader.spec) for row in rows for found in row[4]}.values()
    size = sum(3 * len(indices) * height * width for indices, (height, width), _ in plans)  # bytes
    print(f"cache: {len(plans)} clips and images, {size / 1e9:.2f} GB")
    if args.model:
        shape = args.config.get_text_config()
        size = 2 * (visual + text).max() * shape.hidden_size * shape.num_hidden_layers  # bytes in bf16
        print(f"activations of the longest prompt, one checkpoint per layer: {size / 1e9:.3f} GB")
    _, _, text, reason, found = max(rows, key=lambda row: row[1] + row[2], default=[None] * 4 + [()])
    if reason and len(found) == 1:
        text -= count_tokens(found[0], loader.spec, args.tokenizer)[1]
        fit = fit_budget(limit - text, found[0], loader.spec, args.tokenizer)
        print("the longest fits with", *[f"--{name.replace('_', '-')} {getattr(fit, name)}" for name in (
            "max_pixels", "min_pixels", "max_frames", "min_frames")])
    return finish(problems, summary)

def fill_cache(args, loader):
    items = [item for record in load_records(args.data, args.data_root) for item in media_items(record)]
    answers = loader.ask_all("load", items, "caching", args.cache_dir).values()
    sizes = [answer["bytes"] for answer in answers if isinstance(answer, dict)]
    failed = f"{len(answers) - len(sizes)} failed, all in {args.bad_file}"
    good = f"{len(sizes)} in {args.cache_dir} ({sum(sizes) / 1e9:.2f} GB)"
    return finish(answers, f"{len(answers)} files = {good} + {failed}")

def cut_data(args, loader):
    root, items, faults = os.path.abspath(args.data_root or Path(args.data).parent), [], []
    suffixes = (".mp4", ".avi", ".mkv", ".mov", ".webm")
    index = {p.stem: str(p) for p in sorted(Path(root).rglob("*")) if p.suffix.lower() in suffixes}
    for line, row in read_rows(args.data):
        try:
            item = segment_of(row, root, index)
            items.append(item | {"out": os.path.join(args.out, item["out"]), "copy": args.copy})
        except (AttributeError, ValueError) as error:
            faults.append(f"{args.data}:{line}: {error}")
    todo = [item for item in items if not os.path.exists(item["out"])]
    answers = loader.ask_all("cut", todo, "cutting").values()
    done = f"{len(answers)} segments cut or tried, {len(items) - len(todo)} records had theirs"
    return finish([*faults, *answers], done)

COMMANDS = {
    "probe": (probe_files, "Shows what files are and what would be sampled from them."),
    "tokens": (survey_data, "Shows what the data costs in tokens and memory. Decodes nothing."),
    "check": (survey_data, "Opens every clip, lists bad and too long ones, writes DATA.clean.jsonl."),
    "cache": (fill_cache, "Decodes every clip into the cache. Stop and start it as you like."),
    "clip": (cut_data, "Cuts the segments of ODV-Bench and LiveSports names, or of video, start, end.")}

def main():
    common = argparse.ArgumentParser(add_help=False)
    add = common.add_argument
    add("--data-root", help="where relative paths start; else the folder of the data file")
    add("--model", help="model folder: its patch sizes and tokenizer make counts exact")
    add("--max-prompt-length", type=int, default=32768, help="tokens; longer prompts are left out")
    add("--form", default="reason", choices=["reason", "direct"], help="form of configs/prompts.yaml")
    add("--workers", type=int, default=os.cpu_count(), help="decoding processes")
    add("--timeout", type=float, default=60.0, help="seconds per file; a decoder that takes longer is killed")
    add("--cache-dir", default="frame_cache", help="folder of the frame cache")
    add("--cache-gb", type=float, help="size limit: the least recently used clips go first")
    add("--bad-file", default="bad_videos.jsonl", help="failed files are appended here with the reason")
    names = [f.name for f in fields(MediaSpec) if "_size" not in f.name]  # sizes are the model's
    for name in names:
        kind = {"fps": float, "timestamps": str}.get(name, int)
        add("--" + name.replace("_", "-"), type=kind, default=getattr(MediaSpec, name), help="see MediaSpec")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog="See COMMAND --help.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, teach) in COMMANDS.items():
        sub = commands.add_parser(name, parents=[common], help=teach, description=teach,
                                  formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        sub.add_argument("data", nargs="+" if name == "probe" else None, help="media files or a data file")
        if name == "clip":
            sub.add_argument("out", help="folder for the clips")
            sub.add_argument("--copy", action="store_true", help="fast stream copy from the key frame before")
    args = parser.parse_args()
    try:
        settings, args.tokenizer, args.processor = {name: getattr(args, name) for name in names}, None, None
        spec = MediaSpec(**settings)
        if args.model:
            from transformers import AutoConfig
            args.processor, args.config = load_processor(args.model), AutoConfig.from_pretrained(args.model)
            args.tokenizer, spec = args.processor.tokenizer, media_spec(args.config, **settings)
        loader = MediaLoader(spec, args.workers, args.timeout, args.cache_dir, bad_file=args.bad_file,
                             cache_gb=args.cache_gb)
        with contextlib.closing(loader):
            return COMMANDS[args.command][0](args, loader)
    except DataError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 130

if __name__ == "__main__":
    sys.exit(serve() if sys.argv[1:] == ["_worker"] else main())
