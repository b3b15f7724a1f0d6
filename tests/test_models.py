"""Every class of models that training promises, as tiny random ones: the packed update against plain Hugging Face
forwards, and vLLM's answers against the trainer before and after weights change.
"""

import contextlib
import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from test_train_grpo import config, hf_inputs, make_group, relative_gaps

import rollout
import train_grpo
import video_io

CLASSES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"]
TEXT = dict(hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=4096)
ROPE = dict(rope_type="default", rope_theta=10000.0)
VISION = dict(depth=2, num_heads=2, spatial_merge_size=2, temporal_patch_size=2)
OWN = {  # class: (text config, vision config) of what tells it from the others; tied heads here and there
    "qwen2_vl": (dict(rope_parameters=dict(ROPE, mrope_section=[4, 6, 6])),
                 dict(patch_size=14, embed_dim=32, hidden_size=128, mlp_ratio=2)),
    # windows of 2 x 2 tokens in the first block, whole frames in the second
    "qwen2_5_vl": (dict(rope_parameters=dict(ROPE, mrope_section=[4, 6, 6]), tie_word_embeddings=True),
                   dict(patch_size=14, hidden_size=32, intermediate_size=48, out_hidden_size=128, window_size=56,
                        fullatt_block_indexes=[1], tokens_per_second=5)),
    "qwen3_vl": (dict(head_dim=32, rope_parameters=dict(ROPE, mrope_section=[6, 5, 5], mrope_interleaved=True)),
                 dict(patch_size=16, hidden_size=32, intermediate_size=48, out_hidden_size=128,
                      num_position_embeddings=256, deepstack_visual_indexes=[0])),
    "qwen3_5": (dict(head_dim=32, layer_types=["linear_attention", "full_attention"], linear_key_head_dim=128,
                     linear_value_head_dim=128, linear_num_key_heads=1, linear_num_value_heads=2,
                     tie_word_embeddings=True,
                     rope_parameters=dict(ROPE, mrope_section=[2, 1, 1], mrope_interleaved=True,
                                          partial_rotary_factor=0.25)),
                dict(patch_size=16, hidden_size=32, intermediate_size=48, out_hidden_size=128,
                     num_position_embeddings=256)),
}


