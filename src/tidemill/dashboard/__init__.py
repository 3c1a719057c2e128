"""`tidemill watch`: serves the pages of runs while they happen. What the pages show is in `telemetry/report`.

The server only reads the files of runs. It writes requests to RUN/control and verdicts to RUN/checks, nothing else.
A client asks for runs by the keys of `telemetry/run_list.py`, so none of its texts becomes a path (`runs.py`). Files
are read on threads, one at a time for each run, and followed only while a client listens (`stream.py`).
"""
