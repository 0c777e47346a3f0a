"""The same script in other words is read the same: quoting, arrays, variables, order, continued
lines, comments, flags.

Two generators. One rewrites the text of real-shaped scripts by steps that a shell does not see. The
other takes the command that a script runs, and writes a new script around it in the ways that
people write launch scripts.
"""

import itertools
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thinned import one_in

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch import Launch, parse_launch
from perfmodel.ingest.launch.shell import requested, run_script, slurm_variables

FOLDER = Path(__file__).parent
SCRIPTS = sorted(
    path
    for folder in ("launch_files", "strangers")
    for path in (FOLDER / folder).rglob("*")
    if path.suffix in (".sh", ".slurm")
    and path.name
    not in ("sizes.sh", "k11c_positional_parameters.sh", "k22h_maxtext_command_line.sh")
)
"""Scripts that say all that a prediction needs, and start a file of Python (MaxText is started as a
module)."""


def facts(launch: Launch) -> tuple[object, ...]:
    """All that a script says, without its name and its lines."""
    model = launch.model
    shape = None if model is None else {**model.values(), "name": "", "source": "", "aliases": ()}
    sentences = [re.sub(r"line \d+", "", line) for line in (*launch.may_be_wrong, *launch.ignored)]
    return (
        shape
        and {
            key: value
            for key, value in shape.items()
            if key not in ("stack", "longest_seq_len", "seq_len")
        },
        launch.layout,
        launch.devices,
        launch.global_batch,
        launch.seq_len,
        dict(launch.job_fields),
        launch.framework,
        sorted(sentences),
        launch.missing,
    )


def read(text: str, path: Path) -> tuple[object, ...]:
    return facts(parse_launch(text, str(path)))


# Rewriting the text.


def statement_starts(text: str) -> list[int]:
    """Positions at which a line begins that is no part of a command, a quote, an array or a
    here-document."""
    starts, at = [], 0
    quote, depth, is_continued, delimiter = "", 0, False, ""
    for line in text.splitlines(keepends=True):
        start, at = at, at + len(line)
        if delimiter:
            delimiter = "" if line.strip() == delimiter else delimiter
            continue
        if not quote and depth == 0 and not is_continued:
            starts.append(start)
        if not quote and line.lstrip().startswith("#"):
            continue
        before = " "
        for char in re.sub(r"\\.", "", line):
            if quote:
                quote = "" if char == quote else quote
            elif char == "#" and before.isspace():
                break
            elif char in "'\"":
                quote = char
            else:
                depth = max(0, depth + (char == "(") - (char == ")"))
            before = char
        is_continued = line.endswith("\\\n") and not quote
        here = re.search(r"<<-?\s*['\"]?(\w+)", line)
        delimiter = here[1] if here and not quote else ""
    return starts


def with_comments(text: str, data: st.DataObject) -> str:
    """Comments before statements, but not before the first line, which names the shell."""
    for start in reversed(statement_starts(text)[1:]):
        comment = data.draw(
            st.sampled_from(("", "", "# --num-layers 1 'and \"so on\n", "   \n", "\t# $X ${Y\n"))
        )
        text = text[:start] + comment + text[start:]
    return text


def with_braces(text: str, data: st.DataObject) -> str:
    """`$NAME` as `${NAME}`, outside single quotes."""
    pieces = re.split(r"('[^'\n]*')", text)
    return "".join(
        p if p.startswith("'") else re.sub(r"\$([A-Z_]\w*)", r"${\1}", p) for p in pieces
    )


def with_equals(text: str, data: st.DataObject) -> str:
    """`--flag=value` for `--flag value` of arguments with one value."""
    names = "num-layers|hidden-size|seq-length|micro-batch-size|global-batch-size|tensor-model-parallel-size"
    return re.sub(rf"--({names}) +(?=[\w$])", r"--\1=", text)


def with_spaces(text: str, data: st.DataObject) -> str:
    """More blanks between arguments, and at the ends of lines that are not continued."""
    text = re.sub(r"(?<=\S) --", "   --", text)
    return re.sub(r"(?<![\\\n])\n", "  \n", text)


