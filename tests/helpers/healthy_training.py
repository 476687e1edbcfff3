"""Small trainings in which nothing is wrong, of many kinds of models: what checks say of them is said of innocents.

Text is Python's own documentation, images are noisy shapes. Weights are random.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import modtrace
from helpers.healthy_architectures import HEALTHY
from helpers.more_architectures import TWENTY

#: A training; it is given the number of steps, and yields the recording while it lives.
Train = Callable[[int], None]

RUNS: dict[str, Train] = {}


def record_run(name: str, steps: int, seed: int = 0, **options: Any) -> modtrace.Recording:
    """Returns the recording of a run, of which the seed decides the weights and the data."""
    torch.manual_seed(seed)
    with modtrace.record(**options) as rec:
        RUNS[name](steps)
    return rec


def run(name: str) -> Callable[[Train], Train]:
    def add(train: Train) -> Train:
        RUNS[name] = train
        return train

    return add


# Data.


def texts(length: int = 32, batch: int = 8) -> Iterator[torch.Tensor]:
    """Yields batches of texts as bytes below 128."""
    from pydoc_data.topics import topics

    codes = torch.tensor([code for text in topics.values() for code in text.encode("ascii", "ignore")])
    while True:
        starts = torch.randint(0, len(codes) - length, (batch,))
        yield torch.stack([codes[start : start + length] for start in starts.tolist()])


def pictures(batch: int = 32, size: int = 8) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields batches of noisy images of ten shapes, of numbers about -1 and 1, with their labels."""
    shapes = torch.randn(10, 1, 5, 5).sign()
    while True:
        labels = torch.randint(0, 10, (batch,))
        images = F.interpolate(shapes[labels], size=size, mode="bilinear")
        yield images + 0.3 * torch.randn_like(images), labels


# Loops.


def adam(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def momentum(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)


def fit(
    model: nn.Module,
    losses: Callable[[], torch.Tensor],
    steps: int,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    clip: float | None = None,
    warmup: int = 0,
    autocast: torch.dtype | None = None,
) -> None:
    """Trains for some steps on the losses that a function computes."""
    model.train()
    optimizer = optimizer or adam(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / (warmup + 1)))
    for _ in range(steps):
        with torch.autocast("cpu", autocast) if autocast else nullcontext():
            loss = losses()
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()


