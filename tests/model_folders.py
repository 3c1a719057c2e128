"""Complete model folders for tests: the small shapes of `model_shapes` with a tokenizer."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.model_shapes import VOCABULARY
from tidemill.models.auto import quiet


def small_tokenizer() -> PreTrainedTokenizerFast:
    """One token per ASCII character; <pad> and <eos> replace the first two control characters."""
    vocabulary = {"<pad>": 0, "<eos>": 1} | {chr(code): code for code in range(2, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(vocabulary))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def save_folder(model: PreTrainedModel, folder: Path, *, shard_size: str = "5GB") -> Path:
    """Write model and tokenizer; returns the folder."""
    with quiet():
        model.save_pretrained(folder, max_shard_size=shard_size)
        small_tokenizer().save_pretrained(folder)
    return folder
