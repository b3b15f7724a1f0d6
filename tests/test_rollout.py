"""The engine against Hugging Face forwards: what it samples, what it reports, and whether new weights reach it."""

import dataclasses

import pytest
import torch
from test_train_grpo import Parts, config, separate_logprobs
from transformers import AutoModelForImageTextToText

import rollout
import train_grpo
import video_io

SAMPLING = dict(n=4, max_tokens=12, temperature=1.0)


@pytest.fixture(scope="module")
def world(toy):
    """Engine, trainer's model and one record of each kind with its media and prompt."""
    cfg = config(toy)
    parts = Parts(toy, cfg)
    engine = rollout.Engine(cfg.model, dtype="float32", max_model_len=512, banned=parts.banned.tolist())
    model = AutoModelForImageTextToText.from_pretrained(cfg.model, dtype=torch.float32)
    records = video_io.load_records(toy / "train.jsonl")
    groups = []
    for kind in ("video", "image", "text"):
        record = dict(next(r for r in records if r["data_type"] == kind))
        record["problem"] += " Look closely." * 25 * (kind == "video")  # longer than a block of the prefix cache
        media = video_io.load_media(record, parts.spec)
        text = video_io.prompt_text(record, parts.prompts, parts.processor, "direct")
        groups.append((train_grpo.Group(record, media, video_io.expand_prompt(
            text, media, parts.processor, parts.model_config), []), text))
    yield engine, model, parts, groups
    engine.close()


def gap(world, groups=None, seeds=None):
    """Largest difference between the engine's logprobs of its samples and the trainer's."""
    engine, model, parts, all_groups = world
    groups = groups or all_groups
    outputs = engine.generate([video_io.vllm_inputs(text, g.media) for g, text in groups], seeds=seeds, **SAMPLING)
    worst = 0.0
    for (group, _), out in zip(groups, outputs):
        assert out.prompt_ids == group.prompt_ids
        for response in out.responses:
            with torch.no_grad():
                ours = separate_logprobs(model, parts, group, response)
            worst = max(worst, (ours - torch.tensor(response.logprobs)).abs().max().item())
    return worst


def perturb(model, *names):
    with torch.no_grad():
        for name in names:
            p = model.get_parameter(name)
            p.add_(torch.randn_like(p) * p.std())


VISION = "model.visual.blocks.0.mlp.linear_fc1.weight"
EMBEDDING = "model.language_model.embed_tokens.weight"  # tied: also the output layer
TEXT = "model.language_model.layers.0.mlp.up_proj.weight"


def test_engine_and_trainer_agree_and_follow_each_sync(world):
    engine, model, *_ = world
    assert gap(world) < 1e-4
    for names in [(VISION,), (TEXT,), (EMBEDDING,), (VISION, TEXT)]:
        perturb(model, *names)
        # Only now could both be wrong in the same way: the perturbation must be visible.
        engine.reset_caches()
        assert gap(world, world[3][:1]) > 1e-3
        engine.sync(model.named_parameters())
        assert gap(world) < 1e-4


def test_sync_without_the_prefix_reset_answers_with_stale_keys_and_values(world, monkeypatch):
    engine, model, *_ = world
    gap(world, world[3][:1])  # fills the caches
    perturb(model, TEXT)
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm, "reset_prefix_cache", lambda: None)
        engine.sync(model.named_parameters())
    assert gap(world, world[3][:1]) > 1e-3
    engine.reset_caches()
    assert gap(world, world[3][:1]) < 1e-4


def test_new_frames_under_an_old_name_are_seen_after_a_sync(world):
    """Processed pixels are cached by the clip's key: sync empties that cache too."""
    engine, model, parts, groups = world
    group, text = groups[0]
    gap(world, [(group, text)])
    clip = group.media.videos[0]
    other = dataclasses.replace(group, media=dataclasses.replace(group.media, videos=[
        dataclasses.replace(clip, frames=255 - clip.frames)]))
    engine.sync(model.named_parameters())
    assert gap(world, [(other, text)]) < 1e-4
    engine.reset_caches()


def test_vision_placeholders_are_never_sampled(world):
    engine, model, parts, groups = world
    pad = parts.model_config.video_token_id
    with torch.no_grad():
        saved = model.model.language_model.norm.weight.clone()
        embedding = model.get_input_embeddings().weight
        kept = embedding[pad].clone()
        embedding[pad] = 50 * embedding.mean(0) + 5 * torch.randn_like(kept)  # tied head: now a likely token
    engine.sync(model.named_parameters())
    outputs = engine.generate([video_io.vllm_inputs(t, g.media) for g, t in groups], n=16, max_tokens=12)
    ids = {t for out in outputs for r in out.responses for t in r.ids}
    assert ids and not ids & set(parts.banned.tolist())
    with torch.no_grad():
        embedding[pad] = kept
        model.model.language_model.norm.weight.copy_(saved)
    engine.sync(model.named_parameters())


def test_a_seed_fixes_the_samples_whatever_else_is_in_the_batch(world):
    engine, *_, groups = world
    prompts = [video_io.vllm_inputs(text, g.media) for g, text in groups]
    together = engine.generate(prompts, seeds=[1, 2, 3], **SAMPLING)
    alone = engine.generate(prompts[1:2], seeds=[2], **SAMPLING)
    assert [r.ids for r in together[1].responses] == [r.ids for r in alone[0].responses]
    assert len({tuple(r.ids) for r in together[0].responses}) > 1


def test_sync_refuses_an_incomplete_set_of_weights(world):
    engine, model, *_ = world
    with pytest.raises(RuntimeError, match="1 names of .* were not sent"):
        engine.sync((n, p) for n, p in model.named_parameters() if n != VISION)
    with pytest.raises((RuntimeError, ValueError, KeyError)):
        engine.sync([*model.named_parameters(), ("model.visual.nonsense", torch.zeros(1))])
    engine.sync(model.named_parameters())
    assert gap(world) < 1e-4


def test_sync_without_the_encoder_reset_fails_or_sees_with_old_eyes(world, monkeypatch):
    """In an engine of its own: the failed request leaves it unusable."""
    _, model, parts, groups = world
    engine = rollout.Engine(parts.model_dir, dtype="float32", max_model_len=512, banned=parts.banned.tolist())
    engine.sync(model.named_parameters())
    lonely = (engine, model, parts, groups[:1])
    assert gap(lonely) < 1e-4
    perturb(model, VISION)
    monkeypatch.setattr(engine.llm.llm_engine, "reset_encoder_cache", lambda: None)
    engine.sync(model.named_parameters())
    try:
        stale = gap(lonely)
    except RuntimeError as e:
        assert "Encoder cache miss" in str(e)
    else:
        assert stale > 1e-3
