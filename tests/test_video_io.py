"""Oracles: qwen-vl-utils (frames and sizes), transformers (patches, ids, positions), vLLM's processor, files made by hand."""

import ast
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).parents[1]))

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from qwen_vl_utils import vision_process as qvu

import video_io
from video_io import Clip, DataError, Media, MediaError, MediaLoader, MediaSpec

torch.set_num_threads(2)
SMALL = MediaSpec(min_pixels=4096, max_pixels=64 * 1024)
SCRIPT = video_io.__file__


# ---------------------------------------------------------------------------------------------- clips written by hand


def write_clip(path, n=30, fps=10, size=(96, 64), codec="libx264", pix_fmt="yuv420p", times=None, options=None, rotate=0):
    """A real file; frame i has a grey level of 8 * i (mod 200) and a white square in its upper left corner.

    times: presentation times in milliseconds instead of a constant rate."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps, options=options or {})
        stream.width, stream.height, stream.pix_fmt = *size, pix_fmt
        if times:
            stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for i in range(n):
            pixels = np.full((size[1], size[0], 3), 20 + 8 * i % 200, np.uint8)
            pixels[: size[1] // 4, : size[0] // 4] = 255
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times:
                frame.pts, frame.time_base = times[i], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    if rotate:
        turn(Path(path), rotate)
    return str(path)


def turn(path, degrees):
    """Writes a rotation into the track header of an mp4: the 3x3 matrix in the tkhd box."""
    data = bytearray(path.read_bytes())
    matrix = {90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}[degrees]
    at = data.index(b"tkhd") + 4 + 40
    a, b, c, d = (int(v * 65536).to_bytes(4, "big", signed=True) for v in matrix)
    zero, one = bytes(4), (1 << 30).to_bytes(4, "big")
    data[at:at + 36] = a + b + zero + c + d + zero + zero + zero + one
    path.write_bytes(data)


def remux(source, target, start_s=0.0):
    """A stream copy from the key frame before start_s, as `ffmpeg -ss -c copy` makes it: earlier frames at negative times."""
    with av.open(source) as a, av.open(str(target), "w") as b:
        stream = a.streams.video[0]
        out = b.add_stream_from_template(stream)
        a.seek(int(start_s / stream.time_base), stream=stream)
        for packet in a.demux(stream):
            if packet.pts is not None:
                shift = int(start_s / stream.time_base)
                packet.pts, packet.dts, packet.stream = packet.pts - shift, packet.dts - shift, out
                b.mux(packet)
    return str(target)


@pytest.fixture(scope="session")
def clips(tmp_path_factory):
    root = tmp_path_factory.mktemp("clips")
    texture = np.random.RandomState(0).randint(0, 255, (30, 50, 3), dtype=np.uint8)
    big = np.asarray(Image.fromarray(texture).resize((900, 600), 3))
    with av.open(str(root / "pan.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(30000, 1001))
        stream.width, stream.height, stream.pix_fmt = 640, 360, "yuv420p"
        for i in range(97):
            pixels = np.ascontiguousarray(big[i:i + 360, 2 * i:2 * i + 640])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    write_clip(root / "flat.mp4", 60, 30)
    write_clip(root / "slow.mp4", 25, 5, (320, 240))
    write_clip(root / "long.mp4", 300, 25, (64, 64), options={"g": "50"})
    return root


def grey(clip, i):
    return clip.frames[i, :, -8:, -8:].float().mean().item()


# ---------------------------------------------------------------------------------------------- records

LAYOUTS = [  # the layouts of published benchmark files, text replaced
    ({"video": "166583.webm", "question": "What?", "options": ["A. x", "B. y", "C. z"], "answer": "(text)", "start": 0.5,
      "end": 2, "problem": "What?", "data_type": "video", "problem_type": "multiple choice", "solution": "<answer>C</answer>",
      "path": "./sub/flat.mp4", "subtitle": "", "problem_id": 401}, dict(answer="C", video_start=0.5, video_end=2.0)),
    ({"data_type": "video", "problem_type": "temporal grounding", "path": "sub/flat.mp4", "problem": "When?", "options": [],
      "solution": '<think>{"time": [24.2, 30.4], "boxes": {}}</think><[PLHD21_never_used_51bce0c785ca2f68]>'},
     dict(answer='{"time": [24.2, 30.4], "boxes": {}}', options=[])),
    ({"data_type": "video", "data_source": "OVO-Bench", "problem_type": "CRR", "problem": "What?", "options": [],
      "path": "sub/flat.mp4", "solution": "<answer>No</answer>", "ovo_test_idx": 0}, dict(problem_type="crr", ovo_test_idx=0)),
    ({"data_type": "video", "problem_type": "multiple choice", "problem": "What?", "path": "sub/flat.mp4",
      "options": ["A: one", "B: two"], "solution": "<answer>B</answer>"}, dict(options=["A. one", "B. two"])),
    ({"problem_id": 14, "problem": "How much?", "data_type": "video", "problem_type": "numerical", "options": None,
      "solution": "<answer>12.97</answer>", "path": "sub/flat.mp4", "image_path": "./sub/i.png"}, dict(answer="12.97", options=[])),
    ({"problem": "", "data_type": "video", "problem_type": "caption", "solution": "(long text)", "path": "sub/flat.mp4"},
     dict(problem_type="video description", answer="(long text)")),
    ({"problem": "Which?", "problem_type": "Multiple_Choice", "answer": "A", "options": {"A": "x", "B": "y"},
      "images": ["sub/i.png"]}, dict(data_type="image", videos=[], options=["A. x", "B. y"], problem_type="multiple choice")),
    ({"problem": "Who?", "problem_type": "Open Ended", "answer": "me", "options": []}, dict(data_type="text")),
    ({"problem": "Which?", "problem_type": "multiple choice", "answer": "B", "options": ["A. Smith", "Jones"], "data_type": "image",
      "path": "sub/i.png"}, dict(options=["A. A. Smith", "B. Jones"])),
    ({"problem": "Follow", "problem_type": "tracking", "answer": {"boxes": {"1": [1, 2, 3, 4]}}, "videos": "sub/flat.mp4",
      "video_start": None}, dict(answer='{"boxes": {"1": [1, 2, 3, 4]}}', video_start=None)),
]


@pytest.fixture
def dataset(tmp_path, clips):
    (tmp_path / "sub").mkdir()
    shutil.copy(clips / "flat.mp4", tmp_path / "sub" / "flat.mp4")
    Image.new("RGB", (60, 40), "red").save(tmp_path / "sub" / "i.png")
    return tmp_path


def write_jsonl(path, rows):
    Path(path).write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("row, expected", LAYOUTS)
def test_published_layouts_become_one_kind_of_record(dataset, row, expected):
    record, = video_io.load_records(write_jsonl(dataset / "d.jsonl", [row]))
    assert {name: record[name] for name in expected} == expected
    for path in record["videos"] + record["images"]:
        assert os.path.isabs(path) and os.path.exists(path)
    assert record["videos"] or record["data_type"] != "video"


def test_json_jsonl_and_parquet_give_the_same_records(dataset):
    import pyarrow
    import pyarrow.parquet

    rows = [{"problem": f"Is it {i}?", "answer": "yes", "problem_type": "boolean", "videos": ["sub/flat.mp4"]} for i in range(3)]
    write_jsonl(dataset / "d.jsonl", rows)
    (dataset / "d.json").write_text(json.dumps(rows, indent=1))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), dataset / "d.parquet")
    a, b, c = ([{k: v for k, v in r.items() if k not in ("where", "problem_id")} for r in video_io.load_records(dataset / f"d.{s}")]
               for s in ("jsonl", "json", "parquet"))
    assert a == b == c and len(a) == 3
    wheres = [record["where"] for record in video_io.load_records(dataset / "d.json")]
    assert wheres == ["d.json:2", "d.json:10", "d.json:18"]  # the lines where the objects begin


def test_all_problems_are_collected_with_place_field_value_and_remedy(dataset):
    good = {"problem": "Is it?", "answer": "yes", "problem_type": "boolean", "videos": ["sub/flat.mp4"]}
    rows = [good, {**good, "problem_type": "mutiple choise"}, '{"problem": ', {**good, "videos": ["gone.mp4"]},
            {**good, "problem_type": "multiple choice"}, {**good, "answer": None}, {**good, "video_start": 3, "video_end": 2},
            {**good, "problem": "<video> and <video>"}, {**good, "problem": "a <|video_pad|>"}, {**good, "video_start": "soon"},
            {**good, "has_offline_trajectory": True}, {**good, "videos": [], "data_type": "video"}, "[1]"]
    with pytest.raises(DataError) as caught:
        video_io.load_records(write_jsonl(dataset / "d.jsonl", rows))
    lines = str(caught.value).split("\n")
    for line, words in ((2, ["problem_type", "mutiple choise", "multiple choice"]), (3, ["no valid JSON"]), (4, ["gone.mp4", "data_root"]),
                        (5, ["options"]), (6, ["answer"]), (7, ["video_end", "after start 3.0"]), (8, ["videos", "flat.mp4", "<video> mark"]),
                        (9, ["special token"]), (10, ["video_start", "soon"]), (11, ["offline_output"]), (12, ["videos"])):
        mine = [text for text in lines if text.startswith(f"d.jsonl:{line}:")]
        assert mine and all(word in mine[0] for word in words), (line, mine, lines)
    assert not any(text.startswith("d.jsonl:1:") for text in lines)


def test_twenty_problems_are_shown_and_the_rest_counted(dataset):
    rows = [{"problem": "Is it?", "answer": "yes", "problem_type": "boolean", "videos": [f"{i}.mp4"]} for i in range(33)]
    with pytest.raises(DataError) as caught:
        video_io.load_records(write_jsonl(dataset / "d.jsonl", rows))
    lines = str(caught.value).split("\n")
    assert len(lines) == 21 and "13 more problems" in lines[-1] and "d.jsonl:20:" in lines[-2]


@pytest.mark.parametrize("name, content", [("empty.jsonl", ""), ("bad.json", '[{"a": 1},\n {"b": ]'), ("gone.jsonl", None), ("x.parquet", "no")])
def test_unreadable_data_files_are_one_clear_error(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=name):
        video_io.load_records(tmp_path / name)


@pytest.mark.parametrize("field, value", [
    ("options", 5), ("options", [["a"]]), ("options", {"A": [1]}), ("videos", [[]]), ("videos", 5), ("videos", [5]),
    ("videos", {"a": 1}), ("images", [["a.png"]]), ("images", 7), ("preprocessed_video", 5), ("preprocessed_video", ["a"]),
    ("video_fps", "fast"), ("video_fps", 0), ("video_fps", -1), ("video_start", -1), ("video_start", True),
    ("video_start", [1]), ("video_end", "late"), ("video_end", 0), ("problem", None), ("problem", 5), ("problem", ["a"]),
    ("answer", {}), ("answer", "  "), ("answer", "<answer> </answer>"), ("answer", None), ("problem_type", None),
    ("problem_type", 5), ("problem_type", ["boolean"]), ("data_type", 5), ("data_type", "audio"), ("data_source", 5),
    ("has_offline_trajectory", "yes"), ("offline_output", ["a"])])
def test_an_odd_value_is_one_line_that_names_field_and_value(dataset, field, value):
    row = {"problem": "Is it?", "answer": "yes", "problem_type": "boolean", "videos": ["sub/flat.mp4"]} | {field: value}
    with pytest.raises(DataError) as caught:
        video_io.load_records(write_jsonl(dataset / "d.jsonl", [row]))
    line = str(caught.value)
    assert line.startswith(f"d.jsonl:1: {field} is ") and "\n" not in line and len(line.split(": ")) >= 3


@pytest.mark.parametrize("kind", ["caption", None])
def test_prompts_without_video_description_know_no_caption(dataset, kind):
    write_jsonl(dataset / "d.jsonl", [{"problem": "Is it?", "answer": "yes", "problem_type": kind, "videos": ["sub/flat.mp4"]}])
    with pytest.raises(DataError, match="problem_type is .*nearest: boolean"):
        video_io.load_records(dataset / "d.jsonl", prompts={"boolean": {"reason": "", "direct": ""}})


def test_keys_survive_a_move_and_tell_duplicates_apart(dataset, tmp_path_factory):
    rows = [{"problem": "Is it?", "answer": a, "problem_type": "boolean", "videos": ["sub/flat.mp4"]} for a in ("yes", "yes", "no")]
    keys = [record["key"] for record in video_io.load_records(write_jsonl(dataset / "d.jsonl", rows))]
    moved = tmp_path_factory.mktemp("moved") / "x"
    shutil.copytree(dataset, moved)
    assert [record["key"] for record in video_io.load_records(moved / "d.jsonl")] == keys
    assert keys[1] == keys[0] + ":2" and len(set(keys)) == 3


def test_a_check_of_the_caller_is_reported_with_the_other_problems(dataset):
    good = {"problem": "Is it?", "answer": "yes", "problem_type": "boolean", "videos": ["sub/flat.mp4"]}
    write_jsonl(dataset / "d.jsonl", [good, good | {"answer": "perhaps"}, good | {"videos": ["gone.mp4"]}])

    def check(record):
        if record["answer"] != "yes":
            raise ValueError(f"{record['where']}: answer {record['answer']!r} is neither yes nor no")

    with pytest.raises(DataError) as caught:
        video_io.load_records(dataset / "d.jsonl", check=check)
    first, second = str(caught.value).split("\n")
    assert first == "d.jsonl:2: answer 'perhaps' is neither yes nor no"  # the place is named once
    assert second.startswith("d.jsonl:3: videos is ") and "no file" in second


def test_data_root_is_where_relative_paths_start(dataset, tmp_path_factory):
    row = {"problem": "Is it?", "answer": "yes", "problem_type": "boolean", "videos": ["flat.mp4"]}
    file = write_jsonl(tmp_path_factory.mktemp("elsewhere") / "d.jsonl", [row])
    record, = video_io.load_records(file, data_root=dataset / "sub")
    assert record["videos"] == [str(dataset / "sub" / "flat.mp4")]


# ---------------------------------------------------------------------------------------------- prompts


def a_record(**fields):
    return {"problem": "What?", "problem_type": "multiple choice", "options": [], "videos": [], "images": []} | fields


def test_every_problem_type_has_a_reason_and_a_direct_form():
    names = """multiple choice, numerical, regression, boolean, binary classification, ocr, math, open-ended, free-form, video qa,
        video description, temporal grounding, spatial grounding, spatial-temporal grounding, tracking, segmentation, code, svg-code,
        html-code, llava preference, critic preference, rec, ssr, crr"""
    prompts = video_io.load_prompts()
    assert set(prompts) == {name.strip() for name in names.split(",")}
    for forms in prompts.values():
        assert "<answer>" in forms["reason"] and "<think>" in forms["reason"]
        assert "<answer>" in forms["direct"] and "<think>" not in forms["direct"]


@pytest.mark.parametrize("n", [1, 2, 4, 14])
def test_letters_go_up_to_the_number_of_options(n):
    options = video_io.letter_options([f"choice {i}" for i in range(n)])
    content = video_io.build_messages(a_record(options=options), video_io.load_prompts())[0]["content"]
    text, last = content[-1]["text"], chr(64 + n)
    assert options[-1] == f"{last}. choice {n - 1}" and options[-1] in text
    assert ("A" if n == 1 else f"A or {last}" if n == 2 else f", {chr(63 + n)} or {last}") + ")" in text


def test_media_stand_where_their_marks_are_else_before_the_text():
    prompts = video_io.load_prompts()
    kinds = lambda record: [c["type"] for c in video_io.build_messages(record, prompts)[-1]["content"]]
    assert kinds(a_record(videos=["a", "b"], images=["c"])) == ["video", "video", "image", "text"]
    marked = a_record(problem="See <image>: is <video> like <video>?", videos=["a", "b"], images=["c"])
    assert kinds(marked) == ["text", "image", "text", "video", "text", "video", "text"]
    assert kinds(a_record(problem="In <image>?", videos=["a"], images=["c"])) == ["video", "text", "image", "text"]
    messages = video_io.build_messages(a_record(), prompts, system="Be brief.")
    assert messages[0] == {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}


# ---------------------------------------------------------------------------------------------- sampling and sizes


def qvu_indices(total, source_fps, **ele):
    start, end, count = qvu.calculate_video_frame_range(ele, total, source_fps)
    return torch.linspace(start, end, qvu.smart_nframes(ele, count, source_fps)).round().long().tolist()


@settings(max_examples=400, deadline=None)
@given(total=st.integers(2, 4000), fps=st.sampled_from([5, 10, 12.5, 24000 / 1001, 24, 25, 30000 / 1001, 30, 50, 60]),
       rate=st.sampled_from([0.25, 0.5, 1, 2, 3, 4, 8]), low=st.integers(2, 16), more=st.integers(2, 760), nframes=st.integers(2, 64),
       fixed=st.booleans())
def test_indices_equal_qwen_vl_utils(total, fps, rate, low, more, nframes, fixed):
    times = (np.arange(total) / fps).astype(np.float32)
    if fixed:
        if round(nframes / 2) * 2 > total or nframes < 2:
            return
        assert video_io.sample_indices(times, MediaSpec(nframes=nframes), fps=fps) == qvu_indices(total, fps, nframes=nframes)
    else:
        spec = MediaSpec(fps=rate, min_frames=low, max_frames=low + more)
        assert video_io.sample_indices(times, spec, fps=fps) == qvu_indices(total, fps, fps=rate, min_frames=low, max_frames=low + more)


@pytest.mark.parametrize("start, end", [(0.5, None), (None, 7.3), (1.25, 6.0), (2.02, 2.9), (0, 100)])
@pytest.mark.parametrize("fps", [10, 25, 30000 / 1001])
def test_segments_equal_qwen_vl_utils(start, end, fps):
    ele = {name: value for name, value in (("video_start", start), ("video_end", end)) if value is not None}
    times = (np.arange(300) / fps).astype(np.float32)
    assert video_io.sample_indices(times, MediaSpec(), start, end, fps=fps) == qvu_indices(300, fps, **ele)


@settings(max_examples=500, deadline=None)
@given(h=st.integers(2, 3000), w=st.integers(2, 3000), factor=st.sampled_from([28, 32]), low=st.integers(1, 300), more=st.integers(0, 3000))
def test_sizes_equal_qwen_vl_utils_where_it_is_right(h, w, factor, low, more):
    low, high = low * factor**2, (low + more) * factor**2
    if max(h, w) / min(h, w) > 200:
        with pytest.raises(ValueError, match="aspect ratio"):
            video_io.smart_resize(h, w, factor, low, high)
        return
    got, expected = video_io.smart_resize(h, w, factor, low, high), qvu.smart_resize(h, w, factor, low, high)
    assert got[0] % factor == 0 == got[1] % factor and min(got) >= factor
    assert got == expected or min(expected) < factor and got[0] * got[1] <= high


def test_the_last_pixel_bound_of_extreme_ratios_is_ours():
    assert 0 in qvu.smart_resize(10, 1900, 32, 1024, 4096)  # a size of nothing: the wrong that we do not copy
    assert video_io.smart_resize(10, 1900, 32, 1024, 4096) == (32, 128)


BUDGETS = [{}, {"max_pixels": 100_000, "min_pixels": 4096}, {"total_pixels": 300_000}, {"min_pixels": 200_000},
           {"nframes": 6}, {"fps": 4.0, "max_frames": 8}, {"fps": 1.0, "min_frames": 6}, {"max_pixels": 10**7}]


@pytest.mark.parametrize("patch", [14, 16])
@pytest.mark.parametrize("options", BUDGETS)
@pytest.mark.parametrize("name, segment", [("pan.mp4", {}), ("slow.mp4", {}), ("pan.mp4", {"video_start": 0.4, "video_end": 2.1})])
def test_real_clips_equal_qwen_vl_utils(clips, name, options, patch, segment, monkeypatch):
    monkeypatch.setattr(qvu, "FORCE_QWENVL_VIDEO_READER", "decord")
    qvu.get_video_reader_backend.cache_clear()
    ele = {"video": str(clips / name), **options, **segment}
    expected, meta = qvu.fetch_video(ele, image_patch_size=patch, return_video_metadata=True)
    clip = video_io.decode(str(clips / name), MediaSpec(patch_size=patch, timestamps="source", **options),
                           segment.get("video_start"), segment.get("video_end"))
    assert clip.frames_indices == list(meta["frames_indices"]) and clip.fps == pytest.approx(meta["fps"])
    assert clip.total_num_frames == meta["total_num_frames"]
    assert clip.frames.shape == expected.shape and clip.frames.dtype == torch.uint8 and clip.frames.is_contiguous()
    error = (clip.frames.float() - expected).square().mean().item()
    assert 10 * math.log10(255**2 / max(error, 1e-9)) >= 55


def test_frame_lists_are_resized_once_at_the_files_factor(clips, tmp_path):
    video = video_io.decode(str(clips / "pan.mp4"), MediaSpec())
    files = []
    with av.open(str(clips / "pan.mp4")) as container:
        for i, frame in enumerate(container.decode(video=0)):
            files.append(str(tmp_path / f"{i}.png"))
            frame.to_image().save(files[-1])
    files = [files[i] for i in video.frames_indices]
    clip = video_io.decode(files, MediaSpec())
    assert clip.frames.shape == video.frames.shape
    assert (clip.frames.float() - video.frames.float()).abs().mean() < 1
    theirs = qvu.fetch_video({"video": files}, image_patch_size=16)
    assert theirs.shape != clip.frames.shape  # factor 64 in 0.0.14; when this fails it was repaired there


def test_frame_lists_and_folders_use_the_stated_rate(clips, tmp_path):
    for i in range(31):  # 1.png .. 31.png: natural order, 2 before 10
        Image.new("RGB", (64, 64), (8 * i, 8 * i, 8 * i)).save(tmp_path / f"{i + 1}.png")
    clip = video_io.decode(str(tmp_path), SMALL, fps=10.0)
    assert clip.frames_indices == qvu_indices(31, 10.0) and clip.fps == 10.0
    assert [round(clip.frames[i, 0].float().mean().item() / 8) for i in range(len(clip.frames))] == clip.frames_indices
    assert video_io.stamps(clip)[-1] == "<2.7 seconds>"  # qwen-vl-utils with raw_fps would count ordinals as source frames
    few = video_io.decode([str(tmp_path / f"{i}.png") for i in range(1, 6)], SMALL)  # as sampled: 2 fps
    assert few.fps == 2.0 and few.frames_indices[0] == 0 and few.frames_indices[-1] == 4 and len(few.frames) % 2 == 0


def test_a_lone_frame_is_taken_twice_and_nframes_is_lowered_to_what_there_is(tmp_path):
    one = write_clip(tmp_path / "one.mp4", 1)
    with pytest.raises(ValueError):
        qvu.smart_nframes({}, 1, 10)
    clip = video_io.decode(one, SMALL)
    assert clip.frames_indices == [0, 0] and torch.equal(clip.frames[0], clip.frames[1])
    assert video_io.sample_indices(np.arange(7) / 10, MediaSpec(nframes=64)) == [0, 1, 2, 4, 5, 6]  # linspace of 6 over 7


# ---------------------------------------------------------------------------------------------- true timestamps


def test_variable_frame_rate_is_sampled_and_stamped_by_presentation_time(tmp_path):
    times = [100 * i for i in range(20)] + [2000 + 1000 * i for i in range(10)]  # 2 s at 10 fps, then 1 fps: 11 s
    clip = video_io.decode(write_clip(tmp_path / "v.mp4", 30, times=times), MediaSpec(nframes=12, min_pixels=4096))
    shown = [i / clip.fps for i in clip.frames_indices]
    wanted = np.linspace(0, 11, 12)
    assert max(min(abs(t / 1000 - s) for t in times) for s in shown) < 2e-3  # times of real frames
    assert np.abs(np.array(shown) - wanted).max() <= 0.5 + 1e-3  # evenly spaced in time, not in index
    levels = [20 + 8 * times.index(round(s * 1000)) % 200 for s in shown]
    assert [grey(clip, i) for i in range(12)] == pytest.approx(levels, abs=4)
    assert clip.total_num_frames / clip.fps == pytest.approx(11.4, abs=0.5)


def test_frames_before_time_zero_are_dropped(tmp_path):
    source = write_clip(tmp_path / "s.mp4", 60, 10, options={"g": "40", "bf": "0"})
    cut = remux(source, tmp_path / "cut.mp4", 2.3)  # starts at the key frame 0, 23 frames of pre-roll
    clip = video_io.decode(cut, SMALL)
    assert clip.total_num_frames == 37
    assert grey(clip, 0) == pytest.approx(20 + 8 * 23 % 200, abs=4)


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_rotation_is_applied_alike_by_both_decoders(tmp_path, degrees, monkeypatch):
    path = write_clip(tmp_path / "r.mp4", 6, 10, (96, 64), rotate=degrees)
    first = video_io.decode(path, SMALL)
    assert first.frames.shape[2] > first.frames.shape[3] or degrees == 180
    monkeypatch.delitem(video_io.READERS, "decord")  # a platform without it
    second = video_io.decode(path, SMALL)
    assert first.frames.shape == second.frames.shape
    assert (first.frames.float() - second.frames.float()).abs().max() <= 2
    corners = [first.frames[0, 0, y, x].item() for y, x in ((4, 4), (4, -4), (-4, -4), (-4, 4))]
    assert corners.index(max(corners)) == {90: 1, 180: 2, 270: 3}[degrees]  # the white corner turns clockwise


def test_segment_times_count_from_the_segment_unless_source_is_asked_for(clips):
    path = str(clips / "long.mp4")  # 12 s at 25 fps
    cut = video_io.decode(path, SMALL, 4.0, 8.0)
    source = video_io.decode(path, MediaSpec(min_pixels=4096, timestamps="source"), 4.0, 8.0)
    assert cut.frames_indices[0] == 0 and source.frames_indices[0] == 100
    assert [i + 100 for i in cut.frames_indices] == source.frames_indices
    assert cut.total_num_frames == 101 and video_io.stamps(cut)[0] == "<0.3 seconds>"


def test_a_segment_without_frames_is_an_error_that_names_it(clips):
    with pytest.raises(MediaError, match="no frame from 50.0 s to 60.0 s"):
        video_io.decode(str(clips / "long.mp4"), SMALL, 50.0, 60.0)


# ---------------------------------------------------------------------------------------------- formats and hostile files


@pytest.mark.parametrize("name, codec, pix_fmt, size", [
    ("h264.mkv", "libx264", "yuv420p", (96, 64)), ("h264.mov", "libx264", "yuv420p", (96, 64)), ("hevc.mp4", "libx265", "yuv420p", (96, 64)),
    ("ten.mp4", "libx265", "yuv420p10le", (96, 64)), ("vp9.webm", "libvpx-vp9", "yuv420p", (96, 64)), ("av1.mp4", "libsvtav1", "yuv420p", (96, 64)),
    ("anim.gif", "gif", "rgb8", (96, 64)), ("odd.mp4", "libx264", "yuv444p", (97, 61)), ("ä ö 视频.mp4", "libx264", "yuv420p", (96, 64)),
    ("mpeg4.avi", "mpeg4", "yuv420p", (96, 64))])
def test_formats_decode_to_the_frames_that_were_written(tmp_path, name, codec, pix_fmt, size):
    options = {"x265-params": "log-level=none"} if codec == "libx265" else {}
    path = write_clip(tmp_path / name, 20, 10, size, codec, pix_fmt, options=options)
    clip = video_io.decode(path, SMALL)
    assert clip.frames.dtype == torch.uint8 and len(clip.frames) == 4
    times = [i / clip.fps for i in clip.frames_indices]
    assert times == pytest.approx([i / 10 for i in qvu_indices(20, 10.0)], abs=0.03)
    tolerance = 20 if codec == "gif" else 6  # a palette of 256 colours
    assert [grey(clip, i) for i in range(4)] == pytest.approx([20 + 8 * round(t * 10) % 200 for t in times], abs=tolerance)


def test_a_tag_that_is_no_unicode_does_not_matter(tmp_path, monkeypatch):
    path = Path(write_clip(tmp_path / "tag.mkv", 20, 10))
    path.write_bytes(path.read_bytes().replace(b"Lavf", b"\xff\xfevf"))  # the name of the program that wrote it
    with pytest.raises(UnicodeDecodeError):
        av.open(str(path))
    first = video_io.decode(str(path), SMALL)
    assert video_io.probe(str(path))["codec"] == "h264 yuv420p"
    monkeypatch.delitem(video_io.READERS, "decord")
    assert (video_io.decode(str(path), SMALL).frames.float() - first.frames.float()).abs().max() <= 2


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_a_clip_cut_short_between_two_frames_is_refused(tmp_path, codec):
    with av.open(write_clip(tmp_path / "a.mp4", 60, 25, codec=codec, options={"g": "10"})) as a:
        with av.open(str(tmp_path / "b.mp4"), "w", options={"movflags": "faststart"}) as b:
            out = b.add_stream_from_template(a.streams.video[0])
            for packet in a.demux(video=0):
                if packet.dts is not None:
                    packet.stream = out
                    b.mux(packet)
    with av.open(str(tmp_path / "b.mp4")) as b:
        ends = [packet.pos + packet.size for packet in b.demux(video=0) if packet.size]
    whole = (tmp_path / "b.mp4").read_bytes()
    for end in ends[20], ends[39], ends[-2]:
        (tmp_path / "b.mp4").write_bytes(whole[:end])
        with pytest.raises(MediaError, match="truncated: .* of 60 frames are there"):
            video_io.decode(str(tmp_path / "b.mp4"), SMALL)


@pytest.fixture
def hostile(tmp_path, clips):
    whole = Path(write_clip(tmp_path / "whole.mp4", 200, 25)).read_bytes()
    files = {"empty": b"", "half": whole[: len(whole) // 2], "text": b"this is no video", "zeros": bytes(5000), "head": whole[:40]}
    for name, data in files.items():
        (tmp_path / f"{name}.mp4").write_bytes(data)
    with av.open(str(tmp_path / "whole.mp4")) as a, av.open(str(tmp_path / "fast.mp4"), "w", options={"movflags": "faststart"}) as b:
        out = b.add_stream_from_template(a.streams.video[0])
        for packet in a.demux(video=0):
            if packet.dts is not None:
                packet.stream = out
                b.mux(packet)
    fast = (tmp_path / "fast.mp4").read_bytes()
    (tmp_path / "fasthalf.mp4").write_bytes(fast[: int(len(fast) * 0.6)])
    Image.new("RGB", (10_000, 1)).save(tmp_path / "ribbon.png")
    (tmp_path / "folder.mp4").mkdir()
    os.mkfifo(tmp_path / "pipe.mp4")
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 44100), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 44100
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return tmp_path


@pytest.mark.parametrize("name", ["empty.mp4", "half.mp4", "text.mp4", "zeros.mp4", "head.mp4", "fasthalf.mp4", "folder.mp4",
                                  "pipe.mp4", "sound.mp4", "missing.mp4"])
def test_hostile_clips_are_one_clear_error(hostile, name):
    item = {"kind": "video", "path": str(hostile / name)}
    with pytest.raises(MediaError) as caught:
        video_io.load_item(item, SMALL)
    assert caught.value.path == str(hostile / name) and caught.value.reason and "\n" not in caught.value.reason


@pytest.mark.parametrize("name, size", [("narrow.mp4", (2, 64)), ("tiny.mp4", (2, 2))])
def test_very_small_clips_are_enlarged(tmp_path, name, size):
    clip = video_io.decode(write_clip(tmp_path / name, 6, 10, size), SMALL)
    assert min(clip.frames.shape[2:]) >= 32


def test_a_ratio_of_10000_to_1_is_refused_by_name(hostile):
    with pytest.raises(MediaError, match="aspect ratio"):
        video_io.load_item({"kind": "image", "path": str(hostile / "ribbon.png")}, SMALL)
    with pytest.raises(MediaError, match="aspect ratio"):
        video_io.decode([str(hostile / "ribbon.png")] * 4, SMALL)


def test_a_wrong_extension_does_not_matter(clips, tmp_path):
    shutil.copy(clips / "flat.mp4", tmp_path / "flat.webm")
    assert torch.equal(video_io.decode(str(tmp_path / "flat.webm"), SMALL).frames, video_io.decode(str(clips / "flat.mp4"), SMALL).frames)


def test_zero_duration_is_one_moment(tmp_path):
    clip = video_io.decode(write_clip(tmp_path / "z.mp4", 1, times=[0]), SMALL)
    assert clip.frames_indices == [0, 0] and clip.duration > 0 and video_io.stamps(clip) == ["<0.0 seconds>"]


def test_permission_denied_is_named(clips):
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        os.chmod(folder, 0o755)
        path = shutil.copy(clips / "flat.mp4", Path(folder) / "locked.mp4")
        os.chmod(path, 0)
        code = ("import os, sys; sys.path.insert(0, sys.argv[1]); import video_io\n"
                "if os.geteuid() == 0: os.setuid(65534)  # root reads everything\n"
                "try: video_io.load_item({'kind': 'video', 'path': sys.argv[2]}, video_io.MediaSpec())\n"
                "except video_io.MediaError as error: print(error.reason)")
        out = subprocess.run([sys.executable, "-c", code, str(Path(SCRIPT).parent), str(path)], capture_output=True, text=True)
        assert "Permission denied" in out.stdout, out.stderr


def test_images_have_their_own_budget_lie_on_white_and_stand_upright(tmp_path):
    rgba = np.zeros((64, 128, 4), np.uint8)
    rgba[:, 64:] = (255, 0, 0, 255)
    Image.fromarray(rgba).save(tmp_path / "a.png")
    clip, _ = video_io.load_item({"kind": "image", "path": str(tmp_path / "a.png")}, MediaSpec(max_pixels=4096, min_pixels=1024))
    assert clip.frames.shape == (1, 3, 64, 128)  # the clip's max_pixels do not bind it
    assert clip.frames[0, :, 32, 16].tolist() == [255, 255, 255] and clip.frames[0, :, 32, 112].tolist() == [255, 0, 0]
    spec = MediaSpec(image_max_pixels=2048)
    assert video_io.load_item({"kind": "image", "path": str(tmp_path / "a.png")}, spec)[0].frames.shape == (1, 3, 32, 64)
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera on its side
    Image.fromarray(rgba[..., :3]).save(tmp_path / "e.jpg", exif=exif)
    assert video_io.load_item({"kind": "image", "path": str(tmp_path / "e.jpg")}, MediaSpec())[0].frames.shape == (1, 3, 128, 64)


# ---------------------------------------------------------------------------------------------- worker processes


def record_of(*paths, **fields):
    return {"videos": [str(p) for p in paths], "images": [], "where": "d.jsonl:7"} | fields


@pytest.fixture
def wild_decord(tmp_path, monkeypatch):
    """A decord for worker processes that hangs in C with the GIL held, crashes, exits or is slow, as the name of the clip
    says; all other clips it refuses. It leaves a file `reached` when it was asked."""
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "decord.py").write_text(f"""
import ctypes, os, re, time
class DECORDError(Exception): pass
class DECORDLimitReachedError(Exception): pass
class logging:
    QUIET, set_level = 0, print
