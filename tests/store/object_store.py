"""A server that speaks S3, of our own, with one empty bucket."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.optional import need


@contextmanager
def served_bucket() -> Iterator[str]:
    """The address of the bucket; where the server is stands in the environment, also of processes that are started."""
    need("s3fs")
    moto = need("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    import fsspec

    host, port = server.get_host_and_port()
    patch = pytest.MonkeyPatch()
    patch.setenv("AWS_ACCESS_KEY_ID", "testing")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    bucket = f"bucket-{uuid.uuid4().hex}"  # servers of one process share what they hold
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
    try:
        yield f"s3://{bucket}"
    finally:
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # it would go on with this server
        server.stop()
        patch.undo()
