"""DP-MixMin: privately mix public datasets for a sensitive task, pretrain, fine-tune, and prove one guarantee."""

__version__ = "0.1.0"
