"""Tests of rewards.py: every rule by values worked out by hand, any text, workers, sandbox, command.

pytest -q tests/test_rewards.py
"""

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import rewards  # noqa: E402

FRUIT = ["A. Two apples", "B. A pear", "C. Plums", "D. None of these"]


def accuracy(kind, response, gold, **fields):
    record = {"problem_type": kind, "answer": gold, **fields}
    rewards.check_record(record)
    return rewards.score(record, response)["accuracy"]


def status(kind, response, gold, **fields):
    return rewards.score({"problem_type": kind, "answer": gold, **fields}, response)["status"]


# ---------------------------------------------------------------- region, format, overall


@pytest.mark.parametrize(
    "response, expected",
    [
        ("<think>B looks right</think>C", 1),
        ("it must be B</think>\n\nC", 1),
        ("<think>a</think>B<think>c</think>C", 1),
        ("<answer>B</answer> no: <answer>C</answer>", 1),
        ("<answer>C</answer><answer>B</answer>", 0),
        ("so <answer>C", 1),
        (r"\boxed{B} or rather \boxed{C}", 1),
        (r"\boxed{\text{C}}", 1),
        (r"\boxed{C", 0),
        ("<answer>C</answer><answer></answer>", 0),
    ],
)
def test_the_last_marked_answer_behind_the_thoughts_counts(response, expected):
    assert accuracy("multiple choice", response, "C", options=FRUIT) == expected


def test_an_answer_inside_thoughts_that_never_end_is_truncated():
    out = rewards.score(
        {"problem_type": "multiple choice", "options": FRUIT, "answer": "C"}, "<think>so <answer>C</answer>"
    )
    assert (out["status"], out["accuracy"], out["format"], out["overall"]) == ("truncated", 0, 0, 0)


@pytest.mark.parametrize(
    "response, form, overall",
    [
        ("<answer>C</answer>", 1.0, 1.0),
        ("<answer>B</answer>", 1.0, 0.1),
        ("<answer>hm</answer>", 0.5, 0.05),
        ("C", 0.0, 0.9),
        ("<answer>C", 0.0, 0.9),
        ("<answer>A or C</answer>", 0.5, 0.05),
        ("", 0.0, 0.0),
    ],
)
def test_format_asks_for_a_closed_tag_with_content_of_the_type(response, form, overall):
    out = rewards.score({"problem_type": "multiple choice", "options": FRUIT, "answer": "C"}, response)
    assert out["format"] == form and out["overall"] == pytest.approx(overall)


def test_weights_and_penalties_are_reported_apart_and_summed():
    setting = rewards.RewardSettings(
        accuracy_weight=0.5,
        format_weight=0.2,
        overlong_limit=100,
        overlong_buffer=20,
        repetition_ngram=2,
        repetition_weight=0.5,
    )
    out = rewards.score(
        {"problem_type": "open-ended", "answer": "go go go go"}, "<answer>go go go go</answer>", setting, 90
    )
    # words: "answer>go go go go</answer": bigrams (x go)(go go)(go y) are all different
    assert out["overlong"] == -0.5 and out["repetition"] == 0
    assert out["overall"] == pytest.approx(0.5 * out["accuracy"] + 0.2 - 0.5 + 0.5 * out["repetition"])
    out = rewards.score({"problem_type": "open-ended", "answer": "x"}, "a b a b a b", setting, 90)
    assert out["repetition"] == pytest.approx(2 / 5 - 1)
    with pytest.raises(ValueError, match="length"):
        rewards.score({"problem_type": "numerical", "answer": "1"}, "1", setting)


@pytest.mark.parametrize("length, penalty", [(0, 0), (80, 0), (85, -0.25), (100, -1), (500, -1)])
def test_soft_overlong_is_linear_over_the_buffer(length, penalty):
    setting = rewards.RewardSettings(overlong_limit=100, overlong_buffer=20)
    assert rewards.score({"problem_type": "numerical", "answer": "1"}, "1", setting, length)["overlong"] == penalty


# ---------------------------------------------------------------- choices


@pytest.mark.parametrize(
    "response",
    [
        "C",
        "c",
        "(c)",
        "C.",
        "**C**",
        "$C$",
        "Ｃ",
        "Plums",
        "plums.",
        "The plums",
        "C. Plums",
        "C) plums",
        "(C) Plums on a dish",
        "Answer: C",
        "The answer is C because I counted.",
        "the correct option would be C",
        "I choose (C)",
        "Thus, C.",
        "C is correct",
        "It must be C.",
        "C is most likely correct.",
        "Option C is the right answer.",
        "It is not B, it is C.",
        "The answer is not B but C.",
        "A is wrong, so is B. Final: C",
        "The answer is A? No, the answer is C.",
        "The answer is C, not B.",
        "The answer to the question is C.",
        "Réponse: C",
        "Here are plums.",
        "Not two apples but plums, I think",
        "Looking closely.\n\nC",
        "C\n\nA and B are wrong.",
        "答案是C",
        "答案：（Ｃ）",
        "不选B，选C",
        "选项C正确",
        "<answer>\n C \n</answer>",
        "The answer is 'C'",
        "Final answer:\n\n(C) Plums",
    ],
)
def test_a_choice_is_read_from_its_declaration(response):
    assert accuracy("multiple choice", response, "C", options=FRUIT) == 1


@pytest.mark.parametrize(
    "response, wrong",
    [
        ("A or C", True),
        ("A, C", True),
        ("C and A", True),
        ("The answer is C or A", True),
        ("either A or C", True),
        ("Answer: A/C", True),
        ("A. Two apples\nB. A pear\nC. Plums", True),
        ("AC", False),
        ("ABCD", False),
        ("A pear or plums", True),
        ("E", False),
        ("the answer is c", False),
        ("I cannot tell.", False),
        ("A person eats", False),
        ("The answer is A person", False),
        ("C is wrong.", False),
        ("Vitamin C helps", False),
        ("CAT", False),
        ("", False),
        ("Option A is wrong. Option B is wrong. Option D is wrong.", False),
    ],
)
def test_hedges_words_and_strange_letters_are_no_choice(response, wrong):
    for gold in "AC":
        assert accuracy("multiple choice", response, gold, options=FRUIT) == 0
    assert status("multiple choice", response, "C", options=FRUIT) == ("wrong" if wrong else "invalid")


def test_options_may_have_other_prefixes_none_or_twenty_six_letters():
    assert accuracy("multiple choice", "blue", "B", options=["A: red", "B: blue"]) == 1
    assert accuracy("multiple choice", "B", "blue", options=["red", "blue"]) == 1
    assert accuracy("multiple choice", "Z", "Z", options=[f"number {i}" for i in range(26)]) == 1
    assert accuracy("multiple choice", "I", "I", options=[f"number {i}" for i in range(10)]) == 1
    assert accuracy("multiple choice", "100", "B", options=["A. 1", "B. 10", "C. 100"]) == 0
    assert accuracy("multiple choice", "twins", "A", options=["A. twins", "B. twins"]) == 0
    assert (
        accuracy("multiple choice", "E. coli", "A", options=["A. E. coli", "B. b", "C. c", "D. d", "E. e"])
        == 1
    )
    assert accuracy("multiple choice", "a cat and a dog", "B", options=["A. cat", "B. a cat and a dog"]) == 1


