"""The parts of `mcis doctor --bench`: measurements of networks and decoders on this machine, as checks."""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mcis.platform.commands.checks import Check, Finding, run_checks
from mcis.platform.config.recipes import lid, paper, photos, photos_fast, released
from mcis.platform.config.sections import Config
from mcis.platform.reporting.machine_speed import (
    GPU,
    device_differences,
    make_work,
    measure_cost,
    measure_decoder_rate,
    measure_matrix_rate,
    precisions,
)
from mcis.platform.runs.progress import bar

MAX_DIFFERENCE = 1e-3
"""Largest allowed difference between the scores of two devices, relative to the largest score."""
_REPORT = "paste the file into an issue"


@dataclass(kw_only=True)
class Bench:
    """The measurements of a machine.

    Attributes:
        recipes: Configurations whose networks are measured.
        seconds: Duration of each measurement.
        limit: Seconds after which no further network is measured.
        side: Side length of the matrices that are multiplied.
        values: Measured numbers of each part so far.
    """

    recipes: Sequence[Config] = field(default_factory=lambda: (photos(), photos_fast(), paper(), released(), lid()))
    seconds: float = 2.0
    limit: float = 240.0
    side: int = 8192 if GPU else 1024
    values: dict[str, Mapping[str, float]] = field(default_factory=dict)

    def measure(self) -> Iterator[Check]:
        """Yields a check for each part, also for those that fail."""
        parts = self._parts()
        with bar("measured", len(parts), "parts") as progress:
            for number, check in enumerate(run_checks(parts, _REPORT), 1):
                self.values[check.part] = check.values
                progress.update(number, check.part)
                yield check

    def _parts(self) -> dict[str, Callable[[], Finding]]:
        end = time.monotonic() + self.limit
        parts: dict[str, Callable[[], Finding]] = {"agreement": check_agreement, "matrices": self.measure_matrices}
        skipped = [config.recipe for config in self.recipes if config.compute.gpu and not GPU]

        for config in self.recipes:
            if config.recipe in skipped:
                continue
            networks = ["classifier", "segmenter"]
            if config.classifier.trains_on_features:
                networks.insert(0, "embedding")
            for network in networks:
                parts[f"{config.recipe}, {network}"] = functools.partial(self.measure_network, config, network, end)

        if skipped:
            parts[", ".join(skipped)] = lambda: Finding("note", "left out on a CPU, where they take too long")
        parts["decoders"] = self.measure_decoders
        return parts

    def measure_matrices(self) -> Finding:
        """Measures products of matrices in each precision, TFLOP/s."""
        rates = {}
        for precision in precisions():
            rates[precision] = measure_matrix_rate(precision, self.side, self.seconds)
        return Finding("ok", f"TFLOP/s: {_format_values(rates)}", "", rates)

    def measure_network(self, config: Config, network: str, end: float) -> Finding:
        """Measures a network in each precision, unless the time `end` of `time.monotonic` is over."""
        if time.monotonic() > end:
            return Finding("note", "left out: the time limit is reached")

        texts = []
        values: dict[str, float] = {}
        failed = False
        for precision in precisions():
            if network == "embedding" and precision == "bf16":
                break  # features are never computed in bf16
            try:
                finding = self.measure_precision(config, network, precision)
            except Exception as error:  # the numbers of the other precisions are still useful
                texts.append(f"{precision}: {type(error).__name__}: {str(error)[:120]}")
                failed = True
            else:
                texts.append(finding.text)
                values |= finding.values
        if failed:
            return Finding("bad", "; ".join(texts), _REPORT, values)
        return Finding("ok", "; ".join(texts), "", values)

    def measure_precision(self, config: Config, network: str, precision: str) -> Finding:
        """Measures a network in one precision: images per second, share of the matrix rate, and memory."""
        on_features = network == "classifier" and config.classifier.trains_on_features
        unit = "features/s" if on_features else "images/s"
        work = make_work(config, network, bf16=precision == "bf16")
        cost = measure_cost(work.samples, work.step, self.seconds)

        images_per_sample = 2 if network == "classifier" else 1
        rate = cost.samples * images_per_sample / cost.seconds
        matrix_rate = self.values["matrices"].get(precision, float("inf"))
        share = cost.operations / cost.seconds / 1e12 / matrix_rate
        values = {f"{precision} {unit}": rate, f"{precision} of the matrix rate": share}

        memory = "- on a CPU"
        if GPU:
            peak = torch.cuda.max_memory_allocated() / 2**30
            total = torch.cuda.mem_get_info()[1] / 2**30
            values[f"{precision} peak GiB"] = peak
            values[f"{precision} samples at a time"] = cost.samples
            memory = f"{peak:.3g} of {total:.3g} GiB, {cost.samples} of {work.samples} samples at a time"
        text = f"{precision} {rate:.3g} {unit}, {100 * share:.0f} % of the matrix rate, peak memory {memory}"
        return Finding("ok", text, "", values)

    def measure_decoders(self) -> Finding:
        """Compares the rate of image decoders, on all cores, with the fastest network that reads images."""
        rate = measure_decoder_rate(self.seconds)

        fastest = "none"
        network_rate = 0.0
        for part, values in self.values.items():
            for name, value in values.items():
                if name.endswith("images/s") and value > network_rate:
                    fastest = part
                    network_rate = value

        text = f"{rate:.4g} images/s of 500x375 on all cores; {fastest} processes {network_rate:.3g}: "
        if rate >= network_rate:
            return Finding("ok", f"{text}the network is the limit", "", {"images/s": rate})
        remedy = "set compute.decode=tasks if other nodes have cores; raise compute.cache_gb for the classifier"
        return Finding("note", f"{text}the decoders are the limit", remedy, {"images/s": rate})


def check_agreement() -> Finding:
    """Compares networks in float32 on the device with the CPU; without a GPU, with float64 on the CPU."""
    differences = device_differences()
    compared = "GPU and CPU" if GPU else "no GPU: float32 and float64 on the CPU"
    text = f"{compared} differ by {_format_values(differences, '.1e')} of the largest score, limit {MAX_DIFFERENCE:g}"
    if max(differences.values()) <= MAX_DIFFERENCE:
        return Finding("ok", text, "", differences)
    return Finding("bad", text, f"set compute.gpu=false, and {_REPORT}", differences)


def _format_values(values: Mapping[str, float], form: str = ".3g") -> str:
    return ", ".join(f"{name} {value:{form}}" for name, value in values.items())
