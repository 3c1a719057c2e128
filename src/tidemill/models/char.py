"""A character-level Llama built from a seed: small enough to train in seconds, for tests and benchmarks."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tidemill.config.model import CharModelConfig
from tidemill.models.char_shape import EOS, PAD, SPECIAL_TOKENS, intermediate_size
from tidemill.models.quiet import quiet

# Tied to the output head: small, so that an untrained model explores; of 0.02 to 0.09, learns addition fastest at 0.05.
EMBEDDING_STD = 0.05


def build_char_model(config: CharModelConfig, folder: Path) -> None:
    """Write weights, configuration and tokenizer into an empty folder, as `from_pretrained` reads them."""
    with quiet():
        _model(config).save_pretrained(folder)
        _tokenizer(config).save_pretrained(folder)


def _model(config: CharModelConfig) -> LlamaForCausalLM:
    llama = LlamaConfig(
        vocab_size=len(config.alphabet) + len(SPECIAL_TOKENS),
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size(config.hidden_size),
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=config.context,
        tie_word_embeddings=True,
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index(EOS),
        initializer_range=EMBEDDING_STD,
    )
    with torch.random.fork_rng(devices=[]):  # building draws numbers, all of them overwritten below
        model = LlamaForCausalLM(llama)
    _initialise(model, config)
    return model


def _initialise(model: LlamaForCausalLM, config: CharModelConfig) -> None:
    """Draw every matrix from its own stream, so that the bytes depend on the configuration alone:
    numpy's generator gives the same numbers on every processor, torch's vectorised one need not.

    Matrices keep the variance of their input (1/fan-in); those that write to the residual stream are scaled down by
    the square root of how many do (as in GPT-2).
    """
    writes = (2 * config.layers) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue  # norms start at one
            if "embed_tokens" in name:
                std = EMBEDDING_STD
            else:
                std = parameter.shape[1] ** -0.5 * (
                    writes if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                )
            stream = hashlib.blake2b(f"{config.seed}:{name}".encode(), digest_size=7).digest()
            generator = np.random.Generator(np.random.PCG64(int.from_bytes(stream, "little")))
            values = generator.standard_normal(tuple(parameter.shape), dtype=np.float32)
            parameter.copy_(torch.from_numpy(values) * std)


def _tokenizer(config: CharModelConfig) -> PreTrainedTokenizerFast:
    """One token per character. A character outside the alphabet cannot be encoded (there is no unknown token)."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *config.alphabet))}
    tokenizer = Tokenizer(WordLevel(vocabulary))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=config.context,
        clean_up_tokenization_spaces=False,
    )