def VideoReader(path, **options):
    open({str(tmp_path / "reached")!r}, "w").close()
    name = os.path.basename(path)
    if name.startswith("hang"): re.match("(a*)*b", "a" * 99)
    if name.startswith("crash"): ctypes.string_at(0)
    if name.startswith("exit"): os._exit(7)
    if name.startswith("slow"): time.sleep(3)
    raise DECORDError("not mine")
""")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stub"))
    return tmp_path


def children(pid):
    """Living processes that pid has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += [int(stat.parent.name)] * (int(parent) == pid and state != "Z")
    return found


def until(reached):
    for _ in range(1200):
        if reached():
            return
        time.sleep(0.1)
    raise AssertionError("not within two minutes")


def test_workers_give_the_frames_of_this_process_and_report_bad_clips(clips, hostile, monkeypatch):
    (hostile / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(hostile / "scratch"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))  # no room in /dev/shm
    loader = MediaLoader(SMALL, workers=2, bad_file=hostile / "new" / "folder" / "bad_videos.jsonl")
    good = loader.submit(record_of(clips / "flat.mp4", clips / "slow.mp4", images=[]))
    bad = loader.submit(record_of(hostile / "half.mp4"))
    with pytest.raises(MediaError, match="half.mp4"):
        bad.result()
    media = good.result()
    here = video_io.load_media(record_of(clips / "flat.mp4", clips / "slow.mp4"), SMALL)
    assert [(c.fps, c.frames_indices, c.key) for c in media.videos] == [(c.fps, c.frames_indices, c.key) for c in here.videos]
    assert all(torch.equal(a.frames, b.frames) for a, b in zip(media.videos, here.videos))
    assert (loader.n_ok, loader.n_bad) == (2, 1) and media.nbytes == sum(c.frames.numel() for c in media.videos)
    line, = (json.loads(text) for text in (hostile / "new" / "folder" / "bad_videos.jsonl").read_text().splitlines())
    assert line["path"].endswith("half.mp4") and line["where"] == "d.jsonl:7" and line["reason"]
    loader.close()
    assert not list((hostile / "scratch").iterdir())
    assert media.videos[0].frames.sum() == here.videos[0].frames.sum()  # mapped frames outlive their file


