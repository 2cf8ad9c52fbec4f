"""The messages of gpreempt.v1.

The classes are made when the package is imported, from the descriptors in api.binpb
(`make gen` writes them from api/proto). Code that protoc generates checks the version of
the installed protobuf; this works with 3.21 and later.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
except ModuleNotFoundError as e:
    raise ModuleNotFoundError("gpreempt needs protobuf: pip install protobuf, or apt-get install python3-protobuf", name=e.name) from None

# A pool of our own: the program may have loaded another version of the same files.
_pool = descriptor_pool.DescriptorPool()


def _error_file() -> descriptor_pb2.FileDescriptorProto:
    """Return what is needed of google/rpc/status.proto and error_details.proto."""
    file = descriptor_pb2.FileDescriptorProto(name="gpreempt/status.proto", package="gpreempt.status", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto
    for name, fields in {
        "Any": [("type_url", field.TYPE_STRING, ""), ("value", field.TYPE_BYTES, "")],
        "Entry": [("key", field.TYPE_STRING, ""), ("value", field.TYPE_STRING, "")],
        "Status": [("code", field.TYPE_INT32, ""), ("message", field.TYPE_STRING, ""), ("details", field.TYPE_MESSAGE, "Any")],
        "ErrorInfo": [("reason", field.TYPE_STRING, ""), ("domain", field.TYPE_STRING, ""), ("metadata", field.TYPE_MESSAGE, "Entry")],
    }.items():
        message = file.message_type.add(name=name)
        for number, (field_name, kind, of) in enumerate(fields, 1):
            f = message.field.add(name=field_name, number=number, type=kind, label=field.LABEL_OPTIONAL)
            if of:
                f.type_name = ".gpreempt.status." + of
                f.label = field.LABEL_REPEATED
    return file


def _load() -> None:
    files = descriptor_pb2.FileDescriptorSet.FromString(Path(__file__).with_name("api.binpb").read_bytes())
    for file in files.file:  # each follows those that it imports
        _pool.Add(file) if not hasattr(_pool, "AddSerializedFile") else _pool.AddSerializedFile(file.SerializeToString())
    _pool.AddSerializedFile(_error_file().SerializeToString())


def message(name: str) -> Any:
    """Return the class of a message by its full name."""
    descriptor = _pool.FindMessageTypeByName(name)
    if hasattr(message_factory, "GetMessageClass"):  # protobuf 4.22 and later
        return message_factory.GetMessageClass(descriptor)
    return message_factory.MessageFactory(_pool).GetPrototype(descriptor)


_load()

NotifyOnlineRequest = message("gpreempt.v1.NotifyOnlineRequest")
NotifyOnlineResponse = message("gpreempt.v1.NotifyOnlineResponse")
CompleteRequest = message("gpreempt.v1.CompleteRequest")
RenewRequest = message("gpreempt.v1.RenewRequest")
RenewResponse = message("gpreempt.v1.RenewResponse")
ListGpusRequest = message("gpreempt.v1.ListGpusRequest")
ListGpusResponse = message("gpreempt.v1.ListGpusResponse")
Status = message("gpreempt.status.Status")
ErrorInfo = message("gpreempt.status.ErrorInfo")

NOTIFY_ONLINE = "/gpreempt.v1.OnlineService/NotifyOnline"
COMPLETE = "/gpreempt.v1.OnlineService/Complete"
RENEW = "/gpreempt.v1.OnlineService/Renew"
LIST_GPUS = "/gpreempt.v1.AdminService/ListGpus"
HEALTH = "/grpc.health.v1.Health/Check"

QUIESCE_REASONS = {
    value.number: value.name[len("QUIESCE_REASON_") :]
    for value in _pool.FindEnumTypeByName("gpreempt.v1.QuiesceReason").values
}


def set_duration(to: Any, seconds: float) -> None:
    """Set a google.protobuf.Duration of at least 0 seconds."""
    nanos = round(seconds * 1e9)
    to.seconds, to.nanos = divmod(nanos, 1_000_000_000)


def duration(of: Any) -> float:
    """Return a google.protobuf.Duration in seconds."""
    return float(of.seconds) + float(of.nanos) / 1e9