def with_windows_lines(text: str, data: st.DataObject) -> str:
    return text.replace("\n", "\r\n")


def with_function(text: str, data: st.DataObject) -> str:
    """All but the scheduler's lines in a function, called at the end."""
    head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    body = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    return f'{head}\nmain() {{\n{body}\n}}\nmain "$@"\n'


def with_condition(text: str, data: st.DataObject) -> str:
    """All of it in a condition that holds."""
    head, body = text.partition("\n")[::2]
    condition = data.draw(st.sampled_from(("true", "[ 1 -eq 1 ]", '[[ -z "" ]]', "(( 2 > 1 ))")))
    return f"{head}\nif {condition}; then\n{body}\nelse\nexit 1\nfi\n"


def with_noise(text: str, data: st.DataObject) -> str:
    """What scripts do beside: logs, folders, modules, traps."""
    noise = (
        "set -euo pipefail\nmkdir -p logs && cd logs\nmodule load cuda || true\ntrap 'echo bye' EXIT\n"
        'if [ ! -d "$CKPT" ]; then mkdir -p "$CKPT"; fi\nexport NCCL_DEBUG=INFO\n'
    )
    starts = statement_starts(text)
    at = starts[min(1, len(starts) - 1)]
    return text[:at] + noise + text[at:]


STEPS = (
    with_comments,
    with_braces,
    with_equals,
    with_spaces,
    with_windows_lines,
    with_function,
    with_condition,
    with_noise,
)


@pytest.mark.parametrize("path", one_in(2, SCRIPTS), ids=lambda path: path.name)
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_a_rewritten_script_says_the_same(path: Path, data: st.DataObject) -> None:
    text = path.read_text()
    expected = read(text, path)
    steps = data.draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=4, unique=True))
    # Ends of lines are changed last: other steps look for them.
    for step in sorted(steps, key=lambda step: step is with_windows_lines):
        text = step(text, data)
    assert read(text, path) == expected


# Writing a new script around a command.


