"""Models of transformers with their per-layer embedding table on disk."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from lazyio.engine.place import device_of, dtype_of
from lazyio.errors import ModelError, TableError, Unsupported
from lazyio.integrations.lazy_embedding import LazyEmbedding
from lazyio.ple.safetensors_header import read_json
from lazyio.ple.spec import NgramHash
from lazyio.table import LazyTable, open_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ARCHITECTURES = ("qwen4_exp", "gemma4", "gemma3n")
# What the module of the table is called, and with it the tensors of a checkpoint that are not to be loaded.
_TABLES = ("ngram_embedding", "embed_tokens_per_layer")


def lazify(
    model: str | os.PathLike[str] | PreTrainedModel,
    *,
    mode: str | None = None,
    table: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    **options: Any,
) -> PreTrainedModel:
    """A qwen4_exp, gemma4 or gemma3n model of transformers whose per-layer embedding table is read from disk.

    `model` is a folder with config.json and safetensors files: everything but the table is loaded, and the table never
    is. Or it is a model that transformers has loaded: its embedding is replaced in place, and the memory freed.
    The table is looked for in that folder, or in the one a loaded model came from; `table` is the path of another, such
    as a GGUF file of the same model, whose quantised rows then take the place of the folder's. `mode` and `options` are
    those of `lazyio.open_table`. `device` and `dtype` are where and in which type the model computes; where they are
    None, a folder is loaded as `from_pretrained` does and a model stays as it is.

    The result is used like any model: `generate`, caches, batches, `.to(...)`. `result.lazyio_table` is the
    `LazyEmbedding` in it, with `stats()`, `close()` and the open table. `save_pretrained` is refused, as the table is
    not in the model.

    Raises ModelError for other models, for a folder that lacks weights and for a table that belongs to another model;
    Unsupported where transformers is missing or does not know the architecture, and for a device that is not there;
    SettingError for another device than cpu or cuda and for another dtype than float32, bfloat16 and float16; and what
    `open_table` raises.
    """
    device = None if device is None else device_of(device)
    # Without a dtype, transformers takes the checkpoint's own: what it calls auto.
    dtype = None if dtype in (None, "auto") else dtype_of(dtype, {}, torch.device("cpu"))
    if isinstance(model, str | os.PathLike):
        return _load(Path(model), table, mode, device, dtype, options)
    return _replace(model, table, mode, device, dtype, options)


class _Lazified:
    """What a model with a lazy table has, beside its own class."""

    lazyio_table: LazyEmbedding

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        raise Unsupported(
            f"a model with a lazy table can't be saved: its table stays in {self.lazyio_table.table.spec.path}; save "
            "the model it was made from, or its state_dict(), which is everything but the table"
        )

    # It would make a repository before it saves.
    push_to_hub = save_pretrained

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        # The open table comes first, for pickling to say that it can't be: nobody knows where copies would find it.
        how: Any = super().__reduce_ex__(protocol)
        make, arguments, *state = how
        return _made, (self.lazyio_table, make, arguments), *state

    def resize_token_embeddings(self, *arguments: Any, **named: Any) -> Any:
        # Resizing would make a per-layer embedding of each token as well.
        if hasattr(self, "get_per_layer_input_embeddings") and (arguments or named):
            raise Unsupported(
                "token embeddings of this model can't be resized: its table has a row for each token, and stays as it "
                "is on disk; resize the model before it is made lazy, and save it"
            )
        return super().resize_token_embeddings(*arguments, **named)  # type: ignore[misc]


def _load(
    folder: Path,
    table: str | os.PathLike[str] | None,
    mode: str | None,
    device: torch.device | None,
    dtype: torch.dtype | None,
    options: dict[str, Any],
) -> PreTrainedModel:
    plain = _class_of(folder)
    opened = open_table(folder if table is None else table, mode=mode, **options)

    def __init__(self: Any, *arguments: Any, **named: Any) -> None:  # noqa: N807
        plain.__init__(self, *arguments, **named)
        # Here the weights are on the meta device, and none is loaded yet.
        _put(self, opened)
        ignored = self._keys_to_ignore_on_load_unexpected or ()
        self._keys_to_ignore_on_load_unexpected = {*ignored, *(rf"(^|\.){name}\." for name in _TABLES)}

    try:
        # Its name is the model's, since transformers looks up by it how tensors are converted.
        loading: Any = type(plain.__name__, (plain,), {"__init__": __init__, "__module__": plain.__module__})
        model, loaded = loading.from_pretrained(folder, output_loading_info=True, **_placed(device, dtype))
        if loaded["missing_keys"]:  # which transformers has filled with random numbers
            lacking = ", ".join(sorted(loaded["missing_keys"])[:5])
            raise ModelError(f"{folder} lacks {len(loaded['missing_keys'])} of the model's weights, such as {lacking}")
        model.__class__ = _lazy(plain)
        return model if device is None else model.to(device)
    except BaseException:
        opened.close()
        raise


def _placed(device: torch.device | None, dtype: torch.dtype | None) -> dict[str, Any]:
    """What `from_pretrained` is told. Only with accelerate can it load straight to a device."""
    from transformers.utils import is_accelerate_available

    direct = device is not None and is_accelerate_available()
    return ({"device_map": device} if direct else {}) | ({} if dtype is None else {"dtype": dtype})


def _replace(
    model: Any,
    table: str | os.PathLike[str] | None,
    mode: str | None,
    device: torch.device | None,
    dtype: torch.dtype | None,
    options: dict[str, Any],
) -> PreTrainedModel:
    if not hasattr(model, "name_or_path"):
        raise ModelError(f"a folder or a model of transformers can be made lazy, not a {type(model).__name__}")
    if isinstance(model, _Lazified):
        raise ModelError(f"the table of this {type(model).__name__} is lazy already")
    if table is None and not os.path.isdir(model.name_or_path):
        raise ModelError(
            f"this {type(model).__name__} did not come from a folder (name_or_path is {model.name_or_path!r}): give "
            "the path of its table, or of a folder that it was saved in"
        )
    _embedding_of(model)  # before anything is opened
    opened = open_table(model.name_or_path if table is None else table, mode=mode, **options)
    try:
        _put(model, opened)
    except BaseException:
        opened.close()
        raise
    plain: Any = type(model)
    model.__class__ = _lazy(plain)
    if device is None and dtype is None:
        return model
    return model.to(device=device, dtype=dtype)


def _class_of(folder: Path) -> Any:
    """The class that the model in a folder was saved from."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder; download the model first, and give the folder it is in")
    try:
        config = read_json(str(folder / "config.json"))
    except TableError as error:
        raise ModelError(f"{folder} is no model of transformers: {error}") from error
    kind = str(config.get("model_type"))
    if kind.removesuffix("_text") not in _ARCHITECTURES:
        raise ModelError(f"{folder} holds a {kind} model; models of {', '.join(_ARCHITECTURES)} have a table")
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError(
            f"config.json of {folder} has architectures = {names!r}; it must be a list with the name of the model's "
            "class in transformers, as save_pretrained writes it"
        )
    return _class_named(names[0], kind, folder)


