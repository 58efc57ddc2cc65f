"""The body of /v1/sessions/{name}."""

from unrolled.serving.protocol.fields import Body, StateId


class SessionRequest(Body):
    """The state that a session is to point to."""

    state: StateId
