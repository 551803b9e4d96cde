"""Checks for several machines: the same code and settings, an address that others can reach, a shared output_dir."""

import hashlib
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from torch import distributed as dist

from ..config import RunConfig
from ..environment import CODE_FILE, Environment, versions
from ..errors import RunError, UsageError, first_line
from ..package import files_of_run

PATIENCE_S = 10  # until the run says what it waits for
ARRIVAL_S = 300  # longest wait of one machine's processes for the other machines'

# Keeps the store alive: others read from the first process's (torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE).
_kept: list[dist.Store] = []
OURS = "accelerate_recipes/"
OF_ONE_MACHINE = ("ACCELERATE_TORCH_DEVICE", "ACCELERATE_RECIPES_DATA", CODE_FILE)


def _choose_interface(machines: list[dict[str, Any]], environment: Environment) -> None:
    """Sets gloo's network interface, unless the user did: the one towards machine 0, or on machine 0 towards machine 1.
    By default gloo takes the address of the host name, often 127.0.1.1, which no other machine can reach."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    address, rank = machines[1]["address"], environment.machine_rank
    if rank > 0:
        address = machines[rank]["address"]
    elif address is not None:
        address = _address_towards(address, environment.main_port)
    for name, addresses in psutil.net_if_addrs().items():
        if any(own.address.partition("%")[0] == address for own in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name


@contextmanager
def agreement(environment: Environment, config: RunConfig) -> Iterator[None]:
    """Compares the machines before their processes join. After the `with` block they exchange versions, settings, code
    digests and any UsageError from the block; then gloo's network interface is set. Raises UsageError in all processes
    of all machines, with the difference or the error of one machine; and RunError if the processes of a machine did not
    arrive within `ARRIVAL_S`, or machine 0 is gone."""
    if environment.num_machines == 1:
        yield
        return
    facts = _facts(environment, config)
    try:
        yield
    except UsageError as error:
        facts["error"] = str(error)
    machines = _exchange(facts, environment)
    first = machines[0]
    for machine, other in enumerate(machines):
        for kind in ("versions", "launcher", "flags", "files"):
            names, shared = other[kind].keys() | first[kind].keys(), other[kind].keys() & first[kind].keys()
            if kind == "files":  # only one machine may import a module of the recipe, such as one that plots
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
    _choose_interface(machines, environment)


@contextmanager
def saying_who_waits(environment: Environment) -> Iterator[None]:
    """Prints a line if the processes take long to meet in the block. Raises UsageError for a port in use, RunError."""
    place = f"{environment.main_address}:{environment.main_port}"
    line = (
        f"process {environment.rank} is waiting for all {environment.world_size} processes at {place} (MASTER_ADDR, "
        "MASTER_PORT); Ctrl-C ends it. If no launcher has started the others: unset RANK LOCAL_RANK WORLD_SIZE"
    )
    timer = threading.Timer(PATIENCE_S, print, [line], {"flush": True})
    timer.daemon = True
    if environment.local_rank is not None:
        timer.start()
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if "EADDRINUSE" in str(error):
            raise UsageError(f"the port of {place} is in use", "use another --main_process_port") from None
        raise RunError(f"the processes did not meet at {place} ({first_line(error)[:200]})") from None
    finally:
        timer.cancel()


def _exchange(facts: dict[str, Any], environment: Environment) -> list[dict[str, Any]]:
    """Publishes the facts of this machine; returns the facts of all machines, in order."""
    timeout = timedelta(seconds=ARRIVAL_S)
    machines: list[dict[str, Any]] = []
    prefix = f"accelerate_recipes/{environment.store_number}/machine_"
    try:
        store = next(dist.rendezvous("env://", timeout=timeout))[0]
        _kept.append(store)
        store.set_timeout(timeout)
        if environment.local_rank == 0:
            store.set(f"{prefix}{environment.machine_rank}", json.dumps(facts))
        while len(machines) < environment.num_machines:
            machines.append(json.loads(store.get(f"{prefix}{len(machines)}")))
    except ValueError as error:  # a variable that torchrun sets is missing
        raise UsageError(f"{first_line(error)}: unset GROUP_WORLD_SIZE, or start with accelerate launch") from None
    except dist.DistStoreError:
        raise RunError(
            f"the processes of machine {len(machines)} of {environment.num_machines} did not start within "
            f"{ARRIVAL_S} s: its output says why"
        ) from None
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error):
            raise
        raise RunError(
            f"machine 0 at {environment.main_address}:{environment.main_port} has gone: its output says why"
        ) from None
    return machines


def _address_towards(host: str | None, port: str | None) -> str | None:
    """This machine's address on the route to `host`; None without a route. Sends nothing."""
    with suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    return None


def _facts(environment: Environment, config: RunConfig) -> dict[str, Any]:
    launcher = {name: value for name, value in environment.settings.items() if name not in OF_ONE_MACHINE}
    return {
        "host": socket.gethostname(),
        "address": _address_towards(environment.main_address, environment.main_port),
        "error": None,
        "versions": versions("torch", "accelerate", "deepspeed", "transformers", "safetensors"),
        "flags": {f"--{name}": str(value) for name, value in asdict(config).items()},
        "launcher": {"script": Path(sys.argv[0]).name, "local processes": environment.local_world_size, **launcher},
        "files": {name: _digest(path) for name, path in files_of_run().items()},
    }


def _digest(path: Path) -> str:
    with suppress(OSError):  # a recipe that was typed in, or a file that is gone
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return "none"