@pytest.mark.parametrize(
    "response, gold, expected",
    [
        ("Yes", "yes", 1),
        ("True.", "yes", 1),
        ("n", "No", 1),
        ("Yes, I know", "no", 0),
        ("I cannot say", "no", 0),
        ("Yesterday", "yes", 0),
        ("yes or no", "yes", 0),
        ("That is not true", "no", 1),
        ("The answer is no.", "no", 1),
        ("不是", "no", 1),
        ("是的", "yes", 1),
        ("There is no car", "no", 0),
        ("No cars, no people", "no", 1),
        ("错误", "false", 1),
    ],
)
def test_boolean(response, gold, expected):
    for kind in ("boolean", "binary_classification", "SSR", "CRR"):
        assert accuracy(kind, response, gold) == expected


def test_binary_classification_takes_other_labels_and_options():
    assert accuracy("binary classification", "It is fake.", "fake") == 1
    assert accuracy("binary classification", "real or fake", "fake") == 0
    assert accuracy("binary classification", "B", "B", options=["A. real", "B. fake"]) == 1


@pytest.mark.parametrize(
    "response, gold, expected",
    [
        ("A", "Response 1", 1),
        ("[[B]]", "2", 1),
        ("Response 2 is better than Response 1.", "B", 1),
        ("the first", "1", 1),
        ("Both are equally good", "tie", 1),
        ("Response 1 or Response 2", "1", 0),
        ("Response 1 is worse", "1", 0),
    ],
)
def test_preference_labels_in_their_spellings(response, gold, expected):
    assert accuracy("llava preference", response, gold) == expected
    assert accuracy("Critic-Preference", response, gold) == expected


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    "response, gold, expected",
    [
        ("5.0", "5", 1),
        ("1,234,567", "1234567", 1),
        ("12.345", "12.35", 1),
        ("0.004", "0", 1),
        ("−3", "-3", 1),
        ("3", "-3", 0),
        ("forty-two", "42", 1),
        ("two thousand three hundred and five", "2305", 1),
        ("three million", "3e6", 1),
        ("2.5 million", "2500000", 1),
        ("3/4", "0.75", 1),
        ("1½", "1.5", 1),
        (r"\frac{3}{4}", "0.75", 1),
        ("two and a half", "2.5", 1),
        ("1.5e3", "1500", 1),
        ("6×10⁵", "600000", 1),
        ("3 cm", "3", 1),
        ("$3,000", "3000", 1),
        ("50%", "0.5", 1),
        ("50%", "50", 1),
        ("50", "50%", 1),
        ("0.5%", "50%", 0),
        ("0.5", "50", 0),
        ("3 to 4", "3", 0),
        ("3-4", "4", 0),
        ("3 or 4", "3", 0),
        ("3, 4", "3", 0),
        ("two or three", "2", 0),
        ("2 red and 3 blue, so 5 in total", "5", 1),
        ("2 + 3 = 5", "5", 1),
        ("2 + 3", "5", 0),
        ("The answer is 7. It has 3 parts.", "7", 1),
        ("4 dogs in the 30 second clip", "4", 1),
        ("1.2.3", "1.2", 0),
        ("nan", "0", 0),
        ("1e999", "5", 0),
        ("9" * 9000, "5", 0),
        ("1/0", "5", 0),
        ("none", "0", 1),
        ("三十二个", "32", 1),
        ("一共有三个", "3", 1),
        ("3万", "30000", 1),
        ("0.003", "0.004", 1),
        ("0.2857", "0.286", 1),
        ("0.28", "0.286", 0),
        ("m2", "2", 0),
        ("a dozen", "12", 1),
        ("2 dozen eggs", "24", 1),
        ("half a dozen", "6", 1),
        ("dozens", "12", 0),
        ("3 hundred", "300", 1),
        ("百分之五十", "50%", 1),
        ("百分之50", "0.5", 1),
        ("四分之三", "0.75", 1),
        ("三点五", "3.5", 1),
        ("负三", "-3", 1),
        ("three point five", "3.5", 1),
        ("three quarters", "0.75", 1),
        ("two-thirds", "0.67", 1),
        ("3 * 10^8", "300000000", 1),
    ],
)
def test_numerical(response, gold, expected):
    assert accuracy("numerical", response, gold) == expected
    assert accuracy("REC", response, gold) == expected


@pytest.mark.parametrize(
    "prediction, gold", [(3, 2), (5, 4), (6, 5), (4.1, 4), (0.5, 4), (100, 4), (7, 7), (2.2, 2), (19, 20)]
)
def test_regression_is_mean_relative_accuracy_with_less_or_equal(prediction, gold):
    expected = numpy.mean([abs(prediction - gold) / gold <= 1 - t for t in numpy.linspace(0.5, 0.95, 10)])
    assert accuracy("regression", f"about {prediction} m", str(gold)) == pytest.approx(float(expected))


def test_regression_takes_the_first_quantity_of_the_sentence():
    assert accuracy("regression", "3.2 m (10.5 ft)", "3.2") == 1
    assert accuracy("regression", "six chairs in room 2", "6") == 1
    assert (accuracy("regression", "0", "0"), accuracy("regression", "1", "0")) == (1, 0)


# ---------------------------------------------------------------- times and boxes


@pytest.mark.parametrize(
    "response, expected",
    [
        ('{"time": [10, 20]}', 1),
        ('{"time": [20, 10]}', 1),
        ("[10, 20]", 1),
        ("[[10, 20]]", 1),
        ("{'time': ['10', '20.0']}", 1),
        ('```json\n{"start": "00:10", "end": "00:20"}\n```', 1),
        ('[{"timestamps": ["10s", "20 s"]}]', 1),
        ("from 10 to 20 s", 1),
        ("10s - 20s", 1),
        ("0:10–0:20", 1),
        ("00:00:10,000 --> 00:00:20,000", 1),
        ("starts at 10 and ends at 20", 1),
        ("Start: 10. End: 20.", 1),
        ('{"time": "10 - 20"}', 1),
        ("从10秒到20秒", 1),
        ("event 2, between 10 and 20 seconds of a 60 second clip", 1),
        ("<10.0 seconds> to <20.0 seconds>", 1),
        ("ten to twenty seconds", 1),
        ("1-2? No: 10-20", 1),
        ('{"time": [15, 25]}', 1 / 3),
        ('{"time": [10, 15]}', 0.5),
        ('{"time": [30, 40]}', 0),
        ('{"time": [10, 10]}', 0),
        ('{"time": [NaN, 20]}', 0),
        ('{"time": [10, Infinity]}', 0),
        ('{"time": [10]}', 0),
        ("10", 0),
        ('{"time": [10, 20', 0),
        ("{}", 0),
        ("soon", 0),
        ('{"time": [[10, 20], [20, 30]]}', 0.5),  # several windows are one set of seconds
        ('{"time": [[10, 14], [12, 16]]}', 0.6),
        ("[[30, 40], [20, 10]]", 0.5),
        ('{"time": [10, 20, 30]}', 0),
    ],
)
def test_temporal_grounding(response, expected):
    assert accuracy("temporal grounding", response, '{"time": [10, 20]}') == pytest.approx(expected)


