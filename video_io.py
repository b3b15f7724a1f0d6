"""Every clip in: records, prompts, sampling, decode, resize, frame cache, token maths, model inputs.

    python video_io.py probe  clip.mp4 ...              # codec, size, fps, what would be sampled, tokens
    python video_io.py tokens data.jsonl --model M      # what the data costs in tokens, activations and cache
    python video_io.py check  data.jsonl                # opens every clip; data.clean.jsonl has the good ones
    python video_io.py cache  data.jsonl --cache-dir D  # decodes everything once, in parallel, resumable
    python video_io.py clip   data.jsonl OUT            # cuts the segments that the records name

Data is JSON, JSONL or parquet; a record: {"problem": "What is in <video>?", "answer": "B", "problem_type":
"multiple choice", "options": ["cat", "dog"], "videos": ["1.mp4"], "video_start": 2.0, "video_end": 8.5};
evaluation files may say path, solution, image_path, start, end. A video may be a folder or list of images,
shown at "video_fps". Frames are uint8 (T, 3, H, W) from the decoder to the patches, T even, H and W multiples
of patch_size * merge_size. Indices, sizes and budgets are those of qwen-vl-utils 0.0.14 called with the right
patch size; where it is wrong (frame lists, variable frame rates, edit lists, one frame, extreme ratios) we
follow the file's presentation times and keep every side at least one token. Cache: safetensors, by content
and settings.
"""
import argparse, ctypes, difflib, hashlib, json, math, os, re, shutil, subprocess, sys, tempfile, threading
import time, uuid
from collections import namedtuple
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from importlib.util import find_spec
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

SCHEMA = 1  # part of every cache key: raise it when decode or resize change their result
CHUNK = 8  # frames held at full size at a time
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
VISION_TRIPLE = "<|vision_start|><|video_pad|><|vision_end|>"
WORKER = [sys.executable, os.path.abspath(__file__), "_worker"]
Reader = namedtuple("Reader", "times fps read close name")  # read(ascending indices) -> (n, H, W, 3) uint8

class DataError(ValueError):
    """Bad input. The message is ready to print: one line per problem."""

class MediaError(Exception):
    """One clip or image that cannot be used: its path and a reason of one line."""
    def __init__(self, path, reason):
        self.path, self.reason = str(path), " ".join(str(reason).split())[:500]
        super().__init__(f"{self.path}: {self.reason}")

@dataclass(frozen=True)
class MediaSpec:
    """How media become tensors. Pixels are per frame, resized; None: a default in tokens (merged patches)."""
    fps: float = 2.0  # frames per second to sample
    nframes: int | None = None  # a fixed number of frames instead
    min_frames: int = 4
    max_frames: int = 768
    min_pixels: int | None = None  # per frame, 128 tokens
    max_pixels: int | None = None  # per frame, 768 tokens
    total_pixels: int | None = None  # per clip, counted after the merge of 2 frames, 115,200 tokens
    image_min_pixels: int | None = None  # 4 tokens
    image_max_pixels: int | None = None  # 16,384 tokens
    patch_size: int = 16  # pixels; 14 for Qwen2-VL and Qwen2.5-VL
    merge_size: int = 2  # patches per token and side
    temporal_patch_size: int = 2  # frames per token
    timestamps: str = "segment"  # count from the segment's start, as in a cut file; "source": the file's

    def __post_init__(self):
        for name in ("min_frames", "min_pixels", "image_min_pixels"):
            low, high = name, name.replace("min", "max")
            if (getattr(self, low) or 0) > (getattr(self, high) or math.inf):
                raise DataError(f"{low} {getattr(self, low)} is above {high} {getattr(self, high)}; lower it")
        if self.fps <= 0 or self.max_frames < 2 or self.timestamps not in ("segment", "source"):
            raise DataError(f"need fps > 0, max_frames >= 2, timestamps segment or source; got {self}")

    @property
    def token(self):
        return (self.patch_size * self.merge_size) ** 2  # pixels of a merged patch

@dataclass
class Clip:
    frames: torch.Tensor  # (T, 3, H, W) uint8, contiguous, T even; an image is (3, H, W)
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

def media_spec(model_config, **settings):
    """The spec with the patch sizes of a Hugging Face config."""
    v = model_config.vision_config
    return MediaSpec(patch_size=v.patch_size, merge_size=v.spatial_merge_size,
                     temporal_patch_size=v.temporal_patch_size, **settings)

# ---------------------------------------------------------------- records
def load_prompts(path=None):
    """{problem_type: {"reason": str, "direct": str}} from configs/prompts.yaml."""
    import yaml
    path = path or Path(__file__).parent / "configs" / "prompts.yaml"
    try:
        prompts = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise DataError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())}") from error
    for kind, forms in prompts.items():
        if not isinstance(forms, dict) or set(forms) != {"reason", "direct"}:
            raise DataError(f"{path}: entry '{kind}' needs exactly the forms 'reason' and 'direct'")
    return prompts

def read_rows(path):
    """[(line, value)] of a JSON list, JSONL or parquet file; for an unreadable value the reason as text."""
    try:
        if Path(path).suffix == ".parquet":
            import pyarrow.parquet
            return list(enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1))
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # pyarrow's errors are among them
        raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    rows, at, last, line, decode_json = [], 0, 0, 1, json.JSONDecoder().raw_decode
    between = re.compile(r"[\s,\[\]]*")  # value by value, so that records of both layouts have a line number
    while (at := between.match(text, at).end()) < len(text):
        line, last = line + text.count("\n", last, at), at
        try:
            value, at = decode_json(text, at)
        except json.JSONDecodeError as error:
            value = f"no valid JSON: {error.msg} (line {error.lineno} column {error.colno})"
            at = text.find("\n", at)
            if Path(path).suffix == ".json" or at < 0:  # without a line each the next record cannot be found
                at = len(text)
        rows.append((line, value))
    return rows

def letter_options(options):
    """["A. text", ...] from a list, a dict {letter: text}, a string with a line each, or None."""
    if isinstance(options, dict):
        return [f"{letter}. {text}" for letter, text in options.items() if text is not None]
    options = [str(o).strip() for o in (options.splitlines() if isinstance(options, str) else options or [])]
    letters = [chr(65 + i) for i in range(len(options))]
    marks = [re.match(r"\(?([A-Z])[.:)]\s*", option) for option in options]
    # Letters count only where each option has its own, else "A. Smith" among other names would lose its A.
    if all(marks) and len({mark[1] for mark in marks}) == len(marks):
        letters, options = [m[1] for m in marks], [o[m.end():] for m, o in zip(marks, options)]
    return [f"{letter}. {option}" for letter, option in zip(letters, options)]

