"""Make a tiny Qwen3-VL and a few hundred clips, offline, in seconds: something that GRPO can teach on two cores.

    python tests/toy.py [OUT] [--seed 0] [--clips 400]

Writes (OUT is `toy` when left out; what an earlier run left there is replaced)
    OUT/model         random Qwen3-VL of about half a million parameters, deepstack included, its own byte-level BPE
                      tokenizer, Qwen's chat layout, processor, generation config: loads with plain Auto classes and vLLM
    OUT/clips         H.264 clips, 64 to 128 px, 1 to 4 s, 8 to 30 frames/s: shapes on dim noise;  OUT/images: PNG
    OUT/train.jsonl   records of five tasks; OUT/val.jsonl: the same tasks on other clips

    data_source     problem_type         question                        chance
    toy-color       multiple choice      colour of a moving shape        1/4
    toy-direction   multiple choice      where it moves                  1/4
    toy-count       numerical            how many squares, 1 to 4        1/4
    toy-red         boolean              is the moving shape red?        1/2
    toy-appear      temporal grounding   when is a shape to be seen?     by overlap
    toy-image, toy-text: a few stills and questions without media, so that such batches occur at all

Three things make it a fair test and a quick one:
1. No frame tells the direction.  A shape that leaves the frame comes back at the other side, and it starts anywhere:
   at every moment its place is uniform whatever its direction, so only the difference between frames answers.
2. The model starts out as a base model would: a short supervised warm start makes it write `<answer>X</answer>` with X
   uniform over the answers that the question allows.  Its targets do not depend on the pixels.
3. The first layer starts with low-pass filters (level and slope of a patch, sum and difference in time) instead of
   white noise, as trained vision towers have.  From white noise the same lessons take several times as long.
"""

import argparse
import json
import os
import random
import shutil
from collections import Counter
from pathlib import Path

import numpy as np

COLORS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 80, 230), "yellow": (230, 220, 50)}
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
SHAPES = ("square", "circle", "triangle")
TASKS = {  # data_source: (problem type, question)
    "toy-color": ("multiple choice", "Which color does the shape have?"),
    "toy-direction": ("multiple choice", "Which way does the shape move?"),
    "toy-count": ("numerical", "How many squares are there?"),
    "toy-red": ("boolean", "Is the shape red?"),
    "toy-appear": ("temporal grounding", "When is the shape visible?"),
    "toy-image": ("multiple choice", "Which color does the shape have?"),
    "toy-text": ("numerical", "How much is {} plus {}?"),
}
# ---------------------------------------------------------------------------------------------- clips


def shape_mask(shape, side):
    """(side, side) bool."""
    y, x = np.mgrid[0:side, 0:side] + 0.5
    if shape == "circle":
        return (x - side / 2) ** 2 + (y - side / 2) ** 2 <= (side / 2) ** 2
    if shape == "triangle":
        return np.abs(x - side / 2) <= y / 2
    return np.ones((side, side), bool)


def draw(frame, shape, side, x, y, color):
    """Paint into frame (S, S, 3); what leaves at one side comes in at the other."""
    rows, columns = np.nonzero(shape_mask(shape, side))
    size = len(frame)
    frame[(rows + y) % size, (columns + x) % size] = color


def noise(rng, size):
    return rng.integers(0, 20, (size, size, 3), dtype=np.uint8)


