"""Sparse tensors of torch, stored as the dense tensors of indices and values that they consist of.

The loaded tensor has the same layout, shape and entries, in the same order. A COO tensor also keeps whether
it is coalesced.
"""

from __future__ import annotations

import importlib
from typing import Any

_ROWS = ("sparse_csr", "sparse_bsr")
_COLUMNS = ("sparse_csc", "sparse_bsc")


def parts(value: Any) -> dict[str, Any]:
    """Return ``layout``, ``size``, ``parts`` (the dense tensors) and ``coalesced`` of a sparse tensor."""
    layout = str(value.layout).removeprefix("torch.")
    found = {"layout": layout, "size": list(value.shape), "coalesced": True}
    if layout == "sparse_coo":
        # Not `indices()` and `values()`, which refuse a tensor that is not coalesced.
        return found | {"parts": [value._indices(), value._values()], "coalesced": value.is_coalesced()}
    if layout in _ROWS:
        return found | {"parts": [value.crow_indices(), value.col_indices(), value.values()]}
    return found | {"parts": [value.ccol_indices(), value.row_indices(), value.values()]}


def from_parts(packed: dict[str, Any]) -> Any:
    """Return the sparse tensor of what `parts` returned.

    Raises:
        ValueError: The parts do not fit together.
    """
    # Typed Any: no stub knows how many dense tensors there are.
    torch: Any = importlib.import_module("torch")
    layout, dense, size = packed["layout"], packed["parts"], tuple(packed["size"])
    # With the checks: indices outside of the shape would make torch access other memory.
    try:
        if layout == "sparse_coo":
            made = torch.sparse_coo_tensor(*dense, size=size, check_invariants=True)
            # The flag alone: entries and their order stay as they were.
            return made._coalesced_(packed["coalesced"])
        if layout in (*_ROWS, *_COLUMNS):
            layout = getattr(torch, layout)
            return torch.sparse_compressed_tensor(*dense, size=size, layout=layout, check_invariants=True)
    except RuntimeError as error:
        raise ValueError(f"a sparse tensor is malformed: {error}") from None
    raise ValueError(f"a sparse tensor of layout {layout}, which this version of ciuic does not know")
