"""A recipe as two jobs of Slurm: a reserved one, and an array of rollout workers that may be preempted."""
