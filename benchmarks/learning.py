"""Images per second of a classifier's training whose features learn, as a share of what matrix products reach.

The training of docs/results.md, "With features that learn": the last three stages of EfficientNet-Lite0 at 192 pixels,
pairs that attend to each other, float32. The limit is the rate of a product of two square matrices, measured in
turn; depthwise convolutions, which do little with each byte that they read, keep away from it.
"""

import statistics

import machine

from mcis.platform.commands.bench import Bench
from mcis.platform.config.resolve import resolve

TARGET = 0.25
LEARNT = (
    "trainable_stages=3", "input_size=192", "optimizer.learning_rate=0.0003", "optimizer.new_layer_rate=10",
    "affinity.form=cosine",
)  # fmt: skip


def main() -> None:
    """Measures both in turn and prints the ratio of the median of the rounds."""
    arguments = machine.arguments(__doc__, seconds=5, rounds=5).parse_args()
    print(machine.describe())
    config = resolve("tags", "photos_fast", overrides=[f"classifier.{value}" for value in LEARNT]).config
    bench, rates, shares = Bench(seconds=arguments.seconds), [], []
    for _ in range(arguments.rounds):
        matrices = bench.measure_matrices()
        bench.values["matrices"] = matrices.values
        training = bench.measure_precision(config, "classifier", "float32")
        print(f"matrices: {matrices.text}; training: {training.text}")
        rates.append(training.values["float32 images/s"])
        shares.append(training.values["float32 of the matrix rate"])
    print(f"{statistics.median(rates):.1f} images/s")
    what = "training of a classifier whose last three stages learn, of the rate of matrix products"
    print(f"ratio {statistics.median(shares):.2f} target {TARGET:g}: {what}")


if __name__ == "__main__":
    main()
