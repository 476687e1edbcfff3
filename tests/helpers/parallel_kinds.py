"""Kinds of parallel training of a GPT and a Llama, and the same training by one process; each may be recorded."""

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import modtrace
from helpers.rank_processes import run_ranks
from modtrace import Capture

STEPS, BATCH, LENGTH, WIDTH, HEADS, WORDS, LAYERS = 3, 8, 8, 16, 4, 32, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU()
        self.inner = nn.Dropout(dropout)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.inner(self.act(self.up(x))))


class Experts(nn.Module):
    """A mixture of experts; with a process group, each rank has some of them, named as among all."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleDict({str(number): MLP() for number in range(experts)})
        self.total, self.group = experts, None

    def keep_own(self, rank: int, world: int) -> None:
        """Deletes the experts of other ranks."""
        each = self.total // world
        for number in range(self.total):
            if number // each != rank:
                del self.experts[str(number)]
        self.group = dist.group.WORLD

    def forward(self, x):
        tokens = x.flatten(0, -2)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=self.total)
        routed = tokens[order]
        returned = self._run(routed, counts)
        return (torch.empty_like(tokens).index_copy(0, order, returned) * weight[:, None]).view_as(x)

    def _run(self, routed, counts):
        if self.group is None:
            parts = routed.split(counts.tolist())
            return torch.cat(
                [expert(part) for expert, part in zip(self.experts.values(), parts, strict=True)]
            )
        world = dist.get_world_size()
        given = torch.empty_like(counts)
        dist.all_to_all_single(given, counts)
        by_rank = given.view(world, -1)  # tokens for each of the experts here
        sent, came = counts.view(world, -1).sum(1).tolist(), by_rank.sum(1).tolist()
        here = all_to_all_single_autograd(routed, came, sent, self.group)
        pieces = here.split(by_rank.flatten().tolist())
        done = []
        for number, expert in enumerate(self.experts.values()):
            mine = pieces[number :: len(self.experts)]
            done.append(expert(torch.cat(mine)).split([len(piece) for piece in mine]))
        back = torch.cat([done[number][rank] for rank in range(world) for number in range(len(done))])
        return all_to_all_single_autograd(back, sent, came, self.group)


class RMSNorm(nn.Module):
    """One in ops of Python, as most models have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = 1e-6

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Block(nn.Module):
    def __init__(
        self, ffn: Callable[[], nn.Module], dropout: float, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.norm1 = norm(WIDTH)
        self.attention = Attention()
        self.norm2 = norm(WIDTH)
        self.ffn = ffn()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.ffn(self.norm2(x)))


class GPT(nn.Module):
    """Any of its parts may be missing, as in the stage of a pipeline."""

    def __init__(
        self,
        ffn: Callable[[], nn.Module] = MLP,
        dropout: float = 0.0,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        layers: int = LAYERS,
    ) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleDict({str(number): Block(ffn, dropout, norm) for number in range(layers)})
        self.norm: nn.Module | None = nn.LayerNorm(WIDTH)
        self.head: nn.Module | None = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        x = x if self.norm is None else self.norm(x)
        return x if self.head is None else self.head(x)

    def keep_stage(self, stage: int, stages: int) -> "GPT":
        """Deletes what other stages have."""
        layers = len(self.blocks)
        for number in range(layers):
            if number // (layers // stages) != stage:
                del self.blocks[str(number)]
        if stage > 0:
            self.embed = None
        if stage < stages - 1:
            self.norm = self.head = None
        return self


def chain() -> nn.Sequential:
    """A GPT whose layers have numbers for names, in each stage from 0."""
    model = GPT()
    return nn.Sequential(model.embed, *model.blocks.values(), model.norm, model.head)


