"""Small tokenizers with chat templates. The templates are reduced to what distinguishes the formats."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from tidemill.models.codec import TextCodec

TEXT = (
    "What is 12 times 34? It is 408, and the answer of the tool is right. assistant user system tool name arguments "
    'parameters response call think <tool_call> {"name": "search", "arguments": {"query": "tides"}} </tool_call> '
    "calculate expression function type string Environment: ipython im_start im_end eot_id header_id\n\n"
) * 3

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe helpful<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As SmolLM2's: no tools."""
_HERMES_SYSTEM = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "<tools>{% for t in tools %}{{ '\n' + t | tojson }}{% endfor %}{{ '\n' }}</tools>\n"
    "write <tool_call></tool_call><|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
)
_HERMES_TOOL = (
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN2_5 = (
    _HERMES_SYSTEM + "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n" + _HERMES_TOOL
)
QWEN3 = (
    _HERMES_SYSTEM + "{% set ns = namespace(open=true, last=messages | length - 1) %}{% for m in messages[::-1] %}"
    "{% if ns.open and m.role == 'user' and not (m.content.startswith('<tool_response>')"
    " and m.content.endswith('</tool_response>')) %}"
    "{% set ns.open = false %}{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}{% set said = m.content %}{% set thought = '' %}"
    "{% if '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "<think>\n{{ thought.strip('\n') }}\n</think>\n\n{{ said.lstrip('\n') }}"
    "{% else %}{{ said }}{% endif %}<|im_end|>\n" + _HERMES_TOOL
)
"""Thinking before the user's last message is removed; tool results do not count as the user's."""
LLAMA3 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "<|start_header_id|>system<|end_header_id|>\n\n{% if tools %}Environment: ipython\n{% endif %}"
    "{{ system }}<|eot_id|>"
    "{% if tools %}<|start_header_id|>user<|end_header_id|>\n\n"
    'Respond in the format {"name": function name, "parameters": dictionary}.\n\n'
    "{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}{{ messages[0].content | trim }}<|eot_id|>"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content | tojson }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""Texts are trimmed, and results are JSON."""
CHAT_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
LLAMA_SPECIAL = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"]
STOPS = {"<|im_end|>", "<|endoftext|>", "<|eot_id|>"}


def chat_codec(template: str, *, added: bool = True, in_vocabulary: bool = False) -> TextCodec:
    """A byte-level tokenizer with few merges.

    Args:
        added: thinking and calls have tokens, which are not special.
        in_vocabulary: special tokens are part of the model's vocabulary, as SmolLM2's.
    """
    llama = "<|eot_id|>" in template
    special = LLAMA_SPECIAL if llama else CHAT_SPECIAL
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=420,
        initial_alphabet=ByteLevel.alphabet(),
        special_tokens=special if in_vocabulary else [],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    tokenizer.add_tokens([AddedToken("  ", normalized=False, special=False)])  # of which texts keep the token
    if added:
        tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in CHAT_ADDED])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special[0],
        eos_token=special[1] if llama else special[2],
        additional_special_tokens=special,
    )
    fast.chat_template = template
    return TextCodec(fast, [int(tokenizer.token_to_id(text) or 0) for text in STOPS & set(special)])


def token_id(codec: TextCodec, token: str) -> int:
    return codec.tokenizer.get_vocab()[token]
