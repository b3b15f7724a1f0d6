"""evaluate.py: metrics against NumPy and numbers worked out by hand; its commands on the toy, with vLLM."""

import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForImageTextToText

import evaluate
import rollout
import video_io
from toy import MEDIA, processor_inputs

ROOT = Path(__file__).resolve().parent.parent
TRAINED_WITH = dict(MEDIA, prompt_form="direct", max_prompt_length=512, max_response_length=24)
SMALL = [f"--{name.replace('_', '-')}={value}" for name, value in dict(MEDIA, max_frames=8).items()]
SMALL += ["--prompt-form=direct", "--max-prompt-length=1024", "--max-tokens=24", "--decode-workers=1"]


def command(*args):
    words = [sys.executable, str(ROOT / "evaluate.py"), *map(str, args)]
    return subprocess.run(words, capture_output=True, text=True)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---------------------------------------------------------------- metrics


def row(accuracy, clip="c", status="ok", **fields):
    return dict(accuracy=accuracy, clip=clip, status=status, response="", response_tokens=1) | fields


def measured(rows, *spec):
    return evaluate.measure(evaluate.units_of(evaluate.draws(rows), list(spec)))


def test_the_interval_of_a_mean_is_that_of_the_clustered_standard_error():
    random.seed(1)
    rows = [row(random.random(), clip=f"c{random.randrange(7)}") for _ in range(60)]
    x, c = np.array([r["accuracy"] for r in rows]), np.array([r["clip"] for r in rows])
    sums = np.array([(x - x.mean())[c == name].sum() for name in np.unique(c)])
    error = np.sqrt((sums**2).sum() * 7 / 6) / 60
    m = measured(rows, "accuracy")
    assert m["score"] == pytest.approx(x.mean()) and (m["n"], m["clips"]) == (60, 7)
    assert m["interval"] == pytest.approx([x.mean() - 1.96 * error, x.mean() + 1.96 * error])
    alone = measured(
        [dict(r, clip=str(i)) for i, r in enumerate(rows)], "accuracy"
    )  # every record its own clip
    assert alone["interval"][1] - alone["score"] == pytest.approx(1.96 * x.std(ddof=1) / np.sqrt(60))
    assert measured(rows[:1], "accuracy")["interval"] is None and measured([], "accuracy") is None


def test_macro_averages_weigh_branches_alike_at_every_level():
    rows = [
        row(a, clip=str(i), ovo_category=c, ovo_task=t)
        for i, (a, c, t) in enumerate(
            [
                (1, "backward", "EPM"),
                (0, "backward", "EPM"),
                (1, "backward", "ASI"),
                (0, "realtime", "OCR"),
                (1, "realtime", "OCR"),
                (1, "realtime", "OCR"),
                (1, "realtime", "OCR"),
                (0, "forward", "REC"),
            ]
        )
    ]
    backward, realtime, forward = (0.5 + 1) / 2, 0.75, 0
    m = measured(rows, "accuracy", {"over": ["ovo_category", "ovo_task"]})
    assert m["score"] == pytest.approx((backward + realtime + forward) / 3)
    # tasks stay, clips are drawn: the variance is the sum of those of the branch means
    error = np.array([0.5, -0.5]) / 2 / 2 / 3, np.array([-0.75, 0.25, 0.25, 0.25]) / 4 / 3
    half = 1.96 * np.sqrt((np.concatenate(error) ** 2).sum() * 8 / 7)
    assert m["interval"][1] - m["score"] == pytest.approx(half)


def test_vsi_bench_averages_the_levels_of_a_direction_before_the_eight_tasks():
    book = evaluate.load_benchmarks()["benchmarks"]["vsibench"]
    rows = [
        row(a, clip=str(i), original_question_type=t, problem_type=p)
        for i, (a, t, p) in enumerate(
            [
                (1.0, "object_rel_direction_easy", "multiple choice"),
                (1.0, "object_rel_direction_easy", "multiple choice"),
                (0.0, "object_rel_direction_hard", "multiple choice"),
                (0.3, "object_counting", "regression"),
            ]
        )
    ]
    for r in rows:
        r["task"] = re.search(book["fields"]["task"][0][1], r["original_question_type"])[0]
    result = evaluate.summarize(rows, book)
    assert result["metric"] == "mean of 8 tasks" and result["score"] == pytest.approx((0.5 + 0.3) / 2)
    assert result["metrics"]["MRA"]["score"] == pytest.approx(0.3)
    assert result["metrics"]["multiple choice"]["score"] == pytest.approx(2 / 3)


def test_recall_at_an_iou_and_groups_that_count_only_as_a_whole():
    rows = [row(a) for a in (0.0, 0.3, 0.5, 0.7, 1.0)]
    assert [measured(rows, "accuracy", at)["score"] for at in (0.3, 0.5, 0.7)] == pytest.approx([0.8, 0.6, 0.4])
    rows = [
        row(a, problem_id=p, mbinary_id=m)
        for p, m, a in [
            (1, None, 1),
            (1, 1, 1),
            (1, 2, 1),
            (1, 3, 1),
            (1, 4, 1),
            (2, None, 1),
            (2, 1, 1),
            (2, 2, 0),
            (2, 3, 1),
            (2, 4, 1),
        ]
    ]
    metrics = evaluate.load_benchmarks()["benchmarks"]["videomathqa"]["metrics"]
    assert measured(rows, *metrics["MCQ"])["score"] == 1
    assert measured(rows, *metrics["MBin"])["score"] == 0.5 and measured(rows, *metrics["MBin"])["n"] == 2