def next_byte(model: nn.Module, batches: Iterator[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Returns a function that computes the loss of the next byte in a batch."""

    def loss() -> torch.Tensor:
        batch = next(batches)
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    return loss


def classify(model: nn.Module, batches: Iterator[Any]) -> Callable[[], torch.Tensor]:
    def loss() -> torch.Tensor:
        images, labels = next(batches)
        return F.cross_entropy(model(images), labels)

    return loss


# Architectures of transformers: small ones on one batch, which they learn by heart, and deeper ones on text.


def _add_architecture(name: str, make: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> None:
    @run(f"{name}, one batch")
    def train(steps: int) -> None:
        model, inputs = make()
        fit(model, lambda: model(**inputs).loss, steps)


for _name, _make in TWENTY.items():
    if _name != "DETR":  # its loss needs scipy
        _add_architecture(_name, _make)


def _language(name: str, **config: Any) -> nn.Module:
    import transformers

    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(**config))
    return model


def _add_reader(name: str, config: dict[str, Any]) -> None:
    @run(f"{name}, text")
    def train(steps: int) -> None:
        model, batches = _language(name, **config), texts(length=16)

        def loss() -> torch.Tensor:
            batch = next(batches) % 30 + 2
            found: torch.Tensor = model(input_ids=batch, labels=batch).loss
            return found

        fit(model, loss, steps)


for _name, _config in HEALTHY.items():
    _add_reader(_name, _config)


_DEEP = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}


def _of_itself(model: nn.Module, batches: Iterator[torch.Tensor]) -> Callable[[], torch.Tensor]:
    def loss() -> torch.Tensor:
        batch = next(batches)
        found: torch.Tensor = model(input_ids=batch, labels=batch).loss
        return found

    return loss


@run("GPT-2, 6 layers, text, warm-up, clipping")
def gpt2_text(steps: int) -> None:
    model = _language("GPT2LMHeadModel", vocab_size=128, n_embd=64, n_layer=6, n_head=4, n_positions=32)
    fit(model, _of_itself(model, texts()), steps, adam(model, 3e-3), clip=1.0, warmup=10)


@run("Llama, 6 layers, text, bfloat16")
def llama_text(steps: int) -> None:
    model = _language("LlamaForCausalLM", **_DEEP, intermediate_size=128, num_key_value_heads=2)
    fit(model, _of_itself(model, texts()), steps, autocast=torch.bfloat16)


@run("Mixtral, 4 layers, text")
def mixtral_text(steps: int) -> None:
    config = {**_DEEP, "num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = _language("MixtralForCausalLM", **config, intermediate_size=64, num_key_value_heads=2)
    fit(model, _of_itself(model, texts()), steps)


@run("OPT, 6 layers, text, SGD")
def opt_text(steps: int) -> None:
    model = _language("OPTForCausalLM", **_DEEP, ffn_dim=128, word_embed_proj_dim=64)
    fit(model, _of_itself(model, texts()), steps, momentum(model, 0.01))


@run("BERT, 6 layers, masked text")
def bert_text(steps: int) -> None:
    model = _language("BertForMaskedLM", **_DEEP, intermediate_size=128)
    batches = texts()

    def loss() -> torch.Tensor:
        batch = next(batches)
        hidden = torch.rand(batch.shape) < 0.15
        labels = batch.masked_fill(~hidden, -100)
        found: torch.Tensor = model(input_ids=batch.masked_fill(hidden, 1), labels=labels).loss
        return found

    fit(model, loss, steps, warmup=5)


@run("T5, 4 layers, text")
def t5_text(steps: int) -> None:
    config = {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 4, "num_heads": 4}
    model = _language("T5ForConditionalGeneration", **config, decoder_start_token_id=0)
    fit(model, _of_itself(model, texts()), steps)


@run("ViT, 6 layers, images")
def vit_images(steps: int) -> None:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=16,
        patch_size=4,
        num_channels=1,
        num_labels=10,
    )
    model = transformers.ViTForImageClassification(config)
    batches = pictures(size=16)
    fit(model, classify(lambda images: model(pixel_values=images).logits, batches), steps)


@run("DistilBERT, a head on a frozen model")
def frozen_base(steps: int) -> None:
    import transformers

    config = transformers.DistilBertConfig(vocab_size=128, dim=32, n_layers=3, n_heads=2, hidden_dim=64)
    model = transformers.DistilBertForSequenceClassification(config)
    for parameter in model.distilbert.parameters():
        parameter.requires_grad_(False)
    batches = texts()

    def loss() -> torch.Tensor:
        batch = next(batches)
        found: torch.Tensor = model(input_ids=batch, labels=(batch == 32).sum(1) % 2).loss
        return found

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fit(model, loss, steps, torch.optim.AdamW(trained, lr=1e-3))


# Images.


class Residual(nn.Module):
    def __init__(self, width: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.skip = (
            nn.Conv2d(width, out, 1, stride, bias=False) if stride > 1 or width != out else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.skip(x))


def resnet(classes: int = 10) -> nn.Sequential:
    """A residual network of 9 blocks, with its stages as members of one Sequential."""
    blocks = [Residual(8, 8) for _ in range(3)]
    blocks += [Residual(8, 16, 2), Residual(16, 16), Residual(16, 16)]
    blocks += [Residual(16, 32, 2), Residual(32, 32), Residual(32, 32)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes)]
    return nn.Sequential(nn.Conv2d(1, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(), *blocks, *head)


@run("ResNet, images, SGD")
def resnet_images(steps: int) -> None:
    model = resnet()
    fit(model, classify(model, pictures(size=16)), steps, momentum(model))


@run("ResNet with evaluations")
def resnet_evaluated(steps: int) -> None:
    model, batches = resnet(), pictures(size=16)
    optimizer = momentum(model)
    for _ in range(3):
        fit(model, classify(model, batches), steps // 3, optimizer)
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                classify(model, batches)()


@run("ResNet, fine-tuned with frozen batch norm")
def resnet_frozen_norms(steps: int) -> None:
    model, batches = resnet(), pictures(size=16)
    optimizer = momentum(model, 0.01)
    for _ in range(steps):
        model.train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        optimizer.zero_grad()
        classify(model, batches)().backward()
        optimizer.step()


@run("VGG without normalization, images")
def vgg_images(steps: int) -> None:
    layers: list[nn.Module] = []
    for width, out in ((1, 16), (16, 16), (16, 32), (32, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(width, out, 3, 1, 1), nn.ReLU()]
        if width == out:
            layers.append(nn.MaxPool2d(2))
    model = nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10)
    )
    fit(model, classify(model, pictures(size=16)), steps)


@run("MLP, images, SGD")
def mlp_images(steps: int) -> None:
    hidden = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, 10))
    fit(model, classify(model, pictures()), steps, momentum(model))


@run("MLP with tanh, 6 layers, SGD")
def tanh_images(steps: int) -> None:
    hidden = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, 10))
    fit(model, classify(model, pictures()), steps, momentum(model))


@run("MLP, images, LBFGS")
def lbfgs_images(steps: int) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    images, labels = next(pictures(256))
    for _ in range(steps):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            return loss

        optimizer.step(closure)


@run("MLP, accumulation over 4 batches")
def accumulating(steps: int) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10))
    optimizer, loss = adam(model), classify(model, pictures(16))
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(4):
            (loss() / 4).backward()
        optimizer.step()


@run("CNN, float16 with a GradScaler")
def scaled(steps: int) -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    optimizer, loss = momentum(model), classify(model, pictures())
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(steps):
        with torch.autocast("cpu", torch.float16):
            found = loss()
        optimizer.zero_grad()
        scaler.scale(found).backward()
        scaler.step(optimizer)
        scaler.update()


# Sequences.


class LSTMModel(nn.Module):
    def __init__(self, cell: type[nn.Module] = nn.LSTM, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(128, 32), cell(32, 64, layers, batch_first=True, dropout=0.1)
        self.head = nn.Linear(64, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(x))[0])


@run("LSTM, text, clipping")
def lstm_text(steps: int) -> None:
    model = LSTMModel()
    fit(model, next_byte(model, texts()), steps, adam(model, 5e-3), clip=1.0)


@run("GRU, text, SGD")
def gru_text(steps: int) -> None:
    model = LSTMModel(nn.GRU)
    fit(model, next_byte(model, texts()), steps, momentum(model, 0.5), clip=1.0)


@run("nn.Transformer, text to text")
def translation(steps: int) -> None:
    embed, head = nn.Embedding(128, 32), nn.Linear(32, 128)
    core = nn.Transformer(32, 4, 3, 3, 64, dropout=0.1, batch_first=True)
    model, batches = nn.ModuleDict({"embed": embed, "core": core, "head": head}), texts()
    mask = nn.Transformer.generate_square_subsequent_mask(31)

    def loss() -> torch.Tensor:
        batch = next(batches)
        out = head(core(embed(batch), embed(batch[:, :-1]), tgt_mask=mask))
        return F.cross_entropy(out.flatten(0, 1), batch[:, 1:].flatten())

    fit(model, loss, steps)


class Experts(nn.Module):
    """A mixture of experts in a list, of which each token takes two."""

    def __init__(self, width: int, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                out = out.index_add(0, token, expert(flat[token]) * weights[token, place, None])
        return x + out.view_as(x)


@run("mixture of experts, text")
def experts_text(steps: int) -> None:
    model = nn.Sequential(
        nn.Embedding(128, 32), Experts(32), nn.LayerNorm(32), Experts(32), nn.Linear(32, 128)
    )
    fit(model, next_byte(model, texts()), steps)


# Generative models.


def _generator() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, 128),
        nn.Unflatten(1, (32, 2, 2)),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, 2, 1),
        nn.Tanh(),
    )


def _critic() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(128, 1),
    )


@run("GAN, images")
def gan(steps: int) -> None:
    generator, critic, batches = _generator(), _critic(), pictures()
    of_generator = torch.optim.Adam(generator.parameters(), 2e-4, betas=(0.5, 0.999))
    of_critic = torch.optim.Adam(critic.parameters(), 2e-4, betas=(0.5, 0.999))
    for _ in range(steps):
        with torch.no_grad():
            fake = generator(torch.randn(32, 16))
        of_critic.zero_grad()
        loss = F.softplus(-critic(next(batches)[0])).mean() + F.softplus(critic(fake)).mean()
        loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        F.softplus(-critic(generator(torch.randn(32, 16)))).mean().backward()
        of_generator.step()


@run("Wasserstein GAN, 5 steps of the critic")
def wasserstein(steps: int) -> None:
    generator, critic, batches = _generator(), _critic(), pictures()
    of_generator = torch.optim.RMSprop(generator.parameters(), 5e-5)
    of_critic = torch.optim.RMSprop(critic.parameters(), 5e-5)
    for step in range(steps):
        if step % 6 < 5:
            of_critic.zero_grad()
            fake = generator(torch.randn(32, 16)).detach()
            (critic(fake).mean() - critic(next(batches)[0]).mean()).backward()
            of_critic.step()
            with torch.no_grad():
                for parameter in critic.parameters():
                    parameter.clamp_(-0.01, 0.01)
        else:
            of_generator.zero_grad()
            (-critic(generator(torch.randn(32, 16))).mean()).backward()
            of_generator.step()


@run("variational autoencoder, images")
def autoencoder(steps: int) -> None:
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))
    model, batches = nn.ModuleList([encoder, decoder]), pictures()

    def loss() -> torch.Tensor:
        images = next(batches)[0]
        mean, log_variance = encoder(images).chunk(2, dim=1)
        drawn = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        missed = F.mse_loss(decoder(drawn), images.flatten(1), reduction="sum")
        return (missed - (1 + log_variance - mean**2 - log_variance.exp()).sum() / 2) / len(images)

    fit(model, loss, steps)


class Denoiser(nn.Module):
    """A small U-Net with the time of diffusion as a further input, and a last layer that begins with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 32))
        self.inner = nn.Conv2d(1, 16, 3, 1, 1)
        self.down = nn.Conv2d(16, 32, 3, 2, 1)
        self.middle = nn.Sequential(nn.GroupNorm(4, 32), nn.SiLU(), nn.Conv2d(32, 32, 3, 1, 1))
        self.up = nn.ConvTranspose2d(32, 16, 4, 2, 1)
        self.out = nn.Conv2d(32, 1, 3, 1, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        embedded = self.time(torch.stack([time.sin(), time.cos()], 1))[:, :, None, None]
        first = self.inner(x)
        below = self.down(F.silu(first)) + embedded
        return self.out(torch.cat([first, self.up(below + self.middle(below))], 1))


@run("diffusion, images")
def diffusion(steps: int) -> None:
    model, batches = Denoiser(), pictures()

    def loss() -> torch.Tensor:
        images, time = next(batches)[0], torch.rand(32)
        noise, angle = torch.randn_like(images), (time * math.pi / 2)[:, None, None, None]
        return F.mse_loss(model(angle.cos() * images + angle.sin() * noise, time), noise)

    fit(model, loss, steps)


@run("diffusion, images, bfloat16")
def diffusion_bfloat16(steps: int) -> None:
    model, batches = Denoiser(), pictures()

    def loss() -> torch.Tensor:
        images, time = next(batches)[0], torch.rand(32)
        return F.mse_loss(model(images + torch.randn_like(images) * time[:, None, None, None], time), images)

    fit(model, loss, steps, autocast=torch.bfloat16)


# Reinforcement learning, on a pole that falls.


class Pole:
    """A pole on a cart, as in the usual exercise."""

    def reset(self) -> torch.Tensor:
        self.state = (torch.rand(4) - 0.5) / 10
        return self.state

    def act(self, action: int) -> tuple[torch.Tensor, bool]:
        x, speed, angle, turn = self.state.tolist()
        force = 10 if action else -10
        push = (force + 0.05 * turn**2 * math.sin(angle)) / 1.1
        bend = (9.8 * math.sin(angle) - math.cos(angle) * push) / (
            0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1)
        )
        pull = push - 0.05 * bend * math.cos(angle) / 1.1
        self.state = torch.tensor([x + speed / 50, speed + pull / 50, angle + turn / 50, turn + bend / 50])
        return self.state, abs(self.state[2]) > 0.21 or abs(self.state[0]) > 2.4


