"""Every clip in: records, prompts, sampling, decode, cache, workers, model inputs, token maths, data doctor.

    python video_io.py probe  clip.mp4 ...              # codec, size, fps, what would be sampled, tokens
    python video_io.py tokens data.jsonl --model M      # what the data costs in tokens, activations and cache
    python video_io.py check  data.jsonl                # opens every clip; data.clean.jsonl has the good ones
    python video_io.py cache  data.jsonl --cache-dir D  # decodes everything once, in parallel, resumable
    python video_io.py clip   data.jsonl OUT            # cuts the segments that the records name

A record: configs/record.yaml. Indices and sizes: qwen-vl-utils 0.0.14 with the right patch size; where it is
wrong (frame lists, variable rates, edit lists, one frame, extreme ratios) presentation times count.
"""
import argparse, bisect, contextlib, ctypes, difflib, hashlib, importlib.util, itertools, json, math, os, re
import shutil, signal, subprocess, sys, tempfile, threading, time, uuid
from collections import Counter
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, make_dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

SCHEMA = 2  # part of every cache key: raise it when decode or resize change their result
CHUNK = 8  # frames held at full size at a time
CONFIGS = Path(__file__).resolve().parent / "configs"
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
VIDEO_SUFFIXES = (".mp4", ".avi", ".mkv", ".mov", ".webm")
VISION_TRIPLE = "<|vision_start|><|video_pad|><|vision_end|>"

class DataError(ValueError):
    """Bad input. The message is ready to print: one line per problem."""

class MediaError(Exception):
    """One clip or image that cannot be used: path, reason of one line, whether it is the file's for good."""
    def __init__(self, path, reason, lasting=True):
        self.path, self.reason, self.lasting = str(path), one_line(reason), lasting
        super().__init__(f"{self.path}: {self.reason}")

def one_line(text):
    return " ".join(str(text).split())[:300]

def read_yaml(path):
    import yaml
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"{path}: cannot be read as YAML: {one_line(error)}") from error

TEXTS = read_yaml(CONFIGS / "video_io.yaml")  # fields of MediaSpec, commands and flags, what is printed
FIELDS = [(name, object, rule["default"]) for name, rule in TEXTS["media"].items()]

@dataclass(frozen=True)
class MediaSpec(make_dataclass("Fields", FIELDS, frozen=True)):
    """How media become tensors: the fields of configs/video_io.yaml."""
    def __post_init__(self):
        for low in ("min_frames", "min_pixels", "image_min_pixels"):
            least, most = getattr(self, low), getattr(self, high := low.replace("min", "max"))
            if least and most and least > most:
                raise DataError(f"{low} {least} is above {high} {most}; lower it")
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
    stills: list = field(default_factory=list)  # of Clip, one frame each
    images = property(lambda self: [clip.frames[0] for clip in self.stills])  # (3, H, W) uint8 each
    nbytes = property(lambda self: sum(clip.frames.nbytes for clip in self.videos + self.stills))

# ---------------------------------------------------------------- records
def load_prompts(path=None):
    """{problem_type: {"reason": str, "direct": str}} from configs/prompts.yaml."""
    prompts = read_yaml(path := path or CONFIGS / "prompts.yaml")
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
        raise DataError(f"{path}: cannot be read: {one_line(error)}") from error
    rows, at, between = [], 0, re.compile(r"[\s,\[\]]*")
    breaks = [found.start() for found in re.finditer("\n", text)]
    while (start := between.match(text, at).end()) < len(text):  # value by value: each has its line number
        try:
            row, at = json.JSONDecoder().raw_decode(text, start)
        except json.JSONDecodeError as error:
            row, at = f"no valid JSON: {error}", text.find("\n", start) % (len(text) + 1)
        rows.append((bisect.bisect(breaks, start) + 1, row))
    return rows

def letter_options(options):
    """["A. text", ...] from a list or a dict {letter: text}. Letters that each option has are kept."""
    if isinstance(options, dict):
        return [f"{letter}. {text}" for letter, text in options.items() if text is not None]
    marks = [re.match(r"\s*\(?([A-Z])[.:)]\s*(.*)", str(option), re.S) for option in options]
    if all(marks) and len({mark[1] for mark in marks}) == len(marks):
        return [f"{mark[1]}. {mark[2].strip()}" for mark in marks]
    return [f"{chr(65 + i)}. {str(option).strip()}" for i, option in enumerate(options)]

def squash(name):
    return re.sub(r"[\s_-]+", "", str(name).lower())

