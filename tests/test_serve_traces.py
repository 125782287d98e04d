"""`pagoda serve` sends traces by OTLP: a collector gets the spans of requests, in OpenTelemetry's own messages."""

import http.server
import json
import threading

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from serving import until
from test_serve_operation import LONG, configured

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """Takes spans, by name, on a free port."""

    def __init__(self, port=0):
        self.spans, self.resources = [], []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                assert (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
                message = ExportTraceServiceRequest.FromString(body)
                for resource in message.resource_spans:
                    outer.resources.append(attributes(resource.resource))
                    for scope in resource.scope_spans:
                        outer.spans.extend(scope.spans)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def find(self, name):
        return until(lambda: [span for span in self.spans if span.name == name])


def attributes(of):
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in of.attributes}


def traced(tmp_path, port, more=""):
    return configured(tmp_path, f'log = "json"\n[traces]\nendpoint = "http://127.0.0.1:{port}"\n{more}')


def parent(flags):
    return {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}


def test_a_request_is_a_span_of_its_callers_trace(tmp_path):
    with Collector() as collector, traced(tmp_path, collector.port, 'service = "chat"\n') as server:
        _, headers, _ = server.post("/v1/completions", LONG | {"max_tokens": 5}, parent("01"))
        [span] = collector.find("POST /v1/completions")
        assert (span.trace_id.hex(), span.parent_span_id.hex(), span.kind) == (TRACE, PARENT, 2)
        found = attributes(span)
        assert found["pagoda.request_id"] == headers["x-request-id"]
        assert (found["http.response.status_code"], found["http.route"]) == (200, "/v1/completions")
        assert 0 < span.end_time_unix_nano - span.start_time_unix_nano < 60 * 10**9
        # What the model did is a span of its own, inside of it.
        [inner] = collector.find("generate tiny")
        assert (inner.trace_id, inner.parent_span_id) == (span.trace_id, span.span_id)
        assert attributes(inner)["gen_ai.usage.output_tokens"] == 5 and attributes(inner)["gen_ai.usage.input_tokens"] > 0
        [first] = inner.events
        assert first.name == "first token" and span.start_time_unix_nano < first.time_unix_nano < span.end_time_unix_nano
        assert collector.resources[0]["service.name"] == "chat"
        # Without a caller's it is a trace of its own, and the end of the server sends what waits.
        server.get("/no/such/path")
        server.stop()
        [other] = collector.find("GET")
        assert other.trace_id.hex() != TRACE and not other.parent_span_id
        lines = {line["request_id"]: line for line in map(json.loads, server.errors) if "request_id" in line}
        assert lines[headers["x-request-id"]]["trace_id"] == TRACE


def test_what_is_not_sampled_is_not_sent(tmp_path):
    with Collector() as collector, traced(tmp_path, collector.port, "ratio = 0.0\n") as server:
        server.get("/v1/models", parent("00"))
        server.get("/v1/models")
        server.get("/health", parent("01"))
        server.stop()
        assert [span.name for span in collector.spans] == ["GET /health"]


def test_a_collector_that_is_gone_costs_spans_and_no_request(tmp_path):
    with Collector() as collector:
        port = collector.port
    with traced(tmp_path, port) as server:
        until(lambda: server.get("/health")[0] == 200 and "traces can not be sent" in "".join(server.errors))
        with Collector(port) as collector:
            until(lambda: server.get("/health")[0] == 200 and collector.spans)
            until(lambda: "spans were dropped" in "".join(server.errors))


@pytest.mark.parametrize("endpoint", ["https://127.0.0.1", "127.0.0.1:4318"])
def test_an_address_that_can_not_be_used_is_said(tmp_path, endpoint):
    with pytest.raises(RuntimeError, match="traces.endpoint: .*expected an address such as"):
        configured(tmp_path, f'[traces]\nendpoint = "{endpoint}"\n')
