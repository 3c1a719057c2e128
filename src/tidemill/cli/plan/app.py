"""The group of verbs; each is imported when it is called."""

from __future__ import annotations

from cyclopts import App

PLANS = {
    "memory": ("tidemill.cli.plan.memory:memory", "Bytes per role and per GPU; how many GPUs, and why not fewer."),
    "weights": (
        "tidemill.cli.plan.weights:weights",
        "How long new weights travel, and whether it hides behind a step.",
    ),
    "overlap": ("tidemill.cli.plan.overlap:overlap", "How busy the trainer is: in sequence, overlapped, resized."),
    "placement": (
        "tidemill.cli.plan.placement:placement",
        "Where to train and to generate, for the least money or time.",
    ),
    "staleness": (
        "tidemill.cli.plan.staleness:staleness",
        "The best lag by progress per wall-clock time, from a table or from runs.",
    ),
    "run": ("tidemill.cli.plan.run:run", "How long a recipe takes, what it costs and what memory it needs."),
    "catalog": ("tidemill.cli.plan.catalog:catalog", "The GPUs and machines that can be planned with."),
}

app = App(
    name="plan",
    help="What a run needs and costs, before it is paid for. --explain derives every number.",
    help_epilogue="",
)
for order, (name, (target, words)) in enumerate(PLANS.items()):
    app.command(target, name=name, help=words, sort_key=order, help_epilogue="")
