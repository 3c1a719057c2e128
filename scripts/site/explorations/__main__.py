"""`python -m scripts.site.explorations FOLDER`."""

from __future__ import annotations

from scripts.site.explorations import main

main()
