"""Programs of the user that reach a target, such as kubectl or sbatch, with their own configuration and credentials."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tidemill.core.errors import UserError

COMMAND_S = 90.0
Meaning = tuple[tuple[str, ...], str, str]
"""Words of a program's messages, what they mean, and a hint."""


class ProgramFailed(UserError):
    """A program ended with a code that is no success; `output` is what it printed about it."""

    output = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program in PATH.

    Attributes:
        install: where to get it, or what to do without.
        look_at: hint for a program that does not end.
        meanings: of its messages.
        otherwise: hint for other messages.
    """

    name: str
    install: str
    look_at: str
    meanings: Sequence[Meaning] = ()
    otherwise: str = ""

    def run(
        self,
        arguments: Sequence[str],
        text: str = "",
        *,
        verb: str = "",
        success: Sequence[int] = (0,),
        deadline_s: float = 0.0,
    ) -> str:
        """Standard output.

        Args:
            text: standard input.
            verb: for messages.
            success: exit codes that are no failure.
            deadline_s: 0: COMMAND_S.

        Raises:
            UserError: the program is missing or does not end in time; ProgramFailed: it fails.
        """
        deadline_s, command = deadline_s or COMMAND_S, [self.name, *arguments]
        try:
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=deadline_s, check=False)
        except FileNotFoundError as error:
            raise self.missing() from error
        except subprocess.TimeoutExpired as error:
            what = f"{self.name} {verb} did not end within {deadline_s:g} s".replace("  ", " ")
            raise UserError(what, hint=self.look_at) from error
        if done.returncode not in success:
            message = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
            failed = self.failure(verb, message)
            failed.output = message
            raise failed
        return done.stdout

    def pass_on(self, arguments: Sequence[str]) -> int:
        """Let the program print, until it ends or the user interrupts it; returns its exit code."""
        try:
            return subprocess.run([self.name, *arguments], stdin=subprocess.DEVNULL, check=False).returncode
        except FileNotFoundError as error:
            raise self.missing() from error

    def failure(self, verb: str, message: str) -> ProgramFailed:
        """What a message means."""
        where, line = f"{self.name} {verb}".strip(), message.splitlines()[-1].removeprefix("error: ")
        for words, what, hint in self.meanings:
            if any(word.lower() in message.lower() for word in words):
                return ProgramFailed(f"{what}: {line}", where=where, hint=hint)
        return ProgramFailed(message, where=where, hint=self.otherwise)

    def missing(self) -> UserError:
        return UserError(f"{self.name} is not installed, or not in PATH", hint=self.install)


def refuse_unset(variables: Iterable[str]) -> None:
    """Raises UserError: a secret is missing in the environment, from which the target's program takes it."""
    if unset := next((name for name in variables if name not in os.environ), ""):
        what = "is not set here; the job gets secrets from the environment of this command"
        raise UserError(what, where=f"deploy.secrets.{unset}", hint=f"set it where you run this: export {unset}=...")
