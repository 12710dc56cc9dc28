"""Checkpoints in the format of OpenGVLab's own code: config, chats, tokenizer and processor, by transformers' classes.

Nothing is written, and no code of the checkpoint is run (decision 0118): its ``conversation.py`` is read by its syntax.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from trinity.errors import ConfigError, UnsupportedModel
from trinity.errors.arguments import show
from trinity.errors.files import read_regular_file
from trinity.errors.internvl_chat import CONTEXT_TOKEN, IMAGE_ENDS, convert_config, count_image, read_chat_fields
from trinity.preprocess.checkpoint.libraries import how_to_install
from trinity.preprocess.checkpoint.video_processors import NoVideo, find_images

PROCESSOR = "InternVLProcessor"
_MODEL = "tokenizer.model"
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as the original has them
_SPLITTERS = ("InternLM2Tokenizer", "InternLM2TokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast")
# Those give the texts between special tokens to sentencepiece as they are; the first two are code of the checkpoint.
_TOKENIZERS = ("PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast")
_LIBRARIES = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}  # with their modules
_PROBES = ("a b", " a  b ", "\n a\n\nb", "<a> 1,234.5 [b]", "ﬁ ① é 你好", "\t🙂")
"""Texts on which a conversion is compared with the library of the original."""
_MOST_BYTES = 16 << 20  # of a file of tokens
CONVERSATIONS = "conversation.py"
_MOST_CODE_BYTES = 1 << 18  # the published ones have some 20 KB
_MARK = "{system_message}"
_TEMPLATE = """
{%- macro write(content) -%}
  {%- if content is string -%}{{- content -}}
  {%- else -%}
    {%- for part in content -%}
      {%- if part['type'] == 'image' -%}{{- IMAGE -}}
      {%- elif part['type'] == 'text' -%}{{- part['text'] -}}
      {%- else -%}{{- raise_exception('a message has text and images here, and no ' ~ part['type']) -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set own = messages and messages[0]['role'] == 'system' -%}
{%- set turns = messages[1:] if own else messages -%}
{{- BEFORE ~ (write(messages[0]['content']) if own else SYSTEM) ~ BEHIND -}}
{%- for message in turns -%}
  {%- if message['role'] == 'user' -%}{{- USER -}}
  {%- elif message['role'] == 'assistant' -%}{{- ASSISTANT -}}
  {%- else -%}{{- raise_exception('roles are user and assistant, and system first, not ' ~ message['role']) -}}
  {%- endif -%}
  {%- set content = write(message['content']) -%}
  {%- if content -%}{{- content ~ END -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- ASSISTANT -}}{%- endif -%}
"""  # words in capitals are a conversation's texts
_STYLE = "MPT"  # the only one of published InternVL 2 and later


# ---------------------------------------------------------------- config


def convert_fields(fields: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return a config of transformers' own type, with ids of tokens.

    Raises ``UnsupportedModel`` and ``ConfigError`` for what is not converted, and where files are missing.
    """
    converted, ids = convert_config(fields), read_token_ids(directory)
    end = find_conversation(fields, directory).end_token
    for text in (CONTEXT_TOKEN, *IMAGE_ENDS, end):
        number, count = ids.get(text), converted["text_config"].get("vocab_size")
        if number is None or type(count) is not int or not 0 <= number < count:
            raise ConfigError(
                f"the tokenizer in {str(directory)!r} names no token {show(text)} among the {show(count)} of the "
                "model: are tokenizer_config.json and added_tokens.json there, and of this checkpoint?"
            )
    ends = {**converted["text_config"], "eos_token_id": ids[end]}  # the token at which the original stops
    return {**converted, "text_config": ends, "image_token_id": ids[CONTEXT_TOKEN]}


def find_conversation(fields: Mapping[str, Any], directory: Path) -> ChatTexts:
    """Find how a checkpoint writes its chats. Raises ``ConfigError`` and ``UnsupportedModel``."""
    name, system = fields.get("template"), fields.get("system_message")
    if not isinstance(name, str):
        raise ConfigError(f"the config in {str(directory)!r} names no chat template: template is {show(name)}")
    found = read_conversation(directory, name)
    return found if not isinstance(system, str) else msgspec.structs.replace(found, system=system)


def read_token_ids(directory: Path) -> dict[str, int]:
    """Return ids by token, as ``added_tokens.json`` and ``tokenizer_config.json`` name them.

    Raises ``ConfigError`` where one of these files is broken.
    """
    described = read_json_file(directory / "tokenizer_config.json").get("added_tokens_decoder")
    found = {str(text): number for text, number in read_json_file(directory / "added_tokens.json").items()}
    for number, each in described.items() if isinstance(described, dict) else ():
        text = each.get("content") if isinstance(each, dict) else None
        if isinstance(text, str) and isinstance(number, str) and number.isdecimal() and len(number) < 10:
            found[text] = int(number)
    return {text: number for text, number in found.items() if type(number) is int}


def read_json_file(path: Path) -> dict[str, Any]:
    """Read an object of JSON; empty where there is no such file. Raises ``ConfigError`` for a broken or huge one."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_regular_file(path, most=_MOST_BYTES))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} is not valid JSON ({error}); is the checkpoint complete?") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{str(path)!r} is not an object of JSON but a {type(content).__name__}")
    return content


# ---------------------------------------------------------------- chats


class ChatTexts(msgspec.Struct, frozen=True, kw_only=True):
    """Writes chats as one text: system, and then in turn each role with its message, all closed by ``end``.

    - ``before``, ``behind``: texts around the system message.
    - ``system``: message where a chat has none of its own.
    - ``user``, ``assistant``: beginnings of their turns.
    - ``end``: end of a turn. Without spaces around it is the token that ends an output.
    """

    before: str
    behind: str
    system: str
    user: str
    assistant: str
    end: str

    @property
    def end_token(self) -> str:
        return self.end.strip()

    def make_template(self, image: str) -> str:
        """Make the chat template in transformers' language, where ``image`` stands for an image.

        A turn without text is not closed, as in the original.
        """
        texts = {
            "IMAGE": image,
            "BEFORE": self.before,
            "BEHIND": self.behind + self.end,
            "SYSTEM": self.system,
            "USER": self.user,
            "ASSISTANT": self.assistant,
            "END": self.end,
        }
        return re.sub("[A-Z]+", lambda found: _quote(texts[found[0]]), _TEMPLATE)


def _quote(text: str) -> str:
    """Write a text as a literal of Jinja, which reads the escapes that Python does."""
    return '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'


def read_conversation(directory: Path, name: str) -> ChatTexts:
    """Read the template ``name`` from the ``conversation.py`` of a checkpoint.

    Raises ``ConfigError`` where it is not there, or not written in plain values; ``UnsupportedModel`` for one that puts
    chats together in another way.
    """
    path = directory / CONVERSATIONS
    if not path.is_file():
        raise ConfigError(
            f"{str(directory)!r} has no {CONVERSATIONS}, which says how its chats are written: download it as well. "
            "It is read as text, and never run"
        )
    found = [each for each in _list_calls(path) if each.get("name") == name]
    if len(found) != 1:
        raise ConfigError(f"{str(path)!r} has {len(found)} templates of the name {show(name)} that config.json gives")
    return _check(found[0], name, path)


def _list_calls(path: Path) -> list[dict[str, Any]]:
    """List the arguments of the calls ``Conversation(...)`` of a file, those that are plain values."""
    content = read_regular_file(path, most=_MOST_CODE_BYTES)
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read ({type(error).__name__}); is it complete?") from error
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Conversation"]
    return [{word.arg: _read_value(word.value) for word in call.keywords if word.arg is not None} for call in calls]


def _read_value(node: ast.expr) -> Any:
    """Return a value that is written out; of ``SeparatorStyle.NAME`` the name; None for any other."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Tuple):
        return tuple(map(_read_value, node.elts))
    return node.attr if isinstance(node, ast.Attribute) else None


def _check(fields: dict[str, Any], name: str, path: Path) -> ChatTexts:
    if fields.get("sep_style") != _STYLE:
        raise UnsupportedModel(
            f"the chat template {show(name)} of {str(path)!r} is of the style {show(fields.get('sep_style'))}, and "
            f"{_STYLE} alone is converted"
        )
    template, system = fields.get("system_template", _MARK), fields.get("system_message", "")
    roles: Any = fields.get("roles")
    roles, end = roles if isinstance(roles, tuple) else (), fields.get("sep", "\n")
    plain = all(isinstance(each, str) for each in (*roles, template, system, end))
    if len(roles) != 2 or not plain or not end.strip():
        raise ConfigError(f"the template {show(name)} of {str(path)!r} is not written in plain texts; is it its own?")
    before, mark, behind = template.partition(_MARK)
    if not mark or set("{}").intersection(before + behind):
        raise ConfigError(f"the system_template of {show(name)} in {str(path)!r} has {_MARK} once, and no other braces")
    return ChatTexts(before=before, behind=behind, system=system, user=roles[0], assistant=roles[1], end=end)


# ---------------------------------------------------------------- tokenizer and processor


def load_internvl_tokenizer(directory: Path) -> Any:
    """Load the tokenizer as one of transformers', with a chat template of the original's conversation.

    Raises ``ConfigError`` and ``UnsupportedModel``, and what transformers raises on malformed files.
    """
    import transformers

    fields = read_json_file(directory / "tokenizer_config.json")
    named = _check_class(fields, directory)
    further = dict(zip(("start_image_token", "end_image_token"), IMAGE_ENDS, strict=True))
    # No token of a video: its name stands for what is there already, or a token would be added behind the model's.
    further |= dict.fromkeys(("context_image_token", "video_token"), CONTEXT_TOKEN)
    split, more = named in _SPLITTERS, dict[str, Any]()
    if split:
        _check_libraries(directory)
        named, more = "PreTrainedTokenizerFast", {"add_bos_token": fields.get("add_bos_token", True)}
    load: Any = getattr(transformers, named).from_pretrained
    found = load(directory, local_files_only=True, trust_remote_code=False, extra_special_tokens=further, **more)
    if split:
        _compare(found, directory)
    template = find_conversation(read_chat_fields(directory), directory).make_template(f"{CONTEXT_TOKEN}\n")
    found.chat_template = template
    return found


def _check_class(fields: dict[str, Any], directory: Path) -> str:
    named = fields.get("tokenizer_class")
    if named not in (*_SPLITTERS, *_TOKENIZERS):
        raise UnsupportedModel(
            f"the tokenizer of {str(directory)!r} is of the class {show(named)}: {', '.join(_SPLITTERS)}, "
            f"{', '.join(_TOKENIZERS)} are converted"
        )
    if fields.get("legacy") is False and named in _SPLITTERS:
        raise UnsupportedModel(
            f"the tokenizer of {str(directory)!r} says legacy=false: its class treats a space at the beginning of a "
            "text apart, which is not converted"
        )
    return str(named)


def _check_libraries(directory: Path) -> None:
    if not (directory / _MODEL).is_file():
        raise ConfigError(f"{str(directory)!r} has no {_MODEL}, of which its tokenizer is made; is it complete?")
    lacking = [name for name, module in _LIBRARIES.items() if not _is_here(module)]
    if lacking:
        raise ConfigError(
            f"{str(directory / _MODEL)!r} is read with {' and '.join(lacking)}, not installed here: "
            f"{how_to_install(' '.join(lacking))}"
        )


def _is_here(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package above it
        return False


def _compare(found: Any, directory: Path) -> None:
    """Compare a converted model of sentencepiece with the library's. Raises ``UnsupportedModel`` where it differs."""
    from sentencepiece import SentencePieceProcessor

    own: Any = SentencePieceProcessor(model_file=str(directory / _MODEL))
    for text in _PROBES:
        if own.encode(text) != found(text, add_special_tokens=False)["input_ids"]:
            raise UnsupportedModel(
                f"{str(directory / _MODEL)!r} makes other tokens of {text!r} than transformers' conversion of it, "
                "which knows no spaces in front, and no text that is rewritten first"
            )


def make_internvl_processor(kind: Any, directory: Path, tokenizer: Any) -> Any:
    """Make the processor that cuts images as the original's ``load_image``, of a class ``kind`` of transformers."""
    side, most, tokens = count_image(read_chat_fields(directory))
    images = find_images("GotOcr2ImageProcessorPil", "pil")(
        size={"height": side, "width": side},
        image_mean=list(_MEAN),
        image_std=list(_DEVIATION),
        crop_to_patches=True,
        do_convert_rgb=False,  # images come as RGB, without the colour that their files call transparent
        min_patches=1,
        max_patches=most,
    )
    made = kind(
        image_processor=images,
        tokenizer=tokenizer,
        video_processor=NoVideo(images),
        image_seq_length=tokens,
        chat_template=tokenizer.chat_template,
    )
    made.video_token = None  # the original has none
    return made
