"""A stand-in for llm-d's routing sidecar, which is written in Go.

It follows `pkg/sidecar/proxy` of llm-d/llm-d-router at commit ebab687927f5331c1b39defcb579a07951bce56c: `proxy.go`,
`proxy_helpers.go`, `chat_completions.go` and `errors.go` for every request, `connector_nixlv2.go`,
`status_response_writer.go` and `cached_tokens_usage_rewriter.go` for vLLM, and `connector_sglang.go` for SGLang. It
listens in front of a decode server. Whoever sends a request, which is llm-d's scheduler, names a prefill server in a
header; a request that names none goes to the decode server as it is.

Left out are TLS, tracing, allow lists, data parallelism, encoders, chunked decoding, retries of a prefill request (off
unless configured), MoRI-IO, and the other connectors.
"""