def test_a_decoder_that_hangs_or_dies_costs_one_sample(clips, wild_decord):
    names = ["hang.mp4", "crash.mp4", "exit.mp4"]
    for i, name in enumerate(names):
        Path(wild_decord / name).write_bytes((clips / "flat.mp4").read_bytes() + bytes(i))  # each with a key of its own
    loader = MediaLoader(SMALL, workers=1, timeout_s=5, cache_dir=wild_decord / "c", bad_file=wild_decord / "bad.jsonl")
    for name, words in zip(names, ("hung for 5 s; decoder killed", f"crashed the decoder .exit code {-signal.SIGSEGV}.",
                                   "crashed the decoder .exit code 7.")):
        with pytest.raises(MediaError, match=words):
            loader.submit(record_of(wild_decord / name)).result()
        assert loader.submit(record_of(clips / "slow.mp4", video_end=1.0 + names.index(name))).result().videos  # replaced
    with pytest.raises(MediaError, match="hung for 5 s; decoder killed .remembered in "):
        loader.submit(record_of(wild_decord / "hang.mp4")).result()
    assert (loader.n_ok, loader.n_bad) == (3, 4)
    reasons = [json.loads(line)["reason"] for line in (wild_decord / "bad.jsonl").read_text().splitlines()]
    assert len(reasons) == 4 and "hung" in reasons[0]
    loader.close()


