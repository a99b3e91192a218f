"""What makes an image or a sound a part of a tiny model's prompt: a processor, and tokens that stand in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["IMAGE_SIZE", "NUM_IMAGE_TOKENS", "PATCH_SIZE", "PROCESSORS", "SOUND"]

# An image becomes 16 tokens, or 64 where it is made larger (PaddleOCR).
IMAGE_SIZE, PATCH_SIZE, NUM_IMAGE_TOKENS = 56, 14, 16
SIDES = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
# Each part stands where it was said, and nothing is behind the last one.
IN_PLACE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<|IMAGE_START|><|IMAGE_PLACEHOLDER|>{% endif %}"
    "{% endfor %}{% endfor %}"
)
# What a feature extractor makes of half a minute of sound, which is what vLLM wants.
SOUND: dict[str, Any] = {"feature_size": 16, "chunk_length": 30}


def tokenizer(folder: Path, **named: str) -> Any:
    """The model's, with special tokens behind the last one, in this order."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder, extra_special_tokens=named)


def blip2(folder: Path) -> Any:
    import transformers

    # Adds its token itself.
    images = transformers.BlipImageProcessorPil(size=SIDES)
    return transformers.Blip2Processor(images, tokenizer(folder), num_query_tokens=NUM_IMAGE_TOKENS)


def paddle_ocr(folder: Path) -> Any:
    import transformers

    tokens = tokenizer(folder, image_token="<|IMAGE_PLACEHOLDER|>", start="<|IMAGE_START|>", end="<|IMAGE_END|>")
    num_pixels = (4 * IMAGE_SIZE) ** 2
    images = transformers.PaddleOCRVLImageProcessorPil(min_pixels=num_pixels, max_pixels=num_pixels)
    return transformers.PaddleOCRVLProcessor(images, tokens, IN_PLACE)


def qwen2_audio(folder: Path) -> Any:
    import transformers

    tokens = tokenizer(folder, audio_token="<|AUDIO|>", start="<|audio_bos|>", end="<|audio_eos|>")
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return transformers.Qwen2AudioProcessor(transformers.WhisperFeatureExtractor(**SOUND), tokens, template)


def whisper(folder: Path) -> Any:
    import transformers

    return transformers.WhisperProcessor(transformers.WhisperFeatureExtractor(**SOUND), tokenizer(folder))


PROCESSORS: Mapping[str, Callable[[Path], Any]] = {
    "Blip2": blip2,
    "PaddleOCRVL": paddle_ocr,
    "Qwen2Audio": qwen2_audio,
    "Whisper": whisper,
}
"""By the family of a model that takes more than text, all of whose names end in `ForConditionalGeneration`."""
