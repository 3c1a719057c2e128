"""Detects reward hacking: the reward rises while true quality does not.

```
 batch ──▶ chosen by hash ──▶ gold reward ──▶ pairs (proxy, gold) ──▶ gain test ─────┐
 canary evaluation ──────────────────────────▶ pairs ────────────────▶ CUSUM of gap ──┼──▶ alarm, onset
 metrics of the step ────────────────────────▶ witnesses (explain, never decide alone) ┘
```
The *proxy* is the reward that is trained on, *gold* a second opinion (`role = "gold"`) that is not. Everything here is a
pure function of pairs and metrics in order of their steps, so that a resumed run reaches the same decision.
"""