def test_clock_times_and_minutes_are_seconds():
    for response in (
        "1:05 to 1:10",
        "1 min 5 s - 1 min 10 s",
        "0:01:05-0:01:10",
        "65 to 70",
        "1分5秒到1分10秒",
    ):
        assert accuracy("temporal grounding", response, "[65, 70]") == 1
    assert accuracy("temporal grounding", "1 to 2 minutes", "[60,120]") == 1


BOX = '{"boxes": [10, 10, 30, 30]}'


@pytest.mark.parametrize(
    "response, expected",
    [
        (BOX, 1),
        ("[30, 30, 10, 10]", 1),
        ('[{"bbox_2d": [10, 10, 30, 30], "label": "cat 7"}]', 1),
        ("(10,10),(30,30)", 1),
        ('{"x1": 10, "y1": 10, "x2": 30, "y2": 30}', 1),
        ("[20, 10, 40, 30]", 1 / 3),
        ("[10, 10, 10, 30]", 0),
        ("[10, 10, 30]", 0),
        ("[NaN, 10, 30, 30]", 0),
        ("[[10, 10, 30, 30], [10, 10, 30, 30]]", 0.5),
        ("a cat", 0),
    ],
)
def test_spatial_grounding(response, expected):
    assert accuracy("spatial grounding", response, BOX) == pytest.approx(expected)


def test_declared_box_spaces_are_converted_and_undeclared_ones_left_alone():
    frame = {"width": 640, "height": 480}
    gold = '{"boxes": [64, 48, 320, 240]}'
    assert accuracy(
        "spatial grounding", "[100, 100, 500, 500]", gold, box_space="pixels", **frame
    ) == pytest.approx(1)
    assert accuracy("spatial grounding", "[64, 48, 320, 240]", gold, **frame) == 1
    assert accuracy(
        "spatial grounding", "[100, 100, 500, 500]", '{"boxes": [0.1, 0.1, 0.5, 0.5]}', box_space="0-1"
    ) == pytest.approx(1)
    with pytest.raises(ValueError, match="width"):
        rewards.check_record(
            {"problem_type": "tracking", "answer": '{"boxes": {"0": [1, 2, 3, 4]}}', "box_space": "pixels"}
        )


@pytest.mark.parametrize(
    "space, gold",
    [
        ("0-1000", "[10, 10, 1500, 300]"),
        ("0-1", "[0.1, 0.1, 0.5, 300]"),
        ("pixels", "[10, 10, 600, 700]"),
        ("pixels", "[-90, 10, 600, 400]"),
    ],
)
def test_a_gold_outside_of_its_declared_box_space_is_refused_at_load(space, gold):
    record = {"problem_type": "spatial grounding", "answer": gold, "width": 640, "height": 480, "where": "d:7"}
    rewards.check_record(record)  # without a declared space there is nothing to hold it against
    with pytest.raises(ValueError, match=f"^d:7: boxes .* are not in the declared box_space, {space}$"):
        rewards.check_record(record | {"box_space": space})
    rewards.check_record(record | {"box_space": "pixels", "answer": "[0, 0, 640, 480]"})


def test_more_options_than_letters_are_refused_at_load():
    for kind in ("multiple choice", "math", "binary classification"):
        record = {"problem_type": kind, "answer": "A", "where": "d:7"}
        rewards.check_record(record | {"options": [f"number {i}" for i in range(26)]})
        with pytest.raises(ValueError, match="^d:7: 27 options, more than letters$"):
            rewards.check_record(record | {"options": [f"number {i}" for i in range(27)]})


TUBE = '{"time": [8, 10], "boxes": {"8": [0, 0, 10, 10], "9": [0, 0, 10, 10]}}'


@pytest.mark.parametrize(
    "response, tube, track",
    [
        (TUBE, 1, 1),
        (TUBE.replace('"8"', '"8.0"').replace('"9"', '"09"'), 1, 1),
        ('{"time": [8, 10], "boxes": {"8": [0, 0, 10, 10]}}', 0.75, 0.5),  # a skipped second costs
        (
            TUBE.replace('"9"', '"10": [0, 0, 10, 10], "9"'),
            0.5 + 0.5 * 2 / 3,
            1,
        ),  # so does an invented one, in a tube
        ('{"time": [8, 9], "boxes": {}}', 0.25, 0),
        ('{"time": [8, 10], "boxes": {"8": [0, 0, 10], "9": [5, 0, 15, 10]}}', 0.5 + 1 / 12, 1 / 6),
        ("nothing", 0, 0),
    ],
)
def test_tubes_average_over_the_union_of_seconds_and_tracks_over_the_golds(response, tube, track):
    assert accuracy("spatial-temporal grounding", response, TUBE) == pytest.approx(tube)
    assert accuracy("tracking", response, TUBE) == pytest.approx(track)


def test_a_tube_without_gold_boxes_is_temporal_only():
    assert accuracy("spatial-temporal grounding", '{"time": [8, 9]}', '{"time": [8, 10], "boxes": {}}') == 0.5


def test_segmentation_adds_box_points_and_time():
    gold = {"boxes": [0, 0, 10, 10], "positive_points": [[5, 5], [6, 6]], "negative_points": [[20, 20]]}
    assert accuracy("segmentation", json.dumps(gold), json.dumps(gold)) == 1
    assert accuracy("segmentation", '{"boxes": [0, 0, 10, 10]}', json.dumps(gold)) == 0.5
    assert (
        accuracy("segmentation", json.dumps(gold | {"positive_points": [[5, 5], [50, 50]]}), json.dumps(gold))
        == 0.875
    )
    video = json.dumps(gold | {"time": 4})
    assert accuracy("segmentation", json.dumps(gold | {"time": 6}), video) == pytest.approx(
        0.7 + 0.3 * math.exp(-1)
    )
    mask = {"size": [10, 10], "counts": [50, 50]}  # columns 5 to 9
    assert (
        accuracy(
            "segmentation",
            json.dumps(gold | {"positive_points": [[5, 5], [4, 6]]}),
            json.dumps(gold | {"mask": mask}),
        )
        == 0.875
    )


# ---------------------------------------------------------------- text, math, code, markup


@pytest.mark.parametrize(
    "response, gold, expected",
    [
        ("exit 12", "EXIT  12", 1),
        ("the red door", "the red car", 2 / 3),
        ("a b c d e f g", "a", 0),
        ("开门", "开放", 0.5),
        ("九点：开", "九点:开", 1),
        ('The sign reads "OPEN".', "open", 1),
        ("Text: OPEN", "open", 1),
        ('He said "hi"', 'He said "hi"', 1),
        ("", "open", 0),
    ],
)
def test_ocr_is_one_minus_word_error_rate(response, gold, expected):
    assert accuracy("OCR", response, gold) == pytest.approx(expected)


