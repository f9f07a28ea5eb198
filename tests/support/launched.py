"""What `torch.distributed.run` runs in each process: a Trainer, plain and with remat.

It trains replicas, or shards if its second argument is FSDP2. To a file of its rank it
writes the losses, the parameters, and how often the layers ran.
"""

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from support.decoders import hf, llama
from torch.distributed.tensor import DTensor

import remat
from remat.testing import count_ops


class Sharding(hf.Trainer):
    """Shards on CPUs, too, where accelerate would make replicas."""

    def create_accelerator_and_postprocess(self):
        PartialState().distributed_type = DistributedType.FSDP
        Accelerator(cpu=True).state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
        super().create_accelerator_and_postprocess()


def trained(kind, folder, *, ours):
    torch.manual_seed(0)
    model = remat.nn.enable(llama(), policy="full") if ours else llama()
    texts = torch.randint(3, 64, (16, 8), generator=torch.Generator().manual_seed(1))
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
    data = [{"input_ids": row, "labels": row} for row in texts]
    trainer = kind(model, arguments, train_dataset=data)
    with count_ops() as ops:
        loss = trainer.train().training_loss
    shards = [isinstance(p, DTensor) for p in model.parameters()]
    whole = [
        p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()
    ]
    kept = [p.detach().clone() for p in whole]
    return {
        "loss": loss,
        "parameters": kept,
        "silu": ops["silu"],
        "shards": all(shards),
    }


if __name__ == "__main__":
    folder, way = sys.argv[1:]
    kind = Sharding if way == "FSDP2" else hf.Trainer
    found = [trained(kind, folder, ours=ours) for ours in (False, True)]
    torch.save(found, Path(folder) / f"{os.environ['RANK']}.pt")
