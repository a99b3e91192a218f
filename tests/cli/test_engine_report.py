"""Two readings of vLLM's metrics become the report of the request between them."""

import http.server
import threading

import pytest

from kvferry.cli.up.engine_report import read, report_between
from kvferry.errors import RequestError

BEFORE = """
# TYPE vllm:external_prefix_cache_hits counter
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 100.0
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 7.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="p2p"} 100.0
# TYPE vllm:kvferry_phase_seconds histogram
vllm:kvferry_phase_seconds_sum{engine="0",peer="p",phase="wire",transport="shm"} 0.5
vllm:kvferry_phase_seconds_count{engine="0",peer="p",phase="wire",transport="shm"} 3.0
"""
AFTER = """
# TYPE vllm:external_prefix_cache_hits counter
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 107.0
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 8.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="p2p"} 107.0
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 4096.0
# TYPE vllm:nixl_num_descriptors histogram
vllm:nixl_num_descriptors_sum{engine="0",model_name="m"} 12.0
# TYPE vllm:kvferry_phase_seconds histogram
vllm:kvferry_phase_seconds_sum{engine="0",peer="p",phase="claim",transport="shm"} 0.25
vllm:kvferry_phase_seconds_sum{engine="0",peer="p",phase="wire",transport="shm"} 0.75
vllm:kvferry_phase_seconds_count{engine="0",peer="p",phase="wire",transport="shm"} 4.0
"""


@pytest.fixture
def serve_metrics():
    """A server of these texts, one after the other; its URL."""
    servers = []

    def serve(*texts: str) -> str:
        left = list(texts)

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(left.pop(0).encode())

            def log_message(self, *_):
                """Tests are quiet."""

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_report_is_what_has_changed(serve_metrics):
    url = serve_metrics(BEFORE, AFTER)
    assert report_between(read([url]), read([url])) == {
        "tokens_received": 7,
        "tokens_computed": 1,
        "bytes": 4096,
        "descriptors": 12,
        "transport": "shm",
        "phases_s": {"claim": 0.25, "wire": 0.25},
        "recomputed": "",
    }


def test_engines_are_added_up_and_nothing_is_nothing(serve_metrics):
    one, other = serve_metrics(BEFORE), serve_metrics(AFTER)
    reading = read([one, other])
    assert reading.total("vllm:external_prefix_cache_hits_total") == 207
    report = report_between(reading, reading)
    assert (report["tokens_received"], report["bytes"], report["transport"], report["phases_s"]) == (0, 0, "", {})


def test_a_failed_transfer_is_told(serve_metrics):
    failed = '# TYPE vllm:nixl_num_failed_transfers counter\nvllm:nixl_num_failed_transfers_total{engine="0"} 1.0\n'
    url = serve_metrics("", failed)
    assert report_between(read([url]), read([url]))["recomputed"] == "vLLM has counted a failed transfer"


def test_an_engine_that_does_not_answer_is_named():
    with pytest.raises(RequestError, match=r"no answer from http://127\.0\.0\.1:1"):
        read(["http://127.0.0.1:1"])
