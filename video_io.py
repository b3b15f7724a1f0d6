"""Every clip in: records, prompts, frame sampling, decode, resize, token maths, cache.

    python video_io.py probe  clip.mp4 ...            # codec, size, fps, what would be sampled, tokens
    python video_io.py tokens data.jsonl              # what the data costs in tokens, memory and cache
    python video_io.py check  data.jsonl              # opens every clip, writes a clean copy of the data file
    python video_io.py cache  data.jsonl --cache-dir D  # decodes everything once
    python video_io.py clip   data.jsonl OUT          # cuts the segments that the records name

A record (one line of data.jsonl):
    {"problem": "What is in <video>?", "answer": "B", "problem_type": "multiple choice", "options": ["a cat", "a dog"],
     "videos": ["clips/1.mp4"], "video_start": 2.0, "video_end": 8.5}

Frames are uint8 (T, 3, H, W) from the decoder to the patches, T even, H and W multiples of patch_size * merge_size.
Indices, sizes and pixel budgets are those of qwen-vl-utils 0.0.14 called with the right patch size; where it is wrong
(frame lists, variable frame rates, edit lists, one-frame clips) we follow the file's own presentation times.
"""

import base64
import ctypes
import difflib
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

SCHEMA = 1  # part of every cache key: raise it when decode or resize change their result
CHUNK = 8  # frames decoded at full size at a time: bounds memory by the chunk, not by the clip
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}
VIDEO_MARKS = {"<video>": "video", "<image>": "image"}
VISION_TRIPLE = "<|vision_start|><|video_pad|><|vision_end|>"


class DataError(ValueError):
    """Bad input. The message is ready to print: one line per problem."""


class MediaError(Exception):
    """One clip or image cannot be used. `path` and a one-line `reason`."""

    def __init__(self, path, reason):
        self.path, self.reason = str(path), " ".join(str(reason).split())
        super().__init__(f"{self.path}: {self.reason}")


@dataclass(frozen=True)
class MediaSpec:
    """How media become tensors. Pixels are counted per frame after the resize, total_pixels after the 2-frame merge."""

    fps: float = 2.0  # frames per second to sample
    nframes: int | None = None  # a fixed number of frames instead of fps
    min_frames: int = 4
    max_frames: int = 768
    min_pixels: int | None = None  # per frame; None: 128 merged patches
    max_pixels: int | None = None  # per frame; None: 768 merged patches
    total_pixels: int | None = None  # per clip; None: 115,200 merged patches
    image_min_pixels: int | None = None  # None: 4 merged patches
    image_max_pixels: int | None = None  # None: 16,384 merged patches
    patch_size: int = 16  # px; 14 for Qwen2-VL and Qwen2.5-VL
    merge_size: int = 2  # patches per token and side
    temporal_patch_size: int = 2  # frames per patch
    timestamps: str = "segment"  # or "source": count from the file's start, not the segment's

    @property
    def factor(self):
        return self.patch_size * self.merge_size


@dataclass
class Clip:
    frames: torch.Tensor  # (T, 3, H, W) uint8, T even
    fps: float  # frames_indices[i] / fps is the time of frame i in seconds
    frames_indices: list
    total_num_frames: int  # of the segment, in the unit of frames_indices
    duration: float  # seconds of the segment
    key: str = ""  # hash of content and settings


@dataclass
class Media:
    videos: list = field(default_factory=list)  # of Clip
    images: list = field(default_factory=list)  # of (3, H, W) uint8
    image_keys: list = field(default_factory=list)

    @property
    def nbytes(self):
        return sum(c.frames.nbytes for c in self.videos) + sum(i.nbytes for i in self.images)


def media_spec(model_config, **settings):
    """The spec with the patch sizes of a Hugging Face config. ValueError if the settings contradict each other."""
    vision = model_config.vision_config
    spec = MediaSpec(patch_size=vision.patch_size, merge_size=vision.spatial_merge_size,
                     temporal_patch_size=vision.temporal_patch_size, **settings)
    for low, high in (("min_frames", "max_frames"), ("min_pixels", "max_pixels"),
                      ("image_min_pixels", "image_max_pixels")):
        a, b = getattr(spec, low), getattr(spec, high)
        if a is not None and b is not None and a > b:
            raise ValueError(f"{low} {a} is larger than {high} {b}")
    if spec.fps <= 0 or spec.max_frames < 2 or spec.timestamps not in ("segment", "source"):
        raise ValueError(f"fps > 0, max_frames >= 2, timestamps segment or source; got {spec}")
    return spec


