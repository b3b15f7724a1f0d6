"""Evaluate a model on record files: greedy answers, one JSONL line per sample, accuracy per task.

    python evaluate.py run --model merged --data toy/val.jsonl
    python evaluate.py run --model Qwen3-VL-8B --data a.jsonl b.jsonl --prompt-form direct --max-frames 64

Reads   MODEL, a Hugging Face folder.  Its nanovideor1.json, which merge.py writes, holds the media and prompt
        settings of training: they are the defaults here, so that evaluation repeats training's validation.
        Records as in training; the same functions make prompts, frames and scores.
Writes  OUT/settings.json  what answers depend on (settings, model files): a folder never mixes two of these
        OUT/samples.jsonl  {"data", "key", "problem", "answer", "response", "accuracy", "status", ...}
        OUT/result.json    accuracy over all, per problem_type and per data_source, counts, seconds
A clip that cannot be used scores 0 with status "failed": the denominator is the number of records.  After an
interruption the same command goes on: samples already answered are found by their key.
"""

import argparse, hashlib, json, os, sys, time
from collections import Counter
from pathlib import Path

import rewards
import rollout
import video_io

# What answers depend on besides model and record, named as in train_grpo.py; 0 and "" are library defaults.
MEDIA = dict(fps=2.0, min_frames=4, max_frames=128, min_pixels=0, max_pixels=262144, total_pixels=0,
             image_max_pixels=1048576, timestamps="segment")
SETTINGS = dict(MEDIA, prompts="", prompt_form="reason", system_prompt="", max_prompt_length=16384,
                max_tokens=2048)
KEPT = "data key where data_source problem_type problem options answer videos images".split()

# ---------------------------------------------------------------------------------------- what to do

def resolve_settings(model, given):
    """SETTINGS, over them MODEL/nanovideor1.json, over that the command line (None: not given)."""
    file = Path(model, "nanovideor1.json")
    try:
        trained = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError as error:
        raise video_io.DataError(f"{file}: no valid JSON ({error}); merge again or delete it") from None
    length = trained.get("val_max_response_length") or trained.get("max_response_length")
    trained["max_tokens"] = length or SETTINGS["max_tokens"]
    pick = lambda name: given[name] if given[name] is not None else trained.get(name, SETTINGS[name])
    return {name: pick(name) for name in SETTINGS}

def model_fingerprint(model):
    """{file: hash or size and time} of what decides on answers: another model never resumes a folder."""
    prints = {}
    for file in sorted(Path(model).iterdir()):
        if file.suffix in (".json", ".jinja") and file.name != "nanovideor1.json":
            prints[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        if file.suffix == ".safetensors":
            prints[file.name] = f"{file.stat().st_size} bytes, {file.stat().st_mtime_ns}"
    return prints

def load_data(files, data_root, prompts):
    """Records of all files, each with its file as `data`; DataError lists what cannot be scored."""
    records, problems = [], []
    for file in dict.fromkeys(files):
        records += [dict(r, data=file) for r in video_io.load_records(file, data_root, prompts)]
    for record in records:
        try:
            rewards.check_record(record)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        more = [f"... and {len(problems) - 20} more"] * (len(problems) > 20)
        raise video_io.DataError("\n".join(problems[:20] + more))
    return records

def write_json(path, value):
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False))
    os.replace(temporary, path)

def open_folder(out, settings):
    """The rows that an earlier, interrupted run left; DataError if they belong to other settings."""
    out.mkdir(parents=True, exist_ok=True)
    stored, samples = out / "settings.json", out / "samples.jsonl"
    if stored.is_file():
        before = json.loads(stored.read_text())
        if before != settings:
            other = ", ".join(sorted(key for key in settings if before.get(key) != settings[key]))
            raise video_io.DataError(f"{out}: holds answers with other {other}; choose another --out")
    else:
        write_json(stored, settings)
    rows, whole = [], 0
    for line in samples.read_bytes().splitlines(keepends=True) if samples.exists() else []:
        if not line.endswith(b"\n"):  # killed while writing: that sample is answered again
            os.truncate(samples, whole)
            break
        whole += len(line)
        rows.append(json.loads(line))
    return rows

# ---------------------------------------------------------------------------------------- answers

def answer_batch(waiting, prompter, engine, scorer, max_tokens):
    """One row per record of waiting, [(record, Future of Media)]."""
    groups, failed = prompter.groups(waiting)
    engine.generate(groups, 1, max_tokens=max_tokens, temperature=0.0)
    scores = scorer.score_many([g.record for g in groups], [g.responses[0].text for g in groups])
    rows = [dict(response=g.responses[0].text, prompt_tokens=len(g.prompt_ids),
                 response_tokens=len(g.responses[0].ids), finish_reason=g.responses[0].finish_reason, **score)
            for g, score in zip(groups, scores)]
    rows += [dict(response=None, accuracy=0.0, format=0.0, overall=0.0, status="failed", reason=reason)
             for _, reason in failed]
    records = [g.record for g in groups] + [record for record, _ in failed]
    return [{name: record.get(name) for name in KEPT} | row for record, row in zip(records, rows)]

