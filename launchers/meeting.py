"""Machines meet before they launch: torch's own rendezvous says nothing for minutes, and never who is missing."""

import errno
import json
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

RETRY_S = 0.5
MAX_LINE = 65536


class MeetingError(Exception):
    """Machines that did not come together; its message is one line for the user."""

    exit_code = 1


class UsageError(MeetingError):
    """What cannot be right, however long one waits."""

    exit_code = 2


@dataclass(frozen=True)
class Meeting:
    """Where the machines of a job meet, as each of them knows it.

    Attributes:
        num_machines: that shall come.
        machine_rank: of this one.
        address: name or address of machine 0.
        port: there, which is free again after the meeting.
        timeout: seconds that the first to come waits for the last.
    """

    num_machines: int
    machine_rank: int
    address: str
    port: int
    timeout: float

    @property
    def where(self) -> str:
        """What to look for, in a message."""
        return f"machine 0 at {self.address}:{self.port}"


def meet(meeting: Meeting) -> None:
    """Returns, on each machine, when all have come.

    Raises:
        MeetingError: on all machines that came, if one did not; on this one, if it cannot reach machine 0.
        UsageError: two machines with one rank, another number of machines, an address that is not machine 0's.
    """
    deadline = time.monotonic() + meeting.timeout
    family, address = _resolve(meeting, deadline)
    if meeting.machine_rank == 0:
        _receive(meeting, family, address, deadline)
    else:
        _visit(meeting, family, address, deadline)


def _resolve(meeting: Meeting, deadline: float) -> tuple[int, Any]:
    while True:
        try:
            family, _, _, _, address = socket.getaddrinfo(meeting.address, meeting.port, type=socket.SOCK_STREAM)[0]
            return family, address
        except socket.gaierror as error:  # the name of a new pod takes a while to be known
            if time.monotonic() > deadline:
                raise MeetingError(
                    f"{meeting.address} does not resolve on {socket.gethostname()} ({error.strerror}): type the "
                    "address of machine 0 as --main_process_ip"
                ) from None
            time.sleep(RETRY_S)


def _receive(meeting: Meeting, family: int, address: Any, deadline: float) -> None:
    arrived: dict[int, dict[str, Any]] = {0: asdict(meeting) | {"host": socket.gethostname()}}
    visitors = []
    error: MeetingError | None = None
    with _listen(meeting, family, address) as server:
        while len(arrived) < meeting.num_machines and error is None:
            server.settimeout(max(RETRY_S, deadline - time.monotonic()))
            try:
                visitor = server.accept()[0]
            except TimeoutError:
                error = _missing(meeting, arrived)
                break
            facts = _read(visitor, RETRY_S * 10)
            if isinstance(facts, dict) and facts.keys() == arrived[0].keys():  # else it was a port scanner
                visitors.append(visitor)
                error = _contradiction(arrived, facts)
                arrived[facts["machine_rank"]] = facts
        for visitor in visitors:
            _send(visitor, {"error": error and str(error), "exit_code": error and error.exit_code})
            _read(visitor, RETRY_S)  # it closes first, else the port would stay taken for a while
            visitor.close()
    if error is not None:
        raise error


def _listen(meeting: Meeting, family: int, address: Any) -> socket.socket:
    server = socket.socket(family)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(address)
    except OSError as error:
        server.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(
                f"{meeting.address} is no address of {socket.gethostname()}, which has --machine_rank 0: type one of "
                "its own as --main_process_ip, on all machines"
            ) from None
        raise UsageError(
            f"{meeting.address}:{meeting.port} cannot be listened on ({error.strerror}): type another "
            "--main_process_port, on all machines"
        ) from None
    server.listen()
    return server


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


def _visit(meeting: Meeting, family: int, address: Any, deadline: float) -> None:
    while True:
        with socket.socket(family) as connection:
            connection.settimeout(5)
            try:
                connection.connect(address)
                _send(connection, asdict(meeting) | {"host": socket.gethostname()})
                # Machine 0 came later than this one, it may be: its word is the last.
                answer = _read(connection, meeting.timeout + 60)
                if answer is not None:
                    break
                reason = "it closed the connection: its own output says why"
            except ConnectionRefusedError:
                reason = "nobody listens there: it is not started, or with another --main_process_port"
            except OSError as error:
                reason = f"{error.strerror or 'no answer'}: the address is another, or a firewall is between"
        if time.monotonic() > deadline:
            host = socket.gethostname()
            raise MeetingError(f"{meeting.where} cannot be reached from {host} within {meeting.timeout:g} s ({reason})")
        time.sleep(RETRY_S)
    if answer["error"] is not None:
        raise (UsageError if answer["exit_code"] == UsageError.exit_code else MeetingError)(answer["error"])


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):  # it may have gone meanwhile, and will say why
        connection.sendall(json.dumps(message).encode() + b"\n")


def _read(connection: socket.socket, timeout: float) -> dict[str, Any] | None:
    """A line of JSON; None if there comes none."""
    connection.settimeout(timeout)
    try:
        with connection.makefile() as file:
            return json.loads(file.readline(MAX_LINE))
    except (OSError, ValueError):
        return None
