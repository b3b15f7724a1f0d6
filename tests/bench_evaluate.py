"""The usual evaluation loop against evaluate.py, on the toy's clips, by one engine in one run.

    python tests/bench_evaluate.py [--data toy/train.jsonl] [--clips 300] [--workers 2]

sequential: decode a clip, generate its answer, score it, then the next one: a batch of one.
evaluate.py: clips are decoded in worker processes, prompts enter the engine as their clips arrive, answers
are scored and written meanwhile.  Prints seconds, the share of them in which the engine was idle, the
ratio, and whether the answers are the same.  Starting the engine counts for neither, starting workers does.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import evaluate  # noqa: E402
import rewards  # noqa: E402
import rollout  # noqa: E402
import video_io  # noqa: E402
from toy import MEDIA  # noqa: E402


def main():
    from transformers import AutoConfig

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="toy/model")
    parser.add_argument("--data", default="toy/train.jsonl")
    parser.add_argument("--clips", type=int, default=300)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    config, prompts = AutoConfig.from_pretrained(args.model), video_io.load_prompts()
    spec = video_io.media_spec(config, **MEDIA)
    settings = dict(temperature=0.0, top_p=1.0, top_k=-1, seed=0, n=1, max_tokens=24, queue_bytes=8e9)
    records = [r for r in video_io.load_records(args.data) if r["videos"]][: args.clips]
    for record in records:
        record.update(data="toy", content=record["key"])
    prompter = rollout.Prompter(video_io.load_processor(args.model), config, prompts, "direct", None, 512)
    measured, answers = {}, {}
    with contextlib.ExitStack() as stack:
        use = lambda resource: stack.enter_context(contextlib.closing(resource))
        engine = use(
            rollout.Engine(
                args.model, dtype="float32", max_model_len=1024, banned=video_io.vision_token_ids(config)
            )
        )
        scorer = use(rewards.Scorer())
        scorer.score_many(records[:1], ["A"])  # its worker starts for neither

        def sequential():
            for record in records:
                group = prompter.group(
                    record, SimpleNamespace(result=lambda: video_io.load_media(record, spec))
                )
                engine.generate([group], 1, max_tokens=24, temperature=0.0)
                scorer.score_many([record], [group.responses[0].text])
                answers["sequential", record["key"]] = group.responses[0].text

        def ours():
            loader = use(video_io.MediaLoader(spec, args.workers))
            with tempfile.NamedTemporaryFile("w+b") as file:
                task = SimpleNamespace(loader=loader, prompter=prompter, file=file)
                evaluate.answer_all(records, {"toy": task}, engine, scorer, **settings)
                rows = map(evaluate.json.loads, Path(file.name).read_text().splitlines())
                answers.update({("evaluate.py", row["key"]): row["response"] for row in rows})

        for name, function in (("sequential", sequential), ("evaluate.py", ours)):
            engine.reset_caches()
            started, engine.busy = time.monotonic(), 0.0
            function()
            seconds = time.monotonic() - started
            measured[name] = seconds
            rate, idle = len(records) / seconds, 1 - engine.busy / seconds
            print(f"{name:12} {seconds:8.1f} s  {rate:7.1f} clips/s  engine idle {idle:.0%}")
    same = sum(answers["sequential", r["key"]] == answers["evaluate.py", r["key"]] for r in records)
    ratio = measured["sequential"] / measured["evaluate.py"]
    print(f"ratio {ratio:.2f}; {same} of {len(records)} answers are the same")


if __name__ == "__main__":
    main()
