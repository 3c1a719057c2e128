"""`tidemill plan run`: forecasts of a recipe on this machine or on a described cluster, by simulation."""
