"""What makes an image or a sound a part of a tiny model's prompt: a processor, and the tokens that stand in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["IMAGE_SIZE", "NUM_IMAGE_TOKENS", "PATCH_SIZE", "PROCESSORS", "SOUND"]

# An image becomes 16 tokens, unless its own size decides (PaddleOCR).
IMAGE_SIZE, PATCH_SIZE, NUM_IMAGE_TOKENS = 56, 14, 16
SIDES = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
# Of what a feature extractor hears.
SOUND: dict[str, Any] = {"feature_size": 16, "chunk_length": 2}


def tokenizer(folder: Path, **named: str) -> Any:
    """The model's, with special tokens behind the last one, in this order."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder, extra_special_tokens=named)


def blip2(folder: Path) -> Any:
    import transformers

    # Adds its token itself.
    images = transformers.BlipImageProcessorPil(size=SIDES)
    return transformers.Blip2Processor(images, tokenizer(folder), num_query_tokens=NUM_IMAGE_TOKENS)


def llava(folder: Path) -> Any:
    import transformers

    images = transformers.CLIPImageProcessorPil(size=SIDES, crop_size=SIDES)
    return transformers.LlavaProcessor(
        images,
        tokenizer(folder, image_token="<image>"),
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def gemma3(folder: Path) -> Any:
    import transformers

    named = {"image": "<image_soft_token>", "boi": "<start_of_image>", "eoi": "<end_of_image>"}
    tokens = tokenizer(folder, **{f"{name}_token": token for name, token in named.items()})
    images = transformers.Gemma3ImageProcessorPil(size=SIDES)
    return transformers.Gemma3Processor(images, tokens, image_seq_length=NUM_IMAGE_TOKENS)


def paddle_ocr(folder: Path) -> Any:
    import transformers

    tokens = tokenizer(folder, image_token="<|IMAGE_PLACEHOLDER|>", start="<|IMAGE_START|>", end="<|IMAGE_END|>")
    images = transformers.PaddleOCRVLImageProcessorPil(min_pixels=IMAGE_SIZE**2, max_pixels=(4 * IMAGE_SIZE) ** 2)
    return transformers.PaddleOCRVLProcessor(images, tokens)


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
    "Llava": llava,
    "Gemma3": gemma3,
    "PaddleOCRVL": paddle_ocr,
    "Qwen2Audio": qwen2_audio,
    "Whisper": whisper,
}
"""By the family of a model that takes more than text, all of whose names end in `ForConditionalGeneration`."""
