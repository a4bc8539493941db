"""``Vocabulary``: integer codes for the distinct raw values of a column."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lightning_freescale.runtime.errors import InputError


class Vocabulary:
    """The distinct raw values of a column. Codes are given in the order of appearance.

    Args:
        label: file and column, for messages.
        parse: how to parse text at the end. ``"id"``: as integers, if all of them have no leading zeros and no plus
            sign. ``"value"``: as numbers, if all values are numbers. ``None``: the values are not text.
    """

    def __init__(self, label: str, parse: str | None):
        self.label, self.parse = label, parse
        self._known: pa.Array | None = None

    def __len__(self) -> int:
        return 0 if self._known is None else len(self._known)

    def encode(self, values: pa.Array) -> NDArray[np.int64]:
        """Return the codes of the raw values ``[n]``. New values get new codes."""
        local = values.dictionary_encode()
        if self._known is None:
            self._known = local.dictionary.slice(0, 0)
        if self._known.type != local.dictionary.type:
            raise InputError(
                f"{self.label}: {self._known.type} first, {local.dictionary.type} in a later part or file; all parts must "
                "have the same type"
            )
        found = pc.index_in(local.dictionary, value_set=self._known)
        new = np.asarray(found.is_null())
        codes = np.asarray(found.fill_null(0)).astype(np.int64)
        codes[new] = len(self._known) + np.arange(new.sum())
        self._known = pa.concat_arrays([self._known, local.dictionary.filter(pa.array(new))])
        return codes[np.asarray(local.indices)]

    def sort(self, used: NDArray[np.bool_]) -> tuple[NDArray, NDArray[np.int64]]:
        """Sort the values whose codes are ``used [len(self)]``.

        Returns:
            The sorted values, and for each old code the position of its value among them, or -1 if it is not used.
        """
        assert self._known is not None
        values = self._known.filter(pa.array(used))
        raw = self._parsed(values) if self.parse else values
        array = raw.to_numpy(zero_copy_only=False)
        sorted_values, positions = np.unique(array.astype(str) if array.dtype == object else array, return_inverse=True)
        new_code = np.full(len(used), -1, dtype=np.int64)
        new_code[used] = positions
        return sorted_values, new_code

    def _parsed(self, values: pa.Array) -> pa.Array:
        for kind in (pa.int64(), pa.float64()) if self.parse == "value" else (pa.int64(),):
            try:
                numbers = values.cast(kind)
            except pa.ArrowInvalid:
                continue
            if self.parse == "value":
                return numbers
            if not pc.all(pc.equal(numbers.cast(values.type), values)).as_py():
                return values  # "007" is not the same id as "7", so keep the text
            if (low := pc.min(numbers).as_py()) < 0:
                raise InputError(f"{self.label} is {low}; ids must not be negative")
            return numbers
        return values
