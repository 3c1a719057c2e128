"""The documentation site: generated pages, checks of the pages, and the build."""
