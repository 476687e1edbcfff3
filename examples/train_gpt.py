"""Trains a small character-level GPT on Python's own documentation: an ordinary training script.

    python examples/train_gpt.py
    python examples/train_gpt.py --checkpoint --dtype bfloat16
    python examples/train_gpt.py --plant overflow

Nothing in it knows of modtrace. What runs inside it is shown by running it under the recorder:

    modtrace record --to demo.modtrace examples/train_gpt.py --checkpoint
    modtrace show demo.modtrace
"""

import argparse
from collections.abc import Sequence
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each: batch, heads, length, width of a head
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    """Two linear layers, four times as wide in between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.gelu(self.fc(x)))


class Overflow(nn.Module):
    """The mistake that `--plant overflow` puts in place of an activation: an exponential of large numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(200 * x)


class Block(nn.Module):
    """Attention, then an MLP, each on the normalised stream and added back to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """Token numbers in (batch, length), logits of the next token out (batch, length, vocabulary).

    `checkpointing`: "non-reentrant" or "reentrant" keeps no activations inside the blocks and runs each
    block again in backward; None keeps them.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        layers: int,
        width: int,
        heads: int,
        context: int,
        checkpointing: str | None = None,
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(_initialise)
        self.head.weight = self.token_embedding.weight  # tied: one matrix reads tokens and predicts them

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = self._run(block, x)
        return self.head(self.ln_f(x))

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.checkpointing is None or not torch.is_grad_enabled():
            return block(x)
        return checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.05)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class Text:
    """The documentation of Python's statements and types, as numbers: one for each different character."""

    def __init__(self) -> None:
        text = "\n".join(topics.values())
        self.characters = sorted(set(text))
        number = {character: n for n, character in enumerate(self.characters)}
        self.tokens = torch.tensor([number[character] for character in text])

    def batch(self, size: int, length: int) -> tuple[Tensor, Tensor]:
        """Returns passages from random places, and the same passages one character later."""
        starts = torch.randint(len(self.tokens) - length, (size, 1))
        passages = self.tokens[starts + torch.arange(length + 1)]
        return passages[:, :-1], passages[:, 1:]

    def decode(self, tokens: Tensor) -> str:
        return "".join(self.characters[token] for token in tokens.tolist())


def train(model: GPT, text: Text, args: argparse.Namespace) -> None:
    """Takes `args.steps` steps and prints the loss from time to time."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    for step in range(1, args.steps + 1):
        if args.plant and step == 3:
            model.blocks[-1].mlp.gelu = Overflow()
        tokens, targets = text.batch(args.batch, args.context)
        logits = model(tokens)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step == 1 or step % args.print_every == 0 or step == args.steps:
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def sample(model: GPT, text: Text, length: int, context: int) -> str:
    """Returns `length` characters that the model writes after a line break."""
    tokens = torch.tensor([[text.characters.index("\n")]])
    for _ in range(length):
        logits = model(tokens[:, -context:])[:, -1].float()
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    return text.decode(tokens[0, 1:])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=_positive, default=30)
    parser.add_argument("--batch", type=_positive, default=16, help="passages in a step")
    parser.add_argument("--context", type=_positive, default=128, help="characters in a passage")
    parser.add_argument("--layers", type=_positive, default=4)
    parser.add_argument("--width", type=_positive, default=128)
    parser.add_argument("--heads", type=_positive, default=4)
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate of AdamW")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--checkpoint",
        nargs="?",
        const="non-reentrant",
        choices=["non-reentrant", "reentrant"],
        help="recompute every block in backward instead of keeping its activations",
    )
    parser.add_argument(
        "--plant",
        choices=["overflow"],
        help="make a mistake in the third step, for tools that look for mistakes",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--print-every", type=_positive, default=5, metavar="STEPS")
    parser.add_argument(
        "--sample", type=int, default=0, metavar="CHARACTERS", help="write so many at the end"
    )
    args = parser.parse_args(argv)
    if args.width % args.heads:
        parser.error(f"--width {args.width} cannot be divided among --heads {args.heads}")
    return args


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    torch.manual_seed(args.seed)
    text = Text()
    model = GPT(
        len(text.characters),
        layers=args.layers,
        width=args.width,
        heads=args.heads,
        context=args.context,
        checkpointing=args.checkpoint,
    ).to(getattr(torch, args.dtype))
    train(model, text, args)
    if args.sample > 0:
        print(sample(model, text, args.sample, args.context))


if __name__ == "__main__":
    main()