def test_the_time_limit_counts_from_the_start_of_a_decode_not_from_its_place_in_the_queue(clips, wild_decord):
    for i in range(4):
        shutil.copy(clips / "flat.mp4", wild_decord / f"slow{i}.mp4")
    loader = MediaLoader(SMALL, workers=1, timeout_s=8)  # each needs 3 s and more
    futures = [loader.submit(record_of(wild_decord / f"slow{i}.mp4")) for i in range(4)]
    assert all(future.result().videos for future in futures) and loader.n_bad == 0
    loader.close()


def test_a_worker_that_is_killed_from_outside_blames_no_clip_for_ever(clips, wild_decord):
    hung = Path(shutil.copy(clips / "flat.mp4", wild_decord / "hang.mp4"))
    loader = MediaLoader(SMALL, workers=1, cache_dir=wild_decord / "c")
    future = loader.submit(record_of(hung))
    until((wild_decord / "reached").exists)
    worker, = loader.processes.values()
    os.kill(worker.pid, signal.SIGKILL)  # as the kernel does when memory runs out
    with pytest.raises(MediaError, match="exit code -9"):
        future.result()
    assert loader.submit(record_of(clips / "flat.mp4")).result().videos  # the same bytes, so the same key
    worker, = loader.processes.values()
    os.kill(worker.pid, signal.SIGKILL)  # while it is idle
    worker.wait()
    assert loader.submit(record_of(clips / "slow.mp4")).result().videos
    loader.close()


