"""User functions that extend Tidemill: finding, identifying, checking and calling them.

`registry.py` resolves the text by which a configuration names a function, so that the rest of the code does not know
where it is from, and a run of the API is an ordinary run with a `config.toml`; `runtime/extension_checks.py` stores its
identity (`identity.py`) in the manifest and refuses another one. Functions are called by argument name
(`signature.py`), so that arguments can be added without breaking one. Advantages and losses get per-sample and
per-token tensors only, never logits, so that another engine or a sharded trainer does not change them. A curriculum's
choices and rewards are stored by prompt id before they are used (`data/curriculum.py`); it sees the rewards of steps
that are certainly committed at the policy lag, so that timing does not matter. Callbacks wrap the telemetry
(`jobs/callbacks.py`): the loop does not know of them.

`api/session.py` runs a job in the calling thread, or in another one where an event loop runs (a notebook). The first
interrupt asks for a checkpoint. One job at a time, because torch's threads and the compute thread belong to the
process.
"""
