"""Simple commands of a launch script: functions, parts of the shell, other scripts, and the
programs that it launches.

A program is not run: it is collected with its arguments. Inner shells and scripts beside this one
are followed.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from perfmodel.ingest.launch._entries import broken
from perfmodel.ingest.launch.shell import _syntax as syntax
from perfmodel.ingest.launch.shell import _tree as tree
from perfmodel.ingest.launch.shell._builtins import LONGEST_VALUE, Builtins
from perfmodel.ingest.launch.shell._expansion import pieces, shown
from perfmodel.ingest.launch.shell._output import command_output, formatted
from perfmodel.ingest.launch.shell._scheduler import directives, slurm_numbers, slurm_variables
from perfmodel.ingest.launch.shell._state import (
    LAUNCH_VARIABLES,
    SETTING_PREFIX,
    Command,
    State,
    Word,
)

ABSENT: Final = "its settings are missing here"
"""End of the note on a sourced file that does not exist."""
SHELLS: Final = ("bash", "sh", "zsh", "dash", "ksh")
PRINTING: Final = ("echo", "printf", "cat", "logger", "log", "info", "warn", "say", "tee")
"""Commands whose arguments are texts to show."""
WRITING: Final = ("cat", "echo", "printf", "tee")
"""Commands by which a script writes scripts and configurations."""
_HANDLING: Final = (
    *(
        "cp",
        "mv",
        "ln",
        "rm",
        "chmod",
        "chown",
        "install",
        "rsync",
        "scp",
        "touch",
        "ls",
        "stat",
        "wc",
    ),
    *("head", "tail", "sed", "grep", "awk", "diff", "git", "tar", "zip"),
)
"""Commands whose arguments are files to handle; a script among them is not run."""
MOST_SCRIPTS: Final = 8
"""Most scripts that start one another."""
MOST_BEFORE_SCRIPT: Final = 30
"""Most words of a command before the name of the script that it starts."""
_SYSTEM_FILES: Final = ("/etc/", "/usr/", "/opt/", "/root/", "~", "/home/")
"""Prefixes of paths of files that set up a machine and do not affect a job."""


class Stop(Exception):
    """Raised by `exit`, `return`, `break` and `continue`, with the name of the command."""

    def __init__(self, kind: str, line: int) -> None:
        super().__init__(kind)
        self.kind = kind
        self.line = line


class Commands(Builtins):
    """Runs simple commands. `_script` runs the blocks and lists that contain them.

    Statuses are True (success), False, or None where the script does not say.
    """

    def __init__(
        self, state: State, obeys_exit: bool = True, prefix: tuple[Word, ...] = ()
    ) -> None:
        super().__init__(state)
        self.obeys_exit = obeys_exit
        self.prefix = prefix
        """Words of the command that started this shell: `srun --nodes 4` of
        `srun --nodes 4 bash -c '...'`."""
        self.certain = True

    def sequence(self, node: tree.Sequence) -> bool | None:
        """Run commands one after the other; the status is that of the last."""
        raise NotImplementedError

    def run(self, node: tree.Node) -> bool | None:
        """Run one command or block."""
        raise NotImplementedError

    @contextmanager
    def subshell(self) -> Iterator[None]:
        """Run a block that changes no outer variables; `exit` ends only the block."""
        # Copies are shallow: values are replaced when they change and never changed in place.
        variables = dict(self.state.variables)
        arguments = list(self.state.arguments)
        name = self.state.name
        try:
            yield
        except Stop as stop:
            if stop.kind != "exit":
                raise
        finally:
            self.state.variables, self.state.arguments, self.state.name = variables, arguments, name

    def simple(self, node: tree.Simple) -> bool | None:
        argv = self.expanded(node.raw_words)
        head = argv[0].text if argv else ""
        if not argv or head in tree.DECLARING:
            return self.declare(node, argv)
        if node.assignments:
            # `NAME=value command` sets it for this command alone.
            with self.restoring([assignment.name for assignment in node.assignments]):
                self.assign(node.assignments)
                return self.command(node, argv)
        return self.command(node, argv)

    def command(self, node: tree.Simple, argv: list[Word]) -> bool | None:
        """Run a command: it changes the script's state if it is a part of the shell, else it is
        collected."""
        head = argv[0].text
        if head == "printf" and [word.text for word in argv[1:2]] == ["-v"]:
            return self.print_into(argv)
        builtin = self.builtin(head)
        if builtin is not None:
            return builtin(node, argv)
        if head in self.state.functions:
            if node.here is None:
                return self.call(head, argv)
            with self.reading(self.lines_of(node.here)):
                return self.call(head, argv)
        if head in WRITING and self.writes(node, argv) and node.here is not None:
            return True
        # Some scripts print the command that users shall run (`echo "torchrun ..."`): it counts if
        # no other trains.
        if head in PRINTING:
            self.collect(argv, certain=False)
            return True
        self.launch(node, argv)
        return None

    def writes(self, node: tree.Simple, argv: Sequence[Word], stdin: str | None = None) -> bool:
        """Record the files that a command writes, which may be run or read later; return whether it
        wrote any.

        Args:
            node: the command.
            argv: words of the command.
            stdin: text that the command before it in a pipeline gives to it.
        """
        texts = [word.text for word in argv]
        if node.here is not None:
            stdin = self.text_of(node.here)
        # `cat > run.json <<EOF`, `echo '{...}' > run.json`, `tee run.json <<EOF`
        names = [] if node.output is None else [self.joined(node.output).text]
        appends = node.appends
        if texts[0] == "tee":
            names += [text for text in texts[1:] if not text.startswith("-")]
            appends = appends or "-a" in texts
            texts = ["cat"]
        text = command_output(texts, stdin, self.folder, self.variable) if names else None
        if text is None:
            return False
        for name in names:
            name = Path(name).name
            before = self.state.files.get(name, "") if appends else ""
            # A script that writes to its own log again and again must not fill the memory.
            self.state.files[name] = (before + text)[:LONGEST_VALUE]
        return True

    def builtin(self, head: str) -> "Callable[[tree.Simple, list[Word]], bool | None] | None":
        """The function that runs a command of the shell itself; None for a program."""
        # Commands that change the script's own state, or whose status follows from it. All others
        # are programs.
        tables: dict[str, Callable[[tree.Simple, list[Word]], bool | None]] = {
            "[": self.old_test,
            "test": self.old_test,
            "true": lambda node, words: True,
            ":": lambda node, words: True,
            "false": lambda node, words: False,
            "set": self.set_arguments,
            "shift": self.shift,
            "unset": self.unset,
            "eval": self.evaluate,
            "source": self.source,
            ".": self.source,
            "let": self.let,
            "read": self.read,
            "mapfile": self.map_file,
            "readarray": self.map_file,
            "getopts": self.getopts,
            "exit": self.stop,
            "return": self.stop,
            "break": self.stop,
            "continue": self.stop,
            "command": self.prefixed,
            "exec": self.prefixed,
            "builtin": self.prefixed,
            "cd": self.change_folder,
            "env": self.with_environment,
        }
        return tables.get(head)

    def evaluate(self, node: tree.Simple, argv: list[Word]) -> bool | None:
        return self.in_this_shell(" ".join(word.text for word in argv[1:]), node.line)

    def print_into(self, argv: Sequence[Word]) -> bool:
        """`printf -v NAME form value ...` sets a variable, or an element of an array."""
        texts = [word.text for word in argv[2:]]
        target = re.fullmatch(r"([A-Za-z_]\w*)(?:\[(.+)\])?", texts[0]) if len(texts) > 1 else None
        text = formatted(texts[1], texts[2:]) if target else None
        if target is None or text is None:
            return False
        name = self.state.references.get(target[1], target[1])
        before = self.state.variables.get(name, {}) if target[2] else {}
        self.state.variables[name] = {
            **before,
            self.index(target[2]) if target[2] else "0": Word(text, argv[0].line),
        }
        return True

    def stop(self, node: tree.Simple, argv: list[Word]) -> bool | None:
        if argv[0].text == "exit" and not self.obeys_exit:
            return True
        raise Stop(argv[0].text, node.line)

    def prefixed(self, node: tree.Simple, argv: list[Word]) -> bool | None:
        arguments = argv[1:]
        while arguments and arguments[0].text.startswith("-"):
            if "v" in arguments[0].text:  # `command -v nvcc` asks whether there is one
                return None
            del arguments[0]
        return self.command(node, arguments) if arguments else True

    def with_environment(self, node: tree.Simple, argv: list[Word]) -> bool | None:
        """`env NAME=VALUE ... command` sets variables for this command alone."""
        arguments = argv[1:]
        stated: dict[str, Word] = {}
        while arguments:
            assignment = re.fullmatch(r"([A-Za-z_]\w*)=(.*)", arguments[0].text, re.DOTALL)
            if assignment is not None:
                stated[assignment[1]] = Word(assignment[2], arguments[0].line)
            elif not arguments[0].text.startswith("-"):
                break
            # `-u NAME` has a value, other options have none.
            del arguments[: 2 if arguments[0].text == "-u" else 1]
        if not arguments:
            return True
        with self.restoring(list(stated)):
            for name, value in stated.items():
                self.state.variables[name] = {"0": value}
            return self.command(node, arguments)

    def call(self, name: str, argv: Sequence[Word]) -> bool | None:
        """Run a function; its local variables are forgotten afterwards."""
        self.depth += 1
        if self.depth > syntax.DEEPEST:
            raise broken(
                self.state.place, 0, f"the function {name} calls itself forever; fix the script"
            )
        # Variables of shell are dynamic: a function sees and sets those of its caller, except those
        # that it declares `local`.
        self.state.called.add(name)
        arguments, self.state.arguments = self.state.arguments, list(argv[1:])
        references = dict(self.state.references)
        self.locals.append({})
        try:
            return self.run(self.state.functions[name])
        except Stop as stop:
            if stop.kind != "return":
                raise
            return True
        finally:
            self.restore(self.locals.pop())
            self.state.arguments, self.state.references = arguments, references
            self.depth -= 1

    # Other scripts, and inner shells.

    def in_this_shell(self, text: str, line: int, *, counts: bool = True) -> bool | None:
        """Run a text in this shell."""
        self.depth += 1
        if self.depth > syntax.DEEPEST:
            raise broken(self.state.place, line, "the script runs itself forever; fix it")
        try:
            return self.sequence(syntax.parse(text, self.state.place, line, counts=counts))
        finally:
            self.depth -= 1

    def in_inner_shell(
        self,
        text: str,
        line: int,
        prefix: Sequence[Word],
        arguments: Sequence[Word],
        *,
        counts: bool = True,
    ) -> None:
        """Run a text in a sub-shell that inherits this one's variables; its commands are recorded
        after `prefix`."""
        outer, self.prefix = self.prefix, (*self.prefix, *prefix)
        with self.subshell():
            self.state.arguments = list(arguments)
            try:
                self.in_this_shell(text, line, counts=counts)
            finally:
                self.prefix = outer

    def source(self, node: tree.Simple, argv: list[Word]) -> bool | None:
        """Run `source FILE`."""
        # A file that is sourced runs in this very shell: its variables stay, and its `return` ends
        # it alone.
        name = argv[1].text if len(argv) > 1 else ""
        text = self.script_beside(name)
        if text is None:
            if not name.startswith(_SYSTEM_FILES) and not name.endswith("activate"):
                message = (
                    f"{Path(name).name or 'a file'} (line {node.line}) was not found in the "
                    f"script's folder; {ABSENT}"
                )
                self.state.notes.append(message)
                self.state.absent.append(f"{Path(name).name or 'a file'} (line {node.line})")
            return None
        arguments = self.state.arguments
        self.state.arguments = argv[2:] or arguments
        try:
            return self.in_this_shell(text, node.line, counts=False)
        except Stop as stop:
            if stop.kind != "return":
                raise
            return True
        finally:
            self.state.arguments = arguments

    def launch(self, node: tree.Simple, argv: list[Word]) -> None:
        """Launch a program: an inner shell is followed, everything else is recorded with its
        arguments."""
        # From the plainest to the least likely: an inner shell, a job submitted as a here-document,
        # a script beside this one, a whole command in one word; else a program.
        names = [Path(word.text).name for word in argv]
        shell_at = next((i for i, name in enumerate(names) if name in SHELLS), None)
        if shell_at is not None and self.shell(node, argv, shell_at):
            return
        if names[0] in ("sbatch", "ssh", "salloc") and node.here is not None:
            self.submit(argv, self.text_of(node.here), node.here.line, (), counts=True)
            return
        program = next((name for name in names if name != "sudo"), "")
        for i, word in enumerate([] if program in _HANDLING else argv):
            # Words after a Python program are its arguments, and a script among them is not run.
            if word.text.endswith(".py") or i > MOST_BEFORE_SCRIPT:
                break
            is_script = word.text.endswith(
                (".sh", ".slurm", ".sbatch")
            ) and not word.text.startswith("-")
            text = self.script_beside(word.text) if is_script else None
            if text is not None and self.depth < MOST_SCRIPTS:
                self.submit(argv[:i], text, node.line, argv[i + 1 :], counts=False)
                return
            if is_script and text is None:
                self.state.absent.append(f"{Path(word.text).name} (line {node.line})")
        for i, word in enumerate(argv):
            # `ssh host "cd there && torchrun ..."`: a whole command in one word.
            if i and re.match(r"[^-\s]\S*\s(.*\s)?-", word.text, re.DOTALL) and ".py" in word.text:
                self.in_inner_shell(word.text, word.line, argv[:i], ())
                return
        self.collect(argv)

    def submit(
        self, argv: Sequence[Word], text: str, line: int, arguments: Sequence[Word], *, counts: bool
    ) -> None:
        """Run a script that a program starts. `sbatch` reads its `#SBATCH` lines, which options on
        the command line override."""
        prefix = list(argv)
        if prefix and Path(prefix[0].text).name == "sbatch":
            prefix[1:1] = [Word(option, line) for option in directives(text)]
        numbers = slurm_numbers([word.text for word in prefix])
        with self.subshell():
            for name, value in slurm_variables(numbers).items():
                self.state.variables[name] = {"0": Word(value, line)}
            self.in_inner_shell(text, line, prefix, arguments, counts=counts)

    def shell(self, node: tree.Simple, argv: list[Word], at: int) -> bool:
        """Follow `bash -c text`, `bash file` or `bash <<EOF`; return False if there is nothing to
        follow."""
        arguments = argv[at + 1 :]
        while arguments and arguments[0].text.startswith(("-", "+")):
            option = arguments.pop(0).text
            # `bash -lc 'text' name arg ...`: the word behind the text is `$0`.
            if re.fullmatch(r"-[a-z]*c[a-z]*", option) and arguments:
                with self.subshell():
                    self.set_by_scheduler(argv[:at])
                    self.state.name = arguments[1].text if len(arguments) > 1 else self.state.name
                    self.in_inner_shell(
                        arguments[0].text, arguments[0].line, argv[:at], arguments[2:]
                    )
                return True
            # Options with a value, which is not the script's name.
            if option in ("-o", "+o", "-O", "--rcfile") and arguments:
                arguments.pop(0)
        text = self.script_beside(arguments[0].text) if arguments else None
        if text is not None and self.depth < MOST_SCRIPTS:
            self.submit(argv[:at], text, node.line, arguments[1:], counts=False)
            return True
        if node.here is not None:
            self.in_inner_shell(self.text_of(node.here), node.here.line, argv[:at], ())
            return True
        return False

    def set_by_scheduler(self, argv: Sequence[Word]) -> None:
        """Set SLURM's variables for a program that `srun -N 4 ...` starts, unless a job has set
        them before."""
        if not argv or Path(argv[0].text).name not in ("srun", "salloc"):
            return
        numbers = slurm_numbers([word.text for word in argv])
        if not {"nodes", "ntasks"} & set(numbers):
            return
        for name, value in slurm_variables(numbers).items():
            self.state.variables.setdefault(name, {"0": Word(value, argv[0].line)})

    def collect(self, argv: Sequence[Word], *, certain: bool = True) -> None:
        """Add a command to those that the script runs; `certain`: whether it is run, not only
        printed."""
        spread: list[Word] = []
        for word in argv:
            # Whole arguments in one word are taken apart, though a shell would not.
            if re.search(r"\s--", word.text):
                spread += pieces(word)
            else:
                spread += [word]
        spread = [Word(shown(word.text), word.line) for word in spread]
        # Launchers read some settings from variables (torchtitan's run_train.sh: NGPU,
        # CONFIG_FILE), which may change later in the script: a command keeps those of its moment.
        variables = {}
        settings = [name for name in self.state.variables if name.startswith(SETTING_PREFIX)]
        for name in (*LAUNCH_VARIABLES, *settings):
            value = self.state.variables.get(name, {}).get("0")
            if value is not None:
                variables[name] = value.text
        self.state.commands.append(
            Command((*self.prefix, *spread), certain and self.certain, variables)
        )


def has_options(command: Command) -> bool:
    return any(word.text.startswith("--") for word in command.argv)
