"""An HTTP front in the form of OpenAI's API: requests, answers, limits. What generates is behind `backend.Served`.

`tidemill serve` is a run without a trainer's loop: `jobs/serving.py` opens the same backend, fleet and collector,
and every request is a group of one sample with its own sampling parameters (`InFlight.open_alone`). What makes a
sample survive an eviction makes a request survive it. `TokenFeed` hands each report's new tokens to those who wait
for them; `gateway/texts.py` turns them into text without halves of characters, stop strings or calls, which
`gateway/calls.py` reads: what is no valid call stays text (in training it is the agent's mistake). A client that
leaves closes its generator, which closes the group and aborts its samples. With a seed the id of a sample is a
function of seed and prompt, so equal requests draw equal noise.

*Sessions* turn this around (`gateway/sessions.py`; `matching.py` finds which tokens a request adds): the client is the
environment of a planned sample, and acts first (`AgentLimits.opens`). A request is an `Observation` whose `state_key`
is the request's digest, so the ledger that restores a sample also knows which answer a repeated request had. Keys are
derived from a secret of the run and the sample's id; what clients do beside their requests is in `sessions.jsonl`. Only
the environment ends a sample: at its token limit a client may still give a reward. Several answers to one request are
turns that each start a branch with the same context; the observation after them names the turns that are not trained
(`Observation.unchosen`), so the choice is in the ledger too. `matching.py` reads a session's tokens, turns
and branches from the controller's `Episode`; the gateway keeps no token of its own that a restart would lose. A
resumed run comes to its samples one after the other: until then the keys of earlier sessions get status 503, which
SDKs repeat.
"""
