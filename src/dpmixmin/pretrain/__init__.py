"""Public training: the proxies and the mixture-weighted pretraining."""
