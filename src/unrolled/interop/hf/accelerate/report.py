"""The report of `accelerate`: the functions that it replaced or kept in a model, and why."""

from dataclasses import dataclass
from itertools import groupby

from unrolled.ops import native


@dataclass(frozen=True)
class LayerReport:
    """One layer with linear attention or a short convolution.

    Attributes:
        name: name in the model, such as "model.layers.0.linear_attn".
        kind: name of the layer's class.
        replaced: kernels, by the names of the functions that they replaced.
        kept: reasons, by the names of the functions that were not replaced.
    """

    name: str
    kind: str
    replaced: dict[str, str]
    kept: dict[str, str]


@dataclass(frozen=True)
class AccelerationReport:
    """The layers that `accelerate` found in a model, in their order; `print` it for a summary.

    Attributes:
        model: name of the model's class.
        layers: one report for each layer.
    """

    model: str
    layers: tuple[LayerReport, ...]

    def __str__(self) -> str:
        """Return a summary in lines; layers of one kind share a line."""
        missing = native.missing()
        runs = (
            f"C++ kernels ({native.instruction_set()})"
            if missing is None
            else f"plain PyTorch, since {missing}"
        )
        lines = [f"{self.model}: {runs}"]
        for _, group in groupby(sorted(self.layers, key=_alike), key=_alike):
            first, *others = group
            more = f" and {len(others)} more" if others else ""
            lines.append(f"  {first.kind} ({first.name}{more})")
            lines += [f"    {name}: replaced by {kernel}" for name, kernel in first.replaced.items()]
            lines += [f"    {name}: kept, since {reason}" for name, reason in first.kept.items()]
        return "\n".join(lines)


def _alike(layer: LayerReport) -> tuple[str, ...]:
    return layer.kind, *map(" ".join, (layer.replaced | layer.kept).items())
