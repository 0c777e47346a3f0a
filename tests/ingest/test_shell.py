"""The interpreter of launch scripts: what bash would run, or what is left as it is written."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch import parse_launch
from perfmodel.ingest.launch.shell import Script, calculate, requested, run_script, slurm_variables


def certain(script: Script) -> list[list[str]]:
    """Words of the commands `run` that a script runs for sure."""
    commands = [
        [word.text for word in command.argv] for command in script.commands if command.certain
    ]
    return [command for command in commands if "run" in command]


SAME_AS_BASH = {
    "assignments": "A=2; B=${A}x$A; run --x $A ${B}",
    "defaults": 'run --x ${A:-3} ${B-4} ${C:+no} ${D:=5} $D "${E:-a b}"',
    "default of a set one": "A=1; B=; run ${A:-3} ${A:+yes} ${B:-2} x${B-2}x",
    "arrays": "A=(--x 1 '--y=a b'); A+=(--z); run \"${A[@]}\" ${#A[@]} ${A[1]} ${A[-1]}",
    "array in a quoted assignment": 'A=(a b); B=(c d); X="${A[@]} ${B[*]} e"; run $X "$X"',
    "array around text": 'A=(a b c); run "x${A[@]}y" "x${A[*]}y"',
    "array over lines": "A=(\n  a  # first\n  b\n  # none\n  c\n)\nrun ${A[@]}",
    "elements by index": "A[2]=x; A[0]=y; run ${A[@]} ${#A[@]}; A=([1]=p [0]=q); run ${A[0]} ${A[1]}",
    "associative array": "declare -A S; S[small]=12; S=([large]=24 [small]=13); K=large; run ${S[$K]} ${S[small]}",
    "appended text": "A=x; A+=y; A+=' z'; run $A \"$A\"",
    "empty words": 'A=; run "$A" $A "" x',
    "quotes within words": "run --x=\"a b\"'c d'e\\ f \"it's\" '\"'",
    "single quotes expand nothing": "A=1; run '$A' \"\\$A\" \\$A",
    "continued lines": "run a \\\n  b \\\n  c # d\nrun --num-\\\nlayers 4",
    "continued lines in quotes": 'A="--x 1 \\\n  --y 2 \\\n  --z"; run $A; B="a\\\nb"; run $B',
    "comments": "# run no\nrun a#b # c\n#run d",
    "redirections": "run a > out.txt 2>&1; run b &> log; run c 2>/dev/null >>x; run d <<< text",
    "output of functions and blocks": 'f() { echo "$1-$2"; }; run "$(f a b)" $(for i in 1 2; do echo -n "$i,"; done) '
    "$(if true; then echo 5; else echo 6; fi)",
    "output of here-documents": "A=$(cat <<EOF\n--a 1\n--b 2\nEOF\n)\nrun $A; run $(printf '%s-%02d' x 7)",
    "parts of lists": "A=(1 2 3); unset 'A[0]'; run ${A[@]} ${A[@]: -1}; B=(${A[@]/#/--}); run ${B[@]}",
    "loops that end inside": "A=1; while :; do A=$((A+1)); [ $A -gt 3 ] && break; done; run $A",
    "octal": "run $((010)) $((0x1f)); A='a:b:c'; run $(echo $A | cut -d: -f2)",
    "added to nothing": 'A="${A} --x 1"; A="${A} --y 2"; run $A',
    "here-documents": "cat <<EOF > /dev/null\nrun no\nEOF\nrun yes",
    "arithmetic": "N=4; run $((N * 2 + 1)) $(( ($N+2)/2 )) $((N%3)) $((2**N)) $((N>3 ? 7 : 8)) $((-7/2)) $((1<<N))",
    "arithmetic that assigns": "((A = 3 * 2)); ((A++)); ((A += 5)); let B=A*2; run $A $B $((C = 4)) $C",
    "arithmetic on conditions": "A=4; if (( A > 3 && A < 5 )); then run yes; else run no; fi",
    "if": "A=1\nif [ $A -gt 2 ]; then B=3; elif [[ $A == 1 ]]; then B=4; else B=5; fi\nrun $B",
    "here-documents inside of output": "A=$(cat <<'EOF'\n--x don't ) 1\nEOF\n)\nrun \"$A\"; "
    "B=$(tr b c <<-E | head -n 1\n\ta (b\n\tE\n); run $B $((1 << 2))",
    "files that are written and run": "cat > in_1.sh <<'EOF'\nrun $1 a\nEOF\nbash in_1.sh 2; echo 'run b' > in_2.sh; "
    "echo 'run c' >> in_2.sh; bash in_2.sh; printf 'A=%s\\n' 7 > in_3.sh; "
    ". ./in_3.sh; run $A; echo 'A=8' | tee in_4.sh >/dev/null; . ./in_4.sh; run $A; "
    "tee in_5.sh <<EOF >/dev/null\nA=9\nEOF\nsource ./in_5.sh; run $A",
    "branches that end the script": "if [ -e /proc/self ]; then B=1; else exit 1; fi; run $B; "
    "if [ ! -e /proc/self ]; then echo no; exit 1; else C=2; fi; run $C; "
    "if [ ! -e /proc/self ]; then exit 1; fi; run on",
    "other names of variables": 'A=(1 2); f() { local -n given=$1; given+=(3); run "${given[@]}" ${#given[@]}; }; f A; '
    "run ${A[@]}; B=x; declare -n C=B; C=y; run $B $C; given=5; run $given ${A[0]}",
    "environment of one command": 'A=1; env A=2 B=3 run a; run $A; env -u HOME PATH="$PATH" run b',
    "nested if": "A=1; B=2; if [ $A = 1 ]; then if [ $B = 3 ]; then C=1; else C=2; fi; else C=3; fi; run $C",
    "and, or": '[ -z "$A" ] && B=1 || B=2; [ -n "$A" ] || C=3; run $B $C',
    "tests": "[[ abc == a* && ! b == c ]] && run 1; [[ a1 =~ ^a[0-9]$ ]] && run 2; [ 1 -lt 2 -a 2 -lt 3 ] && run 3",
    "unset is empty": 'if [ "$NOBODY" = "" ]; then run empty; fi; if [ -z ${NOBODY+x} ]; then run unset; fi',
    "case": "M=large\ncase $M in\n  small) L=12 ;;\n  large|huge) L=24; H=1 ;;\n  *) L=0 ;;\nesac\nrun $L $H",
    "case with patterns": 'case "llama-7b" in (gpt*) A=1;; *-7b) A=2;; *) A=3;; esac; run $A',
    "case with quoted pattern": 'P="a*"; case "a*" in "$P") run 1;; esac; case abc in "a*") run 2;; a*) run 3;; esac',
    "for": 'for i in 1 2 3; do A+="$i-"; done; run $A; for f in a{1..3}; do B+=$f; done; run $B',
    "for over arguments": "set -- a b; for x; do A+=$x; done; run $A $#",
    "counting loops": "for ((i=0; i<4; i++)); do A+=$i; done; run $A $i; for (( i = 9, j = 0; i > 5; i -= 2 )); do "
    "((++j)); B+=(n$i); done; run $j ${#B[@]} ${B[@]} $i; for ((;;)); do break; done; run on",
    "counting loops that end inside": "for ((i = 1; ; i *= 2)); do [ $i -gt 20 ] && break; [ $i = 4 ] && continue; "
    "A+=$i,; done; run $A $i",
    "long loops": "N=0; for ((i = 0; i < 1500; i++)); do N=$((N + 2)); done; run $N $i",
    "counted first": "A=3; B=$((++A)); C=$((--A)); run $A $B $C",
    "break and continue": "for i in 1 2 3 4; do [ $i = 2 ] && continue; [ $i = 4 ] && break; A+=$i; done; run $A",
    "lines that a loop reads": 'while read -r a b; do run $a "x$b"; done <<EOF\n1 2 3\n\n4\nEOF\nrun $a on',
    "lines of a string": 'while IFS=, read -r a b; do [ -z "$a" ] && continue; run $b $a; done '
    "<<< $'1,2\\n3,4'; run on",
    "lines of a file": "printf 'a 1\\nb 2' > in_6.txt; while read -r k v; do A+=\"--$k $v \"; done < in_6.txt; run $A; "
    'while read -r k v || [ -n "$k" ]; do B+="--$k $v "; done < in_6.txt; run $B',
    "lines of a pipeline": "N=0; printf '%s\\n' 1 2 | while read x; do N=$x; run $N; done; run $N; "
    "echo 3 4 | { read x y; run $y; }; while read x; do N=$x; done < <(seq 3); run $N",
    "loops that read inside each other": "while read a; do while read b; do run $a$b; done <<E\nx\ny\nE\n"
    "done <<F\n1\n2\nF\n",
    "breaks in a loop that reads": "while read a; do case $a in '#'*) continue;; end) break;; esac; run $a; done <<E\n"
    "# no\n1\nend\n2\nE\nrun on",
    "quotes with signs": "A=$'a b\\tc\\nd\\'e'; run \"$A\" x$'\\\\y'; IFS=$'\\n'; "
    "for i in $(printf '1 2\\n3'); do run $i; done",
    "lines that are counted": "printf 'a\\nb\\nb\\n' > in_7.txt; run $(wc -l < in_7.txt) "
    "$(sort -u in_7.txt | wc -l) $(cat in_7.txt) on",
    "matches": "A=(--num-layers 61 --x 2); run $(echo \"${A[@]}\" | grep -oP '(?<=--num-layers )\\d+') "
    '$(echo llama-13b | grep -oE "[0-9]+") $(echo tp4 | grep -oP "tp\\K[0-9]+") $(echo a1 | grep -oP "\\w")',
    "while": "i=0; while [ $i -lt 3 ]; do i=$((i+1)); done; run $i; until (( i == 5 )); do ((i++)); done; run $i",
    "functions": "f() { local A=7; run $1 $A; }; A=1; f x; run $A; function g { run $#; }; g a b c",
    "return": "f() { A=1; return; A=2; }; f; run $A",
    "positional parameters": 'set -- 8 24 "a b"; run $1 ${2} "$3" $# "$@"; shift; run $1 "${@:2}"',
    "options of the script": 'set -- --tp 4 --pp=2\nwhile [[ $# -gt 0 ]]; do case "$1" in --tp) T=$2; shift 2;; '
    '--pp=*) P="${1#*=}"; shift;; *) shift;; esac; done\nrun $T $P',
    "getopts": 'set -- -n 4 -v; while getopts "n:v" o; do case $o in n) N=$OPTARG;; v) V=1;; esac; done; run $N $V',
    "statuses of builtins": "set -- a b && run 1 || run no; shift && run 2 || run no; shift 5 && run no || run 3; "
    "unset X && run 4 || run no; export Y=1 && run 5 || run no; "
    "read -r A <<< x && run 6 || run no; "
    "let Z=0 && run no || run 7; let Z=2 && run 8 || run no; "
    "printf -v P x && run 9 || run no; "
    ": && run 10 || run no; false && run no || run 11; eval false && run no || run 12; "
    "[ -z '' ] && run 13 || run no; mapfile -t M <<< x && run 14 || run no",
    "cut and replaced": "A=llama-7b.sh; run ${A%.sh} ${A%%-*} ${A#*-} ${A/7b/13b} ${A:0:5} ${#A} ${A^^} ${A//l/L}",
    "indirect": "A=B; B=3; run ${!A}",
    "inner shell": "A=1; export A; bash -c 'run $A'; sh -c \"run $A\"",
    "inner shell with arguments": "bash -c 'run $0 $1 $2' zero one two",
    "eval": 'C="run --x 1"; eval "$C"; eval $C; $C',
    "command substitution": 'run $(echo 3) `echo 4` "$(expr 2 + 3)" $(basename /a/b.sh .sh) $(dirname /a/b.sh) '
    '$(seq 3 | wc -l) $(echo "a b" | tr " " ",")',
    "read": "read -r A B <<EOF\n1 2\nEOF\nrun $A $B; IFS=, read -ra C <<< '4,5,6'; run ${C[1]}",
    "subshell": "A=1; (A=2; run $A); run $A; { A=3; }; run $A",
    "pipes": "run a | cat > /dev/null; run b && run c || run d; ! false && run e",
    "assignment for one command": "A=1; A=2 true; run $A",
    "exported lines": "export A=1 B=2\nreadonly C=3; declare -i D=4; run $A$B$C$D",
    "semicolons and ends of lines": "if true\nthen\n  run a;\nfi;\nfor i in 1; do\nrun b; done\n{ run c; }",
    "exit": "run --x a; exit 0; run b",
    "windows": "A=1\r\nrun $A\r\n",
}
"""Scripts that need no file, no program and no cluster."""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize("name", SAME_AS_BASH)
def test_scripts_run_what_bash_runs(name: str, tmp_path: Path) -> None:
    """The same words reach the command `run`, which writes them down here."""
    recorder = tmp_path / "run"
    recorder.write_text(
        '#!/bin/bash\n{ printf "run"; printf "\\037%s" "$@"; printf "\\036"; } >> "$RECORD"\n'
    )
    recorder.chmod(0o755)
    record = tmp_path / "record"
    record.touch()
    text = SAME_AS_BASH[name]
    subprocess.run(
        ["bash", "-c", text.replace("\r\n", "\n")],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "RECORD": str(record)},
        capture_output=True,
        timeout=10,
        cwd=tmp_path,
    )
    ran = [command.split("\037") for command in record.read_text().split("\036") if command]
    # Without arguments `printf` writes one that is empty.
    ran = [
        ["run"] if command == ["run", ""] and "run x" not in text else command for command in ran
    ]
    assert ran
    assert certain(run_script(text, "x.sh", {})) == ran


@pytest.mark.parametrize(
    ("script", "commands"),
    [
        # What depends on programs, files and the cluster stays as it is written.
        ("A=$(python size.py --of 3); run --x $A", [["run", "--x", "$(python size.py --of 3)"]]),
        ("run ${UNSET} $(date) $((UNSET + 1))", [["run", "${UNSET}", "$(date)", "$((UNSET + 1))"]]),
        ("if [ -f /data/x ]; then A=1; else A=2; fi; run $A", [["run", "${A}"]]),
        ("A=0; if nvidia-smi; then A=1; fi; run $A", [["run", "0"]]),
        ("for i in $(ls); do run $i; done\nrun x", [["run", "x"]]),
        ("while true; do run a; done; run b", [["run", "b"]]),
        ("srun --nodes 4 bash -c 'run $1' x 5", [["srun", "--nodes", "4", "run", "5"]]),
        (
            "ssh host 'cd there && run train.py --x 1'",
            [["ssh", "host", "run", "train.py", "--x", "1"]],
        ),
        ("echo 'run a' | bash", [["run", "a"]]),
        ("bash <<EOF\nrun a\nEOF", [["run", "a"]]),
        ("cat > inner.sh <<'EOF'\nrun $1\nEOF\nbash inner.sh 3", [["run", "3"]]),
        ("main() { run --x 1; }\nmain", [["run", "--x", "1"]]),
        ("exec run a", [["run", "a"]]),
        ('H=$(cd "$(dirname "$0")" && pwd); run $H/a', [["run", "folder/a"]]),
    ],
)
def test_what_is_not_known_stays(script: str, commands: list[list[str]]) -> None:
    assert certain(run_script(script, "folder/x.sh", {})) == commands


@pytest.mark.parametrize(
    ("script", "note"),
    [
        (
            "if nvidia-smi; then GPUS=8; fi",
            r"line 1: the condition cannot be evaluated, so what it sets \(GPUS\) is skipped",
        ),
        (
            "\nfor x in $(ls); do A=$x; done",
            r"line 2: the loop cannot be followed, so what it sets \(x, A\)|\(A\)",
        ),
        (
            "\nfor ((i = 0; i < 99999; i++)); do A=$i; done",
            r"line 2: the loop cannot be followed, so what it sets \(A\)",
        ),
        (
            "[ -f /data ] && A=1",
            r"line 1: the condition cannot be evaluated, so what it sets \(A\) is skipped",
        ),
        (
            "source sizes.sh",
            r"sizes.sh \(line 1\) was not found in the script's folder; its settings are missing here",
        ),
        ("case $1 in a) L=1;; esac", None),
    ],
)
def test_what_is_left_out_is_named(script: str, note: str | None) -> None:
    notes = run_script(script, "x.sh", {}).notes
    if note is None:
        assert notes == ()
    else:
        assert len(notes) == 1
        assert re.search(note, notes[0])


def test_a_condition_that_changes_nothing_is_not_named() -> None:
    text = 'if [ ! -d "$OUT" ]; then mkdir -p $OUT; fi\nsource /etc/profile\nsource ~/.bashrc\nconda activate x\n'
    assert run_script(text, "x.sh", {}).notes == ()


def test_sourced_files_and_inner_scripts_are_followed(tmp_path: Path) -> None:
    (tmp_path / "sizes.sh").write_text("L=24\n")
    (tmp_path / "inner.sh").write_text("run $1 $L\n")
    text = 'source "$(dirname "$0")/sizes.sh"\nexport L\nbash inner.sh a\nsrun -n 2 ./inner.sh b\n. ./sizes.sh\nrun $L\n'
    commands = certain(run_script(text, str(tmp_path / "x.sh"), {}))
    assert commands == [["run", "a", "24"], ["srun", "-n", "2", "run", "b", "24"], ["run", "24"]]


def test_a_script_that_stops_without_its_arguments_is_read_on() -> None:
    text = 'if [ $# -lt 2 ]; then echo "usage"; exit 1; fi\nN=$1\nrun --x $N\n'
    script = run_script(text, "x.sh", {})
    assert certain(script) == [["run", "--x", "${1}"]]
    assert "the script exits on line 1; perfmodel reads the rest anyway" in script.notes
    assert certain(run_script(text, "x.sh", {}, arguments=["4", "5"])) == [["run", "--x", "4"]]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("if true; then run", "'if' is opened here and never closed; add its 'fi'"),
        ("for x in 1; do run", "'for' is opened here and never closed; add its 'done'"),
        ("case x in a) run ;;", "'case' is opened here and never closed; add its 'esac'"),
        ("fi", "'fi' without 'if'; fix the script"),
        ("run 'a", "a quote is opened here and never closed; add its '"),
        ("cat <<EOF\nx", "the here-document is never closed; add its EOF"),
        ("f() { f; }; f", "calls itself forever"),
        ("A=xxxxxxxxxx; for i in {1..60}; do A=$A$A; done", "grows too large"),
        ("while [ 1 = 1 ]; do for i in {1..150}; do :; done; done", "more than 20,000 commands"),
        ("{ " * 100 + "run;" + " }" * 100, "nested too deeply"),
    ],
)
def test_scripts_that_are_none_are_refused_in_one_line(script: str, message: str) -> None:
    with pytest.raises(LaunchFileError) as error:
        run_script(script, "x.sh", {})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7 + 3", 10),
        ("7 - 3", 4),
        ("7 * 3", 21),
        ("2 ** 5", 32),
        ("7 / 2", 3),
        ("-7 / 2", -3),
        ("7 % 3", 1),
        ("-7 % 3", -1),
        ("7 % -3", 1),
        ("1 << 5", 32),
        ("32 >> 2", 8),
        ("6 & 3", 2),
        ("6 | 3", 7),
        ("6 ^ 3", 5),
        ("~5", -6),
        ("-5", -5),
        ("+5", 5),
        ("!5", 0),
        ("!0", 1),
        ("1 ? 7 : 8", 7),
        ("0 ? 7 : 8", 8),
        ("010", 8),
        ("7 / 0", None),
        ("2 ** -1", None),
        ("1 << 64", None),
        ("x + 1", None),
    ],
)
def test_arithmetic_is_that_of_the_shell(text: str, value: int | None) -> None:
    assert calculate(text) == value


@pytest.mark.parametrize(
    "loop",
    [
        "for ((i = 0; i < 99999; i++)); do N=$((N + 1)); done",
        "i=0; while [ $i -lt 99999 ]; do i=$((i + 1)); N=$i; done",
        "while read line; do N=$((N + 1)); done < hostfile",
        "for x in $(ls); do N=$((N + 1)); done",
    ],
)
def test_what_a_loop_that_is_not_followed_sets_is_unknown_after_it(loop: str) -> None:
    """And not what it was before, which would be read as if the script had said it."""
    (words,) = certain(run_script(f"N=1\n{loop}\nrun --n $N", "run.sh", {}))
    assert words == ["run", "--n", "${N}"]


@pytest.mark.parametrize("array", ["(a)", "(a b)", "(1 2 3 4)", "()"])
@pytest.mark.parametrize("separators", ["unset", ", ", ":", "''"])
@pytest.mark.parametrize(
    "script",
    [
        'A={array}; {ifs}; X="${{A[*]}}"; run --x "$X"',
        'A={array}; {ifs}; run --x "${{A[*]}}"',
        'A={array}; printf -v X "%s" "$({ifs}; echo "${{A[*]}}")"; run --x "$X"',
        'A={array}; set -- "${{A[@]}}"; {ifs}; run --x "$*"',
    ],
)
def test_elements_that_become_one_word_stand_with_the_first_separator_between(
    script: str, separators: str, array: str
) -> None:
    ifs = "unset IFS" if separators == "unset" else f"IFS='{separators.strip(chr(39))}'"
    between = {"unset": " ", "''": ""}.get(separators, separators[:1])
    (words,) = certain(run_script(script.format(array=array, ifs=ifs), "run.sh", {}))
    assert [word for word in words[2:] if word] == (
        [joined] if (joined := between.join(array[1:-1].split())) else []
    )


@pytest.mark.parametrize(
    ("form", "values", "text"),
    [
        ("%s", "a", "a"),
        ("[%s]", "1,0", "[1,0]"),
        ("%d", "7", "7"),
        ("%03d", "7", "007"),
        ("%s,", "a b c", "a,b,c,"),
        ("%s=%d;", "a 1 b", "a=1;b=0;"),
        ("plain", "", "plain"),
        ("%s", "", ""),
    ],
)
def test_printf_sets_a_variable_and_repeats_its_form(form: str, values: str, text: str) -> None:
    for script in (
        f'printf -v X "{form}" {values}; run --x "=$X"',
        f'X=$(printf "{form}" {values}); run --x "=$X"',
    ):
        (words,) = certain(run_script(script, "run.sh", {}))
        assert words == ["run", "--x", f"={text}"]
    (words,) = certain(
        run_script(f'A=(k k); printf -v "A[1]" "{form}" {values}; run "=${{A[1]}}"', "run.sh", {})
    )
    assert words == ["run", f"={text}"]


@pytest.mark.parametrize("behind", ["< <({})", '<<< "$({})"'])
@pytest.mark.parametrize("command", ["mapfile -t A", "readarray -t A"])
def test_lines_that_a_command_writes_become_an_array(command: str, behind: str) -> None:
    listing = "printf '%s %s\\n' --a 1 --b 2"
    script = command + " " + behind.format(listing) + '\nrun "${#A[@]}" ${A[@]}'
    (words,) = certain(run_script(script, "run.sh", {}))
    assert words == ["run", "2", "--a", "1", "--b", "2"]


def test_words_that_a_command_writes_are_read() -> None:
    (words,) = certain(run_script("read -r A B < <(echo 1 2)\nrun $A $B", "run.sh", {}))
    assert words == ["run", "1", "2"]


@pytest.mark.parametrize("command", ["mapfile -t A", "read -r A", "readarray -t A"])
def test_what_an_unknown_command_writes_is_unknown(command: str) -> None:
    (words,) = certain(run_script(f"{command} < <(nvidia-smi -L)\nrun --n $A", "run.sh", {}))
    assert words == ["run", "--n", "${A}"]


@pytest.mark.parametrize(
    ("start", "nodes"),
    [
        ("srun -N 4", "4"),
        ("srun --nodes=2 --ntasks-per-node=1", "2"),
        ("srun --ntasks-per-node=1", "${SLURM_NNODES}"),
    ],
)
def test_variables_of_slurm_follow_from_the_command_that_starts_a_shell(
    start: str, nodes: str
) -> None:
    (words,) = certain(run_script(f"{start} bash -c 'run --nnodes $SLURM_NNODES'", "run.sh", {}))
    assert words[-3:] == ["run", "--nnodes", nodes]
    job = "SLURM_NNODES=8\n"
    (words,) = certain(
        run_script(f"{job}{start} bash -c 'run --nnodes $SLURM_NNODES'", "run.sh", {})
    )
    assert words[-1] == "8"


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@settings(max_examples=60, deadline=None)
@given(
    separators=st.sampled_from((None, "", ",", ":", " ", ", ", ";\t", "x")),
    text=st.text("ab1, :;x", max_size=7),
    names=st.sampled_from(("A", "A B", "A B C", "-a A")),
)
def test_read_divides_a_line_as_bash_does(separators: str | None, text: str, names: str) -> None:
    prefix = "" if separators is None else f"IFS='{separators}' "
    line = f"{prefix}read -r {names} <<< '{text}'"
    shown = '"${A[*]}|${#A[@]}"' if names.startswith("-a") else '"$A|${B-}|${C-}"'
    ran = subprocess.run(
        ["bash", "-c", f"{line}\necho {shown}"], capture_output=True, text=True, check=False
    ).stdout
    (command,) = run_script(f"{line}\nrun --it {shown}\n", "run.sh", {}).commands
    assert command.argv[-1].text == ran.rstrip("\n")


LINES = st.lists(
    st.lists(st.sampled_from(["1", "24", "a-b", "x,y", "#"]), max_size=3).map(" ".join), max_size=4
)
READS = (
    "while read -r a b; do BODY; done <<'EOF'\nTEXT\nEOF\n",
    "while IFS=, read -r a b; do BODY; done <<< 'TEXT'",
    "printf '%s\\n' 'TEXT' | while read a b; do BODY; done",
    "while read a b; do BODY; done < <(printf '%s\\n' 'TEXT')",
    "{ read a b; BODY; read b; BODY; } <<'EOF'\nTEXT\nEOF\n",
    "f() { while read -r a b; do BODY; done; }; f <<'EOF'\nTEXT\nEOF\n",
)
BODIES = ('run "$a" "$b"', '[ "$a" = 1 ] && continue; run "$a" $b', 'c="$c$a"; run "$c"')


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@settings(max_examples=60, deadline=None)
@given(lines=LINES, form=st.sampled_from(READS), body=st.sampled_from(BODIES))
def test_a_loop_over_a_text_runs_what_bash_runs(lines: list[str], form: str, body: str) -> None:
    # The last line is no blank one: those at the end of an output are cut off.
    in_loop = body if "while" in form else body.replace("continue", ":")
    text = (
        "a=; b=; c=; "
        + form.replace("BODY", in_loop).replace("TEXT", "\n".join([*lines, "z"]))
        + '\nrun "$a$c" on'
    )
    stub = 'run() { for word in run "$@"; do printf "%s\\036" "$word"; done; printf "\\n"; }\n'
    ran = subprocess.run(
        ["bash", "-c", stub + text], capture_output=True, text=True, check=False
    ).stdout
    expected = [line.split("\036")[:-1] for line in ran.split("\n")[:-1]]
    assert certain(run_script(text, "run.sh", {})) == expected


@pytest.mark.parametrize("source", ["< $HOSTS", "< absent.txt", "< <(nvidia-smi -L)"])
def test_a_loop_over_what_nobody_knows_leaves_its_variables_unknown(source: str) -> None:
    script = run_script(f"N=0; while read x; do N=$((N+1)); done {source}; run $N", "run.sh", {})
    assert certain(script) == [["run", "${N}"]]
    assert any("loop" in note for note in script.notes)


@pytest.mark.parametrize("nodes", [1, 3, 16])
@pytest.mark.parametrize(
    "count",
    [
        "$(wc -l < $PBS_NODEFILE)",
        '$(cat "$PBS_NODEFILE" | uniq | wc -l)',
        "$(sort -u ${PBS_NODEFILE} | wc -l)",
    ],
)
def test_nodes_of_pbs_are_counted(count: str, nodes: int) -> None:
    variables = slurm_variables(requested(f"#PBS -l select={nodes}:ngpus=4\n"))
    script = run_script(f"N={count}; run $((N * 4))", "run.sh", {}, variables=variables)
    assert certain(script) == [["run", str(nodes * 4)]]


@pytest.mark.parametrize(
    "command", ["mpirun -np {} -npernode 8", "mpiexec -n {} --ppn 8", "mpirun --np {} -npernode 8"]
)
@pytest.mark.parametrize(
    "job", ["", "#$ -l rt_AF=4\n", "#PBS -l select=4\n", "#SBATCH --nodes=4\n"]
)
def test_processes_of_a_node_do_not_tell_how_many_nodes_there_are(command: str, job: str) -> None:
    sizes = (
        "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 1 "
        "--max-position-embeddings 2048 --global-batch-size 64 --tensor-model-parallel-size 2"
    )
    for processes in ("$((8 * NHOSTS))", "$((8 * COUNTED))", "32"):
        launch = parse_launch(
            f"{job}{command.format(processes)} python pretrain_gpt.py {sizes}\n", "run.sh"
        )
        is_known = processes == "32" or bool(job)
        assert launch.devices == (32 if is_known else None)
