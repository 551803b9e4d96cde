"""Telephone numbers as the tones of their keys, the embedded recordings."""

import numpy

from ..reading.labelled import Labelled
from .recordings import Recording

KEYS, RATE = "123456789*0#", 8000  # row by row; samples a second
ROWS, COLUMNS = (697, 770, 852, 941), (1209, 1336, 1477)  # the tones of the keys in Hz (ITU-T Q.23)


def dial(number: int, seed: int, is_class: bool) -> Labelled:
    """`number` telephone numbers in two groups of digits; or single keys, which are the classes."""
    draw, samples, texts = numpy.random.default_rng(seed), list[Recording](), list[str]()
    for index in range(number):
        groups = ["".join(draw.choice(list("0123456789"), draw.integers(1, 4))) for _ in range(2)]
        texts.append(str(draw.choice(list(KEYS))) if is_class else " ".join(groups))
        wave = numpy.zeros(draw.integers(160, 480))
        for key in texts[-1]:
            seconds = numpy.arange(draw.integers(400, 800)) / RATE
            both = [] if key == " " else [ROWS[KEYS.index(key) // 3], COLUMNS[KEYS.index(key) % 3]]
            tone = sum(numpy.sin(2 * numpy.pi * (hertz * seconds + draw.random())) for hertz in both)
            wave = numpy.concatenate([wave, tone + 0 * seconds, numpy.zeros(draw.integers(240, 640))])
        wave = draw.uniform(0.1, 0.4) * wave + draw.normal(0, 0.1, len(wave))
        samples.append(Recording(wave.astype(numpy.float32), RATE, f"recording {index}"))
    return Labelled.of_names(samples, texts, list(KEYS)) if is_class else Labelled(samples, texts, [])