WAYS_TO_SET = {
    "variable": "{name}={quoted}",
    "exported variable": "export {name}={quoted}",
    "constant": "readonly {name}={quoted}",
    "default": "{name}=${{{name}:-{word}}}",
    "case": "case small in\n  large) {name}=0 ;;\n  small|tiny) {name}={word} ;;\nesac",
    "argument of a function": 'set_{name}() {{ {name}="$2"; }}\nset_{name} x {quoted}',
    "indirection": "REAL_{name}={word}\nNAMED_{name}=REAL_{name}\n{name}=${{!NAMED_{name}}}",
    "reference": "REAL_{name}={word}\ndeclare -n {name}=REAL_{name}",
    "assigned default": ': "${{{name}:={word}}}"',
    "default of a default": "REAL_{name}={word}\n{name}=${{UNSET_{name}:-${{REAL_{name}}}}}",
    "arguments of the script": 'set -- first {word}\n{name}="$2"',
    "shifted arguments": "set -- first {word}\nshift\n{name}=$1",
    "options": 'set -- --size {word}\nwhile [[ $# -gt 0 ]]; do\n  case "$1" in\n    --size) {name}="$2"; shift 2 ;;\n'
    "    *) shift ;;\n  esac\ndone",
    "here-string": "read -r {name} <<< {word}",
    "here-document": "read -r OTHER_{name} {name} <<END\nother {word}\nEND",
    "sourced file": "cat > {name}.sh <<'END'\nexport {name}={word}\nEND\nsource ./{name}.sh",
    "appended file": "echo '# sizes' > {name}.env\necho {name}={word} >> {name}.env\n. ./{name}.env",
    "function": "sizes_of_{name}() {{\n  local size={word}\n  echo $size\n}}\n{name}=$(sizes_of_{name} large)",
    "suffix": "FILE_{name}={word}.json\n{name}=${{FILE_{name}%.json}}",
    "prefix": "FILE_{name}=run/{word}\n{name}=${{FILE_{name}##*/}}",
    "substring": "LONG_{name}=ab{word}\n{name}=${{LONG_{name}:2}}",
    "replacement": "LONG_{name}=a_{word}\n{name}=${{LONG_{name}/a_/}}",
    "condition": 'if [[ "${{MODE:-train}}" == train ]]; then\n  {name}={word}\nelse\n  {name}=0\nfi',
    "short condition": '[ -z "$UNSET_{name}" ] && {name}={word} || {name}=0',
    "check": 'if [ ! -n "$PATH" ]; then\n  echo no\n  exit 1\nfi\n{name}={word}',
    "loop": "for {name} in 0 {word}; do :; done",
    "text in a pipe": "{name}=$(echo 0,{word} | cut -d , -f 2)",
    "evaluated": 'eval "{name}={word}"',
    "options by getopts": "set -- -v -n {word}\nOPTIND=1\nwhile getopts 'vn:h' option; do\n  case $option in\n"
    "    n) {name}=$OPTARG ;;\n    v) VERBOSE_{name}=1 ;;\n  esac\ndone",
    "options with a sign": 'set -- --size={word} --other=1\nfor argument in "$@"; do\n  case $argument in\n'
    '    --size=*) {name}="${{argument#*=}}" ;;\n    *) ;;\n  esac\ndone',
    "table of names": "declare -A OF_{name}\nOF_{name}[tiny]=0\nOF_{name}[large]={word}\n{name}=${{OF_{name}[large]}}",
    "list of names": "NAMES_{name}=(tiny large)\nSIZES_{name}=(0 {word})\nfor i in ${{!NAMES_{name}[@]}}; do\n"
    '  if [[ "${{NAMES_{name}[$i]}}" == large ]]; then {name}=${{SIZES_{name}[$i]}}; fi\ndone',
    "loop over numbers": "for (( i = 0; i < 2; i++ )); do\n  {name}=0\n  if (( i == 1 )); then {name}={word}; fi\ndone",
    "divided by a comma": "IFS=, read -r OTHER_{name} {name} <<< 0,{word}",
    "pattern": "TEXT_{name}=size-{word}-end\n[[ $TEXT_{name} =~ size-([^-]*)-end ]]\n{name}=${{BASH_REMATCH[1]}}",
    "last of several": "{name}=0\n{name}={word}; export {name}",
    "set in a group": "{{ {name}={word}; }}",
    "negation": 'if ! [ -n "$UNSET_{name}" ]; then {name}={word}; else {name}=0; fi',
    "exit status": "if grep -q nothing /dev/null 2>/dev/null; then :; fi\n{name}={word}",
    "printed into a variable": "printf -v {name} %s {word}",
    "alternative": "SET_{name}=1\n{name}=${{SET_{name}:+{word}}}",
    "whole here-document": "read -r -d '' {name} <<END || true\n{word}\nEND",
    "lines of a list": "mapfile -t LINES_{name} <<< {word}\n{name}=${{LINES_{name}[0]}}",
    "loop over lines": "while read -r LINE_{name}; do {name}=$LINE_{name}; done <<< {word}",
    "file": "echo {word} > {name}.txt\n{name}=$(<{name}.txt)",
    "name of a file": "{name}=$(basename run/{word}.json .json)",
    "last argument": "set -- 1 2 {word}\n{name}=${{@: -1}}",
    "last of a list": "ALL_{name}=(0 {word})\n{name}=${{ALL_{name}[-1]}}",
    "reference of a function": "into_{name}() {{ local -n out=$1; out={word}; }}\ninto_{name} {name}",
    "next case": "case large in\n  large) {name}=0 ;;&\n  tiny) {name}=1 ;;\n  l*) {name}={word} ;;\nesac",
    "case that falls through": "case large in\n  large) {name}=0 ;&\n  tiny) {name}={word} ;;\n  *) {name}=1 ;;\nesac",
    "copied text": "{name}=$(echo {word} | tee /dev/null)",
    "loop until": 'until [ -n "$DONE_{name}" ]; do {name}={word}; DONE_{name}=1; done',
    "set by awk": "{name}=$(echo \"a {word}\" | awk '{{print $2}}')",
    "set by sed": "{name}=$(echo size={word} | sed 's/size=//')",
}
"""Lines that set a variable to a word, in the ways in which scripts do it."""
WAYS_TO_SET_NUMBERS = {
    "let": "let {name}={word}+0",
    "expression": "{name}=$(expr {word} + 0)",
    "declared number": "declare -i {name}={word}",
    "arithmetic": "{name}=$(( {word} + 3 - 3 ))",
    "arithmetic command": "(( {name} = 2 * {word} / 2 ))",
}
"""The same for words that are decimal numbers."""
OUTPUTS = ("$(echo {word})", '"$(printf %s {word})"', "`echo {word}`")
"""Words that a command prints."""
TABLES = {
    "1": "{name}=(0 {word} 2)",
    "b": "declare -A {name}=([a]=0 [b]={word})",
}
"""Lines that set a table whose element of this index is a word."""
ARRAYS = {
    "array": "{name}=({words})",
    "array over lines": "{name}=(\n    {words_by_line}\n)",
    "appended array": "{name}=()\n{appended_words}",
    "array in an array": 'PART_{name}=({first_words})\n{name}=("${{PART_{name}[@]}}" {last_words})',
    "array in a loop": '{name}=()\nfor word in {words}; do\n  {name}+=("$word")\ndone',
    "arguments": 'set -- {words}\n{name}=("$@")',
    "words read from a line": 'IFS=" " read -r -a {name} <<< "{bare}"',
}
"""Lines that put arguments into an array."""
STRINGS = {
    "string": '{name}="{bare}"',
    "string after a blank": '{name}=" {bare}"',
    "appended string": '{name}=" \\\n  {first_bare} \\\n"\n{name}+=" {last_bare}"',
    "here-document": "read -r -d '' {name} <<END || true\n{bare_by_line}\nEND",
    "condition": '{name}=""\nif [ -z "$UNSET" ]; then\n  {name}="${{{name}}} {bare}"\nfi',
    "function": 'arguments_of_{name}() {{ echo "{bare}"; }}\n{name}=$(arguments_of_{name})',
}
"""Lines that put arguments into a string; it is divided at its blanks, and its quotes are not read
again."""
WAYS_TO_RUN = {
    "plain": "{command}",
    "function": "launch() {{\n  {command}\n}}\nlaunch",
    "subshell": "( {command} )",
    "condition": 'if [ "$#" -lt 999 ]; then\n  {command}\nfi',
    "array": 'COMMAND=({command})\n"${{COMMAND[@]}}"',
    "sourced": "cat > launch_it.sh <<'END'\n{command}\nEND\n. ./launch_it.sh",
    "once": "for attempt in 1; do\n  {command}\ndone",
    "forever": "while true; do\n  {command}\n  break\ndone",
    "background": "{command} &\nwait",
    "list": "cd . && true && {command} || exit 1",
    "environment": "env NCCL_DEBUG=INFO {command}",
    "executed": "exec {command}",
    "piped": "{command} 2>&1 | tee run.log",
    "set variables": "NCCL_DEBUG=INFO OMP_NUM_THREADS=1 {command}",
    "timed": "time {command}",
    "arguments of a function": 'launch() {{\n  "$@"\n}}\nlaunch {command}',
    "positional parameters": 'set -- {command}\n"$@"',
    "retried": "until {command}; do sleep 1; done",
    "checked": "if ! {command}; then\n  echo failed\n  exit 1\nfi",
    "logged": "echo starting\nset -x\n{command}\nset +x",
    "in a group": "{{\n  {command}\n}} 2>&1 | tee -a run.log",
}
"""Lines that run a command."""
PROGRAMS_AROUND = {
    "in the background with a log": "nohup {command} > run.log 2>&1 &\nwait",
    "conda": "conda run --no-capture-output -n train {command}",
    "numactl": "numactl --cpunodebind=0 --membind=0 {command}",
    "container": "apptainer exec --nv --bind /data:/data image.sif {command}",
    "docker": "docker run --rm --gpus all -v /data:/data -e A=1 image:latest {command}",
    "profiler": "nsys profile -o trace --trace=cuda,nvtx {command}",
    "uv": "uv run {command}",
}
"""Lines that run a command by a program that need not be installed here."""
EVALUATED = 'COMMAND="{command}"\neval $COMMAND'
"""Lines that run a command without quotes and continued lines."""


