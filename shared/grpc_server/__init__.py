"""A gRPC server with token, errors, identity, deadlines, limits, health, reflection and graceful stop."""

from shared.grpc_server.interceptor import LoadShedder, message_bytes
from shared.grpc_server.server import BearerToken, Health, bearer_token, serve

__all__ = ["BearerToken", "Health", "LoadShedder", "bearer_token", "message_bytes", "serve"]
