"""Offline check of Kubernetes documents.

```
 crds.py    schemas: the cluster's CRDs, core kinds ─┐
 rules.py   rules.toml: pods and operators ──────────┼─▶ documents.py ─▶ findings: document, field, what, hint
 lints.py   names, labels, quantities, references ───┘
```
"""