@pytest.mark.parametrize(
    "response, gold, expected",
    [
        ("dolly zoom.", "Dolly Zoom", 1),
        ("It is a dolly zoom", "Dolly Zoom", 1),
        ("It is not a dolly zoom", "Dolly Zoom", 0),
        ("O(n^2)", "O(n²)", 1),
        ("dolly", "Dolly Zoom", 0),
        ("厨房", "厨房", 1),
    ],
)
def test_short_open_answers_are_exact(response, gold, expected):
    for kind in ("open-ended", "free-form", "video qa", "video description"):
        assert accuracy(kind, response, gold) == expected


def test_long_open_answers_are_the_mean_of_three_rouges():
    from rouge_score import rouge_scorer

    gold = "a man opens the door and walks into the bright kitchen"
    for answer in (
        gold,
        "the man walks into the kitchen",
        "birds fly",
        "the door opens and the man and the door walk",
    ):
        scores = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"]).score(gold, answer)
        assert accuracy("open-ended", answer, gold) == pytest.approx(
            sum(s.fmeasure for s in scores.values()) / 3
        )
    assert accuracy("video description", "一个男人打开门走进厨房", "一个男人打开了门走进厨房里") > 0.7


@pytest.mark.parametrize(
    "response, gold, expected",
    [
        (r"\boxed{\frac{2}{\sqrt{2}}}", r"\sqrt{2}", 1),
        ("2√3", r"\sqrt{12}", 1),
        (r"\boxed{45^\circ}", "45", 1),
        ("$y = 3$", "3", 1),
        ("x=3 or x=-3", "3", 0),
        ("3, -3", "-3, 3", 1),
        ("[1, 4)", "[1,4)", 1),
        ("[1, 4]", "[1,4)", 0),
        ("[1,4]", "[1,4)", 0),
        ("x + 1 = 3\nso x = 2\nThe answer is 2.\nIt is even.", "2", 1),
        (r"1 \le x < 4", "[1,4)", 1),
        ("(a+1)^2", "a^2+2a+1", 1),
        ("0.33", "1/3", 0),
        ("1 1/2", "3/2", 1),
        ("1 1/2", "1", 0),
        ("10^-3", "0.001", 1),
        ("x**2", "x^2", 1),
        ("50%", "0.5", 1),
        ("The answer is 2,000", "2000", 1),
        ("2π", r"2\pi", 1),
        ("scalene", "Scalene", 1),
        ("enacles", "scalene", 0),
        ("(D)", "D", 1),
        (r"\text{D}", "D", 1),
        ("C", "D", 0),
        (r"\boxed{", "3", 0),
    ],
)
def test_math(response, gold, expected):
    assert accuracy("math", response, gold) == expected


def test_math_with_options_takes_the_letter_or_the_value():
    options = ["A. 3", r"B. \frac{1}{2}"]
    for response in ("B", r"\boxed{B}", "0.5", r"\boxed{\frac{1}{2}}"):
        assert accuracy("math", response, "B", options=options) == 1
    assert accuracy("math", "3", "B", options=options) == 0


def test_code_without_execution_is_compared_by_structure():
    gold = "def double(x):\n    return 2 * x"
    assert accuracy("code", f"Sure:\n```python\n{gold}\n```\ndone", gold) == 1
    assert 0 < accuracy("code", "print(1)", gold) < 0.5
    assert status("code", "def double(x:", gold) == "invalid"
    assert (
        accuracy("code", "def double(x):\n    return x", gold, tests=["assert double(2) == 4"]) < 1
    )  # not run


def run_code(code, tests, timeout_s=5.0):
    settings_ = rewards.RewardSettings(allow_code_execution=True, timeout_s=timeout_s)
    return rewards.score(
        {"problem_type": "code", "answer": "", "tests": tests}, f"```python\n{code}\n```", settings_
    )["accuracy"]


def test_code_tests_run_by_assertion_or_by_standard_input():
    assert run_code("def f(x):\n    return 2 * x", ["assert f(2) == 4", "assert f(1) == 3"]) == 0.5
    assert (
        run_code("print(int(input()) * 2)", [{"input": "4", "output": "8"}, {"input": "1", "output": "3"}])
        == 0.5
    )


def test_code_tests_are_read_as_bytes_too_and_each_has_its_own_folder():
    asked = [{"input": "4", "output": "8"}]
    assert run_code("import sys; print(int(sys.stdin.buffer.read()) * 2); sys.exit()", asked) == 1
    assert run_code("print(int(open(0).read()) * 2)", asked) == 1
    assert run_code("open('once', 'x')", ["pass", "pass", "import os; os._exit(0)", "open('../0.out')"]) == 0.5


@pytest.mark.parametrize(
    "code",
    [
        "open('/etc/passwd')",
        "open('/tmp/left_behind', 'w')",
        "import socket; socket.socket()",
        "import os; os.fork()",
        "import os; os.system('true')",
        "import subprocess; subprocess.run('true')",
        "x = bytearray(4 << 30)",
        "import ctypes",
        "import os; os.remove('answer.py')",
        "import sys; sys.exit(0)",
        "print('x' * (64 << 20))",
    ],
)
def test_the_sandbox_refuses(code):
    assert run_code(code, ["assert True"]) == 0


def test_the_sandbox_kills_what_does_not_end_and_lets_plain_code_write_in_its_folder():
    answered = [{"input": "", "output": "4"}]
    assert run_code("print(4, flush=True)\nwhile True: pass", answered, timeout_s=1.0) == 0
    assert run_code("print(4, flush=True)\nraise ValueError", answered) == 0
    assert run_code("while True: pass", ["pass"], timeout_s=1.0) == 0
    assert run_code("import time\ntime.sleep(60)", ["pass"], timeout_s=1.0) == 0
    assert (
        run_code(
            "import collections, json, re\nopen('note', 'w').write('1')\nx = open('note').read()",
            ["assert x == '1'"],
        )
        == 1
    )


def test_svg_must_be_well_formed_and_is_compared_by_tags_and_attributes():
    gold = '<svg xmlns="http://www.w3.org/2000/svg" width="9"><rect x="1"/><g><circle r="2"/></g></svg>'
    assert accuracy("svg-code", f"Here:\n```svg\n{gold}\n```", gold) == 1
    assert status("SVG code", gold.replace("</g>", ""), gold) == "invalid"
    # tags svg rect | svg rect g circle: 2*2/6; attributes width, x of width, x, r: 2*2/5
    assert accuracy(
        "svg-code", '<svg xmlns="http://www.w3.org/2000/svg" width="9"><rect x="1"/></svg>', gold
    ) == pytest.approx((4 / 6 + 4 / 5) / 2)


def test_html_must_close_its_tags_and_may_use_html5():
    gold = "<!DOCTYPE html><html><body><section id='a'><p>hi</p><br></section></body></html>"
    assert accuracy("html-code", gold, gold) == 1
    assert status("html-code", "<div><p>hi</div></span>", gold) == "invalid"
    assert status("html-code", "no markup", gold) == "invalid"


