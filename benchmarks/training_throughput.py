"""Images per second of a classifier's training with a trainable backbone, as a fraction of the matrix product rate.

The training of the backbone in docs/results.md, "Co-attention in training": the last three stages of EfficientNet-Lite0
at 192 pixels, with pairs that attend to each other, in float32. The upper limit is the rate of a product of two square
matrices, measured in turn. Depthwise convolutions stay below it because they compute little for each byte that they
read.
"""

import statistics

import harness

from mcis.platform.commands.bench import Bench
from mcis.platform.config.resolve import resolve

TARGET = 0.25
OVERRIDES = (
    "classifier.trainable_stages=3",
    "classifier.input_size=192",
    "classifier.optimizer.learning_rate=0.0003",
    "classifier.optimizer.new_layer_rate=10",
    "classifier.affinity.form=cosine",
)


def main() -> None:
    """Measures both in turn and prints the median of the rounds' ratios."""
    options = harness.option_parser(__doc__, seconds=5, rounds=5).parse_args()
    print(harness.describe_machine())
    config = resolve("tags", "photos_fast", overrides=OVERRIDES).config
    bench = Bench(seconds=options.seconds)
    rates = []
    shares = []
    for _ in range(options.rounds):
        matrices = bench.measure_matrices()
        bench.values["matrices"] = matrices.values
        training = bench.measure_precision(config, "classifier", "float32")
        print(f"matrices: {matrices.text}; training: {training.text}")
        rates.append(training.values["float32 images/s"])
        shares.append(training.values["float32 of the matrix rate"])
    print(f"{statistics.median(rates):.1f} images/s")
    print(
        f"ratio {statistics.median(shares):.2f} target {TARGET:g}: "
        "training of a classifier with three trainable stages, relative to the rate of matrix products"
    )


if __name__ == "__main__":
    main()
