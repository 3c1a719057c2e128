"""A small Kubernetes with the operator KubeRay, for real kubectl, Ray and Ray's autoscaler. Linux, as root."""

from tests.doubles.kubernetes.cluster import Kubernetes, unavailable

__all__ = ["Kubernetes", "unavailable"]
