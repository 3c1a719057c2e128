"""Robots: tasks, worlds and chunks of simulation, without torch.

```
 task (what is observed, rewarded, controlled) ──┐
 engine (MuJoCo or Newton: physics of N worlds) ─┼─▶ Simulation ── run(weights, ChunkRequest) ─▶ ChunkAnswer
 randomisation (parameters of each episode) ─────┘
```
All is vectorised over the worlds of a shard: arrays are [N, ...]. A simulation keeps nothing between two chunks that is
not in the state of the answer.
"""
