"""Sparse tensors of torch by the dense ones that they are made of: indices or their compressed form, and values.

What comes back has the same layout, the same shape and the same entries in the same order; whether those of a COO tensor may be
double is kept, too.
"""

from __future__ import annotations

import importlib
from typing import Any

_ROWS = ("sparse_csr", "sparse_bsr")
_COLUMNS = ("sparse_csc", "sparse_bsc")


def parts(value: Any) -> dict[str, Any]:
    """``layout``, ``size``, ``parts``: dense tensors, and ``coalesced``."""
    layout = str(value.layout).removeprefix("torch.")
    found = {"layout": layout, "size": list(value.shape), "coalesced": True}
    if layout == "sparse_coo":
        return found | {"parts": [value._indices(), value._values()], "coalesced": value.is_coalesced()}
    if layout in _ROWS:
        return found | {"parts": [value.crow_indices(), value.col_indices(), value.values()]}
    return found | {"parts": [value.ccol_indices(), value.row_indices(), value.values()]}


def of_parts(packed: dict[str, Any]) -> Any:
    """The tensor of which `parts` were stored. ValueError where they do not fit together."""
    torch: Any = importlib.import_module("torch")  # how many dense tensors there are, no stub can know
    layout, dense, size = packed["layout"], packed["parts"], tuple(packed["size"])
    try:
        if layout == "sparse_coo":
            made = torch.sparse_coo_tensor(*dense, size=size, check_invariants=True)
            return made._coalesced_(packed["coalesced"])
        if layout in (*_ROWS, *_COLUMNS):
            layout = getattr(torch, layout)
            return torch.sparse_compressed_tensor(*dense, size=size, layout=layout, check_invariants=True)
    except RuntimeError as error:
        raise ValueError(f"a sparse tensor is not as it should be: {error}") from None
    raise ValueError(f"a sparse tensor of layout {layout}, which this version of ciuic does not know")
