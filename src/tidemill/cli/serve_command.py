"""`tidemill serve`: a model behind an HTTP API in the form of OpenAI's."""

from __future__ import annotations

import asyncio

from tidemill.cli.arguments import Checkpoint, Items, given_model, spec_for
from tidemill.cli.arguments import dry_run as show_dry_run
from tidemill.cli.output import DryRun, Json, Result, note
from tidemill.config.load import split_arguments
from tidemill.core.errors import UserError
from tidemill.core.packages import install_command


def serve(*items: Items, checkpoint: Checkpoint = None, dry_run: DryRun = False, json: Json = False) -> Result:
    """Serve a model or a checkpoint at /v1/chat/completions, /v1/completions and /v1/responses, on this machine or on
    the workers of [pool]. Ctrl-C ends it when the requests that are being answered are finished."""
    with given_model(checkpoint) as model:
        from tidemill.jobs.serving import serving_spec

        template_given = any(key == ("model", "chat_template") for key, _ in split_arguments(items).assignments)
        spec = serving_spec(spec_for(items, model, purpose="read"), model, template_given=template_given)
        if dry_run:
            from tidemill.runtime.memory_check import memory_remarks

            return show_dry_run(spec, purpose="generate", notes=memory_remarks(spec, "serve"))
        try:
            from tidemill.jobs.gateway import run_gateway
        except ImportError as error:
            what = f"the gateway needs starlette and uvicorn ({error})"
            raise UserError(what, where="tidemill serve", hint=install_command("gateway")) from error
        served = asyncio.run(run_gateway(spec, progress=note))
    return Result(data=served, text=f"{served['requests']} requests were answered")
