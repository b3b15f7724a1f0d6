"""Make a tiny Qwen3-VL and a few hundred clips, offline, in seconds: what GRPO can teach on two cores.

    python tests/toy.py [OUT] [--seed 0] [--clips 400]

Writes (OUT is `toy` when left out; what an earlier run left there is replaced)
    OUT/model         random Qwen3-VL of half a million parameters, deepstack included, its own byte-level BPE
                      tokenizer, Qwen's chat layout, processor: loads with plain Auto classes and in vLLM
    OUT/clips         H.264 clips, 64 to 128 px, 1 to 4 s, 8 to 30 frames/s: shapes on dim noise
    OUT/images        the same as PNG stills
    OUT/train.jsonl   records of five tasks; OUT/val.jsonl: the same tasks on other clips

    data_source     problem_type         question                        chance
    toy-color       multiple choice      colour of a moving shape        1/4
    toy-direction   multiple choice      where it moves                  1/4
    toy-count       numerical            how many squares, 1 to 4        1/4
    toy-red         boolean              is the moving shape red?        1/2
    toy-appear      temporal grounding   when is a shape to be seen?     by overlap
    toy-image, toy-text: a few stills and questions without media, so that such batches occur at all

Three things make it a fair test and a quick one:
1. No frame tells the direction.  A shape that leaves the frame comes back at the other side, and it starts
   anywhere: at every moment its place is uniform, whatever its direction.  Only changes between frames tell.
2. The model starts out as a base model would: a short supervised warm start makes it write
   `<answer>X</answer>` with X uniform over the answers that the question allows, whatever the pixels.
3. The model can see before it can answer, as a base model can.  Its first layer starts with slow filters
   (level and slope of a patch, sum and difference in time) instead of white noise, and the warm start keeps
   what the vision tower finds readable in the state from which answers are chosen, without any label.
"""

import argparse
import json
import os
import random
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
import video_io  # noqa: E402

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
# Letters of its own for each question: so small a model learns two faster when they share no answers.
OPTIONS = {"toy-color": dict(zip("ABCD", COLORS)), "toy-image": dict(zip("ABCD", COLORS)),
           "toy-direction": dict(zip("EFGH", DIRECTIONS))}
MEDIA = dict(fps=4.0, min_frames=8, max_frames=8, min_pixels=4096, max_pixels=4096, image_max_pixels=4096)

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
    # Half seconds: true intervals are then among the valid answers.
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
        travel = rng.uniform(0.6, 0.8) * size  # px over the clip: 5 to 6 px of 64 between two of 8 frames
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
    listed = [f"{letter}. {option}" for letter, option in OPTIONS.get(source, {}).items()]
    data_type = "video" if "videos" in media else "image" if "images" in media else "text"
    return {"problem": problem.format(*numbers), "answer": answer, "problem_type": problem_type,
            "options": listed, "data_type": data_type, "data_source": source, **media}