def make_record(row, where, root, kinds, schema):
    """(record, [(field, what to do about it)]) of a row of the training or the evaluation layout."""
    rules = schema.schema["properties"]
    given = {name: value for name, value in row.items() if value not in (None, "", [], {}) and value == value}
    if given.get("data_type") == "image" and "path" in given:  # then it is one
        given["image_path"] = given.pop("path")
    record = {"problem_id": where.rpartition(":")[2]} | row | {"where": where} | {
        name: next((given[other] for other in rule["from"] if other in given), rule.get("default"))
        for name, rule in rules.items()}
    record["problem_type"] = kinds.get(squash(record["problem_type"]), record["problem_type"])
    for name in ("videos", "images"):
        record[name] = [record[name]] if isinstance(record[name], str) else record[name]
    errors = [(error.path[0], error.schema.get("description")) for error in schema.iter_errors(record)]
    if errors:  # what follows relies on the types
        return record, [(name, remedy or rules[name]["description"]) for name, remedy in errors]
    def place(file):
        return os.path.normpath(os.path.join(root, file.removeprefix("file://")))

    videos = [[place(f) for f in v] if isinstance(v, list) else place(v) for v in record["videos"]]
    images, stored = [place(file) for file in record["images"]], record["preprocessed_video"]
    if videos and all(str(file).lower().endswith(IMAGE_SUFFIXES) for file in videos):
        videos = [videos]  # a flat list of images is one clip, given as its frames
    answer = record["answer"] if isinstance(record["answer"], str) else json.dumps(record["answer"])
    tagged = re.search(rules["answer"]["tags"], answer)
    answer = (tagged[tagged.lastindex] if tagged else answer).strip()
    start, end = (t if t is None else float(t) for t in (record["video_start"], record["video_end"]))
    record |= {"videos": videos, "images": images, "options": letter_options(record["options"]),
               "data_type": record["data_type"] or ("video" if videos else "image" if images else "text"),
               "answer": answer, "video_start": start, "video_end": end,
               "preprocessed_video": stored and place(stored)}
    faults = [("answer", rules["answer"]["description"])] * (not answer)
    faults += [("video_end", f"must be after start {start}")] * (end is not None and end <= (start or 0))
    for kind, found in (("video", videos), ("image", images)):
        marks = record["problem"].count(f"<{kind}>")
        if marks not in (0, len(found)) or record["data_type"] == kind and not found:
            faults.append((f"{kind}s", f"a {kind} sample needs one, or one for each <{kind}> mark"))
        faults += [(f"{kind}s", f"no file {file}; fix the path or say where the data is (data_root)")
                   for entry in found for file in ([entry] if isinstance(entry, str) else entry)
                   if not os.path.exists(file)]
    return record, faults

def read_records(path, data_root=None, prompts=None, check=None, change=dict):
    """(records without fault, problems as printable lines, {where: source row}).  change: of each row."""
    import jsonschema
    root, seen = os.path.abspath(data_root or Path(path).parent), Counter()
    records, problems, rows = [], [], {}
    schema = jsonschema.Draft202012Validator(read_yaml(CONFIGS / "record.yaml"))
    rules, prompts = schema.schema["properties"], prompts or load_prompts()
    names = rules["problem_type"]["aliases"] | {kind: kind for kind in prompts}
    kinds = {squash(name): kind for name, kind in names.items() if kind in prompts}
    rules["problem_type"]["enum"], rules["data_source"]["default"] = list(prompts), Path(path).stem
    for line, row in read_rows(path):
        rows[where := f"{Path(path).name}:{line}"] = row
        try:
            if not isinstance(row, dict):
                raise DataError(row if isinstance(row, str) else "not a JSON object with fields")
            record, faults = make_record(change(row), where, root, kinds, schema)
            if faults:
                near = difflib.get_close_matches(squash(row.get("problem_type")), kinds, cutoff=0.5)
                near = ", ".join(kinds[kind] for kind in near or sorted(kinds))
                texts = [f"{name} is {json.dumps(record[name], default=str)[:80]}: {hint}"
                         for name, hint in dict.fromkeys(faults)]
                raise DataError("\n".join(texts).replace("{nearest}", near))
            # Of the source row, not the resolved one: a moved dataset keeps its keys.
            key = hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()[:16]
            seen[key] += 1
            record["key"] = key if seen[key] == 1 else f"{key}:{seen[key]}"
            if check:
                check(record)
            records.append(record)
        except ValueError as error:
            problems += [f"{where}: {text}" for text in str(error).removeprefix(f"{where}: ").split("\n")]
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
    named = " or ".join([", ".join(letters[:-1])] * (len(letters) > 1) + letters[-1:])  # "A, B or C"
    text = "\n".join([text, *["Options:"] * bool(letters), *record["options"],
                      prompts[record["problem_type"]][form].replace("{letters}", named)])
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
    return text.replace(VISION_TRIPLE, "<|video_pad|>") if "Qwen3" in type(processor).__name__ else text

def load_processor(model_dir):
    """AutoProcessor; DataError in one line if there is none."""
    from transformers import AutoProcessor, ProcessorMixin
    try:
        processor = AutoProcessor.from_pretrained(model_dir)
        if not isinstance(processor, ProcessorMixin):
            raise ValueError("a tokenizer only; copy preprocessor_config.json")
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise DataError(f"{model_dir}: no processor can be loaded: {one_line(error)}") from error
    return processor