# ---------------------------------------------------------------------------------------------- records


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
    """[(line, dict or error message)] of a JSON, JSONL or parquet file."""
    path = Path(path)
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return list(enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1))
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid and UnicodeDecodeError are ValueErrors
        raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    rows, decode, space = [], json.JSONDecoder().raw_decode, re.compile(r"[\s,]*")
    if path.suffix == ".json":  # a list, read value by value so that errors can name the line
        if not text.lstrip().startswith("["):
            raise DataError(f"{path}:1: a .json file must hold a list of records; name it .jsonl if it has one per line")
        at = space.match(text, text.index("[") + 1).end()
        while at < len(text) and text[at] != "]":
            try:
                value, end = decode(text, at)
            except json.JSONDecodeError as error:
                return rows + [(error.lineno, f"is no valid JSON: {error.msg} (column {error.colno})")]
            rows.append((text.count("\n", 0, at) + 1, value))
            at = space.match(text, end).end()
        return rows
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                rows.append((number, json.loads(line)))
            except json.JSONDecodeError as error:
                rows.append((number, f"is no valid JSON: {error.msg} (column {error.colno})"))
    return rows


def letter_options(options):
    """Options as "A. text" from a list, a dict {letter: text}, one string with a line each, or None."""
    if not options:
        return []
    if isinstance(options, str):
        options = [line for line in options.split("\n") if line.strip()]
    if isinstance(options, dict):
        return [f"{letter}. {text}" for letter, text in options.items()]
    options = [str(option).strip() for option in options]
    marks = [re.match(r"\(?([A-Z])[.:)]\s*", option) for option in options]
    letters = [chr(ord("A") + i) for i in range(len(options))]
    # Letters count as such only when every option has its own; else "A. Smith" among names would lose its A.
    if all(marks) and len({mark[1] for mark in marks}) == len(marks):
        letters = [mark[1] for mark in marks]
        options = [option[mark.end():] for mark, option in zip(marks, options)]
    return [f"{letter}. {option}" for letter, option in zip(letters, options)]


def plain_answer(value):
    """The gold answer as text: <answer> tags off, numbers and JSON values written out."""
    if not isinstance(value, str):
        return json.dumps(value)
    tagged = re.search(r"<answer>(.*?)</answer>", value, re.S)
    if tagged:
        return tagged[1].strip()
    # A published file has "<think>gold</think><[placeholder]>" where the answer tags were lost.
    lost = re.fullmatch(r"\s*<think>(.*?)</think>\s*(?:<\[[^\]]*\]>)?\s*", value, re.S)
    return (lost[1] if lost else value).strip()


