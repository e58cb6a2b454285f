"""Read a checkpoint's `.metadata` file, which lists the tensors and where their pieces are stored.
Reading never runs code from the file.

torch.distributed.checkpoint (DCP) writes this file as a pickle, and a pickle can call any function
by name. So this reader replaces each name with a placeholder that only stores its arguments. It
never imports or calls anything that the file names, rejects names outside a fixed list, and checks
every field.

Our checkpoints contain only tensors. Anything else is an error, because DCP would unpickle it
without a check.
"""

import io
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

METADATA = ".metadata"

# The names that torch 2.10 to 2.13 and Python 3.11 to 3.14 write.
DCP = "torch.distributed.checkpoint"
CLASSES = (
    "Metadata MetadataIndex StorageMeta _MEM_FORMAT_ENCODING TensorStorageMetadata "
    "TensorProperties ChunkStorageMetadata"
).split()
PATHS = ("PosixPath", "WindowsPath")
NAMES = {
    *((f"{DCP}.metadata", name) for name in CLASSES),
    (f"{DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in PATHS),
    ("builtins", "getattr"),  # how early versions of Python 3.11 pickle an enum
}
DTYPE = re.compile(r"(b?float|u?int|complex)\d\w*|bool")  # torch.float32, torch.float8_e4m3fn, …


class UnsafeMetadata(ValueError):
    """The file does not match what DCP writes for our checkpoints."""


@dataclass(frozen=True)
class Chunk:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's dtype (by its name in torch), shape, and chunks."""

    dtype: str
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Location:
    """Where the tensor chunk that begins at `offsets` is stored."""

    tensor: str
    offsets: tuple[int, ...]
    file: str
    start_byte: int
    num_bytes: int


@dataclass(frozen=True)
class TensorIndex:
    tensors: dict[str, TensorEntry]
    locations: tuple[Location, ...]

    def check(self, file_bytes: Mapping[str, int]) -> None:
        """Require that each chunk lies within its file. `file_bytes` has the size of each file."""
        for each in self.locations:
            if each.start_byte + each.num_bytes > file_bytes.get(each.file, -1):
                raise UnsafeMetadata(f"it places {each.tensor} outside the checkpoint's files")
        placed = {(each.tensor, each.offsets) for each in self.locations}
        for name, tensor in self.tensors.items():
            needed = {(name, chunk.offsets) for chunk in tensor.chunks if 0 not in chunk.sizes}
            if not needed <= placed:
                raise UnsafeMetadata(f"it does not say where {name} is stored")


def read_metadata(folder: Path) -> TensorIndex:
    """Read the metadata. Raise UnsafeMetadata for any content that DCP would not write."""
    content = (folder / METADATA).read_bytes()
    try:
        return _tensor_index(_StandInUnpickler(content).load())
    except UnsafeMetadata:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        problem = f"it is not a checkpoint's metadata ({type(error).__name__})"
        raise UnsafeMetadata(problem) from error


class _StandIn:
    """Stores the arguments from the pickle without using them."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Self:
        self = super().__new__(cls)
        self.args, self.state = args, None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _StandInUnpickler(pickle.Unpickler):
    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self.stand_ins: dict[str, type[_StandIn]] = {}

    def find_class(self, module: str, name: str) -> type[_StandIn]:
        if (module, name) not in NAMES and not (module == "torch" and DTYPE.fullmatch(name)):
            raise UnsafeMetadata(f"it refers to {module}.{name}, which no checkpoint needs")
        return self.stand_ins.setdefault(name, type(name, (_StandIn,), {}))


def _tensor_index(root: _StandIn) -> TensorIndex:
    tensors = {
        _text(name): _tensor(name, entry)
        for name, entry in root.state["state_dict_metadata"].items()
    }
    locations = tuple(
        _location(index.state, info.state) for index, info in root.state["storage_data"].items()
    )
    return TensorIndex(tensors, locations)


def _tensor(name: str, entry: _StandIn) -> TensorEntry:
    if type(entry).__name__ != "TensorStorageMetadata":
        raise UnsafeMetadata(f"{name} is not a tensor")
    # TensorProperties' state is a tuple.
    dtype = entry.state["properties"].state[0].__name__
    chunks = (
        Chunk(_size(chunk.state["offsets"]), _size(chunk.state["sizes"]))
        for chunk in entry.state["chunks"]
    )
    return TensorEntry(_text(dtype), _size(entry.state["size"]), tuple(chunks))


def _location(index: dict[str, Any], info: dict[str, Any]) -> Location:
    return Location(
        tensor=_text(index["fqn"]),
        offsets=_size(index["offset"]),
        file=_text(info["relative_path"]),
        start_byte=_count(info["offset"]),
        num_bytes=_count(info["length"]),
    )


def _size(value: _StandIn) -> tuple[int, ...]:
    """Return the numbers in a pickled torch.Size, whose argument is a tuple."""
    (numbers,) = value.args
    return tuple(_count(number) for number in numbers)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise UnsafeMetadata(f"{value!r} is not a size")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise UnsafeMetadata(f"{value!r} is not a name")
    return value
