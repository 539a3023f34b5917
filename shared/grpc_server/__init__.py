"""What every gRPC server here has: errors, identity, deadlines, limits, health, reflection and a graceful stop."""

from shared.grpc_server.door import Door
from shared.grpc_server.interceptor import message_bytes
from shared.grpc_server.server import Health, serve

__all__ = ["Door", "Health", "message_bytes", "serve"]