def episode(act: Callable[[torch.Tensor], int], most: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the states and the actions of one episode."""
    pole = Pole()
    states, actions, done = [pole.reset()], [], False
    while not done and len(actions) < most:
        actions.append(act(states[-1]))
        state, done = pole.act(actions[-1])
        states.append(state)
    return torch.stack(states[:-1]), torch.tensor(actions)


@run("policy gradient, a pole on a cart")
def reinforce(steps: int) -> None:
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = adam(policy, 1e-2)
    for _ in range(steps):
        with torch.no_grad():
            states, actions = episode(lambda state: int(policy(state).softmax(-1).multinomial(1)))
        returns = torch.arange(len(actions), 0, -1.0)
        chosen = policy(states).log_softmax(-1).gather(1, actions[:, None])[:, 0]
        optimizer.zero_grad()
        (-(returns - returns.mean()) * chosen).mean().backward()
        optimizer.step()


@run("actor and critic, a pole on a cart")
def actor_critic(steps: int) -> None:
    body = nn.Sequential(nn.Linear(4, 32), nn.ReLU())
    actor, critic = nn.Linear(32, 2), nn.Linear(32, 1)
    model = nn.ModuleList([body, actor, critic])
    optimizer = adam(model, 3e-3)
    for _ in range(steps):
        with torch.no_grad():
            states, actions = episode(lambda state: int(actor(body(state)).softmax(-1).multinomial(1)))
        returns = torch.arange(len(actions), 0, -1.0)
        hidden = body(states)
        values = critic(hidden)[:, 0]
        chosen = actor(hidden).log_softmax(-1).gather(1, actions[:, None])[:, 0]
        loss = (-(returns - values).detach() * chosen).mean() + 0.5 * F.mse_loss(values, returns)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


@run("Q-learning with a target network")
def q_learning(steps: int) -> None:
    import copy

    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    target, optimizer = copy.deepcopy(model), adam(model)
    for step in range(steps):
        states = torch.randn(32, 4) / 10
        actions = torch.randint(0, 2, (32, 1))
        with torch.no_grad():
            best = target(states + 0.02 * torch.randn(32, 4)).max(1).values
        loss = F.smooth_l1_loss(model(states).gather(1, actions)[:, 0], 1 + 0.9 * best)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            target.load_state_dict(model.state_dict())


# Representations, and parts of models.


def _encoder() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 32),
    )


@run("contrastive pairs, images")
def contrastive(steps: int) -> None:
    model, batches = _encoder(), pictures()

    def loss() -> torch.Tensor:
        images = next(batches)[0]
        a, b = (F.normalize(model(images + 0.3 * torch.randn_like(images)), dim=1) for _ in range(2))
        return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))

    fit(model, loss, steps)


@run("a student and its moving teacher, images")
def bootstrap(steps: int) -> None:
    import copy

    student, predictor, batches = _encoder(), nn.Linear(32, 32), pictures()
    teacher = copy.deepcopy(student)
    model = nn.ModuleList([student, predictor])
    optimizer = adam(model)
    for _ in range(steps):
        images = next(batches)[0]
        with torch.no_grad():
            wanted = F.normalize(teacher(images + 0.2 * torch.randn_like(images)), dim=1)
        given = F.normalize(predictor(student(images + 0.2 * torch.randn_like(images))), dim=1)
        optimizer.zero_grad()
        (2 - 2 * (given * wanted).sum(1)).mean().backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 0.05)


class LowRank(nn.Module):
    """A frozen linear layer with an addition of low rank, of which the second factor begins with zeros."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = (
            nn.Linear(base.in_features, 4, bias=False),
            nn.Linear(4, base.out_features, bias=False),
        )
        nn.init.zeros_(self.b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


@run("low-rank adapters, images")
def adapters(steps: int) -> None:
    model = nn.Sequential(
        nn.Flatten(),
        LowRank(nn.Linear(64, 64)),
        nn.ReLU(),
        LowRank(nn.Linear(64, 64)),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fit(model, classify(model, pictures()), steps, torch.optim.AdamW(trained, lr=1e-3))


@run("two heads that take turns")
def two_tasks(steps: int) -> None:
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU())
    heads = nn.ModuleList([nn.Linear(64, 10), nn.Linear(64, 2)])
    model, batches = nn.ModuleList([body, heads]), pictures()
    optimizer = adam(model)
    for step in range(steps):
        images, labels = next(batches)
        head = heads[step % 2]
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(head(body(images)), labels % 2 if step % 2 else labels).backward()
        optimizer.step()
