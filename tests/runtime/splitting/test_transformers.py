"""Models of transformers: split by their own forward, they give the numbers that they give in one piece."""

import copy
import runpy
from pathlib import Path

import pytest
import torch

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime import Engine, build_model, run_local, split

transformers = pytest.importorskip("transformers")

IDS, LENGTH, SAMPLES, MICROBATCHES = 64, 8, 8, 4


def model_of(kind="llama", **settings):
    torch.manual_seed(0)
    sizes = {
        "llama": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "gemma2": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "head_dim": 8,
        },
        "mistral": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    }[kind]
    config = transformers.CONFIG_MAPPING[kind](
        **{**sizes, "vocab_size": IDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **settings}
    )
    return transformers.AutoModelForCausalLM.from_config(config).double()


def batch(length=LENGTH):
    ids = torch.randint(3, IDS, (SAMPLES, length), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(length) < torch.arange(SAMPLES)[:, None] % 4 + length - 3).long()
    return ids, mask, ids.masked_fill(mask == 0, -100)


def plain_losses(model, steps=2, *, mask=None, labels=None, positions=None):
    ids, _, _ = batch()
    labels = ids if labels is None else labels
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(steps):
        optimizer.zero_grad()
        weight, total = (labels[:, 1:] != -100).sum(), 0.0
        for rows in torch.arange(SAMPLES).chunk(MICROBATCHES):
            given = {} if mask is None else {"attention_mask": mask[rows]}
            given |= {} if positions is None else {"position_ids": positions[rows]}
            logits = model(ids[rows], **given).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels[rows, 1:].flatten(), ignore_index=-100, reduction="sum"
            )
            (loss / weight).backward()
            total += loss.item() / weight.item()
        optimizer.step()
        losses.append(total)
    return losses


def split_losses(model, plan, give, steps=2, **settings):
    def work(transport):
        blocks = split(copy.deepcopy(model))
        engine = Engine(
            plan, blocks, blocks.loss_fn, lambda p: torch.optim.SGD(p, lr=0.1), transport=transport, **settings
        )
        return [give(engine).loss.item() for _ in range(steps)]

    return run_local(plan.mesh.size, work)


@pytest.mark.parametrize(
    ("kind", "mesh", "schedule", "settings"),
    [
        ("llama", "pp=2", "zb-h1", {}),
        ("llama", "cp=2,pp=2", "1f1b", {}),
        ("llama", "tp=2,pp=2", "1f1b", {"sequence_parallel": True}),
        ("gpt2", "cp=2,tp=2", "gpipe", {"context": "gather"}),
        ("gpt2", "pp=2", "seq-1f1b", {}),
        ("gemma2", "pp=2", "1f1b", {}),
    ],
)
def test_a_model_trains_as_in_one_piece(kind, mesh, schedule, settings):
    model = model_of(kind)
    plan = qs.compile(
        schedule, mesh=mesh, microbatches=MICROBATCHES, **({"slices": 2} if schedule == "seq-1f1b" else {})
    )
    ids, _, _ = batch()
    found = split_losses(model, plan, lambda engine: engine.step(ids, ids), **settings)
    assert found == [pytest.approx(plain_losses(model), rel=1e-9)] * plan.mesh.size


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padded_batches(attention):
    model = model_of("llama", attn_implementation=attention)
    ids, mask, labels = batch()
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=MICROBATCHES)
    expected = plain_losses(copy.deepcopy(model), mask=mask, labels=labels)
    as_extra = split_losses(model, plan, lambda engine: engine.step(ids, labels, attention_mask=mask))
    whole = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    as_batch = split_losses(model, plan, lambda engine: engine.step(whole, labels))
    assert as_extra == as_batch == [pytest.approx(expected, rel=1e-9)] * 2


PACKED = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]).repeat(SAMPLES, 1)


