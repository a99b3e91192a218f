"""What llm-d's scheduler reads of an engine's metrics, by `metrics/factories.go` of the same commit (below
`pkg/epp/framework/plugins/datalayer/extractor`). A fifth one, of adapters, is there where adapters are."""

SCHEDULED_BY = (
    *("vllm:num_requests_waiting", "vllm:num_requests_running"),
    *("vllm:kv_cache_usage_perc", "vllm:cache_config_info"),
)
