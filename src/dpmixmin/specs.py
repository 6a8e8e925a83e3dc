"""From a config to the spec of one release: public values only, so neighbours give byte-identical specs (rule 2)."""

from __future__ import annotations

from dpmixmin.cells import Cell, mixing_parts, nominal_units, train_parts
from dpmixmin.config import Config
from dpmixmin.privacy.mechanisms import GridGaussian, ModelGaussian, ResponsibilityGaussian
from dpmixmin.sections import FinetuneSettings, MixtureSettings


def mixture_spec(config: Config, settings: MixtureSettings, epsilon: float) -> GridGaussian:
    """Return the spec of one mixture release; under sequential composition it gets its share of epsilon."""
    responsibilities = config.mixture.learner == "responsibilities"
    kind = ResponsibilityGaussian if responsibilities else GridGaussian
    share = config.privacy.mixture_share if config.privacy.composition == "sequential" else 1.0
    return kind.for_target(
        epsilon=epsilon * share,
        delta=config.privacy.delta,
        clip=1.0 if responsibilities else settings.clip,
        steps=settings.steps,
        sampling_rate=config.mixture.sampling_rate,
        nominal_units=nominal_units(config, mixing_parts(config)),
        unit=config.private.unit,
        adjacency=config.privacy.adjacency,
    )


def evaluation_spec(config: Config, epsilon: float) -> GridGaussian:
    """Return the spec of the charged evaluation: one full-batch step on the test part, vectors of norm at most 1."""
    return GridGaussian.for_target(
        epsilon=epsilon,
        delta=config.privacy.delta,
        clip=1.0,
        steps=1,
        sampling_rate=1.0,
        nominal_units=nominal_units(config, ("test",)),
        unit=config.private.unit,
        adjacency=config.privacy.adjacency,
    )


def chain_finetune_spec(
    config: Config, cell: Cell, settings: FinetuneSettings, mixture: MixtureSettings | None
) -> ModelGaussian:
    """Return the spec of a cell's fine-tuning from public settings alone; its run reads them off the chain.

    Args:
        config: the experiment.
        cell: the fine-tuned cell.
        settings: of the fine-tuning.
        mixture: of the private mixture; needed where it shares epsilon with the fine-tuning.
    """
    shares = cell.method == "dp_mixmin" and config.privacy.composition == "sequential"
    alongside = mixture_spec(config, mixture, cell.epsilon).events() if shares else ()
    parts = train_parts(config, cell.method)
    return finetune_spec(config, settings, cell.epsilon, parts, alongside=alongside)


def finetune_spec(
    config: Config,
    settings: FinetuneSettings,
    epsilon: float,
    parts: tuple[str, ...],
    *,
    steps_factor: int = 1,
    alongside: tuple = (),
) -> ModelGaussian:
    """Return the spec of one DP-SGD release on some parts; the sampling rate is batch / nominal units.

    Args:
        config: the experiment.
        settings: step size, steps, batch, clip.
        epsilon: target of the whole chain.
        parts: what is read.
        steps_factor: multiplies the steps.
        alongside: events of the chain's earlier releases that read some of ``parts`` (sequential composition).
    """
    nominal = nominal_units(config, parts)
    return ModelGaussian.for_target(
        epsilon=epsilon,
        delta=config.privacy.delta,
        clip=settings.clip,
        steps=settings.steps * steps_factor,
        sampling_rate=min(1.0, settings.batch / nominal),
        nominal_units=nominal,
        unit=config.private.unit,
        adjacency=config.privacy.adjacency,
        alongside=alongside,
    )
