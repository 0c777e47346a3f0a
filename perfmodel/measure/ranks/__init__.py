"""Processes between which collectives are timed.

A `_launch` starts them on one node or on several, where `_agents` wait for work. `_group` is what
they form, each a `_rank` (`_torch_rank`). `_hosts` emulates nodes on one machine.
"""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.measure.ranks._agents import Agent, Hello, gathered, members, serve_agent
    from perfmodel.measure.ranks._group import (
        RankGroup,
        check_collective,
        check_group,
        transfer_time_s,
    )
    from perfmodel.measure.ranks._hosts import (
        EmulatedHosts,
        EmulatedNetwork,
        Host,
        forward,
        unavailable,
    )
    from perfmodel.measure.ranks._launch import (
        KEY,
        NAME,
        Launch,
        Meeting,
        Server,
        find_launch,
        forget_launcher,
    )
    from perfmodel.measure.ranks._rank import (
        CollectiveSession,
        Place,
        RankProcess,
        RankSession,
        free_port,
        groups_at_once,
    )
    from perfmodel.measure.ranks._torch_rank import (
        GRAPH_CALLS,
        GlooSession,
        NcclSession,
        evenly_divided,
    )

__getattr__, __dir__ = lazy_names(__name__)