def make_record(row, where, root, kinds):
    """(record, problems) from one row of the training or the evaluation layout. `kinds`: squashed name -> type."""
    problems = []

    def first(*names):
        return next((row[name] for name in names if row.get(name) is not None), None)

    def bad(name, value, why):
        problems.append(f"{where}: field '{name}' is {json.dumps(value, default=str)[:80]}: {why}")

    def paths(value, name):
        found = [value] if isinstance(value, str) else list(value or [])
        out = []
        for item in found:
            if isinstance(item, (list, tuple)) and item:
                out.append(paths(item, name))
            elif isinstance(item, str) and item:
                out.append(os.path.normpath(os.path.join(root, item.removeprefix("file://"))))
                if not os.path.exists(out[-1]):
                    bad(name, item, f"no such file under {root}; fix the path or give data_root")
            else:
                bad(name, item, "must be a path or a list of paths")
        return out

    def number(name):
        value = first(name, name.removeprefix("video_"))
        if value is None or isinstance(value, (int, float)) and math.isnan(value):
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            return bad(name, value, "must be seconds, 0 or more")
        return float(value)

    record = dict(row, where=where)
    kind = row.get("problem_type")
    record["problem_type"] = kinds.get(squash(kind)) if isinstance(kind, str) else None
    if record["problem_type"] is None:
        near = difflib.get_close_matches(squash(kind or ""), kinds, n=3, cutoff=0.5)
        near = " or ".join(f"'{kinds[name]}'" for name in near) or "one of " + ", ".join(sorted(set(kinds.values())))
        bad("problem_type", kind, f"unknown; did you mean {near}? New types need an entry in configs/prompts.yaml")

    record["problem"] = first("problem", "question")
    if not isinstance(record["problem"], str) or not (
            record["problem"].strip() or record["problem_type"] == "video description"):
        bad("problem", record["problem"], "must be the question as text")
        record["problem"] = ""
    if "<|" in record["problem"] and re.search(r"<\|(video|image|vision|im)_\w+\|>", record["problem"]):
        bad("problem", record["problem"], "holds a model's special token; use <video> and <image> marks")
    answer = first("solution", "answer")
    if answer is None:
        bad("answer", None, "missing; give the expected answer as 'answer' or 'solution'")
    record["answer"] = plain_answer(answer)

    data_type = row.get("data_type") or ("video" if first("videos", "video") else "image" if first("images") else "text")
    record["data_type"] = data_type
    file = row.get("path")
    name, value = next(((n, row[n]) for n in ("videos", "path", "video") if row.get(n)), ("videos", None))
    if data_type == "image" and name != "videos":
        name, value = "videos", None
    if isinstance(value, (list, tuple)) and value and all(
            isinstance(v, str) and Path(v).suffix.lower() in IMAGE_SUFFIXES for v in value):
        value = [value]  # a flat list of images under 'videos' is one clip, given as its frames
    record["videos"] = paths(value, name)
    name, value = next(((n, row[n]) for n in ("images", "image_path", "image") if row.get(n)), ("images", None))
    if data_type == "image" and value is None:
        name, value = "path", file
    record["images"] = paths(value, name)
    if data_type not in ("video", "image", "text"):
        bad("data_type", data_type, "must be video, image or text")
    elif data_type != "text" and not record[data_type + "s"]:
        bad(data_type + "s", row.get(data_type + "s"), f"data_type is {data_type} but no {data_type} is given")
    for mark, media in VIDEO_MARKS.items():
        marks = record["problem"].count(mark)
        if marks and marks != len(record[media + "s"]):
            bad("problem", record["problem"], f"has {marks} {mark} marks for {len(record[media + 's'])} {media}s")

    record["options"] = letter_options(row.get("options"))
    if record["problem_type"] == "multiple choice" and not record["options"]:
        bad("options", row.get("options"), "multiple choice needs a list of options")
    record["video_start"], record["video_end"] = number("video_start"), number("video_end")
    if record["video_end"] is not None and record["video_end"] <= (record["video_start"] or 0):
        bad("video_end", record["video_end"], f"must be after video_start {record['video_start'] or 0}")
    record["has_offline_trajectory"] = bool(row.get("has_offline_trajectory"))
    record["offline_output"] = row.get("offline_output")
    if record["has_offline_trajectory"] and not record["offline_output"]:
        bad("offline_output", record["offline_output"], "has_offline_trajectory is set but there is no output")
    stored = row.get("preprocessed_video")
    record["preprocessed_video"] = os.path.normpath(os.path.join(root, stored)) if stored else None
    record.setdefault("data_source", Path(where.rpartition(":")[0]).stem)
    record.setdefault("problem_id", where.rpartition(":")[2])
    return record, problems


def squash(name):
    return re.sub(r"[\s_-]+", "", name.lower())


def read_records(path, data_root=None, prompts=None):
    """(records without fault, problems as lines, number of rows)."""
    root = os.path.abspath(data_root or Path(path).parent)
    prompts = load_prompts() if prompts is None else prompts
    kinds = {squash(kind): kind for kind in prompts}
    if "video description" in prompts:
        kinds["caption"] = "video description"  # Video-MMLU's name for it
    rows = read_rows(path)
    records, problems, seen = [], [], {}
    for line, row in rows:
        where = f"{Path(path).name}:{line}"
        if not isinstance(row, dict):
            problems.append(f"{where}: " + (row if isinstance(row, str) else "must be a JSON object with the record's fields"))
            continue
        record, faults = make_record(row, where, root, kinds)
        # The source row, not the resolved one, so that a moved dataset keeps its keys.
        key = hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()[:16]
        seen[key] = seen.get(key, 0) + 1
        record["key"] = key if seen[key] == 1 else f"{key}:{seen[key]}"
        problems += faults
        if not faults:
            records.append(record)
    return records, problems, len(rows)