def llama(layers: int = 2) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class LlamaStage(nn.Module):
    """A stage of a Llama, which gets tokens or what the stage before it returns, named as in the whole model."""

    def __init__(self, whole: Any, stage: int, stages: int) -> None:
        super().__init__()
        self.model, self.lm_head = whole.model, whole.lm_head if stage == stages - 1 else None
        each = len(whole.model.layers) // stages
        self.model.layers = whole.model.layers[stage * each : (stage + 1) * each]
        if stage > 0:
            self.model.embed_tokens = None
        if stage < stages - 1:
            self.model.norm = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        name = "inputs_embeds" if self.model.embed_tokens is None else "input_ids"
        returned = self.model(**{name: x}).last_hidden_state
        return returned if self.lm_head is None else self.lm_head(returned)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": GPT,
    "dropout": lambda: GPT(lambda: MLP(0.5), dropout=0.5),
    "rms": lambda: GPT(norm=RMSNorm),
    "moe": lambda: GPT(Experts),
    "chain": chain,
    "llama": llama,
    "deep gpt": lambda: GPT(layers=2 * LAYERS),
    "deep llama": lambda: llama(2 * LAYERS),
}


class Run(NamedTuple):
    """One training."""

    kind: str = "single"
    model: str = "gpt"
    fault: str = ""
    """eps: of a norm in the last layer; seeds: each rank has its own; ops: none. With eps and ops, ops are recorded."""

    @property
    def name(self) -> str:
        return " ".join(filter(None, self))


def logits_of(returned: Any) -> torch.Tensor:
    return returned if isinstance(returned, torch.Tensor) else returned.logits


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Trained(NamedTuple):
    """What a rank trains."""

    model: nn.Module
    parts: int = 1  # into how many parts the batch is divided
    part: int = 0
    optimizer: Callable[[Any], torch.optim.Optimizer] = partial(torch.optim.AdamW, lr=1e-3)
    step: Callable[[nn.Module, torch.Tensor, torch.Tensor], Any] | None = None


def forward_backward(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = loss_of(logits_of(model(tokens)), targets)
    loss.backward()
    return loss.detach()


def _ddp(model: nn.Module, rank: int, world: int, *, hook: Any = None, **options: Any) -> Trained:
    trained = DistributedDataParallel(model, **options)
    if hook is not None:
        hook(trained)
    return Trained(trained, world, rank)


def _no_sync(model: nn.Module, rank: int, world: int) -> Trained:
    def step(trained: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        half = len(tokens) // 2
        with trained.no_sync():
            (loss_of(logits_of(trained(tokens[:half])), targets[:half]) / 2).backward()
        loss = loss_of(logits_of(trained(tokens[half:])), targets[half:]) / 2
        loss.backward()
        return loss.detach()

    return _ddp(model, rank, world)._replace(step=step)


def _zero(model: nn.Module, rank: int, world: int) -> Trained:
    sharded = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW, lr=1e-3)
    return _ddp(model, rank, world)._replace(optimizer=sharded)


def _fp16(trained: Any) -> None:
    trained.register_comm_hook(None, default_hooks.fp16_compress_hook)


def _powersgd(trained: Any) -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    trained.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [*(model.blocks.values() if isinstance(model, GPT) else model.model.layers)]


def _shard(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    for module in (*layers_of(model), model):
        fully_shard(module, mesh=mesh, **options)
    return model


def _fsdp2(model: nn.Module, rank: int, world: int, **options: Any) -> Trained:
    return Trained(
        _shard(model, init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)), **options), world, rank
    )


def _hsdp(model: nn.Module, rank: int, world: int) -> Trained:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "dp"))
    return Trained(_shard(model, mesh), world, rank)


def _split(model: nn.Module, mesh: Any) -> None:
    is_gpt = isinstance(model, GPT)
    ins = (
        ("attention.q", "attention.k", "attention.v", "ffn.up")
        if is_gpt
        else ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    )
    outs = ("attention.proj", "ffn.down") if is_gpt else ("self_attn.o_proj", "mlp.down_proj")
    for layer in layers_of(model):
        plan = {name: ColwiseParallel() for name in ins} | {name: RowwiseParallel() for name in outs}
        parallelize_module(layer, mesh, plan)


def _tp(model: nn.Module, rank: int, world: int) -> Trained:
    _split(model, init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)))
    return Trained(model)


def _sp(model: GPT, rank: int, world: int) -> Trained:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    })  # fmt: skip
    for layer in layers_of(model):
        parallelize_module(layer, mesh, {
            "norm1": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
            "attention.proj": RowwiseParallel(output_layouts=Shard(1)),
            "norm2": SequenceParallel(),
            "ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "ffn.up": ColwiseParallel(),
            "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
        })  # fmt: skip
    return Trained(model)


