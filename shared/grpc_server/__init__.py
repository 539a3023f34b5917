"""What every gRPC server here has: a token, errors, identity, deadlines, limits, health, reflection and a graceful
stop."""

from shared.grpc_server.bearer_token import BearerToken, bearer_token
from shared.grpc_server.door import Door
from shared.grpc_server.interceptor import message_bytes
from shared.grpc_server.server import Health, serve

__all__ = ["BearerToken", "Door", "Health", "bearer_token", "message_bytes", "serve"]
