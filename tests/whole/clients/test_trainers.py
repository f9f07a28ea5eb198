"""Trainings by other libraries' loops: transformers' Trainer, accelerate, Lightning."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.clients import built, bytes_after_forward, changed, products, snapshot
from support.decoders import SMALL, hf, without_cache
from support.zoo import plainly
from torch import nn
from torch.utils.data import DataLoader

import remat
from remat import policies
from remat.testing import assert_same, count_ops


accelerate = pytest.importorskip("accelerate", reason="needs the extra `clients`")
lightning = pytest.importorskip("lightning", reason="needs the extra `clients`")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    # Lightning advises: more workers, a logger, a name for a folder.
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
CLIENTS = {name: without_cache(name) for name in ("llama", "bert")}
CHANGES = {"enable": remat.nn.enable, "apply": remat.nn.apply}
clients = pytest.mark.parametrize("name", CLIENTS)
changes = pytest.mark.parametrize("change", CHANGES)


def texts(count=12, length=16):
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 64, (count, length), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def parameters(model):
    return {name: snapshot(p) for name, p in model.named_parameters()}


def assert_recomputes_after(name, model, of_plain):
    """The loop has left the model as it was told to be."""
    plain, ours = (products(CLIENTS[name], m) for m in (of_plain, model))
    assert ours[0] == plain[0]
    assert ours[1] > plain[1], "nothing is recomputed"


# --- Trainer ---


def by_trainer(model, folder, **options):
    arguments = hf.TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        seed=0,
        learning_rate=1e-2,
        **options,
    )
    trainer = hf.Trainer(model, arguments, train_dataset=texts())
    result = trainer.train()
    return trainer, {"loss": result.training_loss, "parameters": parameters(model)}


OPTIONS = {
    "as it comes": {},
    "bf16": {"bf16": True},
    "micro batches": {"gradient_accumulation_steps": 2},
}


@changes
@clients
@pytest.mark.parametrize("options", OPTIONS)
def test_trainer(name, change, options, tmp_path):
    client = CLIENTS[name]
    plain, ours = built(client), changed(client, CHANGES[change])
    _, want = by_trainer(plain, tmp_path / "plain", **OPTIONS[options])
    _, got = by_trainer(ours, tmp_path / "ours", **OPTIONS[options])
    assert_same(got["parameters"], want["parameters"])
    assert got["loss"] == want["loss"]
    assert_recomputes_after(name, ours, plain)


@changes
@clients
def test_a_checkpoint_of_trainer_is_plains(name, change, tmp_path):
    client = CLIENTS[name]
    plain, ours = built(client), changed(client, CHANGES[change])
    for model, folder in (plain, "plain"), (ours, "ours"):
        trainer, _ = by_trainer(model, tmp_path / folder)
        trainer.save_model()
    loaded = [type(plain).from_pretrained(tmp_path / f) for f in ("plain", "ours")]
    assert_same(loaded[1].state_dict(), loaded[0].state_dict())
    assert_same(loaded[1].state_dict(), ours.state_dict())


@clients
@pytest.mark.parametrize(
    "switch", ["activation_checkpointing", "gradient_checkpointing"]
)
def test_a_trainer_that_is_told_to_checkpoint_keeps_ours(name, switch, tmp_path):
    """It put torch's checkpoint in, and the policy was lost."""
    client = CLIENTS[name]
    plain, ours = built(client), built(client)
    remat.nn.enable(ours, policy=policies.dots_saveable)
    _, want = by_trainer(plain, tmp_path / "plain")
    _, got = by_trainer(ours, tmp_path / "ours", **{switch: True})
    assert_same(got["parameters"], want["parameters"])
    assert products(client, ours) == products(client, plain)
    alone = built(client)
    remat.nn.enable(alone, policy=policies.dots_saveable)
    held = [bytes_after_forward(client, model) for model in (plain, alone, ours)]
    assert held[2] == held[1] < held[0]
    assert {found.by for found in remat.nn.applied(ours).values()} == {
        "remat.nn.enable"
    }


def test_a_trainer_chooses_the_layers(tmp_path):
    client = CLIENTS["bert"]
    ours = changed(client, remat.nn.enable)
    arguments = {"activation_checkpointing_kwargs": {"every_n_layers": 2}}
    by_trainer(ours, tmp_path, activation_checkpointing=True, **arguments)
    assert [*remat.nn.applied(ours)] == ["bert.encoder.layer.0"]


