{{/* what, found, expected */}}
{{- define "kvferry.refuse" -}}
{{- fail (printf "\n\nkvferry: %s; found: %v; expected: %v\n" .what .found .expected) -}}
{{- end -}}

{{/* Options that the chart writes itself, or that would show a key to everybody who can read a pod. */}}
{{- define "kvferry.checkArguments" -}}
{{- $taken := .taken -}}
{{- $place := .place -}}
{{- range .arguments -}}
{{- /* Servers take _ for -, the beginning of an option for it, and vLLM what is behind a dot for a key of its JSON. */ -}}
{{- $option := splitList "=" . | first | splitList "." | first | replace "_" "-" -}}
{{- range $each := $taken -}}
{{- if or (eq $option $each) (and (hasPrefix "--" $option) (gt (len $option) 2) (hasPrefix $option $each)) -}}
{{- include "kvferry.refuse" (dict "what" (printf "an option in %s that the chart sets, or that must not be there" $place) "found" $option "expected" (printf "none of %s" (join " " $taken))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvferry.checkEnvironment" -}}
{{- $place := .place -}}
{{- range .env -}}
{{- if and (regexMatch "(?i)(KEY|TOKEN|SECRET|PASSWORD)$" .name) (hasKey . "value") -}}
{{- include "kvferry.refuse" (dict "what" (printf "a secret in %s, where everybody can read it who can read pods" $place) "found" (printf "%s with a value" .name) "expected" "valueFrom with a secretKeyRef") -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* place, labels: what the API server would refuse, or what would select nothing */}}
{{- define "kvferry.checkLabels" -}}
{{- $name := "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?" -}}
{{- $place := .place -}}
{{- range $label, $value := .labels -}}
{{- if not (regexMatch (printf "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?%s$" $name) $label) -}}
{{- include "kvferry.refuse" (dict "what" (printf "no key of a label in %s" $place) "found" (printf "%q" $label) "expected" "at most 63 letters, digits, -, _ and . behind a domain and / or alone") -}}
{{- end -}}
{{- if not (regexMatch (printf "^(%s)?$" $name) $value) -}}
{{- include "kvferry.refuse" (dict "what" (printf "no value of a label in %s" $place) "found" (printf "%s: %q" $label $value) "expected" "at most 63 letters, digits, -, _ and .") -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* root, place, values, fewest: what engines and routers have in common */}}
{{- define "kvferry.checkComponent" -}}
{{- $values := .values -}}
{{- if and (not (kindIs "invalid" $values.replicas)) $values.autoscaling.enabled -}}
{{- include "kvferry.refuse" (dict "what" (printf "%s has a fixed number of replicas and autoscaling" .place) "found" (printf "%s.replicas %v" .place $values.replicas) "expected" (printf "%s.replicas null, or %s.autoscaling.enabled false" .place .place)) -}}
{{- end -}}
{{- if lt (int (include "kvferry.replicas" (dict "values" $values "default" 1))) (int .fewest) -}}
{{- include "kvferry.refuse" (dict "what" (printf "too few replicas: without %s nothing is answered" .place) "found" (printf "%s.replicas %v" .place $values.replicas) "expected" (printf "at least %d" (int .fewest))) -}}
{{- end -}}
{{- if gt (int $values.autoscaling.minReplicas) (int $values.autoscaling.maxReplicas) -}}
{{- include "kvferry.refuse" (dict "what" (printf "%s.autoscaling has a minimum above its maximum" .place) "found" (printf "minReplicas %v, maxReplicas %v" $values.autoscaling.minReplicas $values.autoscaling.maxReplicas) "expected" "minReplicas of at most maxReplicas") -}}
{{- end -}}
{{- if lt (int (include "kvferry.grace" .)) (int (include "kvferry.neededGrace" .)) -}}
{{- include "kvferry.refuse" (dict "what" (printf "a pod of %s would be killed before it is drained" .place) "found" (printf "terminationGracePeriodSeconds %s with drainTimeoutSeconds %v and preStopSeconds %v" (include "kvferry.grace" .) $values.drainTimeoutSeconds .root.Values.preStopSeconds) "expected" (printf "at least %s, or null" (include "kvferry.neededGrace" .))) -}}
{{- end -}}
{{- $rolling := dig "rollingUpdate" dict $values.strategy | default dict -}}
{{- if and (eq $values.strategy.type "Recreate") $rolling -}}
{{- include "kvferry.refuse" (dict "what" (printf "%s.strategy is two strategies" .place) "found" "type Recreate with rollingUpdate" "expected" "rollingUpdate null") -}}
{{- end -}}
{{- if and $rolling (eq (toString $rolling.maxSurge | trimSuffix "%") "0") (eq (toString $rolling.maxUnavailable | trimSuffix "%") "0") -}}
{{- include "kvferry.refuse" (dict "what" (printf "%s could never be replaced" .place) "found" "maxSurge 0 and maxUnavailable 0" "expected" "one of them above 0") -}}
{{- end -}}
{{- $pods := dict "root" .root "component" .component -}}
{{- $own := append (keys (include "kvferry.podLabels" $pods | fromYaml)) "kvferry.io/role" -}}
{{- range $label, $_ := $values.podLabels -}}
{{- if has $label $own -}}
{{- include "kvferry.refuse" (dict "what" "a label that the chart sets" "found" $label "expected" "other labels in podLabels") -}}
{{- end -}}
{{- end -}}
{{- include "kvferry.checkLabels" (dict "place" (printf "%s.podLabels" .place) "labels" $values.podLabels) -}}
{{- include "kvferry.checkLabels" (dict "place" (printf "%s.nodeSelector" .place) "labels" $values.nodeSelector) -}}
{{- include "kvferry.checkEnvironment" (dict "place" (printf "%s.env" .place) "env" $values.env) -}}
{{- end -}}

{{- define "kvferry.checkToken" -}}
{{- $token := .Values.token -}}
{{- if and $token.existingSecret $token.value -}}
{{- include "kvferry.refuse" (dict "what" "two tokens" "found" "token.existingSecret and token.value" "expected" "one of them, or none") -}}
{{- end -}}
{{- $tokens := without (regexSplit "\\s*\n\\s*" (trim $token.value) -1) "" -}}
{{- if and $token.value (not $tokens) -}}
{{- include "kvferry.refuse" (dict "what" "token.value is empty" "found" "white space" "expected" "a token, or nothing at all") -}}
{{- end -}}
{{- if and (gt (len $tokens) 1) (not (regexMatch "^[\\t\\r\\n -~]*$" $token.value)) -}}
{{- include "kvferry.refuse" (dict "what" "token.value is not text" "found" (printf "%d lines" (len $tokens)) "expected" "one token of printable characters in each line") -}}
{{- end -}}
{{- if gt (len $tokens) 4 -}}
{{- include "kvferry.refuse" (dict "what" "too many tokens in token.value" "found" (printf "%d lines" (len $tokens)) "expected" "at most 4, one in each line") -}}
{{- end -}}
{{- range $value := $tokens -}}
{{- $different := splitList "" $value | uniq | len -}}
{{- if or (lt (len $value) 32) (gt (len $value) 4096) (lt $different 8) -}}
{{- include "kvferry.refuse" (dict "what" "token.value could be guessed" "found" (printf "%d bytes, %d of them different" (len $value) $different) "expected" "32 to 4096 random bytes, such as those of: openssl rand -hex 32") -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvferry.checkEngines" -}}
{{- $engines := list "vllm" "sglang" "transformers" -}}
{{- if not (has .Values.engine $engines) -}}
{{- include "kvferry.refuse" (dict "what" "unknown engine" "found" .Values.engine "expected" (join " or " $engines)) -}}
{{- end -}}
{{- $fullname := include "kvferry.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $fullname) -}}
{{- include "kvferry.refuse" (dict "what" "objects could not have this name, which the release or fullnameOverride gives them" "found" $fullname "expected" "lower case letters, digits and -, a letter first") -}}
{{- end -}}
{{- include "kvferry.checkLabels" (dict "place" "nameOverride" "labels" (dict "app.kubernetes.io/name" (include "kvferry.name" .))) -}}
{{- include "kvferry.checkLabels" (dict "place" "networkPolicy.metricsNamespaceLabels" "labels" .Values.networkPolicy.metricsNamespaceLabels) -}}
{{- include "kvferry.checkLabels" (dict "place" "podMonitor.labels" "labels" .Values.podMonitor.labels) -}}
{{- include "kvferry.checkLabels" (dict "place" "grafanaDashboard.labels" "labels" .Values.grafanaDashboard.labels) -}}
{{- $transports := list "auto" "nixl" "tcp" -}}
{{- if not (has .Values.transport $transports) -}}
{{- include "kvferry.refuse" (dict "what" "no transport between pods" "found" .Values.transport "expected" (join " or " $transports)) -}}
{{- end -}}
{{- if not .Values.model -}}
{{- include "kvferry.refuse" (dict "what" "no model" "found" "model is empty" "expected" "a Hugging Face name, or a folder below /models") -}}
{{- end -}}
{{- if and (hasPrefix "/models/" .Values.model) (not .Values.models.existingClaim) -}}
{{- include "kvferry.refuse" (dict "what" "nothing is mounted at /models" "found" (printf "model %s without models.existingClaim" .Values.model) "expected" "models.existingClaim, or a Hugging Face name") -}}
{{- end -}}
{{- $rdma := .Values.engines.rdma -}}
{{- if ne (not $rdma.resource) (lt (int $rdma.count) 1) -}}
{{- include "kvferry.refuse" (dict "what" "RDMA needs a resource and a count" "found" (printf "engines.rdma.resource %q, engines.rdma.count %v" $rdma.resource $rdma.count) "expected" "both, such as rdma/ib and 1, or neither") -}}
{{- end -}}
{{- /* How many ranks there are is in the server's own options, which have several names: one node has no more than these. */ -}}
{{- $ranks := ternary 1 64 (eq .Values.engine "transformers") -}}
{{- $distance := sub (int .Values.engines.httpPort) (int .Values.engines.transferPort) | int -}}
{{- if and (ge $distance 0) (lt $distance $ranks) -}}
{{- include "kvferry.refuse" (dict "what" "two ports of an engine are one, or could be, since each rank takes one above transferPort" "found" (printf "httpPort %v, transferPort %v" .Values.engines.httpPort .Values.engines.transferPort) "expected" (printf "two ports, httpPort below transferPort or at least %d above" $ranks)) -}}
{{- end -}}
{{- $subPath := .Values.models.subPath -}}
{{- if or (hasPrefix "/" $subPath) (has ".." (splitList "/" $subPath)) -}}
{{- include "kvferry.refuse" (dict "what" "no folder of a claim" "found" (printf "models.subPath %s" $subPath) "expected" "a relative path without .., such as llms/llama") -}}
{{- end -}}
{{- $ours := list "--" "--host" "--port" "--token-file" "--transfer-host" "--transfer-port" "--engine" "--engine-id" "--model" "--served-name" "--transport" "--drain-timeout" "--start-timeout" "--register" "--role" "--advertise-url" "--api-key" -}}
{{- $theirs := list "--" "--api-key" "--admin-api-key" "--host" "--port" "--uds" "--ssl-keyfile" "--ssl-certfile" "--grpc" "--headless" "--kv-transfer-config" "--worker-extension-cls" "--shutdown-timeout" "--disaggregation-mode" "--disaggregation-transfer-backend" "--disaggregation-bootstrap-port" "--disaggregation-ib-device" -}}
{{- range $role := list "prefill" "decode" -}}
{{- $values := index $.Values $role -}}
{{- include "kvferry.checkArguments" (dict "place" (printf "%s.extraArgs" $role) "arguments" $values.extraArgs "taken" $ours) -}}
{{- include "kvferry.checkArguments" (dict "place" (printf "%s.engineArgs" $role) "arguments" $values.engineArgs "taken" $theirs) -}}
{{- if and $values.engineArgs (eq $.Values.engine "transformers") -}}
{{- include "kvferry.refuse" (dict "what" "engineArgs are for another engine's server" "found" (printf "%s.engineArgs with engine %s" $role $.Values.engine) "expected" (printf "%s.extraArgs" $role)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvferry.checkRouter" -}}
{{- $router := .Values.router -}}
{{- $ours := list "--host" "--port" "--token-file" "--accept-registrations" "--drain-timeout" "--log-format" "--api-key" "--engine-api-key" "--kubernetes-selector" "--kubernetes-namespace" "--kubernetes-role-label" "--kubernetes-port" -}}
{{- include "kvferry.checkArguments" (dict "place" "router.extraArgs" "arguments" $router.extraArgs "taken" $ours) -}}
{{- if and $router.autoscaling.enabled (not (dig "requests" "cpu" "" $router.resources)) -}}
{{- include "kvferry.refuse" (dict "what" "router.autoscaling is a percentage of the CPU that is requested" "found" "no router.resources.requests.cpu" "expected" "one, such as \"1\"") -}}
{{- end -}}
{{- if and .Values.podMonitor.enabled .Values.networkPolicy.enabled (not .Values.networkPolicy.metricsNamespaceLabels) -}}
{{- include "kvferry.refuse" (dict "what" "the network policy keeps Prometheus from the engines" "found" "podMonitor.enabled without networkPolicy.metricsNamespaceLabels" "expected" "labels of Prometheus' namespace, such as {kubernetes.io/metadata.name: monitoring}, or networkPolicy.enabled false") -}}
{{- end -}}
{{- end -}}

{{- define "kvferry.check" -}}
{{- include "kvferry.checkEngines" . -}}
{{- include "kvferry.checkToken" . -}}
{{- include "kvferry.checkRouter" . -}}
{{- /* A decode server of SGLang computes no prompt. */ -}}
{{- include "kvferry.checkComponent" (dict "root" . "place" "prefill" "component" "prefill" "values" .Values.prefill "fewest" (ternary 1 0 (eq .Values.engine "sglang"))) -}}
{{- include "kvferry.checkComponent" (dict "root" . "place" "decode" "component" "decode" "values" .Values.decode "fewest" 1) -}}
{{- include "kvferry.checkComponent" (dict "root" . "place" "router" "component" "router" "values" .Values.router "fewest" 1) -}}
{{- end -}}
