"""Stand-ins for texts: one public source poses as the sensitive data, and is left out of the sources.

So, as for real sensitive text, no proxy has seen its kind. Its documents, one after another, are a stream; a unit owns
a place in it, and its records are the slices that follow. Test units come from the end of the stream, which no other
unit reaches. Everything here is public and reproducible from a public seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpmixmin.cells import nominal_units
from dpmixmin.config import Config
from dpmixmin.data.corpora import Corpus
from dpmixmin.data.text_records import TextRecords
from dpmixmin.errors import UserError

TEST_UNITS = 100
"""Units that a candidate is measured on."""

_TEST_SHARE = 0.3


@dataclass(frozen=True)
class TextStandIn:
    """One stand-in.

    Attributes:
        name: the source that poses as sensitive.
        others: the sources that are left, in order.
        mixing: units of the mixing part, at its nominal number.
        finetune: of the fine-tuning part.
        test: ``TEST_UNITS`` others.
    """

    name: str
    others: tuple[str, ...]
    mixing: TextRecords
    finetune: TextRecords
    test: TextRecords


def stand_ins(corpora: dict[str, Corpus], config: Config, count: int) -> list[TextStandIn]:
    """Return ``count`` stand-ins (at most one a source); longer lists start with shorter ones.

    Raises:
        UserError: the sources are too short.
    """
    names = list(corpora)
    order = np.random.default_rng(config.tune.seed).permutation(len(names))
    return [_stand_in(names[i], corpora, config, int(i)) for i in order[:count]]


def _stand_in(name: str, corpora: dict[str, Corpus], config: Config, number: int) -> TextStandIn:
    corpus = corpora[name]
    stream = np.concatenate([*corpus.train, *corpus.heldout])
    cut = int((1 - _TEST_SHARE) * len(stream))
    if min(cut, len(stream) - cut) < 4 * config.tune.tokens_per_record:
        raise UserError(f"public.texts.{name}: {len(stream)} tokens are too few to tune on; give more text")
    parts = {}
    for place, (part, wanted, text) in enumerate((
        ("mixing", round(nominal_units(config, ("mixing",))), stream[:cut]),
        ("finetune", round(nominal_units(config, ("finetune",))), stream[:cut]),
        ("test", TEST_UNITS, stream[cut:]),
    )):  # fmt: skip
        generator = np.random.default_rng([config.tune.seed, number, place])
        parts[part] = _units(text, max(1, wanted), config, generator, part)
    return TextStandIn(name, tuple(other for other in corpora if other != name), **parts)


def _units(stream: np.ndarray, count: int, config: Config, generator: np.random.Generator, part: str) -> TextRecords:
    """Draw units: a place in the stream, a number of records, their lengths; both uniform around their means."""
    record, unit, tokens = [], [], []
    mean, length = config.tune.records_per_unit, config.tune.tokens_per_record
    mean = 1 if config.private.unit == "record" else mean
    for number in range(count):
        smallest = min(config.private.min_records_per_unit, mean)
        records = int(generator.integers(smallest, max(smallest, 2 * mean - smallest) + 1))
        place = int(generator.integers(len(stream)))
        for one in range(min(records, config.private.max_records_per_unit)):
            size = int(generator.integers(max(1, length // 4), 2 * length - length // 4 + 1))
            slice_ = np.take(stream, np.arange(place, place + size), mode="wrap")
            place += size
            record.append(f"{part}-{number:06d}-{one:04d}")
            unit.append(f"{part}-{number:06d}")
            tokens.append(slice_.astype(np.int32))
    return TextRecords(np.asarray(record), np.asarray(unit), [""] * len(record), tokens)
