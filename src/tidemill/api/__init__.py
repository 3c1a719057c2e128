"""The Python API. Import it as `tidemill`; the modules here are private."""
