"""Runs code that nobody has checked, such as a model's, where it can neither read nor change the machine.

```
environment process ── Unix socket ──▶ launcher ── fork ──▶ bwrap: namespaces, filter, limits ──▶ command
                                          │ tmpfs per sandbox
```

- *A launcher* (`launcher.py`; `command.py` is a command that it runs), one per process, has all capabilities in a mount
  and process namespace of its own, so that it can mount a file system of limited size for each sandbox, also for
  another user than root. It ends with its standard input. (`--die-with-parent` alone leaves orphans, and follows the
  *thread* that forked.)
- *Limits of all processes together* come from a watchdog that reads `/proc` (cgroups are not ours on most machines);
  the file system's size and number of files are the kernel's. A process limit is set inside the user namespace, where
  it counts one sandbox.
- *A lost sandbox is not the agent's fault*: its environment process ends, and the pool makes the call again
  elsewhere, after the episode's history.
- *Scores of packages* (`scoring/package_checks.py`): the entry of a prompt is sent with the answer instead of being
  generated again, because some generators depend on PYTHONHASHSEED.
"""

from tidemill.sandbox.open_sandbox import open_sandbox
from tidemill.sandbox.records import Finished, Limits, Sandbox, SandboxError, SandboxLostError, Snapshot

__all__ = ["Finished", "Limits", "Sandbox", "SandboxError", "SandboxLostError", "Snapshot", "open_sandbox"]