@pytest.mark.parametrize(
    ("kind", "keeps_cache", "mesh"),
    [("llama", True, "dp=1"), ("llama", False, "dp=1"), ("gpt2", False, "dp=1"), ("gpt2", True, "cp=2")],
)
def test_packed_sequences_are_what_the_models_own_forward_makes_of_them(kind, keeps_cache, mesh):
    model, ids = model_of(kind, use_cache=keeps_cache), batch()[0]
    plan = qs.compile("1f1b", mesh=mesh, microbatches=MICROBATCHES)
    expected = plain_losses(copy.deepcopy(model), positions=PACKED)
    found = split_losses(model, plan, lambda engine: engine.step(ids, ids, position_ids=PACKED))
    assert found == [pytest.approx(expected, rel=1e-9)] * plan.mesh.size


def test_packed_sequences_that_are_read_apart_are_refused_where_they_are_cut():
    plan, ids = qs.compile("1f1b", mesh="cp=2", microbatches=MICROBATCHES), batch()[0]
    with pytest.raises(MisfitError, match="several sequences out of them"):
        split_losses(model_of(use_cache=False), plan, lambda engine: engine.step(ids, ids, position_ids=PACKED))


def test_a_window_is_kept_where_sequences_come_in_slices():
    model = model_of("mistral", sliding_window=3, num_key_value_heads=2)
    plan = qs.compile("seq-1f1b", mesh="pp=2", microbatches=MICROBATCHES, slices=2)
    ids, _, _ = batch()
    found = split_losses(model, plan, lambda engine: engine.step(ids, ids))
    assert found == [pytest.approx(plain_losses(model), rel=1e-9)] * 2


@pytest.mark.parametrize(
    ("kind", "model", "said"),
    [
        ("gemma2", {"sliding_window": 3, "attn_logit_softcapping": None}, "attends to a window of 3 tokens"),
        ("gemma2", {}, "attends with softcap"),
        ("gpt2", {"attn_pdrop": 0.1}, "dropout of 0.1"),
        ("mpt", {}, "gives other numbers where sequences are cut into 2"),
    ],
)
def test_attention_that_slices_cannot_have_is_refused(kind, model, said):
    ids, _, _ = batch()
    plan = qs.compile("gpipe", mesh="cp=2", microbatches=MICROBATCHES)
    with pytest.raises(MisfitError, match=said):
        split_losses(model_of(kind, **model), plan, lambda engine: engine.step(ids, ids))


@pytest.mark.parametrize("mesh", ["cp=2", "cp=2,pp=2"])
def test_sequences_that_are_cut_are_classified_as_whole_ones(mesh):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=IDS, pad_token_id=0, num_labels=3)
    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(config).double()
    ids, mask, _ = batch()
    ids, labels = ids * mask, torch.arange(SAMPLES) % 3  # the last token that is no padding lies in any slice
    plan = qs.compile("1f1b", mesh=mesh, microbatches=MICROBATCHES)
    found = split_losses(model, plan, lambda engine: engine.step(ids, labels))
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert found == [pytest.approx(expected, rel=1e-9)] * plan.mesh.size


def test_a_loss_that_shifts_is_refused_where_sequences_are_cut():
    def shifting(logits, labels):
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    plan = qs.compile("gpipe", mesh="cp=2", microbatches=MICROBATCHES)

    def work(transport):
        Engine(plan, split(model_of()), shifting, lambda p: torch.optim.SGD(p, lr=0.1), transport=transport)

    with pytest.raises(MisfitError, match="the loss shifts its targets by a token"):
        run_local(2, work)