# ---------------------------------------------------------------- sampling and sizes
def smart_resize(height, width, factor, min_pixels, max_pixels):
    """(height, width) in multiples of factor, the shape kept, the area within the bounds if it can be."""
    if max(height, width) > 200 * min(height, width):
        raise ValueError(f"{width}x{height} has an aspect ratio above 200")
    h, w = (max(factor, round(side / factor) * factor) for side in (height, width))
    if h * w > max_pixels:  # where one side is at its least, the other one gives way
        scale, most = math.sqrt(height * width / max_pixels), math.floor(max_pixels / factor**2)
        h, w = (max(1, min(most, math.floor(side / scale / factor))) * factor for side in (height, width))
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
    times = times[low:high + 1]
    step = (times[-1] - times[0]) / (count - 1)
    even = np.abs(times - times[0] - step * np.arange(count)).max() < step / 4
    n = round((spec.nframes or 0) / 2) * 2
    if not n:
        n = round((count / fps if fps and even else count * step) * spec.fps, 4)  # times are float32
        n = min(max(n, math.ceil(spec.min_frames / 2) * 2), spec.max_frames // 2 * 2)
    n = max(2, math.floor(min(n, count) / 2) * 2)
    at = torch.linspace(low, high, n)
    if not even:
        at = torch.from_numpy(np.interp(np.linspace(times[0], times[-1], n), times, np.arange(low, high + 1)))
    return at.round().long().tolist()

def plan(found, spec):
    """(indices to decode, (height, width), Clip without frames) of a probed file. ValueError: none can be."""
    times, rate, stored = np.array(found["times"]), found["fps"], found["stored"]
    image = found["kind"] == "image"
    if image or stored:  # what was sampled when it was stored stays; the last frame fills up
        indices = list(range(len(times))) + [len(times) - 1] * (not image and len(times) % 2)
    else:
        indices = sample_indices(times, spec, found.get("start"), found.get("end"), rate)
    low, high = spec.image_min_pixels or 4 * spec.token, spec.image_max_pixels or 16384 * spec.token
    if not image:
        low, total = spec.min_pixels or 128 * spec.token, spec.total_pixels or 115200 * spec.token
        high = max(min(768 * spec.token, total / len(indices) * 2), int(low * 1.05))
        high = min(spec.max_pixels or high, high)
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
# A reader gives (times in seconds from frame 0, frames per second, read(ascending indices) -> (n, H, W, 3)
# uint8, seconds of the clip that a stored one comes from or 0).
def decord_reader(files, fps):
    import decord
    decord.logging.set_level(decord.logging.QUIET)
    # fault_tol: a lost frame is an error, not the one before it once more
    video = decord.VideoReader(files[0], num_threads=min(2, torch.get_num_threads()), fault_tol=1e-6)
    times = video.get_frame_timestamp(list(range(len(video))))[:, 0].astype(np.float64)
    if times[0] < -1e-3:
        raise ValueError("an edit list hides frames before time 0, which decord would show")
    return times - times[0], video.get_avg_fps(), lambda indices: video.get_batch(indices).asnumpy(), 0

def pyav_reader(files, fps):
    import av
    container = av.open(files[0], metadata_errors="ignore")
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
    return times, rate, lambda indices: np.stack([read_one(i) for i in indices]), 0

def stills_reader(files, fps):
    from PIL import Image, ImageOps
    def read_one(i):  # upright, transparency on white
        with Image.open(files[i]) as image:
            image = ImageOps.exif_transpose(image)
            if image.has_transparency_data:
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
            return np.array(image.convert("RGB"))

    return np.arange(len(files)) / fps, fps, lambda indices: np.stack([read_one(i) for i in indices]), 0

def stored_reader(files, fps):
    """EasyVideoR1's .pt files: {frames (T, 3, H, W) 0..255, metadata, sample_fps}; no code in them runs."""
    data = torch.load(files[0], weights_only=True, map_location="cpu", mmap=True)
    if not isinstance(data, dict) or not {"frames", "metadata"} <= set(data):
        raise ValueError("is no stored clip of frames, metadata, sample_fps")
    frames, meta, fps = data["frames"], data["metadata"], data["metadata"]["fps"]
    read = lambda indices: frames[indices].round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()
    return np.asarray(meta["frames_indices"]) / fps, fps, read, meta["total_num_frames"] / fps

FILE_ERRORS = OSError, ValueError, LookupError, RuntimeError, EOFError, SyntaxError  # of a broken file
READERS = {  # by library, with what else it raises for a file that it cannot read
    "decord": (decord_reader, "DECORDError", "DECORDLimitReachedError"), "av": (pyav_reader, "FFmpegError"),
    "PIL.Image": (stills_reader, "DecompressionBombError"), "pickle": (stored_reader, "UnpicklingError")}

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

def header(path):
    """What PyAV alone knows of a video: codec, rotation, and the number of frames that the file states."""
    facts = {"codec": "?", "rotation": "?", "stated": 0}
    if importlib.util.find_spec("av"):
        import av
        with (contextlib.suppress(AttributeError, av.FFmpegError, *FILE_ERRORS),
              av.open(path, metadata_errors="ignore") as container):
            stream = container.streams.best("video")  # None if there is none
            facts["stated"] = stream.frames if "mp4" in container.format.name else 0  # others estimate
            facts["codec"] = f"{stream.codec_context.name} {stream.pix_fmt}"
            facts["rotation"] = next(container.decode(stream), None).rotation
    return facts

def with_reader(item, spec, use):
    """use(read, probe of the item); PyAV where decord fails (AV1, GIF, damaged heads) or is missing."""
    files, reasons = files_of(item["path"]), []
    stills = item["kind"] == "image" or files != [item["path"]]
    names = ["pickle"] if files[0].endswith(".pt") else ["PIL.Image"] if stills else ["decord", "av"]
    facts = header(files[0]) if "av" in names else {"codec": "?", "rotation": "?"}
    for name in [name for name in names if name in READERS and importlib.util.find_spec(name)]:
        (reader, *errors), own = READERS[name], []
        try:
            own = [getattr(importlib.import_module(name), error) for error in errors]
            times, rate, read, stored = reader(files, item.get("fps") or spec.fps)
            if name == "decord" and len(times) < facts["stated"]:  # it would show a last frame over and over
                raise ValueError(f"truncated: {len(times)} of {facts['stated']} frames are there")
            height, width = read([0]).shape[1:3]
            return use(read, item | facts | {"height": height, "width": width, "fps": float(rate),
                                             "stored": stored, "times": times.tolist(), "reader": name})
        except (*FILE_ERRORS, *own) as error:
            reasons.insert(0, str(error).strip().split("\n")[-1][:200])
        finally:
            read = None  # at once: an idle decord reader decodes ahead without bound
    reason = "; ".join(dict.fromkeys(reasons)) or "install decord or av"
    raise MediaError(files[0], f"cannot be decoded: {reason}")

def probe(item, spec=MediaSpec()):
    """What a file is, ready for JSON, from headers and first frame. item: a path or one of media_items()."""
    item = item if isinstance(item, dict) else {"kind": "video", "path": os.fspath(item)}
    item_key(item, spec)  # says what is missing or unreadable
    return with_reader(item, spec, lambda read, found: plan(found, spec) and found)

def decode(path, spec, start=None, end=None, fps=None, kind="video"):
    """Samples, decodes and resizes one clip in this process. MediaError if it cannot.

    path: a video, a folder or list of images (at fps, default spec.fps), an image (kind), a .pt artifact."""
    def sample(read, found):
        indices, size, clip = plan(found, spec)
        clip.frames = torch.empty(len(indices), 3, *size, dtype=torch.uint8)
        for at in range(0, len(indices), CHUNK):
            raw = torch.from_numpy(np.ascontiguousarray(read(indices[at:at + CHUNK]))).permute(0, 3, 1, 2)
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
            os.utime(file)  # the least recently used go first
            return Clip(f.get_tensor("frames"), **{k: json.loads(v) for k, v in f.metadata().items()})
    except (OSError, SafetensorError, TypeError, ValueError, AttributeError):
        return None

def store(item, spec, file):
    """Decodes an item into a cache file."""
    from safetensors.torch import save_file
    clip = replace(decode(**item, spec=spec), key=Path(file).stem)
    header = {name: json.dumps(value) for name, value in vars(clip).items() if name != "frames"}
    write_atomic(Path(file), lambda temp: save_file({"frames": clip.frames}, temp, header))

def load_item(item, spec, cache_dir=None, cache_mode="prefer_cache", store=store):
    """(Clip, its cache file). Without a cache_dir it is one for the moment; broken files are remembered."""
    key = item_key(item, spec)
    if not cache_dir or cache_mode == "realtime":
        roomy = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 2**31
        with tempfile.TemporaryDirectory(prefix="frames-", dir="/dev/shm" if roomy else None) as folder:
            return load_item(item, spec, folder, store=store)  # the mapping keeps the pages
    file = Path(cache_dir, key[:2], key + ".safetensors")
    broken = file.with_suffix(".bad")
    if not (clip := read_clip(file)):
        if broken.exists():
            raise MediaError(item["path"], f"{broken.read_text()} (remembered in {broken})")
        if cache_mode == "cache_only":
            raise MediaError(item["path"], f"is not in {cache_dir}; fill it with: python video_io.py cache")
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            store(item, spec, str(file))
        except MediaError as error:
            if error.lasting:
                write_atomic(broken, lambda temp: temp.write_text(error.reason))
            raise
        if not (clip := read_clip(file)):
            raise MediaError(item["path"], "was evicted from the cache before it was read; raise the limit")
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
    """Every clip and image of a record, decoded in this process unless load(item) does it elsewhere."""
    clips = [load(item) if load else load_item(item, spec, cache_dir, cache_mode)[0]
             for item in media_items(record, cache_mode)]
    return Media(clips[:len(record["videos"])], clips[len(record["videos"]):])

# ---------------------------------------------------------------- worker processes
def serve():
    """A worker: one JSON request per line in, one JSON answer per line out."""
    torch.set_num_threads(1)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: none is left behind when the trainer is killed
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        timeout_s, job, item, spec, *rest = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)  # SIGALRM ends this process, whatever it hangs in
        try:
            answer = JOBS[job](item, MediaSpec(**spec), *rest), None
        except MediaError as error:
            answer = None, [error.path, error.reason]
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), file=answers)

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
        self.cache_dir, self.cache_mode, self.cache_gb = cache_dir, cache_mode, cache_gb
        self.n_ok, self.n_bad, self.closed, self.lock, self.processes = 0, 0, False, threading.Lock(), {}
        self.pool = ThreadPoolExecutor(max(workers, 1), thread_name_prefix="media")

    def submit(self, record):
        """A Future of Media, or of a MediaError."""
        load = partial(self.do, "load", where=record.get("where"))
        return self.pool.submit(load_media, record, self.spec, cache_mode=self.cache_mode, load=load)

    def do(self, job, item, folder=None, where=None):
        """What JOBS[job] makes of the item, or "load", its Clip; a file that fails is written down."""
        try:
            if job == "load":  # what the cache lacks a worker decodes
                store = lambda item, spec, file: self.ask("store", item, file)
                answer, _ = load_item(item, self.spec, folder or self.cache_dir, self.cache_mode, store)
            else:
                answer = self.ask(job, item)
        except MediaError as error:
            with self.lock:
                self.n_bad += 1
                if self.bad_file:
                    line = json.dumps({"path": error.path, "reason": error.reason, "where": where})
                    Path(self.bad_file).parent.mkdir(parents=True, exist_ok=True)
                    with open(self.bad_file, "a", encoding="utf-8") as f:
                        print(line, file=f)
            raise
        with self.lock:
            self.n_ok += 1
            if self.cache_dir and self.cache_gb and self.n_ok % 64 == 1:
                evict(self.cache_dir, self.cache_gb * 1e9)
        return answer

    def ask(self, job, item, *rest):
        """What JOBS[job] makes of the item, in this thread's worker if there are any."""
        if not self.workers:
            return JOBS[job](item, self.spec, *rest)
        with self.lock:  # so that close() finds every worker
            if self.closed:
                raise CancelledError
            worker = self.processes.get(thread := threading.get_ident())
            if worker is None or worker.poll() is not None:
                command, pipe = [sys.executable, os.path.abspath(__file__), "_worker"], subprocess.PIPE
                worker = self.processes[thread] = subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)  # no Ctrl-C for it
        with contextlib.suppress(BrokenPipeError):  # then its answers have ended too
            request = json.dumps([self.timeout_s, job, item, asdict(self.spec), *rest])
            print(request, file=worker.stdin, flush=True)
        line = worker.stdout.readline()
        if self.closed:  # then no clip is to blame
            raise CancelledError
        if not line:
            code, reasons = worker.wait(), {-signal.SIGALRM: f"hung for {self.timeout_s:g} s; decoder killed"}
            reason = reasons.get(code, f"crashed the decoder (exit code {code})")
            raise MediaError(files_of(item["path"])[0], reason, code in (-signal.SIGALRM, -signal.SIGSEGV))
        answer, error = json.loads(line)
        if error:
            raise MediaError(*error)
        return answer

    def ask_all(self, job, items, what, folder=None):
        """{JSON of the item: answer or MediaError}, with a progress bar; equal items count as one.

        job: one of JOBS, or "load" to fill the cache folder, which answers {"bytes": size of the frames}."""
        from tqdm import tqdm
        def work(item):
            answer = self.do(job, item, folder)
            return {"bytes": answer.frames.nbytes} if job == "load" else answer  # mapped files are few

        unique = {json.dumps(item): item for item in items}
        futures = {key: self.pool.submit(work, item) for key, item in unique.items()}
        list(tqdm(as_completed(futures.values()), total=len(futures), desc=what, unit="file"))
        return {key: future.exception() if isinstance(future.exception(), MediaError) else future.result()
                for key, future in futures.items()}

    def close(self):
        """Stops at once: what is not decoded yet is cancelled."""
        with self.lock:
            self.closed = True
        for worker in self.processes.values():
            worker.kill()
            worker.wait()
        self.pool.shutdown(cancel_futures=True)

