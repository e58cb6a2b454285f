"""DCP's reader without unpickling. `paralab.record.metadata` reads `.metadata` and never runs code
that the file refers to.

DCP reads tensors with `torch.load(weights_only=True)`. It unpickles only non-tensor entries, and
this reader's metadata has none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from paralab.record.metadata import TensorEntry, UnsafeMetadata, read_metadata


class SafeReader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        folder = Path(self.path)
        index = read_metadata(folder)
        index.check({path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()})
        return Metadata(
            state_dict_metadata={
                name: _as_metadata(entry) for name, entry in index.tensors.items()
            },
            storage_data={
                MetadataIndex(each.tensor, each.offsets): _StorageInfo(
                    each.file, each.start_byte, each.num_bytes
                )
                for each in index.locations
            },
            storage_meta=StorageMeta(load_id=self.load_id),
        )


def _as_metadata(entry: TensorEntry) -> TensorStorageMetadata:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsafeMetadata(f"torch {torch.__version__} has no dtype {entry.dtype}")
    size = torch.Size
    chunks = [ChunkStorageMetadata(size(one.offsets), size(one.sizes)) for one in entry.chunks]
    return TensorStorageMetadata(TensorProperties(dtype), size(entry.size), chunks)