def load_records(path, data_root=None, prompts=None):
    """Every record of a JSON, JSONL or parquet file, validated. DataError lists what is wrong."""
    records, problems, n_rows = read_records(path, data_root, prompts)
    if not n_rows:
        raise DataError(f"{path}: holds no records")
    if problems:
        more = [f"... and {len(problems) - 20} more problems"] if len(problems) > 20 else []
        raise DataError("\n".join(problems[:20] + more))
    return records


# ---------------------------------------------------------------------------------------------- prompts


def build_messages(record, prompts, form="reason", system=None):
    """Chat messages of the Hugging Face kind; media where the marks are, else before the text."""
    task = prompts[record["problem_type"]][form]
    letters = [option[0] for option in record["options"]]
    task = task.replace("{letters}", " or ".join(filter(None, [", ".join(letters[:-1]), *letters[-1:]])))
    text = record["problem"]
    marks = "".join("<video>" for _ in record["videos"] if "<video>" not in text)
    marks += "".join("<image>" for _ in record["images"] if "<image>" not in text)
    blocks = [record["problem"].strip(), "Options:\n" + "\n".join(record["options"]) if letters else "", task]
    content = []
    for part in re.split("(<video>|<image>)", marks + "\n".join(filter(None, blocks))):
        if part in VIDEO_MARKS:
            # A video's first time stamp must not merge with the punctuation before it: engines tokenize it apart.
            if part == "<video>" and content and content[-1]["type"] == "text":
                content[-1]["text"] = content[-1]["text"].rstrip() + "\n"
            content.append({"type": VIDEO_MARKS[part]})
        elif part:
            content.append({"type": "text", "text": part})
    system = [{"role": "system", "content": [{"type": "text", "text": system}]}] if system else []
    return system + [{"role": "user", "content": content}]


def prompt_text(record, prompts, processor, form="reason", system=None):
    """The templated prompt with a generation prompt, media unexpanded."""
    messages = build_messages(record, prompts, form, system)
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    # Qwen3-VL was released with time stamps and one vision block per frame and no block around them; newer
    # transformers expand the bare token only, so the template's own wrapper has to go.
    return text.replace(VISION_TRIPLE, "<|video_pad|>") if type(processor).__name__.startswith("Qwen3") else text


def load_processor(model_dir):
    """AutoProcessor; DataError if there is none."""
    from transformers import AutoProcessor, ProcessorMixin

    try:
        processor = AutoProcessor.from_pretrained(model_dir)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{model_dir}: no processor can be loaded from this folder or name: {reason}") from error
    if not isinstance(processor, ProcessorMixin):
        raise DataError(f"{model_dir}: has a tokenizer but no processor; copy preprocessor_config.json from the model")
    return processor


# ---------------------------------------------------------------------------------------------- sampling and sizes


def smart_resize(height, width, factor, min_pixels, max_pixels):
    """Size in multiples of factor, at least factor, aspect ratio kept, area within the two bounds if that can be."""
    if max(height, width) / min(height, width) > 200:
        raise ValueError(f"aspect ratio of {width}x{height} is above 200")
    h, w = max(factor, round(height / factor) * factor), max(factor, round(width / factor) * factor)
    if h * w > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        h = max(factor, math.floor(height / scale / factor) * factor)
        w = max(factor, math.floor(width / scale / factor) * factor)
        if h * w > max_pixels:  # the short side is at its least: the long side gives way
            h, w = (min(side, max(factor, math.floor(max_pixels / factor / factor) * factor)) for side in (h, w))
    elif h * w < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        h, w = math.ceil(height * scale / factor) * factor, math.ceil(width * scale / factor) * factor
    return h, w


def frame_size(height, width, n_frames, spec):
    """(height, width) of every frame of a clip with n_frames sampled frames."""
    token = spec.factor**2  # px
    low = spec.min_pixels or 128 * token
    total = spec.total_pixels or 128000 * token * 0.9
    high = max(min(768 * token, total / n_frames * 2), int(low * 1.05))
    high = min(spec.max_pixels or high, high)
    return smart_resize(height, width, spec.factor, min(low, high), high)


