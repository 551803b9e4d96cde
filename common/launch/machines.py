"""Checks for runs on several machines: the same code and settings on each machine, an address that the others can
reach, and a shared output_dir."""

import hashlib
import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from torch import distributed as dist

from ..config import RunConfig
from ..environment import CODE_FILE, local_world_size, num_machines, num_restarts, versions
from ..errors import RunError, UsageError
from ..package import files_of_run

ARRIVAL_S = 300  # longest wait of one machine's processes for those of the others
# Set by accelerate launch from the config file and its own flags.
LAUNCHER_VARIABLES = re.compile("(ACCELERATE|FSDP|PARALLELISM_CONFIG)_")

# Keeps the store alive: the first process may serve it (torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE), and others
# still read from it.
_kept: list[dist.Store] = []
OURS = "accelerate_recipes/"
OF_ONE_MACHINE = ("ACCELERATE_TORCH_DEVICE", "ACCELERATE_RECIPES_DATA", CODE_FILE)


def store_number() -> int:
    """A number that separates this start's entries in the store from those of earlier starts.

    The launchers' own store survives restarts and keeps old data: the number is the restart count. With
    `TORCH_DISABLE_SHARE_RDZV_TCP_STORE` (elastic runs, docs/multi-node.md) each start has a new store: the number is
    0, because a launcher that joined late has counted fewer restarts than the others.
    """
    is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return num_restarts() if is_launchers else 0


def _choose_interface(machines: list[dict[str, Any]]) -> None:
    """Sets gloo's network interface, unless the user chose one: the interface towards machine 0, or on machine 0
    towards machine 1. By default gloo takes the address of the host name, often 127.0.1.1, which no other machine can
    reach."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    address, rank = machines[1]["address"], int(os.environ["GROUP_RANK"])
    if rank > 0:
        address = machines[rank]["address"]
    elif address is not None:
        address = _address_towards(address, int(os.environ["MASTER_PORT"]))
    for name, addresses in psutil.net_if_addrs().items():
        if any(own.address.partition("%")[0] == address for own in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name


@contextmanager
def agreement(config: RunConfig) -> Iterator[None]:
    """Compares the machines before their processes join. After the `with` block they exchange versions, settings,
    code digests and any UsageError from the block; then gloo's network interface is set.

    Raises:
        UsageError: in all processes of all machines, with the difference or the error of one machine.
        RunError: the processes of a machine did not arrive within `ARRIVAL_S`, or machine 0 is gone.
    """
    if num_machines() == 1:
        yield
        return
    facts = _facts(config)
    try:
        yield
    except UsageError as error:
        facts["error"] = str(error)
    machines = _exchange(facts)
    first = machines[0]
    for machine, other in enumerate(machines):
        for kind in ("versions", "launcher", "flags", "files"):
            names, shared = other[kind].keys() | first[kind].keys(), other[kind].keys() & first[kind].keys()
            if kind == "files":  # one machine alone may import a module of the recipe, such as one that plots
                names = shared | {name for name in names if name.startswith(OURS)}
            for name in sorted(names):
                there, here = (of_machine[kind].get(name) or "none" for of_machine in (other, first))
                if there != here:
                    raise UsageError(
                        f"machine {machine} ({other['host']}) has {name} {there}, machine 0 ({first['host']}) has "
                        f"{here}: they must be the same"
                    )
    for machine, other in enumerate(machines):
        if other["error"]:
            raise UsageError(f"{other['error']} (machine {machine}, {other['host']})")
    _choose_interface(machines)


def _exchange(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Publishes the facts of this machine; returns those of all machines, in order."""
    timeout = timedelta(seconds=ARRIVAL_S)
    machines: list[dict[str, Any]] = []
    prefix = f"accelerate_recipes/{store_number()}/machine_"
    try:
        store = next(dist.rendezvous("env://", timeout=timeout))[0]
        _kept.append(store)
        store.set_timeout(timeout)
        if os.environ["LOCAL_RANK"] == "0":
            store.set(f"{prefix}{os.environ['GROUP_RANK']}", json.dumps(facts))
        while len(machines) < num_machines():
            machines.append(json.loads(store.get(f"{prefix}{len(machines)}")))
    except dist.DistStoreError:
        raise RunError(
            f"the processes of machine {len(machines)} of {num_machines()} did not start within {ARRIVAL_S} s: its own "
            "output says why"
        ) from None
    except dist.DistNetworkError:
        raise RunError(
            f"machine 0 at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} has gone: its own output says why"
        ) from None
    return machines


def _address_towards(host: str, port: int) -> str | None:
    """This machine's address on the route to `host`; None without a route. Sends nothing."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError:
        return None


def _facts(config: RunConfig) -> dict[str, Any]:
    launcher = {
        name: value
        for name, value in os.environ.items()
        if LAUNCHER_VARIABLES.match(name) and name not in OF_ONE_MACHINE
    }
    return {
        "host": socket.gethostname(),
        "address": _address_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])),
        "error": None,
        "versions": versions("torch", "accelerate", "deepspeed", "transformers", "safetensors"),
        "flags": {f"--{name}": str(value) for name, value in asdict(config).items()},
        "launcher": {"script": Path(sys.argv[0]).name, "local processes": local_world_size(), **launcher},
        "files": {name: _digest(path) for name, path in files_of_run().items()},
    }


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError:  # a recipe that was typed in, or a file that is gone
        return "none"