def clip_frames(kind, rng, color, direction):
    """One clip: frames (T, S, S, 3) uint8, frames per second, and what its questions need to know."""
    size, fps = int(rng.choice([64, 64, 96, 128])), int(rng.choice([8, 10, 12, 15, 24, 30]))
    # Half seconds, and a little more than one so that 8 frames/s always finds its 8 frames.
    duration_s = float(rng.choice([1.5, 2.0, 2.5, 3.0, 4.0]))
    count = round(fps * duration_s)
    frames = np.stack([noise(rng, size) for _ in range(count)])  # (T, S, S, 3)
    side, about = 28 * size // 64, {"color": color, "direction": direction, "duration": duration_s}

    if kind == "count":
        about["count"] = int(rng.integers(1, 5))
        cells = rng.permutation([(0, 0), (0, 1), (1, 0), (1, 1)])[: about["count"]]
        small = 20 * size // 64
        spots = [rng.integers(0, size // 2 - small + 1, 2) + np.array(cell) * (size // 2) for cell in cells]
        for frame in frames:
            for x, y in spots:
                draw(frame, "square", small, x, y, COLORS[color])
        return frames, fps, about

    start = rng.integers(0, size, 2)
    shape = SHAPES[rng.integers(len(SHAPES))]
    if kind == "appear":
        begin, end = sorted(rng.choice(np.arange(0, duration_s + 0.5, 0.5), 2, replace=False))
        about["span"] = [float(begin), float(end)]
        for frame in frames[round(begin * fps) : round(end * fps)]:
            draw(frame, shape, side, *start, COLORS[color])
    if kind == "move":
        travel = rng.uniform(0.6, 0.8) * size  # px over the whole clip, so that 8 frames show 5 to 6 px of 64 each
        for t, frame in enumerate(frames):
            x, y = start + np.round(np.array(DIRECTIONS[direction]) * travel * t / count).astype(int)
            draw(frame, shape, side, x, y, COLORS[color])
    return frames, fps, about


def write_clip(path, frames, fps):
    import av

    with av.open(str(path), "w") as container:
        options = {"preset": "ultrafast", "crf": "23", "threads": "1"}
        stream = container.add_stream("libx264", rate=fps, options=options)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for image in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


# ---------------------------------------------------------------------------------------------- records


def record(source, answer, numbers=(), **media):
    problem_type, problem = TASKS[source]
    options = {"toy-color": COLORS, "toy-image": COLORS, "toy-direction": DIRECTIONS}
    listed = [f"{letter}. {option}" for letter, option in zip("ABCD", options.get(source, []))]
    return {"problem": problem.format(*numbers), "answer": answer, "problem_type": problem_type, "options": listed,
            "data_type": "video" if "videos" in media else "image" if "images" in media else "text",
            "data_source": source, **media}


def letter(names, name):
    return "ABCD"[list(names).index(name)]


def make_split(out, split, clips, seed):
    """Write the split's clips and its JSONL; four of five clips move, and each of these serves two or three records."""
    records = []
    for i in range(clips):
        rng = np.random.default_rng([seed, split == "val", i])
        kind = ("count" if i % 20 < 10 else "appear") if i % 5 == 4 else "move"
        # Every combination of colour and direction equally often: chance is exactly 1/4.
        color, direction = list(COLORS)[i % 4], list(DIRECTIONS)[i // 4 % 4]
        frames, fps, about = clip_frames(kind, rng, color, direction)
        name = f"clips/{split}_{i:04d}.mp4"
        write_clip(out / name, frames, fps)
        if kind == "move":
            records.append(record("toy-color", letter(COLORS, color), videos=[name]))
            records.append(record("toy-direction", letter(DIRECTIONS, direction), videos=[name]))
            if i % 8 == 0 or i % 24 in (1, 10, 19):  # red, and as often one of the others
                records.append(record("toy-red", "yes" if color == "red" else "no", videos=[name]))
        elif kind == "count":
            records.append(record("toy-count", str(about["count"]), videos=[name]))
        else:
            records.append(record("toy-appear", {"time": about["span"]}, videos=[name]))

    from PIL import Image

    for i in range(8):
        rng = np.random.default_rng([seed, 2 + (split == "val"), i])
        image, color = noise(rng, 64), list(COLORS)[i % 4]
        draw(image, SHAPES[i % 3], 28, *rng.integers(0, 64, 2), COLORS[color])
        name = f"images/{split}_{i}.png"
        Image.fromarray(image).save(out / name)
        records.append(record("toy-image", letter(COLORS, color), images=[name]))
        a, b = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (1, 3)][i % 6]
        records.append(record("toy-text", str(a + b), numbers=(a, b)))
    random.Random(seed).shuffle(records)
    with open(out / f"{split}.jsonl", "w") as file:
        file.writelines(json.dumps(r) + "\n" for r in records)
    return records


# ---------------------------------------------------------------------------------------------- model

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
           "<|box_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
ADDED = ["<think>", "</think>"]  # known to the tokenizer, but ordinary text to whoever decodes, as in Qwen3
CHAT_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{%- if part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>
{%- elif part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Qwen's split into words and single digits; what answers and timestamps consist of is kept whole, to keep them short.
WORDS = (r"</?answer>|\{\"time\": \[|\d\.\d|(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def make_processor(texts):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=2000, min_frequency=2, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    bpe.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=SPECIAL,
        padding_side="left", clean_up_tokenization_spaces=False)
    patches = dict(patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    return Qwen3VLProcessor(
        tokenizer=tokenizer, chat_template=CHAT_TEMPLATE,
        image_processor=Qwen2VLImageProcessor(size={"shortest_edge": 4096, "longest_edge": 16777216}, **patches),
        video_processor=Qwen3VLVideoProcessor(
            size={"shortest_edge": 4096, "longest_edge": 25165824}, cap_pixels_per_frame=False, **patches))


def low_pass_filters(weight):
    """Random mixtures of slow patterns for the patch embedding's weight (out, 3, 2, 16, 16), and the bias (out,) that
    sends a black patch to zero: level, slope in x, slope in y of a patch, as sum and as difference of its two frames."""
    import torch

    out, channels, frames, height, width = weight.shape
    y, x = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    space = torch.stack([torch.ones_like(x), 1.7 * x, 1.7 * y])  # (3, 16, 16), of equal power
    time = torch.tensor([[1.0, 1.0], [1.0, -1.0]])  # (2, 2)
    mix = torch.randn(out, channels, len(time), len(space))
    filters = torch.einsum("ocab,at,byx->octyx", mix, time, space) / (frames * height * width)
    filters = filters + torch.randn_like(weight) * 0.02 * filters.std()
    return filters, filters.sum((1, 2, 3, 4))  # black is -1 after normalisation


def make_model(tokenizer, seed):
    import torch
    from transformers import GenerationConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    text = dict(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[6, 5, 5], mrope_interleaved=True),
        bos_token_id=ids["<|endoftext|>"], eos_token_id=ids["<|im_end|>"], pad_token_id=ids["<|endoftext|>"])
    vision = dict(
        depth=2, hidden_size=64, intermediate_size=128, num_heads=2, out_hidden_size=64, patch_size=16,
        spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=256, deepstack_visual_indexes=[0])
    config = Qwen3VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"])

    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config).float()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=module.in_features**-0.5)
        if isinstance(module, torch.nn.Embedding):
            torch.nn.init.normal_(module.weight, std=0.02)
    with torch.no_grad():
        torch.nn.init.normal_(model.model.visual.pos_embed.weight, std=0.2)
        patch = model.model.visual.patch_embed.proj
        patch.weight[:], patch.bias[:] = low_pass_filters(patch.weight)
        model.lm_head.weight = model.model.language_model.embed_tokens.weight
    model.generation_config = GenerationConfig(  # Qwen's own habits: whoever wants greedy or plain sampling must say so
        bos_token_id=ids["<|endoftext|>"], pad_token_id=ids["<|endoftext|>"], do_sample=True, temperature=0.7, top_p=0.8,
        top_k=20, eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]])
    return model


