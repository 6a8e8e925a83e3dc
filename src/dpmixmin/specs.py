"""From a config to the spec of one release: public values only, so neighbours give byte-identical specs (rule 2)."""

from __future__ import annotations

from dpmixmin.cells import nominal_units
from dpmixmin.config import Config, FinetuneSettings, MixtureSettings
from dpmixmin.privacy.mechanisms import GridGaussian, ModelGaussian


def mixture_spec(config: Config, settings: MixtureSettings, epsilon: float) -> GridGaussian:
    """Return the spec of one mixture release."""
    return GridGaussian.for_target(
        epsilon=epsilon,
        delta=config.privacy.delta,
        clip=settings.clip,
        steps=settings.steps,
        sampling_rate=config.mixture.sampling_rate,
        nominal_units=nominal_units(config, ("mixing",)),
        unit=config.private.unit,
    )


def finetune_spec(
    config: Config, settings: FinetuneSettings, epsilon: float, parts: tuple[str, ...], *, steps_factor: int = 1
) -> ModelGaussian:
    """Return the spec of one DP-SGD release on some parts; the sampling rate is batch / nominal units."""
    nominal = nominal_units(config, parts)
    return ModelGaussian.for_target(
        epsilon=epsilon,
        delta=config.privacy.delta,
        clip=settings.clip,
        steps=settings.steps * steps_factor,
        sampling_rate=min(1.0, settings.batch / nominal),
        nominal_units=nominal,
        unit=config.private.unit,
    )