def test_no_worker_outlives_a_killed_parent_or_a_close(clips, wild_decord):
    hung = shutil.copy(clips / "flat.mp4", wild_decord / "hang.mp4")
    code = (f"import sys; sys.path.insert(0, {str(Path(SCRIPT).parent)!r}); import video_io\n"
            f"loader = video_io.MediaLoader(video_io.MediaSpec(), 1)\n"
            f"loader.submit({record_of(hung)!r}).result()")
    parent = subprocess.Popen([sys.executable, "-c", code])
    until((wild_decord / "reached").exists)
    workers = children(parent.pid)
    parent.kill()
    parent.wait()
    assert len(workers) == 1
    until(lambda: not os.path.exists(f"/proc/{workers[0]}"))
    before = children(os.getpid())  # of other tests
    loader = MediaLoader(SMALL, 1, cache_dir=wild_decord / "c", bad_file=wild_decord / "bad.jsonl")
    (wild_decord / "reached").unlink()
    future = loader.submit(record_of(hung))
    until((wild_decord / "reached").exists)
    loader.close()
    assert future.done() and set(children(os.getpid())) <= set(before) and loader.n_bad == 0
    assert not (wild_decord / "bad.jsonl").exists() and not list((wild_decord / "c").rglob("*.*"))  # no clip is to blame


def test_without_workers_it_is_this_process_and_the_same_frames(clips):
    loader = MediaLoader(SMALL, workers=0)
    media = loader.submit(record_of(clips / "flat.mp4")).result()
    assert torch.equal(media.videos[0].frames, video_io.decode(str(clips / "flat.mp4"), SMALL).frames) and not loader.processes
    loader.close()


def test_video_io_does_not_import_the_engines_at_its_top():
    code = "import sys; sys.path.insert(0, sys.argv[1]); import video_io; print([m for m in ('vllm', 'transformers', 'qwen_vl_utils') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code, str(Path(SCRIPT).parent)], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# ---------------------------------------------------------------------------------------------- cache


def test_the_cache_hits_for_a_copied_dataset_and_misses_for_a_changed_file_or_setting(clips, tmp_path):
    cache, copy = tmp_path / "cache", tmp_path / "renamed.mp4"
    item = {"kind": "video", "path": str(clips / "flat.mp4")}
    clip, file = video_io.load_item(item, SMALL, cache)
    shutil.copy(clips / "flat.mp4", copy)
    again = video_io.load_media(record_of(copy), SMALL, cache, "cache_only").videos[0]
    assert torch.equal(again.frames, clip.frames) and (again.fps, again.frames_indices, again.key) == (clip.fps, clip.frames_indices, clip.key)
    data = bytearray(copy.read_bytes())
    data[-1] ^= 1
    copy.write_bytes(data)
    for changed, spec in ((copy, SMALL), (clips / "flat.mp4", MediaSpec(fps=4.0)), (clips / "flat.mp4", MediaSpec(timestamps="source"))):
        with pytest.raises(MediaError, match="not in"):
            video_io.load_media(record_of(changed), spec, cache, "cache_only")
    with pytest.raises(MediaError, match="not in"):
        video_io.load_media(record_of(clips / "flat.mp4", video_end=1.0), SMALL, cache, "cache_only")


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"\xff" * len(b), lambda b: bytes(len(b))])
def test_damaged_entries_are_rebuilt(clips, tmp_path, damage):
    item = {"kind": "video", "path": str(clips / "flat.mp4")}
    clip, file = video_io.load_item(item, SMALL, tmp_path)
    frames, whole = clip.frames.clone(), file.read_bytes()
    del clip  # it is mapped to the file
    file.write_bytes(damage(whole))
    again, _ = video_io.load_item(item, SMALL, tmp_path)
    assert torch.equal(again.frames, frames) and torch.equal(video_io.read_clip(file).frames, frames)


def test_realtime_neither_reads_nor_fills_the_cache(clips, tmp_path):
    video_io.load_media(record_of(clips / "flat.mp4"), SMALL, tmp_path / "c", "realtime")
    assert not (tmp_path / "c").exists()


def test_broken_clips_are_remembered_with_their_reason(hostile, tmp_path):
    cache = tmp_path / "cache"
    for words in ("cannot be decoded", "remembered"):
        with pytest.raises(MediaError, match=words):
            video_io.load_media(record_of(hostile / "half.mp4"), SMALL, cache)
    shutil.copy(hostile / "whole.mp4", hostile / "half.mp4")
    assert video_io.load_media(record_of(hostile / "half.mp4"), SMALL, cache).videos  # repaired: other content, other key


def test_a_killed_writer_leaves_no_entry(clips, tmp_path):
    code = f"""
import os, sys, time
sys.path.insert(0, {str(Path(SCRIPT).parent)!r})
import safetensors.torch, video_io
def half(tensors, file, header):
    open(file, "wb").write(b"half of the bytes")
    print("writing", flush=True)
    time.sleep(600)
safetensors.torch.save_file = half
video_io.load_item({{"kind": "video", "path": {str(clips / "flat.mp4")!r}}}, video_io.MediaSpec(), {str(tmp_path)!r})
"""
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert writer.stdout.readline()
    writer.kill()
    writer.wait()
    assert not list(tmp_path.glob("*/*.safetensors"))
    clip, file = video_io.load_item({"kind": "video", "path": str(clips / "flat.mp4")}, MediaSpec(), tmp_path)
    assert file.exists() and torch.equal(clip.frames, video_io.read_clip(file).frames)
    leftover, = tmp_path.glob("*/.*.tmp")
    os.utime(leftover, (0, 0))
    video_io.evict(tmp_path, 1e12)
    assert not leftover.exists() and file.exists()