@pytest.mark.parametrize(
    "kind, structure, right, value",
    [
        ("relevance", None, "1010", 0.25),
        ("relevance", None, "0111", 9 / 16),
        ("relevance", None, "1111", 1),
        ("logic", "[1, 2, 3, 4]", "1101", 0.25),
        ("logic", "[1, 2, 3, 4]", "0111", 0),
        ("logic", None, "1111", 1),
        ("logic", "[1,[2,3],4]", "1000", 1 / 12),
        ("logic", "[1,[2,3],4]", "1011", 1 / 3),
        ("logic", "[1,[2,3],4]", "1110", 7 / 12),
        ("logic", "[1,[2,3],4]", "1111", 1),
        ("logic", "[[1,2],3,4]", "0111", 0.1),
        ("logic", "[[1,2],3,4]", "1101", 0.2),
        ("logic", "[[1,2],3,4]", "1110", 0.5),
        ("logic", "[[1,2],3,4]", "1111", 1),
    ],
)
def test_grouped_score_of_video_mme_v2(kind, structure, right, value):
    rows = [
        row(int(a), video_id="1", question_id=f"001-{i}", group_type=kind, group_structure=structure)
        for i, a in enumerate(right, 1)
    ]
    random.Random(0).shuffle(rows)
    assert measured(rows, "grouped_score")["score"] == pytest.approx(value)


def test_counts_tubes_and_knowledge_gain():
    rows = [
        row(0, answer=str(g), response=f"<answer>{p}</answer>")
        for g, p in [(4, 5), (4, 6), (40, 43), (40, 44), (3, "no idea")]
    ]
    assert [u[0] for u in evaluate.units_of(rows, ["close_count"])] == [1, 0, 1, 0, 0]
    gold = {"time": [0, 4], "boxes": {"1": [0, 0, 10, 10], "2": [0, 0, 10, 10]}}
    said = {"time": [2, 4], "boxes": {"2.0": [0, 0, 10, 5], "3": [0, 0, 10, 10]}}
    one = row(
        0, problem_type="spatial-temporal grounding", answer=json.dumps(gold), response=json.dumps(said)
    )
    none = dict(one, response="I cannot tell")
    unboxed = dict(one, answer=json.dumps({"time": [0, 4], "boxes": {}}))
    assert measured([one], "tube", "tIoU")["score"] == pytest.approx(0.5)
    assert measured([one], "tube", "sIoU")["score"] == pytest.approx(0.5)  # second 2 is in both
    assert measured([one], "tube", "stIoU")["score"] == pytest.approx(0.5 / 3)  # of seconds 1, 2, 3
    assert measured([one, none, unboxed], "tube", "sIoU")["score"] == pytest.approx(0.25)
    assert measured([one, none, unboxed], "tube", "tIoU", 0.5)["score"] == pytest.approx(2 / 3)
    scaled = dict(
        one,
        box_space="pixels",
        width=500,
        height=250,
        response=json.dumps({"time": [0, 4], "boxes": {"1": [0, 0, 20, 40], "2": [0, 0, 20, 40]}}),
    )
    assert measured([scaled], "tube", "stIoU")["score"] == pytest.approx(1)
    tracks = [
        row(a, track=t)
        for a, t in [
            (1, "Adaptation"),
            (1, "Adaptation"),
            (0, "Adaptation"),
            (1, "question_only"),
            (0, "question_only"),
            (0, "question_only"),
        ]
    ]
    assert measured(tracks, "knowledge_gain")["score"] == pytest.approx((2 / 3 - 1 / 3) / (1 - 1 / 3))
    assert measured(tracks[:3], "knowledge_gain") is None


@pytest.mark.parametrize(
    "name, kind, gold, options, response, right",
    [
        ("videomme", "multiple choice", "B", 4, "<think>A, A</think>The best answer is B", True),
        ("videomme", "multiple choice", "A", 4, "Answer: C because of A", False),
        ("videomme", "multiple choice", "A", 4, "A man walks", True),
        ("videomme", "multiple choice", "A", 4, "", False),
        ("ovobench", "multiple choice", "D", 4, "It is Clear: D", True),
        ("ovobench", "multiple choice", "A", 4, "it is b", False),
        ("ovobench", "rec", "12", 0, "1 and 2", True),
        ("ovobench", "rec", "12", 0, "12 or 3", False),
        ("ovobench", "crr", "No", 0, "No, wait", True),
        ("ovobench", "crr", "Yes", 0, "Y", True),
        ("ovobench", "crr", "No", 0, "I cannot know", False),
        ("mlvu", "multiple choice", "C", 4, "C) a dog", True),
        ("mlvu", "multiple choice", "C", 4, "(B) C)", False),
    ],
)
def test_looser_official_scorers(name, kind, gold, options, response, right):
    pattern = evaluate.load_benchmarks()["benchmarks"][name]["official"]
    one = row(0, problem_type=kind, answer=gold, options=["x"] * options, response=response)
    assert measured([one], "official", pattern)["score"] == right


