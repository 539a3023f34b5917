"""Exports a run into an event file with TensorBoard's own package; TensorFlow is not needed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from millrace.train.v1 import resources_pb2
from millrace.train.v1 import train_service_pb2 as pb
from millrace_client.export import Written, job_id, parameters


def export(job: resources_pb2.TrainingJob, points: Sequence[pb.MetricPoint], folder: Path) -> Written:
    """Write a run named by the job's id below `folder`: a scalar per metric, and the specification as text."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    run = folder / job_id(job)
    # TensorBoard shows all event files of a folder as one run, so a repeated export replaces the old one.
    for old in run.glob("events.out.tfevents.*"):
        old.unlink()
    writer = EventFileWriter(str(run))
    try:
        text = json.dumps(parameters(job), indent=1, sort_keys=True)
        spec = TensorProto(dtype=7, string_val=[f"```json\n{text}\n```".encode()])  # DT_STRING
        spec.tensor_shape.dim.add(size=1)
        shown_by = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        value = Summary.Value(tag="spec", tensor=spec, metadata=shown_by)
        writer.add_event(Event(wall_time=job.create_time.seconds, summary=Summary(value=[value])))
        for point in points:
            values = [Summary.Value(tag=name, simple_value=one) for name, one in sorted(point.values.items())]
            wall_time = point.time.seconds + point.time.nanos / 1e9
            writer.add_event(Event(wall_time=wall_time, step=point.step, summary=Summary(value=values)))
    finally:
        writer.close()
    return Written(str(run), len(points), f"tensorboard --logdir {folder} shows it")