def make_split(out, split, clips, seed):
    """Write the split's clips and its JSONL.  Four of five clips move; each serves two or three records."""
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
            records.append(record("toy-color", "ABCD"[i % 4], videos=[name]))
            records.append(record("toy-direction", "EFGH"[i // 4 % 4], videos=[name]))
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
        records.append(record("toy-image", "ABCD"[i % 4], images=[name]))
        a, b = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (1, 3)][i % 6]
        records.append(record("toy-text", str(a + b), numbers=(a, b)))
    random.Random(seed).shuffle(records)
    with open(out / f"{split}.jsonl", "w") as file:
        file.writelines(json.dumps(r) + "\n" for r in records)
    return records


# ---------------------------------------------------------------------------------------------- model

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
           "<|box_start|>", "<|box_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
           "<|image_pad|>", "<|video_pad|>"]
ADDED = ["<think>", "</think>"]  # known to the tokenizer, but ordinary text to whoever decodes, as in Qwen3
CHAT_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{%- if part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>
{%- elif part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Qwen's split into words and single digits; what answers and timestamps consist of stays whole: fewer tokens.
WORDS = (r"</?answer>|\{\"time\": \[|\d\.\d|(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
         r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def tokenizer_texts(records, prompts):
    """What the tokenizer learns from: the toy's questions and answers, time stamps, and every prompt form."""
    texts = ["system\n", "user\n", "assistant\n"] * 9
    for record in records:
        for message in video_io.build_messages(record, prompts, "direct"):
            texts += [part["text"] for part in message["content"] if part["type"] == "text"]
        texts += [f"<answer>{answer}</answer>" for answer in valid_answers(record)]
    texts += [f"<{tenths / 10:.1f} seconds>" for tenths in range(100)] * 3
    return texts + [form for forms in prompts.values() for form in forms.values()] * 2


def make_processor(texts):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor
    from transformers import Qwen3VLProcessor, Qwen3VLVideoProcessor

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=2000, min_frequency=2, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    bpe.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left",
        additional_special_tokens=SPECIAL, clean_up_tokenization_spaces=False)
    patches = dict(patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=[0.5] * 3,
                   image_std=[0.5] * 3)
    return Qwen3VLProcessor(
        tokenizer=tokenizer, chat_template=CHAT_TEMPLATE,
        image_processor=Qwen2VLImageProcessor(
            size={"shortest_edge": 4096, "longest_edge": 16777216}, **patches),
        video_processor=Qwen3VLVideoProcessor(
            size={"shortest_edge": 4096, "longest_edge": 25165824}, cap_pixels_per_frame=False, **patches))


def early_filters(weight):
    """Random mixtures of slow patterns for the patch embedding's weight (out, 3, 2, 16, 16), and the bias
    (out,) that sends a black patch to zero.  As in trained towers and in eyes, levels tell colours, edges
    and changes are seen in grey."""
    import torch

    out, channels, frames, height, width = weight.shape
    y, x = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    flat, x, y = torch.ones_like(x), 1.7 * x, 1.7 * y  # three patterns of equal power
    both, change = torch.tensor([1.0, 1.0]), torch.tensor([-1.0, 1.0])  # over the two frames
    filters = torch.randn(out, channels, 1, 1, 1) * both.view(2, 1, 1) * flat
    # Edges and changes are weaker in clips than levels: gains of 2 and 4 make up for it.
    for gain, time, space in [(2, both, x), (2, both, y), (4, change, flat), (2, change, x), (2, change, y)]:
        filters = filters + gain * torch.randn(out, 1, 1, 1, 1) * time.view(2, 1, 1) * space
    filters = filters / (frames * height * width)
    return filters, filters.sum((1, 2, 3, 4))  # black is -1 after normalisation


def make_model(tokenizer, seed):
    import torch
    from transformers import GenerationConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    text = dict(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[6, 5, 5],
                             mrope_interleaved=True),
        bos_token_id=ids["<|endoftext|>"], eos_token_id=ids["<|im_end|>"], pad_token_id=ids["<|endoftext|>"])
    vision = dict(
        depth=2, hidden_size=64, intermediate_size=128, num_heads=2, out_hidden_size=64,
        patch_size=16, spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=256,
        deepstack_visual_indexes=[0])
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
        torch.nn.init.normal_(model.model.visual.pos_embed.weight, std=0.05)
        patch = model.model.visual.patch_embed.proj
        patch.weight[:], patch.bias[:] = early_filters(patch.weight)
        model.lm_head.weight = model.model.language_model.embed_tokens.weight
    # Qwen's habits: who wants greedy or plain sampling must say so.
    model.generation_config = GenerationConfig(
        bos_token_id=ids["<|endoftext|>"], pad_token_id=ids["<|endoftext|>"], do_sample=True, temperature=0.7,
        top_p=0.8, top_k=20, eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]])
    return model


# ---------------------------------------------------------------------------------------------- warm start

WARM_START_BATCH = {"toy-color": 4, "toy-direction": 4, "toy-count": 2, "toy-red": 2, "toy-appear": 2,
                    "toy-image": 1, "toy-text": 1}  # records of each source


def valid_answers(record):
    """Every answer that the question allows, as text: what a model without eyes would choose from."""
    if record["problem_type"] == "multiple choice":
        return [option[0] for option in record["options"]]
    if record["problem_type"] == "numerical":
        return list("1234")
    if record["problem_type"] == "boolean":
        return ["yes", "no"]
    return [json.dumps({"time": [a / 2, b / 2]}) for a in range(8) for b in range(a + 1, 9)]


def next_token_targets(answers, chosen, vocab):
    """For each step of the token list `chosen`, the share of `answers` (token lists) that go on with each
    token: (len(chosen), vocab).  These shares make all answers equally likely, whatever they begin with."""
    import torch

    targets = torch.zeros(len(chosen), vocab)
    for i in range(len(chosen)):
        following = Counter(a[i] for a in answers if a[:i] == chosen[:i])
        for token, times in following.items():
            targets[i, token] = times / sum(following.values())
    return targets


def processor_inputs(processor, records, prompts, spec):
    """Hugging Face's tensors for the records' prompts, padded on the left: answers start at one position."""
    media = [video_io.load_media(r, spec) for r in records]
    clips = [clip for m in media for clip in m.videos]
    images = [image for m in media for image in m.images]
    metadata = [dict(fps=c.fps, frames_indices=c.frames_indices, total_num_frames=c.total_num_frames)
                for c in clips]
    return processor(
        text=[video_io.prompt_text(r, prompts, processor, "direct") for r in records],
        images=images or None, videos=[c.frames for c in clips] or None, video_metadata=metadata or None,
        do_sample_frames=False, do_resize=False, padding=True, return_tensors="pt")


