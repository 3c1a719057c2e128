"""The controller: the loop, the ledger and its policies. Plain asyncio over core protocols; no torch, no threads.

At lag 0 samples that lost their worker wait with those that have not begun, longest expected first. Putting the
evicted ones first was measured with `benchmarks.goodput --orders` (two markets, three seeds): the step time differs
by less than half a percent either way, half of the groups are complete 0-3 % earlier, and as many tokens are held in
unfinished samples, within 6 %. So there is one order.

At lag 0 each version has one batch, and no sample is in flight during the optimizer step. With a larger lag, samples
outlive a batch and a publish; the reserved engine then has its own copy of the weights.

- A batch consists of the step's *planned* prompts or of the groups that *finish first*. In the second case each group
  has a last step that may learn from it (the version of its oldest token + lag + 1). A group is taken only if all
  remaining groups still fit into the batches before their last steps. The limit is checked again where a group
  reaches the trainer.
- `schedule.fresh_fraction` limits how much of a batch may be older; it sets the overcommit. Partial refresh is not a
  separate mode.
- At a publish a sample in flight continues under the new weights, finishes under the old ones, or restarts
  (`schedule.unfinished`). A group that would become too old is waited for, restarted or dropped
  (`schedule.on_lag_limit`). Discarded tokens are counted.
- With the first two choices timing decides at which token the version changes, so an eviction beyond lag 0 can change
  the result. With `unfinished = "wait"` the publish waits until all samples in flight are finished and scored: with
  the default overcommit, version *s - 1 - lag* generates all of step *s*, independent of timing. A larger lag then
  saves no more time than lag 1 (`benchmarks.pinned_versions`). Two alternatives were rejected. Switching at fixed
  token positions also waits at every publish (up to 1.3 times as long at lag 2 in simulation) and recomputes
  prefixes. Keeping lag + 1 versions in every engine multiplies weight memory and forward passes.
- A journal entry is filed under the step its groups were planned for, so a checkpoint makes whole *rounds* of entries
  superfluous. The composition of each batch is journalled, so a resumed run repeats it.
- An evaluation uses all workers: samples in flight are recalled and continue afterwards.

- **A crash is not an eviction.** It ends the lease and is counted separately. A sample may have caused it, so the
  attempt counts: a sample that fails three times ends the run with its error.
- **A sample stalls** when evictions end three attempts in a row without a new token: machines live shorter than its
  recomputation. Queued samples and moves for balance do not count. Then only the reserved engine generates it
  (`dispatcher.py`). Without one (`fleet.seeding = false`) a guard ends the run, once an attempt took half the
  eviction interval; a request to a server ends after `gateway.stall_s`. The count is not journalled: a resumed run
  counts again.
- **A lost Ray head** ends the run after 20 s, a lost trainer at once. Clean-up waits at most 5 s.
- **A run that was asked to stop** waits at most 30 s for what only the trainer can finish; the event log names the
  skipped work. The resumed run learns it again from the journal.

The ledger keeps the mean reward of every batch, so that an adaptive overcommit decides after a restart as it would
have without one. Every checkpoint leaves an entry that is never pruned; if checkpoints are lost, the ledger starts
again with exactly the groups that the remaining weights have not learned from.
"""