def make_model(name, toy, folder):
    """Write a random model of a class with the toy's tokenizer; names of weights are those of released ones."""
    old = name in ("qwen2_vl", "qwen2_5_vl")
    tokenizer = tf.AutoTokenizer.from_pretrained(toy / "model")
    known = tf.AutoConfig.from_pretrained(toy / "model")
    ids = {key: getattr(known, key) for key in (
        "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")}
    text, vision = OWN[name]
    patches = dict(patch_size=vision["patch_size"], merge_size=2, temporal_patch_size=2)
    if not old:
        patches.update(image_mean=[0.5] * 3, image_std=[0.5] * 3)
    kind = {"qwen2_vl": tf.Qwen2VLProcessor, "qwen2_5_vl": tf.Qwen2_5_VLProcessor}.get(name, tf.Qwen3VLProcessor)
    videos = (tf.Qwen2VLVideoProcessor if old else tf.Qwen3VLVideoProcessor)(cap_pixels_per_frame=False, **patches)
    kind(image_processor=tf.Qwen2VLImageProcessor(**patches), video_processor=videos, tokenizer=tokenizer,
         chat_template=(toy / "model/chat_template.jinja").read_text()).save_pretrained(folder)
    kinds = {"qwen2_vl": (tf.Qwen2VLConfig, tf.Qwen2VLForConditionalGeneration),
             "qwen2_5_vl": (tf.Qwen2_5_VLConfig, tf.Qwen2_5_VLForConditionalGeneration),
             "qwen3_vl": (tf.Qwen3VLConfig, tf.Qwen3VLForConditionalGeneration),
             "qwen3_5": (tf.Qwen3_5Config, tf.Qwen3_5ForConditionalGeneration)}
    config_class, model_class = kinds[name]
    special = dict(bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model_config = config_class(
        text_config=dict(TEXT, vocab_size=len(tokenizer), **special, **text), vision_config=dict(VISION, **vision),
        tie_word_embeddings=text.get("tie_word_embeddings", False), **ids)
    torch.manual_seed(1)
    model = model_class(model_config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # large enough for every part of the model to matter
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    model.save_pretrained(folder)
    if name == "qwen3_5":  # released ones hold a layer for speculative decoding as well, which no one loads
        weights = load_file(folder / "model.safetensors")
        save_file({**weights, "mtp.fc.weight": torch.zeros(4, 4)}, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def prepared(toy, tmp_path_factory):
    """prepare(class, **changes) on four records: a clip, a still, text, a clip.  Returns (run, groups)."""
    root = tmp_path_factory.mktemp("models")
    rows = [json.loads(line) for line in open(toy / "train.jsonl")]
    of = {kind: [row for row in rows if row["data_type"] == kind] for kind in ("video", "image", "text")}
    few = root / "few.jsonl"
    few.write_text("".join(json.dumps(row) + "\n" for row in (
        of["video"][0], of["image"][0], of["text"][0], of["video"][1])))

    def prepare(name, **changes):
        if not (root / name).exists():
            make_model(name, toy, root / name)
        side = 3 * 2 * OWN[name][1]["patch_size"]  # 3 x 3 tokens a frame: windows of 4, 2, 2 and 1 of them
        sizes = dict.fromkeys(("min_pixels", "max_pixels", "image_max_pixels"), side**2)
        run, records, _ = train_grpo.prepare(config(
            toy, model=str(root / name), train_files=[str(few)], val_files=[], data_root=str(toy),
            max_grad_norm=1e9, max_tokens_per_pack=100_000, output=str(root / "run"), **sizes, **changes))
        lengths = np.random.default_rng(1).integers(1, 9, (4, 3)).tolist()
        return run, [make_group(run, record, lengths[i], i) for i, record in enumerate(records)]

    return prepare


def separate_logprobs(model, run, group, response):
    """One response's log-probabilities by a plain forward over inputs of the Hugging Face processor.

    Positions are given for Qwen2-VL and Qwen2.5-VL alone: transformers 5.17 to 5.19 continue the text behind a
    clip at a smaller one than the release did and vLLM does, see test_ids_and_positions_equal_vllm.
    """
    inputs, P, answer = hf_inputs(run, group), len(group.prompt_ids), torch.tensor([response.ids])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], answer], 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(answer)], 1)
    model_config = run.prompter.model_config
    if model_config.model_type in ("qwen2_vl", "qwen2_5_vl"):
        prompt = video_io.position_ids(group.prompt_ids, group.media, model_config)[1:]  # (3, P)
        following = prompt.max() + 1 + torch.arange(len(response.ids)).expand(3, -1)
        inputs["position_ids"] = torch.cat([prompt, following], 1)[:, None]
    logits = model(**inputs, use_cache=False).logits[0, P - 1:-1] / run.cfg.temperature
    logits[:, run.banned] = -torch.inf
    return logits.log_softmax(-1).gather(1, answer[0][:, None])[:, 0]


@pytest.mark.parametrize("name", CLASSES)
def test_packed_loss_and_every_gradient_equal_separate_forwards(prepared, name):
    """Clips, a still and text in one pack; Qwen3.5 has recurrent layers: each response with its own prompt."""
    run, groups = prepared(name, temperature=0.7, importance="off", gradient_checkpointing=0.5)
    assert run.recurrent == (name == "qwen3_5")
    packs = train_grpo.make_packs(groups, run.cfg.max_tokens_per_pack, run.recurrent)
    assert len(packs) == (12 if run.recurrent else 1)
    model = train_grpo.load_policy(run.cfg, run.device)
    metrics = train_grpo.update(run, model, torch.optim.SGD(model.parameters(), 0.0), groups)

    reference = tf.AutoModelForImageTextToText.from_pretrained(
        run.cfg.model, dtype=torch.float32, attn_implementation="sdpa")
    total, loss = sum(len(r.ids) for g in groups for r in g.responses), 0.0
    for group in groups:
        for response, advantage in zip(group.responses, group.advantages):
            logprobs = separate_logprobs(reference, run, group, response)
            loss = loss - ((logprobs - logprobs.detach()).exp() * advantage).sum() / total
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-7)
    assert all(p.grad.norm() > 1e-6 for p in reference.model.visual.parameters())
    gaps = relative_gaps(model, reference)
    assert max(gaps.values()) < 5e-5, max(gaps.items(), key=lambda item: item[1])


