"""Where preemptible workers come from: leases, the timetables that play them, capacity traces, eviction notices."""
