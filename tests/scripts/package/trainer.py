"""A trainer that knows no model: it calls what was registered after each batch."""

import time
from collections import defaultdict

from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, RandomSampler


class Trainer:
    def __init__(self, model, dataset, *, iterations, batch_size):
        self.model, self.dataset = model, dataset
        self.iterations, self.batch_size = iterations, batch_size
        self.optimizer = model.configure_optimizer()
        self.callbacks = defaultdict(list)
        self.iteration = 0
        self.last = time.time()

    def add_callback(self, event, callback):
        self.callbacks[event].append(callback)

    def trigger(self, event):
        for callback in self.callbacks[event]:
            callback(self)

    def run(self):
        sampler = RandomSampler(self.dataset, replacement=True, num_samples=1000)
        loader = DataLoader(self.dataset, sampler=sampler, batch_size=self.batch_size)
        self.model.train()
        batches = iter(loader)
        while self.iteration < self.iterations:
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(loader)
                batch = next(batches)
            _, self.loss = self.model(*batch)
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.trigger("batch ended")
            self.iteration += 1
            self.duration, self.last = time.time() - self.last, time.time()
