"""A real Slurm for a test: its controller and nodes run in their own namespaces, and end with the test."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from tests.processes import command_lines, end_namespace, processes_below

START_S = 30.0
GRACE_S = 15
"""From SIGTERM to SIGKILL of a preempted job."""
ISOLATED = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
PROGRAMS = ("sbatch", "squeue", "scancel", "scontrol", "sinfo")
CONFIGURATION = """\
ClusterName=double
SlurmctldHost=localhost(10.9.9.9)
AuthType=auth/none
CredType=cred/none
# A requeued job waits as long: 120 s by default.
AuthInfo=cred_expire=8
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=10
MinJobAge=300
ReturnToService=2
MailProg=/bin/true
SwitchType=switch/none
MpiDefault=none
SchedulerParameters=bf_interval=1,sched_interval=1,preempt_youngest_first
SlurmdParameters=config_overrides
NodeName=n[1-{nodes}] NodeHostname=localhost NodeAddr=10.9.9.9 Port=[6901-{last_port}] CPUs={cpus} RealMemory=64000
PartitionName=spot Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s} MaxTime=60 State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=60 State=UP
"""
# Nodes share the folder with this machine, but not /tmp. The default route gives Ray an address beside the loopback.
INSIDE = """\
set -e
cd {folder}
mount -t tmpfs tmpfs /tmp
mkdir -p {folder}
mount --no-canonicalize --bind /proc/self/cwd {folder}
cd {folder}
hostname localhost
ip link set lo up
ip link add d0 type veth peer name d1
ip addr add 10.9.9.9/24 dev d0
ip link set d0 up
ip link set d1 up
ip route add default dev d0
export SLURM_CONF={folder}/slurm.conf
slurmctld -c -D &
for node in {nodes}; do slurmd -c -D -N $node & done
wait
"""
T = TypeVar("T")


def unavailable() -> str:
    """Why a Slurm cannot run here; empty if it can."""
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    programs = ("ip", "unshare", "nsenter", "setpriv", "slurmctld", "slurmd", "srun", *PROGRAMS)
    if missing := [name for name in programs if shutil.which(name) is None]:
        return f"needs {', '.join(missing)}"
    tried = subprocess.run([*ISOLATED, "true"], capture_output=True, text=True, timeout=START_S, check=False)
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class Slurm:
    """Context manager of a cluster whose state and logs lie in a folder.

    `bin` is a folder for PATH whose programs reach it. Its partitions are `high`, which preempts `spot`.
    """

    def __init__(self, folder: Path, *, nodes: int = 2, cpus: int = 2) -> None:
        self.folder, self.nodes, self.cpus = folder.resolve(), nodes, cpus
        self.bin = self.folder / "bin"

    def __enter__(self) -> Self:
        self.bin.mkdir(parents=True)
        (self.folder / "state").mkdir()
        names = [f"n{number}" for number in range(1, self.nodes + 1)]
        configuration = CONFIGURATION.format(
            folder=self.folder, nodes=self.nodes, last_port=6900 + self.nodes, cpus=self.cpus, grace_s=GRACE_S
        )
        (self.folder / "slurm.conf").write_text(configuration)
        inside = INSIDE.format(folder=self.folder, nodes=" ".join(names))
        with (self.folder / "double.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *ISOLATED, "sh", "-c", inside],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        try:
            self.wait(lambda: list(processes_below(self._process.pid)), "its first process", START_S)
            self._write_programs()
            self.wait(lambda: self._states() == {"idle"}, "idle nodes", START_S)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop()

    def _stop(self) -> None:
        end_namespace(self._process, START_S)

    def _write_programs(self) -> None:
        inside = next(processes_below(self._process.pid))
        for name in PROGRAMS:
            program = self.bin / name
            program.write_text(
                f'#!/bin/sh\nexport SLURM_CONF={self.folder}/slurm.conf\n[ -n "$SLURM_JOB_ID" ] || enter="nsenter '
                f'--target {inside} --net --uts"\nexec $enter {shutil.which(name)} "$@"\n'
            )
            program.chmod(0o755)

    def _states(self) -> set[str]:
        command = [str(self.bin / "sinfo"), "--noheader", "--format=%T"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
        return set(found.stdout.split())

    def run(self, program: str, *arguments: str, text: str = "", deadline_s: float = 30.0) -> str:
        """Standard output of one of Slurm's programs."""
        command = [str(self.bin / program), *arguments]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=deadline_s, check=False)
        assert done.returncode == 0, f"{program} {arguments}: {done.stderr}"
        return done.stdout

    def submit(self, script: str, *options: str) -> str:
        """Submit the lines of a script; returns the job's id."""
        output = f"--output={self.folder}/job-%j.log"
        return self.run("sbatch", "--parsable", output, *options, text=f"#!/bin/bash\n{script}\n").strip()

    def preempt(self, job: str, *, for_s: float) -> float:
        """Take a running job's nodes away for some seconds; returns the time at which Slurm starts to."""
        nodes = self.run("squeue", f"--jobs={job}", "--noheader", "--format=%N").strip()
        options = ["--partition=high", f"--nodelist={nodes}", f"--cpus-per-task={self.cpus}"]
        self.submit(f"sleep {for_s:g}", "--job-name=important", *options)
        return time.time()

    def state(self, job: str) -> str:
        """State of a job, such as RUNNING; empty once Slurm has forgotten it."""
        lines = self.run("squeue", f"--jobs={job}", "--states=all", "--noheader", "--format=%T").split()
        return lines[0] if lines else ""

    def restarts(self, job: str) -> int:
        shown = self.run("scontrol", "show", "job", job)
        return int(next(word for word in shown.split() if word.startswith("Restarts=")).removeprefix("Restarts="))

    def wait(self, result: Callable[[], T], what: str, deadline_s: float) -> T:
        """Wait until a function returns something true, and return it."""
        end = time.monotonic() + deadline_s
        while not (value := result()):
            if self._process.poll() is not None or time.monotonic() > end:
                raise TimeoutError(f"waited {deadline_s:g} s for {what}\n{self.logs()}")
            time.sleep(0.05)
        return value

    def logs(self) -> str:
        """The ends of all logs."""
        paths = sorted(self.folder.rglob("*log*"))
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in paths if path.is_file()
        )

    def processes(self) -> dict[int, str]:
        """Command lines of everything that runs in the cluster, by process id."""
        return command_lines(processes_below(self._process.pid))
