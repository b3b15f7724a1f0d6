"""Answers as models write them: thoughts, restarts, corrections, Markdown, LaTeX, JSON, Chinese, each with the
score that a careful reader gives it.  Three follow a rule: 4.2 for a gold of 4 is within each threshold of the
relative accuracy, a per cent sign is a unit (60 % for 60), the last word of a correction counts.

pytest -q tests/test_rewards_answers.py
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import rewards  # noqa: E402

SCENES = ["A. A man sits", "B. A woman is running", "C. A dog is sleeping", "D. A cat jumps"]
COLOURS = ["A. red", "B. red and blue", "C. blue", "D. None of the above"]
TIMES = ["A. 2 minutes", "B. 12 minutes", "C. 20 minutes", "D. 21 minutes"]
DOORS = ["A. He opens the door", "B. He does not open the door", "C. He opens the window", "D. Cannot tell"]
MOVES = ["A. Walks", "B. Walks and sits", "C. Runs", "D. Both A and C"]
VERDICTS = ["Yes", "No", "Not mentioned"]
TUBE = '{"time": [8, 10], "boxes": {"8": [0, 0, 10, 10], "9": [0, 0, 10, 10]}}'
ANSWERS = [  # problem type, gold, options, accuracy, answers
    ('multiple choice', 'B', SCENES, 1, [
        '<think>At first I thought A, since somebody sits. Wait, actually at 0:12 she gets up and runs. S'
        'o B? Let me re-check the frames... yes, running.</think>\n\nLooking at the video step by step:\n'
        '1. A man enters (option A).\n2. A woman runs past.\n\nTherefore, the correct answer is **B. A wo'
        'man is running**.',
        '首先看选项A，男人没有坐下，排除A。选项C中的狗没有睡觉，排除C。所以应该选B。',
        '<answer>b</answer>',
        'Option A: the man sits — no evidence.\nOption B: the woman is running — matches.\nOption C: dog '
        'asleep — no.\nOption D: cat jumps — no.\n\nHence option B.',
        "Let's go through it.\n\n**A**: The man stands the whole time, so this is out.\n**B**: Correct.\n"
        '**C**: no dog.\n**D**: no cat.',
        'Options A, C and D are incorrect. The answer must therefore be B.',
        'I initially considered C but B is a better fit.',
        'The best answer is B, although A is also plausible.',
        'The answer is (B).\n\nConfidence: 85%',
        'Final Answer: $\\boxed{B}$\n\nExplanation: A is wrong because he stands.',
    ]),
    ('multiple choice', 'C', SCENES, 1, [
        'The answer is B... no wait, let me correct myself: the dog is asleep the whole time. The answer '
        'is C.',
        '```json\n{"reasoning": "The man (A) leaves; the cat (D) never shows up.", "answer": "C"}\n```',
        '<think>x</think><answer>A</answer> Hold on. <answer>C</answer>',
        'The final answer is $\\boxed{\\text{C. A dog is sleeping}}$.',
        'Answer: **C** (A dog is sleeping)',
        "The correct choice isn't B; rather, it's C.",
        '答案应该是 C，因为狗在睡觉。',
        '我认为不是A也不是B，而是C。',
    ]),
    ('multiple choice', 'D', SCENES, 1, [
        '综上所述，A、B、C均不符合视频内容，因此正确答案为D。',
        '### Final Answer\n**D**\n',
        'My choice: (D) A cat jumps — the others (A, B, C) do not occur.',
        '{"answer": {"letter": "D"}}',
    ]),
    ('multiple choice', 'A', SCENES, 1, [
        "It's definitely not B, and C can be ruled out since there is no dog. Between A and D, I lean tow"
        'ards A.',
        'Either A or B could be right, but the evidence is stronger for A. So my final answer: A',
        '<answer>\nOption A\n</answer>\n',
    ]),
    ('multiple choice', 'A', SCENES, 0, [
        'Between A and D I cannot decide.',
        "I am torn between B and C; if forced I'd say B.",
        '可能是A，也可能是B',
    ]),
    ('multiple choice', 'C', SCENES, 0, [
        'b',
        '<think>The dog',
    ]),
    ('multiple choice', 'B', COLOURS, 1, [
        'The ball is red and blue.',
    ]),
    ('multiple choice', 'A', COLOURS, 0, [
        'The ball is red and blue.',
    ]),
    ('multiple choice', 'C', COLOURS, 1, [
        "The ball is not red, it's blue",
    ]),
    ('multiple choice', 'D', COLOURS, 1, [
        'None of the above.',
    ]),
    ('multiple choice', 'A', TIMES, 1, [
        'It lasts 2 minutes.',
    ]),
    ('multiple choice', 'B', TIMES, 1, [
        'It takes about 12 minutes, so B',
    ]),
    ('multiple choice', 'B', DOORS, 1, [
        'He does not open the door.',
    ]),
    ('multiple choice', 'A', DOORS, 0, [
        'He does not open the door.',
    ]),
    ('numerical', '17', None, 1, [
        'Let me count: first shelf 8, second shelf 9. 8 + 9 = 17. Wait, did I count the fallen one? No. S'
        'o there are **17 books**.',
        '<answer>seventeen</answer>',
    ]),
    ('numerical', '0.25', None, 1, [
        '25 percent',
    ]),
    ('numerical', '25', None, 0, [
        'a quarter',
    ]),
    ('numerical', '1250', None, 1, [
        'The total cost comes to $1,250.00.',
    ]),
    ('numerical', '12', None, 0, [
        'between 10 and 12',
    ]),
    ('numerical', '3', None, 1, [
        '答案：三次',
        'The man jumps 3 times in the first 10 seconds.',
    ]),
    ('numerical', '42', None, 1, [
        'Thus we get \\[ x = 42 \\]',
    ]),
    ('numerical', '9', None, 1, [
        'I count nine people, although one of the 10 leaves early. Final answer: nine.',
    ]),
    ('numerical', '6', None, 1, [
        'It could be 5, but counting again I get 6.',
    ]),
    ('regression', '2.5', None, 1, [
        'The room is roughly 2.5 metres wide (about 8 feet).',
    ]),
    ('regression', '4', None, 1, [
        'Approximately 4.2m',
    ]),
    ('boolean', 'no', None, 1, [
        'Based on the video, the statement is incorrect because the man never sits down.',
        '视频中没有出现这一情节，所以答案是否。',
        "I can't see any evidence; therefore the answer is No.",
        'False. It is not correct that he runs.',
    ]),
    ('boolean', 'yes', None, 1, [
        '<think>no... hmm, maybe yes</think>\nYes, she does pick it up.',
        'It is not the case that the statement is false; it is true.',
        'Answer: **Yes** – the man does not leave.',
        'Yes. There is no doubt about it.',
    ]),
    ('binary classification', 'fake', None, 1, [
        'After careful examination, I believe this video is fake.',
    ]),
    ('math', '\\frac{3}{4}', None, 1, [
        'We have $P = 1 - \\frac14$.\n\nThe final answer is $\\boxed{\\frac{3}{4}}$. I hope it is correct'
        '.',
    ]),
    ('math', 'x=2, x=-5', None, 1, [
        'The solutions are \\boxed{-5, 2}',
    ]),
    ('math', '(2, \\infty)', None, 1, [
        '\\boxed{x > 2}',
    ]),
    ('math', '12 cm', None, 1, [
        '**Answer:** 12 cm',
    ]),
    ('ocr', 'No Parking 8AM-6PM', None, 1, [
        'The text on the sign reads:\n\n"No Parking 8AM-6PM"',
    ]),
    ('ocr', '出口', None, 1, [
        '**出口**',
    ]),
    ('open-ended', 'blue umbrella', None, 1, [
        '**Answer:** a blue umbrella.',
    ]),
    ('open-ended', 'blue umbrella', None, 0, [
        'A red umbrella',
    ]),
    ('video qa', 'Paris', None, 1, [
        'The city shown is Paris.',
    ]),
    ('temporal grounding', '[65, 82]', None, 1, [
        'The event starts at 1:05 and ends at 1:22.',
        'In the first half, from 0:10 to 0:20, he cooks. The queried moment happens from 01:05 to 01:22.',
    ]),
    ('temporal grounding', '[3.5, 9]', None, 1, [
        '<answer>3.5 - 9.0 seconds</answer>',
    ]),
    ('temporal grounding', '[10, 20]', None, 1, [
        '该事件发生在第10秒到第20秒之间。',
        '```json\n[{"start_time": 10.0, "end_time": 20.0, "description": "he jumps 3 times"}]\n```',
    ]),
    ('spatial grounding', '[100, 150, 300, 400]', None, 1, [
        '```json\n[\n  {"bbox_2d": [100, 150, 300, 400], "label": "the dog"}\n]\n```',
        'The dog is at <box>(100,150),(300,400)</box>.',
    ]),
    ('spatial-temporal grounding', TUBE, None, 1, [
        '```json\n{"time": [8.0, 10.0], "boxes": {"8.0": [0,0,10,10], "9.0": [0,0,10,10]}}\n```',
        'The event spans 8 to 10 s.\n```json\n{"time": [8, 10], "boxes": {"8": [0, 0, 10, 10], "9": [0, 0'
        ', 10, 10]}}\n```',
    ]),
    ('tracking', TUBE, None, 0.5, [
        '{"boxes": {"9": [0, 0, 10, 10]}}',
    ]),
    ('segmentation', '{"boxes": [0, 0, 10, 10], '
        '"positive_points": [[5, 5], [6, 6]], "negative_points": [[20, 20]]}', None, 1, [
        '<answer>{"boxes": [0, 0, 10, 10], "positive_points": [[5, 5]], "negative_points": [[20, 20]]}</a'
        'nswer>',
    ]),
    ('code', 'def f(x):\n    return x + 1', None, 1, [
        'Here is the solution:\n\n```python\ndef f(n):\n    return n + 1\n```\n\nExample:\n```\n>>> f(1)'
        '\n2\n```',
    ]),
    ('svg-code', "<svg><rect x='1'/></svg>", None, 1, [
        '<answer>```xml\n<?xml version="1.0"?>\n<svg><rect x=\'1\'/></svg>\n```</answer>',
    ]),
    ('html-code', "<p class='a'>hi</p>", None, 1, [
        '```html\n<p class="a">hi</p>\n```',
    ]),
    ('llava preference', '2', None, 1, [
        'Response 1 is fluent but misses the car. Response 2 is more accurate overall. Verdict: [[B]]',
        'I prefer the second response because the first one hallucinates.',
    ]),
    ('critic preference', '1', None, 1, [
        'While Answer 2 is longer, Answer 1 is more faithful to the image, so Answer 1 is better.',
    ]),
    ('llava preference', 'tie', None, 1, [
        'Both responses are equally good, so it is a tie.',
    ]),
    ('temporal grounding', '[10, 20]', None, 0, [
        '<think>The event is from 10 to 20',
    ]),
    ('boolean', 'yes', None, 0, [
        '否，是的',
    ]),
    ('multiple choice', 'D', MOVES, 1, [
        'The answer is D. Both A and C',
        'Both A and C',
    ]),
    ('multiple choice', 'B', MOVES, 1, [
        'He walks and sits.',
    ]),
    ('multiple choice', 'B', VERDICTS, 1, [
        'No',
    ]),
    ('multiple choice', 'C', VERDICTS, 1, [
        'It is not mentioned.',
    ]),
    ('numerical', '4', None, 1, [
        '1. A red car at 0:03\n2. A blue car at 0:10\n3. A van at 0:15\n4. A bus at 0:21\n\nTotal: 4 vehi'
        'cles',
        'There are four (4) vehicles.',
    ]),
    ('numerical', '3.5', None, 1, [
        '≈ 3.5 m/s',
    ]),
    ('numerical', '120', None, 1, [
        '2 minutes = 120 seconds',
    ]),
    ('numerical', '0.05', None, 1, [
        '5 × 10^{-2}',
    ]),
    ('numerical', '7', None, 1, [
        'I first said 6, but the correct count is 7.',
    ]),
    ('numerical', '15', None, 0, [
        '15/20',
    ]),
    ('numerical', '20000', None, 1, [
        '两万',
    ]),
    ('numerical', '8', None, 1, [
        'The count is 8, not 7.',
    ]),
    ('numerical', '5', None, 0, [
        "I think it's 5... maybe 6?",
    ]),
    ('regression', '30', None, 1, [
        'The object is approximately thirty centimeters tall.',
    ]),
    ('boolean', 'no', None, 0, [
        "It's hard to tell: maybe yes, maybe no.",
    ]),
    ('math', '\\sqrt{5}', None, 1, [
        'So $c^2 = 5$ and $c = \\sqrt{5}$.',
    ]),
    ('math', '\\frac{\\pi}{6}', None, 1, [
        '**Final answer:** $\\dfrac{\\pi}{6}$ radians',
    ]),
    ('math', '0.5', None, 1, [
        '<answer>\\frac{1}{2}</answer>',
    ]),
    ('math', '1000', None, 1, [
        'The total is \\boxed{1{,}000}',
    ]),
    ('math', '60', None, 1, [
        '\\boxed{60\\%}',
    ]),
    ('temporal grounding', '[12, 18]', None, 1, [
        'The clip is 60 seconds long. The relevant moment starts at around 12s and lasts until 18s.',
        '<answer>[00:12, 00:18]</answer>',
        'I thought it was 5 to 9 seconds, but actually it is 12 to 18 seconds.',
        '{"start": "12.0s", "end": "18.0s"}',
    ]),
    ('temporal grounding', '[72, 90]', None, 1, [
        '**1m12s – 1m30s**',
    ]),
    ('spatial grounding', '[10, 20, 30, 40]', None, 1, [
        'x1=10, y1=20, x2=30, y2=40',
        '{"bbox": [10.0, 20.0, 30.0, 40.0]}',
    ]),
    ('spatial grounding', '[[10, 20, 30, 40], [50, 60, 70, 80]]', None, 1, [
        '[{"bbox_2d": [10, 20, 30, 40]}, {"bbox_2d": [50, 60, 70, 80]}]',
    ]),
    ('ocr', 'EXIT 24', None, 1, [
        "It says 'EXIT 24'.",
    ]),
    ('ocr', 'Hello World', None, 1, [
        'hello, world!',
    ]),
    ('open-ended', 'two', None, 1, [
        'Two.',
    ]),
    ('open-ended', 'a red apple', None, 1, [
        'red apple',
    ]),
    ('llava preference', '1', None, 1, [
        'Assistant A is better than Assistant B.',
    ]),
    ('critic preference', '2', None, 1, [
        'Response 1 < Response 2',
    ]),
    ('code', 'print(1)', None, 1, [
        'print(1)',
    ]),
    ('html-code', '<ul><li>a</li><li>b</li></ul>', None, 1, [
        '<ul><li>a<li>b</ul>',
    ]),
    ('svg-code', '<svg/>', None, 0, [
        '<svg><g></svg>',
    ]),
]


@pytest.mark.parametrize("kind,gold,options,accuracy,answers", ANSWERS)
def test_answers_as_models_write_them(kind, gold, options, accuracy, answers):
    record = {"problem_type": kind, "answer": gold, "options": options}
    rewards.check_record(record)
    scores = {text: rewards.score(record, text)["accuracy"] for text in answers}
    assert scores == pytest.approx(dict.fromkeys(answers, accuracy))
