"""What environments of other packages need besides the package: a server from PyPI, and a list of words."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

WORDS = "apple river stone house light music green paper table chair bread water plant horse smile"
CALCULATOR = "mcp-server-calculator==0.2.1"


def calculator(folder: Path) -> dict[str, str]:
    """Parameters of an MCP server, which is installed in a virtual environment of its own."""
    venv.create(folder / "server", with_pip=True)
    server_python = str(folder / "server" / "bin" / "python")
    subprocess.run([server_python, "-m", "pip", "install", "-q", CALCULATOR], check=True, timeout=300)
    return {"command": "python -m mcp_server_calculator", "server_python": server_python}


def words(folder: Path) -> str:
    """A folder with the word list that Hangman looks up."""
    corpus = folder / "words" / "nltk_data" / "corpora" / "words"
    corpus.mkdir(parents=True, mode=0o755)
    for name in ("en", "en-basic", "README"):
        (corpus / name).write_text("\n".join(WORDS.split()) + "\n")
    return str(folder / "words")