def sample_indices(timestamps_s, spec, start=None, end=None, fps=None):
    """Indices of the frames to take, an even number, from presentation times in seconds that ascend from 0.

    Evenly spaced files give what qwen-vl-utils gives: an even count of about duration * spec.fps within the bounds,
    linspace over the indices, both ends included. fps is the rate that the container states. With a variable frame
    rate the frames nearest to evenly spaced times are taken. ValueError if the segment holds no frame.
    """
    times = np.asarray(timestamps_s, dtype=np.float64)
    inside = np.flatnonzero((times >= (start or 0) - 1e-4) & (times <= (math.inf if end is None else end) + 1e-4))
    if not len(inside):
        raise ValueError(f"no frame between {start or 0:g} s and {'the end' if end is None else f'{end:g} s'}: "
                         f"the clip has {len(times)} frames up to {times[-1] if len(times) else 0:.2f} s")
    low, high = int(inside[0]), int(inside[-1])
    count = high - low + 1
    step = (times[high] - times[low]) / max(count - 1, 1)
    even = count < 3 or np.abs(times[low:high + 1] - times[low] - step * np.arange(count)).max() < step / 4
    if spec.nframes:
        n = round(spec.nframes / 2) * 2
    else:
        seconds = count / fps if fps and even else count * step
        n = max(round(seconds * spec.fps, 6), math.ceil(spec.min_frames / 2) * 2)
        n = min(n, math.floor(spec.max_frames / 2) * 2)
    n = max(2, math.floor(min(n, count) / 2) * 2)
    if count == 1:
        return [low, low]
    if even:
        return torch.linspace(low, high, n).round().long().tolist()
    wanted = np.linspace(times[low], times[high], n)
    after = np.clip(np.searchsorted(times, wanted), low + 1, high)
    return np.where(wanted - times[after - 1] <= times[after] - wanted, after - 1, after).tolist()


# ---------------------------------------------------------------------------------------------- decode


def decord_reader(path):
    """(times, fps, read, close): presentation times of all frames, stated rate, indices -> (n, H, W, 3) uint8."""
    import decord

    decord.logging.set_level(decord.logging.QUIET)
    with open(path, "rb"):  # a plain OSError where decord would give a page of text
        pass
    box = [decord.VideoReader(str(path), num_threads=min(2, torch.get_num_threads()))]
    times = box[0].get_frame_timestamp(list(range(len(box[0]))))[:, 0]
    # decord ignores edit lists: frames before time 0 are decoder pre-roll that no player shows.
    shift = int(np.searchsorted(times, -1e-3))
    return (times[shift:] - times[shift], box[0].get_avg_fps(),
            lambda indices: box[0].get_batch([i + shift for i in indices]).asnumpy(), box.clear)


def pyav_reader(path):
    """The same by PyAV, for what decord cannot open. Indices must not descend from call to call."""
    import av

    container = av.open(str(path))
    stream = container.streams.video[0]
    packets = [packet for packet in container.demux(stream) if packet.pts is not None]
    if stream.frames and len(packets) < stream.frames:
        raise ValueError(f"truncated: {len(packets)} of {stream.frames} frames are there")
    pts = sorted(packet.pts for packet in packets if not packet.is_discard)
    times = np.array([float(p * stream.time_base) for p in pts])
    if not len(times):
        raise ValueError("holds no frame")
    container.seek(pts[0], stream=stream)
    stream.thread_type = "AUTO"
    frames, last = container.decode(stream), [None, None]

    def read(indices):
        out = []
        for i in indices:
            while last[0] is None or last[0] < pts[i]:
                frame = next(frames, None)
                if frame is None:
                    raise ValueError(f"frame {i} of {len(pts)} cannot be decoded")
                if frame.pts is not None and frame.pts >= pts[i]:
                    last[:] = frame.pts, np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)
            out.append(last[1])
        return np.stack(out)

    return times - times[0], float(stream.average_rate or 1 / max(np.diff(times).mean(), 1e-6)), read, container.close


def image_reader(paths, fps):
    """The same for a clip given as its frames: image files at a stated rate."""
    return (np.arange(len(paths)) / fps, fps, lambda indices: np.stack([read_image(paths[i]) for i in indices]),
            lambda: None)


