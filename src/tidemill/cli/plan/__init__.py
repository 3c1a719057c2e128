"""`tidemill plan ...`: what a run needs and costs, before it is paid for. One file per verb."""
