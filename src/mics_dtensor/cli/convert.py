"""`mics convert`: checkpoints in and out, and DeepSpeed's configuration; no GPU, no ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mics_dtensor.cli import convert_deepspeed, convert_deepspeed_config, convert_hf
from mics_dtensor.errors import ConfigError

SUMMARY = (
    "  convert        from DeepSpeed (configuration, checkpoint), to Hugging Face and torch.save"
)

KINDS: Mapping[str, Callable[[Sequence[str]], str]] = {
    "hf": convert_hf.run,
    "deepspeed": convert_deepspeed.run,
    "deepspeed-config": convert_deepspeed_config.run,
}


def run(argv: Sequence[str]) -> str:
    """What is printed. Raises MicsError."""
    words = list(argv)
    usage = "\n".join(
        [
            f"usage: mics convert {{{','.join(KINDS)}}} ...",
            "",
            convert_hf.SUMMARY,
            convert_deepspeed.SUMMARY,
            convert_deepspeed_config.SUMMARY,
        ]
    )
    if words and words[0] in ("-h", "--help"):
        return usage
    if not words or words[0] not in KINDS:
        given = words[0] if words else "nothing"
        raise ConfigError(f"convert what? got {given}; there is {', '.join(KINDS)}\n\n{usage}")
    return KINDS[words[0]](words[1:])
