"""The grid of the processes of a run: the groups in which they share something."""

from dataclasses import dataclass
from functools import cached_property

import numpy
import torch
from torch import distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from ..cpu_group import collective_timeout
from ..layout import Layout


@dataclass
class Grid:
    """The groups of processes that share something, along the axes of a layout. Data-parallel ranks are outermost.
    Tensor parallelism is innermost: its groups need the fastest links, and a weight that it leaves whole is held by
    processes with consecutive ranks (`holders` in weights/shards.py)."""

    layout: Layout  # of the run
    device: torch.device  # of this process
    hang_timeout: float = 0  # of the run, in seconds

    @cached_property
    def sizes(self) -> dict[str, int]:
        """{axis: its size}, from the outermost to the innermost, without axes of size 1; FSDP2 alone has one axis."""
        layout = self.layout
        shards = max(1, layout.dp_shard // layout.sp)  # FSDP2 also divides among processes that share a sample
        replicas = layout.data_parallel_size // shards
        sizes = {"dp_replicate": replicas, "dp_shard": shards, "pp": layout.pp, "sp": layout.sp, "tp": layout.tp}
        return {axis: size for axis, size in sizes.items() if size > 1} or {"dp_shard": shards}

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All processes. Each must ask for it at the same time."""
        names, sizes = zip(*self.sizes.items())
        return self._patient(device_mesh.init_device_mesh(self.device.type, sizes, mesh_dim_names=names))

    def _patient(self, mesh: DeviceMesh) -> DeviceMesh:
        """The mesh, with the timeout of other groups: NCCL's 10 minutes would end before the watchdog acts."""
        for group in mesh.get_all_groups():
            dist.distributed_c10d._set_pg_timeout(collective_timeout(self.hang_timeout), group)
        return mesh

    @cached_property
    def shards(self) -> DeviceMesh:
        """The processes among which FSDP2 divides the weights of this process, and the replicas, if there are any."""
        names: list[str] = [axis for axis in ("dp_shard", "sp") if axis in self.sizes]
        if len(names) > 1:
            self._patient(self.mesh[tuple(names)]._flatten("fsdp"))
            names = ["fsdp"]
        return self.mesh[("dp_replicate", *names) if "dp_replicate" in self.sizes else tuple(names)]

    @cached_property
    def experts(self) -> DeviceMesh:
        """The processes that share the experts of each layer, and those that hold the same experts: all with their
        own tokens, which tensor parallelism divides among them."""
        layout = self.layout
        ranks = numpy.arange(layout.num_processes).reshape(-1, layout.pp, layout.sp * layout.tp).swapaxes(0, 1)
        grid = ranks.reshape(layout.pp, -1, layout.ep)
        # As lists: from an array that is not contiguous, DeviceMesh takes the wrong ranks (torch 2.13).
        mesh = self._patient(DeviceMesh(self.device.type, grid.tolist(), mesh_dim_names=("pp", "replicas", "experts")))
        return mesh["replicas", "experts"]
