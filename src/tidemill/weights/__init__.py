"""Published weights as immutable versions: how they are written, how they travel, how a puller knows it got them.

A publish writes a snapshot, a lossless delta to the previous version (`weights/delta.py`) and, last, a manifest with
the checksums of both: an interrupted publish is invisible. Workers pull the smaller of the two, verify every tensor,
and swap between two tokens. After each swap a worker computes the logprobs of a probe; a worker that differs from the
publisher by more than `fleet.probe_tolerance` is quarantined. The newest two versions are kept, plus those that a
reader has pinned. In one process, workers compute on the snapshot itself: no copy, no delta.

A version is (number, digest). The digest is a hash of the weights' bytes, so weights that are recomputed after a
restart have the same digest exactly when they are equal. With LoRA a version contains only the adapter; the base is
pulled once.

A delta consists of parts, one for each million elements, whose lengths are in the manifest: several threads encode
and apply them, and the bytes are the same with any number of threads. Transports differ in how a blob travels only
(`weights/snapshot.py: Transport`). With `shm`, and for workers of several GPUs, one worker of a machine writes a
version to a file in shared memory, which becomes visible when it is verified (`weights/node_folder.py`). Who uses a
file holds a lock on it; the kernel releases it when the process ends, so that a file is deleted by whoever finds it
unused, also after a SIGKILL of all processes. Every rank of a sharded trainer publishes its rows, which are such a file
each; nobody puts them together but the engine, tensor by tensor, and only if every rank has the same version.

A reserved engine is always there, so it needs no snapshots. If it has weights of its own it can get a version tensor
by tensor (`models/weight_stream.py`, `rollout/weight_sources.py`): from the trainer in its process (`placement.engine =
"colocated"`), or by broadcast in a process group of two (`weights.lane`, `runtime/cluster/lane.py`). The driver
starts both ends of a broadcast in one call, so that every rank of a sharded trainer meets its collective operations
in the same order. Checksums of all tensors follow the last one; the probe is compared as for workers. A transfer that
fails leaves an engine without usable weights, so the run ends and is resumed. Preemptible workers are in no process
group: one that vanishes would stop the others.

*Colocated* (`runtime/colocated.py`): groups wait until their batch is complete, then the engine sleeps, and it wakes
with the next version: weights, load, caches. No sample is in flight at that moment, because the lag is 0. With shards
every rank has an engine, and the controller sees one worker (`rollout/worker_group.py`), in which a prompt's samples
stay together. The whole weights exist only while the engines are awake.
"""
