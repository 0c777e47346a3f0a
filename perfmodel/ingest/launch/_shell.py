"""What a launch script runs: its variables, functions and conditions followed as the shell would.

Nothing is executed. Commands that are programs are collected with their arguments; whatever depends on their output,
on files or on the cluster stays as it is written, and conditions on it are not judged. The tree of a script comes from
`perfmodel.ingest.launch._shell_syntax`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from perfmodel.ingest.launch import _shell_syntax as syntax
from perfmodel.ingest.launch import _shell_tree as tree
from perfmodel.ingest.launch._entries import broken
from perfmodel.ingest.launch._scheduler import directives, slurm_numbers, slurm_variables
from perfmodel.ingest.launch._shell_builtins import Builtins
from perfmodel.ingest.launch._shell_expansion import (
    LAUNCH_VARIABLES,
    MOST_TURNS,
    Command,
    State,
    Word,
    pieces,
    shown,
    with_braces,
)
from perfmodel.ingest.launch._shell_output import pipeline_output
from perfmodel.ingest.launch._shell_values import unknown

SHELLS: Final = ("bash", "sh", "zsh", "dash", "ksh")
PRINTING: Final = ("echo", "printf", "cat", "logger", "log", "info", "warn", "say", "tee")
"""Commands whose arguments are texts to show."""
MOST_STEPS: Final = 20_000
"""Commands of one script, beyond which it is none."""
MOST_SCRIPTS: Final = 8
"""Scripts that start one another."""
MOST_BEFORE_SCRIPT: Final = 30
"""Words of a command before the name of the script that it starts."""
_SYSTEM_FILES: Final = ("/etc/", "/usr/", "/opt/", "/root/", "~", "/home/")
"""Where files lie that set up a machine, and say nothing of a job."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """What a script runs."""

    commands: tuple[Command, ...]
    notes: tuple[str, ...]
    """Parts that were left out, one sentence each."""
    from_environment: tuple[str, ...]
    """Numbers that the script takes from variables of the environment: `NAME=VALUE`."""
    files: Mapping[str, str]
    """Texts of the files that it writes, by their names without folders."""


class _Stop(Exception):
    """`exit`, and `return`, `break` and `continue` by their names."""

    def __init__(self, kind: str, line: int) -> None:
        super().__init__(kind)
        self.kind, self.line = kind, line


class _Unknown(Exception):
    """The output of a command is not known."""


def run_script(
    text: str,
    place: str,
    environment: Mapping[str, str],
    *,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Script:
    """Commands of a script with their variables expanded.

    Assignments, arrays, parameters, arithmetic, conditions, `case`, loops over known words, functions, inner shells
    (`bash -c '...'`) and files beside the script are followed; the output of programs is not known.

    Args:
        text: the script.
        place: its path; files that it sources are looked for beside it.
        environment: variables that are set outside.
        arguments: the script's own, `$1` and so on.
        variables: set before it starts, as a scheduler does.

    Raises:
        LaunchFileError: a quote, bracket or block that is never closed, or a script that never ends.
    """
    try:
        script_tree = syntax.parse(text, place)
        state = _run_tree(script_tree, place, environment, arguments, variables or {}, obeys_exit=True)
        launched = any(word.text.startswith("--") for command in state.commands for word in command.words)
        if state.stopped_at and not launched:
            # A script that refuses to run without its arguments still says the rest.
            line = state.stopped_at
            state = _run_tree(script_tree, place, environment, arguments, variables or {}, obeys_exit=False)
            state.notes.append(f"line {line}: the script stops there; it is read on as if it did not")
    except RecursionError:
        raise broken(place, 0, "nested too deeply to be a launch script") from None
    taken = tuple(f"{name}={value}" for name, value in state.taken.items() if value.isdecimal())
    return Script(
        commands=tuple(state.commands),
        notes=tuple(dict.fromkeys(state.notes)),
        from_environment=taken,
        files=state.files,
    )


def _run_tree(
    script_tree: tree.Sequence,
    place: str,
    environment: Mapping[str, str],
    arguments: Sequence[str],
    variables: Mapping[str, str],
    *,
    obeys_exit: bool,
) -> State:
    state = State(place, environment, place, [Word(text, 0) for text in arguments])
    for name, value in variables.items():
        state.variables[name] = {"0": Word(value, 0)}
    interpreter = _Interpreter(state, obeys_exit)
    try:
        interpreter.sequence(script_tree)
    except _Stop as stop:
        state.stopped_at = stop.line
    # A function that nobody calls by its name may be called by a program (`srun bash -c "export -f ..."`).
    for name in [name for name in state.functions if name not in state.called]:
        with interpreter.supposing():
            interpreter.call(name, [Word(name, 0)])
    return state


class _Interpreter(Builtins):
    """Walks the tree of a script, a method for each kind of node.

    Statuses are True (success), False, or None where the script does not say.
    """

    def __init__(self, state: State, obeys_exit: bool = True, prefix: tuple[Word, ...] = ()) -> None:
        super().__init__(state)
        self.obeys_exit = obeys_exit
        self.prefix = prefix
        """Words of the command that started this shell: `srun --nodes 4` of `srun --nodes 4 bash -c '...'`."""
        self.certain = True

    # Lists of commands.

    def sequence(self, node: tree.Sequence) -> bool | None:
        """Run commands one after the other; the status is that of the last."""
        status: bool | None = True
        for item in node.items:
            status = self.and_or(item)
        return status

    def and_or(self, node: tree.AndOr) -> bool | None:
        status = self.pipeline(node.first)
        for sign, other in node.others:
            if status is None:
                # Programs are taken to succeed; a condition that cannot be judged decides nothing.
                status = True if not self.judged(node.first) else None
            if status is None:
                line = getattr(node.first.commands[-1], "line", 0)
                body = tree.Sequence((tree.AndOr(other, ()),))
                self.left_out(body, line, "the condition cannot be judged")
            elif status is (sign == "&&"):
                status = self.pipeline(other)
        return status

    @staticmethod
    def judged(node: tree.Pipeline) -> bool:
        """Whether a pipeline is a condition, not a program that runs."""
        last = node.commands[-1]
        if isinstance(last, tree.Test):
            return True
        head = last.words[0].parts if isinstance(last, tree.Simple) and last.words else ()
        return len(head) == 1 and head[0].text in ("[", "test", "command", "type", "which", "grep", "hash")

    def pipeline(self, node: tree.Pipeline) -> bool | None:
        if self.written is not None and self.writes(node):
            return self.write(node)
        printed = None
        status: bool | None = True
        for i, command in enumerate(node.commands):
            last = i + 1 == len(node.commands)
            if last and printed is not None and self.is_shell(command):
                # `echo "torchrun ..." | bash` runs what is printed.
                self.inner(printed.text, printed.line, (), ())
                return None
            printed = self.printed(command) if not last else None
            status = self.run(command)
        if node.negated and status is not None:
            return not status
        return status

    # Output of commands, `$(...)`.

    def output(self, part: tree.Part) -> str | None:
        outer, folder = self.written, self.folder
        self.written = []
        try:
            with self.subshell(), suppress(_Stop):
                self.inline(part.text, part.line)
            return "".join(self.written).rstrip("\n")
        except _Unknown:
            return None
        finally:
            self.written, self.folder = outer, folder

    def writes(self, node: tree.Pipeline) -> bool:
        """Whether a pipeline is of programs, which write something, and not of what the shell does itself."""
        first = node.commands[0]
        if not isinstance(first, tree.Simple) or not first.words:
            return len(node.commands) > 1
        words = self.expand(first.words[0])
        head = words[0].text if words else ""
        is_own = head in self.state.functions or head in tree.DECLARING or self.builtin(head) is not None
        return len(node.commands) > 1 or not is_own

    def write(self, node: tree.Pipeline) -> bool:
        """Add what a pipeline writes to the output; raises `_Unknown` where nobody knows it."""

        def expand(raw: tree.RawWord) -> list[str]:
            return [word.text for word in self.expand(raw)]

        text = pipeline_output(node, expand, self.text_of, self.variable, self.folder)
        if text is None or self.written is None:
            raise _Unknown
        self.written.append(text)
        return True

    def is_shell(self, node: tree.Node) -> bool:
        if not isinstance(node, tree.Simple) or len(node.words) != 1:
            return False
        return [word.text for word in self.expand(node.words[0])][:1] in [[name] for name in SHELLS]

    def printed(self, node: tree.Node) -> Word | None:
        """What an `echo` writes."""
        if not isinstance(node, tree.Simple) or not node.words:
            return None
        words = [word for raw in node.words for word in self.expand(raw)]
        if not words or words[0].text != "echo":
            return None
        return Word(" ".join(word.text for word in words[1:] if word.text not in ("-e", "-n")), node.line)

    def run(self, node: tree.Node) -> bool | None:
        self.state.steps += 1
        if self.state.steps > MOST_STEPS:
            raise broken(self.state.place, 0, f"more than {MOST_STEPS:,} commands; this is no launch script")
        match node:
            case tree.Simple():
                return self.simple(node)
            case tree.Test():
                return self.condition_of(node)
            case tree.Calculation():
                value = self.arithmetic(node.text, node.line)
                return None if value is None else value != 0
            case tree.If():
                return self.if_block(node)
            case tree.While():
                return self.while_loop(node)
            case tree.For():
                return self.for_loop(node)
            case tree.CountingFor():
                return self.left_out(node.body, node.line, "the loop is not followed")
            case tree.Case():
                return self.case_block(node)
            case tree.Function():
                self.state.functions[node.name] = node.body
                return True
            case tree.Group():
                if not node.subshell:
                    return self.sequence(node.body)
                with self.subshell():
                    return self.sequence(node.body)

    @contextmanager
    def subshell(self) -> Iterator[None]:
        """What happens here changes no variables outside; an `exit` ends only this."""
        variables, arguments, name = dict(self.state.variables), list(self.state.arguments), self.state.name
        try:
            yield
        except _Stop as stop:
            if stop.kind != "exit":
                raise
        finally:
            self.state.variables, self.state.arguments, self.state.name = variables, arguments, name

    @contextmanager
    def supposing(self) -> Iterator[None]:
        """What happens here may happen or not: its commands are possible ones, and it changes and stops nothing."""
        certain, self.certain = self.certain, False
        variables, arguments = dict(self.state.variables), list(self.state.arguments)
        try:
            yield
        except _Stop:
            pass
        finally:
            self.certain = certain
            self.state.variables, self.state.arguments = variables, arguments

    def left_out(self, body: tree.Sequence, line: int, reason: str) -> None:
        """Commands that run or do not, or an unknown number of times; says so where they change anything."""
        before, commands = dict(self.state.variables), len(self.state.commands)
        changed: list[str] = []
        with self.supposing():
            try:
                self.sequence(body)
            finally:
                now = self.state.variables
                changed = [name for name in now if now[name] != before.get(name)]
        launches = any(_has_options(command) for command in self.state.commands[commands:])
        if changed or launches:
            what = f"what it sets ({', '.join(changed[:6])})" if changed else "what it runs"
            self.state.notes.append(f"line {line}: {reason}; {what} is left out")

    # Blocks.

    def if_block(self, node: tree.If) -> bool | None:
        for i, (condition, body) in enumerate(node.branches):
            status = self.sequence(condition)
            if status is None:
                rest = [branch for _, branch in node.branches[i:]]
                rest += [node.otherwise] if node.otherwise is not None else []
                for branch in rest:
                    self.left_out(branch, node.line, "the condition cannot be judged")
                return None
            if status:
                return self.sequence(body)
        return True if node.otherwise is None else self.sequence(node.otherwise)

    def case_block(self, node: tree.Case) -> bool | None:
        subject = self.condition_text(node.subject)
        if unknown(subject):
            for _, body in node.clauses:
                self.left_out(body, node.line, f"{subject} is not defined, so that no case can be chosen")
            return None
        for patterns, body in node.clauses:
            if any(fnmatchcase(subject, self.pattern(pattern)) for pattern in patterns):
                return self.sequence(body)
        return True

    def while_loop(self, node: tree.While) -> bool | None:
        variables, arguments = dict(self.state.variables), list(self.state.arguments)
        commands = len(self.state.commands)
        for _ in range(MOST_TURNS):
            status = self.sequence(node.condition)
            if status is None:
                break
            if status is node.until or not self.turn(node.body):
                return True
        # A loop that waits for something outside: as if it had not been entered.
        self.state.variables, self.state.arguments = variables, arguments
        del self.state.commands[commands:]
        self.left_out(node.body, node.line, "the loop is not followed")
        return None

    def for_loop(self, node: tree.For) -> bool | None:
        if node.words is None:
            words = list(self.state.arguments)
        else:
            words = [word for raw in node.words for word in with_braces(self.expand(raw))]
        if any(unknown(word.text) for word in words) or len(words) > MOST_TURNS:
            self.left_out(node.body, node.line, "the loop is not followed")
            return None
        for word in words:
            self.state.variables[node.name] = {"0": word}
            if not self.turn(node.body):
                break
        return True

    def turn(self, body: tree.Sequence) -> bool:
        """One turn of a loop; False where it is the last."""
        try:
            self.sequence(body)
        except _Stop as stop:
            if stop.kind not in ("break", "continue"):
                raise
            return stop.kind == "continue"
        return True

    # Simple commands.

    def simple(self, node: tree.Simple) -> bool | None:
        words = [word for raw in node.words for word in self.expand(raw)]
        head = words[0].text if words else ""
        if not words or head in tree.DECLARING:
            return self.declare(node, words)
        if node.assignments:
            # `NAME=value command` sets it for this command alone.
            with self.restoring([assignment.name for assignment in node.assignments]):
                self.assign(node.assignments)
                return self.command(node, words)
        return self.command(node, words)

    def command(self, node: tree.Simple, words: list[Word]) -> bool | None:
        """What a command does: to the script's state if it is a part of the shell, else it is collected."""
        head = words[0].text
        builtin = self.builtin(head)
        if builtin is not None:
            return builtin(node, words)
        if head in self.state.functions:
            return self.call(head, words)
        if head in PRINTING and node.here is not None and node.output is not None:
            # `cat > inner.sh <<EOF` writes a script, which may be run later.
            name = self.joined(node.output).text
            self.state.files[Path(name).name] = self.text_of(node.here)
            return True
        if head in PRINTING:
            self.collect(words, certain=False)
            return True
        self.launch(node, words)
        return None

    def builtin(self, head: str) -> "Callable[[tree.Simple, list[Word]], bool | None] | None":
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
            "getopts": self.getopts,
            "exit": self.stop,
            "return": self.stop,
            "break": self.stop,
            "continue": self.stop,
            "command": self.prefixed,
            "exec": self.prefixed,
            "builtin": self.prefixed,
            "cd": self.change_folder,
        }
        return tables.get(head)

    def evaluate(self, node: tree.Simple, words: list[Word]) -> bool | None:
        return self.inline(" ".join(word.text for word in words[1:]), node.line)

    def stop(self, node: tree.Simple, words: list[Word]) -> bool | None:
        if words[0].text == "exit" and not self.obeys_exit:
            return True
        raise _Stop(words[0].text, node.line)

    def prefixed(self, node: tree.Simple, words: list[Word]) -> bool | None:
        rest = words[1:]
        while rest and rest[0].text.startswith("-"):
            if "v" in rest[0].text:  # `command -v nvcc` asks whether there is one
                return None
            del rest[0]
        return self.command(node, rest) if rest else True

    def call(self, name: str, words: Sequence[Word]) -> bool | None:
        """Run a function; what it declares local is forgotten after."""
        self.depth += 1
        if self.depth > syntax.DEEPEST:
            raise broken(self.state.place, 0, f"the function {name} calls itself without an end; mend the script")
        self.state.called.add(name)
        arguments, self.state.arguments = self.state.arguments, list(words[1:])
        self.locals.append({})
        try:
            return self.run(self.state.functions[name])
        except _Stop as stop:
            if stop.kind != "return":
                raise
            return True
        finally:
            self.restore(self.locals.pop())
            self.state.arguments = arguments
            self.depth -= 1

    # Other scripts, and inner shells.

    def inline(self, text: str, line: int, *, counts: bool = True) -> bool | None:
        """Run a text in this very shell."""
        self.depth += 1
        if self.depth > syntax.DEEPEST:
            raise broken(self.state.place, line, "the script runs itself without an end; mend it")
        try:
            return self.sequence(syntax.parse(text, self.state.place, line, counts=counts))
        finally:
            self.depth -= 1

    def inner(
        self, text: str, line: int, prefix: Sequence[Word], arguments: Sequence[Word], *, counts: bool = True
    ) -> None:
        """Run a text in a shell of its own, which knows this one's variables; its commands stand behind `prefix`."""
        outer, self.prefix = self.prefix, (*self.prefix, *prefix)
        with self.subshell():
            self.state.arguments = list(arguments)
            try:
                self.inline(text, line, counts=counts)
            finally:
                self.prefix = outer

    def source(self, node: tree.Simple, words: list[Word]) -> bool | None:
        name = words[1].text if len(words) > 1 else ""
        text = self.script_beside(name)
        if text is None:
            if not name.startswith(_SYSTEM_FILES) and not name.endswith("activate"):
                message = (
                    f"{Path(name).name or 'a file'} (line {node.line}) is not beside the script and is not followed"
                )
                self.state.notes.append(message)
            return None
        arguments = self.state.arguments
        self.state.arguments = words[2:] or arguments
        try:
            return self.inline(text, node.line, counts=False)
        except _Stop as stop:
            if stop.kind != "return":
                raise
            return True
        finally:
            self.state.arguments = arguments

    def launch(self, node: tree.Simple, words: list[Word]) -> None:
        """A program: an inner shell is followed, everything else is collected with its arguments."""
        names = [Path(word.text).name for word in words]
        shell_at = next((i for i, name in enumerate(names) if name in SHELLS), None)
        if shell_at is not None and self.shell(node, words, shell_at):
            return
        if names[0] in ("sbatch", "ssh", "salloc") and node.here is not None:
            self.submit(words, self.text_of(node.here), node.here.line, (), counts=True)
            return
        for i, word in enumerate(words):
            if word.text.endswith(".py") or i > MOST_BEFORE_SCRIPT:
                break
            is_script = word.text.endswith((".sh", ".slurm", ".sbatch")) and not word.text.startswith("-")
            text = self.script_beside(word.text) if is_script else None
            if text is not None and self.depth < MOST_SCRIPTS:
                self.submit(words[:i], text, node.line, words[i + 1 :], counts=False)
                return
        for i, word in enumerate(words):
            # `ssh host "cd there && torchrun ..."`: a whole command in one word.
            if i and re.match(r"[^-\s]\S*\s(.*\s)?-", word.text, re.DOTALL) and ".py" in word.text:
                self.inner(word.text, word.line, words[:i], ())
                return
        self.collect(words)

    def submit(self, words: Sequence[Word], text: str, line: int, arguments: Sequence[Word], *, counts: bool) -> None:
        """Run a script that a program starts; `sbatch` reads its `#SBATCH` lines, which options of its own replace."""
        prefix = list(words)
        if prefix and Path(prefix[0].text).name == "sbatch":
            prefix[1:1] = [Word(option, line) for option in directives(text)]
        numbers = slurm_numbers([word.text for word in prefix])
        with self.subshell():
            for name, value in slurm_variables(numbers).items():
                self.state.variables[name] = {"0": Word(value, line)}
            self.inner(text, line, prefix, arguments, counts=counts)

    def shell(self, node: tree.Simple, words: list[Word], at: int) -> bool:
        """Follow `bash -c text`, `bash file` or `bash <<EOF`; False where there is nothing to follow."""
        rest = words[at + 1 :]
        while rest and rest[0].text.startswith(("-", "+")):
            option = rest.pop(0).text
            if re.fullmatch(r"-[a-z]*c[a-z]*", option) and rest:
                with self.subshell():
                    self.state.name = rest[1].text if len(rest) > 1 else self.state.name
                    self.inner(rest[0].text, rest[0].line, words[:at], rest[2:])
                return True
            if option in ("-o", "+o", "-O", "--rcfile") and rest:
                rest.pop(0)
        text = self.script_beside(rest[0].text) if rest else None
        if text is not None and self.depth < MOST_SCRIPTS:
            self.submit(words[:at], text, node.line, rest[1:], counts=False)
            return True
        if node.here is not None:
            self.inner(self.text_of(node.here), node.here.line, words[:at], ())
            return True
        return False

    def collect(self, words: Sequence[Word], *, certain: bool = True) -> None:
        spread: list[Word] = []
        for word in words:
            # Whole arguments in one word are taken apart, though a shell would not.
            spread += pieces(word) if re.search(r"\s--", word.text) else [word]
        spread = [Word(shown(word.text), word.line) for word in spread]
        variables = {}
        for name in LAUNCH_VARIABLES:
            value = self.state.variables.get(name, {}).get("0")
            if value is not None:
                variables[name] = value.text
        self.state.commands.append(Command((*self.prefix, *spread), certain and self.certain, variables))


def _has_options(command: Command) -> bool:
    return any(word.text.startswith("--") for word in command.words)