KINDS = {
    "bert": ("AutoModelForMaskedLM", {}),
    "albert": ("AutoModelForMaskedLM", {}),
    "mpnet": ("AutoModelForMaskedLM", {}),
    "vit": ("AutoModelForImageClassification", {"image_size": 16, "patch_size": 8}),
    "electra": ("AutoModelForMultipleChoice", {}),
    "pvt": (
        "AutoModelForImageClassification",
        {"image_size": 32, "depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32], "num_attention_heads": [1, 2, 2, 4]}
        | {"sequence_reduction_ratios": [4, 2, 1, 1]},
    ),
    "t5": ("AutoModelForSeq2SeqLM", {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4}),
    "bart": (
        "AutoModelForSeq2SeqLM",
        {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_models_prove_equal(kind):
    auto, settings = KINDS[kind]
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": IDS,
    }
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**(sizes | settings), max_position_embeddings=32)
    model = getattr(transformers, auto).from_config(config).double()
    blocks = split(model)
    assert len(blocks) >= 4
    own = dict(model.named_parameters(remove_duplicate=False))
    assert set(blocks.own_names.values()) <= model.state_dict().keys()
    assert {id(own[name]) for name in blocks.own_names.values() if name in own} == {id(p) for p in model.parameters()}


def build_llama():
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=IDS)
    config.num_attention_heads = config.num_key_value_heads = 4
    return transformers.AutoModelForCausalLM.from_config(config)


def built_losses(mesh):
    plan = qs.compile("1f1b", mesh=mesh, microbatches=MICROBATCHES)

    def work(transport):
        blocks = split(build_llama)
        assert not any(isinstance(block, torch.nn.Module) for block in blocks)
        engine = Engine(
            plan,
            blocks,
            blocks.loss_fn,
            lambda p: torch.optim.SGD(p, lr=0.1),
            transport=transport,
            dtype=torch.float64,
            seed=3,
        )
        ids, _, _ = batch()
        return [engine.step(ids, ids).loss.item() for _ in range(2)]

    return run_local(plan.mesh.size, work)


def test_a_layer_that_looks_at_its_numbers_is_built_without_weights():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.MixtralConfig(**sizes, num_key_value_heads=4, vocab_size=IDS, num_local_experts=2)
    blocks = split(lambda: transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager"))
    assert len(blocks) == 3


def test_a_model_built_without_weights_starts_alike_on_every_mesh():
    (alone,) = built_losses("dp=1")
    assert built_losses("pp=2") == [pytest.approx(alone, rel=1e-12)] * 2


def test_weights_that_are_made_block_by_block_are_the_models_own():
    blocks, whole = split(build_llama), build_llama()
    assert not any(p.is_meta for p in build_model(blocks).parameters())
    for name, weight in build_model(blocks, seed=1).named_parameters():
        own = whole.get_parameter(blocks.own_names[name])
        assert own.shape == weight.shape
        assert weight.std().item() == pytest.approx(own.std().item(), rel=0.3, abs=1e-6)


def test_the_example_runs(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["huggingface.py", "--steps", "2"])
    runpy.run_path(str(Path(__file__).parents[3] / "examples" / "huggingface.py"))
    assert "after 2 steps the loss is" in capsys.readouterr().out


def mixture(**settings):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=IDS, num_local_experts=4)
    config.output_router_logits, config.router_aux_loss_coef = True, 0.5
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager", **settings)


@pytest.mark.parametrize("mesh", ["dp=1", "pp=2"])
def test_losses_of_routers_are_the_models_own(mesh):
    model, (ids, mask, _) = mixture(), batch()
    labels = ids.masked_fill(mask == 0, -100)
    plan = qs.compile("1f1b", mesh=mesh, microbatches=MICROBATCHES)
    found = split_losses(model, plan, lambda engine: engine.step(ids, labels, attention_mask=mask))
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.1), []
    weight = (labels[:, 1:] != -100).sum()
    for _ in range(2):
        optimizer.zero_grad()
        parts = torch.arange(SAMPLES).chunk(MICROBATCHES)
        shares = [(labels[rows, 1:] != -100).sum() / weight for rows in parts]
        own = [model(ids[rows], attention_mask=mask[rows], labels=labels[rows]).loss for rows in parts]
        loss = sum(share * part for share, part in zip(shares, own, strict=True))
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert found == [pytest.approx(expected, rel=1e-5)] * plan.mesh.size


def test_losses_of_routers_are_refused_where_they_are_not_known():
    config = mixture().config
    with pytest.raises(MisfitError, match="adds a loss of the routers"):
        split(transformers.MixtralForTokenClassification(config))
    plan = qs.compile("1f1b", mesh="cp=2", microbatches=MICROBATCHES)
    with pytest.raises(MisfitError, match="adds a loss of all tokens"):
        split_losses(mixture(), plan, lambda engine: engine.step(batch()[0], batch()[0]))