def test_an_xml_bomb_is_not_expanded():
    bomb = (
        "<!DOCTYPE svg [<!ENTITY a 'xxxxxxxxxx'>"
        + "".join(f"<!ENTITY {b} '{('&' + a + ';') * 10}'>" for a, b in zip("abcdefgh", "bcdefghi"))
        + "]><svg>&i;</svg>"
    )
    assert accuracy("svg-code", bomb, "<svg><g/></svg>") < 1


@pytest.mark.parametrize(
    "kind, gold, response",
    [
        ("tracking", TUBE, '{"boxes": {"1.2.3": [0, 0, 10, 10]}}'),
        ("tracking", TUBE, '{"boxes": {".": [0, 0, 10, 10]}}'),
        ("temporal grounding", "[200, 300]", "9" * 5000 + " hundred to 3"),
        ("code", "x = 1", "\ud800 = ("),
    ],
)
def test_odd_answers_score_nothing_and_raise_nothing(kind, gold, response):
    out = rewards.score_here({"problem_type": kind, "answer": gold}, response, rewards.RewardSettings())
    assert out["accuracy"] == 0


# ---------------------------------------------------------------- records


def test_unknown_types_name_their_neighbours_and_known_ones_ignore_case_and_separators():
    with pytest.raises(ValueError, match="t.jsonl:3.*numercial.*numerical"):
        rewards.check_record({"problem_type": "numercial", "answer": "1", "where": "t.jsonl:3"})
    for name in ("OCR", "multiple_choice", "Spatial Temporal Grounding", "open_ended", "SVG-code", "caption"):
        assert rewards.canonical(name) in rewards.vocabulary()["types"]


@pytest.mark.parametrize(
    "kind, gold, fields",
    [
        ("multiple choice", "E", {"options": FRUIT}),
        ("multiple choice", "A", {}),
        ("numerical", "many", {}),
        ("boolean", "perhaps", {}),
        ("temporal grounding", "[3, 3]", {}),
        ("spatial grounding", "[1, 2, 3]", {}),
        ("tracking", '{"time": [1, 2]}', {}),
        ("open-ended", "", {}),
        ("code", "def f(", {}),
        ("svg-code", "<svg>", {}),
        ("numerical", None, {}),
    ],
)
def test_a_gold_that_cannot_be_read_is_an_error_with_its_place(kind, gold, fields):
    with pytest.raises(ValueError, match="^d.jsonl:7: ") as error:
        rewards.check_record({"problem_type": kind, "answer": gold, "where": "d.jsonl:7", **fields})
    assert "\n" not in str(error.value)


def test_benchmark_golds_in_solution_tags_win_over_a_text_answer():
    record = {
        "problem_type": "multiple choice",
        "options": FRUIT,
        "answer": "Plums",
        "solution": "<answer>C</answer>",
    }
    assert rewards.gold_text(record) == "C"
    charades = {
        "problem_type": "temporal grounding",
        "solution": '<think>{"time": [2.5, 9.5], "boxes": {}}</think><[x_never_used_1]>',
    }
    rewards.check_record(charades)
    assert rewards.score(charades, "2.5 to 9.5")["accuracy"] == 1
    assert rewards.score(charades, '<think>{"time": [2.5, 9.5]}</think> no idea')["accuracy"] == 0


GOLDS = {
    "multiple choice": ("C", FRUIT),
    "numerical": ("1,234", None),
    "regression": ("3.5", None),
    "boolean": ("no", None),
    "binary classification": ("fake", None),
    "math": (r"\frac{1}{2}", None),
    "ocr": ("NO EXIT", None),
    "open-ended": ("Kitchen", None),
    "free-form": ("a long walk over the hills and far away", None),
    "video qa": ("two", None),
    "video description": ("x y z", None),
    "temporal grounding": ('{"time": [3, 7]}', None),
    "spatial grounding": (BOX, None),
    "spatial-temporal grounding": (TUBE, None),
    "tracking": (TUBE, None),
    "code": ("x = 1", None),
    "svg-code": ("<svg><g/></svg>", None),
    "html-code": ("<p>hi</p>", None),
    "segmentation": (
        '{"boxes": [0, 0, 9, 9], "positive_points": [[5, 5]], "negative_points": [[20, 20]]}',
        None,
    ),
    "llava preference": ("A", None),
    "critic preference": ("Response 2", None),
    "rec": ("3", None),
    "ssr": ("Yes", None),
    "crr": ("No", None),
}


def example(kind):
    """A record of this problem type."""
    gold, options = GOLDS[kind]
    return {"problem_type": kind, "answer": gold, "options": options}


@pytest.mark.parametrize("kind", rewards.vocabulary()["types"])
def test_gold_as_answer_scores_one_and_emptiness_zero(kind):
    record = example(kind)
    rewards.check_record(record)
    assert rewards.score(record, f"<think>hm</think>\n<answer>{record['answer']}</answer>")["overall"] == pytest.approx(1)
    for empty in ("", "<answer></answer>", "<think>"):
        assert rewards.score(record, empty)["accuracy"] == 0


@pytest.mark.parametrize("kind", rewards.vocabulary()["types"])
def test_the_form_that_each_prompt_asks_for_gets_the_full_format_score(kind):
    record = example(kind)
    prompts = yaml.safe_load((ROOT / "configs" / "prompts.yaml").read_text())[kind]
    for prompt in prompts.values():
        examples = [text for text in re.findall("<answer>(.*?)</answer>", prompt) if text != " and "]
        for answer in examples or [record["answer"]]:
            assert rewards.score(record, f"<think>so</think>\n<answer>{answer}</answer>")["format"] == 1


# ---------------------------------------------------------------- any text

PIECES = st.sampled_from(
    [
        "A",
        "B or C",
        "answer is ",
        "answer: ",
        "not ",
        "<answer>",
        "</answer>",
        "<think>",
        "</think>",
        r"\boxed{",
        "}",
        "{",
        "[",
        "]",
        '"',
        "'",
        "```",
        "<svg>",
        "</",
        "3",
        "3,",
        "0:07",
        " to ",
        "1/",
        "e9",
        "百",
        "是",
        "不",
        "half",
        "²",
        "½",
        "\u0301",
        "\ud800",
        "\x00",
        "yes",
        "no",
        "-",
        "%",
        ".",
        "\n",
        " ",
        "Plums",
        '{"time": ',
        '"boxes"',
        "NaN",
        "Response 1",
        "(",
        "ﷺ",
    ]
)
SAFE = [kind for kind in rewards.vocabulary()["types"] if kind not in ("math", "code")]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(st.text(max_size=300), st.lists(PIECES, max_size=40).map("".join)))
def test_any_text_gets_a_valid_score(text):
    for kind in SAFE:
        out = rewards.score(example(kind), text)
        assert 0 <= out["accuracy"] <= 1 and out["format"] in (0, 0.5, 1) and 0 <= out["overall"] <= 1 + 1e-9
        assert out["status"] in ("ok", "wrong", "invalid", "truncated") and (out["accuracy"] > 0) == (
            out["status"] == "ok"
        )
        json.dumps(out)


