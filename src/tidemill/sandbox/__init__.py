"""Runs code that nobody has checked, such as a model's, where it can neither read nor change the machine.

```
environment process ── Unix socket ──▶ launcher ── fork ──▶ bwrap: namespaces, filter, limits ──▶ command
                                          │ tmpfs per sandbox
```

- *A launcher* (`sandbox/launcher.py`; `command.py` is a command that it runs), one per process, runs in a mount and
  process namespace of its own with all capabilities there. It is small, so that its forks are cheap whatever its
  owner holds in memory, and it can mount a file system of limited size for each sandbox, also for another user than
  root. Its standard input is the owner's life line: when that closes, it ends, and the kernel ends every sandbox with
  its namespace. (`--die-with-parent` alone leaves orphans, and follows the *thread* that forked.)
- *A connection is a sandbox.* When it closes, the sandbox's processes and files end. Output is cut while it is read,
  in the launcher.
- *Limits of all processes together* come from a watchdog that reads `/proc` (cgroups are not ours on most machines);
  the file system's size and number of files are the kernel's. A process limit is set inside the user namespace, where
  it counts one sandbox.
- *The filter of system calls* is BPF that `sandbox/seccomp.py` assembles, for x86-64 and arm64.
- *Named hosts only.* For `sandbox.network` the launcher enters the sandbox's network namespace with one thread,
  listens there, and passes connections on from outside (`sandbox/network.py`). Nothing of it runs in the sandbox,
  which has no route to anything.
- *A lost sandbox is not the agent's fault*: its environment process ends, and the pool makes the call again
  elsewhere, after the episode's history.
- *Scores of packages* (`scoring/package_checks.py`): programs that stay in sandboxes, each with the package imported
  once, fork a worker for an answer (`scoring/programs/check_answers.py`). The entry of a prompt is sent with the
  answer instead of being generated again, because some generators depend on PYTHONHASHSEED.
- *Adapters* (`agents/adapters/`) are environments whose instances talk to a program in the other package's Python, by
  MessagePack over one stream: a process, or a program that stays in a sandbox. The programs know nothing of Tidemill.
  A rollout of verifiers asks for completions, so its program turns that around: a request is an observation, the
  answer an action.
"""

from tidemill.sandbox.open_sandbox import open_sandbox
from tidemill.sandbox.records import Finished, Limits, Sandbox, SandboxError, SandboxLostError, Snapshot

__all__ = ["Finished", "Limits", "Sandbox", "SandboxError", "SandboxLostError", "Snapshot", "open_sandbox"]
