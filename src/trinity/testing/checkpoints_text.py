"""Tokenizers and chat templates of the small checkpoints, trained offline on a paragraph of this file."""

from __future__ import annotations

from typing import Any

_LINES = (
    "What is in this picture? A brown dog runs over the wet grass behind two children.",
    "Describe the image. The small red boat lies on the shore, and the sky above it is grey.",
    "How many people are there? There are three people and one bicycle near the old bridge.",
    "Compare the first picture with the second one, then answer in one short sentence.",
    "A model reads the prompt once, keeps what it has read, and writes one word after another.",
    "user: which colour is the house? assistant: the house is white with a green door.",
    "Numbers such as 0, 1, 2, 3, 17, 42, 256 and 1024 are split into digits by this tokenizer.",
)
_VOCABULARY = 352  # 256 bytes and about a hundred merges; the special tokens come after them


def build_tokenizer(
    *, bos: str | None, eos: str, pad: str, extra: dict[str, str], plain: tuple[str, ...] = (), template: str | None
) -> Any:
    """Build a byte-level BPE tokenizer with ``extra`` named special tokens (``{"image_token": "<image>"}``).

    With ``bos`` every tokenised text starts with it, as in Llama's. ``plain`` are further added tokens without a name.
    """
    from transformers import PreTrainedTokenizerFast

    backend = _train()
    named = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    backend.add_special_tokens(list(dict.fromkeys([*filter(None, named.values()), *extra.values(), *plain])))
    if bos is not None:
        _prepend(backend, bos)
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(
        tokenizer_object=backend,
        extra_special_tokens=extra,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in named.items() if token is not None},
    )
    tokenizer.chat_template = template
    return tokenizer


def _train() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(_LINES, trainer)
    return backend


def _prepend(backend: Any, bos: str) -> None:
    from tokenizers import processors

    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, backend.token_to_id(bos))]
    )


def chat_template(
    *, start: str = "", role: str, end: str, image: str = "", video: str = "", audio: str = "", answer: str
) -> str:
    """Build a jinja chat template: ``start``, then per message ``role`` (may use message['role']), parts, ``end``."""
    parts = (
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}"
        + image
        + "{% elif part['type'] == 'video' %}"
        + video
        + (audio and "{% elif part['type'] == 'audio' %}" + audio)
        + "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
        "{% endfor %}{% endif %}"
    )
    body = "{% for message in messages %}" + role + parts + end + "{% endfor %}"
    return start + body + "{% if add_generation_prompt %}" + answer + "{% endif %}"


CHATML = {
    "role": "<|im_start|>{{ message['role'] }}\n",
    "end": "<|im_end|>\n",
    "answer": "<|im_start|>assistant\n",
}
USER_ASSISTANT = {
    "role": "{{ message['role'] | upper }}: ",
    "end": "\n",
    "answer": "ASSISTANT: ",
}