SCENES = ["A. A man sits", "B. A woman is running", "C. A dog is sleeping", "D. A cat jumps"]
WORDINGS = [  # problem type, gold, options, accuracy, answers in other words
    ('multiple choice', 'C', SCENES, 0.0, [
        'I would not choose C.', "I don't think it is C", 'I do not think the answer is C.',
        "The answer can't be C", 'The answer is unlikely to be C', 'The wrong answer is C',
        'incorrect answer: C', 'Incorrect option: C', '不能选C', '不应该选C', '不可能是C', '答案不可能是C', '不选C', 'C不正确',
    ]),
    ('multiple choice', 'B', SCENES, 0.0, [
        'The answer is B (or C)', 'The answer is B, or possibly C', 'The answer is B, possibly C',
        "I think it's B, but it could be C.", 'B; C',
        'The correct answer is B. A woman is running or C. A dog is sleeping',
    ]),
    ('multiple choice', 'A', SCENES, 0.0, [
        '(A)(B)', 'A.B.C.',
    ]),
    ('multiple choice', 'C', SCENES, 1.0, [
        'The most likely option is C', 'It should be C', 'the answer is actually C', 'the answer is indeed C',
        'Maybe C', 'Perhaps C', 'Most likely C', 'Definitely C!', "I'm going with C", 'Going with C.',
        'I selected C', 'The solution is C', 'The correct one is C', 'In conclusion, C.',
        'This corresponds to option C', 'This matches option C.', 'Letter C', 'C (not B)', 'C and not B',
        'not B, C', 'Neither A nor B; C', 'We can eliminate A, B and D. That leaves C.',
        '{"choice": "C", "reason": "A dog is shown"}', 'C选项', 'C 项正确', 'C对', 'A错误，B错误，D错误，所以C', '\\boxed {C}',
        '\\fbox{C}', '\\boxed{\\textit{C}}', '\\boxed{\\textsf{C}}', '\\boxed{\\bf C}',
        'The answer is A. No, C.', 'The answer is not B but C', 'The answer is not A. It is C.',
    ]),
    ('multiple choice', 'B', SCENES, 1.0, [
        "The answer could be A or B, but I'm going with B.", 'B', '**B**', '(B)', 'Answer: B',
        'The answer is B. A woman is running.', 'I choose B because she runs', 'It is B, not C.',
        'B is correct; A is wrong', 'B. A woman is running, not C. A dog is sleeping',
    ]),
    ('multiple choice', 'B', ["left", "right"], 1.0, [
        'right', 'He turns right.', "That's right, B",
    ]),
    ('multiple choice', 'A', ["left", "right"], 1.0, [
        "That's right, A", 'That is right: A', 'Option A is right.', 'All right, the answer is A.',
    ]),
    ('multiple choice', 'B', ["A. 10", "B. 1000"], 1.0, [
        '1,000', 'The answer is 1,000', 'one thousand', 'There are one thousand.',
    ]),
    ('multiple choice', 'A', ["A. Ten", "B. 1,000"], 1.0, [
        '10', 'There are 10.', 'ten',
    ]),
    ('multiple choice', 'A', FRUIT, 0.0, [
        'ANSWER IS A MAN', 'THE ANSWER IS A MAN WHO SITS', 'The answer is A man',
    ]),
    ('multiple choice', 'B', ["A dog", "A man"], 1.0, [
        'ANSWER IS A MAN',
    ]),
    ('multiple choice', 'A', FRUIT, 1.0, [
        'ANSWER IS A BECAUSE THERE ARE TWO', 'The answer is A\nexplained below', 'Answer: A not B', 'ANSWER IS A',
    ]),
    ('numerical', '3', None, 0.0, [
        '3 cats and 4 dogs', '3 cats, 4 dogs', '3 small cats and 4 dogs', '3只猫和4只狗', '2^3^2',
    ]),
    ('numerical', '5', None, 1.0, [
        '3 red, 2 blue: 5 total', '5 people in total, 3 men and 2 women', '3 men and 2 women, 5 altogether',
        '5 people, 2 of whom are men', '3 cats and 2 dogs, so 5',
    ]),
    ('numerical', '1500000', None, 1.0, [
        'one point five million', '1.5 million', '一百五十万',
    ]),
    ('numerical', '15000', None, 1.0, [
        '一点五万',
    ]),
    ('numerical', '2.25', None, 1.0, [
        'two point two five', '1.5^2',
    ]),
    ('numerical', '1024', None, 1.0, [
        '2^10', '2**10', '2^{10}', '2¹⁰', '$2^{10}$', '2^10 = 1024', 'It is 2^10.',
    ]),
    ('numerical', '0.15', None, 1.0, [
        '15*10**-2', '1.5×10⁻¹', '1.5 * 10^{-1}',
    ]),
    ('llava preference', '1', None, 1.0, [
        '回答1更好', '回答1比回答2更好', '第一个回答更好',
    ]),
    ('llava preference', 'tie', None, 1.0, [
        '两个回答一样好',
    ]),
    ('temporal grounding', '[3600, 3630]', None, 1.0, [
        '1 h to 1 h 30 s', '1 hour to 1 hour and 30 seconds', '1小时到1小时30秒', '1:00:00 - 1:00:30',
    ]),
    ('temporal grounding', '[3600, 7200]', None, 1.0, [
        '1 to 2 hours', '1 h - 2 h', '{"start_time": 3600, "end_time": 7200}', '{"time_range": [3600, 7200]}',
    ]),
    ('spatial-temporal grounding', TUBE.replace('[8, 10]', '[8, 9]'), None, 1.0, [
        '[{"time": 8, "box": [0, 0, 10, 10]}, {"time": 9, "box": [0, 0, 10, 10]}]',
        '[{"bbox_2d": [0, 0, 10, 10], "timestamp": "8.0"}, {"bbox_2d": [0, 0, 10, 10], "timestamp": "9.0"}]',
        '{"time_range": [8, 9], "bboxes": [{"time": 8, "box": [0, 0, 10, 10]}, {"time": 9, "box": [0, 0, 10, 10]}]}',
        '{"time_range": [8, 9], "bboxes": {"8": [0, 0, 10, 10], "9": [0, 0, 10, 10]}}',
        '{"start": 8, "end": 9, "boxes": {"8": [0, 0, 10, 10], "9": [0, 0, 10, 10]}}',
    ]),
    ('numerical', '3', None, 0.0, [
        '3 (or 4)', '3, maybe 4', '3 people, or possibly 4', '3个或4个', '3.0 \\pm 0.1', 'more than 3',
    ]),
    ('numerical', '5', None, 0.0, [
        '5 or more', '5+', '>5', 'less than 5', 'no more than 5', 'The answer is not 5', 'at least 5',
    ]),
    ('numerical', '6', None, 1.0, [
        'The answer is not 5 but 6', 'Not 5 but 6',
    ]),
    ('numerical', '7', None, 1.0, [
        'Answer: 3+4=7', '3 + 4 = 7',
    ]),
    ('numerical', '12', None, 1.0, [
        'The answer: 3 × 4 = 12',
    ]),
    ('numerical', '5', None, 1.0, [
        '5 = 2 + 3', '5 in total: 3 red, 2 blue', '有三只狗和两只猫，共五只',
        'In the 30-second video, the man jumps 5 times', 'about 5', 'exactly 5 people', '5 (five)',
    ]),
    ('numerical', '8', None, 1.0, [
        'The answer is: 8\n\nExplanation: 5+3',
    ]),
    ('numerical', '0.125', None, 1.0, [
        '百分之十二点五',
    ]),
    ('numerical', '500000', None, 1.0, [
        'half a million',
    ]),
    ('numerical', '2.75', None, 1.0, [
        'two and three quarters',
    ]),
    ('numerical', '0.6', None, 1.0, [
        'three fifths',
    ]),
    ('numerical', '0.33', None, 1.0, [
        'a third', 'one third',
    ]),
    ('numerical', '0.75', None, 1.0, [
        '\\frac34',
    ]),
    ('numerical', '3000', None, 1.0, [
        '3k',
    ]),
    ('numerical', '1', None, 1.0, [
        'once',
    ]),
    ('numerical', '2', None, 1.0, [
        'twice',
    ]),
    ('numerical', '0.5', None, 1.0, [
        '半', 'half',
    ]),
    ('regression', '0.5', None, 1.0, [
        '50%',
    ]),
    ('boolean', 'no', None, 1.0, [
        'Most likely no.', '这是错误的', '答案是否', 'Nope', 'Absolutely not', 'Not at all', '不', '不会', '没有', '不，他没有',
        'No, he does not.',
    ]),
    ('boolean', 'yes', None, 1.0, [
        'Yeah', '没错', '有', 'Most likely yes', '这是正确的', 'That is right', 'Correct.', 'Yep',
    ]),
    ('boolean', 'yes', None, 0.0, [
        'The man on the right', 'He turns right and goes',
    ]),
    ('llava preference', '2', None, 1.0, [
        'Answer: 2', '2 is better', 'Response 1 is worse than response 2', 'B', 'Response 2 is better',
    ]),
    ('llava preference', '1', None, 1.0, [
        '1 is better than 2', 'A > B', 'Response 1',
    ]),
    ('llava preference', '1', None, 0.0, [
        'Response 1 or 2',
    ]),
    ('temporal grounding', '[3, 7]', None, 1.0, [
        '开始于3秒，结束于7秒', 'from 3 through 7 seconds', '３秒から７秒', '3s - 7s', 'between 3 and 7 seconds',
    ]),
    ('temporal grounding', '[30,60]', None, 1.0, [
        'half a minute to one minute',
    ]),
    ('temporal grounding', '[63,127]', None, 1.0, [
        '1\'03" to 2\'07"',
    ]),
    ('temporal grounding', '[0,5]', None, 1.0, [
        'the first 5 seconds',
    ]),
    ('ocr', 'STOP', None, 1.0, [
        "The sign says 'STOP'", 'The text reads: STOP', 'The answer is STOP', 'The sign reads "STOP"', 'STOP',
    ]),
    ('ocr', '停车场', None, 1.0, [
        '文字是「停车场」',
    ]),
    ('math', '100000', None, 1.0, [
        '1e5',
    ]),
    ('math', '18', None, 1.0, [
        '$\\$18$',
    ]),
    ('spatial-temporal grounding', '{"time": [8, 9], "boxes": {"8": [1,2,30,40], "9": [1,2,30,40]}}', None, 1.0, [
        '{"time": [8, 9], "boxes": {8: [1,2,30,40], 9: [1,2,30,40]}}',
    ]),
]



