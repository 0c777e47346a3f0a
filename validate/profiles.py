"""One profile of one layout against other layouts, on processes of this machine.

`python validate/profiles.py [--out DIR]`.

Needs torch with gloo. Two cores should be free of others' work: what these take shows as noise.
"""

import argparse
from pathlib import Path

from studies.profile_study import profile_study

from perfmodel.ingest.tables import write_json, write_text


def main() -> None:
    """Run all, write the report, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the report (md and json)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of all configurations")
    parser.add_argument("--steps", type=int, default=5, help="steps of a configuration in a turn")
    arguments = parser.parse_args()
    study = profile_study(arguments.rounds, arguments.steps)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out / "profile.json", study.to_dict())
    write_text(arguments.out / "profile.md", study.text())
    print(study.text())


if __name__ == "__main__":
    main()
