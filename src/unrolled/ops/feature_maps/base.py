"""The base class of feature maps, and the map that combines one for queries and one for keys."""

from torch import Tensor, nn

from unrolled.ops.checks import check_tensor, wrong
from unrolled.ops.options import check_integers
from unrolled.ops.precision import accumulated


class FeatureMap(nn.Module):
    """phi for one head width. A map that is the same for queries and keys overrides `phi` alone.

    Attributes:
        head_dim: width D of the queries and keys.
        feature_dim: width R of the features.
        positional: whether `phi_q` and `phi_k` need positions; other maps ignore them.

    Raises:
        ValueError: head_dim below 1.
    """

    positional: bool = False

    def __init__(self, head_dim: int, feature_dim: int | None = None):
        super().__init__()
        check_integers(1, head_dim=head_dim)
        self.head_dim = head_dim
        self.feature_dim = head_dim if feature_dim is None else feature_dim

    @property
    def replaced(self) -> bool:
        """Whether this object has a map of its own, for example one that records the features."""
        return not {"phi", "phi_q", "phi_k"}.isdisjoint(vars(self))

    def phi(self, x: Tensor) -> Tensor:
        """Map queries or keys `[..., D]`, in fp32 or fp64, to `[..., R]`."""
        raise NotImplementedError

    def phi_q(self, q: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map queries `[...,H,D]` at `positions [...]` to features `[...,H,R]`."""
        return self.phi(self._wide("q", q))

    def phi_k(self, k: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map keys `[...,G,D]` at `positions [...]` to features `[...,G,R]`."""
        return self.phi(self._wide("k", k))

    def _wide(self, name: str, x: Tensor) -> Tensor:
        """Check heads `[...,D]` and convert them to the accumulation dtype."""
        check_tensor(name, x)
        if x.dim() < 1 or x.shape[-1] != self.head_dim or not x.is_floating_point():
            raise wrong(name, x, f"floating point [..., {self.head_dim}]")
        return accumulated(x)

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        return f"head_dim={self.head_dim}, feature_dim={self.feature_dim}"


class QueryKeyMap(FeatureMap):
    """Queries are mapped by one map, and keys by another of the same widths.

    Args:
        queries: its `phi_q` maps the queries.
        keys: its `phi_k` maps the keys. If the features of both are positive, so are the weights.

    Raises:
        ValueError: the widths of the two maps differ.
    """

    def __init__(self, queries: FeatureMap, keys: FeatureMap):
        widths = [(phi.head_dim, phi.feature_dim) for phi in (queries, keys)]
        if widths[0] != widths[1]:
            raise ValueError(
                f"the map of queries goes from {widths[0][0]} to {widths[0][1]}, "
                f"but that of keys from {widths[1][0]} to {widths[1][1]}: the widths must agree"
            )
        super().__init__(*widths[0])
        self.queries, self.keys = queries, keys
        self.positional = queries.positional or keys.positional

    def phi_q(self, q: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map queries by the map of queries."""
        return self.queries.phi_q(q, positions)

    def phi_k(self, k: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map keys by the map of keys."""
        return self.keys.phi_k(k, positions)