@pytest.mark.parametrize("kind,gold,options,accuracy,answers", WORDINGS)
def test_wordings_of_models(kind, gold, options, accuracy, answers):
    """No to a letter is no vote for it, two letters are none; open ranges are no number; and what people say."""
    record = {"problem_type": kind, "answer": gold, "options": options}
    assert {text: rewards.score(record, text)["accuracy"] for text in answers} == dict.fromkeys(answers, accuracy)


def test_code_with_tests_is_compared_with_its_gold_while_execution_is_off():
    code = "def f(x):\n    return x * x\n"
    record = {"problem_type": "code", "answer": code, "tests": ["assert f(2) == 4"], "where": "a:1"}
    rewards.check_record(record)
    answer = f"```python\n{code}```\nIt prints:\n```\n4\n```"  # the last block is no solution
    assert rewards.score(record, answer)["accuracy"] == 1
    for wrong, hint in (({"answer": ""}, "cannot be read as code"), ({"tests": 5}, "`tests` must be a list")):
        with pytest.raises(ValueError, match=hint):
            rewards.check_record(record | wrong)


def test_a_mask_that_is_none_is_refused_at_load():
    gold = {"boxes": [1, 2, 3, 4], "mask": {"size": [4], "counts": [1]}, "positive_points": [[1, 2]]}
    record = {"problem_type": "segmentation", "answer": json.dumps(gold), "where": "a:1"}
    with pytest.raises(ValueError, match="a:1"):
        rewards.check_record(record)