def _class_named(name: str, kind: str, folder: Path) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise Unsupported("transformers is not installed: pip install 'transformers>=5.16'") from error
    found = getattr(transformers, name, None)
    if found is None:
        raise Unsupported(
            f"transformers {transformers.__version__} has no {name!r}, the architecture that config.json of "
            f"{folder} names; a newer one may: pip install --upgrade transformers"
        )
    made_of = getattr(getattr(found, "config_class", None), "model_type", None)
    if str(made_of).removesuffix("_text") != kind.removesuffix("_text"):
        raise ModelError(f"config.json of {folder} names the architecture {name!r}, which is no {kind} model")
    return found


def _made(_: LazyEmbedding, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return make(*arguments)


@functools.cache
def _lazy(plain: type) -> type:
    """The class of a lazy model: its own under its own name, with what `_Lazified` adds."""
    return type(plain.__name__, (_Lazified, plain), {"__module__": plain.__module__, "__doc__": plain.__doc__})


def _put(model: Any, table: LazyTable) -> None:
    """Replace the model's embedding. Raises ModelError where the table is not its own."""
    name, embedding = _embedding_of(model)
    parent = model.get_submodule(name.rpartition(".")[0])
    _check_hash(parent, table)
    weight = embedding.weight
    try:
        lazy = LazyEmbedding(
            table,
            embedding.num_embeddings,
            embedding.embedding_dim,
            scale=getattr(embedding, "scalar_embed_scale", None),
            device=weight.device,
            dtype=weight.dtype,
        )
    except TableError as error:
        raise ModelError(f"{error}: the table is another model's") from error
    setattr(parent, name.rpartition(".")[2], lazy)
    # As a plain attribute: a second registration would show in the model's tree.
    model.__dict__["lazyio_table"] = lazy


def _embedding_of(model: Any) -> tuple[str, Any]:
    """Name and module of the table's embedding."""
    found = [(name, module) for name, module in model.named_modules() if name.rpartition(".")[2] in _TABLES]
    if len(found) != 1:
        names = f": {', '.join(name for name, _ in found)}" if found else ""
        raise ModelError(f"this {type(model).__name__} has {len(found)} per-layer embedding tables, not one{names}")
    return found[0]


def _check_hash(parent: Any, table: LazyTable) -> None:
    """That rows lie where the model looks for them, as far as the table's file tells."""
    stored: NgramHash | None = table.spec.ngram
    if stored is None or not hasattr(parent, "head_vocab_sizes"):
        return
    if [*stored.head_sizes] != parent.head_vocab_sizes or [*stored.head_offsets] != parent.head_offsets:
        raise ModelError(
            f"{table.spec.path}: the n-gram heads of {table.spec.tensor} have {list(stored.head_sizes)} rows, those of "
            f"the model {parent.head_vocab_sizes}: the table is another model's"
        )
