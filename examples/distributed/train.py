"""Train with `dpsur.PrivacyEngine` on any number of processes, and resume after a failure.

    python train.py                                         one process
    torchrun --nproc-per-node 4 train.py --out run          four on this machine
    torchrun --nproc-per-node 2 train.py --out run --shard  weights split by fully_shard (FSDP2)

The batch of 256 is the expected size over all ranks. Restarted ranks continue from the checkpoint.
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import dpsur


def records(count: int) -> TensorDataset:
    """Made-up records; put your data set here. Every rank must see the same records."""
    made = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 32, generator=made)
    return TensorDataset(inputs, (inputs[:, :4].sum(1) > 0).long())


def main() -> None:
    """Train, and save after every epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--records", type=int, default=4096)
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")

    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    if options.shard and several:
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    path = None if options.out is None else options.out / "checkpoint"
    resumed = path is not None and (path / ".metadata").exists()
    if resumed:  # before make_private: torch makes a step of its own to set up the moments
        load(path, model, optimizer)
    engine = dpsur.PrivacyEngine()
    module, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(records(options.records), batch_size=256),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        epochs=options.epochs,
    )
    if resumed:
        spent = {"engine": ""}
        dcp.load(spent, checkpoint_id=str(path))
        engine.load_state_dict(json.loads(spent["engine"]))
    while engine.accountant.steps < options.epochs * len(loader):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(module(inputs.to(device)), targets.to(device)).backward()
            optimizer.step()
        if path is not None:
            save(path, module, optimizer, engine)
    if not several or dist.get_rank() == 0:
        epsilon = engine.guarantee()
        print(f"{engine.accountant.steps} steps, epsilon {epsilon:.3f}", flush=True)
    if several:
        dist.destroy_process_group()


def save(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer, engine) -> None:
    """Write the shards of all ranks, and what the engine has spent. Private."""
    weights, moments = get_state_dict(module, optimizer)
    spent = json.dumps(engine.state_dict())
    state = {"model": weights, "optimizer": moments, "engine": spent}
    dcp.save(state, checkpoint_id=str(path))


def load(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Weights and moments of a checkpoint, on any number of ranks."""
    weights, moments = get_state_dict(module, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=str(path))
    set_state_dict(
        module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


if __name__ == "__main__":
    main()
