"""A recipe as a job where people have machines: Kubernetes, Slurm, SkyPilot, OSMO."""
