"""Where models run: on the GPU if there is one."""

from __future__ import annotations

import torch


def best() -> torch.device:
    """Return the device that models train, score and are fine-tuned on: of several GPUs, this process's."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
