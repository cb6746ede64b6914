"""A real Slurm over `hosts`, for tests that submit real jobs.

Needs what hosts need, and Debian's packages slurm-wlm and munge. The configuration, the key, the sockets, the state and
the logs of all daemons are in one directory; outside it are only the cgroups of jobs, removed at the end.

Slurm looks at time limits every 30 s: `--signal=...@S` comes S to S+30 s before the limit, the end up to 30 s after it.
"""

import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from helpers import hosts
from helpers.hosts import Host

START_SECONDS = 60.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.1
LONGEST_SOCKET_PATH = 107

# Each host has the CPUs and the memory that are said here, whatever the machine has: small jobs need not wait.
# cred_expire: a requeued job waits a second longer than this, 5 s being the least allowed and 120 s the default.
# KillWait: from SIGTERM to SIGKILL. MinJobAge: how long Slurm remembers a job that has ended.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={controller.name}({controller.address})
AuthInfo=socket={directory}/munge,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/cgroup
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=5
MinJobAge=3600
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=100000,bf_interval=1
{nodes}
PartitionName=main Nodes=ALL Default=YES
{more}
"""
NODE = "NodeName={host.name} NodeAddr={host.address} CPUs=8 RealMemory=100000"

# slurmd knows a job's processes by their freezer cgroup, as most clusters do, and so ends also those whose parent was
# killed, as torchrun's workers. `ip netns exec` hides the machine's cgroups; the others need but be there.
CGROUPS = """\
mount -t tmpfs slurm /sys/fs/cgroup
(cd /sys/fs/cgroup && mkdir freezer cpu,cpuacct memory cpuset devices)
mount -t cgroup -o freezer freezer /sys/fs/cgroup/freezer
"""
SLURMD = CGROUPS + 'exec slurmd -D -f "$0"'
REMOVE_CGROUPS = CGROUPS + 'find "/sys/fs/cgroup/freezer/slurm_$(hostname)" -depth -type d -exec rmdir {} +'


@dataclass(frozen=True)
class Slurm:
    """A running cluster. Its controller is on the first host, and that is where jobs are submitted."""

    host: Host
    directory: Path
    environment: dict[str, str]
    """What Slurm's commands need to know, on any host."""

    def run(self, arguments: Sequence[str], cwd: Path | None = None, check: bool = True) -> str:
        """What a command on the first host writes to its standard output.

        Raises:
            AssertionError: it failed, with all that it wrote; not without `check`.
        """
        process = self._call(arguments, cwd)
        output = f"exit code {process.returncode}\n{process.stdout}{process.stderr}"
        assert process.returncode == 0 or not check, f"{' '.join(arguments)}: {output}"
        return process.stdout

    def _call(self, arguments: Sequence[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        command, environment = self.host.command(arguments), os.environ | self.environment
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)

    def sbatch(self, arguments: Sequence[str], cwd: Path) -> int:
        """Submit a job, `arguments` being those of sbatch; it sees our environment.

        Returns:
            The job's id; of an array, the one that its tasks share.
        """
        return int(self.run(["sbatch", "--parsable", *arguments], cwd))

    def jobs(self, job_id: int) -> list[dict[str, str]]:
        """What `scontrol show job` reports: JobState, ExitCode, Restarts and more; of an array, one entry per task."""
        lines = self.run(["scontrol", "--oneliner", "show", "job", str(job_id)]).splitlines()
        return [dict(re.findall(r"([A-Z][\w/:]*)=(.*?)(?= [A-Z][\w/:]*=| *$)", line)) for line in lines]

    def wait(self, job_id: int, timeout_seconds: float) -> list[dict[str, str]]:
        """`jobs(job_id)` once the job, or all tasks of the array, have left the queue; a requeued job has not.

        Where the controller does not answer, as may be while many processes start, it is asked again.

        Raises:
            AssertionError: it is still there after `timeout_seconds`, with the ends of all logs.
        """
        deadline = time.monotonic() + timeout_seconds
        while (asked := self._call(["squeue", "--noheader", f"--jobs={job_id}"])).returncode or asked.stdout:
            if time.monotonic() > deadline:
                jobs = self.jobs(job_id)
                states = ", ".join(f"{job['JobState']} ({job['Reason']})" for job in jobs)
                logs = _ends([Path(job["StdOut"]) for job in jobs if "StdOut" in job]) + self.logs()
                raise AssertionError(f"job {job_id} after {timeout_seconds:g} s: {states}{logs}")
            time.sleep(POLL_SECONDS)
        return self.jobs(job_id)

    def logs(self) -> str:
        """The ends of what the daemons wrote."""
        return _ends(sorted(self.directory.glob("*.log")))


def why_unavailable() -> str | None:
    """Why this machine cannot have such a cluster; None if it can."""
    missing = [tool for tool in ("sbatch", "slurmctld", "slurmd", "munged") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found (Debian packages slurm-wlm and munge)"
    if "freezer" not in Path("/proc/cgroups").read_text():
        return "slurmd needs the freezer cgroup (version 1), which this kernel lacks"
    return hosts.why_unavailable()


@contextmanager
def slurm(nodes: Sequence[Host], directory: Path, more: str = "") -> Iterator[Slurm]:
    """A cluster of `nodes`, all idle; at the end its jobs are cancelled and its daemons ended.

    Args:
        directory: folder of all that the cluster keeps, made here; absolute, and short, as Unix sockets lie in it.
        more: lines for slurm.conf, such as a second partition.

    Raises:
        AssertionError: it does not come up, with the ends of all logs.
    """
    longest = directory / nodes[-1].name / f"{nodes[-1].name}_1000.4294967291"
    assert len(str(longest)) <= LONGEST_SOCKET_PATH, f"{longest}: too long for a socket, take a shorter directory"
    file = _configure(nodes, directory, more)
    munge = [f"--{name}-file={directory}/munge.{name}" for name in ("key", "log", "pid", "seed")]
    daemons = [
        (nodes[0], "munged", ["munged", "--foreground", "--force", f"--socket={directory}/munge", *munge]),
        (nodes[0], "slurmctld", ["slurmctld", "-D", "-f", file]),
        *((host, host.name, ["sh", "-ec", SLURMD, file]) for host in nodes),
    ]
    cluster = Slurm(nodes[0], directory, {"SLURM_CONF": file})
    running: list[subprocess.Popen[str]] = []
    with ExitStack() as cleanup:
        cleanup.callback(_stop, nodes, running)
        for host, name, command in daemons:
            with (directory / f"{name}.log").open("w") as output:
                running.append(host.start(command, output))
        _await_idle(cluster, nodes, running)
        cleanup.callback(_cancel_jobs, cluster)
        yield cluster


def _configure(nodes: Sequence[Host], directory: Path, more: str) -> str:
    for name in ("state", *(host.name for host in nodes)):
        (directory / name).mkdir(parents=True)
    (directory / "munge.key").touch(mode=0o600)
    (directory / "munge.key").write_bytes(secrets.token_bytes(128))
    (directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    lines = "\n".join(NODE.format(host=host) for host in nodes)
    file = directory / "slurm.conf"
    file.write_text(CONFIGURATION.format(controller=nodes[0], directory=directory, nodes=lines, more=more))
    return str(file)


def _await_idle(cluster: Slurm, nodes: Sequence[Host], daemons: "Sequence[subprocess.Popen[str]]") -> None:
    deadline = time.monotonic() + START_SECONDS
    idle, states = {f"{host.name} idle" for host in nodes}, set[str]()
    while states != idle:
        alive = all(daemon.poll() is None for daemon in daemons)
        assert alive and time.monotonic() < deadline, f"not idle: {states or 'no controller'}{cluster.logs()}"
        time.sleep(POLL_SECONDS)
        states = set(cluster.run(["sinfo", "--noheader", "--Node", "--format=%n %T"], check=False).splitlines())


def _cancel_jobs(cluster: Slurm) -> None:
    """Cancel all jobs and wait until their processes have ended."""
    deadline = time.monotonic() + STOP_SECONDS
    cluster.run(["scancel", "--user=root"], check=False)
    while cluster.run(["squeue", "--noheader"], check=False) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _stop(nodes: Sequence[Host], daemons: "Sequence[subprocess.Popen[str]]") -> None:
    for daemon in daemons:
        daemon.kill()
        daemon.wait()
    for host in nodes:
        subprocess.run(host.command(["sh", "-ec", REMOVE_CGROUPS]), capture_output=True, check=False)


def _ends(paths: Sequence[Path]) -> str:
    texts = [(path, path.read_text(errors="replace").splitlines()[-20:]) for path in paths if path.exists()]
    return "".join("\n".join((f"\n--- {path}", *lines)) for path, lines in texts)
