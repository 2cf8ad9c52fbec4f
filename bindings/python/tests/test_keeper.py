"""The thread of a client, while something happens that it does not see in this look."""

from __future__ import annotations

from typing import Any, List

import pytest

import gpreempt
from gpreempt import _errors, _keeper
from conftest import eventually


@pytest.mark.usefixtures("renewed_early")
def test_lease_that_is_announced_after_a_look_is_renewed(client: gpreempt.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_keeper, "_IDLE", 3600.0)  # else another look comes in time
    look = client._keeper._work
    leases: List[gpreempt.Lease] = []

    def announce_after(c: gpreempt.Client) -> float:
        at = look(c)
        if not leases:
            leases.append(gpreempt.online(gpus=[0], ttl=10, max_wait=10, client=c).acquire())
        return at

    monkeypatch.setattr(client._keeper, "_work", announce_after)
    client._keeper.start()
    eventually("the lease is announced", lambda: leases)
    first = leases[0]._grant.expires
    eventually("the lease is renewed", lambda: leases[0]._grant.expires > first)
    assert leases[0].protected


def test_outage_that_follows_the_last_one_at_once_ends(client: gpreempt.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    found = client._found
    outages = [_errors.unavailable("the second"), _errors.unavailable("the first")]

    def lost_again() -> None:
        found()
        if outages:
            client._lost(outages.pop())

    monkeypatch.setattr(client, "_found", lost_again)
    client._lost(outages.pop())
    eventually("the daemon is found again", lambda: not outages and client.unavailable is None)


def test_session_that_is_closed_during_its_announcement_stays_closed(client: gpreempt.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    session = gpreempt.Session(gpus=[0], max_wait=10, client=client).start()
    acquire = client.acquire
    announced: List[gpreempt.Lease] = []

    def close_meanwhile(request: Any) -> gpreempt.Lease:
        announced.append(acquire(request))
        session.close()
        return announced[-1]

    monkeypatch.setattr(client, "acquire", close_meanwhile)
    session.lease._grant.lose()  # the client's thread announces again
    eventually("the session announces again", lambda: announced)
    client.close()  # waits for the thread
    assert not session.protected
