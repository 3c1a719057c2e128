"""A recipe as documents for a Kubernetes cluster, their check, and the user's kubectl."""