def _fsdp2_tp(model: nn.Module, rank: int, world: int) -> Trained:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    _split(model, mesh["tp"])
    return Trained(_shard(model, mesh["dp"]), 2, rank // (world // 2))


def _moe(model: GPT, rank: int, world: int) -> Trained:
    for block in layers_of(model):
        block.ffn.keep_own(rank, world)
    own = [name for name, _ in model.named_parameters() if ".experts." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    trained = DistributedDataParallel(model)

    def step(trained: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = forward_backward(trained, tokens, targets)
        for name, parameter in model.named_parameters():
            if name in own and parameter.grad is not None:
                parameter.grad /= world
        return loss

    return Trained(trained, world, rank, step=step)


def _pipeline(schedule: Any, of_rank: int = 1) -> Callable[[nn.Module, int, int], Trained]:
    def build(model: nn.Module, rank: int, world: int) -> Trained:
        stages = world * of_rank
        mine = [rank + world * number for number in range(of_rank)]
        if schedule is ScheduleZBVZeroBubble:  # its stages go down the ranks, and up again
            mine = [rank, stages - 1 - rank]
        parts = [_keep_stage(model, stage, stages) for stage in mine]
        built = [
            PipelineStage(part, stage, stages, torch.device("cpu"))
            for part, stage in zip(parts, mine, strict=True)
        ]
        running = schedule(built if of_rank > 1 else built[0], 4, loss_fn=loss_of)

        def step(_: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
            losses: list[torch.Tensor] = []
            given = (tokens,) if rank == 0 else ()
            is_last = stages - 1 in mine
            running.step(*given, **({"target": targets, "losses": losses} if is_last else {}))
            return torch.stack(losses).mean().detach() if losses else None

        return Trained(nn.ModuleList(parts) if of_rank > 1 else parts[0], step=step)

    return build


def _pipelines(model: GPT, rank: int, world: int) -> Trained:
    """Several pipelines of two stages, each with a part of the batch and shards of the stages."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "pp"))
    stage = rank % 2
    part = _shard(_keep_stage(model, stage, 2), mesh["dp"])
    built = PipelineStage(part, stage, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    running = Schedule1F1B(built, 2, loss_fn=loss_of)

    def step(_: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        losses: list[torch.Tensor] = []
        running.step(
            *((tokens,) if stage == 0 else ()), **({"target": targets, "losses": losses} if stage else {})
        )
        return torch.stack(losses).mean().detach() if losses else None

    return Trained(part, world // 2, rank // 2, step=step)


def _keep_stage(model: nn.Module, stage: int, stages: int) -> nn.Module:
    if isinstance(model, GPT):
        return copy.deepcopy(model).keep_stage(stage, stages)
    if not isinstance(model, nn.Sequential):
        return LlamaStage(copy.deepcopy(model), stage, stages)
    layers = [*model]
    ends = [0, *(1 + (number + 1) * LAYERS // stages for number in range(stages - 1)), len(layers)]
    first, last = [*pairwise(ends)][stage]
    return nn.Sequential(*layers[first:last])


KINDS: dict[str, Callable[[Any, int, int], Trained]] = {
    "ddp": _ddp,
    "static graph": lambda *args: _ddp(*args, static_graph=True),
    "no_sync": _no_sync,
    "join": _ddp,
    "fp16 hook": lambda *args: _ddp(*args, hook=_fp16),
    "powersgd": lambda *args: _ddp(*args, hook=_powersgd),
    "zero": _zero,
    "fsdp2": _fsdp2,
    "fsdp2 bf16": lambda *args: _fsdp2(
        *args, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ),
    "hsdp": _hsdp,
    "tp": _tp,
    "tp + sp": _sp,
    "fsdp2 x tp": _fsdp2_tp,
    "moe": _moe,
    "1f1b": _pipeline(Schedule1F1B),
    "gpipe": _pipeline(ScheduleGPipe),
    "fsdp2 x 1f1b": _pipelines,
    "interleaved": _pipeline(ScheduleInterleaved1F1B, 2),
    "zero bubble": _pipeline(ScheduleZBVZeroBubble, 2),
}


def train(run: Run, to: str | None, rank: int = 0, world: int = 1) -> list[bytes]:
    """Trains, and records where a path is given; gives the bits of the losses and of the parameters on this rank."""
    torch.manual_seed(0)
    model = MODELS[run.model]()
    if run.fault == "eps":
        _set_eps(model, 1e-2)
    trained = Trained(model) if run.kind == "single" else KINDS[run.kind](model, rank, world)
    parameters = [*trained.model.parameters()]
    optimizer = trained.optimizer(parameters)
    numbers = torch.Generator().manual_seed(1)
    tokens = torch.randint(WORDS, (STEPS + 1, BATCH, LENGTH + 1), generator=numbers)
    mine = slice(trained.part * BATCH // trained.parts, (trained.part + 1) * BATCH // trained.parts)
    torch.manual_seed(rank if run.fault == "seeds" else 0)
    losses: list[torch.Tensor | None] = []
    joined = Join([trained.model]) if run.kind == "join" else nullcontext()
    with joined, _recording(run, trained.model, to):
        for step in range(STEPS + (run.kind == "join" and rank == 0)):
            given, targets = tokens[step][mine, :-1].clone(), tokens[step][mine, 1:].clone()
            optimizer.zero_grad()
            losses.append((trained.step or forward_backward)(trained.model, given, targets))
            optimizer.step()
    ended = [part.to_local() if isinstance(part, DTensor) else part for part in parameters]
    tensors = [part.detach().reshape(-1) for part in (*losses, *ended) if part is not None and part.numel()]
    return [part.view(torch.uint8).numpy().tobytes() for part in tensors]


def _set_eps(model: nn.Module, eps: float) -> None:
    """Changes the last norm inside of a layer."""
    norms = [module for module in model.modules() if "Norm" in type(module).__name__]
    setattr(norms[-2], "eps" if hasattr(norms[-2], "eps") else "variance_epsilon", eps)


@contextmanager
def _recording(run: Run, model: nn.Module, to: str | None) -> Iterator[None]:
    if to is None:
        yield
        return
    has_ops = run.fault in ("eps", "ops")
    captures = [
        Capture(roles=("parameter", "parameter_grad", "optimizer_state"), hash=True),
        Capture(roles=("input", "output", "grad_output", *(["op_output"] if has_ops else []))),
    ]
    given = [*model] if isinstance(model, nn.ModuleList) else model
    with modtrace.record(given, to=to, values=captures, ops=has_ops, strict=True):
        yield


class Recorded(NamedTuple):
    """A run that was recorded by each of its ranks."""

    path: str
    are_bits_equal: bool
    """Whether losses and parameters are those of the same training without a recording, on all ranks."""


def record_runs(folder: Path, runs: Sequence[Run], world: int) -> dict[str, Recorded]:
    """Trains each run with and without a recording in as many processes, one after the other.

    One in a single process trains with it alone: `tests/collect` has what that must not change.
    """
    paths = {run.name: folder / f"{run.name.replace(' ', '-')}.modtrace" for run in runs}
    several = [(str(paths[run.name]), run) for run in runs if run.kind != "single"]
    run_ranks(_train_all, (world, str(folder), several), world)
    for run in runs:
        if run.kind == "single":
            train(run, str(paths[run.name]))
    return {
        name: Recorded(
            str(path), all(file.read_text() == "True" for file in folder.glob(f"{path.name}.bits-*"))
        )
        for name, path in paths.items()
    }


def _train_twice(run: Run, path: str, rank: int, world: int) -> None:
    plain, recorded = train(run, None, rank, world), train(run, path, rank, world)
    Path(f"{path}.bits-{rank}").write_text(str(plain == recorded))


def _train_all(rank: int, world: int, folder: str, runs: Sequence[tuple[str, Run]]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), TORCHELASTIC_RUN_ID="parallel-kinds")
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for path, run in runs:
        _train_twice(run, path, rank, world)
        dist.barrier()
    dist.destroy_process_group()
