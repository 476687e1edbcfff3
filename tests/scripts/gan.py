"""A generator and a discriminator with an optimizer each, and samples from fixed noise in between."""

import torch
from results import print_results
from torch import nn, optim

NOISE = 4


def initialize(module):
    if isinstance(module, nn.ConvTranspose2d | nn.Conv2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 8, 2),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 1, 2, 2),
            nn.Tanh(),
        )

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 4, 2, 2), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(4, 1, 2), nn.Sigmoid()
        )

    def forward(self, pictures):
        return self.main(pictures).view(-1)


torch.manual_seed(5)
netG, netD = Generator(), Discriminator()
netG.apply(initialize)
netD.apply(initialize)
criterion = nn.BCELoss()
fixed_noise = torch.randn(2, NOISE, 1, 1)
optimizerD = optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
losses = []
for iteration in range(4):
    netD.zero_grad()
    real = torch.randn(3, 1, 4, 4).tanh()
    labels = torch.full((3,), 1.0)
    loss_of_real = criterion(netD(real), labels)
    loss_of_real.backward()
    fake = netG(torch.randn(3, NOISE, 1, 1))
    loss_of_fake = criterion(netD(fake.detach()), labels.fill_(0.0))
    loss_of_fake.backward()
    optimizerD.step()

    netG.zero_grad()
    loss_of_generator = criterion(netD(fake), labels.fill_(1.0))
    loss_of_generator.backward()
    optimizerG.step()

    losses += [loss_of_real.item() + loss_of_fake.item(), loss_of_generator.item()]
    if iteration % 2 == 1:
        with torch.no_grad():
            losses.append(netG(fixed_noise).mean().item())
print_results(losses, netG, netD)
