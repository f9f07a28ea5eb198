"""Budgets hold in loops of others: Trainer, accelerate, Lightning, peft, autocast.

The bytes of each step are counted by the profiler. Gradients of the Trainer's steps are
those of plain code, for its parameters are.
"""

import copy

import pytest
import torch
from support.allocated import most_allocated
from support.decoders import hf
from support.fitted import bytes_before
from torch.utils.data import DataLoader

import remat
from remat.testing import assert_same


lightning = pytest.importorskip("lightning", reason="needs the extra `clients`")
accelerate = pytest.importorskip("accelerate", reason="needs the extra `clients`")
peft = pytest.importorskip("peft", reason="needs the extra `clients`")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore:::lightning"),
    # By blocks, then.
    pytest.mark.filterwarnings("ignore:.*cannot be followed in compiled code"),
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


def texts(name, mask, count=32, length=32):
    generator = torch.Generator().manual_seed(5)
    if name == "vit":
        images = torch.randn(count, 3, 32, 32, generator=generator)
        return [{"pixel_values": x, "labels": torch.tensor(1)} for x in images]
    ids = torch.randint(3, 128, (count, length), generator=generator)
    found = [{"input_ids": row, "labels": row} for row in ids]
    for k, row in enumerate(found if mask else ()):
        row["attention_mask"] = torch.ones(length, dtype=torch.long)
        row["attention_mask"][length - 8 * (k % 2) * (mask == "padded") :] = 0
    return found


def stacked(rows):
    return {key: torch.stack([row[key] for row in rows[:4]]) for key in rows[0]}


def planned(model, batch, share=0.8, **options):
    """Plan as the Trainer calls, with gradients that are there, for a share of plain's.

    That is without a cache.
    """
    options = {**batch, "accumulates": True, **options}
    if isinstance(model, (hf.LlamaForCausalLM, hf.GPT2LMHeadModel)):
        options.setdefault("use_cache", False)
    most = remat.fit(model, budget="1GB", **options).plain_peak
    return remat.fit(model, budget=int(share * most), **options)


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
ROWS += [("llama", "", {"torch_compile": True, "torch_compile_backend": "aot_eager"})]


@pytest.mark.parametrize(("name", "mask", "options"), ROWS)
def test_the_trainer_stays_in_the_budget(name, mask, options, tmp_path):
    rows, model = texts(name, mask), built(name)
    batch = stacked(rows)
    plan = planned(model, batch)
    plain, ours = copy.deepcopy(model), plan.apply(copy.deepcopy(model))
    before = bytes_before(model, *batch.values())
    of_plain = before + trained(plain, rows, tmp_path / "plain", **options)
    peak = before + trained(ours, rows, tmp_path / "ours", **options)
    assert_same([*ours.parameters()], [*plain.parameters()])
    assert peak <= 1.01 * plan.budget
    assert peak < of_plain


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_other_lengths_than_planned_stay_in_the_budget(name, tmp_path):
    longest, model = stacked(texts(name, "padded")), built(name)
    plan = planned(model, longest)
    rows = [r for n in (32, 24) for r in texts(name, "padded", 4, n)]
    plain, ours = copy.deepcopy(model), plan.apply(copy.deepcopy(model))
    before = bytes_before(model, *longest.values())
    trained(plain, rows, tmp_path / "plain", **IN_ORDER)
    peak = before + trained(ours, rows, tmp_path / "ours", **IN_ORDER)
    assert_same([*ours.parameters()], [*plain.parameters()])
    assert peak <= 1.01 * plan.budget


@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=["", "bf16"])
def test_the_first_batch_of_the_trainer_makes_the_plan(name, options, tmp_path):
    rows, model = texts(name, "padded"), built(name)
    budget = planned(model, stacked(rows)).budget
    plain, ours = copy.deepcopy(model), copy.deepcopy(model)
    remat.nn.apply(ours, f"budget:{budget}")
    before = bytes_before(model, *stacked(rows).values())
    of_plain = before + trained(plain, rows, tmp_path / "plain", **options)
    peak = before + trained(ours, rows, tmp_path / "ours", **options)
    assert_same([*ours.parameters()], [*plain.parameters()])
    assert peak <= 1.01 * budget
    assert peak < of_plain


IN_ORDER = {"train_sampling_strategy": "sequential"}


@pytest.mark.parametrize("planned_for", [True, False])
def test_a_cache_that_was_not_planned_or_is_not_there_stays_in_the_budget(
    planned_for, caplog
):
    """Nothing is said of what runs as planned, and once of what does not."""
    batch, model = stacked(texts("gpt2", "")), built("gpt2")
    plan = planned(model, batch, use_cache=planned_for, accumulates=False)
    for use_cache, said in (planned_for, 0), (not planned_for, 1):
        options = {"use_cache": use_cache}
        plain, ours = copy.deepcopy(model), plan.apply(copy.deepcopy(model))
        with caplog.at_level("INFO", "remat"):
            _, expected = steps(plain, {**batch, **options}, torch.enable_grad)
            peak, found = steps(ours, {**batch, **options}, torch.enable_grad)
        assert_same(found, expected)
        assert peak <= plan.budget
        ours_said = [r for r in caplog.records if r.name.startswith("remat")]
        assert len(ours_said) == said


class Task(lightning.LightningModule):
    """A step of Lightning that is measured."""

    automatic_optimization = False

    def __init__(self, model):
        super().__init__()
        self.model, self.peaks = model, []

    def training_step(self, batch, index):
        def run():
            self.manual_backward(self.model(**batch).loss)

        before = [p.grad.nbytes for p in self.parameters() if p.grad is not None]
        before.append(bytes_before(self.model, *batch.values()))
        self.peaks.append(sum(before) + most_allocated(run)[0])
        self.optimizers().step()
        self.optimizers().zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning_stays_in_the_budget(precision, tmp_path):
    rows, model = texts("llama", "padded", 16), built("llama")
    plan = planned(model, stacked(rows), use_cache=True, accumulates=False)
    tasks = []
    for each in copy.deepcopy(model), plan.apply(copy.deepcopy(model)):
        torch.manual_seed(0)
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=4,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=tmp_path,
            precision=precision,
        )
        tasks.append(Task(each.train()))
        trainer.fit(tasks[-1], DataLoader(rows, batch_size=4))
    plain, ours = tasks
    assert_same([*ours.parameters()], [*plain.parameters()])
    assert len(ours.peaks) == 4
    assert max(ours.peaks) <= 1.01 * plan.budget
    assert max(ours.peaks) < max(plain.peaks)


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
    batch = stacked(texts("llama", ""))
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