# ---------------------------------------------------------------- model inputs
def vision_token_ids(model_config):
    """Ids that must never be sampled: positions and features are counted by them."""
    c = model_config
    return [c.image_token_id, c.video_token_id, c.vision_start_token_id, c.vision_end_token_id]

def vllm_inputs(text, media):
    """One request of vLLM's generate. The pixels are final: vLLM neither samples nor resizes."""
    from PIL import Image
    settings, data, uuids = {"do_resize": False}, {}, {}
    if media.videos:
        if VISION_TRIPLE not in text:  # Qwen3
            from vllm.model_executor.models.qwen3_vl import Qwen3VLMultiModalProcessor as Expander
            # Up to 0.2x vLLM looks for the template's whole block and gives the released layout itself.
            if not hasattr(Expander, "_expands_only_video_token"):
                text = text.replace("<|video_pad|>", VISION_TRIPLE)
        names, final = ("fps", "frames_indices", "total_num_frames", "duration"), {"do_sample_frames": False}
        data["video"] = [(c.frames, {name: getattr(c, name) for name in names} | final) for c in media.videos]
        settings |= final
        uuids["video"] = [clip.key for clip in media.videos]
    if media.stills:
        data["image"] = [Image.fromarray(x.permute(1, 2, 0).contiguous().numpy()) for x in media.images]
        uuids["image"] = [clip.key for clip in media.stills]
    found = {"multi_modal_data": data, "multi_modal_uuids": uuids, "mm_processor_kwargs": settings}
    return {"prompt": text} | (found if data else {})

