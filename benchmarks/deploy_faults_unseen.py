"""Defects of Kubernetes documents, written by somebody who has not read src/tidemill/deploy/check.

A row is a name and a mutation: a function that changes the documents in place (those of
tests/data/deploy/rendered.yaml, or of any rendering) and returns the changed field as the check writes it, such as
"spec.rayClusterSpec.workerGroupSpecs[0].replicas". `benchmarks.planted_deploy_faults` has helpers: `put`, `drop`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

UNSEEN: list[tuple[str, Callable[[list[dict[str, Any]]], str]]] = []
