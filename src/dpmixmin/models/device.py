"""Where language models run: on the GPU if there is one."""

from __future__ import annotations

import torch


def best() -> torch.device:
    """Return the device that language models train, score and are fine-tuned on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