class Writer:
    """Writes arguments in the ways that scripts write them."""

    def __init__(self, data: st.DataObject, *, as_text: bool = True) -> None:
        self.data = data
        self.ways_to_run = [*WAYS_TO_RUN.values(), *(PROGRAMS_AROUND.values() if as_text else ())]
        """A script that is only read may use programs that are not installed."""
        self.lines: list[str] = []
        self.names = 0

    def choose(self, *ways: Any) -> Any:
        return self.data.draw(st.sampled_from(ways))

    def name(self, stem: str) -> str:
        self.names += 1
        return f"{stem}_{self.names}"

    def quoted(self, word: str) -> str:
        """A word in some quotes, or in none where it needs none."""
        plain = shlex.quote(word) == word
        quotes = (
            self.choose("single", "double", "none", "none")
            if plain
            else self.choose("single", "double")
        )
        if quotes == "none":
            return word
        if quotes == "single":
            return "'" + word.replace("'", "'\\''") + "'"
        return '"' + re.sub(r'([\\"$`])', r"\\\1", word) + '"'

    def value(self, word: str) -> str:
        """A value as it stands, or by a variable that is set before."""
        if not re.fullmatch(r"[\w.]+", word):
            return self.quoted(word)
        ways = WAYS_TO_SET
        # A number that begins with 0 is octal to a shell.
        if word.isdecimal() and not word.startswith("0"):
            ways = WAYS_TO_SET | WAYS_TO_SET_NUMBERS
        way = self.choose("quoted", "output", "element", *ways)
        name = self.name("VALUE")
        if way == "quoted":
            return self.quoted(word)
        if way == "output":
            return self.choose(*OUTPUTS).format(word=word)
        if way == "element":
            index, table = self.choose(*TABLES.items())
            self.lines.append(table.format(name=name, word=word))
            return self.choose(f"${{{name}[{index}]}}", f'"${{{name}[{index}]}}"')
        self.lines.append(ways[way].format(name=name, word=word, quoted=self.quoted(word)))
        return self.choose(f"${name}", f"${{{name}}}", f'"${{{name}}}"')

    def argument(self, words: list[str]) -> list[str]:
        """The words of one argument: its name, and its values."""
        name, values = words[0], [self.value(word) for word in words[1:]]
        if len(values) == 1 and self.choose("space", "space", "equals") == "equals":
            return [f"{name}={values[0]}"]
        return [name, *values]

    def group(self, arguments: list[list[str]]) -> str:
        """Arguments in an array, a string, or where they are used."""
        way = self.choose("plain", *ARRAYS, *STRINGS)
        # Blanks and quotes within an argument do not outlive a string.
        for word in itertools.chain.from_iterable(arguments):
            if not re.fullmatch(r"[\w.,=/:-]+", word) and (
                way in STRINGS or way == "words read from a line"
            ):
                way = "array"
        words = [word for argument in arguments for word in self.argument(argument)]
        if way == "plain":
            return " ".join(words)
        # Quotes within a string would be characters of the arguments.
        bare = [re.sub("[\"']", "", word) for word in words]
        name = self.name("ARGUMENTS")
        half = len(words) // 2
        lines = (ARRAYS | STRINGS)[way].format(
            name=name,
            words=" ".join(words),
            words_by_line="  # a remark\n    ".join(words),
            appended_words="\n".join(f"{name}+=({word})" for word in words),
            first_words=" ".join(words[:half]),
            last_words=" ".join(words[half:]),
            bare=" ".join(bare),
            bare_by_line="\n  ".join(bare),
            first_bare=" ".join(bare[:half]),
            last_bare=" ".join(bare[half:]),
        )
        self.lines.append(lines)
        return f"${{{name}}}" if way in STRINGS else f'"${{{name}[@]}}"'

    def command(self, before: list[str], groups: list[str]) -> None:
        """The command, by itself or through another shell."""
        joint = self.choose(" ", " \\\n    ", "   ")
        command = joint.join([*map(shlex.quote, before), *groups])
        ways = list(self.ways_to_run)
        if not re.search(r"[\"'\\]", command):
            ways.append(EVALUATED)
        self.lines.append(self.choose(*ways).format(command=command))