def test_a_trainer_that_would_offload_is_told_where_no_input_moves(tmp_path):
    ours = changed(CLIENTS["bert"], remat.nn.enable)
    arguments = {"activation_checkpointing_kwargs": {"offload": True}}
    with pytest.warns(UserWarning, match=r"moves no input .* they are in host memory"):
        by_trainer(ours, tmp_path, activation_checkpointing=True, **arguments)
    found = remat.nn.applied(ours).values()
    assert {each.by for each in found} == {"remat.nn.enable"}


def test_a_trainer_beside_apply_is_refused(tmp_path):
    ours = changed(CLIENTS["bert"], remat.nn.apply)
    with pytest.raises(
        ValueError,
        match=r"switch that off, in the model or in the arguments of its trainer",
    ):
        by_trainer(ours, tmp_path, activation_checkpointing=True)


# --- accelerate ---


def by_accelerate(model, precision):
    torch.manual_seed(1)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(texts(), batch_size=4)
    )
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        losses.append(snapshot(loss))
    unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    return [losses, parameters(unwrapped)], accelerator.get_state_dict(model)


@changes
@clients
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(name, change, precision):
    client = CLIENTS[name]
    plain, ours = built(client), changed(client, CHANGES[change])
    with count_ops() as ops:
        want, kept = by_accelerate(plain, precision)
    with count_ops() as more:
        got, saved = by_accelerate(ours, precision)
    assert len(got[0]) == 3
    assert_same(got, want)
    assert_same(saved, kept)
    assert more["mm"] + more["addmm"] > ops["mm"] + ops["addmm"]
    assert_recomputes_after(name, ours, plain)


# --- Two processes ---


ROOT = Path(__file__).parents[3]
# By the Trainer's users, by those of accelerate, which trains on CPUs if it is told.
LAUNCHERS = {
    "Trainer": ("torch.distributed.run", "--standalone", "--nproc_per_node=2"),
    "accelerate": (
        *("accelerate.commands.launch", "--multi_gpu", "--num_processes=2"),
        *("--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"),
        "--main_process_port=0",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("shards", ["replicas", "FSDP2"])
@pytest.mark.parametrize("way", LAUNCHERS)
def test_a_training_in_two_processes(way, shards, tmp_path):
    """With each library's own launcher, and its preparation of the model."""
    script = ROOT / "tests/support/launched.py"
    command = sys.executable, "-m", *LAUNCHERS[way], script, tmp_path, way, shards
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    own = {"GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true"}
    run = subprocess.run(
        [*map(str, command)],
        env={**os.environ, **own, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    for rank in range(2):
        plain, ours = torch.load(tmp_path / f"{rank}.pt")
        assert (plain["silu"], ours["silu"]) == (2 * 2, 2 * 2 * 2)  # layers and steps
        assert plain["shards"] is ours["shards"] is (shards == "FSDP2")
        assert ours["losses"] == plain["losses"]
        assert_same(ours["parameters"], plain["parameters"])


# --- Lightning ---


class Task(lightning.LightningModule):
    """Makes a model, and trains it."""

    def __init__(self, change=plainly):
        super().__init__()
        config = hf.BertConfig(**SMALL)
        self.model = change(hf.BertForMaskedLM(config))
        self.head = nn.Linear(64, 64)
        self.losses = []

    def training_step(self, batch, index):
        out = self.model(**batch)
        loss = out.loss + self.head(out.logits).square().mean()
        self.log("loss", loss)
        self.losses.append(snapshot(loss))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def by_lightning(change, folder, **options):
    torch.manual_seed(0)
    task = Task(change).train()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(task, DataLoader(texts(), batch_size=4))
    return task, trainer


@changes
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning(change, precision, tmp_path):
    runs = []
    for wrap in plainly, CHANGES[change]:
        with count_ops() as ops:
            task, trainer = by_lightning(wrap, tmp_path, precision=precision)
        runs.append(([task.losses, parameters(task)], ops))
    (want, ops), (got, more) = runs
    assert len(got[0]) == 3
    assert_same(got, want)
    assert more["mm"] + more["addmm"] > ops["mm"] + ops["addmm"]
    trainer.save_checkpoint(tmp_path / "checkpoint")
    loaded = Task.load_from_checkpoint(tmp_path / "checkpoint", weights_only=False)
    assert_same(loaded.state_dict(), task.state_dict())
