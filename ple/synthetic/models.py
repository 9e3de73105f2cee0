"""The models that a synthetic table can pretend to belong to."""

from __future__ import annotations

from dataclasses import dataclass

from lazyio.errors import SettingError, TableError
from lazyio.ple.ngram import derive_constants
from lazyio.ple.spec import NgramHash

LAYER_VALUES = 256  # of a Gemma row, which holds a slice for each layer

_RELEASED_VOCAB = 248_320
_RELEASED_EOS = 248_044


@dataclass(frozen=True, slots=True)
class Model:
    """A model as far as its table tells: `ngram` where row ids are hashed, else `layers` slices a row."""

    architecture: str  # as GGUF calls it
    model_type: str  # as config.json calls it
    rows: int
    row_values: int
    vocab: int  # token ids that the hash is made for
    ngram: NgramHash | None

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return 48 if self.ngram else self.row_values // LAYER_VALUES


# Values of a row in the smallest model of each family.
_USUAL_ROW_VALUES = {"qwen4exp": 160, "gemma4": 8960, "gemma3n": 7680}
_MODEL_TYPES = {"qwen4exp": "qwen4_exp", "gemma4": "gemma4", "gemma3n": "gemma3n"}


def model_of(architecture: str, rows: int, row_values: int | None, vocab: int = 0) -> Model:
    """The model of that architecture whose table has `rows` rows; `row_values` None and `vocab` 0 take the usual.

    Raises SettingError for an unknown architecture and for counts out of range, TableError for a row that is no whole
    number of layers, NeverFits for too few rows for the heads of an n-gram hash.
    """
    if architecture not in _MODEL_TYPES:
        raise SettingError(f"there is no architecture {architecture!r}; there are {', '.join(_MODEL_TYPES)}")
    if rows < 1 or vocab < 0:
        raise SettingError(f"a table has 1 row or more and a vocabulary no less than 0 tokens; got {rows} and {vocab}")
    values = _USUAL_ROW_VALUES[architecture] if row_values is None else row_values
    hashed = architecture == "qwen4exp"
    if values < 1 or (not hashed and values % LAYER_VALUES):
        wanted = "1 or more" if hashed else f"a multiple of {LAYER_VALUES}, {LAYER_VALUES} for each layer"
        raise TableError(f"rows of {architecture} have {wanted} values; got {values}")
    tokens = vocab or _RELEASED_VOCAB
    eos = _RELEASED_EOS if tokens > _RELEASED_EOS else tokens - 1
    ngram = derive_constants(rows, vocab=tokens, eos=eos) if hashed else None
    return Model(architecture, _MODEL_TYPES[architecture], rows, values, tokens, ngram)
