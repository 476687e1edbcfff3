"""Reads tensors that are more than their memory, from the private attributes where torch keeps what they represent."""

import sys
import weakref
from collections.abc import MutableMapping
from typing import Any, NamedTuple

import torch

#: The layout of tensors packed by oneDNN.
MKLDNN_LAYOUT: Any = getattr(torch, "_mkldnn", None)


def is_fake(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is one of torch.compile's fake tensors, which have a shape and no numbers."""
    return is_instance_of(tensor, "torch._subclasses.fake_tensor", "FakeTensor")


def is_awaited_collective(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is the result of a collective that may still run."""
    return is_instance_of(tensor, "torch.distributed._functional_collectives", "AsyncCollectiveTensor")


def is_instance_of(tensor: torch.Tensor, module: str, name: str) -> bool:
    """Returns whether a tensor is of a class that torch imports only when it is used."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(tensor, kind)


def local_part(tensor: Any) -> torch.Tensor:
    """Returns the part of a DTensor that is on this rank."""
    local: torch.Tensor = tensor._local_tensor
    return local


class Mesh(NamedTuple):
    """A grid of ranks over which DTensors are distributed."""

    names: tuple[str, ...]  # of its dimensions; () if they have none
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]  # ascending


class DTensorShard(NamedTuple):
    """Where the part of a DTensor lies that is on this rank."""

    placements: str  # one for each dimension of the mesh, as torch prints them: `S(0)R`
    mesh: Mesh
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]  # of the first element of the part in the whole


#: The meshes that were met, which many tensors share. torch keeps the ranks of one as a tensor.
_meshes: MutableMapping[Any, Mesh] = weakref.WeakKeyDictionary()


def shard_of(tensor: Any) -> DTensorShard | None:
    """Returns where the part of a DTensor lies in the whole; None if this rank is not in its mesh.

    It communicates with no other rank.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.get_coordinate() is None:
        return None
    shape = tuple(tensor.shape)
    _, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    if mesh not in _meshes:
        ranks: torch.Tensor = mesh.mesh
        _meshes[mesh] = Mesh(
            tuple(mesh.mesh_dim_names or ()), tuple(ranks.shape), tuple(sorted(ranks.flatten().tolist()))
        )
    return DTensorShard("".join(map(str, placements)), _meshes[mesh], shape, tuple(offset))


def masked_parts(tensor: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the data and the mask of a MaskedTensor."""
    return tensor._masked_data, tensor._masked_mask


def jagged_parts(tensor: Any) -> tuple[torch.Tensor, bool]:
    """Returns the values of a nested tensor with the jagged layout, and whether there are holes among them."""
    return tensor._values, tensor._lengths is not None


def stored_values(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the stored values of a sparse tensor in COO layout, coalesced or not."""
    return tensor._values()


def has_no_memory(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor consists of zeros without memory."""
    return tensor._is_zerotensor()