# ---------------------------------------------------------------------------------------------- warm start


def valid_answers(record):
    """Every answer that the question allows, as text: what a model without eyes would choose from."""
    if record["problem_type"] == "multiple choice":
        return list("ABCD")
    if record["problem_type"] == "numerical":
        return list("1234")
    if record["problem_type"] == "boolean":
        return ["yes", "no"]
    return [json.dumps({"time": [a / 2, b / 2]}) for a in range(8) for b in range(a + 1, 9)]


def next_token_targets(answers, chosen, vocab):
    """For each step of the token list `chosen`, the share of `answers` (token lists) that go on with each token:
    (len(chosen), vocab).  Learning these shares makes all answers equally likely, whatever their first tokens are."""
    import torch

    targets = torch.zeros(len(chosen), vocab)
    for i in range(len(chosen)):
        following = Counter(a[i] for a in answers if a[:i] == chosen[:i])
        for token, times in following.items():
            targets[i, token] = times / sum(following.values())
    return targets


def sampled_frames(path, count=8):
    """(count, 3, 64, 64) uint8 at equal distances, first and last included, and the metadata that processors want."""
    import av
    import torch

    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        fps = float(stream.average_rate)
        frames = list(container.decode(stream))
    picks = np.linspace(0, len(frames) - 1, count).round().astype(int).tolist()
    meta = dict(fps=fps, frames_indices=picks, total_num_frames=len(frames), duration=len(frames) / fps, width=64,
                height=64)
    pixels = np.stack([frames[i].to_ndarray(format="rgb24", width=64, height=64) for i in picks])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), meta


def load_prompts():
    import yaml

    return yaml.safe_load((Path(__file__).parent.parent / "configs" / "prompts.yaml").read_text())


def question(record, prompts):
    hint = prompts[record["problem_type"]]["direct"].replace("{letters}", "A, B, C or D")
    return "\n".join([record["problem"], *(["Options:", *record["options"]] if record["options"] else []), hint])