def read_image(path):
    """(H, W, 3) uint8, upright, transparency on white."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            image = ImageOps.exif_transpose(image)
            if "A" in image.getbands() or "transparency" in image.info:
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise MediaError(path, f"cannot be read as an image: {error}") from error


def resize(frames, height, width):
    """(n, H, W, 3) uint8 array -> (n, 3, height, width) uint8, bicubic with antialiasing."""
    frames = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2)
    return F.interpolate(frames, size=(height, width), mode="bicubic", antialias=True)


def decode(path, spec, start=None, end=None, fps=None):
    """Samples, decodes and resizes one clip in this process. MediaError if it cannot.

    path: a video file, a folder of frames, or a list of image files at the stated `fps` (default spec.fps)."""
    import av
    import decord

    if not isinstance(path, (list, tuple)) and os.path.isdir(path):
        path = sorted(str(p) for p in Path(path).iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)
    if isinstance(path, (list, tuple)):
        return sample(path[0], image_reader(path, fps or spec.fps), spec, start, end)
    try:
        return sample(path, decord_reader(path), spec, start, end)
    except (decord.DECORDError, RuntimeError, OSError) as error:
        first = str(error).strip().split("\n")[-1]
    try:
        return sample(path, pyav_reader(path), spec, start, end)
    except (av.FFmpegError, OSError, ValueError, IndexError) as error:
        raise MediaError(path, f"cannot be decoded: {error} (decord: {first[:200]})") from error


def sample(path, reader, spec, start, end):
    times, rate, read, close = reader
    try:
        indices = sample_indices(times, spec, start, end, rate)
        batch = read(indices[:CHUNK])
        height, width = frame_size(*batch.shape[1:3], len(indices), spec)
        frames = torch.empty(len(indices), 3, height, width, dtype=torch.uint8)
        for at in range(0, len(indices), CHUNK):
            batch = batch if at == 0 else read(indices[at:at + CHUNK])
            frames[at:at + CHUNK] = resize(batch, height, width)
    except ValueError as error:
        raise MediaError(path, error) from error
    finally:
        close()  # an idle decord reader decodes ahead without bound

    inside = np.flatnonzero((times >= (start or 0) - 1e-4) & (times <= (math.inf if end is None else end) + 1e-4))
    low, count = int(inside[0]), len(inside)
    base = 0 if spec.timestamps == "source" else low
    if np.abs(times - np.arange(len(times)) / rate).max() > 2e-3:  # milliseconds carry true times through both engines
        origin = times[base]
        step = (times[inside[-1]] - times[low]) / max(count - 1, 1) or 1 / rate
        return Clip(frames, 1000.0, [round((times[i] - origin) * 1000) for i in indices],
                    round(count * step * 1000), count * step)
    return Clip(frames, rate, [i - base for i in indices], count, count / rate)


def media_items(record):
    return ([{"kind": "video", "path": path, "start": record.get("video_start"), "end": record.get("video_end"),
              "fps": record.get("video_fps")} for path in record["videos"]]
            + [{"kind": "image", "path": path} for path in record["images"]])


def item_key(item, spec):
    """Hash of the content (size, first and last 64 KiB) and of everything that shapes the tensor."""
    digest = hashlib.sha256(json.dumps([SCHEMA, "bicubic-u8", asdict(spec), item["kind"], item.get("start"),
                                        item.get("end"), item.get("fps")]).encode())
    path = item["path"]
    if isinstance(path, str) and os.path.isdir(path):
        path = sorted(str(p) for p in Path(path).iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)
    for file in path if isinstance(path, (list, tuple)) else [path]:
        try:
            with open(file, "rb") as f:
                size = f.seek(0, 2)
                f.seek(0)
                digest.update(str(size).encode() + f.read(65536))
                f.seek(max(size - 65536, 0))
                digest.update(f.read(65536))
        except OSError as error:
            raise MediaError(file, error.strerror or error) from error
    return digest.hexdigest()[:32]


def load_item(item, spec):
    key = item_key(item, spec)
    if item["kind"] == "video":
        clip = decode(item["path"], spec, item["start"], item["end"], item["fps"])
        clip.key = key
        return clip
    pixels = read_image(item["path"])
    low, high = spec.image_min_pixels or 4 * spec.factor**2, spec.image_max_pixels or 16384 * spec.factor**2
    try:
        size = smart_resize(*pixels.shape[:2], spec.factor, min(low, high), high)
    except ValueError as error:
        raise MediaError(item["path"], error) from error
    return Clip(resize(pixels[None], *size)[0], 0.0, [], 0, 0.0, key)


def load_media(record, spec, cache_dir=None, cache_mode="prefer_cache"):
    """Every clip and image of a record, in this process."""
    media = Media()
    for item in media_items(record):
        clip = load_item(item, spec)
        if item["kind"] == "video":
            media.videos.append(clip)
        else:
            media.images.append(clip.frames)
            media.image_keys.append(clip.key)
    return media


class MediaLoader:
    def __init__(self, spec, workers=2, timeout_s=60, cache_dir=None, cache_mode="prefer_cache", bad_file=None):
        self.spec, self.cache = spec, (cache_dir, cache_mode)
        self.pool = ThreadPoolExecutor(max(workers, 1))

    def submit(self, record):
        return self.pool.submit(load_media, record, self.spec, *self.cache)

    def close(self):
        self.pool.shutdown(wait=False, cancel_futures=True)


# ---------------------------------------------------------------------------------------------- model inputs


def is_qwen3(model_config):
    return model_config.model_type.startswith("qwen3")


def vision_token_ids(model_config):
    """Ids that must never be sampled: the models' position maths and feature scatter count them."""
    c = model_config
    return [c.image_token_id, c.video_token_id, c.vision_start_token_id, c.vision_end_token_id]


