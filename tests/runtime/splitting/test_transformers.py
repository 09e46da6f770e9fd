"""Models of transformers: split by their own forward, they give the numbers that they give in one piece."""

import runpy
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import quintsched as qs
from quintsched.runtime import build_model, split

from ...helpers.training import require_equal, sgd, train_alone, train_ranks

transformers = pytest.importorskip("transformers")

IDS, LENGTH, SAMPLES, MICROBATCHES = 64, 8, 8, 4


LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SIZES = {
    **{"llama": LLAMA, "mistral": LLAMA | {"num_key_value_heads": 2}, "gemma2": LLAMA | {"head_dim": 8}},
    **{"gpt2": GPT2, "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2}},
}


def model_of(kind="llama", **settings):
    torch.manual_seed(0)
    ids = {"vocab_size": IDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.CONFIG_MAPPING[kind](**(SIZES[kind] | ids | settings))
    return transformers.AutoModelForCausalLM.from_config(config).double()


def batch(length=LENGTH):
    ids = torch.randint(3, IDS, (SAMPLES, length), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(length) < torch.arange(SAMPLES)[:, None] % 4 + length - 3).long()
    return ids, mask, ids.masked_fill(mask == 0, -100)


def shifted(output, labels):
    """The loss of language models, of the model's output or of its logits."""
    losses = functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return losses, (labels[:, 1:] != -100).sum()


def own(output, labels):
    """The loss that the model itself has found of labels."""
    weight = (labels[:, 1:] != -100).sum() if labels.dim() > 1 else len(labels)
    return output.loss * weight, weight


def split_losses(model, request_of, given, **settings):
    plan = qs.compile(**{"schedule": "1f1b", "microbatches": MICROBATCHES, **request_of})
    return [found.losses for found in train_ranks(plan, model, None, sgd, [given] * 2, cut=split, **settings)]


def check(model, request_of, given, *, rel=1e-9, alone=None, loss=shifted, **settings):
    """Losses of all ranks are those of the model in one piece, which may be given the batch otherwise."""
    batches = [given if alone is None else alone] * 2
    expected = train_alone(model, loss, sgd, batches, microbatches=MICROBATCHES).losses
    for losses in split_losses(model, request_of, given, **settings):
        assert losses == pytest.approx(expected, rel=rel)


def test_padded_batches():
    model, (ids, mask, labels) = model_of(), batch()
    as_extra, named = (ids, labels, {"attention_mask": mask}), {"input_ids": ids, "attention_mask": mask}
    check(model, {"mesh": "pp=2"}, as_extra)
    check(model, {"mesh": "pp=2"}, (named | {"labels": labels}, labels), alone=as_extra)


PACKED = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]).repeat(SAMPLES, 1)


@pytest.mark.parametrize(("kind", "keeps_cache", "mesh"), [("llama", False, "dp=1"), ("gpt2", True, "cp=2")])
def test_packed_sequences_are_what_the_models_own_forward_makes_of_them(kind, keeps_cache, mesh):
    check(model_of(kind, use_cache=keeps_cache), {"mesh": mesh}, (batch()[0], batch()[0], {"position_ids": PACKED}))


def test_packed_sequences_that_are_read_apart_are_refused_where_they_are_cut():
    with pytest.raises(qs.MisfitError, match="several sequences out of them"):
        split_losses(model_of(use_cache=False), {"mesh": "cp=2"}, (batch()[0], batch()[0], {"position_ids": PACKED}))


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
    with pytest.raises(qs.MisfitError, match=said):
        split_losses(model_of(kind, **model), {"mesh": "cp=2"}, (batch()[0], batch()[0]))


def test_sequences_that_are_cut_are_classified_as_whole_ones():
    config = transformers.LlamaConfig(**LLAMA, vocab_size=IDS, pad_token_id=0, num_labels=3)
    model = transformers.LlamaForSequenceClassification(config).double()
    ids, mask, _ = batch()
    ids, labels = ids * mask, torch.arange(SAMPLES) % 3  # the last token that is no padding lies in any slice
    check(model, {"mesh": "cp=2"}, (ids, labels), alone=(ids, labels, {"labels": labels}), loss=own)


def test_a_loss_that_shifts_is_refused_where_sequences_are_cut():
    def shifting(logits, labels):
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    plan, ids = qs.compile("gpipe", mesh="cp=2", microbatches=MICROBATCHES), batch()[0]
    with pytest.raises(qs.MisfitError, match="the loss shifts its targets by a token"):
        train_ranks(plan, model_of(), shifting, sgd, [(ids, ids)], cut=split)


def build_llama():
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**LLAMA, vocab_size=IDS))


def test_a_model_built_without_weights_starts_alike_on_every_mesh():
    def built_losses(mesh):
        blocks, plan = split(build_llama), qs.compile("1f1b", mesh=mesh, microbatches=MICROBATCHES)
        assert not any(isinstance(block, torch.nn.Module) for block in blocks)
        more = {"dtype": torch.float64, "seed": 3}
        return train_ranks(plan, blocks, blocks.loss_fn, sgd, [(batch()[0], batch()[0])] * 2, **more)

    require_equal(built_losses("pp=2"), built_losses("dp=1")[0])
    blocks, whole = split(build_llama), build_llama()
    for name, weight in build_model(blocks, seed=1).named_parameters():
        own = whole.get_parameter(blocks.own_names[name])
        assert own.shape == weight.shape
        assert weight.std().item() == pytest.approx(own.std().item(), rel=0.3, abs=1e-6)


def test_the_example_runs(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["huggingface.py", "--steps", "2"])
    runpy.run_path(str(Path(__file__).parents[3] / "examples" / "huggingface.py"))
    assert "after 2 steps the loss is" in capsys.readouterr().out


def mixture():
    config = transformers.MixtralConfig(**LLAMA, num_key_value_heads=2, vocab_size=IDS, num_local_experts=4)
    config.output_router_logits, config.router_aux_loss_coef = True, 0.5
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")


@pytest.mark.parametrize("mesh", ["dp=1", "pp=2"])
def test_losses_of_routers_are_the_models_own(mesh):
    model, (ids, mask, labels) = mixture(), batch()
    given = (ids, labels, {"attention_mask": mask})
    alone = (ids, labels, {"attention_mask": mask, "labels": labels})
    check(model, {"mesh": mesh}, given, alone=alone, loss=own, rel=1e-5)


def test_losses_of_routers_are_refused_where_they_are_not_known():
    config = mixture().config
    with pytest.raises(qs.MisfitError, match="adds a loss of the routers"):
        split(transformers.MixtralForTokenClassification(config))
    with pytest.raises(qs.MisfitError, match="adds a loss of all tokens"):
        split_losses(mixture(), {"mesh": "cp=2"}, (batch()[0], batch()[0]))