def grouped(words: list[str]) -> list[list[str]]:
    """Arguments with their values."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups


def launched_words(text: str, path: Path) -> list[str]:
    """The command that a script runs with most arguments."""
    commands = run_script(text, str(path), {}, variables=slurm_variables(requested(text))).commands
    texts = [[word.text for word in command.argv] for command in commands if command.certain]
    return max(texts, key=len)


def from_program(words: list[str]) -> int:
    """Where the arguments of the Python program begin."""
    return next(i for i, word in enumerate(words) if word.endswith(".py")) + 1


@pytest.mark.parametrize("path", one_in(2, SCRIPTS), ids=lambda path: path.name)
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_a_new_script_around_the_same_command_says_the_same(
    path: Path, data: st.DataObject
) -> None:
    text = path.read_text()
    head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    words = launched_words(text, path)
    start = from_program(words)
    before, arguments = words[:start], grouped([word for word in words[start:] if "$" not in word])
    plain = shlex.join([*before, *(word for argument in arguments for word in argument)])
    expected = read(f"{head}{plain}\n", path)

    writer = Writer(data)
    shuffled = data.draw(st.permutations(arguments))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(shuffled)), max_size=3)))
    parts = [
        shuffled[a:b] for a, b in zip([0, *cuts], [*cuts, len(shuffled)], strict=True) if a < b
    ]
    groups = [writer.group(part) for part in parts]
    writer.command(before, groups)
    text = head + "\n".join(writer.lines) + "\n"
    assert read(text, path) == expected, text


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    deadline=None,
)
@given(data=st.data())
def test_new_scripts_are_what_bash_runs(data: st.DataObject, tmp_path: Path) -> None:
    """The second generator writes shell: bash passes the same words on as are read here."""
    recorder = tmp_path / "torchrun"
    if not recorder.exists():
        recorder.write_text('#!/bin/bash\nprintf "%s\\037" "$@" > "$RECORD"\n')
        recorder.chmod(0o755)
    writer = Writer(data, as_text=False)
    arguments = [
        ["--num-layers", "4"],
        ["--bf16"],
        ["--moe-layer-freq", "([0]*1+[1]*3)"],
        ["--data-path", "a b", "c"],
        ["--split", "99,1,0"],
        ["--lr", "1e-4"],
    ]
    groups = [writer.group(part) for part in (arguments[:3], arguments[3:])]
    writer.command(["torchrun", "--nproc_per_node", "8", "pretrain_gpt.py"], groups)
    text = "#!/bin/bash\n" + "\n".join(writer.lines) + "\n"
    record = tmp_path / "record"
    record.unlink(missing_ok=True)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RECORD": str(record)}
    subprocess.run(
        ["bash", "-c", text], env=environment, capture_output=True, timeout=20, cwd=tmp_path
    )
    ran = record.read_text().split("\037")[:-1]
    assert launched_words(text, tmp_path / "x.sh")[1:] == ran, text


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_a_script_with_a_line_less_is_read_or_refused_in_one_line(
    path: Path, data: st.DataObject
) -> None:
    lines = path.read_text().splitlines(keepends=True)
    del lines[data.draw(st.integers(0, len(lines) - 1))]
    refused = ""
    try:
        read("".join(lines), path)
    except LaunchFileError as error:
        refused = str(error)
    assert "\n" not in refused
