"""Interprets a launch script: variables, functions and conditions are followed as in the shell.

Nothing is executed. Programs that are started are collected with their arguments. Text that depends
on their output, on files or on the cluster stays as it is written, and conditions on it are not
decided. The tree of a script comes from `perfmodel.ingest.launch.shell._syntax`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from perfmodel.ingest.launch._entries import broken
from perfmodel.ingest.launch.shell import _syntax as syntax
from perfmodel.ingest.launch.shell import _tree as tree
from perfmodel.ingest.launch.shell._commands import SHELLS, Commands, Stop, has_options
from perfmodel.ingest.launch.shell._expansion import MOST_TURNS, with_braces
from perfmodel.ingest.launch.shell._output import pipeline_output
from perfmodel.ingest.launch.shell._state import Command, State, Word
from perfmodel.ingest.launch.shell._values import unknown

MOST_STEPS: Final = 20_000
"""Most commands of a launch script."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """Commands that a script runs, and commands that were not followed."""

    commands: tuple[Command, ...]
    notes: tuple[str, ...]
    """Parts that were left out, one sentence each."""
    from_environment: tuple[str, ...]
    """Numbers that the script takes from variables of the environment: `NAME=VALUE`."""
    files: Mapping[str, str]
    """Texts of the files that it writes, by their names without folders."""
    absent: tuple[str, ...]
    """Scripts that it runs or sources but that are not in the same folder, with their lines."""


class _Unknown(Exception):
    """Raised if the output of a command is unknown."""


def run_script(
    text: str,
    place: str,
    environment: Mapping[str, str],
    *,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Script:
    """Commands of a script with their variables expanded.

    Assignments, arrays, parameters, arithmetic, conditions, `case`, loops over known words,
    functions, inner shells (`bash -c '...'`) and files beside the script are followed; the output
    of programs is not known.

    Args:
        text: the script.
        place: path of the script; files that it sources are looked for beside it.
        environment: variables that are set outside.
        arguments: the script's own, `$1` and so on.
        variables: environment variables set before it starts, as a scheduler does.

    Raises:
        LaunchFileError: a quote, bracket or block that is never closed, or a script that never
            ends.
    """
    try:
        # The first run believes every `exit`. Scripts that check their arguments ("usage: ...")
        # leave before they launch anything when they are read without any; a second run then passes
        # over the exits.
        script_tree = syntax.parse(text, place)
        state = _run_tree(
            script_tree, place, environment, arguments, variables or {}, obeys_exit=True
        )
        launched = any(map(has_options, state.commands))
        if state.stopped_at and not launched:
            # A script that refuses to run without its arguments still says the rest.
            line = state.stopped_at
            state = _run_tree(
                script_tree, place, environment, arguments, variables or {}, obeys_exit=False
            )
            state.notes.append(f"the script exits on line {line}; perfmodel reads the rest anyway")
    except RecursionError:
        raise broken(place, 0, "nested too deeply to be a launch script") from None
    # Numbers from the reader's own environment may differ on the cluster: they are named in the
    # answer.
    assumed = tuple(f"{name}={value}" for name, value in state.taken.items() if value.isdecimal())
    return Script(
        commands=tuple(state.commands),
        notes=tuple(dict.fromkeys(state.notes)),
        from_environment=assumed,
        files=state.files,
        absent=tuple(dict.fromkeys(state.absent)),
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
    """Run a parsed script and return the state that it leaves."""
    state = State(place, environment, place, [Word(text, 0) for text in arguments])
    for name, value in variables.items():
        state.variables[name] = {"0": Word(value, 0)}
    interpreter = _Interpreter(state, obeys_exit)
    try:
        interpreter.sequence(script_tree)
    except Stop as stop:
        state.stopped_at = stop.line
    # A function that nobody calls by its name may be called by a program
    # (`srun bash -c "export -f ..."`).
    for name in [name for name in state.functions if name not in state.called]:
        with interpreter.tentatively():
            interpreter.call(name, [Word(name, 0)])
    return state


class _Interpreter(Commands):
    """Walks the tree of a script, a method for each kind of node.

    Statuses are True (success), False, or None where the script does not say.
    """

    # Lists of commands.

    def sequence(self, node: tree.Sequence) -> bool | None:
        """Run commands one after the other; the status is that of the last."""
        status: bool | None = True
        for item in node.items:
            status = self.and_or(item)
        return status

    def and_or(self, node: tree.AndOr) -> bool | None:
        status = self.pipeline(node.first)
        for sign, pipeline in node.rest:
            if status is None:
                # Programs are taken to succeed; a condition that cannot be judged decides nothing.
                status = True if not self.is_condition(node.first) else None
            if status is None:
                line = getattr(node.first.commands[-1], "line", 0)
                body = tree.Sequence((tree.AndOr(pipeline, ()),))
                self.left_out(body, line, "the condition cannot be evaluated")
            elif status is (sign == "&&"):
                status = self.pipeline(pipeline)
        return status

    @staticmethod
    def is_condition(node: tree.Pipeline) -> bool:
        """Whether a pipeline is a condition, not a program that runs."""
        last = node.commands[-1]
        if isinstance(last, tree.Test):
            return True
        head = last.raw_words[0].parts if isinstance(last, tree.Simple) and last.raw_words else ()
        return len(head) == 1 and head[0].text in (
            "[",
            "test",
            "command",
            "type",
            "which",
            "grep",
            "hash",
        )

    def pipeline(self, node: tree.Pipeline) -> bool | None:
        """Run `a | b`; returns the last command's status, None if unknown."""
        # Inside `$(...)` output counts and not the commands that make it.
        if self.captured_output is not None and self.is_of_programs(node):
            return self.capture(node)
        printed = None
        status: bool | None = True
        for i, command in enumerate(node.commands):
            last = i + 1 == len(node.commands)
            if last and printed is not None and self.is_shell(command):
                # `echo "torchrun ..." | bash` runs what is printed.
                self.in_inner_shell(printed.text, printed.line, (), ())
                return None
            # `cat <<EOF | tee run.json` and `echo '{...}' | jq . > run.json` write files.
            if last and i and isinstance(command, tree.Simple) and command.raw_words:
                self.pipe_into_file(node, command)
            printed = self.echoed_text(command) if not last else None
            if last and i and isinstance(command, (tree.While, tree.Group)):
                piped = self.piped_text(node)
            else:
                piped = None
            if piped is None:
                status = self.run(command)
                continue
            # Variables that the last command of a pipeline sets are gone after it.
            with self.subshell(), self.reading(piped):
                status = self.run(command)
        if node.negated and status is not None:
            return not status
        return status

    def pipe_into_file(self, node: tree.Pipeline, last: tree.Simple) -> None:
        """Record the file that the last command of a pipeline writes, if its text is known."""
        argv = self.expanded(last.raw_words)
        if not argv or (argv[0].text != "tee" and last.output is None):
            return

        text = self.piped_text(node)
        if text is not None:
            self.writes(last, argv, text)

    def piped_text(self, node: tree.Pipeline) -> str | None:
        """Text that the last command of a pipeline reads; None if nobody knows it."""

        def expand(raw: tree.RawWord) -> list[str]:
            return [word.text for word in self.expand(raw)]

        before = tree.Pipeline(node.commands[:-1], negated=False)
        return pipeline_output(
            before, expand, self.text_of, self.variable, self.script_beside, self.folder
        )

    # Output of commands, `$(...)`.

    def output(self, part: tree.Part) -> str | None:
        # `$(...)` is a subshell: variables that it sets are gone afterwards, and `exit` ends it
        # alone.
        outer, folder = self.captured_output, self.folder
        self.captured_output = []
        try:
            with self.subshell(), suppress(Stop):
                self.in_this_shell(part.text, part.line)
            return "".join(self.captured_output).rstrip("\n")
        except _Unknown:
            return None
        finally:
            self.captured_output = outer
            self.folder = folder

    def is_of_programs(self, node: tree.Pipeline) -> bool:
        """Whether a pipeline consists of programs that write something, not of shell builtins."""
        first = node.commands[0]
        if not isinstance(first, tree.Simple) or not first.raw_words:
            return len(node.commands) > 1
        argv = self.expand(first.raw_words[0])
        head = argv[0].text if argv else ""
        # `env` only sets variables for the program behind it.
        is_builtin = head != "env" and self.builtin(head) is not None
        is_own = head in self.state.functions or head in tree.DECLARING or is_builtin
        return len(node.commands) > 1 or not is_own

    def capture(self, node: tree.Pipeline) -> bool:
        """Add the output of a pipeline to the captured text; raises `_Unknown` if it cannot be
        determined."""

        def expand(raw: tree.RawWord) -> list[str]:
            return [word.text for word in self.expand(raw)]

        text = pipeline_output(
            node, expand, self.text_of, self.variable, self.script_beside, self.folder
        )
        if text is None or self.captured_output is None:
            self.launch_within(node)
            raise _Unknown
        self.captured_output.append(text)
        return True

    def launch_within(self, node: tree.Pipeline) -> None:
        """Launch the training programs of a pipeline whose output a script keeps
        (`log=$(torchrun train.py ... 2>&1)`)."""
        for command in node.commands:
            if not isinstance(command, tree.Simple):
                continue
            argv = self.expanded(command.raw_words)
            if not _starts_training(argv):
                continue
            with self.restoring([assignment.name for assignment in command.assignments]):
                self.assign(command.assignments)
                self.collect(argv)

    def is_shell(self, node: tree.Node) -> bool:
        if not isinstance(node, tree.Simple) or len(node.raw_words) != 1:
            return False
        return [word.text for word in self.expand(node.raw_words[0])][:1] in [
            [name] for name in SHELLS
        ]

    def echoed_text(self, node: tree.Node) -> Word | None:
        """Text that an `echo` writes."""
        if not isinstance(node, tree.Simple) or not node.raw_words:
            return None
        argv = self.expanded(node.raw_words)
        if not argv or argv[0].text != "echo":
            return None
        return Word(
            " ".join(word.text for word in argv[1:] if word.text not in ("-e", "-n")), node.line
        )

    def run(self, node: tree.Node) -> bool | None:
        """Run a node of any kind, and return its status."""
        self.state.steps += 1
        if self.state.steps > MOST_STEPS:
            raise broken(
                self.state.place,
                0,
                f"more than {MOST_STEPS:,} commands; this is not a launch script",
            )
        # Statuses are those of a shell: of blocks that ran the status of their last command.
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
                return self.counting_loop(node)
            case tree.Case():
                return self.case_block(node)
            case tree.Function():
                self.state.functions[node.name] = node.body
                return True
            case tree.Fed():
                with self.reading(self.text_for(node)):
                    return self.run(node.block)
            case tree.Group():
                if not node.subshell:
                    return self.sequence(node.body)
                with self.subshell():
                    return self.sequence(node.body)

    @contextmanager
    def tentatively(self) -> Iterator[None]:
        """Run a block that may or may not run: its commands are marked as uncertain, and it changes
        and stops nothing."""
        # Variables are put back, commands stay: a launch behind a condition that cannot be judged
        # is better than none.
        certain, self.certain = self.certain, False
        variables = dict(self.state.variables)
        arguments = list(self.state.arguments)
        try:
            yield
        except Stop:
            pass
        finally:
            self.certain = certain
            self.state.variables, self.state.arguments = variables, arguments

    def left_out(self, body: tree.Sequence, line: int, reason: str) -> list[str]:
        """Skip commands that may or may not run, or that run an unknown number of times, and record
        it if they change anything.

        Returns:
            Names of the variables that they set.
        """
        # The body is walked all the same, to find the variables that it would have changed.
        before = dict(self.state.variables)
        commands = len(self.state.commands)
        changed: list[str] = []
        with self.tentatively():
            try:
                self.sequence(body)
            finally:
                now = self.state.variables
                changed = [name for name in now if now[name] != before.get(name)]
        launches = any(has_options(command) for command in self.state.commands[commands:])
        if changed or launches:
            effect = f"what it sets ({', '.join(changed[:6])})" if changed else "what it runs"
            self.state.notes.append(f"line {line}: {reason}, so {effect} is skipped")
        return changed

    # Blocks.

    def if_block(self, node: tree.If) -> bool | None:
        """Run the branch whose condition holds, or every branch that may be reached."""
        for i, (condition, body) in enumerate(node.branches):
            status = self.sequence(condition)
            if status is None:
                remaining = [branch for _, branch in node.branches[i:]]
                if node.otherwise is not None:
                    remaining += [node.otherwise]
                # A launch that comes later is not reached by a branch that exits: the other one was
                # taken.
                going_on = [branch for branch in remaining if not _exits(branch)]
                if len(going_on) == 1 and len(remaining) > 1 and node.otherwise is not None:
                    return self.sequence(going_on[0])
                for branch in going_on:
                    self.left_out(branch, node.line, "the condition cannot be evaluated")
                return None
            if status:
                return self.sequence(body)
        return True if node.otherwise is None else self.sequence(node.otherwise)

    def case_block(self, node: tree.Case) -> bool | None:
        subject = self.condition_text(node.subject)
        if unknown(subject):
            for clause in node.clauses:
                self.left_out(
                    clause.body, node.line, f"{subject} is not defined, and no case can be chosen"
                )
            return None
        status: bool | None = True
        goes_on = False
        for clause in node.clauses:
            patterns = (self.pattern(pattern) for pattern in clause.patterns)
            if not goes_on and not any(fnmatchcase(subject, pattern) for pattern in patterns):
                continue
            status = self.sequence(clause.body)
            if clause.end not in (";&", ";;&"):
                return status
            goes_on = clause.end == ";&"
        return status

    def while_loop(self, node: tree.While) -> bool | None:
        """Run `while` or `until`; a loop whose end is not known is left out."""
        variables = dict(self.state.variables)
        arguments = list(self.state.arguments)
        ran = -1
        for _ in range(MOST_TURNS):
            status = self.sequence(node.condition)
            # Commands of the condition certainly run before the first turn
            # (`until torchrun ...; do sleep 9; done`).
            ran = len(self.state.commands) if ran < 0 else ran
            if status is None:
                break
            if status is node.until or not self.turn(node.body):
                return True
        # A loop that waits for something outside, or runs for very long: as if it had not been
        # entered.
        self.state.variables, self.state.arguments = variables, arguments
        del self.state.commands[ran:]
        self.loop_left_out(node.body, node.line)
        return None

    def counting_loop(self, node: tree.CountingFor) -> bool | None:
        """Run `for ((start; condition; step))`."""
        if node.header is None:
            return self.loop_left_out(node.body, node.line)
        start, condition, step = node.header
        variables = dict(self.state.variables)
        commands = len(self.state.commands)
        self.calculations(start, node.line)
        for _ in range(MOST_TURNS):
            holds = self.arithmetic(condition, node.line) if condition.strip() else 1
            if holds is None:
                break
            if holds == 0 or not self.turn(node.body):
                return True
            self.calculations(step, node.line)
        # The counter has an unknown value after an unknown number of turns.
        counted = self.state.variables.keys() - variables.keys()
        self.state.variables = variables
        del self.state.commands[commands:]
        self.loop_left_out(node.body, node.line)
        for name in counted:
            self.state.variables.pop(name, None)
        return None

    def calculations(self, text: str, line: int) -> None:
        """Carry out the assignments in a list of expressions, such as `i = 0, j = 1`."""
        for expression in text.split(","):
            if expression.strip():
                self.arithmetic(expression, line)

    def loop_left_out(self, body: tree.Sequence, line: int) -> None:
        """Skip a loop that cannot be followed: the variables that it sets are unknown
        afterwards."""
        for name in self.left_out(body, line, "the loop cannot be followed"):
            self.state.variables.pop(name, None)

    def for_loop(self, node: tree.For) -> bool | None:
        values = list(self.state.arguments)
        if node.raw_words is not None:
            values = with_braces(self.expanded(node.raw_words))
        # A loop over what nobody knows (files, hosts) has no turns to follow, and its variable no
        # value.
        if any(unknown(value.text) for value in values) or len(values) > MOST_TURNS:
            self.state.variables.pop(node.name, None)
            return self.loop_left_out(node.body, node.line)
        for value in values:
            self.state.variables[node.name] = {"0": value}
            if not self.turn(node.body):
                break
        return True

    def turn(self, body: tree.Sequence) -> bool:
        """Run one iteration of a loop; return False if it is the last."""
        try:
            self.sequence(body)
        except Stop as stop:
            if stop.kind not in ("break", "continue"):
                raise
            return stop.kind == "continue"
        return True


_LAUNCHERS: Final = (
    *("torchrun", "deepspeed", "accelerate", "srun", "mpirun", "mpiexec"),
    *("torch.distributed.run", "torch.distributed.launch"),
)
"""Programs that start the processes of a training."""


def _starts_training(argv: Sequence[Word]) -> bool:
    """Whether a launcher starts a Python program; other commands in `$(...)` look something up."""
    texts = [word.text for word in argv]
    is_launched = any(Path(text).name in _LAUNCHERS for text in texts)
    has_program = any(text.endswith(".py") or text in ("-m", "--module") for text in texts[1:])
    return is_launched and has_program


def _exits(body: tree.Sequence) -> bool:
    """Whether commands end the script, such as those that report a missing file."""
    last = body.items[-1] if body.items else None
    command = last.first.commands[0] if last is not None and not last.rest else None
    if not isinstance(command, tree.Simple) or not command.raw_words:
        return False
    head = command.raw_words[0].parts
    return len(head) == 1 and head[0].text == "exit"
