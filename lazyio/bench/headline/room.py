"""Whether what is asked for can be, by tokens, device, memory and disk, before anything is made for it."""

from __future__ import annotations

import shutil
import sys
from bisect import bisect_right
from pathlib import Path
from typing import TYPE_CHECKING

from lazyio import settings
from lazyio.bench.abba.process import ask
from lazyio.bench.headline.work import ARCHITECTURE, Subject
from lazyio.errors import NeverFits
from lazyio.host import available_memory_bytes
from lazyio.ple.dtypes import TYPES
from lazyio.units import format_bytes

if TYPE_CHECKING:
    from lazyio.engine.synthetic import Plan

# Of a device's free memory, what weights and state may take where the number of layers is left to it: computing needs
# memory as well.
_SHARE = 7 / 8
_SPARE_BYTES = 64 << 20  # of the disk, for what is not the table
_FREE = "import sys, torch; print('{\"free\": %d}' % torch.cuda.mem_get_info(torch.device(sys.argv[1]))[0])"
_FREE_S = 120.0


def plan_of(subject: Subject) -> Plan:
    """The model. Raises SettingError for rows that it can't have."""
    from lazyio.engine.synthetic import plan_model

    return plan_model(ARCHITECTURE, subject.size, rows=subject.rows)


def table_bytes_of(plan: Plan, stored: str) -> int:
    """Bytes of the rows of a model's table, stored in that type."""
    assert plan.table is not None
    return plan.table.rows * TYPES[stored].row_bytes(plan.table.row_values)


def check_ids(plan: Plan, subject: Subject, tokens: int) -> None:
    """Raise SettingError or TableError for token ids that are not the model's, or too few."""
    from lazyio.engine.bench.session import tokens_of

    if subject.ids is not None:
        tokens_of(Path(subject.ids), tokens, plan.config["vocab_size"], 0)


def fitting_layers(plan: Plan, subject: Subject, tokens: int, lock: int) -> int:
    """The layers asked for, else as many as there is room for beside the state of a prompt of so many tokens.

    `lock` is a descriptor for processes to inherit. Raises NeverFits where there is too little room, SettingError for
    layers or weights that the model can't have, RunFailed where the device can't be asked.
    """
    table_bytes, device = table_bytes_of(plan, subject.stored), subject.device
    _check_host(table_bytes)
    room = _free_bytes(device, lock) - (table_bytes if device == "cpu" else 0)
    if subject.layers is None:
        room = int(_SHARE * room)
    layers = subject.layers or _most_layers(plan, room, subject, tokens)
    needed = _needed_bytes(plan, layers, subject, tokens)
    if needed > room:
        raise NeverFits(
            f"{layers} layers and the state of {tokens:,} tokens take {format_bytes(needed)}, and {format_bytes(room)} "
            f"of memory can be had for them on {device}: lower LAYERS, or take another DEVICE or SIZE=tiny"
        )
    return layers


def check_disk(folder: Path, size_bytes: int) -> None:
    """Raise NeverFits if a folder's disk has no room for a table."""
    free = shutil.disk_usage(folder).free
    if size_bytes + _SPARE_BYTES > free:
        raise NeverFits(
            f"the table takes {format_bytes(size_bytes)}, and {format_bytes(free)} of disk are free at {folder}: free "
            "some, lower ROWS, or give a FOLDER on another disk"
        )


def _check_host(table_bytes: int) -> None:
    free, reserve = available_memory_bytes(), settings.resolve("reserve", None)
    if table_bytes + reserve > free:
        raise NeverFits(
            f"mode off holds the table of {format_bytes(table_bytes)} in memory, and {format_bytes(free)} can be had, "
            f"of which {format_bytes(reserve)} stay free: lower ROWS, or LAZYIO_RESERVE"
        )


def _free_bytes(device: str, lock: int) -> int:
    """Memory of a device, asked for in a process of its own: what it takes of a GPU to ask would stay taken here."""
    if device == "cpu":
        return available_memory_bytes()
    return int(ask([sys.executable, "-c", _FREE, device], {}, _FREE_S, lock).document["free"])


def _most_layers(plan: Plan, room: int, subject: Subject, tokens: int) -> int:
    """The most layers that there is room for, or the least that a model with a table can have."""
    least: int = max(plan.config["ple_layer_ids"])
    more = range(least + 1, plan.config["num_hidden_layers"] + 1)
    return least + bisect_right(more, room, key=lambda layers: _needed_bytes(plan, layers, subject, tokens))


def _needed_bytes(plan: Plan, layers: int, subject: Subject, tokens: int) -> int:
    """What the weights of so many layers and the state of a prompt take."""
    import torch

    from lazyio.engine.models import model_class
    from lazyio.engine.place import dtype_of
    from lazyio.engine.weights.dummy import first_layers
    from lazyio.engine.weights.trunk import plan_dummy

    dtype = dtype_of(None, plan.config, torch.device(subject.device))
    with torch.device("meta"):
        model = model_class(plan.config["model_type"]).from_config(first_layers(plan.config, layers)).to(dtype)
    held = settings.resolve("weights", None)
    trunk = plan_dummy(model, device=torch.device(subject.device), dtype=dtype, weights=held, trunk=subject.trunk)
    return trunk.nbytes + int(model.new_state(tokens, torch.device("meta")).nbytes)
