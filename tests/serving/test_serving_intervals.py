"""What a server's interval is made of: every second of a step counts once, by the class of what it
goes to."""

from collections.abc import Mapping
from math import exp

import numpy as np
import pytest
from constant_rates import Links
from known_servings import ServerRates

from perfmodel import catalog
from perfmodel.prediction.sites import CLASSES, DEGREES, LogInterval
from perfmodel.serving import PARTS, Cost, Requests
from perfmodel.serving._server import Server
from perfmodel.spec import Framework, Layout, Transformer

PARTS_S = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
TOTAL_S = PARTS_S.sum()


class Recorded:
    """A prior that keeps what it is asked."""

    def interval(
        self,
        shares: Mapping[str, float],
        event_half_widths: Mapping[str, float],
        degrees: Mapping[str, float],
    ) -> LogInterval:
        self.shares, self.event_half_widths, self.degrees = shares, event_half_widths, degrees
        return LogInterval(0.25, {})


def asked(extrapolated_s: float = 0.0, between_nodes_s: float = 0.0, half: float = 0.0) -> Recorded:
    site_prior = Recorded()
    cost = Cost(PARTS_S, half * PARTS_S, np.array([extrapolated_s, between_nodes_s]))
    low, high = cost.interval(site_prior)  # pyright: ignore[reportArgumentType]
    assert (low, high) == (exp(-0.25), exp(0.25))
    return site_prior


def server_at_constant_rates(layout: str) -> Server:
    """A server whose events are all measured."""
    requests = Requests(prompt_tokens=100, output_tokens=10, batch=8)
    model = catalog.model("llama3-8b")
    assert isinstance(model, Transformer)
    return Server(
        model=model,
        cluster=catalog.cluster("dgx-h100"),
        layout=Layout.parse(layout),
        requests=requests,
        framework=Framework(),
        kernels=ServerRates(),  # pyright: ignore[reportArgumentType]
        collectives=Links(),
    )


@pytest.mark.parametrize("between_nodes_s", [0.0, 2.0, 5.0])
def test_every_second_counts_once(between_nodes_s: float) -> None:
    products, attention, experts, element_wise, communication, gaps = PARTS_S / TOTAL_S
    shares = asked(between_nodes_s=between_nodes_s).shares
    assert shares == pytest.approx(
        {
            "products": products + experts,
            "attention": attention,
            "memory": element_wise,
            "host": gaps,
            "inter_node": between_nodes_s / TOTAL_S,
            "intra_node": communication - between_nodes_s / TOTAL_S,
        }
    )
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares.keys() <= set(CLASSES)
    assert len(PARTS) == len(PARTS_S)


def test_what_is_extrapolated_and_events_intervals_are_relative_to_the_time() -> None:
    assert asked(extrapolated_s=7.0).degrees == {"extrapolated": pytest.approx(7.0 / TOTAL_S)}
    assert set(asked().degrees) <= set(DEGREES)
    half_widths = asked(half=0.2).event_half_widths
    assert half_widths == pytest.approx(dict(zip(PARTS, 0.2 * PARTS_S / TOTAL_S, strict=True)))


def test_costs_add_up_scale_and_pass_through_stages() -> None:
    of_stages = Cost(
        np.stack([PARTS_S, 2 * PARTS_S]), np.ones((2, 6)), np.array([[1.0, 2.0], [3.0, 4.0]])
    )
    assert of_stages.total_s == 3 * TOTAL_S
    through, slowest = of_stages.through, of_stages.slowest
    assert (through.total_s, slowest.total_s) == (3 * TOTAL_S, 2 * TOTAL_S)
    assert through.shaky_s.tolist() == [4.0, 6.0]
    assert slowest.shaky_s.tolist() == [3.0, 4.0]
    assert (through.uncertain_s.tolist(), slowest.uncertain_s.tolist()) == ([2.0] * 6, [1.0] * 6)
    twice = (through + through) * 0.5
    assert twice.total_s == through.total_s
    assert twice.shaky_s.tolist() == through.shaky_s.tolist()
    assert twice.uncertain_s.tolist() == through.uncertain_s.tolist()


@pytest.mark.parametrize(("layout", "crosses_nodes"), [("tp=8", False), ("tp=16", True)])
def test_every_second_of_a_step_keeps_what_is_known_of_its_event(
    layout: str, crosses_nodes: bool
) -> None:
    """At constant rates an event's interval reaches from 0.9 to 1.2 times its seconds."""
    server = server_at_constant_rates(layout)
    cost = server.step(1, 100, 8)
    ((products_s, attention_s, _, element_wise_s, communication_s, _),) = cost.parts_s
    known_s = np.array([products_s, attention_s, communication_s])
    assert cost.uncertain_s[0, [0, 1, 4]] == pytest.approx(0.15 * known_s)
    # The host's gaps are exact, and a roofline in place of a measurement is extrapolated.
    assert cost.uncertain_s[0, 5] == 0.0
    assert cost.shaky_s[0, 0] == pytest.approx(element_wise_s)
    assert cost.shaky_s[0, 1] == pytest.approx(communication_s if crosses_nodes else 0.0)


def test_stages_of_two_nodes_send_between_nodes() -> None:
    inside, between = (server_at_constant_rates(layout) for layout in ("pp=2", "tp=8,pp=2"))
    assert inside.step(1, 100, 8).shaky_s[:, 1].tolist() == [0.0, 0.0]
    sends_s = between.step(1, 100, 8).shaky_s[:, 1]
    # A send is counted with every stage.
    assert sends_s[0] == sends_s[1] > 0
