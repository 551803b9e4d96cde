"""Waits for all machines before the launch. torch's own rendezvous prints nothing for minutes, and never names the
missing machine."""

import json
import select
import socket
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from typing import Any

RETRY_S = 0.5
NAME_S = 60.0  # the name of a replaced pod can resolve to its old address for a while
MAX_LINE = 65536


class MeetingError(Exception):
    """The machines did not meet; the message is one line for the user."""

    exit_code = 1


class UsageError(MeetingError):
    """A wrong argument: a longer wait cannot help."""

    exit_code = 2


@dataclass(frozen=True)
class Meeting:
    """The settings of one machine for the meeting.

    Attributes:
        num_machines: number of machines in the job.
        machine_rank: rank of this machine.
        address: name or address of machine 0.
        port: port on machine 0; it is free again after the meeting.
        timeout: seconds that this machine waits for the others.
    """

    num_machines: int
    machine_rank: int
    address: str
    port: int
    timeout: float

    @property
    def where(self) -> str:
        """Machine 0 and its address, for messages."""
        return f"machine 0 at {self.address}:{self.port}"


def meet(meeting: Meeting) -> None:
    """Waits until all machines have arrived.

    Raises:
        MeetingError: a machine is missing (on all machines that arrived), this machine cannot reach machine 0, or this
            machine has rank 0 but not the address of machine 0.
        UsageError: two machines have the same rank, the machines differ in their number of machines, or the port is
            taken.
    """
    deadline = time.monotonic() + meeting.timeout
    if meeting.machine_rank == 0:
        _wait_for_own_address(meeting, min(deadline, time.monotonic() + NAME_S))
        _receive(meeting, deadline)
    else:
        _visit(meeting, deadline)


def _wait_for_own_address(meeting: Meeting, deadline: float) -> None:
    host = socket.gethostname()
    while True:
        try:
            found = socket.getaddrinfo(meeting.address, 0, type=socket.SOCK_STREAM)
            if any(_is_own(family, address) for family, _, _, _, address in found):
                return
            reason = (
                f"{meeting.address} is not an address of {host}, which has --machine_rank 0: use one of its addresses "
                "as --main_process_ip on all machines"
            )
        except socket.gaierror as error:
            reason = _unresolved(meeting, error)
        if time.monotonic() > deadline:
            raise MeetingError(reason)
        time.sleep(RETRY_S)


def _is_own(family: int, address: Any) -> bool:
    with socket.socket(family) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


def _unresolved(meeting: Meeting, error: socket.gaierror) -> str:
    return (
        f"{meeting.address} does not resolve on {socket.gethostname()} ({error.strerror}): use the address of machine "
        "0 as --main_process_ip"
    )


def _receive(meeting: Meeting, deadline: float) -> None:
    arrived: dict[int, dict[str, Any]] = {0: asdict(meeting) | {"host": socket.gethostname()}}
    visitors: dict[socket.socket, int] = {}
    error: MeetingError | None = None
    with ExitStack() as opened:
        server = opened.enter_context(_listen(meeting))
        while len(arrived) < meeting.num_machines and error is None:
            ready = select.select([server, *visitors], [], [], max(0.0, deadline - time.monotonic()))[0]
            for gone in set(ready) - {server}:  # a visitor is readable only after it has ended; it may arrive again
                del arrived[visitors.pop(gone)]
            if server in ready:
                visitor = opened.enter_context(closing(server.accept()[0]))
                facts = _read(visitor, RETRY_S * 10)
                if isinstance(facts, dict) and facts.keys() == arrived[0].keys():  # ignores port scanners
                    error = _contradiction(arrived, facts)
                    visitors[visitor] = facts["machine_rank"]
                    arrived[facts["machine_rank"]] = facts
            elif not ready:
                error = _missing(meeting, arrived)
        for visitor in visitors:
            _send(visitor, {"error": error and str(error), "exit_code": error and error.exit_code})
        for visitor in visitors:
            _read(visitor, RETRY_S)  # the visitor must close first, or the port stays taken for a while
    if error is not None:
        raise error


def _listen(meeting: Meeting) -> socket.socket:
    """Listens on all addresses, as torch's store does: a machine often resolves its own name to 127.0.1.1."""
    try:
        with suppress(OSError):
            if socket.has_dualstack_ipv6():
                return socket.create_server(("", meeting.port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", meeting.port))
    except OSError as error:
        raise UsageError(
            f"machine 0 cannot listen on {meeting.address}:{meeting.port} ({error.strerror}): use another "
            "--main_process_port on all machines"
        ) from None


def _missing(meeting: Meeting, arrived: dict[int, dict[str, Any]]) -> MeetingError:
    missing = [str(rank) for rank in range(meeting.num_machines) if rank not in arrived]
    hosts = ", ".join(f"{rank} is {facts['host']}" for rank, facts in sorted(arrived.items()))
    return MeetingError(
        f"machine {', '.join(missing)} of {meeting.num_machines} did not arrive at {meeting.where} within "
        f"{meeting.timeout:g} s ({hosts}): start the same command there with its --machine_rank, and read its output"
    )


def _contradiction(arrived: dict[int, dict[str, Any]], facts: dict[str, Any]) -> MeetingError | None:
    first, rank = arrived[0], facts["machine_rank"]
    if facts["num_machines"] != first["num_machines"]:
        return UsageError(
            f"{facts['host']} has --num_machines {facts['num_machines']}, {first['host']} has {first['num_machines']}"
        )
    if rank in arrived:
        return UsageError(f"{arrived[rank]['host']} and {facts['host']} both have --machine_rank {rank}")
    return None


def _visit(meeting: Meeting, deadline: float) -> None:
    host = socket.gethostname()
    unreachable = f"{meeting.where} cannot be reached from {host} within {meeting.timeout:g} s"
    while True:
        try:  # resolves the name in each attempt, because its address can change
            with socket.create_connection((meeting.address, meeting.port), timeout=5) as connection:
                _send(connection, asdict(meeting) | {"host": host})
                # Machine 0 may have started later than this machine: its deadline decides.
                answer = _read(connection, meeting.timeout + 60)
            if answer is not None:
                break
            line = f"{unreachable} (it closed the connection: its output says why)"
        except ConnectionRefusedError:
            line = f"{unreachable} (nothing listens there: it is not started, or uses another --main_process_port)"
        except socket.gaierror as error:
            line = _unresolved(meeting, error)
        except OSError as error:
            reason = error.strerror or "no answer"
            line = f"{unreachable} ({reason}: the address is wrong, or a firewall blocks the port)"
        if time.monotonic() > deadline:
            raise MeetingError(line)
        time.sleep(RETRY_S)
    if answer["error"] is not None:
        raise (UsageError if answer["exit_code"] == UsageError.exit_code else MeetingError)(answer["error"])


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):  # the other side may have ended; its output says why
        connection.sendall(json.dumps(message).encode() + b"\n")


def _read(connection: socket.socket, timeout: float) -> dict[str, Any] | None:
    """Reads a line of JSON; returns None if no valid line arrives."""
    connection.settimeout(timeout)
    try:
        with connection.makefile() as file:
            return json.loads(file.readline(MAX_LINE))
    except (OSError, ValueError):
        return None
