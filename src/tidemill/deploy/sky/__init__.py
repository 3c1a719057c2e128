"""SkyPilot as a target of `tidemill deploy`."""
