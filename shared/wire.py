"""Names and limits of every call, which clients and services share. Imports nothing."""

# The id of a call: in its headers, its trailers, and each line that a server logs about it.
REQUEST_ID = "x-request-id"
# In the trailers of a failed call: a `google.rpc.Status` with the details of the error.
STATUS = "grpc-status-details-bin"
# The value is `Bearer TOKEN`.
AUTHORIZATION = "authorization"

# Names the file with the token. gRPC limits a call's headers to 8 KiB in total.
TOKEN_FILE_VARIABLE = "MILLRACE_TOKEN_FILE"
MAX_TOKEN_CHARACTERS = 1024

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
