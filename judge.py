"""Let a language model judge the open answers that rules cannot settle, and say how far it can be trusted.

    python judge.py results/mine --model Qwen/Qwen3-8B                       # vLLM in this process
    python judge.py answers.jsonl --base-url http://127.0.0.1:8000/v1 --all  # a server; all open answers

Reads a folder of evaluate.py or a file of answers: JSONL, a JSON list or an object with one.  Writes X_judged
beside X: rows with `judge` (correct, incorrect, invalid) and `rule`, accuracy and status before; result.json
with a section `judge` as result_judged.json (X_result_judged.json); judge_cache.jsonl, verdicts by content.
1. Judged are open answers that merely resemble the gold, and right-or-wrong ones that rules could not read.
2. A reply that is no verdict is asked for again, then counted as invalid and scored 0: nothing is guessed.
3. Known verdicts (sure rules, self-checks, people's `human`: true or false) are asked for too, for agreement.
"""

import argparse, email.utils, hashlib, http.client, json, os, random, re, time, urllib.error, urllib.request
from collections import ChainMap
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np, yaml

CONFIGS = Path(__file__).with_name("configs")
TEXTS = yaml.safe_load((CONFIGS / "judge.yaml").read_text())  # problem types, verdicts, output, flags

def load(path):
    """(document, the list of answers in it): the list itself, or one that the document, a dict, holds."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            text = text if text.endswith("}") else text.rpartition("\n")[0]  # half a line of a killed writer
            text = "[" + ",\n".join(filter(str.strip, text.split("\n"))) + "]"
        document = json.loads(text)
    except ValueError as error:  # "line 3" of a JSONL file is its third
        raise ValueError(f"{path}: cannot be read: {error}") from None
    lists = [document, *document.values()] if isinstance(document, dict) else [document]
    return document, next((x for x in lists if isinstance(x, list) and any(map(look, x))), [])

def region(text):
    """The answer: behind the thoughts, in the last answer tag; nothing if the thoughts never end."""
    text = str(text).rpartition("</think>")[2]
    return "" if "<think>" in text else text.rpartition("<answer>")[2].partition("</answer>")[0].strip()

def look(row):
    """What is judged of an answer's row, or None for another row."""
    responses, golds = ("response", "model_output", "output"), ("answer", "solution")
    if not hasattr(row, "keys") or not row.keys() & set(responses) or not row.keys() & set(golds):
        return None
    first = lambda *names: next((row[name] for name in names if row.get(name) is not None), "")
    gold = first(*golds[::-1] if "<answer>" in str(row.get("solution")) else golds)  # as rewards.py does
    kind = re.sub(r"[\s_-]+", " ", str(row.get("problem_type"))).lower()
    closed, opened = (kind in TEXTS[name] for name in ("closed", "open"))
    score, status = float(first("accuracy", "reward") or 0), row.get("status", "ok")
    answer = "" if status in ("truncated", "failed") else region(first(*responses))  # then 0 stands
    return argparse.Namespace(
        row=row, kind=kind, score=score, answer=answer, options="\n".join(map(str, first("options"))),
        problem=str(first("problem")), gold=region(gold) if isinstance(gold, str) else json.dumps(gold),
        item=str(row.get("key") or [row.get(name) for name in ("problem_id", "path", "videos", "problem")]),
        sure=status != "invalid" and (closed and score in (0, 1) or opened and score == 1),
        open=bool(answer) and (opened or closed and status == "invalid"))

def prompt_of(a, answer, template):
    """The judge's prompt.  No answer can end its field (a code closes it that none holds) or give orders."""
    fields = dict(QUESTION=a.problem, OPTIONS=a.options, REFERENCE=a.gold, CANDIDATE=answer)
    for name, text in fields.items():  # <|im_end|>, </s>, [INST] ... are control tokens to some tokenizer
        text = text if len(text) <= 3000 else text[:750] + " [...] " + text[-2250:]
        fields[name] = re.sub(r"([<\[])(?=[^\s\d])", r"\1 ", text)
    code = ""
    while any(code in text for text in fields.values()):
        code = hashlib.sha256(json.dumps([code, fields]).encode()).hexdigest()[:12]
    blocks = [f"<<<{name} {code}\n{text}\n{code}>>>\n" for name, text in fields.items()]
    return template.replace("{fields}", "".join(blocks))