def vllm_inputs(text, media):
    """One request of vLLM's generate. Pixels are final: nothing is resized or resampled there."""
    request = {"prompt": text}
    if not media.videos and not media.images:
        return request
    from PIL import Image

    request["multi_modal_data"] = data = {}
    request["multi_modal_uuids"] = uuids = {}
    request["mm_processor_kwargs"] = {"do_resize": False}
    if media.videos:
        # The number of seconds and so the time stamps come from these three fields alone.
        data["video"] = [(clip.frames, {"fps": clip.fps, "frames_indices": list(clip.frames_indices),
                                        "total_num_frames": clip.total_num_frames, "duration": clip.duration,
                                        "do_sample_frames": False}) for clip in media.videos]
        uuids["video"] = [clip.key for clip in media.videos]
        request["mm_processor_kwargs"]["do_sample_frames"] = False
    if media.images:
        data["image"] = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in media.images]
        uuids["image"] = list(media.image_keys)
    return request


def timestamp_texts(frames_indices, fps, temporal_patch_size=2):
    """["<0.2 seconds>", ...], one per merged group: the mean of its first and last frame's time."""
    times = [i / fps for i in frames_indices]
    times += times[-1:] * (-len(times) % temporal_patch_size)
    return [f"<{(times[i] + times[i + temporal_patch_size - 1]) / 2:.1f} seconds>"
            for i in range(0, len(times), temporal_patch_size)]