@pytest.mark.parametrize(
    "unit",
    [
        "A, ",
        "A or B ",
        "answer is ",
        "answer is A. ",
        "1 or ",
        "1/",
        "[",
        "{[",
        '\\"',
        '"',
        "(",
        "not ",
        "one ",
        "十",
        "<think>",
        "<answer>",
        r"\boxed{",
        "```",
        "<svg>",
        "<div>",
        "\u0301",
        "\u0327\u0301",
        "ﷺ",
        "½",
        "- ",
        "0:",
        "yes or ",
        "9",
        '{"a":',
        "(A)(B)",
        "half a ",
        "不能",
    ],
)
def test_work_grows_linearly_with_the_text(unit):
    """CPU time of 1x and 8x the text: counting calls would be blind to loops in C."""

    def cpu(kind, text):
        record, best = example(kind), math.inf
        for _ in range(3):
            start = time.process_time()
            rewards.score_here(record, text, rewards.RewardSettings())
            best = min(best, time.process_time() - start)
        return best

    for kind in SAFE:
        short, long = (
            cpu(kind, unit * (2500 // len(unit.encode()))),
            cpu(kind, unit * (20000 // len(unit.encode()))),
        )
        assert long < 30 * short + 0.02, (kind, short, long)  # quadratic work would be 64 x


# ---------------------------------------------------------------- workers, custom rewards, the command


def test_a_response_that_hangs_is_invalid_and_the_others_are_scored():
    scorer = rewards.Scorer(rewards.RewardSettings(timeout_s=2.0), workers=2)
    responses = ["4", "9^{9^{9^{9}}}", r"\boxed{4}", "{" * 5000, "1" * 100_000, "5", "4"]
    results = scorer.score_many([{"problem_type": "math", "answer": "4"}] * len(responses), responses)
    assert [out["accuracy"] for out in results] == [1, 0, 1, 0, 0, 0, 1]
    assert results[1]["status"] == "invalid" and "2.0 s" in results[1]["method"]
    assert scorer.score_many([{"problem_type": "math", "answer": "4"}], ["4"])[0]["accuracy"] == 1
    scorer.close()


def test_the_pool_agrees_with_scoring_in_this_process():
    scorer = rewards.Scorer(workers=2)
    pairs = [
        (example(kind), text)
        for kind, (gold, _) in GOLDS.items()
        for text in (gold, f"<answer>{gold}</answer>", "no idea")
    ]
    records, responses = zip(*pairs)
    assert scorer.score_many(records, responses) == [rewards.score(*pair) for pair in pairs]
    scorer.close()


def custom(tmp_path, body):
    path = tmp_path / "mine.py"
    path.write_text(f"def reward(record, response):\n    {body}\n")
    return f"{path}:reward"


def test_a_custom_reward_returns_a_float_or_a_dict(tmp_path):
    record = {"problem_type": "my own", "answer": "x", "key": "k1"}
    setting = rewards.RewardSettings(reward=custom(tmp_path, "print('noise'); return len(response) / 40"))
    out = rewards.score(record, "<answer>abc</answer>", setting)
    assert (out["accuracy"], out["format"], out["overall"], out["status"]) == (
        0.5,
        1.0,
        pytest.approx(0.55),
        "ok",
    )
    setting = rewards.RewardSettings(
        reward=custom(tmp_path / "..", "return {'accuracy': 1, 'overall': 3.0, 'style': 0.25}")
    )
    assert (
        rewards.score(record, "", setting)["style"] == 0.25
        and rewards.score(record, "", setting)["overall"] == 3.0
    )


def test_an_error_in_a_custom_reward_names_the_record_and_stops_unless_told_otherwise(tmp_path, caplog):
    record = {"problem_type": "my own", "key": "k1"}
    not_finite = "return {'accuracy': 1, 'format': float('inf')}"
    bodies = ("return 1 / 0", "return {'style': 1.0}", "return {}", "return float('nan')", "return 'good'", "return None", not_finite,
              "import os; os._exit(3)", "import os; os._exit(0)", "while True: pass")
    for i, body in enumerate(bodies):
        (tmp_path / str(i)).mkdir()
        spec = custom(tmp_path / str(i), body)
        stop = rewards.RewardSettings(reward=spec, timeout_s=1.0)
        with pytest.raises(rewards.RewardError, match="mine.py:reward on k1: .*zero"):
            rewards.score(record, "", stop)
        caplog.clear()
        out = rewards.score(record, "", rewards.RewardSettings(reward=spec, timeout_s=1.0, on_reward_error="zero"))
        assert (out["accuracy"], out["status"]) == (0, "invalid") and "k1" in out["method"]
        assert "k1" in caplog.text
    spec = custom(tmp_path, "return {'style': 1.0}")
    with pytest.raises(rewards.RewardError, match="mine.py:reward on k1.*style.*add `accuracy` or `overall`"):
        rewards.score(record, "", rewards.RewardSettings(reward=spec))
    with pytest.raises(rewards.RewardError, match="file.py:function"):
        rewards.score(record, "", rewards.RewardSettings(reward="/nowhere.py:f"))


def test_a_worker_that_a_custom_reward_ends_costs_only_its_own_response(tmp_path):
    spec = custom(tmp_path, "import os; return len(response) if response else os._exit(1)")
    scorer = rewards.Scorer(rewards.RewardSettings(reward=spec, on_reward_error="zero"), workers=2)
    results = scorer.score_many([{"key": str(i)} for i in range(5)], ["a", "", "ab", "", "abc"])
    scorer.close()
    assert [out["accuracy"] for out in results] == [1, 0, 2, 0, 3]


def test_quick_types_start_no_process_and_workers_end_when_their_parent_is_killed(tmp_path):
    scorer = rewards.Scorer()
    assert scorer.score_many([{"problem_type": "numerical", "answer": "4"}], ["4"])[0]["accuracy"] == 1
    assert scorer.idle == [None]
    script = (
        "import os, signal, rewards; scorer = rewards.Scorer(rewards.RewardSettings(timeout_s=1.0))\n"
        "record = {'problem_type': 'math', 'answer': '4'}; scorer.score_many([record], ['4'])\n"
        "print(scorer.idle[0].pid, flush=True); scorer.askers.submit(scorer.ask, record, '9^{9^{9^{9}}}')\n"
        "import time; time.sleep(0.3); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    for _ in range(200):
        status_file = Path(f"/proc/{int(done.stdout)}/status")
        if not status_file.exists() or "State:\tZ" in status_file.read_text():
            return
        time.sleep(0.05)
    pytest.fail("the worker lives on")


def command(*arguments):
    return subprocess.run(
        [sys.executable, ROOT / "rewards.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_command_prints_a_table_writes_scores_and_shows_examples(tmp_path):
    file, out = tmp_path / "r.jsonl", tmp_path / "s.jsonl"
    rows = [
        {"problem": "p", "problem_type": "numerical", "answer": "4", "responses": ["4", "5", "<think>"]},
        {
            "problem": "p",
            "problem_type": "Multiple Choice",
            "options": FRUIT,
            "solution": "<answer>C</answer>",
            "response": "hm",
        },
    ]
    rows[0]["problem"] = "one \u2028 record"
    file.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    done = command(file, "--out", out, "--show", "wrong", 1, "--workers", 1)
    assert done.returncode == 0, done.stderr
    lines = {line[:28].strip(): line[28:].split() for line in done.stdout.splitlines()}
    assert lines["numerical"][:2] == ["3", "0.3333"] and lines["numerical"][4] == "0.3333"
    assert lines["all"][0] == "4" and lines["Multiple Choice"][3] == "1.0000"
    assert "read '(5.0, False)'" in done.stdout
    scored = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["status"] for row in scored] == ["ok", "wrong", "truncated", "invalid"]
    explained = command(file, "--explain", 2, "--workers", 1)
    file.write_text("\n")
    assert command(file).returncode == 0
    assert "gold '4', read '(5.0, False)'" in explained.stdout and "(last sentence)" in explained.stdout


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "JSON"),
        ('{"problem_type": "numerical", "answer": "1"}', "response"),
        ("[1]", "response"),
        ('{"problem_type": "nummer", "answer": "1", "response": ""}', "nearest"),
        ('{"problem_type": "numerical", "answer": "1", "response": null}', "a text"),
        ('{"problem_type": "numerical", "answer": "1", "response": 5}', "a text"),
        ('{"problem_type": "numerical", "answer": "1", "response": ["1"]}', "a text"),
        ('{"problem_type": "numerical", "answer": "1", "responses": "1"}', "a text"),
        ('{"problem_type": "numerical", "answer": "1", "responses": ["1", null]}', "a text"),
        ('{"problem_type": "numerical", "answer": "1", "responses": 7}', "a text"),
    ],
)
def test_the_command_answers_bad_rows_with_one_line_and_exit_code_2(tmp_path, line, message):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"problem_type": "numerical", "answer": "1", "response": "1"}\n' + line + "\n")
    done = command(file)
    assert (
        done.returncode == 2
        and f"{file}:2" in done.stderr
        and message in done.stderr
        and done.stderr.count("\n") == 1
    )


def test_importing_rewards_loads_no_heavy_library():
    heavy = ("torch", "numpy", "sympy", "math_verify", "rouge_score", "lxml", "yaml")
    code = f"import sys, rewards; print([m for m in {heavy} if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        == "[]"
    )
    assert os.path.exists(ROOT / "rewards.py")