def parse_verdict(text):
    """True, False or None.  A reply must end in its verdict, and hold no other one."""
    text = re.sub(r"[*`\s]+$", "", region(text))
    said = [*re.finditer(r'{[^{}]*"correct"\s*:\s*(\w+|"[^"]*")[^{}]*}|(?i:\bjudge?ment)\W{1,6}(\w+)', text)]
    if len({match[1] or match[2] for match in said}) == 1 and said[-1].end() == len(text):
        return {"true": True, "1": True, "false": False, "0": False}.get(said[0][1] or said[0][2])

def in_process(args):
    """(identity, ask) of vLLM in this process.  ask(prompts) yields (prompt, reply)."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    options = dict(max_model_len=16384, enforce_eager=True) | json.loads(args.options)
    llm, verdicts = LLM(args.model, **options), ['{"correct": true}', '{"correct": false}']
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens,
                            structured_outputs=StructuredOutputsParams(choice=verdicts))
    def ask(prompts):
        for batch in (prompts[i:i + 512] for i in range(0, len(prompts), 512)):  # each is kept
            try:
                outputs = llm.chat([[{"role": "user", "content": p}] for p in batch], params, use_tqdm=False,
                                   chat_template_kwargs={"enable_thinking": False})
            except Exception as error:  # over max_model_len, no chat template: vLLM's classes change
                raise ValueError(f"{args.model}: {error}") from error
            yield from zip(batch, (out.outputs[0].text for out in outputs))
    files = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(Path(args.model).glob("*.*"))]
    return [args.model, files, options], ask

def request(url, body, args):
    """The JSON reply of a server; waits and tries again where that can help."""
    call = urllib.request.Request(url, body and json.dumps(body).encode(), {
        "Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY')}"})
    for tried in range(args.tries):
        time.sleep(tried and pause)
        pause = args.backoff * 2**tried * random.uniform(0.5, 1)
        try:
            content, end = b"", time.monotonic() + args.timeout
            with urllib.request.urlopen(call, timeout=args.timeout) as reply:
                while part := reply.read1(1 << 16):  # that timeout is of one read: a server may drip for ever
                    content += part
                    if time.monotonic() > end:
                        raise TimeoutError(f"no whole reply within {args.timeout:g} s")
            return json.loads(content)
        except urllib.error.HTTPError as error:
            reason, after = f"HTTP {error.code} {error.reason}", error.headers.get("Retry-After") or ""
            if error.code not in (408, 425, 429) and error.code < 500:
                break
            date = email.utils.parsedate_tz(after)
            seconds = email.utils.mktime_tz(date) - time.time() if date else after.isdigit() and after
            pause = min(600.0, max(0.0, float(seconds))) if seconds else pause
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
    raise ConnectionError(f"{url}: {reason}")

def over_http(args):
    """(identity, ask) of an OpenAI-compatible server; ten failed requests in a row end the run."""
    base, options, lost = args.base_url.rstrip("/"), json.loads(args.options), []
    name = args.model or re.search('"id": "(.*?)"|$', json.dumps(request(f"{base}/models", None, args)))[1]
    def one(prompt):
        if len(lost) >= 10:
            raise lost[-1]  # what was judged is in the cache: the same command goes on from there
        message = {"role": "user", "content": prompt}
        body = dict(model=name, temperature=0, max_tokens=args.max_tokens, messages=[message]) | options
        try:
            reply = request(f"{base}/chat/completions", body, args)
            lost.clear()
            return prompt, str(reply["choices"][0]["message"]["content"])
        except (ConnectionError, TypeError, LookupError) as error:
            lost.extend([error] * isinstance(error, ConnectionError))
            return prompt, f"no chat completion: {error!r}"
    pool = ThreadPoolExecutor(args.concurrency)
    ask = lambda prompts: (f.result() for f in as_completed([pool.submit(one, prompt) for prompt in prompts]))
    return [name, base, options], ask

def settle(prompts, identity, ask, cache, rounds):
    """({prompt: True | False | None}, how many came from the cache)."""
    keys = {p: hashlib.sha256(json.dumps([identity, p]).encode()).hexdigest() for p in prompts}
    text = cache.read_text(errors="replace") if cache.exists() else ""
    stored = dict(re.findall(r'(?m)^{"key": "(\w{64})", "correct": (true|false)}$', text))  # no half lines
    verdicts = {p: json.loads(stored.get(key, "null")) for p, key in keys.items()}
    cached, reply = sum(verdict is not None for verdict in verdicts.values()), ""
    with open(cache, "a", buffering=1) as file:
        file.write("\n" * (text[-1:] not in ("", "\n")))  # ends half a line
        for i in range(rounds):
            again = f" This is request {i + 1}." * (i > 0)  # greedy decoding would repeat itself
            for prompt, reply in ask([p + again for p in keys if verdicts[p] is None]):
                prompt = prompt.removesuffix(again)
                verdicts[prompt] = parse_verdict(reply)
                if verdicts[prompt] is not None:
                    file.write(json.dumps({"key": keys[prompt], "correct": verdicts[prompt]}) + "\n")
    if verdicts and set(verdicts.values()) == {None}:
        raise ValueError(f"not one verdict on {len(verdicts)} prompts; the last reply: {reply[:200]!r}")
    return verdicts, cached

def known(answers, judged, labels, n):
    """[(source, answer's look, what is answered, is it correct)]: verdicts that are known beforehand."""
    for a in filter(None, map(look, load(Path(labels))[1] if labels else [])):
        if not isinstance(a.row.get("human"), bool):
            raise ValueError(f"{labels}: {a.item}: `human` must be true or false")
        yield "people", a, a.answer, a.row["human"]
    draw, sure = random.Random(0), [a for a in answers if a.sure and a.answer]
    yield from (("rules", a, a.answer, a.score == 1) for a in draw.sample(sure, min(10 * n, len(sure))))
    for a in draw.sample(judged or answers, min(n, len(judged or answers))):
        others = [b.gold for b in answers if b.kind == a.kind and b.gold.lower() != a.gold.lower()]
        wrong = {"empty": "", "refusal": "I do not know.", "negated gold": f"It is not {a.gold}"}
        wrong |= {"another gold": gold for gold in others[:1]}
        yield from (("gold", a, a.gold, True), *((source, a, text, False) for source, text in wrong.items()))

def kappa(pairs, samples=2000):
    """[Cohen's kappa, its 95 % interval's ends] of [(item, judge, truth)], drawing whole items; or None."""
    cells = {}
    for item, judge, truth in (pair for pair in pairs if pair[1] is not None):
        cells.setdefault(item, np.zeros(4))[2 * judge + truth] += 1
    cells = np.array([*cells.values()] or [np.zeros(4)])  # (items, 4)
    draws = np.random.default_rng(0).multinomial(len(cells), np.full(len(cells), 1 / len(cells)), samples)
    no, missed, invented, yes = np.vstack([cells.sum(0), draws @ cells]).T  # (1 + samples,) each
    size = (no + missed) * (missed + yes) + (no + invented) * (invented + yes)  # 0: all verdicts are alike
    values = 2 * (no * yes - missed * invented)[size > 0] / size[size > 0]
    return np.round([values[0], *np.quantile(values, [0.025, 0.975])], 4).tolist() if size[0] else None

def run(args):
    path, template = Path(args.path), Path(args.prompt or CONFIGS / "judge.txt").read_text(encoding="utf-8")
    out = path / "result_judged.json" if path.is_dir() else path.with_name(f"{path.stem}_result_judged.json")
    files = [f for f in sorted(path.glob("*.jsonl")) if not re.search("_judged$|^judge_cache$", f.stem)]
    loaded = [found for file in (files if path.is_dir() else [path]) if (found := (file, *load(file)))[2]]
    answers = [look(ChainMap(sample, row)) for _, _, rows in loaded for row in filter(look, rows)
               for sample in row.get("samples") or [row]]  # changes reach the sample, or the row
    if not answers:
        raise ValueError(f"{path}: no answers here, rows with `response` and `answer`")
    judged = [a for a in answers if a.open and (args.all or not a.sure)]
    tests = [(source, a.item, prompt_of(a, answer, template), truth)
             for source, a, answer, truth in known(answers, judged, args.human, args.checks)]
    prompts = [prompt_of(a, a.answer, template) for a in judged]
    identity, ask = (over_http if args.base_url else in_process)(args)
    cache = Path(args.cache or out.with_name("judge_cache.jsonl"))
    verdicts, cached = settle([*prompts, *(test[2] for test in tests)], identity, ask, cache, args.rounds)
    table, trust = {}, {}
    for a, verdict in zip(judged, map(verdicts.get, prompts)):
        word, new = TEXTS["verdicts"][verdict]
        new = {n: v for n, v in new.items() if n in a.row or n == "accuracy" and "reward" not in a.row}
        a.row |= new | dict(judge=word, rule={name: a.row.get(name) for name in new})
        if "samples" in a.row:
            a.row.maps[1]["accuracy"] = float(np.mean([sample["accuracy"] for sample in a.row["samples"]]))
    print(TEXTS["table"][0])
    for kind in ["all", *sorted({a.kind for a in answers})]:
        part = [a for a in answers if kind in ("all", a.kind)]
        said = [a.row["judge"] for a in judged if kind in ("all", a.kind)]
        rule, both = np.mean([(a.score, look(a.row).score) for a in part], 0).tolist()
        table[kind] = dict(n=len(part), rule=rule, rule_judge=both, judged=len(said),
                           invalid=said.count("invalid"))
        print(TEXTS["table"][1].format(kind, **table[kind]))
    for source in dict.fromkeys(test[0] for test in tests):
        found = [(item, verdicts[prompt], truth) for name, item, prompt, truth in tests if name == source]
        trust[source] = dict(n=len(found), right=sum(verdict == truth for _, verdict, truth in found),
                             invalid=sum(verdict is None for _, verdict, _ in found), kappa=kappa(found))
        print(TEXTS["trust"].format(source, **trust[source]))
    result = json.loads((path / "result.json").read_text()) if (path / "result.json").exists() else {}
    result["judge"] = dict(judge=identity, asked=len(verdicts), cached=cached, table=table, trust=trust)
    outputs = {file.with_stem(f"{file.stem}_judged"): document for file, document, _ in loaded}
    for file, document in (outputs | {out: result}).items():
        parts, indent = (document, None) if file.suffix == ".jsonl" else ([document], 2)
        text = "".join(json.dumps(part, ensure_ascii=False, indent=indent) + "\n" for part in parts)
        file.with_name(f".{file.name}.tmp").write_text(text, encoding="utf-8")
        os.replace(file.with_name(f".{file.name}.tmp"), file)
    print(f"{len(verdicts)} verdicts, {cached} of them from the cache; {out}")

def main():
    parser = argparse.ArgumentParser(description="Judge the open answers that rules cannot settle.")
    for flag, options in TEXTS["flags"].items():
        kind = {} if "action" in options else {"type": type(options.get("default", ""))}
        parser.add_argument(flag, **options | kind)
    args = parser.parse_args()
    args.model or args.base_url or parser.error("who judges? --model or --base-url")
    try:
        run(args)
    except (OSError, ValueError, RuntimeError) as error:  # vLLM raises all of them
        parser.exit(2, f"judge.py: {' '.join(str(error).split())[:500]}\n")

if __name__ == "__main__":
    main()
