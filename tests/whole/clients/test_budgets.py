"""Budgets hold in loops of others: transformers' Trainer, accelerate, peft, autocast.

The bytes of each step are counted by the profiler. Gradients of the Trainer's steps are
those of plain code, for its parameters are.
"""

import copy

import pytest
import torch
from support.allocated import most_allocated
from support.decoders import hf
from support.fitted import bytes_before

import remat
from remat.testing import assert_same


accelerate = pytest.importorskip("accelerate", reason="needs the extra `clients`")
peft = pytest.importorskip("peft", reason="needs the extra `clients`")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]
SIZES = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
HEADS = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32}
WIDE = {"intermediate_size": 64}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, **HEADS, **WIDE)),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES, **HEADS, **WIDE)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(**SIZES, n_embd=32, n_layer=3, n_head=4)
    ),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=128,
            d_model=32,
            d_ff=64,
            d_kv=8,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
    ),
    "vit": lambda: hf.ViTForImageClassification(
        hf.ViTConfig(**HEADS, **WIDE, image_size=32, patch_size=4, num_labels=4)
    ),
}


def built(name):
    torch.manual_seed(0)
    return MODELS[name]()


def texts(name, mask, count=32):
    generator = torch.Generator().manual_seed(5)
    if name == "vit":
        images = torch.randn(count, 3, 32, 32, generator=generator)
        return [{"pixel_values": x, "labels": torch.tensor(1)} for x in images]
    ids = torch.randint(3, 128, (count, 32), generator=generator)
    found = [{"input_ids": row, "labels": row} for row in ids]
    for k, row in enumerate(found if mask else ()):
        row["attention_mask"] = torch.ones(32, dtype=torch.long)
        row["attention_mask"][32 - 8 * (k % 2) * (mask == "padded") :] = 0
    return found


def planned(model, batch, share=0.6):
    """Plan as the Trainer calls: without a cache, with gradients that are there."""
    options = {**batch, "accumulates": True}
    if isinstance(model, (hf.LlamaForCausalLM, hf.GPT2LMHeadModel)):
        options["use_cache"] = False
    high = remat.fit(model, budget="1GB", **options).peak
    with pytest.raises(remat.BudgetError, match=r"least budget") as raised:
        remat.fit(model, budget=1, **options)
    low = raised.value.least
    return remat.fit(model, budget=int(low + share * (high - low)), **options)


def trained(model, rows, folder, **options):
    """Train by the Trainer; return the peak of its steps."""
    peaks = []

    class Counting(hf.Trainer):
        def training_step(self, model, *args, **kwargs):
            before = [p.grad.nbytes for p in model.parameters() if p.grad is not None]
            run = super().training_step
            most, loss = most_allocated(run, model, *args, **kwargs)
            peaks.append(most + sum(before))
            return loss

    arguments = hf.TrainingArguments(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        seed=0,
        **options,
    )
    Counting(model, arguments, train_dataset=rows).train()
    return max(peaks)


ROWS = [(name, mask, {}) for name in MODELS for mask in ("", "padded") if name != "vit"]
ROWS += [("vit", "", {}), ("llama", "full", {})]
ROWS += [(name, "", {"bf16": True}) for name in MODELS]


@pytest.mark.parametrize(("name", "mask", "options"), ROWS)
def test_the_trainer_stays_in_the_budget(name, mask, options, tmp_path):
    rows, model = texts(name, mask), built(name)
    batch = {key: torch.stack([row[key] for row in rows[:4]]) for key in rows[0]}
    plan = planned(model, batch)
    plain, ours = copy.deepcopy(model), plan.apply(copy.deepcopy(model))
    before = bytes_before(model, *batch.values())
    of_plain = before + trained(plain, rows, tmp_path / "plain", **options)
    peak = before + trained(ours, rows, tmp_path / "ours", **options)
    assert_same([*ours.parameters()], [*plain.parameters()])
    assert peak <= 1.01 * plan.budget
    assert peak < of_plain


def steps(model, batch, around):
    """Run two steps; return their peak, with what is there before, and gradients."""
    before, peaks = bytes_before(model, *batch.values()), []
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(1)

        def run():
            with around():
                loss = model(**batch).loss
            loss.backward()

        peaks.append(before + most_allocated(run)[0])
    return max(peaks), [p.grad for p in model.parameters() if p.grad is not None]


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("by", ["autocast", "accelerate", "peft"])
def test_other_loops_stay_in_the_budget(by):
    model = built("llama")
    if by == "peft":
        model = peft.get_peft_model(model, peft.LoraConfig(r=4))
    rows = texts("llama", "")
    batch = {key: torch.stack([row[key] for row in rows[:4]]) for key in rows[0]}
    plan = planned(model, batch)
    plain, ours = copy.deepcopy(model), plan.apply(copy.deepcopy(model))
    around = autocast if by == "autocast" else torch.enable_grad
    if by == "accelerate":
        accelerator = accelerate.Accelerator(cpu=True)
        plain, ours = accelerator.prepare(plain), accelerator.prepare(ours)
    of_plain, expected = steps(plain, batch, around)
    peak, found = steps(ours, batch, around)
    assert_same(found, expected)
    assert peak <= 1.01 * plan.budget
    assert peak < of_plain
