"""The toy is fair: reproducible, at chance before training, no direction to be read off one frame."""

import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

import toy as toys
import video_io

SPEC = video_io.MediaSpec(**toys.MEDIA)


def test_the_same_seed_writes_the_same_bytes_and_another_seed_others(tmp_path):
    written = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        (tmp_path / name / "clips").mkdir(parents=True)
        (tmp_path / name / "images").mkdir()
        toys.make_split(tmp_path / name, "train", 10, seed)
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        written.append({path.relative_to(tmp_path / name): path.read_bytes() for path in files})
    assert written[0] == written[1] and written[0].keys() == written[2].keys()
    assert all(written[0][path] != written[2][path] for path in written[0] if path.suffix == ".mp4")


def test_a_shape_is_everywhere_equally_often_whatever_its_direction():
    """First, middle and last frame: the mean brightness at every place over many clips is the same for all
    directions, within the noise of the sample.  A start in the middle or at a border would show."""
    means = {}
    for direction in toys.DIRECTIONS:
        clips = []
        for seed in range(150):
            frames, _, _ = toys.clip_frames("move", np.random.default_rng([seed, 1]), "yellow", direction)
            step = frames.shape[1] // 64
            small = frames[[0, len(frames) // 2, -1], ::step, ::step, 0][:, :64, :64]
            clips.append(small.reshape(3, 4, 16, 4, 16).mean((2, 4)))  # (3, 4, 4) places
        means[direction] = np.mean(clips, 0), np.std(clips, 0) / len(clips) ** 0.5
    for direction, (mean, error) in means.items():
        other, other_error = means["left"]
        assert np.abs((mean - other) / np.hypot(error, other_error)).max() < 4.5, direction


def test_motion_is_to_be_seen_in_the_sampled_frames(toy):
    """The oracle finds most directions: the shift by which two neighbouring frames match best."""
    records = [r for r in video_io.load_records(toy / "train.jsonl") if r["data_source"] == "toy-direction"]
    steps = {letter: toys.DIRECTIONS[name] for letter, name in toys.OPTIONS["toy-direction"].items()}
    right = 0
    for record in records:
        frames = video_io.load_media(record, SPEC).videos[0].frames.float().mean(1)  # (8, 64, 64)
        gaps = {letter: (frames[:-1].roll((6 * y, 6 * x), (1, 2)) - frames[1:]).abs().mean()
                for letter, (x, y) in steps.items()}
        right += min(gaps, key=gaps.get) == record["answer"]
    assert right / len(records) > 0.9


@pytest.mark.parametrize("source", toys.TASKS)
def test_the_untrained_model_chooses_evenly_among_the_valid_answers(toy, source):
    records = [r for r in video_io.load_records(toy / "train.jsonl") if r["data_source"] == source][:8]
    processor, prompts = video_io.load_processor(toy / "model"), video_io.load_prompts()
    model = AutoModelForImageTextToText.from_pretrained(toy / "model", dtype=torch.float32)
    inputs = toys.processor_inputs(processor, records, prompts, SPEC)
    torch.manual_seed(0)
    start = inputs["input_ids"].shape[1]
    ids = model.generate(**inputs, do_sample=True, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=24,
                         num_return_sequences=16)[:, start:]
    texts = processor.batch_decode(ids, skip_special_tokens=True)
    valid = {f"<answer>{answer}</answer>" for record in records for answer in toys.valid_answers(record)}
    formed = [text for text in texts if re.fullmatch(r"<answer>[^<]+</answer>", text)]
    assert len(formed) >= 0.9 * len(texts)
    shares = [formed.count(answer) / len(formed) for answer in valid]
    # Some intervals end before they begin: the warm start is short, and these answers are the longest.
    assert sum(shares) > (0.6 if source == "toy-appear" else 0.9)
    assert max(shares) < 2.5 / len(valid) + 0.05