def test_many_writers_of_one_entry_agree(clips, tmp_path):
    item = {"kind": "video", "path": str(clips / "flat.mp4")}
    results, stop = [], threading.Event()
    _, file = video_io.load_item(item, SMALL, tmp_path)
    file.unlink()

    def watch():
        while not stop.is_set():
            if file.exists():
                results.append(video_io.read_clip(file) is not None)

    watcher = threading.Thread(target=watch)
    watcher.start()
    loaders = [MediaLoader(SMALL, workers=1, cache_dir=tmp_path) for _ in range(3)]
    media = [loader.submit(record_of(clips / "flat.mp4")) for loader in loaders]
    assert len({future.result().videos[0].frames.sum().item() for future in media}) == 1
    stop.set()
    watcher.join()
    assert results and all(results)  # nobody ever saw half an entry
    for loader in loaders:
        loader.close()


def test_the_least_recently_used_entries_go_first(clips, tmp_path):
    names = ["flat.mp4", "slow.mp4", "long.mp4"]
    files = [video_io.load_item({"kind": "video", "path": str(clips / n)}, SMALL, tmp_path)[1] for n in names]
    for age, file in zip((30, 20, 10), files):
        os.utime(file, (time.time() - age, time.time() - age))
    video_io.load_item({"kind": "video", "path": str(clips / names[0])}, SMALL, tmp_path)  # now the most recent one
    video_io.evict(tmp_path, sum(f.stat().st_size for f in files) - 1)
    assert [f.exists() for f in files] == [True, False, True]
    limit = 2.2e6  # more than slow.mp4 takes alone, less than with long.mp4
    loader = MediaLoader(SMALL, workers=0, cache_dir=tmp_path, cache_gb=limit / 1e9)
    loader.submit(record_of(clips / "slow.mp4")).result()
    loader.close()
    assert sum(f.stat().st_size for f in tmp_path.glob("*/*")) <= limit


def test_stored_clips_of_easyvideor1_are_read_safely(clips, tmp_path):
    frames = torch.randint(0, 256, (5, 3, 64, 96)).float()
    metadata = {"fps": 30.0, "frames_indices": torch.tensor([0, 15, 30, 45, 60]), "total_num_frames": 61, "video_backend": "decord"}
    torch.save({"frames": frames, "metadata": metadata, "sample_fps": 2.46}, tmp_path / "a.pt")
    record = record_of(clips / "flat.mp4", preprocessed_video=str(tmp_path / "a.pt"))
    clip, = video_io.load_media(record, SMALL).videos
    assert torch.equal(clip.frames[:5], frames.byte()) and torch.equal(clip.frames[5], frames[4].byte())
    assert (clip.fps, clip.frames_indices, clip.total_num_frames) == (30.0, [0, 15, 30, 45, 60, 60], 61)
    assert torch.equal(video_io.load_media(record, SMALL, cache_mode="realtime").videos[0].frames,
                       video_io.decode(str(clips / "flat.mp4"), SMALL).frames)
    torch.save({"frames": ast.parse("1")}, tmp_path / "evil.pt")  # an object that only unpickling code could make
    with pytest.raises(MediaError, match="evil.pt: cannot be decoded"):
        video_io.load_media(record_of(clips / "flat.mp4", preprocessed_video=str(tmp_path / "evil.pt")), SMALL)


