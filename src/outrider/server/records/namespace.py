"""The records of one namespace: a folder of training data that never grows beyond a budget."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from outrider.errors import InvalidParameterError
from outrider.files import storing
from outrider.server.records.origin import Origin
from outrider.train.manifest import MANIFEST, Shard, open_manifest, read_manifest
from outrider.train.origin import keep_witness
from outrider.train.records import Record, read_records, write_shard

#: Texts in a file, and the share of the budget that a file takes at most.
_TEXTS, _SHARE = 64, 8
#: Bytes of a token and of a text in a file.
_BYTES_OF_TOKEN, _BYTES_OF_TEXT = 4, 29
_NAME = "shard-{:08d}.safetensors"


class NamespaceRecords:
    """Texts on the disk. Each change is a new manifest, so that a break leaves what was there before or what is there now.

    Args:
        folder: Of this namespace alone.
        origin: Where its texts come from.
        budget: Bytes that its texts may take; when they take more, the oldest file is deleted.

    Raises:
        ContradictionError: It holds texts of another target.
        InvalidParameterError: What it holds cannot be read.
        StorageError: It cannot be written.
    """

    def __init__(self, folder: Path, origin: Origin, budget: int) -> None:
        self._folder, self._budget = folder, budget
        settings = read_manifest(folder).settings if (folder / MANIFEST).exists() else origin.settings
        self._manifest = open_manifest(folder, origin.facts, settings)
        keep_witness(folder, self._manifest, origin.witness)
        self._delete_others()
        self._sizes = {shard.file: self._size(shard) for shard in self._manifest.shards}
        last = self._manifest.shards[-1:]
        self._number = 1 + max((int(shard.file[6:14]) for shard in last), default=-1)
        self._begun = self._texts_of(last) if self._has_room(last) else []
        self._put(self._within_budget(list(self._manifest.shards)))

    @property
    def num_texts(self) -> int:
        return self._manifest.num_records

    @property
    def num_tokens(self) -> int:
        return self._manifest.num_tokens

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    @property
    def held_out(self) -> float:
        """The share of the prompts that is never trained on."""
        return self._manifest.settings.held_out

    def add(self, texts: Sequence[Record]) -> None:
        """Keep texts. The last file is written anew with them as long as it has room.

        Raises:
            StorageError: They cannot be written. What was kept before stays.
        """
        kept = self._manifest.shards[:-1] if self._begun else self._manifest.shards
        parts = list(self._parts([*self._begun, *texts]))
        new = [self._written(part) for part in parts]
        self._put(self._within_budget([*kept, *new]))
        self._begun = parts[-1] if self._has_room(self._manifest.shards[-1:]) else []

    def delete(self) -> int:
        """Delete all texts; returns how many there were.

        Raises:
            StorageError: The folder takes no file.
        """
        count = self.num_texts
        self._begun = []
        self._put([])
        return count

    def _parts(self, texts: Sequence[Record]) -> Iterator[list[Record]]:
        """The texts, file by file."""
        part, size = list[Record](), 0
        for text in texts:
            more = _BYTES_OF_TEXT + _BYTES_OF_TOKEN * len(text.token_ids)
            if part and (len(part) == _TEXTS or size + more > self._budget // _SHARE):
                yield part
                part, size = [], 0
            part.append(text)
            size += more
        yield part

    def _has_room(self, last: Sequence[Shard]) -> bool:
        return any(shard.num_records < _TEXTS and self._sizes[shard.file] < self._budget // _SHARE for shard in last)

    def _written(self, part: Sequence[Record]) -> Shard:
        shard = write_shard(self._folder, _NAME.format(self._number), part)
        self._number += 1
        self._sizes[shard.file] = self._size(shard)
        return shard

    def _within_budget(self, shards: Sequence[Shard]) -> list[Shard]:
        """The newest files that fit."""
        left, kept = self._budget, list[Shard]()
        for shard in reversed(shards):
            left -= self._sizes[shard.file]
            if left < 0:
                break
            kept.insert(0, shard)
        return kept

    def _put(self, shards: Sequence[Shard]) -> None:
        """These files are the texts from now on; others are deleted."""
        self._manifest = self._manifest.model_copy(update={"shards": tuple(shards)})
        self._manifest.save(self._folder)
        self._delete_others()
        self._sizes = {shard.file: self._sizes[shard.file] for shard in shards}

    def _delete_others(self) -> None:
        """Delete the files of texts that the manifest does not name, also those that a break has left."""
        named = {shard.file for shard in self._manifest.shards}
        with storing(self._folder):
            for file in self._folder.glob("shard-*"):
                if file.name not in named:
                    file.unlink(missing_ok=True)

    def _size(self, shard: Shard) -> int:
        file = self._folder / shard.file
        try:
            return os.stat(file).st_size
        except OSError as error:
            problem = f"it cannot be read ({error.strerror})"
            raise InvalidParameterError("record", str(file), problem, "Put it back, or delete its folder.") from None

    def _texts_of(self, shards: tuple[Shard, ...]) -> list[Record]:
        return read_records(self._folder, self._manifest.model_copy(update={"shards": shards}))