def model_batch(processor, records, prompts, out, cache={}):
    """The processor's tensors for the records' prompts, left-padded."""
    from PIL import Image

    texts, videos, metas, images = [], [], [], []
    for r in records:
        content = [{"type": "video"}] * len(r.get("videos", [])) + [{"type": "image"}] * len(r.get("images", []))
        content.append({"type": "text", "text": question(r, prompts)})
        texts.append(processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True))
        for path in r.get("videos", []):
            if path not in cache:
                cache[path] = sampled_frames(out / path)
            videos.append(cache[path][0])
            metas.append(cache[path][1])
        images += [Image.open(out / path) for path in r.get("images", [])]
    texts = [t.replace("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>") for t in texts]
    media = dict(videos=videos, video_metadata=metas, do_sample_frames=False) if videos else {}
    return processor(text=texts, images=images or None, **media, do_resize=False, padding=True, return_tensors="pt")


def warm_start(model, processor, records, prompts, out, seed, steps=24, batch=12):
    """Teach the form of the answers and nothing else.  Returns the last loss above the entropy of the targets."""
    import torch

    rng = random.Random(seed)
    tokenizer, vocab = processor.tokenizer, model.config.text_config.vocab_size
    end = [tokenizer.eos_token_id]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    by_source = {source: [r for r in records if r["data_source"] == source] for source in TASKS}
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 4) * (1 - step / steps)
        chosen = [rng.choice(by_source[source]) for source in by_source for _ in range(batch // 6)]
        inputs = model_batch(processor, chosen, prompts, out)
        answers, targets = [], []
        for r in chosen:
            valid = [tokenizer.encode(f"<answer>{a}</answer>") + end for a in valid_answers(r)]
            answers.append(rng.choice(valid))
            targets.append(next_token_targets(valid, answers[-1], vocab))
        longest = max(map(len, answers))
        # Prompts are padded on the left and answers on the right: all answers start at the same position.
        padded = torch.tensor([a + end * (longest - len(a)) for a in answers])  # (B, longest)
        extra = torch.ones_like(padded)
        for name, tail in (("input_ids", padded), ("attention_mask", extra), ("mm_token_type_ids", 0 * extra)):
            inputs[name] = torch.cat([inputs[name], tail], dim=1)
        logits = model(**inputs, logits_to_keep=longest + 1).logits[:, :-1]  # (B, longest, V)
        shares = torch.nn.utils.rnn.pad_sequence(targets, batch_first=True)  # (B, longest, V), zero after the end
        above = -(shares * (logits.log_softmax(-1) - shares.clamp_min(1e-9).log())).sum(-1)  # KL per token
        loss = above.sum() / sum(map(len, answers))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.item()


# ---------------------------------------------------------------------------------------------- all of it


def make_toy(out="toy", seed=0, clips=400):
    out = Path(out)
    prompts = load_prompts()
    for folder in ("clips", "images", "model"):
        shutil.rmtree(out / folder, ignore_errors=True)
        (out / folder).mkdir(parents=True)
    held_out = clips // 5
    train = make_split(out, "train", clips - held_out, seed)
    make_split(out, "val", held_out, seed)

    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model is no faster on two, and far slower when the cores are shared
    texts = [question(r, prompts) for r in train] + [CHAT_TEMPLATE.split("{")[0]] + ["system\n", "user\n", "assistant\n"] * 9
    texts += [f"<answer>{a}</answer>" for r in train for a in valid_answers(r)]
    texts += [f"<{t / 10:.1f} seconds>" for t in range(100)] * 3
    texts += [form for entry in prompts.values() for form in entry.values()] * 2
    processor = make_processor(texts)
    model = make_model(processor.tokenizer, seed)
    loss = warm_start(model, processor, train, prompts, out, seed)
    model.save_pretrained(out / "model")
    processor.save_pretrained(out / "model")
    torch.set_num_threads(threads)
    return sum(p.numel() for p in model.parameters()), loss


def main():
    parser = argparse.ArgumentParser(description="Make a tiny model and clips to train it on.")
    parser.add_argument("out", nargs="?", default="toy", help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clips", type=int, default=400, help="clips in all; a fifth of them is held out")
    args = parser.parse_args()
    parameters, loss = make_toy(args.out, args.seed, args.clips)
    print(f"{args.out}: model of {parameters:,} parameters (warm start {loss:.3f} nats above chance), {args.clips} clips")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