def plain_answer(value):
    """The gold answer as text: without <answer> tags, other JSON values written out."""
    if not isinstance(value, str):
        return json.dumps(value)
    # Charades-STA as published has <think>gold</think><[a placeholder]> where the answer tags were lost.
    lost = r"\s*<think>(.*?)</think>\s*(?:<\[[^\]]*\]>)?\s*"
    found = re.search(r"<answer>(.*?)</answer>", value, re.S) or re.fullmatch(lost, value, re.S)
    return (found[1] if found else value).strip()

def squash(name):
    return re.sub(r"[\s_-]+", "", str(name).lower())

def make_record(row, where, root, kinds):
    """(record, problems) of a row of the training or evaluation layout. kinds: {squashed name: type}."""
    record, problems = dict(row, where=where), []

    def bad(name, why):
        problems.append(f"{where}: {name} is {json.dumps(row.get(name), default=str)[:80]}: {why}")

    def pick(*names):  # the first of these fields that has a value
        return next((name for name in names if row.get(name) not in (None, "", [])), names[0])

    def resolve(value, name):
        if isinstance(value, (list, tuple)):
            return [resolve(item, name) for item in value]
        file = os.path.normpath(os.path.join(root, str(value).removeprefix("file://")))
        if not isinstance(value, str) or not os.path.exists(file):
            bad(name, f"no file {file}; fix the path or say where the data is (data_root)")
        return file

    def seconds(name):
        value = row.get(name := pick(name, name.removeprefix("video_")))
        if value is None or value != value:  # NaN is a table's way to say none
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            return bad(name, "must be seconds, 0 or more")
        return float(value)

    record["problem_type"] = kinds.get(squash(row.get("problem_type")))
    if record["problem_type"] is None:
        near = difflib.get_close_matches(squash(row.get("problem_type")), kinds, cutoff=0.5) or sorted(kinds)
        bad("problem_type", f"unknown; nearest: {', '.join(kinds[n] for n in near)}; or add a prompt for it")
    question, gold = pick("problem", "question"), pick("solution", "answer")
    text = record["problem"] = row.get(question) if isinstance(row.get(question), str) else ""
    if not text.strip() and record["problem_type"] != "video description":
        bad(question, "the question is missing; give it as text")
    if re.search(r"<\|(video|image|vision|im)_\w+\|>", text):
        bad(question, "holds a model's special token; use <video> and <image>")
    record["answer"] = plain_answer(row.get(gold))
    if row.get(gold) in (None, "", []):
        bad("answer", "missing; give the expected answer as 'answer' or 'solution'")

    guess = "image" if row.get(pick("images", "image")) else "text"
    guess = "video" if row.get(pick("videos", "video", "path")) else guess
    kind = record["data_type"] = row.get("data_type") or guess
    for media, names in (("videos", ["videos", "video"]), ("images", ["images", "image_path", "image"])):
        name = pick(names[0], *["path"] * (media == f"{kind}s"), *names[1:])
        value = [row[name]] if isinstance(row.get(name), str) else list(row.get(name) or [])
        if media == "videos" and value and all(str(v).lower().endswith(IMAGE_SUFFIXES) for v in value):
            value = [value]  # a flat list of images is one clip, given as its frames
        record[media], n_marks = resolve(value, name), text.count(f"<{media[:-1]}>")
        if kind == media[:-1] and not value or n_marks not in (0, len(value)):
            bad(name, f"a {kind} sample with {n_marks} <{media[:-1]}> marks and {len(value)} {media}")
    if kind not in ("video", "image", "text"):
        bad("data_type", "must be video, image or text")
    record["options"] = letter_options(row.get("options"))
    if record["problem_type"] == "multiple choice" and not record["options"]:
        bad("options", "multiple choice needs a list of options")
    record["video_start"], record["video_end"] = seconds("video_start"), seconds("video_end")
    if (record["video_start"] or 0) >= (math.inf if record["video_end"] is None else record["video_end"]):
        bad(pick("video_end", "end"), f"must be after the start, {record['video_start'] or 0} s")
    record["has_offline_trajectory"] = bool(row.get("has_offline_trajectory"))
    record["offline_output"] = row.get("offline_output")
    if record["has_offline_trajectory"] and not record["offline_output"]:
        bad("offline_output", "has_offline_trajectory is set but there is no output")
    stored, (file, _, line) = row.get("preprocessed_video"), where.rpartition(":")
    record["preprocessed_video"] = os.path.normpath(os.path.join(root, stored)) if stored else None
    return {"data_source": Path(file).stem, "problem_id": line, **record}, problems

def read_records(path, data_root=None, prompts=None):
    """(records without fault, problems as printable lines, {where: source row})."""
    root, seen, rows = os.path.abspath(data_root or Path(path).parent), {}, {}
    kinds = {squash(kind): kind for kind in (load_prompts() if prompts is None else prompts)}
    kinds.setdefault("caption", kinds.get("videodescription"))  # Video-MMLU's name for it
    records, problems = [], []
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
        problems += faults
        records += [record] * (not faults)
    return records, problems, rows

def load_records(path, data_root=None, prompts=None):
    """All records of a JSON, JSONL or parquet file. DataError lists what is wrong with them."""
    records, problems, rows = read_records(path, data_root, prompts)
    if problems or not rows:
        more = [f"... and {len(problems) - 20} more problems"] * (len(problems) > 20)
        raise DataError("\n".join(problems[:20] + more) or f"{path}: holds no records")
    return records

# ---------------------------------------------------------------- prompts
def build_messages(record, prompts, form="reason", system=None):
    """Chat messages of the Hugging Face kind: media where their marks are, else before the text."""
    letters, text = [option[0] for option in record["options"]], record["problem"].strip()
    letters = " or ".join([", ".join(letters[:-1])] * (len(letters) > 1) + letters[-1:])
    options = ["Options:\n" + "\n".join(record["options"])] if letters else []
    for mark, media in (("<image>", record["images"]), ("<video>", record["videos"])):
        text = mark * len(media) * (mark not in text) + text
    text = "\n".join([text, *options, prompts[record["problem_type"]][form].replace("{letters}", letters)])
    content = []
    for part in filter(None, re.split("(<video>|<image>)", text)):
        if part == "<video>" and content and content[-1]["type"] == "text":
            # Time stamps are tokenized apart by vLLM: "<" must not merge with what stands before the video.
            content[-1]["text"] = content[-1]["text"].rstrip() + "\n"
        media = part in ("<video>", "<image>")
        content.append({"type": part[1:-1]} if media else {"type": "text", "text": part})
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
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{model_dir}: no processor can be loaded: {reason}") from error
    if not isinstance(processor, ProcessorMixin):
        raise DataError(f"{model_dir}: no processor, a tokenizer only; copy preprocessor_config.json")
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

