"""How long a transfer took, from what its two sides saw."""

import numpy as np
from jaxtyping import Float

from perfmodel.errors import CalibrationError


def transfer_time_s(
    send_s: Float[np.ndarray, "calls 2"], receive_s: Float[np.ndarray, "calls 2"]
) -> Float[np.ndarray, " calls"]:
    """Seconds of every point-to-point transfer: the shorter of its send and receive call.

    A transfer begins when the later of the two calls is launched and ends when both return, so that the call that
    was launched first contains its waiting for the other; the shorter holds the transfer alone (DistSim section
    4.2, after dPRO). Each side's clock is read for its own calls only: the clocks need not agree.

    Args:
        send_s: start and end of every send call on the sender's clock.
        receive_s: start and end of the receive call of the same transfer on the receiver's clock.

    Raises:
        CalibrationError: for sides with different numbers of calls, or a call that ends before it starts.
    """
    send_s, receive_s = np.asarray(send_s, float), np.asarray(receive_s, float)
    if send_s.shape != receive_s.shape or send_s.ndim != 2 or send_s.shape[1] != 2:
        raise CalibrationError(
            "send and receive calls must be two equal lists of (start, end); "
            f"got shapes {send_s.shape} and {receive_s.shape}"
        )
    of_sides = np.stack([send_s[:, 1] - send_s[:, 0], receive_s[:, 1] - receive_s[:, 0]])
    if not (of_sides >= 0).all():
        raise CalibrationError("a send or receive call ends before it starts; its start and end are of two clocks")
    return of_sides.min(axis=0)
