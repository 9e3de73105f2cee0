"""A small real tokenizer, trained on the spot: byte-level BPE, cut as the qwen3_5 family cuts."""

from __future__ import annotations

import functools

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from lazyio.engine.text.gguf_vocabulary import CUTS
from lazyio.errors import Unsupported

#: Its tokens, special ones included.
TOKENS = 4096
#: How GGUF calls the cut.
PRE = "qwen35"
END, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def train_tokenizer() -> Tokenizer:
    """Train it on English text that comes with Python; it is always the same one, not to be changed.

    Raises Unsupported where an installation of Python leaves that text out.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise Unsupported(
            "this installation of Python lacks pydoc_data, whose text the tokenizer is trained on; take a whole one"
        ) from None
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(CUTS[PRE]), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [END, TURN_START, TURN_END]
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS - len(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((topics[name] for name in sorted(topics)), trainer)
    tokenizer.add_special_tokens(special)
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that it has."""
    number = tokenizer.token_to_id(token)
    assert number is not None, f"the tokenizer has no {token}"
    return number
