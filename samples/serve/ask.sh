#!/bin/sh
# Every path of a server with curl. URL and KEY name another server and its key.
set -eu
url=${URL:-http://127.0.0.1:8000}
ask() {
    path=$1
    shift
    curl -sS --fail-with-body ${KEY:+-H "Authorization: Bearer $KEY"} "$url$path" "$@"
    echo
}

ask /health
ask /v1/models
model=$(ask /v1/models | python3 -c 'import json, sys; print(next(m["id"] for m in json.load(sys.stdin)["data"] if m["kind"] == "generate"))')

ask /v1/chat/completions -d '{"model": "'"$model"'", "max_tokens": 32, "messages": [{"role": "user", "content": "What is the capital of France?"}]}'
# -N: events as they come.
ask /v1/completions -N -d '{"model": "'"$model"'", "prompt": "Once upon a time", "max_tokens": 16, "stream": true}'
# A conversation whose keys and values stay.
ask /v1/chat/completions -d '{"model": "'"$model"'", "session": "ada", "max_tokens": 16, "messages": [{"role": "user", "content": "Hello"}]}'
ask /v2/models/"$model"/infer -d '{"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["Hello"]}], "parameters": {"max_tokens": 8}}'
ask /metrics | grep pagoda_http_requests_total
