"""Training: the policy's step, its optimizer and its checkpoints.

With `trainer.shards = N` the trainer is N actors (`runtime/cluster/ray_trainer.py`), called together
(`runtime/cluster/rank_group.py`),
and FSDP2 keeps N-ths of the rows of every parameter, gradient and moment in each (`trainer/sharding.py`). Everything
that knows about ranks takes a `Ranks` (`models/ranks.py`); the one of a trainer in one process is the identity.

- *No rank decides anything.* Every rank is given every group and packs the same microbatches; they run in rounds, one
  on each rank, and the last round of a minibatch is filled with a microbatch of weight 0. Sums that decide something
  (gradient norm, `kl_stop`), and metrics, are gathered and added by every rank, so all ranks have the same bits. FSDP
  is set to add gradients, not to average them.
- *Weights by rows.* A digest adds the hashes of rows, so it does not depend on N (`models/weights_digest.py`). A
  checkpoint's moments are files of row ranges with their place as metadata; its weights are the usual Hugging Face
  file, written tensor by tensor by the first rank. Any number of ranks restores either. (Row ranges of the weights as
  well would double the size of a checkpoint, which the next stage and `from_pretrained` read as a model folder.)
- *Each rank publishes its rows* under the version's name, with its own manifest, deltas and checksums. A worker pulls
  the same version from all ranks and puts them together (`runtime/publishers.py`, `weights/puller.py`); after its
  start no rank holds the whole model. The reserved engine is therefore a process of its own, or colocated with every
  rank. At its start every rank loads the whole model into host memory, because the check of its packed forward pass
  needs one, and keeps its rows.
- *Supervised stages* run their whole loop on every rank; the process that started them repeats the telemetry of the
  first one (`runtime/cluster/ray_supervised.py`).
- *A lost or late rank ends the group*, and the run resumes from its checkpoint; the error names the rank that is
  late, not those that wait for it. Ranks meet at a file beside the checkpoints. The fault simulation drives the same
  classes over one to three ranks that die, hang, fail or lag in any call (`tests/fault_simulation/ranks.py`).
"""