@pytest.mark.parametrize("name", CLASSES)
def test_vision_towers_can_be_frozen_or_run_on_nothing(prepared, name):
    """A frozen tower runs once for all passes; a process without clips runs a tower on one blank patch."""
    run, groups = prepared(name, freeze_vision=True)
    frozen = train_grpo.load_policy(run.cfg, run.device)
    passes = []
    frozen.model.visual.patch_embed.register_forward_hook(lambda *args: passes.append(1))
    train_grpo.fill_logprobs(run, frozen, groups, "first")
    count = len(passes)
    train_grpo.fill_logprobs(run, frozen, groups, "second")
    assert len(passes) == count > 0
    run.cfg.freeze_vision = False
    model = train_grpo.load_policy(run.cfg, run.device)
    train_grpo.fill_logprobs(run, model, groups, "whole")
    for group in groups:
        for first, second, whole in zip(group.first, group.second, group.whole):
            assert torch.equal(first, second) and torch.allclose(first, whole, atol=1e-5)
    blind = train_grpo.one_blank_patch(model)
    gradients = torch.autograd.grad(blind, list(model.model.visual.blocks.parameters()))  # of every block
    assert blind == 0 and not any(gradient.any() for gradient in gradients)


def gaps(run, engine, model, groups):
    """Mean and largest difference between log-probabilities of the engine's samples and the trainer's."""
    engine.generate(groups, 2, max_tokens=6, temperature=run.cfg.temperature, seeds=range(len(groups)))
    assert not any(group.error for group in groups)  # nor are the engine's prompt ids other than ours
    train_grpo.fill_logprobs(run, model, groups, "old_logprobs")
    gap = torch.cat([(torch.tensor(response.logprobs) - ours).abs()
                     for group in groups for response, ours in zip(group.responses, group.old_logprobs)])
    return gap.mean().item(), gap.max().item()


@pytest.mark.parametrize("name", CLASSES)
def test_engine_agrees_with_the_trainer_and_follows_each_sync(prepared, name):
    """In float32 but for Qwen3.5, whose recurrent layers vLLM's CPU build computes in bfloat16 alone."""
    run, groups = prepared(name)

    def agree(mean, largest):
        return mean < 0.04 if name == "qwen3_5" else largest < 1e-4

    for group in groups:
        group.advantages = None  # so that no group is left out
    model = train_grpo.load_policy(run.cfg, run.device)
    old = any(key.startswith("visual.") for key in rollout.checkpoint_names(run.cfg.model))
    assert old == (name in ("qwen2_vl", "qwen2_5_vl"))  # stored under other names than the model's
    engine = rollout.Engine(run.cfg.model, dtype="float32", max_model_len=512, banned=run.banned.tolist())
    with contextlib.closing(engine):
        assert agree(*gaps(run, engine, model, groups))
        for part in ("visual.blocks.0.", "visual.merger.", "model.layers.0.", "model.layers.1."):
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    if part in key and parameter.dim() > 1:
                        parameter.add_(2 * parameter.std() * torch.randn_like(parameter))
            engine.reset_caches()
            assert gaps(run, engine, model, groups[:1])[0] > 0.1  # the change shows
            engine.sync(model.named_parameters())
            assert agree(*gaps(run, engine, model, groups))
        with pytest.raises(RuntimeError, match="1 names were not sent"):
            engine.sync(item for item in model.named_parameters() if "patch_embed.proj.weight" not in item[0])


def test_sliding_windows_are_refused(prepared, tmp_path):
    run, _ = prepared("qwen2_vl")
    folder = tmp_path / "sliding"
    shutil.copytree(run.cfg.model, folder)
    values = json.loads((folder / "config.json").read_text())
    values["text_config"].update(use_sliding_window=True, sliding_window=8, max_window_layers=0)
    del values["text_config"]["layer_types"]
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(video_io.DataError, match="sliding-window"):
        train_grpo.prepare(dataclasses.replace(run.cfg, model=str(folder)))