# ---------------------------------------------------------------------------------------------- model inputs

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = ("{%- for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
            "{% if c.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% elif c.type == 'image' %}"
            "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


@pytest.fixture(scope="session")
def family(tmp_path_factory):
    """name -> (config, processor, folder): processors and configs of real classes, with a tokenizer trained here."""
    import transformers as tf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    raw.train_from_iterator(["Which colour? <answer>A</answer> <think> Options: 0.5 seconds> user assistant: then <"] * 9, trainer)
    tokens = {s: raw.token_to_id(s) for s in SPECIAL}
    ids = dict(image_token_id=tokens["<|image_pad|>"], video_token_id=tokens["<|video_pad|>"],
               vision_start_token_id=tokens["<|vision_start|>"], vision_end_token_id=tokens["<|vision_end|>"])
    text = dict(vocab_size=600, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                head_dim=32, max_position_embeddings=4096)
    vision = dict(depth=2, hidden_size=64, intermediate_size=128, num_heads=2, out_hidden_size=64, spatial_merge_size=2, temporal_patch_size=2)
    clip_mean, clip_std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]

    def build(name):
        new = name in ("qwen3_vl", "qwen3_5")
        patch, mean, std = (16, [0.5] * 3, [0.5] * 3) if new else (14, clip_mean, clip_std)
        image = tf.Qwen2VLImageProcessor(patch_size=patch, merge_size=2, temporal_patch_size=2, image_mean=mean, image_std=std)
        kind = tf.Qwen3VLVideoProcessor if new else tf.Qwen2VLVideoProcessor
        video = kind(patch_size=patch, merge_size=2, temporal_patch_size=2, image_mean=mean, image_std=std)
        tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=SPECIAL)
        tokenizer.image_token, tokenizer.video_token, tokenizer.chat_template = "<|image_pad|>", "<|video_pad|>", TEMPLATE
        cls = {"qwen2_vl": tf.Qwen2VLProcessor, "qwen2_5_vl": tf.Qwen2_5_VLProcessor}.get(name, tf.Qwen3VLProcessor)
        processor = cls(image_processor=image, tokenizer=tokenizer, video_processor=video, chat_template=TEMPLATE)
        rope = dict(rope_type="default", rope_theta=10000.0, mrope_section=[6, 5, 5])
        extra = {"qwen2_vl": dict(embed_dim=64, patch_size=14), "qwen2_5_vl": dict(patch_size=14, tokens_per_second=2)}.get(name, dict(patch_size=16))
        if name == "qwen3_vl":
            extra |= dict(deepstack_visual_indexes=[0], num_position_embeddings=256)
        config = {"qwen2_vl": tf.Qwen2VLConfig, "qwen2_5_vl": tf.Qwen2_5_VLConfig, "qwen3_vl": tf.Qwen3VLConfig, "qwen3_5": tf.Qwen3_5Config}[name](
            text_config=text | dict(rope_parameters=rope), vision_config=vision | extra, **ids)
        config.architectures = [{"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "qwen3_5": "Qwen3_5"}[name] + "ForConditionalGeneration"]
        folder = tmp_path_factory.mktemp(name)
        config.save_pretrained(folder)
        processor.save_pretrained(folder)
        return config, processor, str(folder)

    made = {}
    return lambda name: made[name] if name in made else made.setdefault(name, build(name))


FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"]


@pytest.fixture(scope="session")
def mixed(clips, tmp_path_factory):
    """A record with two videos of different rates and an image, marks in the text, and how to load it for a config."""
    root = tmp_path_factory.mktemp("mixed")
    Image.fromarray(np.random.RandomState(1).randint(0, 255, (70, 90, 3), dtype=np.uint8)).save(root / "i.png")
    write_clip(root / "vfr.mp4", 12, times=[0, 100, 250, 900, 1000, 1700, 1800, 2500, 3000, 3100, 4000, 9000])
    return a_record(problem="Look: <image>. Then (<video>) and <video>?", options=["A. x", "B. y"],
                    videos=[str(clips / "pan.mp4"), str(root / "vfr.mp4")], images=[str(root / "i.png")])


def prepared(family_of, record):
    config, processor, folder = family_of
    spec = video_io.media_spec(config, min_pixels=4096, max_pixels=40_000)
    text = video_io.prompt_text(record, video_io.load_prompts(), processor)
    return config, processor, folder, spec, text, video_io.load_media(record, spec)


def hf_inputs(processor, text, media):
    data = video_io.vllm_inputs(text, media).get("multi_modal_data", {})
    named = {}
    if media.videos:
        named |= dict(videos=[c.frames for c in media.videos], do_sample_frames=False, video_metadata=[
            dict(fps=c.fps, frames_indices=list(c.frames_indices), total_num_frames=c.total_num_frames) for c in media.videos])
    if media.images:
        named |= dict(images=[data["image"]])
    return processor(text=[text], return_tensors="pt", **named, **(dict(do_resize=False) if named else {}))


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_and_pixels_equal_transformers(family, mixed, name):
    config, processor, _, _, text, media = prepared(family(name), mixed)
    expected = hf_inputs(processor, text, media)
    ids = video_io.expand_prompt(text, media, processor, config)
    assert expected["input_ids"][0].tolist() == ids
    if name.startswith("qwen3"):  # the released layout: no block around the blocks of the frames
        assert video_io.VISION_TRIPLE not in text and "<|video_pad|>" in text
    mean, std = processor.video_processor.image_mean, processor.video_processor.image_std
    for dtype in (torch.float32, torch.bfloat16):
        got = video_io.model_inputs(ids, media, config, mean, std, "cpu", dtype)
        for key in ("pixel_values_videos", "pixel_values", "video_grid_thw", "image_grid_thw"):
            want = expected[key].to(dtype) if "pixel" in key else expected[key]
            assert torch.equal(got[key], want), key
        assert torch.equal(got["mm_token_type_ids"], expected["mm_token_type_ids"].int())
        assert got["position_ids"].shape == (4, 1, len(ids))


@pytest.mark.parametrize("patch, frames", [(14, 1), (14, 5), (16, 4), (16, 7)])
def test_patches_of_odd_frame_counts_equal_transformers(family, patch, frames):
    _, processor, _ = family("qwen3_vl" if patch == 16 else "qwen2_vl")
    pixels = torch.randint(0, 256, (frames, 3, 4 * patch, 6 * patch), dtype=torch.uint8)
    expected = processor.video_processor(videos=[pixels], do_resize=False, do_sample_frames=False, return_tensors="pt")
    media = Media([Clip(pixels, 1.0, list(range(frames)), frames, 1.0)])
    config = SimpleNamespace(vision_config=SimpleNamespace(patch_size=patch, spatial_merge_size=2, temporal_patch_size=2),
                             image_token_id=1, video_token_id=2, model_type="qwen3_vl")
    got = video_io.model_inputs([0], media, config, processor.video_processor.image_mean, processor.video_processor.image_std, "cpu", torch.float32)
    assert torch.equal(got["pixel_values_videos"], expected["pixel_values_videos"])
    assert torch.equal(got["video_grid_thw"], expected["video_grid_thw"])


def test_text_alone_has_no_media_keys(family):
    config, processor, _, _, text, media = prepared(family("qwen3_vl"), a_record(options=["A. x"]))
    ids = video_io.expand_prompt(text, media, processor, config)
    got = video_io.model_inputs(ids, media, config, [0.5] * 3, [0.5] * 3, "cpu", torch.float32)
    assert set(got) == {"mm_token_type_ids", "position_ids"} and video_io.vllm_inputs(text, media) == {"prompt": text}
    assert torch.equal(got["position_ids"][:, 0], torch.arange(len(ids)).expand(4, -1))


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5"])
def test_positions_equal_the_models_own_function(family, mixed, name):
    import transformers as tf

    config, processor, _, _, text, media = prepared(family(name), mixed)
    ids = video_io.expand_prompt(text, media, processor, config)
    inputs = hf_inputs(processor, text, media)
    owner = {"qwen3_vl": tf.Qwen3VLModel, "qwen3_5": tf.Qwen3_5Model}[name]
    own = SimpleNamespace(config=config)
    own.get_vision_position_ids = owner.get_vision_position_ids.__get__(own)
    expected, _ = owner.get_rope_index(own, inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"], inputs["video_grid_thw"])
    got = video_io.position_ids(ids, media, config)
    assert torch.equal(got[1:], expected[:, 0]) and torch.equal(got[0], torch.arange(len(ids)))


def test_qwen2_positions_follow_the_released_rule_worked_out_by_hand():
    vision = SimpleNamespace(patch_size=14, spatial_merge_size=2, temporal_patch_size=2, tokens_per_second=2)
    # 4 frames at 1 frame per second of 28x56: grid 2x2x4, 2 tokens per merged frame, 2 s or 4 positions apart
    media = Media([Clip(torch.zeros(4, 3, 28, 56, dtype=torch.uint8), 10.0, [0, 10, 20, 30], 40, 4.0)])
    config = SimpleNamespace(vision_config=vision, image_token_id=8, video_token_id=9, model_type="qwen2_5_vl")
    got = video_io.position_ids([5, 9, 9, 9, 9, 6], media, config).tolist()
    assert got == [[0, 1, 2, 3, 4, 5], [0, 1, 1, 5, 5, 6], [0, 1, 1, 1, 1, 6], [0, 1, 2, 1, 2, 6]]
    config.model_type = "qwen2_vl"
    assert video_io.position_ids([5, 9, 9, 9, 9, 6], media, config).tolist()[1] == [0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_and_positions_equal_vllm(family, mixed, name):
    pytest.importorskip("vllm")
    from vllm.config import ModelConfig
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.multimodal.processing import ProcessorInputs, TimingContext

    config, processor, folder, _, text, media = prepared(family(name), mixed)
    model_config = ModelConfig(folder, dtype="float32", max_model_len=4096, limit_mm_per_prompt={"video": 4, "image": 4})
    engine = MULTIMODAL_REGISTRY.create_processor(model_config)
    request = video_io.vllm_inputs(text, media)
    items = engine.info.parse_mm_data(request["multi_modal_data"])
    out = engine.apply(ProcessorInputs(prompt=processor.tokenizer.encode(request["prompt"], add_special_tokens=False), mm_data_items=items,
                                       mm_uuid_items=request["multi_modal_uuids"], hf_processor_mm_kwargs=request["mm_processor_kwargs"]),
                       TimingContext(enabled=False))
    ids = video_io.expand_prompt(text, media, processor, config)
    assert list(out["prompt_token_ids"]) == ids
    architecture, _ = ModelRegistry.resolve_model_cls(config.architectures, model_config)
    features = [MultiModalFeatureSpec(data=data, modality=modality, identifier=str(i), mm_position=place)
                for modality in out["mm_kwargs"]
                for i, (data, place) in enumerate(zip(out["mm_kwargs"][modality], out["mm_placeholders"][modality]))]
    model = object.__new__(architecture)
    object.__setattr__(model, "config", config)
    expected, _ = architecture.get_mrope_input_positions(model, ids, features)
    assert torch.equal(video_io.position_ids(ids, media, config)[1:], expected)


def test_ids_that_must_not_be_sampled(family):
    config, processor, _ = family("qwen3_vl")
    names = processor.tokenizer.convert_ids_to_tokens(video_io.vision_token_ids(config))
    assert set(names) == {"<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"}


def test_a_folder_without_processor_is_one_line(tmp_path, family):
    with pytest.raises(DataError, match="no processor can be loaded"):
        video_io.load_processor(tmp_path)
    for file in Path(family("qwen3_vl")[2]).glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    with pytest.raises(DataError, match=str(tmp_path)) as caught:
        video_io.load_processor(tmp_path)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------- token maths


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_counts_without_decoding_equal_the_real_expansion(family, clips, tmp_path, name):
    config, processor, _ = family(name)
    write_clip(tmp_path / "one.mp4", 1)
    write_clip(tmp_path / "vfr.mp4", 12, times=[0, 100, 250, 900, 1000, 1700, 1800, 2500, 3000, 3100, 4000, 19000])
    write_clip(tmp_path / "turned.mp4", 30, 10, (192, 64), rotate=90)
    write_clip(tmp_path / "av1.mp4", 20, 10, codec="libsvtav1")
    for settings_ in ({}, {"max_pixels": 40_000, "min_pixels": 4096}, {"fps": 5.0, "max_frames": 10}):
        spec = video_io.media_spec(config, **settings_)
        for path in [*clips.glob("*.mp4"), *tmp_path.glob("*.mp4")]:
            for span in ({}, {"start": 0.0, "end": 1.5}):
                probe = video_io.probe({"kind": "video", "path": str(path), **span}, spec)
                media = Media([video_io.decode(str(path), spec, **span)])
                expanded = video_io.expand_prompt("<|video_pad|>", media, processor, config)
                visual, text = video_io.count_tokens(probe, spec, processor.tokenizer)
                assert visual == expanded.count(config.video_token_id), path
                assert visual + text == len(expanded), path


def test_the_budget_is_filled_as_far_as_it_goes(family, clips):
    config, processor, _ = family("qwen3_vl")
    probe = video_io.probe(str(clips / "pan.mp4"))
    full, narrower, fewer = len(video_io.plan(probe, MediaSpec())[0]), 0, 0
    cost = lambda spec, **changes: sum(video_io.count_tokens(probe, video_io.replace(spec, **changes), processor.tokenizer))
    for budget in (2000, 300, 60, 30, 18):
        spec = video_io.fit_budget(budget, probe, MediaSpec(), processor.tokenizer)
        media = Media([video_io.decode(str(clips / "pan.mp4"), spec)])
        assert len(video_io.expand_prompt("<|video_pad|>", media, processor, config)) == cost(spec) <= budget
        if spec.max_pixels < 768 * spec.token:  # one token more per frame would not fit
            narrower += 1
            assert cost(spec, max_pixels=spec.max_pixels + spec.token) > budget
        if spec.nframes < full:  # nor would two frames more, as small as they may be
            fewer += 1
            assert cost(spec, nframes=spec.nframes + 2, max_frames=full, max_pixels=spec.min_pixels) > budget
    assert narrower >= 3 and fewer >= 1
    with pytest.raises(DataError, match="raise the budget"):
        video_io.fit_budget(3, probe, MediaSpec(), processor.tokenizer)


# ---------------------------------------------------------------------------------------------- commands


def run(*args, cwd=None):
    out = subprocess.run([sys.executable, SCRIPT, *map(str, args)], capture_output=True, text=True, cwd=cwd)
    assert "Traceback" not in out.stderr, out.stderr
    return out


def test_probe_names_codec_rotation_rate_and_sample(clips, tmp_path):
    path = write_clip(tmp_path / "r.mp4", 30, times=[i * 100 + (i > 15) * 3000 for i in range(30)], rotate=90)
    out = run("probe", path, clips / "gone.mp4", "--workers", 1, cwd=tmp_path)
    assert out.returncode == 1 and "gone.mp4: does not exist" in out.stdout
    assert "h264 yuv420p, 64x96, 30 frames" in out.stdout and "(variable)" in out.stdout and "rotation" in out.stdout and "visual" in out.stdout


def test_probe_and_check_work_where_pyav_is_missing(clips, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "PathFinder.find_spec = classmethod(lambda cls, name, *rest: None if name == 'av' else find(name, *rest))\n")
    (tmp_path / "broken.mp4").write_bytes(b"no video")
    row = {"problem": "Is it?", "answer": "yes", "problem_type": "boolean"}
    write_jsonl(tmp_path / "d.jsonl", [row | {"videos": [str(clips / "flat.mp4")]}, row | {"videos": ["broken.mp4"]}])
    blocked = dict(os.environ, PYTHONPATH=str(tmp_path))
    gone = subprocess.run([sys.executable, "-c", "import av"], env=blocked, capture_output=True, text=True)
    assert "No module named 'av'" in gone.stderr
    for args, words in ((("probe", clips / "flat.mp4"), "?, 96x64, 60 frames, 30.000 fps, 2.00 s, rotation ?, read by decord"),
                        (("check", "d.jsonl"), "2 records = 1 good + 1 left out")):
        out = subprocess.run([sys.executable, SCRIPT, *map(str, args), "--workers", "1"], env=blocked, cwd=tmp_path, capture_output=True, text=True)
        assert words in out.stdout and "Traceback" not in out.stderr, out


def test_check_drops_what_is_broken_or_over_budget_and_writes_a_clean_copy(clips, hostile):
    row = {"problem": "Is it?", "answer": "yes", "problem_type": "boolean"}
    rows = [row | {"videos": [str(clips / "flat.mp4")], "extra": {"kept": [1]}}, row | {"videos": ["half.mp4"]}, row | {"videos": ["gone.mp4"]},
            row | {"videos": [str(clips / "long.mp4")]}, "{"]
    write_jsonl(hostile / "d.jsonl", rows)
    out = run("check", "d.jsonl", "--max-prompt-length", 1500, "--workers", 1, cwd=hostile)
    assert out.returncode == 1
    assert [line for line in out.stdout.splitlines() if line.startswith("d.jsonl:4:") and "over max_prompt_length 1500" in line]
    assert "5 records = 1 good + 4 left out" in out.stdout
    assert [json.loads(line) for line in (hostile / "d.clean.jsonl").read_text().splitlines()] == rows[:1]
    assert len(video_io.load_records(hostile / "d.clean.jsonl")) == 1


def test_tokens_shows_the_distribution_and_a_setting_that_fits(family, clips, tmp_path):
    rows = [{"problem": "Is it?", "answer": "yes", "problem_type": "boolean", "videos": [str(clips / n)]} for n in ("flat.mp4", "long.mp4")]
    write_jsonl(tmp_path / "d.jsonl", rows)
    out = run("tokens", "d.jsonl", "--model", family("qwen3_vl")[2], "--max-prompt-length", 1200, "--workers", 1, cwd=tmp_path)
    assert out.returncode == 1 and "#" in out.stdout and "cache: 2 clips and images" in out.stdout and "activations" in out.stdout
    fit = out.stdout.split("fits with ")[1].split("\n")[0].split()
    again = run("tokens", "d.jsonl", "--model", family("qwen3_vl")[2], "--max-prompt-length", 1200, "--workers", 1, *fit, cwd=tmp_path)
    assert "2 good + 0 left out" in again.stdout


def test_cache_fills_resumes_and_reports_failures(clips, hostile):
    row = {"problem": "Is it?", "answer": "yes", "problem_type": "boolean"}
    write_jsonl(hostile / "d.jsonl", [row | {"videos": [str(clips / "flat.mp4")]}, row | {"videos": ["half.mp4"]}, row | {"videos": [str(clips / "flat.mp4")]}])
    out = run("cache", "d.jsonl", "--cache-dir", "c", "--workers", 1, cwd=hostile)
    assert out.returncode == 1 and "2 files = 1 in c" in out.stdout and "+ 1 failed" in out.stdout
    assert "half.mp4" in (hostile / "bad_videos.jsonl").read_text()
    entry, = (hostile / "c").glob("*/*.safetensors")
    written = entry.stat().st_ino
    run("cache", "d.jsonl", "--cache-dir", "c", "--workers", 1, cwd=hostile)
    assert entry.stat().st_ino == written  # not decoded again
    loaded = video_io.load_media(record_of(clips / "flat.mp4"), MediaSpec(), hostile / "c", "cache_only")
    assert torch.equal(loaded.videos[0].frames, video_io.decode(str(clips / "flat.mp4"), MediaSpec()).frames)


def test_clip_cuts_by_name_and_by_field_frame_exactly(clips, tmp_path):
    shutil.copy(clips / "long.mp4", tmp_path / "ab_c.mp4")  # 25 fps
    rows = [{"path": "7_ab_c_s2.0_e4.0.mp4"}, {"path": "ab_c_1.000_3.500.mp4"}, {"video": "ab_c.mp4", "start": 5, "end": 6.0}, {"video": "ab_c.mp4"}]
    write_jsonl(tmp_path / "d.jsonl", rows)
    out = run("clip", "d.jsonl", "out", "--workers", 1, cwd=tmp_path)
    assert out.returncode == 1 and "d.jsonl:4: names no segment" in out.stdout
    for name, first, count in (("7_ab_c_s2.0_e4.0.mp4", 50, 51), ("ab_c_1.000_3.500.mp4", 25, 63), ("ab_c_5.000_6.000.mp4", 125, 26)):
        probe = video_io.probe(str(tmp_path / "out" / name))
        assert len(probe["times"]) == count and probe["fps"] == pytest.approx(25, abs=0.1)
        got = video_io.decode(str(tmp_path / "out" / name), SMALL)
        want = video_io.decode(str(tmp_path / "ab_c.mp4"), SMALL, first / 25, (first + count - 1) / 25)
        assert got.frames_indices == want.frames_indices and (got.frames.float() - want.frames.float()).abs().mean() < 2
    stamp = (tmp_path / "out" / rows[0]["path"]).stat().st_mtime_ns
    out = run("clip", "d.jsonl", "out", "--workers", 1, cwd=tmp_path)
    assert "3 records had theirs" in out.stdout and (tmp_path / "out" / rows[0]["path"]).stat().st_mtime_ns == stamp
    run("clip", "d.jsonl", "copied", "--copy", "--workers", 1, cwd=tmp_path)
    assert len(list((tmp_path / "copied").iterdir())) == 3
    assert len(video_io.decode(str(tmp_path / "copied" / rows[0]["path"]), SMALL).frames) >= 4


@pytest.mark.parametrize("command, extra", [("cache", ["--cache-dir", "c"]), ("check", []), ("clip", ["out"])])
def test_ctrl_c_stops_a_command_at_once_without_half_files_or_orphans(clips, wild_decord, command, extra):
    shutil.copy(clips / "long.mp4", wild_decord / "hang.mp4")
    row = {"problem": "Is it?", "answer": "yes", "problem_type": "boolean", "video": "hang.mp4", "start": 1, "end": 2}
    write_jsonl(wild_decord / "d.jsonl", [row])
    command = subprocess.Popen([sys.executable, SCRIPT, command, "d.jsonl", *extra, "--workers", "2"], cwd=wild_decord,
                               stderr=subprocess.PIPE, text=True)
    until((wild_decord / "reached").exists)
    workers = children(command.pid)
    command.send_signal(signal.SIGINT)
    _, errors = command.communicate()
    assert command.returncode == 130 and "goes on from here" in errors and "Traceback" not in errors
    assert workers and not [pid for pid in workers if os.path.exists(f"/proc/{pid}")]
    left = {file.name for file in wild_decord.rglob("*") if file.is_file()}
    assert left <= {"decord.py", "decord.cpython-311.pyc", "reached", "d.jsonl", "hang.mp4"} | {
        file for file in left if file.endswith(".pyc")}


def test_bad_input_to_a_command_is_one_line_and_exit_code_2(tmp_path):
    for args in (("tokens", "gone.jsonl"), ("check", "gone.jsonl"), ("cache", "gone.jsonl", "--cache-dir", "c"), ("clip", "gone.jsonl", "o")):
        out = run(*args, cwd=tmp_path)
        assert out.returncode == 2 and len(out.stderr.strip().splitlines()) == 1 and "gone.jsonl" in out.stderr
    (tmp_path / "file").touch()
    write_jsonl(tmp_path / "d.jsonl", [{"problem": "Is it?", "answer": "yes", "problem_type": "boolean", "path": "file",
                                        "start": 0, "end": 1}])
    for args in (("cache", "--cache-dir", "file/c"), ("check", "--bad-file", "file/bad.jsonl"), ("clip", "file/out")):
        out = run(args[0], "d.jsonl", *args[1:], "--workers", 1, cwd=tmp_path)
        assert out.returncode == 2 and "file" in out.stderr.splitlines()[-1], out.stderr
    out = run("tokens", "d.jsonl", "--min-frames", 8, "--max-frames", 4, cwd=tmp_path)
    assert out.returncode == 2 and "min_frames 8" in out.stderr and "max_frames 4" in out.stderr