def frame_size(height, width, n_frames, spec):
    """(height, width) of each of n_frames frames, by the pixel budgets of the clip."""
    low, total = spec.min_pixels or 128 * spec.token, spec.total_pixels or 115200 * spec.token
    high = max(min(768 * spec.token, total / n_frames * 2), int(low * 1.05))
    high = min(spec.max_pixels or high, high)
    return smart_resize(height, width, spec.patch_size * spec.merge_size, min(low, high), high)

def segment(times, start, end):
    """(first, last) index of the frames shown from start to end, both included. ValueError if none."""
    last = math.inf if end is None else end
    inside = np.flatnonzero((times >= (start or 0) - 1e-4) & (times <= last + 1e-4))
    if not len(inside):
        raise ValueError(f"no frame from {start or 0} s to {last} s; the last one is at {max(times):.2f} s")
    return int(inside[0]), int(inside[-1])

def sample_indices(timestamps_s, spec, start=None, end=None, fps=None):
    """An even number of frame indices from ascending times in seconds; fps: the rate that the file states.

    Evenly spaced frames: as qwen-vl-utils, about duration * spec.fps within the bounds, linspace with both
    ends. With a variable frame rate: the frames nearest to evenly spaced times. A lone frame is taken twice,
    nframes above the count is lowered to it. ValueError if the segment holds no frame.
    """
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

def plan(times, rate, height, width, spec, start=None, end=None):
    """(indices to decode, (height, width), Clip without frames) from times and frame size."""
    indices = sample_indices(times, spec, start, end, rate)
    (low, high), size = segment(times, start, end), frame_size(height, width, len(indices), spec)
    base, count = 0 if spec.timestamps == "source" else low, high - low + 1
    shown = times[indices] - times[base]
    # Both engines compute a time as index / fps. Where that is not true, milliseconds carry the truth.
    if np.abs(shown - (np.array(indices) - base) / rate).max() < 2e-3:
        return indices, size, Clip(None, rate, [i - base for i in indices], count, count / rate)
    seconds = (times[high] - times[low]) * count / max(count - 1, 1) or 1 / rate
    return indices, size, Clip(None, 1000.0, [round(t * 1000) for t in shown], round(seconds * 1000), seconds)

# ---------------------------------------------------------------- decode
def decord_reader(path):
    import decord
    decord.logging.set_level(decord.logging.QUIET)
    box = [decord.VideoReader(str(path), num_threads=min(2, torch.get_num_threads()))]
    times = box[0].get_frame_timestamp(list(range(len(box[0]))))[:, 0].astype(np.float64)
    if times[0] < -1e-3:
        raise IndexError("an edit list hides frames before time 0, which decord would show")
    read = lambda indices: box[0].get_batch(indices).asnumpy()
    return Reader(times - times[0], box[0].get_avg_fps(), read, box.clear, "decord")

