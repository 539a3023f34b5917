"""A gRPC server with token, errors, identity, deadlines, limits, health, reflection and graceful stop."""

from shared.grpc_server.bearer_token import BearerToken, bearer_token
from shared.grpc_server.interceptor import message_bytes
from shared.grpc_server.load_shedder import LoadShedder
from shared.grpc_server.server import Health, serve

__all__ = ["BearerToken", "Health", "LoadShedder", "bearer_token", "message_bytes", "serve"]
