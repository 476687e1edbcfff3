"""Training in half precision with a GradScaler that skips a step, a clipped gradient and a cosine schedule."""

import torch
from results import print_results
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.BatchNorm1d(12), nn.Linear(12, 3))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
scheduler = SequentialLR(
    optimizer, [LinearLR(optimizer, 0.5, total_iters=2), CosineAnnealingLR(optimizer, 4)], milestones=[2]
)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
losses = []
for iteration in range(6):
    inputs, labels = torch.randn(5, 6), torch.randint(3, (5,))
    if iteration == 2:
        inputs[0, 0] = float("inf")
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = criterion(model(inputs), labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    losses += [loss.item(), scaler.get_scale(), scheduler.get_last_lr()[0]]
print_results(losses, model)
