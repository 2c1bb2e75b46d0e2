"""The architectures, from input to output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .layers import Layer, convolution, embedding, linear, normalisation


def resnet(blocks: Sequence[int], classes: int, width: int = 64) -> Iterator[Layer]:
    """Residual networks of bottlenecks, images of 224 x 224, the stride in the 3 x 3 convolution.

    He et al. 2015 (arXiv 1512.03385); ``width`` is that of the first bottleneck, 128 in the wide ones of Zagoruyko and
    Komodakis 2016 (arXiv 1605.07146).
    """
    yield convolution("stem", 3, 64, 7, 112)
    yield normalisation("stem.norm", 64)
    channels, size = 64, 56
    for stage, count in enumerate(blocks):
        inner, outer = width << stage, 256 << stage
        for block in range(count):
            name = f"{stage + 1}.{block}"
            before, size = size, 56 >> stage
            yield convolution(f"{name}.reduce", channels, inner, 1, before)
            yield normalisation(f"{name}.reduce.norm", inner)
            yield convolution(f"{name}.convolve", inner, inner, 3, size)
            yield normalisation(f"{name}.convolve.norm", inner)
            yield convolution(f"{name}.expand", inner, outer, 1, size)
            yield normalisation(f"{name}.expand.norm", outer)
            if block == 0:
                yield convolution(f"{name}.shortcut", channels, outer, 1, size)
                yield normalisation(f"{name}.shortcut.norm", outer)
            channels = outer
    yield linear("classifier", channels, classes)


def vgg(widths: Sequence[Sequence[int]], classes: int) -> Iterator[Layer]:
    """3 x 3 convolutions, halved in size after each group, and three large matrices.

    Simonyan and Zisserman 2014 (arXiv 1409.1556).
    """
    channels, size = 3, 224
    for group, outputs in enumerate(widths):
        for number, output in enumerate(outputs):
            yield convolution(f"{group + 1}.{number}", channels, output, 3, size, bias=True)
            channels = output
        size //= 2
    yield linear("classifier.0", channels * size * size, 4096)
    yield linear("classifier.1", 4096, 4096)
    yield linear("classifier.2", 4096, classes)


def bert(layers: int, width: int, tokens: int, vocabulary: int = 30522, positions: int = 512) -> Iterator[Layer]:
    """Encoder of transformers with its pooler, sentences of ``tokens``. Devlin et al. 2018 (arXiv 1810.04805)."""
    yield embedding("words", vocabulary, width)
    yield embedding("positions", positions, width)
    yield embedding("types", 2, width)
    yield normalisation("embedding.norm", width)
    for number in range(layers):
        for part in ("query", "key", "value"):
            yield linear(f"{number}.{part}", width, width, tokens)
        yield Layer(f"{number}.attention", 0, 4.0 * tokens * tokens * width)
        yield linear(f"{number}.output", width, width, tokens)
        yield normalisation(f"{number}.output.norm", width)
        yield linear(f"{number}.expand", width, 4 * width, tokens)
        yield linear(f"{number}.reduce", 4 * width, width, tokens)
        yield normalisation(f"{number}.norm", width)
    yield linear("pooler", width, width)