def test_several_answers_give_mean_pass_at_k_and_majority():
    samples = [[(1, "A"), (0, "B"), (0, "B"), (0, None)], [(1, "C"), (1, "C"), (0, "D"), (0, "D")]]
    rows = [
        row(
            sum(a for a, _ in s) / 4,
            clip=str(i),
            problem_type="multiple choice",
            samples=[
                dict(accuracy=a, prediction=p, status="ok", response="", response_tokens=2) for a, p in s
            ],
        )
        for i, s in enumerate(samples)
    ]
    bench = evaluate.load_benchmarks()["benchmarks"]["lvbench"] | {"by": ["problem_type"]}
    result = evaluate.summarize(rows, bench)
    assert result["score"] == pytest.approx(3 / 8) and result["output_tokens"] == 16
    part = result["by"]["problem_type"]["multiple choice"]  # of eight answers to two records
    assert (part["n"], part["n_expected"], part["score"]) == (8, 2, pytest.approx(3 / 8))
    assert result["metrics"]["pass@1"]["score"] == pytest.approx(3 / 8)
    every = [np.mean([max(x[0] for x in pick) for pick in itertools.combinations(s, 2)]) for s in samples]
    assert result["metrics"]["pass@2"]["score"] == pytest.approx(
        np.mean(every)
    )  # pass@k: mean over all choices
    assert result["metrics"]["pass@4"]["score"] == 1 and "pass@8" not in result["metrics"]
    assert result["metrics"]["majority"]["score"] == pytest.approx(
        (0 + 1) / 2
    )  # B has most votes; C is earliest
    assert result["n_expected"] == result["n_scored"] == 2


