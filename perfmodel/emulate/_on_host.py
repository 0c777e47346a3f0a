"""A command on an emulated host:
`python -m perfmodel.emulate._on_host NAMESPACE ADDRESS COMMAND...`."""

import os
import sys

from perfmodel.measure.ranks import Host

if __name__ == "__main__":
    namespace, address, *command = sys.argv[1:]
    Host(address, namespace).enter()
    os.execvp(command[0], command)
