"""What is wrong with the inputs of stages, known before the first of them runs."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.config.faults import ConfigError, Fault
from tidemill.config.pipeline import StageSpec
from tidemill.core.errors import UserError
from tidemill.pipeline.contents import fault_of_stage


def check_inputs(due: Sequence[StageSpec], stages: Sequence[StageSpec]) -> None:
    """
    Args:
        due: the stages that are to run; what several of them share is looked at once.
        stages: all of them.

    Raises:
        ConfigError: the first fault of each input, a line each.
    """
    if not due:
        return  # what follows takes seconds to import
    from tidemill.pipeline.foreseen import checks_of
    from tidemill.pipeline.known import KnownModels

    models, made, faults = KnownModels(stages), set[str](), list[Fault]()
    for stage in due:
        for check in checks_of(stage, models):
            if (name := repr(check.of)) in made:
                continue
            made.add(name)
            try:
                check.call()
            except UserError as error:
                faults.append(fault_of_stage(stage, error))
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))
