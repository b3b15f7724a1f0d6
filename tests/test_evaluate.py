"""evaluate.py by its command, on the toy's held-out records, with real vLLM."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

import evaluate
import video_io
from toy import MEDIA, processor_inputs

ROOT = Path(__file__).resolve().parent.parent
TRAINED_WITH = dict(MEDIA, prompt_form="direct", max_prompt_length=512, max_response_length=24)


def command(*args):
    words = [sys.executable, str(ROOT / "evaluate.py"), "run", "--decode-workers", "1", "--batch", "16"]
    return subprocess.run([*words, *map(str, args)], capture_output=True, text=True)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def data(toy, tmp_path_factory):
    """A model folder with its training settings, and a file of 24 good records, one of a clip that is no
    video and one of a clip that is cut short."""
    folder = tmp_path_factory.mktemp("evaluate")
    shutil.copytree(toy / "model", folder / "model")
    (folder / "model/nanovideor1.json").write_text(json.dumps(TRAINED_WITH))
    rows = read(toy / "val.jsonl")[:24]
    clip = next(row for row in rows if row.get("videos"))
    for row in rows:
        for media in ("videos", "images"):
            row.update({media: [str(toy / path) for path in row[media]]} if media in row else {})
    (folder / "text.mp4").write_text("this is no video")
    good = Path(clip["videos"][0])
    (folder / "short.mp4").write_bytes(good.read_bytes()[: good.stat().st_size // 3])
    rows[5:5] = [dict(clip, videos=[str(folder / name)]) for name in ("text.mp4", "short.mp4")]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def evaluated(data):
    done = command("--model", data / "model", "--data", data / "data.jsonl", "--out", data / "out")
    assert done.returncode == 0, done.stderr
    return done, json.loads((data / "out/result.json").read_text()), read(data / "out/samples.jsonl")


def test_every_record_has_one_line_and_broken_clips_count_as_wrong(data, evaluated):
    done, result, rows = evaluated
    records = video_io.load_records(data / "data.jsonl")
    assert sorted(row["key"] for row in rows) == sorted(record["key"] for record in records)
    failed = [row for row in rows if row["status"] == "failed"]
    assert {Path(row["videos"][0]).name for row in failed} == {"text.mp4", "short.mp4"}
    assert all(row["accuracy"] == 0 and "mp4" in row["reason"] for row in failed)
    assert (result["n_ok"], result["n_failed"], result["n_total"]) == (24, 2, 26)
    assert "n_ok 24 + n_failed 2 = n_total 26" in done.stdout


def test_accuracies_are_means_over_all_records_of_a_kind(evaluated):
    done, result, rows = evaluated
    for field in ("problem_type", "data_source"):
        assert set(result[field]) == {row[field] for row in rows}
        for name, measured in result[field].items():
            scores = [row["accuracy"] for row in rows if row[field] == name]
            assert measured["n"] == len(scores)
            assert measured["accuracy"] == pytest.approx(sum(scores) / len(scores))
            assert name in done.stdout
    assert result["all"]["accuracy"] == pytest.approx(sum(row["accuracy"] for row in rows) / 26)


def test_answers_are_those_of_transformers_greedy_generation(data, evaluated):
    processor, prompts = video_io.load_processor(data / "model"), video_io.load_prompts()
    model = AutoModelForImageTextToText.from_pretrained(data / "model", dtype=torch.float32)
    spec = video_io.media_spec(model.config, **MEDIA)
    rows = {row["key"]: row for row in evaluated[2] if row["status"] != "failed"}
    records = [record for record in video_io.load_records(data / "data.jsonl") if record["key"] in rows]
    for record in records[:12]:
        inputs = processor_inputs(processor, [record], prompts, spec)
        start = inputs["input_ids"].shape[1]
        assert start == rows[record["key"]]["prompt_tokens"]
        banned = [[token] for token in video_io.vision_token_ids(model.config)]
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=24, bad_words_ids=banned)[0, start:]
        assert processor.tokenizer.decode(ids, skip_special_tokens=True) == rows[record["key"]]["response"]


def test_training_settings_of_the_model_folder_are_the_defaults_and_flags_win(data):
    none = dict.fromkeys(evaluate.SETTINGS)
    settings = evaluate.resolve_settings(data / "model", none)
    assert (settings["max_frames"], settings["prompt_form"], settings["max_tokens"]) == (8, "direct", 24)
    assert settings["total_pixels"] == 0  # what training did not say keeps its default
    assert evaluate.resolve_settings(data / "model", none | {"max_frames": 4})["max_frames"] == 4
    assert evaluate.resolve_settings(data, none) == evaluate.SETTINGS  # no such file


def test_an_interrupted_run_goes_on_and_answers_nothing_twice(data, evaluated, tmp_path):
    before = evaluated[2]
    shutil.copytree(data / "out", tmp_path / "out")
    samples = tmp_path / "out/samples.jsonl"
    lines = samples.read_text().splitlines(keepends=True)
    kept = lines[:3] + lines[10:14]  # what is missing is found by key, not by count
    samples.write_text("".join(kept) + lines[20][:40])  # and the last line was being written
    done = command("--model", data / "model", "--data", data / "data.jsonl", "--out", tmp_path / "out")
    assert done.returncode == 0 and "7 of 26 samples" in done.stdout
    assert samples.read_text().startswith("".join(kept))
    assert answers(read(samples)) == answers(before)


def answers(rows):
    return sorted((row["key"], row["response"] or "") for row in rows)


def refused(monkeypatch, capsys, *args):
    """What the command says of input that it refuses."""
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "run", *map(str, args)])
    monkeypatch.setattr(evaluate.rollout, "Engine", None)  # must not be reached
    with pytest.raises(SystemExit) as ended:
        evaluate.main()
    said = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and len(said) == 1
    return said[0]


def test_a_folder_never_mixes_answers_of_two_settings(data, evaluated, monkeypatch, capsys):
    line = refused(monkeypatch, capsys, "--model", data / "model", "--data", data / "data.jsonl",
                   "--out", data / "out", "--fps", "1")
    assert "other settings" in line and "--out" in line
    assert read(data / "out/samples.jsonl") == evaluated[2]


def test_bad_input_ends_with_one_line_before_any_model_is_loaded(data, tmp_path, monkeypatch, capsys):
    row = dict(problem="What?", answer="not a number", problem_type="numerical")
    (tmp_path / "bad.jsonl").write_text(json.dumps(row) + "\n")
    for model, file, named in [(tmp_path, data / "data.jsonl", str(tmp_path)),
                               (data / "model", tmp_path / "none.jsonl", "none.jsonl"),
                               (data / "model", tmp_path / "bad.jsonl", "bad.jsonl:1")]:
        line = refused(monkeypatch, capsys, "--model", model, "--data", file, "--out", tmp_path / "out")
        assert named in line and not (tmp_path / "out").exists()
