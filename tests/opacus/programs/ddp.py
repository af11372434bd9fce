"""The tutorial on several processes, in one: the wrapper of Opacus."""

import torch
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
model = DPDDP(nn.Linear(6, 3))
privacy_engine = PrivacyEngine()
try:
    model, optimizer, loader = privacy_engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=10),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    print(f"expected batch size {optimizer.expected_batch_size}")
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
finally:
    torch.distributed.destroy_process_group()
epsilon = privacy_engine.get_epsilon(1e-3)
