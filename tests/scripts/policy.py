"""REINFORCE, and an actor with a critic: every move of an episode asks the model, and one backward ends the episode."""

import argparse

import torch
import torch.nn.functional as F
from results import print_results
from torch import nn
from torch.distributions import Categorical


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine = nn.Linear(4, 16)
        self.dropout = nn.Dropout(p=0.3)
        self.action = nn.Linear(16, 2)
        self.value = nn.Linear(16, 1)

    def forward(self, state):
        hidden = F.relu(self.dropout(self.affine(state)))
        return F.softmax(self.action(hidden), dim=-1), self.value(hidden)


class Cart:
    """A world that ends after so many moves."""

    def __init__(self, moves):
        self.moves = moves

    def reset(self):
        self.at, self.state = 0, torch.zeros(4)
        return self.state

    def step(self, action):
        self.at += 1
        self.state = (self.state + (0.1 if action else -0.1) * torch.tensor([1.0, -1.0, 0.5, 2.0])).sin()
        return self.state, float(self.state[0] > 0), self.at == self.moves


parser = argparse.ArgumentParser()
parser.add_argument("--critic", action="store_true")
parser.add_argument("--moves", type=int, default=5)
parser.add_argument("--episodes", type=int, default=3)
args = parser.parse_args()

torch.manual_seed(543)
policy, world = Policy(), Cart(args.moves)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
losses = []
for _ in range(args.episodes):
    state, ended = world.reset(), False
    logs, values, rewards = [], [], []
    while not ended:
        chances, value = policy(state)
        chosen = Categorical(chances)
        action = chosen.sample()
        logs.append(chosen.log_prob(action))
        values.append(value)
        state, reward, ended = world.step(action.item())
        rewards.append(reward)
    returns, total = [], 0.0
    for reward in reversed(rewards):
        total = reward + 0.99 * total
        returns.insert(0, total)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    logs, values = torch.stack(logs), torch.cat(values)
    optimizer.zero_grad()
    if args.critic:
        loss = -(logs * (returns - values.detach())).sum() + F.smooth_l1_loss(values, returns)
    else:
        loss = -(logs * returns).sum()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print_results(losses, policy)
