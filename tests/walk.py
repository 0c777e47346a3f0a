"""What a reader of one prediction walks through: functions, files, and rooms in order of first call
(`make walk`).

Counted are functions and methods of the package that `pm.predict` runs in a new process, without
caches on disk. Imports do not count; comprehensions and functions inside of functions belong to the
function that they stand in.
"""

import os
import sys
from collections import Counter
from inspect import CO_OPTIMIZED
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

import perfmodel as pm

PACKAGE = Path(pm.__file__).parent
JOB = ("gpt3-175b", "dgx-a100", "tp=8,pp=16,dp=8,zero=1,recompute=selective,sequence_parallel=true")


class Walk:
    """Records each function of the package when it is first called."""

    def __init__(self) -> None:
        self.functions: dict[CodeType, None] = {}
        self._imports = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if code.co_name == "<module>":
            self._imports += (event == "call") - (event == "return")
            return
        # Bodies of classes are not optimised: they run once, when their module is imported.
        is_function = code.co_flags & CO_OPTIMIZED and "<" not in code.co_qualname
        if (
            event == "call"
            and is_function
            and not self._imports
            and PACKAGE in Path(code.co_filename).parents
        ):
            self.functions.setdefault(code)

    @staticmethod
    def file_of(code: CodeType) -> Path:
        """File of a function inside of the package."""
        return Path(code.co_filename).relative_to(PACKAGE)

    def files(self) -> list[Path]:
        """Files inside of the package, in the order in which the walk comes to them."""
        return list(dict.fromkeys(map(self.file_of, self.functions)))


if __name__ == "__main__":
    predict = pm.predict
    walk = Walk()
    # Structures that an earlier run left on disk would be read instead of built: some sixty
    # functions less.
    with TemporaryDirectory() as empty_cache:
        os.environ["PERFMODEL_CACHE"] = empty_cache
        sys.setprofile(walk)
        predict(*JOB, devices=1024, global_batch=1536)
        sys.setprofile(None)
    files = walk.files()
    stays = [room for room, _ in groupby(file.parts[0] for file in files)]
    print(f"{len(walk.functions)} functions in {len(files)} files")
    print(f"{len(stays)} stays in {len(set(stays))} rooms, {len(stays) - len(set(stays))} returns")

    # Where the reader spends the time.
    functions_of_room = Counter(walk.file_of(code).parts[0] for code in walk.functions)
    files_of_room = Counter(file.parts[0] for file in files)
    for room, count in functions_of_room.most_common():
        print(f"{count:5} functions in {files_of_room[room]:2} files of {room}")