def answer_all(records, out, loader, batch, **tools):
    """Append a row per record to OUT/samples.jsonl and yield it, while the next batch's clips are decoded."""
    batches = [records[i:i + batch] for i in range(0, len(records), batch)]
    submit = lambda i: [(r, loader.submit(r)) for r in batches[i]] if i < len(batches) else []
    waiting = submit(0)
    with open(out / "samples.jsonl", "a", encoding="utf-8") as file:
        for i in range(len(batches)):
            ahead = submit(i + 1)
            rows = answer_batch(waiting, **tools)
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())
            yield from rows
            waiting = ahead

def summary(rows):
    """{"all": ..., "problem_type": {name: ...}, "data_source": {...}} of accuracy and counts."""
    def measure(rows):
        status = Counter(row["status"] for row in rows)
        return dict(accuracy=sum(row["accuracy"] for row in rows) / len(rows), n=len(rows),
                    **{name: status[name] for name in ("invalid", "truncated", "failed")})

    def by(field):
        names = sorted({row[field] for row in rows})
        return {name: measure([row for row in rows if row[field] == name]) for name in names}

    return dict(all=measure(rows), problem_type=by("problem_type"), data_source=by("data_source"))

def print_result(result):
    print(f"{'':32}{'accuracy':>9}{'n':>7}{'invalid':>9}{'truncated':>11}{'failed':>8}")
    for names in ({"all": result["all"]}, result["problem_type"], result["data_source"]):
        for name, measured in names.items():
            print("{:32}{accuracy:9.3f}{n:7}{invalid:9}{truncated:11}{failed:8}".format(name, **measured))
        print()
    print("n_ok {n_ok} + n_failed {n_failed} = n_total {n_total}, {seconds} s".format(**result))

def run(args):
    import torch
    from transformers import AutoConfig

    args.model = rollout.model_folder(args.model)
    started, model = time.monotonic(), Path(args.model)
    processor = video_io.load_processor(args.model)
    settings = resolve_settings(model, vars(args))
    prompts = video_io.load_prompts(settings["prompts"] or None)
    records = load_data(args.data, args.data_root, prompts)[:args.limit]
    config = AutoConfig.from_pretrained(model)
    spec = video_io.media_spec(config, **{name: settings[name] or None for name in MEDIA})
    dtype = args.dtype if args.dtype != "auto" else "bfloat16" if torch.cuda.is_available() else "float32"
    identity = dict(settings=settings, dtype=dtype, model_files=model_fingerprint(model),
                    prompts=hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16])
    out = Path(args.out or f"results/{model.resolve().name}-{Path(args.data[0]).stem}")

    wanted = {(r["data"], r["key"]) for r in records}
    rows = [row for row in open_folder(out, identity) if (row["data"], row["key"]) in wanted]
    done = {(row["data"], row["key"]) for row in rows}
    todo = [r for r in records if (r["data"], r["key"]) not in done]
    print(f"{out}: {len(rows)} of {len(records)} samples are answered already")
    if todo:
        loader = video_io.MediaLoader(spec, args.decode_workers, cache_dir=args.cache_dir)
        scorer = rewards.Scorer(rewards.RewardSettings(), args.reward_workers)
        prompter = rollout.Prompter(processor, config, prompts, settings["prompt_form"],
                                    settings["system_prompt"] or None, settings["max_prompt_length"])
        engine = rollout.Engine(
            args.model, dtype=dtype, max_model_len=settings["max_prompt_length"] + settings["max_tokens"],
            banned=video_io.vision_token_ids(config), memory_share=args.engine_memory)
        try:
            rows += answer_all(todo, out, loader, args.batch, engine=engine, prompter=prompter, scorer=scorer,
                               max_tokens=settings["max_tokens"])
        finally:
            loader.close()
            scorer.close()
            engine.close()

    n_failed = sum(row["status"] == "failed" for row in rows)
    result = dict(summary(rows), n_total=len(records), n_ok=len(rows) - n_failed, n_failed=n_failed,
                  seconds=round(time.monotonic() - started, 1), model=args.model, data=args.data, **identity)
    assert result["n_ok"] + n_failed == result["n_total"], f"{len(rows)} of {len(records)} records came back"
    write_json(out / "result.json", result)
    print_result(result)
    print(f"answers and scores: {out}/samples.jsonl, {out}/result.json")

def main():
    parser = argparse.ArgumentParser(description="Evaluate a model on record files.")
    add = parser.add_subparsers(required=True).add_parser("run", help="answer and score records").add_argument
    add("--model", required=True, help="Hugging Face folder")
    add("--data", required=True, nargs="+", help="JSON, JSONL or parquet records")
    add("--data-root", help="media paths are relative to this; else to the record's file")
    add("--out", help="folder to write; default results/MODEL-DATA")
    choices = {"prompt_form": ("reason", "direct"), "timestamps": ("segment", "source")}
    for name, default in SETTINGS.items():
        add("--" + name.replace("_", "-"), type=type(default), choices=choices.get(name))
    add("--limit", type=int, help="only the first so many records")
    add("--batch", type=int, default=64, help="prompts in flight")
    add("--dtype", default="auto", choices=["auto", "bfloat16", "float32"], help="auto: float32 on CPU only")
    add("--engine-memory", type=float, default=0.85, help="share of a GPU that vLLM may take")
    add("--decode-workers", type=int, default=2)
    add("--reward-workers", type=int, default=1)
    add("--cache-dir", help="frame cache")
    try:
        run(parser.parse_args())
    except video_io.DataError as error:
        print(error, file=sys.stderr)
        sys.exit(2)

if __name__ == "__main__":
    main()
