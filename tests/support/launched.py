"""What a launcher runs in each process: a training of others, plain and with remat.

By transformers' Trainer, or by a loop with accelerate, on replicas or on shards. To a
file of its rank it writes the losses, the parameters, and how often the layers ran.
"""

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from support.decoders import hf, llama
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import remat
from remat.testing import count_ops


def texts():
    found = torch.randint(3, 64, (16, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in found]


def shard():
    """Have accelerate shard on CPUs, too, where it would make replicas."""
    PartialState(cpu=True).distributed_type = DistributedType.FSDP
    Accelerator(cpu=True).state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )


class Sharding(hf.Trainer):
    def create_accelerator_and_postprocess(self):
        shard()
        super().create_accelerator_and_postprocess()


def by_trainer(model, folder, *, shards, ours):
    arguments = hf.TrainingArguments(
        output_dir=folder,
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_checkpointing=ours,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        learning_rate=1e-2,
    )
    kind = Sharding if shards else hf.Trainer
    trainer = kind(model, arguments, train_dataset=texts())
    return [trainer.train().training_loss], model


def by_accelerate(model, _, *, shards, ours):
    del ours
    AcceleratorState._reset_state(reset_partial_state=True)
    if shards:
        shard()
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(texts()[:8], batch_size=2)
    )
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses, model


WAYS = {"Trainer": by_trainer, "accelerate": by_accelerate}


def trained(way, folder, *, shards, ours):
    torch.manual_seed(0)
    model = remat.nn.enable(llama(), policy="full") if ours else llama()
    with count_ops() as ops:
        losses, model = WAYS[way](model, folder, shards=shards, ours=ours)
    parameters = [*model.parameters()]
    sharded = [isinstance(p, DTensor) for p in parameters]
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters]
    return {
        "losses": losses,
        "parameters": [p.detach().clone() for p in whole],
        "silu": ops["silu"],
        "shards": all(sharded),
    }


if __name__ == "__main__":
    folder, way, shards = sys.argv[1:]
    found = [
        trained(way, folder, shards=shards == "FSDP2", ours=ours)
        for ours in (False, True)
    ]
    torch.save(found, Path(folder) / f"{os.environ['RANK']}.pt")