def pyav_reader(path):
    import av
    container = av.open(str(path))
    stream = container.streams.video[0]
    packets = [packet for packet in container.demux(stream) if packet.pts is not None]
    if not packets or len(packets) < stream.frames:
        raise ValueError(f"truncated: {len(packets)} of {stream.frames} frames are there")
    pts = sorted(packet.pts for packet in packets if not packet.is_discard)
    times = np.array([float((p - pts[0]) * stream.time_base) for p in pts])
    container.seek(min(packet.pts for packet in packets), stream=stream)
    stream.thread_type = "AUTO"
    frames, held = container.decode(stream), []

    def read(indices):
        batch = []
        for i in indices:
            while not held or held[0].pts < pts[i]:
                held[:] = [next(frames, None)]
                if held[0] is None:
                    raise ValueError(f"can be decoded up to {times[i]:.2f} s of {times[-1]:.2f} s only")
            batch.append(np.rot90(held[0].to_ndarray(format="rgb24"), held[0].rotation // 90))
        return np.stack(batch)

    rate = float(stream.average_rate or 1 / np.diff(times).mean())
    return Reader(times, rate, read, container.close, "PyAV")

def read_image(path):
    """(H, W, 3) uint8, upright, transparency on white."""
    from PIL import Image, ImageOps
    try:
        with Image.open(path) as image:
            image = ImageOps.exif_transpose(image)
            if image.has_transparency_data:
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
            return np.array(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise MediaError(path, f"cannot be read as an image: {error}") from error

def decode_image(path, spec):
    """An image in its own pixel budget; the frames of the Clip are (3, H, W)."""
    pixels, low = read_image(path), spec.image_min_pixels or 4 * spec.token
    high = spec.image_max_pixels or 16384 * spec.token
    try:
        size = smart_resize(*pixels.shape[:2], spec.patch_size * spec.merge_size, min(low, high), high)
    except ValueError as error:
        raise MediaError(path, error) from error
    return Clip(resize(pixels[None], *size)[0].contiguous(), 1.0, [], 0, 0.0)

def frame_files(path):
    """Image files of a frame list or of a folder in natural order (2 before 10); None for a video."""
    if isinstance(path, (list, tuple)) or not os.path.isdir(path):
        return path if isinstance(path, (list, tuple)) else None
    names = [str(p) for p in Path(path).iterdir() if p.suffix.lower() in IMAGE_SUFFIXES]
    if not names:
        raise MediaError(path, "is a folder without images")
    return sorted(names, key=lambda name: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", name)])

def with_reader(path, fps, use):
    """use(reader) with decord, or PyAV where decord fails (AV1, GIF, damaged heads) or is missing."""
    import av
    files, reasons = frame_files(path), []
    tries = [(pyav_reader, (av.FFmpegError, OSError, ValueError, IndexError))]
    if files:  # a clip given as its frames, shown at a stated rate
        read = lambda indices: np.stack([read_image(files[i]) for i in indices])
        tries = [(lambda _: Reader(np.arange(len(files)) / fps, fps, read, files.copy, "images"), ValueError)]
    elif find_spec("decord"):
        import decord
        tries.insert(0, (decord_reader, (decord.DECORDError, RuntimeError, IndexError)))
    for open_reader, errors in tries:
        reader = None
        try:
            reader = open_reader(path)
            return use(reader)
        except errors as error:
            reasons.append(str(error).strip().split("\n")[-1][:200])
        finally:
            if reader:
                reader.close()  # at once: an idle decord reader decodes ahead without bound
    raise MediaError(path if not files else files[0], "cannot be decoded: " + "; ".join(reasons[::-1]))

def resize(frames, height, width):
    """(n, H, W, 3) uint8 array -> (n, 3, height, width) uint8, bicubic with antialiasing."""
    frames = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2)
    return F.interpolate(frames, size=(height, width), mode="bicubic", antialias=True)

def read_artifact(path, spec):
    """A clip from EasyVideoR1's .pt files: {frames (T, 3, H, W) float 0..255, metadata, sample_fps}."""
    import pickle
    try:
        data = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        frames, meta = data["frames"].round().clamp(0, 255).to(torch.uint8), data["metadata"]
        indices, total = torch.as_tensor(meta["frames_indices"]).tolist(), meta["total_num_frames"]
        odd, factor = len(frames) % 2, spec.patch_size * spec.merge_size
        frames = torch.cat([frames, frames[len(frames) - odd:]])
        indices += indices[len(indices) - odd:]
        clip = Clip(frames.contiguous(), float(meta["fps"]), indices, int(total), total / meta["fps"])
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, LookupError, TypeError,
            AttributeError) as error:
        raise MediaError(path, f"is no stored clip (frames, metadata, sample_fps): {error}") from error
    if frames.ndim != 4 or frames.shape[1] != 3 or frames.shape[2] % factor or frames.shape[3] % factor:
        raise MediaError(path, f"has {tuple(frames.shape)}, not (T, 3, H, W) in multiples of {factor}")
    return clip

def decode(path, spec, start=None, end=None, fps=None):
    """Samples, decodes and resizes one clip in this process. MediaError if it cannot.

    path: a video file, a folder or list of images (at fps, default spec.fps), a .pt artifact."""
    def sample(reader):
        height, width = reader.read([0]).shape[1:3]
        try:
            indices, size, clip = plan(reader.times, reader.fps, height, width, spec, start, end)
        except ValueError as error:
            raise MediaError(path, error) from error
        clip.frames = torch.empty(len(indices), 3, *size, dtype=torch.uint8)
        for at in range(0, len(indices), CHUNK):
            clip.frames[at:at + CHUNK] = resize(reader.read(indices[at:at + CHUNK]), *size)
        return clip

    if str(path).endswith(".pt"):
        return read_artifact(path, spec)
    return with_reader(path, fps or spec.fps, sample)

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
    for file in frame_files(item["path"]) or [item["path"]]:
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
    return clip if clip.frames.dtype == torch.uint8 and clip.frames.shape[-3] == 3 else None

def load_item(item, spec, cache_dir=None, cache_mode="prefer_cache"):
    """(Clip, its cache file or None). Broken files are remembered too, as KEY.bad."""
    from safetensors.torch import save_file
    key, path = item_key(item, spec), item["path"]
    file = Path(cache_dir, key[:2], key + ".safetensors") if cache_dir and cache_mode != "realtime" else None
    if file and (clip := read_clip(file)):
        os.utime(file)  # the least recently used go first
        return clip, file
    broken = file and file.with_suffix(".bad")
    if file and broken.exists():
        raise MediaError(path, f"{broken.read_text()} (remembered in {broken})")
    if file and cache_mode == "cache_only":
        raise MediaError(path, f"is not in {cache_dir}; fill it with: python video_io.py cache")
    try:
        clip = decode_image(path, spec) if item["kind"] == "image" else decode(
            path, spec, item.get("start"), item.get("end"), item.get("fps"))
    except MediaError as error:
        if file:
            write_atomic(broken, lambda temp: temp.write_text(error.reason))
        raise
    clip.key = key
    if file:
        header = {name: json.dumps(value) for name, value in vars(clip).items() if name != "frames"}
        write_atomic(file, lambda temp: save_file({"frames": clip.frames}, temp, header))
    return clip, file

def evict(cache_dir, limit_bytes):
    """Deletes the least recently used entries until the cache fits, and leftovers of killed writers."""
    files = []
    for file in Path(cache_dir).glob("*/*"):
        try:
            files.append((file.stat().st_mtime, file.stat().st_size, file))
        except FileNotFoundError:  # another process evicts too
            pass
    total = sum(size for _, size, _ in files)
    for modified, size, file in sorted(files):
        if total > limit_bytes or file.suffix == ".tmp" and modified < time.time() - 3600:
            file.unlink(missing_ok=True)
            total -= size

def load_media(record, spec, cache_dir=None, cache_mode="prefer_cache", load=None):
    """Every clip and image of a record, in this process unless load (item -> Clip) does it elsewhere."""
    media, load = Media(), load or (lambda item: load_item(item, spec, cache_dir, cache_mode)[0])
    for item in media_items(record, cache_mode):
        clip = load(item)
        if item["kind"] == "video":
            media.videos.append(clip)
        else:
            media.images.append(clip.frames)
            media.image_keys.append(clip.key)
    return media

# ---------------------------------------------------------------- worker processes
def perform(op, item, spec, cache_dir, cache_mode):
    """What a worker can be asked for: load (into the cache folder), probe, cut. A JSON-ready dict."""
    if op == "load":
        clip, file = load_item(item, spec, cache_dir, cache_mode)
        return {"file": str(file), "bytes": clip.frames.nbytes}
    return probe(item, spec) if op == "probe" else cut(**item)

def serve():
    """A worker: one JSON request per line in, one JSON answer per line out."""
    torch.set_num_threads(1)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: none is left behind when the trainer is killed
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    print("ready", file=answers)
    for line in sys.stdin:
        op, item, spec, *cache = json.loads(line)
        try:
            answer = perform(op, item, MediaSpec(**spec), *cache)
        except MediaError as error:
            answer = {"error": error.reason}
        print(json.dumps(answer), file=answers)

class MediaLoader:
    """Decodes in worker processes: a clip that hangs or crashes the decoder costs one sample, never the run.

    Workers start by exec, which is safe beside the threads of vLLM and torch, and import neither vLLM nor
    transformers; frames come back through memory-mapped files. workers=0: in this process, without a timeout.
    n_ok and n_bad count files; each bad one is appended to bad_file.
    """
    def __init__(self, spec, workers=2, timeout_s=60, cache_dir=None, cache_mode="prefer_cache",
                 bad_file=None, cache_gb=None):
        self.spec, self.workers, self.timeout_s, self.bad_file = spec, workers, timeout_s, bad_file
        self.cache_dir = str(cache_dir) if cache_dir and cache_mode != "realtime" else None
        self.cache_mode, self.cache_gb = cache_mode, cache_gb
        if cache_mode not in ("prefer_cache", "realtime") and (cache_mode != "cache_only" or not cache_dir):
            raise DataError(f"cache_mode {cache_mode}: prefer_cache, realtime, or cache_only and a cache_dir")
        self.n_ok, self.n_bad, self.unswept, self.lock, self.processes = 0, 0, math.inf, threading.Lock(), {}
        self.closed = False
        self.pool = ThreadPoolExecutor(max(workers, 1), thread_name_prefix="media")
        roomy = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 2**31
        self.spill = tempfile.mkdtemp(prefix="frames-", dir="/dev/shm" if roomy else None)

    def submit(self, record):
        """A Future of Media, or of a MediaError."""
        load = lambda item: self.load(item, record)
        return self.pool.submit(load_media, record, self.spec, None, self.cache_mode, load)

    def load(self, item, record=None):
        """Clip of one item, through the cache or through one that lasts for a moment."""
        folder = self.cache_dir or os.path.join(self.spill, uuid.uuid4().hex)
        try:
            clip = read_clip(self.ask("load", item, record, folder)["file"])
        finally:
            if not self.cache_dir:
                shutil.rmtree(folder, ignore_errors=True)  # the mapping keeps the pages
        if clip is None:
            raise MediaError(item["path"], "was evicted from the cache before it was read; raise the limit")
        return clip

    def ask(self, op, item, record=None, folder=None):
        """The answer of perform(), from this thread's worker."""
        mode = self.cache_mode if self.cache_dir else "prefer_cache"
        try:
            if self.workers:
                answer = self._answer([op, item, asdict(self.spec), folder, mode])
            else:
                answer = perform(op, item, self.spec, folder, mode)
        except MediaError as error:
            with self.lock:
                self.n_bad += not self.closed  # a clip is not to blame when close() stops its worker
                if self.bad_file and not self.closed:
                    with open(self.bad_file, "a", encoding="utf-8") as f:
                        f.write(json.dumps(vars(error) | {"where": (record or {}).get("where")}) + "\n")
            raise
        with self.lock:
            self.n_ok, self.unswept = self.n_ok + 1, self.unswept + answer.get("bytes", 0)
            if self.cache_dir and self.cache_gb and self.unswept > self.cache_gb * 5e7:  # 1/20 of it
                self.unswept = 0
                evict(self.cache_dir, self.cache_gb * 1e9)
        return answer

    def _answer(self, request):
        process = self.processes.get(threading.get_ident())
        path = request[1].get("path", request[1].get("src"))
        if process is None or process.poll() is not None:
            pipe = subprocess.PIPE
            process = subprocess.Popen(WORKER, stdin=pipe, stdout=pipe, start_new_session=True)
            self.processes[threading.get_ident()] = process
            process.stdout.readline()  # "ready": imports do not count as decoding
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # then its answers have ended too
        answered = wait([process.stdout], self.timeout_s)
        line = process.stdout.readline() if answered else b""
        if not line:
            process.kill()
            died = f"crashed the decoder (exit code {process.wait()})"
            raise MediaError(path, died if answered else f"hung for {self.timeout_s:g} s; decoder killed")
        answer = json.loads(line)
        if "error" in answer:
            raise MediaError(path, answer["error"])
        return answer

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

@lru_cache
def vllm_expands_triple():
    """Up to 0.2x vLLM looks for the template's whole block and gives the released layout itself."""
    from vllm.model_executor.models.qwen3_vl import Qwen3VLMultiModalProcessor
    return "_expands_only_video_token" not in vars(Qwen3VLMultiModalProcessor)

def vllm_inputs(text, media):
    """One request of vLLM's generate. The pixels are final: vLLM neither samples nor resizes."""
    if not media.videos and not media.images:
        return {"prompt": text}
    from PIL import Image
    data, uuids, settings = {}, {}, {"do_resize": False}
    if media.videos:
        if VISION_TRIPLE not in text and vllm_expands_triple():
            text = text.replace("<|video_pad|>", VISION_TRIPLE)
        data["video"] = [(c.frames, {"fps": c.fps, "frames_indices": list(c.frames_indices),
                                     "total_num_frames": c.total_num_frames, "duration": c.duration,
                                     "do_sample_frames": False}) for c in media.videos]
        uuids["video"], settings["do_sample_frames"] = [clip.key for clip in media.videos], False
    if media.images:
        data["image"] = [Image.fromarray(x.permute(1, 2, 0).contiguous().numpy()) for x in media.images]
        uuids["image"] = list(media.image_keys)
    return {"prompt": text, "multi_modal_data": data, "multi_modal_uuids": uuids,
            "mm_processor_kwargs": settings}

def stamps(clip, temporal_patch_size=2):
    """["<0.2 seconds>", ...], one per merged group of frames: the mean of its first and last time."""
    times = [i / clip.fps for i in clip.frames_indices]
    return [f"<{(times[i] + times[min(i + temporal_patch_size, len(times)) - 1]) / 2:.1f} seconds>"
            for i in range(0, len(times), temporal_patch_size)]

def grids(media, model_config):
    """Patch grids (t, h, w) of the videos and of the images."""
    p, tp = model_config.vision_config.patch_size, model_config.vision_config.temporal_patch_size
    return ([(-(-len(c.frames) // tp), c.frames.shape[2] // p, c.frames.shape[3] // p) for c in media.videos],
            [(1, image.shape[1] // p, image.shape[2] // p) for image in media.images])

def expand_prompt(text, media, processor, model_config):
    """Prompt ids with placeholders expanded: what vLLM reports as prompt_token_ids."""
    c, encode = model_config, lambda text: processor.tokenizer.encode(text, add_special_tokens=False)
    merge, (videos, images) = c.vision_config.spatial_merge_size**2, grids(media, c)
    clips, ids = iter(media.videos), []
    queue = {c.video_token_id: iter(videos), c.image_token_id: iter(images)}
    for token in encode(text):
        t, h, w = next(queue[token]) if token in queue else (0, 0, 0)
        if token == c.video_token_id and c.model_type.startswith("qwen3"):
            for stamp in stamps(next(clips), c.vision_config.temporal_patch_size):
                block = [c.vision_start_token_id] + [token] * (h * w // merge) + [c.vision_end_token_id]
                ids += encode(stamp) + block
        else:
            ids += [token] * (t * h * w // merge or 1)
    return ids

def position_ids(ids, media, model_config):
    """(4, L): the text position 0..L-1, then time, height, width (M-RoPE, arXiv 2409.12191, section 2.1).

    What follows a vision block goes on at the largest position so far plus 1, in all families: the released
    rule, of vLLM and transformers 4.57 (5.17 to 5.19 forget the temporal extent for Qwen2-VL and 2.5-VL)."""
    c, merge, ids = model_config, model_config.vision_config.spatial_merge_size, list(ids)
    videos, images = grids(media, c)
    queue = {c.image_token_id: [(grid, 1) for grid in images], c.video_token_id: []}
    for clip, (t, h, w) in zip(media.videos, videos):
        if c.model_type.startswith("qwen3"):  # every merged frame is a block of its own behind a time stamp
            queue[c.video_token_id] += [((1, h, w), 1)] * t
            continue
        pace = 1  # positions per merged frame
        if c.model_type == "qwen2_5_vl":  # seconds per merged frame are float32 in vLLM
            rate = len(clip.frames_indices) / clip.total_num_frames * clip.fps
            seconds = float(np.float32(c.vision_config.temporal_patch_size / rate))
            pace = seconds * c.vision_config.tokens_per_second
        queue[c.video_token_id].append(((t, h, w), pace))
    parts, at, start = [], 0, 0
    while at < len(ids):
        if queue.get(ids[at]):
            (t, h, w), pace = queue[ids[at]].pop(0)
            block = np.indices((t, h // merge, w // merge)).reshape(3, -1)  # (3, n)
            block[0] = (block[0] * pace).astype(np.int64)
        else:
            n = next((i for i in range(at + 1, len(ids)) if queue.get(ids[i])), len(ids)) - at
            block = np.tile(np.arange(n), (3, 1))
        parts.append(block + start)
        at, start = at + block.shape[1], parts[-1].max() + 1
    return torch.from_numpy(np.concatenate([np.arange(len(ids))[None], np.concatenate(parts, 1)]))

def patchify(frames, patch_size, merge_size, temporal_patch_size):
    """(T, 3, H, W) -> (patches, 3 * tp * p * p), patches of a merge block side by side."""
    tp, p, m = temporal_patch_size, patch_size, merge_size
    if len(frames) % tp:  # the last frame fills up
        frames = torch.cat([frames, frames[-1:].expand(-len(frames) % tp, -1, -1, -1)])
    t, h, w = len(frames) // tp, frames.shape[2] // p, frames.shape[3] // p
    patches = frames.reshape(t, tp, 3, h // m, m, p, w // m, m, p).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return patches.reshape(t * h * w, 3 * tp * p * p)

def model_inputs(prompt_ids, media, model_config, image_mean, image_std, device, dtype):
    """What the Hugging Face model takes besides input_ids; keys of media that the prompt lacks are absent."""
    c, v, ids = model_config, model_config.vision_config, torch.tensor(prompt_ids)
    tp, width = v.temporal_patch_size, 3 * v.temporal_patch_size * v.patch_size**2
    mean, std = ((torch.tensor(x) * 255.0).repeat_interleave(width // 3).to(device)
                 for x in (image_mean, image_std))  # (3 * tp * p * p,)
    types = (ids == c.image_token_id).int() + 2 * (ids == c.video_token_id).int()
    inputs = {"mm_token_type_ids": types[None].to(device),
              "position_ids": position_ids(prompt_ids, media, c)[:, None].to(device)}  # (1, P), (4, 1, P)
    kinds = ("pixel_values_videos", "video_grid_thw", [clip.frames for clip in media.videos]), (
        "pixel_values", "image_grid_thw", [image[None] for image in media.images])
    for (pixels, grid, stacks), found in zip(kinds, grids(media, c)):
        if not stacks:
            continue
        inputs[grid] = torch.tensor(found, device=device)  # (n, 3)
        counts = [math.prod(g) for g in found]  # patches of each clip or image
        inputs[pixels] = torch.empty(sum(counts), width, dtype=dtype, device=device)
        scratch = torch.empty(256, width, device=device)  # float32 as in the processors, small as the cache
        for frames, part in zip(stacks, inputs[pixels].split(counts)):
            patches = patchify(frames.to(device), v.patch_size, v.spatial_merge_size, tp)  # uint8
            for rows, out in zip(patches.split(256), part.split(256)):
                out.copy_(torch.sub(rows, mean, out=scratch[:len(rows)]).div_(std))
    return inputs

# ---------------------------------------------------------------- token maths without decoding
def probe(item, spec=MediaSpec()):
    """What a file is, from its headers and first frame, JSON-ready. item: a path or one of media_items()."""
    import av
    item = item if isinstance(item, dict) else {"kind": "video", "path": os.fspath(item)}
    path = item["path"]
    item_key(item, spec)  # says what is missing or unreadable

    def look(reader):
        height, width = reader.read([0]).shape[1:3]
        vfr = np.abs(reader.times - np.arange(len(reader.times)) / reader.fps).max() > 0.5 / reader.fps
        return {"height": height, "width": width, "fps": reader.fps, "frames": len(reader.times),
                "vfr": bool(vfr), "duration": reader.times[-1] + 1 / reader.fps, "decoder": reader.name,
                "times": reader.times.tolist()}

    if item["kind"] == "image" or str(path).endswith(".pt"):
        clip = load_item(item, spec)[0]
        return item | {"done": list(clip.frames.shape), "stamps": stamps(clip, spec.temporal_patch_size)}
    found = item | {"codec": "images", "rotation": 0} | with_reader(path, item.get("fps") or spec.fps, look)
    if found["decoder"] != "images":
        with av.open(path) as container:
            found["rotation"] = next(container.decode(video=0)).rotation
            stream = container.streams.video[0]
            found["codec"] = f"{stream.codec_context.name} {stream.format.name}"
    return found

def plan_of(probe, spec):
    size = probe["height"], probe["width"]
    return plan(np.array(probe["times"]), probe["fps"], *size, spec, probe.get("start"), probe.get("end"))

def count_tokens(probe, spec, tokenizer=None):
    """(visual tokens, tokens of time stamps and frame marks) that a probed file adds to a prompt.

    Without a tokenizer a time stamp counts as Qwen's does: one token per character, " seconds" one."""
    if "done" in probe:
        texts, size = probe["stamps"] or [""], probe["done"][-2:]
    else:
        _, size, clip = plan_of(probe, spec)
        texts = stamps(clip, spec.temporal_patch_size)
    length = lambda s: len(tokenizer.encode(s, add_special_tokens=False)) if tokenizer else len(s) - 7
    # Qwen2-VL and Qwen2.5-VL (patch 14) have no time stamps; images have none either
    text = sum(length(s) + 2 for s in texts) if spec.patch_size != 14 and probe["kind"] == "video" else 0
    return len(texts) * (size[0] * size[1] // spec.token), text

def fit_budget(max_tokens, probe, spec, tokenizer=None):
    """spec with the most pixels per frame that fit for a probed clip; where none do, fewer frames."""
    low, high = ((pixels or tokens * spec.token) // spec.token
                 for pixels, tokens in ((spec.min_pixels, 4), (spec.max_pixels, 768)))
    for frames in range(len(plan_of(probe, spec)[0]), 1, -2):
        for tokens in range(high, low - 1, -1):
            tried = replace(spec, nframes=frames, min_pixels=low * spec.token, max_pixels=tokens * spec.token)
            if sum(count_tokens(probe, tried, tokenizer)) <= max_tokens:
                return tried
    raise DataError(f"{probe['path']}: 2 frames of {low} tokens exceed {max_tokens}; raise the budget")

def survey(records, loader, prompts, processor=None, form="reason", max_prompt_length=math.inf, system=None):
    """[(record, visual tokens, text tokens, why it cannot be used or None, its probes)] without decoding.

    Prompts over max_prompt_length are reported, never truncated: a cut through vision tokens is no prompt."""
    groups = [media_items(record, loader.cache_mode) for record in records]
    answers = ask_all(loader, "probe", [item for group in groups for item in group], "opening")
    tokenizer, out = processor and processor.tokenizer, []
    for record, group in zip(records, groups):
        probes, visual, reason = [answers[json.dumps(item)] for item in group], 0, None
        text = len(json.dumps(build_messages(record, prompts, form, system))) // 4
        if processor:
            prompt = prompt_text(record, prompts, processor, form, system)
            text = len(tokenizer.encode(prompt, add_special_tokens=False)) - len(group)
        for found in probes:
            try:
                if isinstance(found, MediaError):
                    raise found
                more = count_tokens(found, loader.spec, tokenizer)
                visual, text = visual + more[0], text + more[1]
            except (MediaError, ValueError) as error:
                reason = reason or f"{error}"
        if not reason and visual + text > max_prompt_length:
            reason = f"prompt of {visual + text} tokens is over max_prompt_length {max_prompt_length}"
        out.append((record, visual, text, reason, probes))
    return out

def ask_all(loader, op, items, what, folder=None):
    """{JSON of the item: answer or MediaError}, with a progress bar; what records share is asked for once."""
    from tqdm import tqdm
    unique = {json.dumps(item): item for item in items}
    futures = {loader.pool.submit(loader.ask, op, item, None, folder): key for key, item in unique.items()}
    answers = {}
    for future in tqdm(as_completed(futures), total=len(futures), desc=what, unit="file"):
        if not isinstance(future.exception(), MediaError | None):
            raise future.exception()
        answers[futures[future]] = future.exception() or future.result()
    return answers

# ---------------------------------------------------------------- commands
def cut(src, dst, start, end, copy=False):
    """Writes the segment to dst, or nothing. Frame-exact; copy: packets from the key frame before start."""
    import av
    temp = f"{dst}.{uuid.uuid4().hex}.part"
    try:
        os.makedirs(os.path.dirname(dst) or ".", exist_ok=True)
        with av.open(src) as source, av.open(temp, "w", format="mp4") as target:
            stream, written, first = source.streams.video[0], None, None
            source.seek(max(0, int(start / stream.time_base)), stream=stream)
            for packet in source.demux(stream):
                if packet.dts is not None and packet.dts * stream.time_base > end + (0 if copy else 1):
                    break  # 1 s later no frame of the segment can be pending
                for frame in [] if copy else packet.decode():
                    if frame.pts is None or not start - 1e-4 <= frame.time <= end + 1e-4:
                        continue
                    pixels = np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)
                    image = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
                    if written is None:
                        first, options = frame.pts, {"crf": "16"}
                        written = target.add_stream("libx264", rate=stream.average_rate, options=options)
                        written.width, written.height = image.width, image.height
                        written.time_base = stream.time_base
                        written.pix_fmt = "yuv444p" if image.width % 2 or image.height % 2 else "yuv420p"
                    image.pts, image.time_base = frame.pts - first, stream.time_base
                    target.mux(written.encode(image))
                if copy and packet.pts is not None:
                    if written is None:
                        written, first = target.add_stream_from_template(stream), packet.dts
                    packet.pts, packet.dts = packet.pts - first, packet.dts - first
                    packet.stream = written
                    target.mux(packet)
            if written is None:
                raise MediaError(src, f"no frame from {start} s to {end} s")
            if not copy:
                target.mux(written.encode())
        os.replace(temp, dst)
    except (av.FFmpegError, OSError, IndexError) as error:
        raise MediaError(src, f"cannot be cut: {error}") from error
    finally:
        Path(temp).unlink(missing_ok=True)
    return {"file": dst}

def segment_of(row, root, index):
    """(source, start, end, name of the cut file) of a row; ODV-Bench and LiveSports name it so."""
    name = os.path.basename(str(row.get("path") or ""))
    named = re.fullmatch(r"\d+_(.+)_s([\d.]+)_e([\d.]+)\.mp4", name)
    named = named or re.fullmatch(r"(.+)_([\d.]+)_([\d.]+)\.mp4", name)
    video = row.get("video") or (row.get("videos") or [row.get("path")])[0]
    start, end = (row.get(key, row.get(f"video_{key}")) for key in ("start", "end"))
    if named and end is None:
        source = index.get(named[1], os.path.join(root, f"{named[1]}.mp4"))
        return source, float(named[2]), float(named[3]), name
    if not isinstance(video, str) or end is None:
        raise DataError("names no segment: needs video, start and end, or a path like ID_START_END.mp4")
    start, end = float(start or 0), float(end)
    name = row.get("clip_name") or f"{Path(video).stem}_{start:.3f}_{end:.3f}.mp4"
    return os.path.join(root, video), start, end, name

def show_probes(args, loader, processor):
    kinds = {f: "image" if f.lower().endswith(IMAGE_SUFFIXES) else "video" for f in args.data}
    answers = ask_all(loader, "probe", [{"kind": kind, "path": f} for f, kind in kinds.items()], "opening")
    for found in answers.values():
        if isinstance(found, MediaError):
            print(found)
            continue
        try:
            visual, text = count_tokens(found, loader.spec, processor and processor.tokenizer)
            taken, size, _ = ([], found["done"][-2:], 0) if "done" in found else plan_of(found, loader.spec)
        except ValueError as error:
            print(f"{found['path']}: {error}")
            continue
        if "codec" in found:
            print("{path}: {codec}, {width}x{height}, {frames} frames, {fps:.3f} fps{variable}, "
                  "{duration:.2f} s, rotation {rotation}, read by {decoder}".format(
                      variable=" (variable)" * found["vfr"], **found))
        cost = f"{visual} visual + {text} text tokens"
        print(f"{found['path']}: {len(taken)} frames of {size[1]}x{size[0]}, {cost}")
    return 1 if any(isinstance(found, MediaError) for found in answers.values()) else 0

def show_tokens(args, loader, processor):
    prompts = load_prompts()
    records = load_records(args.data, args.data_root, prompts)
    rows = survey(records, loader, prompts, processor, args.form, args.max_prompt_length)
    totals = np.array([visual + text for _, visual, text, _, _ in rows])
    columns = {"visual": [row[1] for row in rows], "text": [row[2] for row in rows], "prompt": totals}
    for name, values in columns.items():
        low, mid, high, most = np.percentile(values, [0, 50, 95, 100]).astype(int)
        print(f"{name:>7} tokens: least {low}, median {mid}, 95 % {high}, most {most}, sum {sum(values)}")
    counts, edges = np.histogram(totals, 12)
    for n, left, right in zip(counts, edges, edges[1:]):
        print(f"{int(left):>8}-{int(right):<8} {'#' * math.ceil(50 * n / counts.max())} {n}")
    clips = {str(p["path"]): p for r in rows for p in r[4] if isinstance(p, dict) and "times" in p}
    frames = [(len(i), *size) for i, size, _ in (plan_of(p, loader.spec) for p in clips.values())]
    print(f"cache: {len(clips)} clips, {sum(3 * n * h * w for n, h, w in frames) / 1e9:.2f} GB")
    if args.model:
        text = args.config.get_text_config()
        size = 2 * int(totals.max()) * text.hidden_size * text.num_hidden_layers  # bytes in bf16
        print(f"activations of the longest prompt, one checkpoint per layer: {size / 1e9:.3f} GB")
    worst = max(rows, key=lambda r: r[1] + r[2])
    over = [f"{record['where']}: {reason}" for record, _, _, reason, _ in rows if reason]
    print(*over[:20], f"{len(over)} of {len(rows)} samples cannot be used as they are", sep="\n")
    if worst[3] and len(worst[4]) == 1 and isinstance(worst[4][0], dict) and "times" in worst[4][0]:
        _, stamps_ = count_tokens(worst[4][0], loader.spec, processor and processor.tokenizer)
        left = args.max_prompt_length - worst[2] + stamps_
        fit = fit_budget(left, worst[4][0], loader.spec, processor and processor.tokenizer)
        print(f"the longest fits with --max-pixels {fit.max_pixels} --min-pixels {fit.min_pixels}"
              f" --max-frames {fit.nframes} --min-frames {min(loader.spec.min_frames, fit.nframes)}")
    return 0

def check_data(args, loader, processor):
    prompts = load_prompts()
    records, problems, source = read_records(args.data, args.data_root, prompts)
    rows = survey(records, loader, prompts, processor, args.form, args.max_prompt_length)
    problems += [f"{record['where']}: {reason}" for record, _, _, reason, _ in rows if reason]
    good = [source[record["where"]] for record, _, _, reason, _ in rows if not reason]
    clean = Path(args.data).with_suffix(".clean.jsonl")
    text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in good)
    write_atomic(clean, lambda temp: temp.write_text(text, encoding="utf-8"))
    left = len(source) - len(good)
    print(*problems, f"{len(source)} records = {len(good)} good, in {clean} + {left} left out", sep="\n")
    return 1 if problems else 0

def fill_cache(args, loader, processor):
    records = load_records(args.data, args.data_root)
    items = [item for record in records for item in media_items(record) if item["kind"] == "video"]
    answers = ask_all(loader, "load", items, "caching", args.cache_dir)
    bad = [answer for answer in answers.values() if isinstance(answer, MediaError)]
    size = sum(answer["bytes"] for answer in answers.values() if isinstance(answer, dict))
    good = len(answers) - len(bad)
    print(f"{len(answers)} clips = {good} in {args.cache_dir} ({size / 1e9:.2f} GB) + {len(bad)} failed")
    print(*bad[:20], f"all failures: {args.bad_file}" * bool(bad), sep="\n")
    return 1 if bad else 0

def cut_data(args, loader, processor):
    root = os.path.abspath(args.data_root or Path(args.data).parent)
    suffixes = (".mp4", ".avi", ".mkv", ".mov", ".webm")
    index = {p.stem: str(p) for p in sorted(Path(root).rglob("*")) if p.suffix.lower() in suffixes}
    items, faults, done = [], [], 0
    for line, row in read_rows(args.data):
        try:
            src, start, end, name = segment_of(row, root, index)
        except (DataError, AttributeError, ValueError) as error:
            faults.append(f"{args.data}:{line}: {error}")
            continue
        dst = os.path.join(args.out, name)
        if not os.path.exists(dst):
            items.append({"src": src, "dst": dst, "start": start, "end": end, "copy": args.copy})
        done += os.path.exists(dst)
    answers = ask_all(loader, "cut", items, "cutting")
    faults += [str(answer) for answer in answers.values() if isinstance(answer, MediaError)]
    total = f"{len(answers)} segments cut or tried, {done} records had theirs, {len(faults)} failures"
    print(*faults[:20], total, sep="\n")
    return 1 if faults else 0

COMMANDS = {"probe": (show_probes, "Shows what files are and what would be sampled from them."),
            "tokens": (show_tokens, "Shows what the data costs in tokens and memory. Decodes nothing."),
            "check": (check_data, "Opens every clip, lists bad and too long ones, writes DATA.clean.jsonl."),
            "cache": (fill_cache, "Decodes every clip into the cache. Stop and start it as you like."),
            "clip": (cut_data, "Cuts segments: ODV-Bench and LiveSports names, or video, start, end.")}

def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog="See COMMAND --help.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, teach) in COMMANDS.items():
        sub = commands.add_parser(name, help=teach, description=teach,
                                  formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        add = sub.add_argument
        add("data", nargs="+" if name == "probe" else None, help="media files or a data file")
        if name == "clip":
            add("out", help="folder for the clips")
            add("--copy", action="store_true", help="fast stream copy that starts at the key frame before")
        add("--data-root", help="where relative paths start; else the folder of the data file")
        add("--model", help="model folder: its patch sizes and tokenizer make counts exact")
        add("--max-prompt-length", type=int, default=32768, help="tokens; longer prompts are left out")
        add("--form", default="reason", choices=["reason", "direct"], help="form of configs/prompts.yaml")
        add("--workers", type=int, default=os.cpu_count(), help="decoding processes")
        add("--timeout", type=float, default=600.0 if name == "clip" else 60.0, help="seconds per file")
        add("--cache-dir", required=name == "cache", help="folder of the frame cache")
        add("--cache-gb", type=float, help="size limit: the least recently used clips go first")
        add("--bad-file", default="bad_videos.jsonl", help="failed files are appended here with the reason")
        for f in fields(MediaSpec):
            kind = {"fps": float, "timestamps": str}.get(f.name, int)
            add("--" + f.name.replace("_", "-"), type=kind, default=f.default, help="see MediaSpec")
    args, loader = parser.parse_args(), None
    try:
        settings, processor = {f.name: getattr(args, f.name) for f in fields(MediaSpec)}, None
        if args.model:
            from transformers import AutoConfig
            processor, args.config = load_processor(args.model), AutoConfig.from_pretrained(args.model)
            sizes = asdict(media_spec(args.config))
            settings |= {name: sizes[name] for name in ("patch_size", "merge_size", "temporal_patch_size")}
        loader = MediaLoader(MediaSpec(**settings), args.workers, args.timeout, args.cache_dir,
                             bad_file=args.bad_file, cache_gb=args.cache_gb)
        return COMMANDS[args.command][0](args, loader, processor)
    except DataError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 130
    finally:
        if loader:
            loader.close()

if __name__ == "__main__":
    sys.exit(serve() if sys.argv[1:] == ["_worker"] else main())