def grids(media, model_config):
    """Patch grids (t, h, w) of videos and of images."""
    vision = model_config.vision_config
    p, tp = vision.patch_size, vision.temporal_patch_size
    videos = [(-(-c.frames.shape[0] // tp), c.frames.shape[2] // p, c.frames.shape[3] // p) for c in media.videos]
    return videos, [(1, image.shape[1] // p, image.shape[2] // p) for image in media.images]


def expand_prompt(text, media, processor, model_config):
    """Prompt ids with all placeholders expanded: equal to what vLLM reports as prompt_token_ids."""
    c, encode = model_config, processor.tokenizer.encode
    merge = c.vision_config.spatial_merge_size**2
    videos, images = (iter(g) for g in grids(media, c))
    clips, ids = iter(media.videos), []
    for token in encode(text, add_special_tokens=False):
        if token == c.image_token_id:
            t, h, w = next(images)
            ids += [token] * (h * w // merge)
        elif token == c.video_token_id:
            (t, h, w), clip = next(videos), next(clips)
            if not is_qwen3(c):
                ids += [token] * (t * h * w // merge)
                continue
            for stamp in timestamp_texts(clip.frames_indices, clip.fps, c.vision_config.temporal_patch_size):
                ids += encode(stamp, add_special_tokens=False)
                ids += [c.vision_start_token_id] + [token] * (h * w // merge) + [c.vision_end_token_id]
        else:
            ids.append(token)
    return ids


def position_ids(ids, media, model_config):
    """(4, L): the text position 0..L-1, then time, height, width as in M-RoPE (arXiv 2409.12191, section 2.1).

    Text after a vision block goes on at the largest position so far plus 1, in all families: the released rule, of
    vLLM and transformers 4.57 (5.17 to 5.19 leave the temporal extent out for Qwen2-VL and Qwen2.5-VL).
    """
    c, ids = model_config, list(ids)
    merge = c.vision_config.spatial_merge_size
    videos, images = grids(media, c)
    queue = {c.image_token_id: [(g, 1.0) for g in images], c.video_token_id: []}
    for clip, (t, h, w) in zip(media.videos, videos):
        if is_qwen3(c):  # every merged frame is a block of its own between time stamps
            queue[c.video_token_id] += [((1, h, w), 1.0)] * t
            continue
        pace = 1.0  # positions per merged frame
        if c.model_type == "qwen2_5_vl":
            rate = len(clip.frames_indices) / clip.total_num_frames * clip.fps
            second_per_grid = torch.tensor(c.vision_config.temporal_patch_size / rate).item()  # float32, as in vLLM
            pace = second_per_grid * c.vision_config.tokens_per_second
        queue[c.video_token_id].append(((t, h, w), pace))

    parts, at, position = [], 0, 0
    while at < len(ids):
        if queue.get(ids[at]):
            (t, h, w), pace = queue[ids[at]].pop(0)
            block = np.indices((t, h // merge, w // merge)).reshape(3, -1)  # (3, n)
            block[0] = (block[0] * pace).astype(np.int64)
        else:
            length = 1
            while at + length < len(ids) and not queue.get(ids[at + length]):
                length += 1
            block = np.tile(np.arange(length), (3, 1))
        parts.append(block + position)
        position, at = int(parts[-1].max()) + 1, at + block.shape[1]
    rows = np.concatenate([np.arange(len(ids))[None], np.concatenate(parts, 1)])
    return torch.from_numpy(rows)


def patchify(frames, patch_size, merge_size, temporal_patch_size):
    """(T, 3, H, W) -> (patches, 3 * tp * p * p), same dtype, in the processors' order (merge blocks together)."""
    tp, p, m = temporal_patch_size, patch_size, merge_size
    if frames.shape[0] % tp:
        frames = torch.cat([frames, frames[-1:].expand(tp - frames.shape[0] % tp, -1, -1, -1)])
    t, h, w = frames.shape[0] // tp, frames.shape[2] // p, frames.shape[3] // p
    patches = frames.reshape(t, tp, 3, h // m, m, p, w // m, m, p).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return patches.reshape(t * h * w, 3 * tp * p * p)


def normalize(patches, image_mean, image_std, temporal_patch_size, device, dtype):
    """uint8 patches -> dtype, computed in float32 in slices that stay in the processor's cache."""
    per_channel = patches.shape[1] // 3
    mean = (torch.tensor(image_mean) * 255.0).repeat_interleave(per_channel).to(device)
    std = (torch.tensor(image_std) * 255.0).repeat_interleave(per_channel).to(device)
    patches = patches.to(device)
    out = torch.empty(patches.shape, dtype=dtype, device=device)
    for at in range(0, len(patches), 256):
        out[at:at + 256] = patches[at:at + 256].to(torch.float32).sub_(mean).div_(std)
    return out


def model_inputs(prompt_ids, media, model_config, image_mean, image_std, device, dtype):
    """What the Hugging Face model takes besides input_ids. Keys of media that the prompt lacks are absent."""
    vision = model_config.vision_config
    sizes = (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
    ids = torch.tensor(prompt_ids)
    types = (ids == model_config.image_token_id).int() + 2 * (ids == model_config.video_token_id).int()
    inputs = {"mm_token_type_ids": types[None].to(device),  # (1, P)
              "position_ids": position_ids(prompt_ids, media, model_config)[:, None].to(device)}  # (4, 1, P)
    video_grids, image_grids = grids(media, model_config)
    for name, grid, stacks in (("videos", video_grids, [clip.frames for clip in media.videos]),
                               ("images", image_grids, [image[None] for image in media.images])):
        if stacks:
            suffix = "_videos" if name == "videos" else ""
            patches = torch.cat([patchify(frames, *sizes) for frames in stacks])  # uint8
            inputs["pixel_values" + suffix] = normalize(patches, image_mean, image_std, sizes[2], device, dtype)
            inputs[("video" if name == "videos" else "image") + "_grid_thw"] = torch.tensor(grid, device=device)
    return inputs