def test_mcnemar_and_bootstrap():
    flips = [(0, 0), (1, 0), (3, 9), (7, 7), (2, 11)]
    for b, c in flips:
        tail = sum(math.comb(b + c, i) for i in range(b + c + 1) if i <= min(b, c)) / 2 ** (b + c)
        assert evaluate.mcnemar(b, c) == evaluate.mcnemar(c, b) == pytest.approx(min(1, 2 * tail))
    assert evaluate.mcnemar(2, 11) == pytest.approx(0.0224609375)  # of 13 coins at most two heads, or tails
    units = [(x, (), str(i // 3)) for i, x in enumerate(np.random.default_rng(0).normal(0.1, 1, 90))]
    x = np.array([u[0] for u in units]).reshape(30, 3)  # clips of one size: resampling is exact
    scores, rng = evaluate.bootstrap(units, 4000, seed=5), np.random.default_rng(5)
    counts = rng.multinomial(30, np.full(30, 1 / 30), 4000)
    assert scores == pytest.approx(counts @ x.sum(1) / 90)
    assert scores.std() == pytest.approx(x.mean(1).std() / np.sqrt(30), rel=0.05)
    assert (evaluate.bootstrap(units) == evaluate.bootstrap(units)).all()


# ---------------------------------------------------------------- benchmarks as data

NAMES = """
holmes lvbench longvideobench mmvu mmvu-all mvbench tempcompass vsibench videommmu mlvu mlvu-test
mlvu-dev videomme videomathqa vcrbench videoreasonbench longvideoreason minerva stvg charades_sta
motionbench video_count_eval ovobench odvbench livesports3k_qa videomme-v2 videommlu
""".split()


def test_all_benchmarks_are_there_with_metrics_that_exist():
    book = evaluate.load_benchmarks()
    assert set(book["benchmarks"]) == set(NAMES) and set(book["presets"]) == {"easyvideor1", "qwen"}
    for name, bench in book["benchmarks"].items():
        assert bench["json"] and bench["video"], name
        for metric, *_ in bench.get("metrics", {}).values():
            assert metric in evaluate.METRICS
        for source, scores in bench.get("published", {}).items():
            assert source in book["sources"] and all(0 < score < 100 for score in scores.values())
        for rules in bench.get("fields", {}).values():
            assert isinstance(rules, str) or all(re.compile(pattern) for _, pattern, *_ in rules)
        settings = evaluate.resolve_settings("", {}, bench, book["presets"]["qwen"] | bench.get("qwen", {}))
        assert settings["max_frames"] == 2048 and set(settings) == set(evaluate.SETTINGS)
        assert settings["max_prompt_length"] + settings["max_tokens"] <= 262144  # Qwen3-VL's context


def test_every_setting_that_answers_depend_on_is_a_flag_of_run_and_check():
    commands = video_io.read_yaml(ROOT / "configs/evaluate.yaml")["commands"]
    for name in ("run", "check"):
        flags = {flag.strip("-").replace("-", "_") for flag in commands[name]["flags"]}
        assert set(evaluate.SETTINGS) <= flags
    assert set(commands) == set(evaluate.COMMANDS)


LETTERS = ["A. one", "B. two", "C. three", "D. four"]
LAYOUTS = {  # name: (file, records, what goes with them); media paths as the benchmarks write them
    "videomme": (
        "videomme.json",
        [
            dict(
                video_id="001",
                duration="short",
                domain="Knowledge",
                task_type="Counting",
                question="How many?",
                path=f"./videos/{c}.mp4",
                options=LETTERS,
                answer="C",
                problem_type="multiple choice",
                solution="<answer>C</answer>",
                data_type="video",
            )
            for c in ("x", "x", "y")
        ],
    ),
    "charades_sta": (
        "charades_sta.json",
        [
            dict(
                problem_type="temporal grounding",
                path="z.mp4",
                problem="When?",
                options=[],
                data_type="video",
                solution='<think>{"time": [0.2, 1.5], "boxes": {}}</think><[PLHD21_never_used_51]>',
            )
        ],
    ),
    "mvbench": (
        "mvbench.json",
        [
            dict(
                video="a.webm",
                question="What next?",
                options=LETTERS,
                answer="(text)",
                problem_type="multiple choice",
                data_type="video",
                solution="<answer>B</answer>",
                path="./sta/sta_video/a.mp4",
                start=0.2,
                end=0.8,
            )
        ],
    ),
    "longvideoreason": (
        "longvideoreason.json",
        [
            dict(
                problem_type="multiple choice",
                path="./l.mp4",
                problem="Why?",
                options=["rain", "sun", "rain"],
                data_type="video",
                solution="<answer>B</answer>",
            )
        ],
    ),
    "stvg": (
        "stvg.json",
        [
            dict(
                problem_type="spatial-temporal grounding",
                path="s.mp4",
                problem="Where?",
                data_type="video",
                solution='<answer>{"time": [0.0, 1.0], "boxes": {"0": [4, 4, 40, 40]}}</answer>',
            )
        ],
    ),
    "ovobench": (
        "ovobench.json",
        [
            dict(
                data_type="video",
                problem_type=kind,
                problem="Now?",
                options=["A: x", "B: y"] if task == "EPM" else [],
                path="0.mp4",
                solution=f"<answer>{gold}</answer>",
                ovo_task=task,
                ovo_category=category,
            )
            for kind, task, category, gold in [
                ("multiple choice", "EPM", "backward", "B"),
                ("REC", "REC", "forward", "3"),
                ("SSR", "SSR", "forward", "No"),
            ]
        ],
    ),
    "videommmu": (
        "videommmu_with_image.json",
        [
            dict(
                problem="Solve",
                problem_type="numerical",
                options=None,
                solution="<answer>12.97</answer>",
                data_type="video",
                path="./validation_Chemistry_13.mp4",
                image_path="./images/validation_Chemistry_13.png",
            )
        ],
    ),
    "videomathqa": (
        "videomathqa.jsonl",
        [
            dict(
                problem_id="q1",
                problem="How many?",
                data_type="video",
                problem_type="multiple choice",
                options=["A. 1", "B. 2"],
                solution="<answer>B</answer>",
                path="./videos/m.mp4",
                category="Counting",
                length="long",
                **extra,
            )
            for extra in ({}, {"mbinary_id": 1}, {"mbinary_id": 2})
        ],
    ),
    "video_count_eval": (
        "video_count_eval.json",
        [
            dict(
                video_id="n",
                question="How many dogs?",
                count=4,
                category="animal",
                clip_start=0.0,
                clip_end=1.0,
            )
        ],
    ),
}


@pytest.fixture(scope="module")
def benches(toy, tmp_path_factory):
    """A data root in which each benchmark above has its annotation file and clips at the right paths."""
    root, clips = tmp_path_factory.mktemp("benchmarks"), itertools.cycle(sorted((toy / "clips").iterdir()))
    (root / "valid_data").mkdir()
    for name, (file, rows) in LAYOUTS.items():
        text = "\n".join(map(json.dumps, rows)) if file.endswith("jsonl") else json.dumps(rows)
        (root / "valid_data" / file).write_text(text)
        folder = root / evaluate.load_benchmarks()["benchmarks"][name]["video"]
        for one in rows:
            target = folder / one.get("path", "n.mp4")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(next(clips), target)
            if "image_path" in one:
                (folder / "images").mkdir()
                shutil.copy(next((toy / "images").iterdir()), folder / one["image_path"])
    return root


@pytest.fixture(scope="module")
def benched(toy, benches):
    (benches / "own.json").write_text(
        json.dumps({"mybench": {"json": "valid_data/videomme.json", "video": "Video-MME"}})
    )
    done = command(
        "run",
        "--model",
        toy / "model",
        "--data",
        *LAYOUTS,
        "mybench",
        "--data-root",
        benches,
        "--dataset-config",
        benches / "own.json",
        "--out",
        benches / "out",
        *SMALL,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return benches / "out", done.stdout


def test_every_layout_is_read_and_scored_by_its_own_metrics(benched):
    out, printed = benched
    names = [f"{name}_f8_fps4.0_mp4k_tp32768k" for name in [*LAYOUTS, "mybench"]]
    assert sorted(p.name for p in out.iterdir()) == sorted(names)
    result = {
        name: json.loads((out / folder / "result.json").read_text())
        for name, folder in zip([*LAYOUTS, "mybench"], names)
    }
    for name, (_, rows) in LAYOUTS.items():
        assert result[name]["n_expected"] == result[name]["n_scored"] == len(rows), name
        assert name in printed
    assert set(result["charades_sta"]["metrics"]) == {"mIoU", "R1@0.3", "R1@0.5", "R1@0.7"}
    assert result["charades_sta"]["odd_records"] == {"answer tags lost": 1}
    assert result["longvideoreason"]["odd_records"] == {
        "options without letters": 1,
        "letters out of order": 1,
        "options alike": 1,
    }
    assert (
        set(result["ovobench"]["by"]["ovo_task"]) == {"EPM", "REC", "SSR"}
        and "official" in result["ovobench"]["metrics"]
    )
    assert result["videomathqa"]["metrics"]["MCQ"]["n"] == result["videomathqa"]["metrics"]["MBin"]["n"] == 1
    assert set(result["videommmu"]["by"]["track"]) == {"Adaptation"}
    assert "m_stIoU" in result["stvg"]["metrics"]
    row_of = lambda name: read(out / names[[*LAYOUTS, "mybench"].index(name)] / "samples.jsonl")[0]
    assert (row_of("mvbench")["video_start"], row_of("mvbench")["video_end"]) == (0.2, 0.8)
    assert row_of("stvg")["box_space"] == "pixels" and row_of("stvg")["width"] >= 64
    assert (row_of("video_count_eval")["answer"], row_of("video_count_eval")["problem"]) == (
        "4",
        "How many dogs?",
    )
    assert result["mybench"]["n_expected"] == 3 and result["mybench"]["clips"] == 2


def test_all_that_is_missing_comes_in_one_list_before_anything_starts(
    benches, toy, tmp_path, monkeypatch, capsys
):
    shutil.copytree(benches / "valid_data", tmp_path / "valid_data")
    lines = refused(
        monkeypatch,
        capsys,
        "run",
        "--model",
        toy / "model",
        "--data",
        "videomme",
        "lvbench",
        "charades_sta",
        "--data-root",
        tmp_path,
        "--out",
        tmp_path / "out",
    )
    assert any("lvbench" in line and "lvbench.json" in line for line in lines)
    assert [line for line in lines if "videomme" in line and "x.mp4 (2 records)" in line]
    assert [line for line in lines if "charades_sta" in line and "z.mp4 (1 records)" in line]
    assert not (tmp_path / "out").exists()


def test_unknown_names_and_metrics_are_named_with_what_there_is(toy, tmp_path, monkeypatch, capsys):
    (line,) = refused(monkeypatch, capsys, "run", "--model", toy / "model", "--data", "lvbnch")
    assert "lvbnch" in line and "lvbench" in line
    (tmp_path / "own.yaml").write_text(
        yaml.safe_dump({"mine": {"json": "a", "metrics": {"score": ["bleu"]}}})
    )
    (line,) = refused(
        monkeypatch,
        capsys,
        "run",
        "--model",
        toy / "model",
        "--data",
        "mine",
        "--dataset-config",
        tmp_path / "own.yaml",
    )
    assert "bleu" in line and "accuracy" in line


def test_fields_that_a_metric_needs_are_asked_for_before_anything_starts(benches, toy, monkeypatch, capsys):
    group = [dict(video_id="x", question_id=f"1-{i}", question="What?", options="A. a\nB. b", answer="B",
                  group_type="logic", group_structure="[1,2,[3,4]]") for i in range(4)]
    root = benches / "Video-MME-v2"
    (root / "videos").mkdir(parents=True)
    shutil.copy(next((toy / "clips").iterdir()), root / "videos/x.mp4")
    file = benches / "valid_data/videomme-v2.json"
    words = ["run", "--model", toy / "model", "--data", "videomme-v2", "--data-root", benches]
    file.write_text(json.dumps(group))
    (line,) = refused(monkeypatch, capsys, *words)
    assert line.startswith("videomme-v2") and "[1,2,[3,4]]" in line
    del group[0]["video_id"]
    file.write_text(json.dumps(group))
    (line,) = refused(monkeypatch, capsys, *words)
    assert line.startswith("videomme-v2") and "no field 'video_id'" in line


def test_check_shows_prompts_tokens_and_what_is_wrong(benches, toy, monkeypatch):
    done = command(
        "check",
        "videomme",
        "charades_sta",
        "lvbench",
        "--data-root",
        benches,
        "--model",
        toy / "model",
        *SMALL,
    )
    assert done.returncode == 1 and "lvbench.json" in done.stdout and "1 problems" in done.stdout
    assert "videomme: 3 records" in done.stdout and "1 answer tags lost" in done.stdout
    assert (
        done.stdout.count("gold 'C'") == 3 and "A. one" in done.stdout and "<|im_start|>user" in done.stdout
    )
    assert re.search(r"prompt tokens: median \d+, most \d+, sum \d+; at most [\d.]+ h", done.stdout)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "check", "videomme", "--data-root", str(benches), *SMALL])
    with pytest.raises(SystemExit) as ended:
        evaluate.main()
    assert not ended.value.code


def test_a_benchmarks_own_settings_are_not_those_of_the_next_one(benches):
    given = dict.fromkeys(evaluate.SETTINGS) | dict(preset="qwen", dataset_config=None, think=False, limit=None)
    args = evaluate.SimpleNamespace(
        **given, data=["charades_sta", "videomme"], data_root=str(benches), decode_workers=1
    )
    tasks, _ = evaluate.load_tasks(args, "")
    assert [(name, task.spec.fps) for name, task in tasks.items()] == [("charades_sta", 4.0), ("videomme", 2.0)]


# ---------------------------------------------------------------- a record file


@pytest.fixture(scope="module")
def data(toy, tmp_path_factory):
    """A model folder with its training settings, and a file of 24 good records, one of a clip that is no
    video and one of a clip that is cut short."""
    folder = tmp_path_factory.mktemp("evaluate")
    shutil.copytree(toy / "model", folder / "model")
    (folder / "model/nanovideor1.json").write_text(json.dumps(TRAINED_WITH))
    rows = read(toy / "val.jsonl")[:24]
    clip = next(row for row in rows if row.get("videos"))
    for one in rows:
        for media in ("videos", "images"):
            one.update({media: [str(toy / path) for path in one[media]]} if media in one else {})
    (folder / "text.mp4").write_text("this is no video")
    good = Path(clip["videos"][0])
    (folder / "short.mp4").write_bytes(good.read_bytes()[: good.stat().st_size // 3])
    rows[5:5] = [dict(clip, videos=[str(folder / name)]) for name in ("text.mp4", "short.mp4")]
    (folder / "data.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return folder


@pytest.fixture(scope="module")
def evaluated(data):
    done = command("run", "--model", data / "model", "--data", data / "data.jsonl", "--out", data / "out")
    assert done.returncode == 0, done.stderr[-3000:]
    return done, json.loads((data / "out/result.json").read_text()), read(data / "out/samples.jsonl")


def test_every_record_has_one_line_and_broken_clips_count_as_wrong(data, evaluated):
    done, result, rows = evaluated
    assert [r["key"] for r in rows] == [
        record["key"] for record in video_io.load_records(data / "data.jsonl")
    ]
    failed = [r for r in rows if r["status"] == "failed"]
    assert {Path(r["videos"][0]).name for r in failed} == {"text.mp4", "short.mp4"}
    assert all(r["accuracy"] == 0 and "mp4" in r["reason"] for r in failed)
    assert (result["n_expected"], result["n_scored"], result["n_failed"]) == (26, 24, 2)
    assert "n_ok 24 + n_failed 2 = n_total 26" in done.stdout
    assert 0 <= result["speed"]["idle"] < 1 and "engine idle" in done.stdout
    assert (
        result["output_tokens"]
        == result["speed"]["output_tokens"]
        == sum(r.get("response_tokens", 0) for r in rows)
    )
    assert result["n_truncated"] == sum(r.get("finish_reason") == "length" for r in rows)


def test_accuracies_are_means_over_all_records_of_a_kind(evaluated):
    done, result, rows = evaluated
    for field in ("problem_type", "data_source"):
        assert set(result["by"][field]) == {r[field] for r in rows}
        for name, part in result["by"][field].items():
            scores = [r["accuracy"] for r in rows if r[field] == name]
            assert part["n"] == part["n_expected"] == len(scores)
            assert part["score"] == pytest.approx(sum(scores) / len(scores))
            assert name in done.stdout
    assert result["accuracy"] == pytest.approx(sum(r["accuracy"] for r in rows) / 26)


def test_answers_are_those_of_transformers_greedy_generation(data, evaluated):
    processor, prompts = video_io.load_processor(data / "model"), video_io.load_prompts()
    model = AutoModelForImageTextToText.from_pretrained(data / "model", dtype=torch.float32)
    spec = video_io.media_spec(model.config, **MEDIA)
    rows = {r["key"]: r for r in evaluated[2] if r["status"] != "failed"}
    records = [record for record in video_io.load_records(data / "data.jsonl") if record["key"] in rows]
    for record in records[:12]:
        inputs = processor_inputs(processor, [record], prompts, spec)
        start = inputs["input_ids"].shape[1]
        assert start == rows[record["key"]]["prompt_tokens"]
        banned = [[token] for token in video_io.vision_token_ids(model.config)]
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=24, bad_words_ids=banned)[0, start:]
        assert processor.tokenizer.decode(ids, skip_special_tokens=True) == rows[record["key"]]["response"]


def test_settings_of_training_and_benchmarks_are_defaults_and_flags_win(data):
    none, bench = dict.fromkeys(evaluate.SETTINGS), {"prompt_form": "reason"}
    settings = evaluate.resolve_settings(data / "model", none)
    assert (settings["max_frames"], settings["prompt_form"], settings["max_tokens"]) == (8, "direct", 24)
    assert settings["total_pixels"] == 0  # what training did not say keeps its default
    assert evaluate.resolve_settings(data / "model", none | {"max_frames": 4})["max_frames"] == 4
    assert evaluate.resolve_settings(data, none) == evaluate.SETTINGS  # no such file
    settings = evaluate.resolve_settings(data / "model", none, bench, {"max_frames": 256, "max_tokens": 4096})
    assert (settings["max_frames"], settings["max_tokens"], settings["prompt_form"]) == (256, 4096, "direct")
    assert evaluate.resolve_settings(data, none, bench)["prompt_form"] == "reason"
    assert evaluate.resolve_settings(data, none, {})["prompt_form"] == "direct"


def test_killed_at_any_moment_it_goes_on_and_answers_nothing_twice(data, evaluated, tmp_path):
    before, words = (
        evaluated[2],
        ["run", "--model", data / "model", "--data", data / "data.jsonl", "--out", tmp_path / "out"],
    )
    samples = tmp_path / "out/samples.jsonl"
    shutil.copytree(data / "out", tmp_path / "out")
    lines = [json.dumps(r) + "\n" for r in before]
    kept = lines[:3] + lines[10:14]  # what is missing is found by content, not by count
    samples.write_text("".join(kept) + lines[20][:40])  # and the last line was being written
    for rows in (7, 8):  # before any new answer, and in the midst of them
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "evaluate.py"), *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert "7 of 26 samples" in process.stdout.readline()
        while process.poll() is None and rows > 7 and samples.read_bytes().count(b"\n") < rows:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert samples.read_text().startswith("".join(kept))
    done = command(*words)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(re.search(r"(\d+) of 26 samples", done.stdout)[1]) >= 7
    assert [(r["key"], r["response"]) for r in read(samples)] == [(r["key"], r["response"]) for r in before]
    assert json.loads((tmp_path / "out/result.json").read_text())["by"] == evaluated[1]["by"]


def test_another_clip_behind_the_same_path_is_answered_again(data, evaluated, toy):
    records = video_io.load_records(data / "data.jsonl")[:8]
    config = json.loads((data / "out/settings.json").read_text())
    task = lambda: evaluate.SimpleNamespace(
        records=[dict(r) for r in records],
        spec=video_io.MediaSpec(**MEDIA),
        prompter=rollout.Prompter(None, None, video_io.load_prompts(), config["settings"]["prompt_form"]),
    )
    keys = []
    for identity in (config, config, config | {"sampling": {"n": 2}}):
        now = task()
        evaluate.name_contents(now, identity)
        keys.append([r["content"] for r in now.records])
    assert keys[0] == keys[1] and not set(keys[0]) & set(keys[2])
    clip = Path(next(r for r in records if r["videos"] and "toy" in r["videos"][0])["videos"][0])
    other = next(p for p in clip.parent.iterdir() if p.read_bytes() != clip.read_bytes())
    content = clip.read_bytes()
    try:
        clip.write_bytes(other.read_bytes())
        now = task()
        evaluate.name_contents(now, config)
    finally:
        clip.write_bytes(content)
    changed = [a != r["content"] for a, r in zip(keys[0], now.records)]
    assert changed == [str(clip) in r["videos"] for r in records] and any(changed)


def test_processes_share_the_clips_and_answers_are_drawn_several_times(data, tmp_path):
    rows = read(data / "data.jsonl")[:10]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows + rows[:2]))
    words = ["run", "--model", data / "model", "--data", tmp_path / "data.jsonl", "--n", "2", "--out"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    two = [  # as a launcher starts them
        subprocess.Popen(
            [sys.executable, ROOT / "evaluate.py", *map(str, words), tmp_path / "out"],
            stderr=subprocess.PIPE,
            text=True,
            env=env | {"RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in "01"
    ]
    for process in two:
        errors = process.communicate(timeout=900)[1]
        assert process.returncode == 0, errors[-3000:]
    shared = read(tmp_path / "out/samples.jsonl")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "result.json",
        "samples.jsonl",
        "settings.json",
    ]
    assert [r["key"] for r in shared] == [r["key"] for r in video_io.load_records(tmp_path / "data.jsonl")]
    assert all(len(r["samples"]) == 2 for r in shared if r["status"] != "failed")
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert {"accuracy", "pass@1", "pass@2", "majority"} <= set(result["metrics"]) and result["speed"][
        "processes"
    ] == 2
    done = command(*words, tmp_path / "alone")  # seeds hang on the record: how it is shared does not matter
    assert done.returncode == 0, done.stderr[-3000:]
    texts = lambda rows: [[s["response"] for s in r.get("samples", [])] for r in rows]
    assert texts(read(tmp_path / "alone/samples.jsonl")) == texts(shared)


class QuickEngine:
    """In place of rollout.Engine: the same answer to every prompt, at once.  seen: files in the cache when it
    started."""

    max_num_seqs, lockstep, busy, cache, seen = 8, False, 0.0, None, None

    def __init__(self, *args, **options):
        self.groups, QuickEngine.seen = [], cached(self.cache)

    @property
    def pending(self):
        return len(self.groups)

    def submit(self, group, n, **sampling):
        group.responses = [rollout.Response([1], [0.0], "<answer>A</answer>", "stop") for _ in range(n)]
        self.groups.append(group)

    def step(self):
        done, self.groups = self.groups, []
        return done

    def close(self):
        pass


def cached(folder):
    return sorted(folder.glob("*/*.safetensors"))


def test_each_mode_fills_the_cache_or_answers_from_it_alone_or_does_both(data, tmp_path, monkeypatch):
    rows = [r for r in read(data / "data.jsonl") if r.get("videos") and Path(r["videos"][0]).parent != data][:6]
    (tmp_path / "six.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    n_clips, cache = len({r["videos"][0] for r in rows}), tmp_path / "cache"
    monkeypatch.chdir(tmp_path)

    def run(out, engine, *words, cache=cache):
        """(samples.jsonl or None, reasons of failures, files in the cache when the engine started, and now)"""
        QuickEngine.cache, QuickEngine.seen = cache, None
        monkeypatch.setattr(rollout, "Engine", engine)
        monkeypatch.setattr(sys, "argv", ["evaluate.py", "run", "--model", str(data / "model"), "--data", "six.jsonl",
                                          "--out", out, "--decode-workers", "2", *words])
        with pytest.raises(SystemExit) as ended:
            evaluate.main()
        assert not ended.value.code
        answers = read(tmp_path / out / "samples.jsonl") if (tmp_path / out).exists() else None
        reasons = [r["reason"] for r in answers or [] if r["status"] == "failed"]
        return answers and len(answers), reasons, QuickEngine.seen, cached(cache)

    words = ["--cache-dir", str(cache), "--mode"]
    # cache: it is filled; no engine, no folder of results
    *done, full = run("a", None, *words, "cache")
    assert done == [None, [], None] and len(full) == n_clips
    # eval: all is answered from it
    assert run("b", QuickEngine, *words, "eval") == (6, [], full, full)
    # what it lacks costs its records, and is not decoded
    lost = full[0]
    lost.unlink()
    n, reasons, seen, now = run("c", QuickEngine, *words, "eval")
    assert n == 6 and 0 < len(reasons) < 6 and all(str(cache) in reason for reason in reasons)
    assert seen == now == full[1:]
    # both: what it lacks is decoded before the engine starts, then all is answered
    assert run("d", QuickEngine, *words, "both") == (6, [], full, full)
    # auto: what it lacks is decoded while questions are answered
    shutil.rmtree(cache)
    n, reasons, seen, now = run("e", QuickEngine, *words, "auto")
    assert (n, reasons, now) == (6, [], full) and len(seen) < n_clips
    # without a folder nothing is kept
    assert run("f", QuickEngine, cache=tmp_path / "frame_cache") == (6, [], [], [])


def refused(monkeypatch, capsys, *args):
    """The lines that the command says of input that it refuses."""
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, args)])
    monkeypatch.setattr(rollout, "Engine", None)  # must not be reached
    with pytest.raises(SystemExit) as ended:
        evaluate.main()
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()


def test_a_folder_never_mixes_answers_of_two_settings(data, evaluated, monkeypatch, capsys):
    (line,) = refused(
        monkeypatch,
        capsys,
        "run",
        "--model",
        data / "model",
        "--data",
        data / "data.jsonl",
        "--out",
        data / "out",
        "--fps",
        "1",
    )
    assert "other settings" in line and "--out" in line
    assert read(data / "out/samples.jsonl") == evaluated[2]


def test_bad_input_ends_with_one_line_before_any_model_is_loaded(data, tmp_path, monkeypatch, capsys):
    bad = dict(problem="What?", answer="not a number", problem_type="numerical")
    (tmp_path / "bad.jsonl").write_text(json.dumps(bad) + "\n")
    for model, file, named in [
        (tmp_path, data / "data.jsonl", str(tmp_path)),
        (data / "model", tmp_path / "none.jsonl", "none.jsonl"),
        (data / "model", tmp_path / "bad.jsonl", "bad.jsonl:1"),
    ]:
        (line,) = refused(
            monkeypatch, capsys, "run", "--model", model, "--data", file, "--out", tmp_path / "out"
        )
        assert named in line and not (tmp_path / "out").exists()


# ---------------------------------------------------------------- compare and report


@pytest.fixture(scope="module")
def other(data, evaluated):
    """A second result: half of the first one's records, some of its answers turned into their opposite."""
    folder = data / "other"
    shutil.copytree(data / "out", folder)
    rows = evaluated[2][:20]
    for i, r in enumerate(rows):
        if i % 3 == 0 and r["status"] != "failed":
            r = rows[i] = dict(
                r, accuracy=1.0 - (r["accuracy"] >= 0.5), response="<think>hm</think><answer>x</answer>"
            )
    (folder / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "result.json").write_text(json.dumps(evaluated[1] | {"n_expected": 20}))
    return folder, rows


def test_compare_pairs_shared_samples(data, evaluated, other, tmp_path):
    done = command("compare", data / "out", other[0], "--out", tmp_path / "c.json")
    assert done.returncode == 0, done.stderr
    c = json.loads((tmp_path / "c.json").read_text())["data"]
    gains = np.array([b["accuracy"] - a["accuracy"] for a, b in zip(evaluated[2], other[1])])
    assert (c["n_shared"], c["n_only_a"], c["n_only_b"]) == (20, 6, 0)
    assert c["difference"] == pytest.approx(gains.mean())
    units = [(float(g), (), r["clip"]) for g, r in zip(gains, other[1])]
    scores = evaluate.bootstrap(units)
    assert c["interval"] == pytest.approx(np.percentile(scores, [2.5, 97.5]).tolist())
    assert c["p_bootstrap"] == pytest.approx(
        min(1, 2 * (1 + min((scores <= 0).sum(), (scores >= 0).sum())) / 10001)
    )
    right = lambda r: r["accuracy"] >= 0.5
    only_b = [b["key"] for a, b in zip(evaluated[2], other[1]) if right(b) > right(a)]
    only_a = [b["key"] for a, b in zip(evaluated[2], other[1]) if right(b) < right(a)]
    assert (c["wins_a"], c["wins_b"]) == (len(only_a), len(only_b)) and only_b
    assert c["p_mcnemar"] == pytest.approx(evaluate.mcnemar(len(only_a), len(only_b)))
    assert {f["key"] for f in c["flips"] if f["better"] == "b"} == set(only_b)
    for name, part in c["by"]["problem_type"].items():
        assert part["score"] == pytest.approx(
            np.mean([g for g, r in zip(gains, other[1]) if r["problem_type"] == name])
        )
    assert "McNemar" in done.stdout and "only in A" in done.stdout


def test_report_is_one_file_that_holds_everything(data, evaluated, other, tmp_path):
    nasty = "</script><img src=x onerror=alert(1)>"
    rows = read(other[0] / "samples.jsonl")
    rows[0]["response"] = nasty
    shutil.copytree(other[0], tmp_path / "r")
    (tmp_path / "r/samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "run").mkdir()
    steps = [dict(step=i, reward=i / 10, **({"kl": float("nan")} if i == 2 else {})) for i in range(5)]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
    done = command("report", tmp_path / "r", "--against", data / "out", "--training", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "r/report.html").read_text()
    assert (
        not re.search(r"(src|href)=[\"']?(https?:)?//", page)
        and "@import" not in page
        and "fetch(" not in page
    )
    assert page.count("</script>") == 2 and nasty not in page
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1]
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found["runs"][0]["score"] == evaluated[1]["score"] and found["training"][4] == {
        "step": 4,
        "reward": 0.4,
    }
    samples = {s["key"]: s for s in found["samples"]}
    assert samples[rows[0]["key"]]["response"] == nasty and any(s["flip"] for s in samples.values())
    for s in samples.values():
        source = next(r for r in rows if r["key"] == s["key"])
        want = 8 if source["videos"] and s["kind"] != "failed" else len(source["images"])
        assert len(s["frames"]) == want and all(
            f.startswith("data:image/jpeg;base64,/9j/") for f in s["frames"]
        )
    assert {s["kind"] for s in samples.values()} >= {"failed"}
    assert found["compared"]["data"]["n_shared"] == 20