def stamps(clip, temporal_patch_size=2):
    """["<0.2 seconds>", ...], one per merged group of frames: the mean of its first and last time."""
    times = [i / clip.fps for i in clip.frames_indices]
    groups = [times[i:i + temporal_patch_size] for i in range(0, len(times), temporal_patch_size)]
    return [f"<{(group[0] + group[-1]) / 2:.1f} seconds>" for group in groups]

def layout(media, model_config):
    """{placeholder id: [blocks of each clip or image]}; a block: (time stamp, (t, h, w) in tokens, pace)."""
    c, v = model_config, model_config.vision_config
    side, tp, clips = v.patch_size * v.spatial_merge_size, v.temporal_patch_size, []
    for clip in media.videos:
        frames, pace = clip.frames, 1  # pace: positions from one merged frame to the next
        t, h, w = -(-len(frames) // tp), frames.shape[2] // side, frames.shape[3] // side
        if c.model_type == "qwen2_5_vl":  # seconds per merged frame are float32 in vLLM
            rate = len(clip.frames_indices) / clip.total_num_frames * clip.fps
            pace = float(np.float32(tp / rate)) * v.tokens_per_second
        # Qwen3: every merged frame is a block of its own behind its time
        clips.append([(stamp, (1, h, w), 1) for stamp in stamps(clip, tp)]
                     if c.model_type.startswith("qwen3") else [("", (t, h, w), pace)])
    images = [[("", (1, x.shape[1] // side, x.shape[2] // side), 1)] for x in media.images]
    return {token: found for token, found in ((c.video_token_id, clips), (c.image_token_id, images)) if found}

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
    parts, start = [], 0
    blocks = {token: iter(sum(found, [])) for token, found in layout(media, model_config).items()}
    for token, run in itertools.groupby(ids, lambda i: i if i in blocks else None):
        part = np.tile(np.arange(len(list(run))), (3, 1))  # text
        if token is not None:
            _, grid, pace = next(blocks[token])
            part = np.indices(grid).reshape(3, -1)
            part[0] = part[0] * pace  # rounds down
        parts.append(part + start)
        start = parts[-1].max() + 1
    return torch.from_numpy(np.vstack([np.arange(len(ids)), np.hstack(parts)]))

def patchify(frames, patch_size, merge_size, temporal_patch_size):
    """(T, 3, H, W) uint8 -> (patches, 3 * tp * p * p), patches of a merge block side by side."""
    tp, p, m = temporal_patch_size, patch_size, merge_size
    frames = torch.cat([frames, frames[-1:].expand(-len(frames) % tp, -1, -1, -1)])  # the last frame fills up
    t, h, w = len(frames) // tp, frames.shape[2] // p, frames.shape[3] // p
    # A row of a patch moves as wide words, 8 or 2 bytes each: several times faster than byte by byte.
    wide = frames.contiguous().view(torch.int64 if p % 8 == 0 else torch.int16)
    patches = wide.view(t, tp, 3, h // m, m, p, w // m, m, -1).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return patches.reshape(t * h * w, -1).view(torch.uint8)

def model_inputs(prompt_ids, media, model_config, image_mean, image_std, device, dtype):
    """What the Hugging Face model takes besides input_ids; keys of media that the prompt lacks are absent."""
    c, v, ids = model_config, model_config.vision_config, torch.tensor(prompt_ids)
    tp, p, width = v.temporal_patch_size, v.patch_size, 3 * v.temporal_patch_size * v.patch_size**2
    mean, std = ((torch.tensor(x) * 255.0).repeat_interleave(width // 3).to(device)
                 for x in (image_mean, image_std))  # (3 * tp * p * p,)
    types = (ids == c.image_token_id).int() + 2 * (ids == c.video_token_id).int()
    inputs = {"mm_token_type_ids": types[None].to(device),
              "position_ids": position_ids(prompt_ids, media, c)[:, None].to(device)}  # (1, P), (4, 1, P)
    for name, kind, clips in (("_videos", "video", media.videos), ("", "image", media.stills)):
        if clips:
            found = [(-(-len(x.frames) // tp), x.frames.shape[2] // p, x.frames.shape[3] // p) for x in clips]
            sizes = [math.prod(grid) for grid in found]  # patches of each clip
            inputs[f"{kind}_grid_thw"] = torch.tensor(found, device=device)  # (n, 3)
            inputs[f"pixel_values{name}"] = torch.empty(sum(sizes), width, dtype=dtype, device=device)
            for clip, part, (_, h, w) in zip(clips, inputs[f"pixel_values{name}"].split(sizes), found):
                scratch = torch.empty(h * w, width, device=device)  # float32, reused: fresh memory costs most
                for group, out in zip(clip.frames.to(device).split(tp), part.split(h * w)):
                    patches = patchify(group, p, v.spatial_merge_size, tp)  # uint8
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
    counts = range(len(plan(found, spec)[0]), 1, -2)
    for frames, tokens in itertools.product(counts, range(high, low - 1, -1)):
        tried = replace(spec, nframes=frames, min_frames=min(spec.min_frames, frames), max_frames=frames,
                        min_pixels=low * spec.token, max_pixels=tokens * spec.token)
        if sum(count_tokens(found, tried, tokenizer)) <= max_tokens:
            return tried
    raise DataError(f"{found['path']}: 2 frames of {low} tokens exceed {max_tokens}; raise the budget")

def survey(records, loader, prompts, processor=None, form="reason", max_prompt_length=math.inf, system=None):
    """[(record, visual tokens, text tokens, why it cannot be used or None, its probes)] without decoding.

    Prompts over max_prompt_length are reported, never truncated: a cut through vision tokens is no prompt."""
    groups = [media_items(record, loader.cache_mode) for record in records]
    answers = loader.ask_all("probe", itertools.chain(*groups), "opening")
    tokenizer, rows = processor and processor.tokenizer, []
    for record, group in zip(records, groups):
        text = len(json.dumps(build_messages(record, prompts, form, system))) // 4
        if processor:
            prompt = prompt_text(record, prompts, processor, form, system)
            text = len(tokenizer.encode(prompt, add_special_tokens=False)) - len(group)
        found = [answers[json.dumps(item)] for item in group]
        reasons = [str(answer) for answer in found if isinstance(answer, MediaError)]
        probes = [answer for answer in found if not isinstance(answer, MediaError)]
        costs = [(0, text)] + [count_tokens(p, loader.spec, tokenizer) for p in probes]
        visual, text = (sum(cost) for cost in zip(*costs))
        if visual + text > max_prompt_length:
            reasons.append(f"prompt of {visual + text} tokens is over max_prompt_length {max_prompt_length}")
        rows.append((record, visual, text, reasons[0] if reasons else None, probes))
    return rows

# ---------------------------------------------------------------- commands
def cut(item, spec):
    """Writes a segment to item["out"], or nothing: exact frames, or packets from the key frame before."""
    import av
    start, end, tick = item["start"], item["end"], Fraction(1, 90000)
    def copy(temp):
        with (av.open(item["path"], metadata_errors="ignore") as source,
              av.open(str(temp), "w", format="mp4", options={"avoid_negative_ts": "make_zero"}) as target):
            stream = source.streams.video[0]
            written, zero = target.add_stream_from_template(stream), stream.start_time or 0
            source.seek(zero + int(start / stream.time_base), stream=stream)
            for packet in source.demux(stream):
                if packet.dts is None or (packet.dts - zero) * stream.time_base > end:
                    break
                packet.stream = written
                target.mux(packet)

    def encode(temp, read, times, width, height, fps, **_):
        low, high = segment(np.array(times), start, end)
        with av.open(str(temp), "w", format="mp4") as target:
            stream = target.add_stream(
                "libx264", Fraction(fps).limit_denominator(1001), {"crf": "16"}, width=width, height=height,
                time_base=tick, pix_fmt="yuv444p" if width % 2 or height % 2 else "yuv420p")
            for i in range(low, high + 1):
                image = av.VideoFrame.from_ndarray(np.ascontiguousarray(read([i])[0]), format="rgb24")
                image.pts, image.time_base = round((times[i] - times[low]) / tick), tick
                target.mux(stream.encode(image))
            target.mux(stream.encode())

    with_reader({"kind": "video", "path": item["path"]}, spec, lambda read, found: write_atomic(
        Path(item["out"]), copy if item["copy"] else lambda temp: encode(temp, read, **found)))

JOBS = {"store": store, "probe": probe, "cut": cut}  # what workers can be asked for: job(item, spec, ...)

def segment_of(row, root, index):
    """A job for cut() from a row; ODV-Bench and LiveSports say in the name of the file what to cut."""
    name = os.path.basename(str(row.get("path") or ""))
    video = row.get("video") or (row.get("videos") or [row.get("path")])[0]
    start, end = (row.get(key, row.get(f"video_{key}")) for key in ("start", "end"))
    if isinstance(video, str) and end is not None:
        path, start = os.path.join(root, video), float(start or 0)
        name = f"{Path(video).stem}_{start:.3f}_{float(end):.3f}.mp4"
    elif named := re.fullmatch(r"(?:\d+_(.+)_s|(.+)_)([\d.]+)_e?([\d.]+)\.mp4", name):
        stem, start, end = named[1] or named[2], named[3], named[4]
        path = index.get(stem, os.path.join(root, f"{stem}.mp4"))
    else:
        raise ValueError("names no segment: needs video, start and end, or a path like ID_START_END.mp4")
    return {"path": path, "out": name, "start": float(start or 0), "end": float(end)}

def finish(answers, summary):
    """Prints the first problems among the answers, and the summary; the exit code."""
    problems = [answer for answer in answers if isinstance(answer, (str, MediaError))]
    print(*problems[:20], *[f"... and {len(problems) - 20} more"] * (len(problems) > 20), summary, sep="\n")
    return int(bool(problems))

def probe_files(args, loader):
    items = [{"kind": "image" if file.lower().endswith(IMAGE_SUFFIXES) else "video", "path": file}
             for file in args.data]
    answers = loader.ask_all("probe", items, "opening").values()
    for found in [answer for answer in answers if isinstance(answer, dict)]:
        (indices, (height, width), _), times = plan(found, loader.spec), np.array(found["times"])
        visual, text = count_tokens(found, loader.spec, args.tokenizer)
        steady = np.abs(times * found["fps"] - np.arange(len(times))).max() <= 0.5
        print(TEXTS["probed"].format(
            n=len(times), vfr="" if steady else " (variable)", seconds=times[-1] + 1 / found["fps"],
            sampled=len(indices), size=f"{width}x{height}", visual=visual, text=text, **found))
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
        return finish(problems, f"{summary}; the good ones are in {clean}")

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
    answers = loader.ask_all("load", items, "caching").values()
    sizes = [answer["bytes"] for answer in answers if isinstance(answer, dict)]
    good, bad = f"{len(sizes)} in {args.cache_dir} ({sum(sizes) / 1e9:.2f} GB)", len(answers) - len(sizes)
    return finish(answers, f"{len(answers)} files = {good} + {bad} failed, all in {args.bad_file}")

def cut_data(args, loader):
    root, items, faults = os.path.abspath(args.data_root or Path(args.data).parent), [], []
    index = {p.stem: str(p) for p in sorted(Path(root).rglob("*")) if p.suffix.lower() in VIDEO_SUFFIXES}
    for line, row in read_rows(args.data):
        try:
            item = segment_of(row, root, index)
            items.append(item | {"out": os.path.join(args.out, item["out"]), "copy": args.copy})
        except (AttributeError, TypeError, ValueError, LookupError) as error:
            faults.append(f"{args.data}:{line}: {error}")
    todo = [item for item in items if not os.path.exists(item["out"])]
    os.makedirs(args.out, exist_ok=True)
    answers = loader.ask_all("cut", todo, "cutting").values()
    done = f"{len(answers)} segments cut or tried, {len(items) - len(todo)} records had theirs"
    return finish([*faults, *answers], done)

COMMANDS = {"probe": probe_files, "tokens": survey_data, "check": survey_data, "cache": fill_cache,
            "clip": cut_data}

def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog="See COMMAND --help.")
    commands = parser.add_subparsers(dest="command", required=True)
    media = {"--" + name.replace("_", "-"): rule for name, rule in TEXTS["media"].items() if "help" in rule}
    for name, entry in TEXTS["commands"].items():
        sub = commands.add_parser(name, help=entry["help"], description=entry["help"],
                                  formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        for flag, options in (entry["arguments"] | TEXTS["flags"] | media).items():
            default = options.get("default", "")
            kind = {"type": int if default is None else type(default)} if "action" not in options else {}
            sub.add_argument(flag, **options, **kind)
    args = parser.parse_args()
    try:
        settings = {name: getattr(args, name) for name in TEXTS["media"] if hasattr(args, name)}
        spec, args.tokenizer, args.processor = MediaSpec(**settings), None, None
        if args.model:
            from transformers import AutoConfig
            args.processor, args.config = load_processor(args.model), AutoConfig.from_pretrained(args.model)
            args.tokenizer, spec = args.processor.tokenizer, media_spec(args.config, **settings)
        with contextlib.closing(MediaLoader(
                spec, args.workers or os.cpu_count(), args.timeout, args.cache_dir,
                bad_file=args.bad_file, cache_gb=args.cache_gb)) as loader:
            return COMMANDS[args.command](args, loader)
    except (DataError, OSError) as error:
        parser.exit(2, f"{error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "\nstopped; the same command goes on from here\n")

if __name__ == "__main__":
    sys.exit(serve() if sys.argv[1:] == ["_worker"] else main())