def warm_start(model, processor, records, prompts, seed, steps=72, batches=12, lr=5e-3, parts=12):
    """Teach the form of the answers, and to keep in mind what was seen.  Returns nats per token above chance.

    Form: cross-entropy against all valid answers equally.  By itself this silences the pixels: they make up
    0.1 % of the variance of the state that the answer is read from, and reinforcement finds nothing to hold
    on to.  So a throwaway head must read from that state the `parts` strongest components of the clip's
    vision features: these come from the untrained tower, no label is in them.
    """
    import torch

    rng, pad = random.Random(seed), torch.nn.utils.rnn.pad_sequence
    tokenizer, vocab, visual = processor.tokenizer, model.config.text_config.vocab_size, model.model.visual
    end = [tokenizer.eos_token_id]
    spec = video_io.media_spec(model.config, **MEDIA)
    prepared = []
    for _ in range(batches):
        chosen = [r for source, n in WARM_START_BATCH.items()
                  for r in rng.sample([r for r in records if r["data_source"] == source], n)]
        inputs = processor_inputs(processor, chosen, prompts, spec)
        valid = [[tokenizer.encode(f"<answer>{a}</answer>") + end for a in valid_answers(r)] for r in chosen]
        prepared.append((inputs, valid, torch.tensor([bool(r["videos"]) for r in chosen])))

    with torch.no_grad():
        seen = torch.cat([visual(i["pixel_values_videos"], grid_thw=i["video_grid_thw"]).pooler_output
                          for i, _, _ in prepared])  # (clips * tokens, D)
        visual.merger.linear_fc2.bias -= seen.mean(0)  # what all clips share says nothing
        pooled = seen.view(-1, 16, seen.shape[1]).mean(1)  # (clips, D)
        parts_of, _, _ = torch.linalg.svd(pooled - pooled.mean(0), full_matrices=False)
        parts_of = parts_of[:, :parts] * len(pooled) ** 0.5  # (clips, parts), each of variance 1
        parts_of = parts_of.view(batches, -1, parts)

    visual.requires_grad_(False)
    head = torch.nn.Linear(model.config.text_config.hidden_size, parts)
    parameters = [p for p in model.parameters() if p.requires_grad] + list(head.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / 5, 2 * (1 - step / steps))
        inputs, valid, has_clip = prepared[step % batches]
        answers = [rng.choice(choices) for choices in valid]
        shares = [next_token_targets(choices, a, vocab) for choices, a in zip(valid, answers)]
        shares = pad(shares, batch_first=True)  # (B, L, V), zero after the end
        answers = pad([torch.tensor(a) for a in answers], batch_first=True, padding_value=end[0])  # (B, L)
        tails = dict(input_ids=answers, attention_mask=torch.ones_like(answers),
                     mm_token_type_ids=torch.zeros_like(answers))
        inputs = {**inputs, **{name: torch.cat([inputs[name], tail], 1) for name, tail in tails.items()}}
        states = model.model(**inputs).last_hidden_state[:, -answers.shape[1] - 1 : -1]  # (B, L, D)
        logprobs = model.lm_head(states).log_softmax(-1)  # (B, L, V)
        above = (shares * (shares.clamp_min(1e-9).log() - logprobs)).sum() / shares.sum()
        # Position 1 chooses the answer: <answer> stands at position 0.
        unread = (head(states[has_clip, 1]) - parts_of[step % batches]).square().mean()
        optimizer.zero_grad()
        (above + unread).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    model.requires_grad_(True)
    return above.item()


# ---------------------------------------------------------------------------------------------- all of it


def make_toy(out="toy", seed=0, clips=400):
    """Write everything under out; returns the number of parameters and the nats per token off chance."""
    out = Path(out)
    for folder in ("clips", "images", "model"):
        shutil.rmtree(out / folder, ignore_errors=True)
        (out / folder).mkdir(parents=True)
    held_out = clips // 5
    make_split(out, "train", clips - held_out, seed)
    make_split(out, "val", held_out, seed)

    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model is no faster on two, and far slower when others use them
    prompts = video_io.load_prompts()
    records = video_io.load_records(out / "train.jsonl", prompts=prompts)
    processor = make_processor(tokenizer_texts(records, prompts))
    model = make_model(processor.tokenizer, seed)
    above = warm_start(model, processor, records, prompts, seed)
    model.save_pretrained(out / "model")
    processor.save_pretrained(out / "model")
    torch.set_num_threads(threads)
    return sum(p.numel() for p in model.parameters()), above


def main():
    parser = argparse.ArgumentParser(description="Make a tiny model and clips to train it on.")
    parser.add_argument("out", nargs="?", default="toy", help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clips", type=int, default=400, help="clips in all; a fifth of them is held out")
    args = parser.parse_args()
    if args.clips < 60:
        parser.error(f"--clips {args.clips}: with fewer than 60 some tasks have no records")
    parameters, above = make_toy(args.out, args.seed, args.clips)
    print(f"{args.out}: {args.clips} clips, model of {parameters:,} parameters, {above:.3f} nats off chance")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
