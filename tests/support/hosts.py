"""Two hosts on this machine: network namespaces with their own host names, connected by two virtual interfaces."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.launching import ACCELERATE_LAUNCH, TIMEOUT_S, environment
from support.recipes import DISTURBED
from support.runs import ROOT, Run

ADDRESSES = ("10.77.0.1", "10.77.0.2")


def missing() -> str | None:
    """Returns why this machine cannot have two hosts; None if it can."""
    if shutil.which("ip") is None:
        return "no ip command (Debian: apt-get install iproute2)"
    name = f"probe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return f"network namespaces are not allowed here: {made.stderr.strip()}" if made.returncode else None


REASON = missing()
NEEDS_HOSTS = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.xdist_group("hosts")]


@dataclass(frozen=True)
class Hosts:
    """Two network namespaces and their names."""

    names: tuple[str, str]

    def command(self, host: int, command: list[str]) -> list[str]:
        """Returns the command line that runs `command` on a host."""
        named = ["unshare", "--uts", "sh", "-c", f'hostname node{host}; exec "$@"', "sh"]
        return ["ip", "netns", "exec", self.names[host], *named, *command]

    def run(self, commands: list[list[str]], output_dirs: list[Path], folder: Path, **env: str) -> list[Run]:
        """Runs a command on each host at the same time, and waits for both."""
        with self.started(commands, folder, **env) as processes:
            return [wait(process, output_dir) for process, output_dir in zip(processes, output_dirs)]

    @contextmanager
    def started(self, commands: list[list[str]], folder: Path, **env: str) -> Iterator[list[subprocess.Popen]]:
        """Starts a command on each host, in `folder`, and kills it at the end. Skips a host if its command is empty."""
        processes = []
        try:
            for host, command in enumerate(commands):
                if not command:
                    continue
                processes.append(
                    subprocess.Popen(
                        self.command(host, command),
                        cwd=folder,
                        env=environment(**env),
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                        start_new_session=True,
                    )
                )
            yield processes
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def kill(self, host: int) -> None:
        """Kills all processes of a host."""
        pids = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True).stdout.split()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def link(self, state: str) -> None:
        """Sets the link between the hosts `up` or `down`."""
        ip("-n", self.names[1], "link", "set", "eth0", state)


def wait(process: subprocess.Popen, output_dir: Path) -> Run:
    """Waits until a started command ends; returns its run."""
    stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    return Run(process.returncode, stdout, stderr, output_dir)


@contextmanager
def two_hosts(names: dict[str, str] | None = None) -> Iterator[Hosts]:
    """Makes two hosts and removes them at the end. Their /etc/hosts has localhost and `names`, {name: address}."""
    known, names = {"localhost": "127.0.0.1"} | (names or {}), (f"recipes{os.getpid()}a", f"recipes{os.getpid()}b")
    try:
        for name in names:
            ip("netns", "add", name)
            folder = Path("/etc/netns") / name  # ip netns exec mounts its files over those in /etc
            folder.mkdir(parents=True)
            (folder / "hosts").write_text("".join(f"{address} {host}\n" for host, address in known.items()))
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "name", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, ADDRESSES):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield Hosts(names)
    finally:
        for host, name in enumerate(names):
            Hosts(names).kill(host)  # processes left by a failed test
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def ip(*arguments: str) -> None:
    """Runs the `ip` command of iproute2."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def accelerate_launch(machine: int, config: str, script: str, arguments: str, **flags: object) -> list[str]:
    """The command that a user types on a machine."""
    flags = {"machine_rank": machine, "main_process_ip": ADDRESSES[0], **flags}
    command = [*ACCELERATE_LAUNCH, "--config_file", str(ROOT / "accelerate_configs" / f"{config}.yaml")]
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [*command, str(ROOT / script), *arguments.split()]


def node(machine: int, launch: str, **flags: object) -> list[str]:
    """The command line of launchers/node.py on a machine. It waits 3 s for the other machine."""
    own = {"num_machines": 2, "machine_rank": machine, "main_process_ip": ADDRESSES[0], "timeout": 3} | flags
    words = [word for name, value in own.items() for word in (f"--{name}", str(value))]
    return [sys.executable, str(ROOT / "launchers" / "node.py"), *words, "--", *launch.split()]


def launch_of(config: str, arguments: str, script: Path = ROOT / DISTURBED) -> str:
    """The arguments after the -- of launchers/node.py."""
    return f"--config_file {ROOT}/accelerate_configs/{config}.yaml {script} {arguments}"


def error_lines(run: Run) -> list[str]:
    """The error lines of the recipe, without the launcher's report."""
    return [line for line in run.stderr.splitlines() if re.match("(error|stopped): ", line)]
